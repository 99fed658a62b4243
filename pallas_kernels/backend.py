"""Which implementation of the kernels runs."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from pallas_kernels import peers
from pallas_kernels._compat import JOINS_PROCESSES, RUNS_MOSAIC, runs_triton, triton
from pallas_kernels.format import WireFormat

Backend = Literal["triton", "mosaic", "jnp", "interpret"]

WARP = 32
"""The most groups of a super-group in "mosaic" kernels: one for each thread of a warp."""

MOST_WORKERS = 8
"""The most devices of a mesh for push kernels: GPUs of a host that all reach each other."""

_NO_TRITON = f"JAX {jax.__version__} has no Triton lowering of Pallas kernels"


def check_backend(backend: Backend | None) -> None:
    """Refuses an unknown ``backend``. A known one may still not run here."""
    if backend == "pallas":
        raise ValueError(
            "backend='pallas' is called 'triton'; pass backend='triton', or None (the fastest "
            "that runs here)"
        )
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}; expected None or one of {get_args(Backend)}")


def resolve_backend(backend: Backend | None, fmt: WireFormat | None = None) -> Backend:
    """The backend that runs here for ``backend``; `None` chooses one, see `choose_backend`.

    Raises:
      ValueError: ``backend`` is unknown.
      NotImplementedError: a named backend does not run here: "triton" or "mosaic" without an NVIDIA
        GPU as the default platform, "mosaic" before Hopper or JAX 0.11, "triton" or "interpret"
        with a JAX without Pallas' Triton lowering.
    """
    check_backend(backend)
    if backend is not None:
        _check_runs(backend)
    return choose_backend(backend, fmt).backend


class Choice(NamedTuple):
    """The backend that runs, and why."""

    backend: Backend
    reason: str | None = None
    """Why `None` did not choose "triton" for the NVIDIA GPUs here; else `None`."""


def choose_backend(backend: Backend | None, fmt: WireFormat | None = None) -> Choice:
    """The backend that ``backend`` names; for `None`, the fastest that runs here.

    On NVIDIA GPUs the latter is "triton". If JAX lowers no kernels through Triton, it is "mosaic",
    or "jnp" if Mosaic's kernels do not run. On other platforms it is "jnp".

    Args:
      backend: a known backend, which need not run here, or `None`.
      fmt: the format that `None` chooses a backend for; without one, any.
    """
    if backend is not None:
        return Choice(backend)
    if not _on_nvidia():
        return Choice("jnp")
    if runs_triton():
        return Choice("triton")
    needs = _needs_of_mosaic(fmt)
    if needs is None:
        return Choice("mosaic", _NO_TRITON)
    return Choice("jnp", f"{_NO_TRITON}, and its successor, Mosaic GPU, needs {needs}")


def _check_runs(backend: Backend) -> None:
    """Refuses a known backend that does not run here."""
    if backend in ("triton", "mosaic") and not _on_nvidia():
        raise NotImplementedError(
            f"backend={backend!r} needs an NVIDIA GPU, and JAX's default platform here is "
            f"{jax.default_backend()!r}; pass backend=None (the fastest that runs here), 'jnp', "
            "or 'interpret' (the Triton kernels on Pallas' interpreter, slow)"
        )
    if backend == "mosaic" and (needs := _needs_of_mosaic()) is not None:
        raise NotImplementedError(
            f"backend='mosaic' needs {needs}; pass backend=None (the fastest that runs here)"
        )
    lacks = {"triton": lambda: not runs_triton(), "interpret": lambda: triton() is None}
    if backend in lacks and lacks[backend]():
        raise NotImplementedError(
            f"backend={backend!r} does not run, since {_NO_TRITON}; pass backend=None (the fastest "
            "that runs here) or 'jnp'"
        )


def _needs_of_mosaic(fmt: WireFormat | None = None) -> str | None:
    """The needs of Mosaic's kernels, for ``fmt`` if given, that are not met here, or `None`."""
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if float(capability) < 9:
        return f"GPUs of compute capability 9.0 (Hopper) or later, and these have {capability}"
    if not RUNS_MOSAIC:
        return f"JAX >= 0.11, and this is {jax.__version__}"
    if fmt is not None and fmt.groups > WARP:
        return (
            f"up to {WARP} groups per super-group, where super_group_size={fmt.super_group_size} "
            f"has {fmt.groups} of group_size={fmt.group_size} (pass group_size >= "
            f"{fmt.super_group_size // WARP})"
        )
    return None


