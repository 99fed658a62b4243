"""Compressed gradient all-reduce for JAX: DynamiQ's psum in place of `jax.lax.psum`.

```python
import dynamiq_jax as dq

grads = dq.psum(grads, "data")  # inside shard_map or pmap: 5 bits per coordinate, not 16
loss, grads = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data")(params, batch)  # in pjit
```
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dynamiq_jax.agreement import check_agreement
from dynamiq_jax.by_step import ByStep, by_step
from dynamiq_jax.collectives import init_state, pmean, psum, reduce
from dynamiq_jax.configuration import (
    Configuration,
    load_config,
    load_model_tree,
    save_config,
    save_model_tree,
)
from dynamiq_jax.explanation import Explanation, explain, wire_bits
from dynamiq_jax.gradients import value_and_grad
from dynamiq_jax.in_backward import reduce_in_backward
from dynamiq_jax.methods import (
    BF16,
    CLTK,
    F32,
    MXFP4,
    MXFP6,
    MXFP8,
    THC,
    ARCTopK,
    DynamiQ,
    ErrorFeedback,
    GlobalQSGD,
    Marsit,
    Method,
    MinMax,
    OmniReduce,
    PermK,
    PowerSGD,
    SIDCo,
)
from dynamiq_jax.metrics import Metrics, Reduced, vnmse, worst_leaf_error
from dynamiq_jax.pipeline import Scanned, sequential
from dynamiq_jax.sharded import all_gather, psum_scatter
from dynamiq_jax.topologies import Butterfly, Direct, Hierarchical, Ring, Topology
from dynamiq_jax.writers import CSVWriter, TensorBoardWriter
from dynamiq_jax.xla import xla_options

__all__ = [
    "ARCTopK",
    "BF16",
    "Butterfly",
    "ByStep",
    "CLTK",
    "CSVWriter",
    "Configuration",
    "Direct",
    "DynamiQ",
    "ErrorFeedback",
    "Explanation",
    "F32",
    "GlobalQSGD",
    "Hierarchical",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "Marsit",
    "Method",
    "Metrics",
    "MinMax",
    "OmniReduce",
    "PermK",
    "PowerSGD",
    "Reduced",
    "Ring",
    "SIDCo",
    "Scanned",
    "THC",
    "TensorBoardWriter",
    "Topology",
    "all_gather",
    "by_step",
    "check_agreement",
    "explain",
    "init_state",
    "load_config",
    "load_model_tree",
    "pmean",
    "psum",
    "psum_scatter",
    "reduce",
    "reduce_in_backward",
    "sequential",
    "save_config",
    "save_model_tree",
    "value_and_grad",
    "vnmse",
    "wire_bits",
    "worst_leaf_error",
    "xla_options",
]

__version__ = "0.2.0"


if TYPE_CHECKING:
    from dynamiq_jax import optax as optax
else:

    def __getattr__(name: str):
        """Imports ``dynamiq_jax.optax`` at its first use, since the library does not need optax."""
        if name != "optax":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return import_module(f"{__name__}.optax")
        except ModuleNotFoundError as error:
            raise AttributeError("dynamiq_jax.optax needs optax: pip install optax") from error


def __dir__() -> list[str]:
    """The public names; submodules are imported by their own."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
