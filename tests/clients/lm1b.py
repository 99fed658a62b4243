"""flax/examples/lm1b: a Flax Linen transformer with logical axes, dropout and a masked loss."""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import Batches, locals_at_the_end, stand_in_for_tensorflow, token_rows

UTILS = "examples/lm1b/utils.py"
ROWS, LENGTH, VOCABULARY = 16, 32, 256

IMPORT = Change("from jax import random\n", "from jax import random\nimport dynamiq_jax as dq\n")


GRADIENTS = Change(
    "  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)\n",
    """  grad_fn = dq.value_and_grad(loss_fn, has_aux=True, aux='rows', axis_name=AXES,
      weight=lambda _: weights.sum(), closed_specs=P(AXES), compression=METHOD)
""",
)


def patch(axes: str, options: str = "", *more: Change) -> tuple[Change, ...]:
    """The loss closes over inputs, weights and a key."""
    new = GRADIENTS.new.replace("AXES", axes).replace("compression", f"{options}compression")
    return (IMPORT, Change(GRADIENTS.old, new), *more)


SPECS = Change(
    "  data_sharding = NamedSharding(",
    "  global specs; specs = state_mesh_annotations.params\n  data_sharding = NamedSharding(",
)
UPDATES = (
    *patch("'data'", "unreduced=True, "),
    Change(
        "  state, state_mesh_annotations = utils.setup",
        """  optimizer = dq.optax.sharded(optimizer, 'data', compression=METHOD, mesh=mesh)
  state, state_mesh_annotations = utils.setup""",
    ),
    Change("import functools\n", "import functools\nimport dynamiq_jax as dq\n", UTILS),
    Change(
        """    state = jax.jit(
        init_train_state_partial,""",
        """    state_mesh_annotations = state_mesh_annotations.replace(
        opt_state=jax.tree.map(lambda p: jax.NamedSharding(mesh, p), dq.optax.state_specs(
            jax.eval_shape(unbox_logicallypartioned_trainstate, abstract_state.opt_state))))
    state = jax.jit(
        init_train_state_partial,""",
        UTILS,
    ),
)
PATCH = patch("'data'")
SHARDED = patch("('data', 'fsdp')", "specs=specs, ", SPECS)
OWN = Client("examples/lm1b/train.py", "8 data, Auto", "jit_train_step", PATCH)
VARIANTS = {
    "DP": OWN, "DP, no dropout": dataclasses.replace(OWN, options={"dropout": 0.0}),
    "sharded updates, no dropout": dataclasses.replace(OWN, patch=UPDATES,
        options={"dropout": 0.0}),
    "FSDP, no dropout": dataclasses.replace(OWN, patch=SHARDED, mesh="8 fsdp, Auto",
        options={"shape": (1, 8, 1), "over": ["data", "fsdp"], "dropout": 0.0}),
    "DP × TP, no dropout": dataclasses.replace(OWN, patch=SHARDED, mesh="4 data × 2 tensor, Auto",
        options={"shape": (4, 1, 2), "dropout": 0.0}),
}  # fmt: skip


def train(
    steps: int,
    shape: tuple[int, ...] = (8, 1, 1),
    over: Sequence[str] = ("data",),
    dropout: float = 0.1,
) -> Trained:
    stand_in_for_tensorflow("input_pipeline", "clu")
    import train as trainer
    from configs import default

    inputs = token_rows(steps, ROWS, LENGTH, VOCABULARY)
    losses: list[float] = []

    def watch(seen: dict[str, Any]) -> None:
        if "metrics" in seen:
            losses.append(float(seen["metrics"]["loss"] / seen["metrics"]["denominator"]))

    batches = ({"inputs": rows, "targets": rows} for rows in inputs)
    batches = Batches(batches, "train_and_evaluate", watch)
    prompt = SimpleNamespace(numpy=lambda: np.array([1, 2, 0]))
    encoder = SimpleNamespace(vocab_size=lambda: VOCABULARY, tokenize=lambda _: prompt)
    pipeline: Any = sys.modules["input_pipeline"]
    pipeline.get_datasets = lambda **_: (batches, None, None, encoder)
    config = default.get_config()
    names = ("ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism")
    config.update(dict(zip(names, shape, strict=True)) | {"data_sharding": list(over)})
    config.update(num_layers=2, qkv_dim=128, emb_dim=128, mlp_dim=512, num_heads=8)
    config.update(max_target_length=LENGTH, max_eval_target_length=LENGTH, use_bfloat16=False)
    config.update(save_checkpoints=False, num_train_steps=steps + 2)
    config.update(eval_every_steps=10**9, max_predict_length=4)
    config.update(dropout_rate=dropout, attention_dropout_rate=dropout)
    config.update(warmup_steps=5, learning_rate=0.005)
    config.update(per_device_batch_size=ROWS // 8, restore_checkpoints=False)
    trainer.evaluate = lambda **_: {"loss": 0.0}
    trainer.generate_prediction = lambda **_: ""
    found = locals_at_the_end(trainer.train_and_evaluate, config, tempfile.mkdtemp())
    return Trained(losses, found["state"], found["state"].params)
