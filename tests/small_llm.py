"""The language model of the examples at its smallest, and a run of it."""

from dataclasses import replace

import llm_model
import numpy as np
import train_llm
from workers import auto_mesh

CONFIG = replace(
    llm_model.CONFIGS["tiny"],
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden=128, seq_len=16,
)  # fmt: skip


def make_run(**fields):
    """A run of 8 workers, for the parts of the examples that take one."""
    plain = {"corpus": None, "mesh": auto_mesh(), "worker_grads": None, "seed": 0, "console": None}
    return train_llm.Run(**plain | {"model": CONFIG, "loss_fn": None, "measure_every": 1} | fields)


def sequences(config=CONFIG):
    """Two for each of 8 workers."""
    return np.random.default_rng(0).integers(0, 32, (16, config.seq_len + 1), np.int32)
