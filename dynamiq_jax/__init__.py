"""Compressed gradient all-reduce for JAX: DynamiQ's psum in place of `jax.lax.psum`.

```python
import dynamiq_jax as dq

grads = dq.psum(grads, "data")  # inside shard_map or pmap: 5 bits per coordinate, not 16
loss, grads = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")(params, batch)  # in pjit
```
"""

from dynamiq_jax.collectives import pmean, psum
from dynamiq_jax.explain import Explanation, explain, wire_bits
from dynamiq_jax.gradients import value_and_grad
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.metrics import vnmse
from dynamiq_jax.topologies import Ring, Topology

__all__ = [
    "DynamiQ",
    "Explanation",
    "Ring",
    "Topology",
    "explain",
    "pmean",
    "psum",
    "value_and_grad",
    "vnmse",
    "wire_bits",
]
