"""Links between JAX's devices, transports over them, and the compiler options that suit them.

*Links*: which devices NVLink connects, as far as JAX knows.

*Transports*: how payloads travel between workers, and what each transport can do. Users name one by
a string, see `dynamiq_jax.topologies.schedules.Topology.transport`.

*Options*: `jit` lets reductions overlap, and copy engines send payloads. It chooses from what JAX
knows about the links, at the first call of a program. `compiler_options` has the rule:

* one process: transfers start early, and copy engines execute permutes, if there are any;
* processes on several hosts: transfers start early, up to four at a time, so that the next payload
  is ready before the previous one has arrived;
* processes that share one NVLink domain: XLA's default order.

`jit` also chooses how many sockets NCCL opens between hosts (`_SOCKETS`).

By default a collective is an NCCL kernel, which takes multiprocessors and memory bandwidth from the
kernels that run at the same time. With these options a dedicated copy engine executes a `ppermute`
between GPUs of one process: this is faster than NCCL on NVLink, and does not slow kernels.
"""

import contextlib
import functools
import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis, rounded_to
from pallas_kernels import peers

# --- Links ----------------------------------------------------------------------------------------


def in_one_domain() -> bool:
    """Whether every pair of JAX's devices talks at full rate, as far as JAX knows."""
    if jax.process_count() == 1:
        return True
    return _on_gpus() and peers.in_one_domain(jax.devices())


def fast_links() -> bool:
    """Whether NVLink connects all GPUs, and NCCL may use it."""
    return _nvlink() and peers.disabled() is None


def slow_by_choice() -> str | None:
    """The setting by which NCCL may not use the NVLink that connects all GPUs, else `None`."""
    return peers.disabled() if _nvlink() else None


def _nvlink() -> bool:
    """Whether the GPUs are in one domain, and of a kind that is only built with NVLink.

    A virtual machine may have such GPUs without their links: CUDA tells this of one process's GPUs.
    """
    devices = jax.devices()
    built = _on_gpus() and peers.built_with_nvlink(devices[0])
    return built and in_one_domain() and (jax.process_count() > 1 or peers.connected(devices))


def _on_gpus() -> bool:
    return jax.devices()[0].platform in ("gpu", "cuda")


# --- Transports -----------------------------------------------------------------------------------


TransportName = Literal["collectives", "permutes", "push"]
"""How payloads are sent. "collectives": an all-to-all or an all-gather, if all workers send to all.
"permutes": one ppermute for every payload, which is sent as soon as it is encoded; for links that
ppermutes use best (`jit`). "push": kernels write into the memory of the other
GPUs. If the codec supports it, one kernel does an all-reduce of one stream
(`pallas_kernels.all_reduce`); else each exchange is one kernel (`pallas_kernels.exchange`). Push
kernels share a CUDA stream with all other kernels, which wait for them. Push needs up to 8 GPUs
(Hopper or newer) of one process, or of processes of one host with a GPU each, a mesh of the first
GPUs in their order, and steps in which all workers send to all."""

Sinks = Iterator[tuple[Any, Int[Array, " c"]]]
"""Payloads [c] of finished sums as they arrive, and their owners."""


class Transport:
    """XLA's collectives; subclasses replace them."""

    to_one: ClassVar[bool] = True
    """Whether a worker can send to one other worker, and not only to all."""
    one_by_one: ClassVar[bool] = False
    """Whether every payload is sent alone: what all send to all becomes n - 1 permutations."""
    reduces: ClassVar[bool] = False
    """Whether one kernel can do a whole all-reduce of one stream, if the codec has one."""
    streams: ClassVar[tuple[int, int]] = 4, 2**26
    """By default `Direct` has one stream for so many coordinates (second), up to the first."""

    def psum(self, axis: Axis, tree: Any) -> Any:
        """The sum of small arrays over the workers, in their dtypes."""
        return axis.psum(tree)

    def exchange(self, axis: Axis, payloads: Any) -> Any:
        """Sends ``x[j]`` of every leaf to worker j; ``result[i]`` is from worker i."""
        return axis.all_to_all(payloads)

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """The sinks of all workers, of which ``payloads`` [1] has this worker's."""
        # A gather brings a leading axis of workers; it replaces the axis of one chunk.
        own = jax.tree.map(lambda x: x[0], payloads)
        gathered = jax.tree.map(lambda x: axis.all_gather(x, to="invarying"), own)
        yield gathered, jnp.arange(axis.size, dtype=jnp.int32)


