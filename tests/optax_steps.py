"""Steps of optax on the devices of a mesh, and on one device."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P
from workers import WHOLE, put

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.core.axis import Axis, axis_names


def of_batch(loss_fn, axes="data"):
    """The gradients of every worker's batch, of (params, opt_state, x)."""
    return lambda params, _, x: jax.grad(loss_fn)(Axis(axis_names(axes)).to_varying(params), x)


def stepper(optimizer, state, grads_of, mesh, *, axes="data", specs=WHOLE, check_vma=True):
    """jit of (params, opt_state, x) -> (params, opt_state) under a map."""
    splits = dq.optax.state_specs(state)

    def step(params, opt_state, x):
        grads = grads_of(params, opt_state, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        with jax.numpy_dtype_promotion("standard"):
            return optax.apply_updates(params, updates), opt_state

    maps = {"in_specs": (specs, splits, P(axes)), "out_specs": (specs, splits)}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **maps))


def train(step, params, state, batches, mesh, axes="data"):
    """(params, opt_state) after a step of each batch; params begin where steps leave them."""
    with jax.set_mesh(mesh):
        params = put(params, mesh)
        for x in batches:
            params, state = step(params, state, put(x, mesh, P(axes)))
    return params, state


def plain(optimizer, loss_fn, params, batches):
    """Parameters after training on one device, without any reduction."""
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    for x in batches:
        params, state = step(params, state, x)
    return params


def saved_and_restored(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        # As NumPy arrays: orbax refuses the old shardings where there are other devices.
        shapes = checkpointer.metadata(folder / "state").item_metadata.tree
        as_numpy = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
        return checkpointer.restore(folder / "state", as_numpy)
