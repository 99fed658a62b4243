"""Other papers' methods, to compare with: each is a `Method`, with its codec beside it.

They take the places of `DynamiQ` in every function of this library::

    grads = dq.psum(grads, "data", method=dq.comparators.MXFP4())

A NaN or infinity on any worker makes all that it is encoded with NaN on all workers: its block of
`MXFP8` and its kin, its bucket of `MinMax`, its piece of `GlobalQSGD` and `THC`, its block, row,
chunk or leaf of methods that sum a part, the n coordinates that `PermK` draws together. Sums of
what is finite end at the largest bf16 number. `THC`, `PermK` and methods that sum a part run on
XLA's own collectives and serve ``topology=None`` only.
"""

from dynamiq_jax.comparators.arc_top_k import ARCTopK
from dynamiq_jax.comparators.clt_k import CLTK
from dynamiq_jax.comparators.global_qsgd import GlobalQSGD
from dynamiq_jax.comparators.marsit import Marsit
from dynamiq_jax.comparators.minmax import MinMax
from dynamiq_jax.comparators.mx import MXFP4, MXFP6, MXFP8
from dynamiq_jax.comparators.omnireduce import OmniReduce
from dynamiq_jax.comparators.packet_loss import PacketLoss
from dynamiq_jax.comparators.perm_k import PermK
from dynamiq_jax.comparators.powersgd import PowerSGD
from dynamiq_jax.comparators.sidco import SIDCo
from dynamiq_jax.comparators.thc import THC

__all__ = [
    "ARCTopK",
    "CLTK",
    "GlobalQSGD",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "Marsit",
    "MinMax",
    "OmniReduce",
    "PacketLoss",
    "PermK",
    "PowerSGD",
    "SIDCo",
    "THC",
]
