"""flax/examples/mnist: a Flax NNX network with batch norm and dropout, under `nnx.jit`."""

import dataclasses

from clients.client import IMPORT, Change, Client, Trained
from clients.stubs import images, stand_in

STEP = "  grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)\n"
OPTIONS = "has_aux=True, axis_name='data', compression=METHOD"
EXPLICIT = Client(
    "examples/mnist/train.py",
    mesh="8 data, Explicit",
    step="jit_train_step",
    patch=(IMPORT, Change(STEP, f"  grad_fn = dq.nnx.value_and_grad(loss_fn, {OPTIONS})\n")),
    options={"explicit": True},
    exclude="conv",  # JAX has no rule for convolutions by what is typed as reduced
)
AUTO = Client(
    "examples/mnist/train.py",
    mesh="8 data, Auto",
    step="jit_train_step",
    patch=(
        IMPORT,
        Change("BatchNorm(32, rngs=rngs)", "BatchNorm(32, rngs=rngs, axis_name='data')"),
        Change("BatchNorm(64, rngs=rngs)", "BatchNorm(64, rngs=rngs, axis_name='data')"),
        Change(STEP, f"  grad_fn = dq.nnx.value_and_grad(loss_fn, aux='rows', {OPTIONS})\n"),
    ),
)
WITHOUT = tuple(
    Change(f"{name} = nnx.Dropout(rate=0.025)", f"{name} = nnx.Dropout(0)")
    for name in ("self.dropout1", "self.dropout2")
)
VARIANTS = {
    "Auto": AUTO,
    "Auto, no dropout": dataclasses.replace(AUTO, setting=WITHOUT),
    "Explicit": EXPLICIT,
}


def train(steps: int, explicit: bool = False) -> Trained:
    """Trains as the trainer's loop does, on a mesh: it is written for one device."""
    import jax
    from flax import nnx

    stand_in("tensorflow", "tensorflow_datasets", "tensorboardX", "flax.metrics.tensorboard")
    import train as trainer

    kinds = jax.sharding.AxisType
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kinds.Explicit if explicit else kinds.Auto,))
    with jax.set_mesh(mesh):
        model = trainer.CNN(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, trainer.optax.sgd(0.02, 0.9), wrt=nnx.Param)
        loss = nnx.metrics.Average("loss")
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=loss)
        rngs = nnx.Rngs(0)
        for part in (model, optimizer, metrics, rngs):
            nnx.update(part, jax.device_put(nnx.state(part), jax.P()))
        model.train()
        losses = []
        for batch in images(steps, 32, 28, 1, 10):
            batch = jax.device_put(batch, jax.P("data"))
            trainer.train_step(model, optimizer, metrics, batch, rngs)
            losses.append(float(metrics.compute()["loss"]))
            metrics.reset()
    return Trained(losses, nnx.state((model, optimizer)))
