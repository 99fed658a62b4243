"""JAX's tutorial of autodiff on Explicit axes: micro-batches whose gradients stay unreduced."""

from clients.client import Change, Client, Trained

FILE = "docs/new_docs/301/sharding-ad.md"
REDUCED = "grads = jax.reshard(grad_acc, jax.P())        # the one AllReduce"
VARIANTS = {
    "micro-batches": Client(
        repository="jax-ml/jax",
        commit="cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
        folder=FILE,
        mesh="8 X, Explicit",
        step="jit_step",
        patch=(
            Change(
                FILE,
                "def predict(stacked_ws, xs):",
                "import dynamiq_jax as dq\ndef predict(stacked_ws, xs):",
            ),
            Change(FILE, REDUCED, "grads = dq.psum(grad_acc, 'X', method=METHOD)"),
        ),
    )
}


def train(steps: int) -> Trained:
    """Runs the tutorial's last example with larger arrays."""
    import sys
    from pathlib import Path

    import jax
    import jax.numpy as jnp

    text = (Path(sys.path[0]) / "sharding-ad.md").read_text()
    start = text.index("{code-cell}", text.index("## Capstone")) + len("{code-cell}\n")
    end = text.index("stacked_ws = jax.device_put", start)
    names = {"jax": jax, "jnp": jnp}
    losses = []
    with jax.set_mesh(jax.make_mesh((8,), ("X",))):
        exec(compile(text[start:end], FILE, "exec"), names)
        ws = jnp.stack([jnp.eye(128) / 2] * 3)
        ws += 0.02 * jax.random.normal(jax.random.key(0), ws.shape)
        xs = 0.05 * jax.random.normal(jax.random.key(1), (5, 16, 128))
        xs = jax.device_put(xs, jax.P(None, "X", None))
        total = jax.jit(lambda ws, xs: jax.vmap(names["loss3"], (None, 0))(ws, xs).sum())
        for _ in range(steps):
            losses.append(float(total(ws, xs)))
            ws = names["step"](jax.device_put(ws, jax.P(reduced={"X"})), xs)
    return Trained(losses, ws)
