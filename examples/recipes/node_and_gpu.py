"""Two axes, the last one with the fast links: 16 bits inside a host, 5 between hosts.

    python examples/recipes/node_and_gpu.py

prints

    ['hidden']['kernel']  256x1024  float32  compressed, bucket 0  827,563  14.432
    ['norm']['scale']  1024  float32  exact: size 1024 < min_leaf_size 4096  7,168  32.000
    ['out']['kernel']  1024x8  float32  compressed, bucket 0  25,861  14.432
    total  860,592  14.498
    of it on outer axes  49,584  0.835
    loss 0.821
"""

import jax
from jax.sharding import AxisType
from start import batches, loss_fn, params

import dynamiq_jax as dq

axes = ("node", "gpu")
mesh = dq.make_mesh((2, -1), axes, axis_types=(AxisType.Auto,) * 2)
topology = dq.Hierarchical(outer=dq.Butterfly())  # what None means among processes
compression = dq.Compression(dq.DynamiQ(bits=5), topology=topology, min_bucket_bytes=0)
grad_fn = dq.value_and_grad(  # 1: was jax.value_and_grad(loss_fn)
    loss_fn, mesh=mesh, axis_name=axes, compression=compression
)
compression.check_agreement(params, mesh, axes)  # 2: new; names what differs
compression.explain(params, mesh.devices.shape)
loss, grads = jax.jit(grad_fn)(params, batches[0])
print(f"loss {loss:.3f}")