class Permutes(Transport):
    """One ppermute for every payload."""

    one_by_one = True
    streams = 2, 2**27

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """See `Transport`; the worker's own payload comes first, while the others are sent."""
        me, n_workers = axis.index, axis.size
        yield payloads, me[None]
        for by in range(1, n_workers):
            # Every worker sends ``by`` places on, and gets from the worker ``by`` places before.
            pairs = [(i, (i + by) % n_workers) for i in range(n_workers)]
            yield axis.ppermute(payloads, pairs), ((me - by) % n_workers)[None]


class Push(Transport):
    """Kernels that write into the memory of the other GPUs."""

    to_one = False
    reduces = True
    streams = 1, 1

    def psum(self, axis: Axis, tree: Any) -> Any:
        """See `Transport`; every worker adds up all terms, in f32 and in their order."""

        def total(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return axis.assume_invarying(jnp.sum(x, axis=0, dtype=x.dtype))
            wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
            added = rounded_to(x.dtype, jnp.sum(x.astype(wide), axis=0))
            return axis.assume_invarying(added.astype(x.dtype))

        return jax.tree.map(total, _pushed(axis, tree, to_all=True))

    def exchange(self, axis: Axis, payloads: Any) -> Any:
        """See `Transport`."""
        return _pushed(axis, payloads, to_all=False)

    def gather(self, axis: Axis, payloads: Any) -> Sinks:
        """See `Transport`."""
        gathered = _pushed(axis, jax.tree.map(lambda x: x[0], payloads), to_all=True)
        yield jax.tree.map(axis.assume_invarying, gathered), jnp.arange(axis.size, dtype=jnp.int32)


def _pushed(axis: Axis, tree: Any, *, to_all: bool) -> Any:
    """An all-to-all, or an all-gather if ``to_all``, of all leaves by one push kernel."""
    sizes = axis.sizes
    return pk.exchange(axis.to_varying(tree), sizes, to_all=to_all)


TRANSPORTS: dict[str, Transport] = dict(
    zip(get_args(TransportName), (Transport(), Permutes(), Push()), strict=True)
)
"""Transports by the names that users pass."""


# --- Options of the compiler ----------------------------------------------------------------------


_FLAG = "xla_gpu_collective_permute_mode"
_COPIES: dict[str, Any] = {_FLAG: "COLLECTIVES_PEER_MEMORY"}
_APART: dict[str, Any] = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**15}
"""XLA combines all-reduces of up to this number of bytes. By default it would combine the light
all-reduces of all buckets, which would then wait for the last gradient."""
_START = "xla_gpu_experimental_collective_start_as_early_as_possible"
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
_EARLY: dict[str, Any] = {
    # XLA starts a transfer as late as its model of NVLink allows: too late for a slower link.
    _START: True,
    # An all-reduce of statistics, an all-to-all and an all-gather of three buckets, and one more.
    _AT_ONCE: 8,
}
"""The options for one process."""
_BETWEEN_HOSTS: dict[str, Any] = {_START: True, _AT_ONCE: 4}
"""The options between hosts. With two hosts of one H200 at 25 Gb/s, a step of 1.1 B parameters with
`value_and_grad` takes 264 ms instead of 272, with `dq.optax.sharded` after the backward pass 208
instead of 218, and in the pipeline 203 in both cases. At 10 Gb/s the pipeline takes 492 ms instead
of 484."""
_OWN_CHANNELS = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
"""An environment variable of NCCL. XLA splits communicators of all GPUs into communicators within
hosts. By default these keep the number of channels that suits the network, 2 instead of 24 over
NVLink. With two hosts of two H200, a reduce-scatter of 121 MB within a host then takes 2.1 ms
instead of 0.3."""
_SOCKETS = {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "4"}
"""Environment variables of NCCL for links without InfiniBand. By default NCCL opens one socket
between two GPUs. With two hosts of one H200 at 25 Gb/s, sharded updates then take 247 ms instead of
181, and bf16 psum 865 instead of 753."""
_CLOUD_NICS = ("0x1d0f", "0x1ae0")
"""PCI vendors (Amazon, Google) for whose network cards NCCL opens several sockets by default."""
_VENDORS = "/sys/class/net/*/device/vendor"
_told: dict[str, str] = {}
"""The entries of `_SOCKETS` that this process has set."""
_permutes_copy: ContextVar[bool] = ContextVar("_permutes_copy", default=False)
"""Whether the program that is traced will be compiled to execute permutes by copy engines."""


