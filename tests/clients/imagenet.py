"""flax/examples/imagenet: a Flax Linen ResNet with batch norm, by `jax.pmap`."""

import dataclasses
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from clients.client import IMPORT, Change, Client, Trained
from clients.stubs import StandIn, images, stand_in_for_tensorflow

PMEAN = Change(
    "    grads = lax.pmean(grads, axis_name='batch')",
    "    grads = dq.pmean(grads, axis_name='batch', compression=METHOD)",
)
OWN = Client("examples/imagenet/train.py", "8 batch, pmap", "jit__fun", (IMPORT, PMEAN))
SCALED = dataclasses.replace(
    OWN,
    mesh="8 batch, pmap, float16",
    patch=(
        IMPORT,
        Change(
            "{'params': params, 'batch_stats': state.batch_stats},\n        batch['image'],\n",
            "{'params': dq.fsdp(params, 'batch', compression=METHOD), "
            "'batch_stats': state.batch_stats},\n        batch['image'],\n",
        ),
        Change("loss_fn, has_aux=True, axis_name='batch'\n", "loss_fn, has_aux=True\n"),
    ),
    # The trainer scales on GPUs only.
    setting=(Change("config.half_precision and platform == 'gpu'", "config.half_precision"),),
    options={"half_precision": True},
)
UPDATES = (
    IMPORT,
    Change(f"{PMEAN.old}\n", ""),
    Change(
        "  state = restore_checkpoint(state, workdir)\n",
        """  tx = dq.optax.sharded(state.tx, 'batch', compression=METHOD)
  params = jax_utils.replicate(state.params)
  state = state.replace(tx=tx, opt_state=jax.pmap(tx.init, axis_name='batch')(params))
  axes = state.replace(
      step=None, params=None, batch_stats=None, dynamic_scale=None, opt_state=0)
  state = restore_checkpoint(state, workdir)
""",
    ),
    Change(
        "      in_axes=(None, 0),\n      out_axes=(None, 0),\n",
        "      in_axes=(axes, 0),\n      out_axes=(axes, 0),\n",
    ),
)
VARIANTS = {
    "f32": OWN,
    "DynamicScale": SCALED,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
}


def train(steps: int, half_precision: bool = False) -> Trained:
    stand_in_for_tensorflow("tensorflow_datasets", "input_pipeline", "clu")
    import train as trainer
    from configs import default

    batches = [
        {name: SimpleNamespace(_numpy=lambda x=x: x) for name, x in batch.items()}
        for batch in images(steps + 4, 32, 32, 3, 10)
    ]
    pipeline: Any = sys.modules["input_pipeline"]
    pipeline.create_split = lambda *_, **__: batches
    losses: list[float] = []
    writer: Any = StandIn()
    writer.write_scalars = lambda step, summary: losses.append(float(summary["train_loss"]))
    trainer.metric_writers.create_default_writer = lambda **_: writer
    trainer.save_checkpoint = lambda state, workdir: None
    builder: Any = StandIn()
    split = SimpleNamespace(num_examples=32 * 1000)
    builder.info.splits = {"train": split, "validation": split}
    trainer.tfds.builder = lambda _: builder
    config = default.get_config()
    config.update(model="_ResNet1", batch_size=32, num_train_steps=steps, log_every_steps=1)
    config.update(warmup_epochs=0.0001, num_epochs=1.0, steps_per_eval=1, profile=False)
    config.half_precision = half_precision
    state = trainer.train_and_evaluate(config, tempfile.mkdtemp())
    return Trained(losses, (state.params, state.opt_state, state.batch_stats))
