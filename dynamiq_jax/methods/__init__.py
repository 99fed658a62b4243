"""Methods: how one flat array is reduced over one axis."""

from dynamiq_jax.methods.arc_top_k import ARCTopK
from dynamiq_jax.methods.base import Limits, MatrixMethod, Method, ShardedMethod, State
from dynamiq_jax.methods.clt_k import CLTK
from dynamiq_jax.methods.dynamiq import DynamiQ
from dynamiq_jax.methods.error_feedback import ErrorFeedback
from dynamiq_jax.methods.global_qsgd import GlobalQSGD
from dynamiq_jax.methods.marsit import Marsit
from dynamiq_jax.methods.minmax import MinMax
from dynamiq_jax.methods.mx import MXFP4, MXFP6, MXFP8
from dynamiq_jax.methods.omnireduce import OmniReduce
from dynamiq_jax.methods.perm_k import PermK
from dynamiq_jax.methods.powersgd import PowerSGD
from dynamiq_jax.methods.sidco import SIDCo
from dynamiq_jax.methods.thc import THC
from dynamiq_jax.methods.uncompressed import BF16, F32

__all__ = [
    "ARCTopK",
    "BF16",
    "CLTK",
    "DynamiQ",
    "ErrorFeedback",
    "F32",
    "GlobalQSGD",
    "Limits",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "Marsit",
    "MatrixMethod",
    "Method",
    "MinMax",
    "OmniReduce",
    "PermK",
    "PowerSGD",
    "SIDCo",
    "ShardedMethod",
    "State",
    "THC",
]
