"""nanodo: a Flax Linen transformer, FSDP over "data" on Auto axes; the loss closes over tokens."""

import dataclasses
import tempfile
from types import SimpleNamespace
from typing import Any

from clients.client import Change, Client, Trained
from clients.stubs import Batches, StandIn, locals_at_the_end, stand_in_for_tensorflow, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

IMPORT = Change("import functools\n", "import functools\nimport dynamiq_jax as dq\n")
CALL = "      get_loss_fn(in_BxL, state.apply_fn, c), has_aux=True\n"


def patch(*options: str) -> tuple[Change, ...]:
    """The loss's weight is its number of tokens, and its auxiliary results are means but for it."""
    own = "".join(f",\n      {x}" for x in options)
    new = f"""{CALL[:-1]}, axis_name="data", mesh=mesh,
      weight=lambda _: data.get_in_out(in_BxL)[2].sum(), closed_specs=P("data"),
      aux=loss_lib.LossAuxData("sum", "mean", "mean"), compression=METHOD{own}
"""
    old = "  grad_fn = jax.value_and_grad(\n"
    return (IMPORT, Change(old, old.replace("jax.", "dq.")), Change(CALL, new))


SHARDED = (
    *patch("specs=specs"),
    Change(
        "            mesh=mesh,\n        ),\n",
        "            mesh=mesh, specs=shardings.params,\n        ),\n",
    ),
    Change("    mesh: Mesh | None = None,\n", "    mesh: Mesh | None = None, specs=None,\n"),
)
UPDATES = (
    *patch("unreduced=True"),
    Change(
        "      step=state.opt_state.gradient_step + 1,",
        "      step=state.opt_state.inner.gradient_step + 1,",
    ),
    Change(
        "  metrics = metrics_lib.get_metrics(aux_data, c, loss, state, grads",
        "  state = state.replace(opt_state=state.opt_state.inner)\n"
        "  metrics = metrics_lib.get_metrics(aux_data, c, loss, state, state.opt_state.acc_grads",
    ),
    Change(
        "        tx=optimizer.get_optimizer(c.opt),\n",
        """        tx=dq.optax.sharded(optimizer.get_optimizer(c.opt), "data", mesh=mesh,
            compression=METHOD),
""",
    ),
    Change(
        "  shardings = nn.get_sharding(params, mesh)\n",
        """  shardings = nn.get_sharding(params, mesh).replace(opt_state=jax.tree.map(
      lambda p: NamedSharding(mesh, p), dq.optax.state_specs(params.opt_state)))
""",
    ),
)
"""It logs 0 as the gradient's norm; ``opt_state.norm`` has it."""
OWN = Client(
    "nanodo/train.py", "8 data, Auto", "jit__train_step", patch(), package="nanodo",
    options={"fsdp": False}, repository="google-deepmind/nanodo", commit="10aefde"
)  # fmt: skip
VARIANTS = {
    "DP": OWN,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(OWN, patch=SHARDED, options={"fsdp": True}),
}


SMALL = {"D": 128, "H": 8, "L": LENGTH, "N": 2, "F": 512, "dtype": "float32"}
LARGE = {"D": 2048, "H": 16, "L": 1024, "N": 6, "F": 8192, "dtype": "bfloat16"}


def train(steps: int, fsdp: bool, large: bool = False) -> Trained:
    import jax

    model, vocabulary = (LARGE, 32_000) if large else (SMALL, VOCABULARY)
    rows = 3 * jax.device_count() if large else ROWS
    names = "grain", "grain.python", "tensorflow_datasets", "sentencepiece", "clu"
    stand_in_for_tensorflow(*names)
    from nanodo import train as trainer
    from nanodo.configs import default

    tokens = token_rows(steps + 1, rows, model["L"], vocabulary)
    losses: list[float] = []
    data: Any = trainer.data
    data.get_py_tokenizer = lambda _: SimpleNamespace(GetPieceSize=lambda: vocabulary)
    data.py_batched_tfds = lambda **_: Batches(tokens, "train_and_evaluate")
    evaluate: Any = trainer.evaluate
    evaluate.Evaluator = lambda *_: SimpleNamespace(eval=lambda params: {})
    writer: Any = StandIn()
    writer.write_scalars = lambda step, own: losses.append(own.get("train_loss", None))
    trainer.metric_writers.create_default_writer = lambda *_, **__: writer
    config = default.get_config()
    config.model.update(**model, fsdp_enabled=fsdp)
    config.opt.update(
        num_train_steps=1000, warmup_steps=5, peak_learning_rate=1e-3 if large else 0.005
    )
    config.update(batch_size=rows, checkpoint=False, workdir=tempfile.mkdtemp())
    config.update(eval_every_steps=10**9, log_internal_metrics=False)
    found = locals_at_the_end(trainer.train_and_evaluate, config)
    state = found["trainer"].state
    return Trained([x for x in losses if x is not None], state, state.params)
