"""Parts of ``train_multihost.py`` that need no other host: modules, the tiny model's text, traces.

With ``dynamiq-jax run --ready multihost_ready`` the process that waits for the next start has
imported this file, and so has both behind it. Nothing here may ask JAX for devices: a process that
has them cannot join others.
"""

from functools import partial

import jax
import train_multihost
from llm_model import CONFIGS, init_params, make_forward

CONFIG = CONFIGS["tiny"]

train_multihost.load_corpus(CONFIG.vocab_size)
make_forward(CONFIG)
jax.eval_shape(partial(init_params, CONFIG), jax.eval_shape(lambda: jax.random.key(0)))
