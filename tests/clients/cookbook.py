"""JAX's training cookbook: a transformer on Explicit axes, FSDP, a loss that closes over its batch.

Its parameters are in `jax.ref`s, and so is its state.
"""

import importlib.util
import sys
from pathlib import Path

from clients.client import Change, Client, Trained

FILE = "docs/the-training-cookbook.py"
OWN = Client(
    repository="jax-ml/jax",
    commit="cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
    folder=FILE,
    mesh="8 fsdp, Explicit",
    step="jit_train_step",
    exclude="pos_embed",  # JAX has no rule for the sum of examples and what is typed as reduced
    patch=(
        Change(FILE, "import jax\n", "import jax\nimport dynamiq_jax as dq\n"),
        Change(
            FILE,
            "loss, grad = jax.value_and_grad(loss_fn)(params)",
            "loss, grad = dq.value_and_grad(loss_fn, axis_name='fsdp', method=METHOD)(params)",
        ),
    ),
)
VARIANTS = {"FSDP": OWN}


def train(steps: int) -> Trained:
    import jax

    file = Path(sys.path[0]) / "the-training-cookbook.py"
    spec = importlib.util.spec_from_file_location("cookbook", file)
    trainer = importlib.util.module_from_spec(spec)
    sys.modules["cookbook"] = trainer
    spec.loader.exec_module(trainer)
    trainer.time.sleep = lambda _: None
    config = trainer.Config(
        num_layers=2,
        embed_dim=128,
        mlp_dim=512,
        num_heads=8,
        head_dim=16,
        seq_length=32,
        dtype="float32",
        learning_rate=1e-3,
    )
    state = jax.tree.map(jax.ref.new_ref, trainer.init_train_state(config))
    batches = trainer.get_dataset_on_device(config)
    losses = [
        float(trainer.train_step(config, state, next(batches))["train_loss"]) for _ in range(steps)
    ]
    return Trained(losses, jax.tree.map(lambda ref: ref[...], state))
