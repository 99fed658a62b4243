"""JAX's example spmd_mnist_classifier_fromscratch: data parallelism on an Explicit axis."""

from clients.client import Change, Client, Trained
from clients.stubs import images, stand_in

FILE = "examples/spmd_mnist_classifier_fromscratch.py"
OWN = Client(
    repository="jax-ml/jax",
    commit="cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
    folder=FILE,
    mesh="8 batch, Explicit",
    step="jit_train_step",
    patch=(
        Change(FILE, "import jax\n", "import jax\nimport dynamiq_jax as dq\n"),
        Change(
            FILE,
            "grads = grad(loss)(params, batch)",
            "_, grads = dq.value_and_grad(loss, axis_name='batch', method=METHOD)(params, batch)",
        ),
    ),
)
VARIANTS = {"as it is": OWN}


def train(steps: int) -> Trained:
    """Trains as the script's main part does; its steps return no loss."""
    import jax
    import numpy as np

    stand_in("datasets")
    import spmd_mnist_classifier_fromscratch as trainer

    trainer.step_size = 0.02
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    params = jax.device_put(
        trainer.init_random_params(0.1, [784, 256, 256, 10]), jax.NamedSharding(mesh, jax.P())
    )
    losses = []
    with jax.set_mesh(mesh):
        for batch in images(steps, 32, 28, 1, 10):
            rows = batch["image"].reshape(32, -1), np.eye(10, dtype=np.float32)[batch["label"]]
            rows = jax.device_put(rows, jax.P("batch"))
            losses.append(float(jax.jit(trainer.loss)(params, rows)))
            params = trainer.train_step(params, rows)
    return Trained(losses, params)
