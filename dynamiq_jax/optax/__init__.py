"""Compressed all-reduce as a gradient transformation of optax, with its state in ``opt_state``.

```python
import dynamiq_jax as dq
import dynamiq_jax.optax  # needs optax; the library itself does not

optimizer = optax.chain(dq.optax.all_reduce("data"), optax.clip_by_global_norm(1.0), adamw)
opt_state = dq.optax.init(optimizer, params, mesh)
specs = dq.optax.state_specs(opt_state)  # of opt_state, for jax.shard_map
```
"""

from dynamiq_jax.optax.few_bits import few_bits
from dynamiq_jax.optax.replicated import AllReduceState, all_reduce
from dynamiq_jax.optax.sharded import ShardedState, gathered, set_masters, sharded, warn_of_skipped
from dynamiq_jax.optax.state import PerWorker, init, restore_state, state_specs
from dynamiq_jax.reduction.scatter_gather import pack

__all__ = [
    "AllReduceState",
    "PerWorker",
    "ShardedState",
    "all_reduce",
    "few_bits",
    "gathered",
    "init",
    "pack",
    "restore_state",
    "set_masters",
    "sharded",
    "state_specs",
    "warn_of_skipped",
]
