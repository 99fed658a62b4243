"""Parts of ``train_multihost.py`` that need no other host: its modules and the tiny model's text.

With ``dynamiq-jax run --ready multihost_ready`` the process that waits for the next start has
imported this file, and so has both behind it.
"""

import train_multihost
from llm_model import CONFIGS

train_multihost.load_corpus(CONFIGS["tiny"].vocab_size)
