"""XLA's options under which reductions overlap, and payloads travel by copy engines.

By default a collective is a kernel of NCCL, which takes multiprocessors and memory bandwidth from
the kernels beside it. With these options a `ppermute` between GPUs of one process is a copy by an
engine that does nothing else: faster than NCCL's on NVLink, and at no cost to kernels.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
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
"""In one process. Two hosts of one H100, 25 Gb/s between them, gained nothing from these options
(docs/multihost.md): users who want them pass them."""
_permutes_copy: ContextVar[bool] = ContextVar("_permutes_copy", default=False)
"""Whether the program that is traced will be compiled so that permutes are copies by engines."""


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` with the compiler options under which reductions overlap.

        @functools.partial(dq.jit, donate_argnums=0)
        def step(state, batch): ...

    Use it for the outermost `jax.jit` of a program that reduces. On GPUs the options keep the light
    all-reduces of different buckets apart, so that a bucket need not wait for all gradients. In one
    process transfers start as early as they may, several at a time: `sequential` needs that. If the
    GPUs of this process may read each other's memory, copy engines move the payloads: a topology
    without ``transport`` sends by permutes where it is traced inside of this function
    (`dynamiq_jax.topologies.choice`).

    In the place of other jits, such as ``nnx.jit``, pass them `compiler_options` of this module,
    and ``transport="permutes"`` to `Compression`. ``--xla_gpu_collective_permute_mode=peer`` in
    `XLA_FLAGS` has the same effect. Arguments are those of `jax.jit`; ``compiler_options`` are
    added to ours.
    """
    chosen = compiler_options() | (options.pop("compiler_options", None) or {})

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with compiled_by(chosen):
            return function(*args, **kwargs)

    return jax.jit(traced, compiler_options=chosen or None, **options)


@contextlib.contextmanager
def compiled_by(options: Mapping[str, Any]) -> Iterator[None]:
    """Tells code that is traced or explained within by which options it will be compiled."""
    before = _permutes_copy.set(_FLAG in options)
    try:
        yield
    finally:
        _permutes_copy.reset(before)


def compiler_options() -> dict[str, Any]:
    """Names and values of compiler options, without those that this JAX does not know.

    They are empty on one device, and on other devices than GPUs. In several processes and with
    ``NCCL_P2P_DISABLE=1`` there are no copy engines.
    """
    if jax.default_backend() != "gpu" or jax.device_count() == 1:
        return {}
    wanted = _APART | (_EARLY if jax.process_count() == 1 else {}) | (_COPIES if _peers() else {})
    return known(wanted)


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The members of XLA's ``options`` that this JAX knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


def copy_engines() -> str | None:
    """Why permutes are copies by engines, as far as can be known; `None` if they are not."""
    if not _peers():
        return None
    if f"{_FLAG}=peer" in os.environ.get("XLA_FLAGS", "").lower():
        return f"XLA_FLAGS has {_FLAG}=peer"
    return "dq.jit compiles the program" if _permutes_copy.get() else None


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
