"""Saves the optimizer's state with orbax, and restores it on half of the workers.

    python examples/recipes/checkpoint.py

prints

    a memory of 4 workers
"""

import os
import tempfile

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType
from start import mesh, params

import dynamiq_jax as dq
import dynamiq_jax.optax

compression = dq.Compression(dq.ErrorFeedback(dq.DynamiQ()), min_bucket_bytes=0)
reduction = dq.optax.all_reduce("data", compression=compression)
optimizer = optax.chain(reduction, optax.adamw(1e-3))
opt_state = dq.optax.init(optimizer, params, mesh)
folder = os.path.join(tempfile.mkdtemp(), "step-100")
checkpointer = ocp.StandardCheckpointer()
checkpointer.save(folder, {"params": params, "opt_state": opt_state})
checkpointer.wait_until_finished()

# Later, on half of the workers, as NumPy arrays: orbax refuses shardings of other devices.
half = dq.make_mesh((mesh.size // 2,), ("data",), axis_types=(AxisType.Auto,))
tree = checkpointer.metadata(folder).item_metadata.tree
arrays = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree)
saved = checkpointer.restore(folder, arrays)
fresh = dq.optax.init(optimizer, saved["params"], half)
opt_state = dq.optax.restore_state(saved["opt_state"], fresh)
# UserWarning: opt_state: 0/memory was reset, from 8 to 4 workers
print(f"a memory of {opt_state[0].memory.value[0].residual.shape[0]} workers")
