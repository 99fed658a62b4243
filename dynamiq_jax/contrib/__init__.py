"""Methods of other papers, for comparison: each is a `Method`, in one file with its codec.

They replace `DynamiQ` in every function of this library::

    grads = dq.psum(grads, "data", compression=dq.contrib.MXFP4())

A NaN or infinity on any worker becomes NaN on all workers, together with all values that are
encoded with it: its block (`MXFP8`, `MXFP6`, `MXFP4`, `BlockInt`), its bucket (`MinMax`), its piece
(`GlobalQSGD`, `THC`), the n coordinates that are drawn together (`PermK`), or its block, row, chunk
or leaf (methods that sum only a part of the values). Sums of finite values saturate at the largest
bf16 number. `THC`, `PermK` and the methods that sum only a part use XLA's own collectives and
support only ``topology=None``.
"""

from collections.abc import Mapping

from dynamiq_jax.contrib.arc_top_k import ARCTopK as ARCTopK
from dynamiq_jax.contrib.block_int import BlockInt as BlockInt
from dynamiq_jax.contrib.clt_k import CLTK as CLTK
from dynamiq_jax.contrib.global_qsgd import GlobalQSGD as GlobalQSGD
from dynamiq_jax.contrib.loco import LoCo as LoCo
from dynamiq_jax.contrib.marsit import Marsit as Marsit
from dynamiq_jax.contrib.minmax import MinMax as MinMax
from dynamiq_jax.contrib.mx import MXFP4 as MXFP4
from dynamiq_jax.contrib.mx import MXFP6 as MXFP6
from dynamiq_jax.contrib.mx import MXFP8 as MXFP8
from dynamiq_jax.contrib.omnireduce import OmniReduce as OmniReduce
from dynamiq_jax.contrib.packet_loss import PacketLoss as PacketLoss
from dynamiq_jax.contrib.perm_k import PermK as PermK
from dynamiq_jax.contrib.powersgd import PowerSGD as PowerSGD
from dynamiq_jax.contrib.sidco import SIDCo as SIDCo
from dynamiq_jax.contrib.thc import THC as THC
from dynamiq_jax.methods.base import Method, WrappedMethod

METHODS: Mapping[str, type[Method]] = {
    name: found
    for name, found in dict(globals()).items()
    if isinstance(found, type)
    and issubclass(found, Method)
    and not issubclass(found, WrappedMethod)
    if found is not Method
}
"""Every comparator by name, as imported above. To add one, add an import there; the command, the
benchmarks, the tests and the reference read this table."""

__all__ = [*METHODS, "LoCo", "PacketLoss"]  # pyright: ignore[reportUnsupportedDunderAll]