def jit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """`jax.jit` with compiler options that let reductions overlap.

        @dq.jit(donate_argnums=0)
        def step(state, batch): ...

    Use it for the outermost `jax.jit` of a program with reductions. On GPUs the options prevent XLA
    from combining the light all-reduces of different buckets, so that a bucket need not wait for
    all gradients. In one process and between hosts, transfers start as early as possible, several
    at a time. If the GPUs of this process can read each other's memory, copy engines send the
    payloads: a topology without ``transport`` sends by permutes if it is traced inside of this
    function (`dynamiq_jax.topologies.schedules`).

    The options are chosen from JAX's devices at the first call (or ``lower``, ``trace``, ...),
    since asking for devices starts JAX's backend. So you can decorate a step before you call
    `jax.distributed.initialize`. `explain` says which options were chosen.

    Between GPU hosts the first call also sets the environment variables ``NCCL_SOCKET_NTHREADS=1``
    and ``NCCL_NSOCKS_PERTHREAD=4``, unless one of them is set, or a network card belongs to a cloud
    that NCCL knows; `explain` says so. NCCL reads them at this process's first collective, if hosts
    have no InfiniBand. If your script runs a collective before that call, set both in the
    environment.

    If you need another jit, such as ``nnx.jit``, pass `compiler_options` of this module to it, and
    ``transport="permutes"`` to `Compression`. ``--xla_gpu_collective_permute_mode=peer`` in
    `XLA_FLAGS` has the same effect.

    Args:
      function: a function of pytrees of arrays, as for `jax.jit`. Without it, `jit` returns a
        decorator that has the options.
      options: keyword arguments of `jax.jit`, such as ``donate_argnums``. Entries of
        ``compiler_options`` (a dict) are added to our options, and override them.

    Returns:
      The compiled function, with the attributes of a function that `jax.jit` returns (``lower``,
      ``trace``, ``clear_cache``, ...). At its first call it asks JAX for devices.

    Raises:
      TypeError: `jax.jit` does not know an option, or ``function`` is not callable.
      ValueError: an option does not fit ``function``, such as a nonexistent ``static_argnums``.
    """
    given = options.pop("compiler_options", None) or {}
    if function is None:
        jax.jit(**options)  # refuses options that JAX does not know
        return functools.partial(jit, compiler_options=given, **options)
    jax.jit(function, **options)  # refuses wrong options here, not at the first call
    return Jitted(function, options, given)


class Jitted:
    """The result of `jit`: the function that `jax.jit` returns, made once devices are known."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], given: Any):
        functools.update_wrapper(self, function)
        self._function, self._options, self._given = function, options, given

    @functools.cached_property
    def _jitted(self) -> Any:
        chosen = compiler_options() | dict(self._given)
        function = self._function

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with compiled_by(chosen):
                return function(*args, **kwargs)

        return jax.jit(traced, compiler_options=chosen or None, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function."""
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The method of an instance, as for any function in a class."""
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Attributes of `jax.jit`'s functions: ``lower``, ``trace``, ``clear_cache``, ..."""
        if name.startswith("__") or name in ("_function", "_options", "_given", "_jitted"):
            raise AttributeError(name)
        return getattr(self._jitted, name)


