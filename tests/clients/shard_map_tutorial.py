"""JAX's tutorial of `jax.shard_map`: its data-parallel network, the gradient outside of the map."""

import dataclasses

from clients.client import Change, Client, Trained

ABOVE = "# adapt the loss function to sum the losses across devices\n"
IMPORT = Change(f"{ABOVE}@jax.shard_map", f"{ABOVE}import dynamiq_jax as dq\n@jax.shard_map")
OWN = Client(
    "docs/notebooks/shard_map.py",
    mesh="8 batch, Explicit; shard_map",
    step="jit_step",
    patch=(
        Change(f"{ABOVE}@jax.shard_map(out_specs=P())\n", f"{ABOVE}import dynamiq_jax as dq\n"),
        Change(
            """  predictions = predict(params, inputs)  # use reference 'predict`
  local_loss = jnp.mean(jnp.sum((predictions - targets)**2, axis=-1))
  return jax.lax.pmean(local_loss, 'batch')
""",
            """  predictions = predict(params, inputs)  # use reference 'predict`
  return jnp.mean(jnp.sum((predictions - targets)**2, axis=-1))
@jax.shard_map(out_specs=P())
def grad_dp(params, local_batch):
  local = jax.lax.pcast(params, 'batch', to='varying')
  return dq.pmean(jax.value_and_grad(loss_dp)(local, local_batch), 'batch', compression=METHOD)
""",
        ),
    ),
    repository="jax-ml/jax",
    commit="cec06d116c05f0d52adfceee3d3b730fdbcb0ce5",
)
END = "  return jax.lax.pmean(local_loss, 'batch')\n\n\n# -\n\n# We can"
GRAD = "\ngrad_dp = dq.value_and_grad(loss_dp, axis_name='batch', compression=METHOD)\n\n# -"
OUTSIDE = dataclasses.replace(OWN, patch=(IMPORT, Change(END, END.replace("\n\n# -", GRAD))))
VARIANTS = {"pmean in the map": OWN, "gradient outside": OUTSIDE}


def train(steps: int) -> Trained:
    """Runs the tutorial's section on neural networks, then steps of its gradient."""
    import sys
    from functools import partial
    from pathlib import Path

    import jax
    from jax.sharding import NamedSharding

    text = (Path(sys.path[0]) / "shard_map.py").read_text()
    start, end = text.index("# ### Neural networks"), text.index("# We can check that the loss and")
    section = text[start:end]
    names = {"NamedSharding": NamedSharding, "partial": partial, "tree_map": jax.tree.map}
    names |= {"tree_all": jax.tree.all, "jax": jax}
    exec(section, names)
    value_and_grad = names.get("grad_dp", jax.value_and_grad(names["loss_dp"]))

    @jax.jit
    def step(params, batch):
        loss, grads = value_and_grad(params, batch)
        return loss, jax.tree.map(lambda p, g: p - 2e-3 * g, params, grads)

    losses, params = [], names["params"]
    for _ in range(steps):
        loss, params = step(params, names["batch"])
        losses.append(float(loss))
    return Trained(losses, params)
