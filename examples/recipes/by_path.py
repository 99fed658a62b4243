"""Methods chosen by the path of a leaf.

    python examples/recipes/by_path.py

prints

    ['hidden']['kernel']  256x1024  float32  compressed, bucket 0  286,720  5.000
    ['norm']['scale']  1024  float32  exact: excluded  7,168  32.000
    ['out']['kernel']  1024x8  float32  compressed, bucket 1  28,112  15.688
    total  322,000  5.425
    loss 0.821
"""

import jax
from start import batches, loss_fn, mesh, params

import dynamiq_jax as dq


def by_path(path, leaf):
    return dq.DynamiQ(bits=8 if path == "out/kernel" else 5)


compression = dq.Compression(by_path, exclude="norm|router|embed", min_bucket_bytes=0)
compression.explain(params, mesh.size)
f = jax.jit(dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", compression=compression))
loss, grads = f(params, batches[0])
print(f"loss {loss:.3f}")