@contextlib.contextmanager
def compiled_by(options: Mapping[str, Any]) -> Iterator[None]:
    """Tells code that is traced or explained in this context which options will compile it."""
    before = _permutes_copy.set(_FLAG in options)
    try:
        yield
    finally:
        _permutes_copy.reset(before)


def compiler_options() -> dict[str, Any]:
    """Names and values of compiler options, except those that this JAX does not know.

    The result is empty on one device, and on devices other than GPUs. With several processes,
    ``NCCL_P2P_DISABLE=1`` or ``NCCL_P2P_LEVEL=LOC`` there are no copy engines. Between hosts the
    function sets `_OWN_CHANNELS` and `_SOCKETS` for this process, unless the user has set them.
    """
    if jax.default_backend() != "gpu" or jax.device_count() == 1:
        return {}
    if _between_hosts():
        os.environ.setdefault(_OWN_CHANNELS, "0")
        _told.update(_sockets())
        os.environ.update(_told)
        return known(_APART | _BETWEEN_HOSTS)
    return known(
        _APART | (_EARLY if jax.process_count() == 1 else {}) | (_COPIES if _peers() else {})
    )


def _sockets() -> dict[str, str]:
    """`_SOCKETS` unless the user, or NCCL's list of network cards, has chosen them."""
    if any(name in os.environ for name in _SOCKETS):
        return {}
    # NCCL's own files of variables do not overwrite environment variables.
    files = [os.environ.get("NCCL_CONF_FILE", "~/.nccl.conf"), "/etc/nccl.conf"]
    told = "".join(map(_text, files))
    chosen = any(name in told for name in _SOCKETS)
    vendors = {_text(name).strip() for name in glob.glob(_VENDORS)}
    return {} if chosen or not vendors.isdisjoint(_CLOUD_NICS) else _SOCKETS


def _text(name: str) -> str:
    """A file's text; none if there is no such file, or this user may not read it."""
    try:
        return Path(name).expanduser().read_text()
    except OSError:
        return ""


def between_hosts() -> str | None:
    """The note of `explain` on transfers between hosts; `None` within one host."""
    if jax.default_backend() != "gpu" or not _between_hosts():
        return None
    will = _sockets()
    who = "by dq.jit" if _told else "by the first call of a function of dq.jit" if will else ""
    values = will | {name: os.environ[name] for name in _SOCKETS if name in os.environ}
    sockets = ", ".join(f"{name}={values.get(name, 'by NCCL')}" for name in _SOCKETS)
    sockets += f" ({who})" if who else ""
    early = f"starts transfers early, {_BETWEEN_HOSTS[_AT_ONCE]} at a time"
    return f"between hosts dq.jit {early}; without InfiniBand {sockets}"


def _between_hosts() -> bool:
    return jax.process_count() > 1 and not in_one_domain()


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of XLA's ``options`` that this JAX knows."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


def copy_engines() -> str | None:
    """The reason why copy engines execute permutes, if this is known; else `None`."""
    if not _peers():
        return None
    if f"{_FLAG}=peer" in os.environ.get("XLA_FLAGS", "").lower():
        return f"XLA_FLAGS has {_FLAG}=peer"
    return "dq.jit compiles the program" if _permutes_copy.get() else None


def _peers() -> bool:
    """Whether there are GPUs that may read each other's memory."""
    several = jax.process_count() == 1 and jax.device_count() > 1
    return several and jax.default_backend() == "gpu" and peers.disabled() is None


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Whether this JAX compiles with the option; JAX has no list of options."""
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0).compile()
    except Exception:  # whatever type a version of JAX raises
        return False
    return True
