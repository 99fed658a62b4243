"""Parts of ``train_multihost.py`` that need no other host: modules, the model's text, traces.

With ``dynamiq-jax run --ready multihost_ready`` the process that waits for the next start has
imported this file, and so has both behind it. ``sys.argv`` is that of ``train_multihost.py``, whose
``--model`` it takes. Nothing here may ask JAX for devices: a process that has them cannot join
others.
"""

import sys
from functools import partial

import jax
import train_multihost
from llm_model import CONFIGS, init_params, make_forward

given = dict(zip(sys.argv, sys.argv[1:], strict=False))
CONFIG = CONFIGS[given.get("--model", "tiny")]

train_multihost.load_corpus(CONFIG.vocab_size)
make_forward(CONFIG)
jax.eval_shape(partial(init_params, CONFIG), jax.eval_shape(lambda: jax.random.key(0)))
