"""Saves nnx.state(optimizer) with orbax, and restores it on half of the workers.

    python examples/recipes/nnx_checkpoint.py

prints

    loss 0.346
    step 12
"""

import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from nnx_optimizer import Net, optimizer, rule

import dynamiq_jax as dq

handler, folder = ocp.StandardCheckpointHandler(), tempfile.mkdtemp()
with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
    manager.save(100, args=ocp.args.StandardSave(nnx.state(optimizer)))

half = jax.devices()[: jax.device_count() // 2]
with jax.set_mesh(dq.make_mesh((len(half),), ("data",), devices=half)):
    optimizer = nnx.Optimizer(Net(nnx.Rngs(0)), rule, wrt=nnx.Param)
with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
    # As NumPy arrays: orbax refuses shardings of other devices.
    arrays = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), manager.item_metadata(100))
    saved = manager.restore(100, args=ocp.args.StandardRestore(arrays))
    optimizer = dq.optax.restore_state(saved, optimizer)  # not nnx.state(optimizer)
print(f"step {optimizer.step[...]}")
