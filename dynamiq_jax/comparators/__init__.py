"""Other papers' methods, to compare with: each is a `Method`, with its codec beside it.

They take the places of `DynamiQ` in every function of this library::

    grads = dq.psum(grads, "data", compression=dq.comparators.MXFP4())

A NaN or infinity on any worker makes all that it is encoded with NaN on all workers: its block of
`MXFP8` and its kin, its bucket of `MinMax`, its piece of `GlobalQSGD` and `THC`, its block, row,
chunk or leaf of methods that sum a part, the n coordinates that `PermK` draws together. Sums of
what is finite end at the largest bf16 number. `THC`, `PermK` and methods that sum a part run on
XLA's own collectives and serve ``topology=None`` only.
"""

from collections.abc import Mapping

from dynamiq_jax.comparators.arc_top_k import ARCTopK as ARCTopK
from dynamiq_jax.comparators.clt_k import CLTK as CLTK
from dynamiq_jax.comparators.global_qsgd import GlobalQSGD as GlobalQSGD
from dynamiq_jax.comparators.marsit import Marsit as Marsit
from dynamiq_jax.comparators.minmax import MinMax as MinMax
from dynamiq_jax.comparators.mx import MXFP4 as MXFP4
from dynamiq_jax.comparators.mx import MXFP6 as MXFP6
from dynamiq_jax.comparators.mx import MXFP8 as MXFP8
from dynamiq_jax.comparators.omnireduce import OmniReduce as OmniReduce
from dynamiq_jax.comparators.packet_loss import PacketLoss as PacketLoss
from dynamiq_jax.comparators.perm_k import PermK as PermK
from dynamiq_jax.comparators.powersgd import PowerSGD as PowerSGD
from dynamiq_jax.comparators.sidco import SIDCo as SIDCo
from dynamiq_jax.comparators.thc import THC as THC
from dynamiq_jax.methods.base import Method, WrappedMethod

METHODS: Mapping[str, type[Method]] = {
    name: found
    for name, found in dict(globals()).items()
    if isinstance(found, type)
    and issubclass(found, Method)
    and not issubclass(found, WrappedMethod)
    if found is not Method
}
"""Every comparator by name: those that the lines above import. A new one is one line there; the
command, the benchmarks, the tests and the reference read this table."""

__all__ = [*METHODS, "PacketLoss"]  # pyright: ignore[reportUnsupportedDunderAll]
