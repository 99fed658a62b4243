"""XLA's options under which reductions overlap, and payloads travel by copy engines.

By default a collective is a kernel of NCCL, which takes multiprocessors and memory bandwidth from
the kernels beside it. With these options a `ppermute` between GPUs of one process is a copy by an
engine that does nothing else: faster than NCCL's on NVLink, and at no cost to kernels.
"""

import functools
import os
from typing import Any

import jax

_FLAG = "xla_gpu_collective_permute_mode"
_COPIES: dict[str, Any] = {_FLAG: "COLLECTIVES_PEER_MEMORY"}
_APART: dict[str, Any] = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**15}
"""XLA combines all-reduces of up to so many bytes. By default it would make one of the light ones
of all buckets, which then wait for the last gradient."""
_EARLY: dict[str, Any] = {
    # XLA starts a transfer as late as its model of NVLink allows: on a slower link too late.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # A statistics' all-reduce, an all-to-all and an all-gather of three buckets, and one more.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
}
"""In one process. Between two processes a short run over sockets ended well
(docs/time-to-accuracy.md), which says little about deadlocks: users who want these pass them."""
_asked_for = False


def xla_options() -> dict[str, Any]:
    """Compiler options with which reductions overlap, and payloads travel by copy engines.

    Pass them to the outermost `jax.jit` of a program that reduces::

        step = jax.jit(step, compiler_options=dq.xla_options())

    On GPUs they keep the light all-reduces of different buckets apart, so that a bucket need not
    wait for all gradients. In one process transfers start as early as they may, several at a time:
    `sequential` needs that. Where its GPUs may read each other's memory, payloads are copied by
    engines. XLA reads options per program and a library cannot see them. So this call counts as the
    word that programs of this process are compiled with them: from then on topologies whose
    ``transport`` is `None` send by permutes (`dynamiq_jax.topologies.choice`). `XLA_FLAGS` with
    ``--xla_gpu_collective_permute_mode=peer`` counts as well.

    Returns:
      Names and values, without those that this JAX does not know. No copy engines: in several
      processes, with ``NCCL_P2P_DISABLE=1``. Empty: on one device, on other devices than GPUs.
    """
    global _asked_for
    if jax.default_backend() != "gpu" or jax.device_count() == 1:
        return {}
    wanted = _APART | (_EARLY if jax.process_count() == 1 else {}) | (_COPIES if _peers() else {})
    options = {name: value for name, value in wanted.items() if _is_known(name, value)}
    _asked_for = _asked_for or _FLAG in options
    return options


def copy_engines() -> str | None:
    """Why permutes are copies by engines, as far as can be known; `None` if they are not."""
    if not _peers():
        return None
    if f"{_FLAG}=peer" in os.environ.get("XLA_FLAGS", "").lower():
        return f"XLA_FLAGS has {_FLAG}=peer"
    return "dq.xla_options() was called" if _asked_for else None


def _peers() -> bool:
    """Whether there are GPUs that may read each other's memory."""
    if jax.default_backend() != "gpu" or os.environ.get("NCCL_P2P_DISABLE", "0") == "1":
        return False
    return jax.process_count() == 1 and jax.device_count() > 1


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Whether this JAX compiles with the option: there is no list of them to look at."""
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0).compile()
    except Exception:  # whatever type a version of JAX raises
        return False
    return True