def pushes(fmt: WireFormat, backend: Backend | None) -> bool:
    """Whether one push kernel supports a format; "mosaic" and `None` allow it."""
    return backend in (None, "mosaic") and fmt.groups <= WARP


def check_push(names: tuple[str, ...]) -> None:
    """Refuses push kernels over the axes ``names`` where they cannot run."""
    if (why := needs_of_push(names)) is not None:
        raise NotImplementedError(
            f"transport='push' needs {why}; pass transport='permutes' or 'collectives'"
        )


def needs_of_push(names: tuple[str, ...] = ()) -> str | None:
    """The needs of push kernels over the axes ``names`` that are not met here; `None`: they run.

    Outside of maps, without ``names``, only the devices and JAX are considered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    outside = not names and not mesh.manual_axes
    if not _on_nvidia():
        why = f"NVIDIA GPUs, and JAX's default platform here is {jax.default_backend()!r}"
    elif (needs := _needs_of_mosaic()) is not None:
        why = needs
    elif (setting := peers.disabled()) is not None:
        why = f"GPUs that reach each other's memory, and the environment has {setting}"
    elif not (outside or set(names) <= set(mesh.axis_names) == set(mesh.manual_axes)):
        why = f"jax.shard_map over all axes of a mesh, and {names} are axes here of {mesh}"
    elif not outside and mesh.size > MOST_WORKERS:
        why = f"meshes of up to {MOST_WORKERS} devices, and this one has {mesh.size}"
    else:
        devices = jax.devices()[: MOST_WORKERS if outside else mesh.size]
        why = _needs_between(devices) if jax.process_count() > 1 else _needs_within(devices)
    return why


def _needs_within(devices: Sequence[Any]) -> str | None:
    """The needs of push kernels among GPUs of this process that are not met, or `None`."""
    if peers.connected(devices):
        return None
    return "NVLink between all GPUs, and CUDA reports pairs without it"


def _needs_between(devices: Sequence[Any]) -> str | None:
    """The needs of push kernels among GPUs of several processes that are not met, or `None`."""
    n_processes = len({device.process_index for device in devices})
    if not JOINS_PROCESSES:
        why = f"JAX >= 0.11.2 between processes, and this is {jax.__version__}"
    elif not peers.in_one_domain(devices):
        domains = len({getattr(device, "slice_index", None) for device in devices})
        told = f"{domains} of them" if domains > 1 else "none"
        why = f"one host or NVLink domain for {n_processes} processes, and JAX reports {told}"
    elif not peers.built_with_nvlink(devices[0]):
        why = f"NVLink between all GPUs, and {devices[0].device_kind} need not have it"
    elif n_processes < len(devices):
        told = f"{n_processes} have {len(devices)}; more were not tried"
        why = f"one GPU for each of several processes, and {told}"
    elif (setting := peers.unshared()) is not None:
        why = f"memory that NCCL shares between processes, and the environment has {setting}"
    elif (shown := peers.shown()) is not None and shown < len(devices):
        why = f"all {len(devices)} GPUs in sight of every process, and this one is shown {shown}"
    else:
        why = _needs_of_nccl(peers.nccl_version())
    return why


def _needs_of_nccl(version: tuple[int, ...] | None) -> str | None:
    """Why this version of NCCL does not share memory between processes; `None`: it does."""
    if version is not None and version >= peers.SYMMETRIC_NCCL:
        return None
    least, name = _dotted(peers.SYMMETRIC_NCCL), peers.nccl_package()
    told = "there is none" if version is None else f"this is {_dotted(version)}"
    return f"NCCL >= {least} between processes, and {told} (pip install -U {name})"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _on_nvidia() -> bool:
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    device = jax.devices()[0]
    version = getattr(getattr(device, "client", None), "platform_version", "")
    return "nvidia" in device.device_kind.lower() or "cuda" in version.lower()
