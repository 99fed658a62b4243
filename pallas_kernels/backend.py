"""Which implementation of the kernels runs."""

from typing import Literal, get_args

import jax

from pallas_kernels._compat import RUNS_MOSAIC
from pallas_kernels.format import WireFormat

Backend = Literal["triton", "mosaic", "jnp", "interpret"]

WARP = 32
"""Groups of a super-group that kernels of "mosaic" take: one for each thread of a warp."""

MOST_WORKERS = 8
"""Devices of a mesh for push kernels: the GPUs of a host that all reach each other."""


def check_backend(backend: Backend | None) -> None:
    """Refuses an unknown ``backend``. A known one may still not run here."""
    if backend == "pallas":
        raise ValueError(
            "backend='pallas' is called 'triton'; pass backend='triton', or None (the fastest "
            "that runs here)"
        )
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}; expected None or one of {get_args(Backend)}")


def resolve_backend(backend: Backend | None) -> Backend:
    """The backend that ``backend`` means here; `None` chooses by JAX's default platform.

    Raises:
      ValueError: ``backend`` is none of the known ones.
      NotImplementedError: "triton" or "mosaic" is named where no NVIDIA GPU is the default
        platform, or "mosaic" with a JAX that has too little of it.
    """
    check_backend(backend)
    on_nvidia = _on_nvidia()
    if backend is None:
        return "triton" if on_nvidia else "jnp"
    if backend in ("triton", "mosaic") and not on_nvidia:
        raise NotImplementedError(
            f"backend={backend!r} needs an NVIDIA GPU, and JAX's default platform here is "
            f"{jax.default_backend()!r}; pass backend=None (the fastest that runs here), 'jnp', "
            "or 'interpret' (the Triton kernels on Pallas' interpreter, slow)"
        )
    if backend == "mosaic" and not RUNS_MOSAIC:
        raise NotImplementedError(
            f"backend='mosaic' needs JAX >= 0.11, and this is {jax.__version__}; update JAX, or "
            "pass backend=None (the fastest that runs here)"
        )
    return backend


def pushes(fmt: WireFormat, backend: Backend | None) -> bool:
    """Whether one push kernel takes a format; "mosaic" and no backend allow it."""
    return backend in (None, "mosaic") and fmt.groups <= WARP


def check_push(names: tuple[str, ...]) -> None:
    """Refuses push kernels over the axes ``names`` where they cannot run."""
    if (why := needs_of_push(names)) is not None:
        raise NotImplementedError(
            f"transport='push' needs {why}; pass transport='permutes' or 'collectives'"
        )


def needs_of_push(names: tuple[str, ...] = ()) -> str | None:
    """What push kernels over the axes ``names`` need and do not have here; `None`: they run.

    Outside of maps, without ``names``, only the devices and JAX are considered.
    """
    mesh, n_processes = jax.sharding.get_abstract_mesh(), jax.process_count()
    outside = not names and not mesh.manual_axes
    capability = getattr(jax.devices()[0], "compute_capability", "0")
    if not _on_nvidia():
        why = f"NVIDIA GPUs, and JAX's default platform here is {jax.default_backend()!r}"
    elif float(capability) < 9:
        why = f"GPUs of compute capability 9.0 (Hopper) or later, and these have {capability}"
    elif not RUNS_MOSAIC:
        why = f"JAX >= 0.11, and this is {jax.__version__}"
    elif n_processes > 1:
        why = f"GPUs of one process, and there are {n_processes} processes"
    elif outside:
        why = None
    elif not set(names) <= set(mesh.axis_names) == set(mesh.manual_axes):
        why = f"jax.shard_map over all axes of a mesh, and {names} are axes here of {mesh}"
    elif mesh.size > MOST_WORKERS:
        why = f"meshes of up to {MOST_WORKERS} devices, and this one has {mesh.size}"
    else:
        why = None
    return why


def _on_nvidia() -> bool:
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    device = jax.devices()[0]
    version = getattr(getattr(device, "client", None), "platform_version", "")
    return "nvidia" in device.device_kind.lower() or "cuda" in version.lower()
