"""Compressed gradient all-reduce for JAX: DynamiQ's psum in place of `jax.lax.psum`.

```python
import dynamiq_jax as dq

grads = dq.psum(grads, "data")  # inside shard_map or pmap: 5 bits per coordinate, not 16
loss, grads = dq.value_and_grad(loss_fn, axis_name="data")(params, batch)  # under jax.jit
```
"""

from importlib import import_module
from typing import TYPE_CHECKING

import dynamiq_jax.core.interrupts  # noqa: F401  # before JAX: what SIGINT does meanwhile
from dynamiq_jax import former
from dynamiq_jax.compression.compression import Compression, Policy
from dynamiq_jax.compression.explain import explain
from dynamiq_jax.core.axis import make_mesh
from dynamiq_jax.jaxprs.constraints import with_sharding_constraint
from dynamiq_jax.methods import BF16, F32, DynamiQ, ErrorFeedback, Format
from dynamiq_jax.plan.model_tree import save_model_tree
from dynamiq_jax.reduction.all_reduce import pmean, psum, reduce
from dynamiq_jax.reduction.all_to_all import all_to_all
from dynamiq_jax.reduction.scatter_gather import all_gather, psum_scatter
from dynamiq_jax.topologies import Butterfly, Direct, Hierarchical, Ring
from dynamiq_jax.topologies.links import jit
from dynamiq_jax.training.in_backward import fsdp
from dynamiq_jax.training.layers import Scanned
from dynamiq_jax.training.pipeline import overlapped
from dynamiq_jax.training.scan import scan
from dynamiq_jax.training.value_and_grad import value_and_grad

__all__ = [
    "BF16",
    "Butterfly",
    "Compression",
    "Direct",
    "DynamiQ",
    "ErrorFeedback",
    "F32",
    "Format",
    "Hierarchical",
    "Policy",
    "Ring",
    "Scanned",
    "all_gather",
    "all_to_all",
    "explain",
    "fsdp",
    "jit",
    "make_mesh",
    "overlapped",
    "pmean",
    "psum",
    "psum_scatter",
    "reduce",
    "save_model_tree",
    "scan",
    "value_and_grad",
    "with_sharding_constraint",
]

__version__ = "0.5.0"

WINGS = frozenset(("comparators", "contrib", "equinox", "hosts", "metrics", "nnx", "optax"))
"""Public modules that are imported at their first use; ``comparators`` is a former name."""


if TYPE_CHECKING:
    from dynamiq_jax import contrib as contrib
    from dynamiq_jax import equinox as equinox
    from dynamiq_jax import hosts as hosts
    from dynamiq_jax import metrics as metrics
    from dynamiq_jax import nnx as nnx
    from dynamiq_jax import optax as optax
else:

    def __getattr__(name: str):
        """Imports a wing at its first use: ``optax`` and ``nnx`` need what the library does not."""
        if name in former.FUNCTIONS:
            return globals()[former.function_of_now(name)]
        if name not in WINGS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(
                f"dynamiq_jax.{name} needs {error.name}: pip install {error.name}"
            ) from error


def __dir__() -> list[str]:
    """The public names; submodules are imported by their own."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
