"""Which implementation of the kernels runs."""

from typing import Literal, get_args

import jax

Backend = Literal["pallas", "jnp", "interpret"]


def resolve_backend(backend: Backend | None) -> Backend:
    """The backend that ``backend`` means here; `None` chooses by JAX's default platform.

    Raises:
      ValueError: ``backend`` is none of the known ones.
      NotImplementedError: "pallas" was asked for where no NVIDIA GPU is the default platform.
    """
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r}; expected None or one of {get_args(Backend)}")
    on_nvidia = _on_nvidia()
    if backend is None:
        return "pallas" if on_nvidia else "jnp"
    if backend == "pallas" and not on_nvidia:
        raise NotImplementedError(
            f"backend='pallas' needs an NVIDIA GPU, and JAX's default platform here is "
            f"{jax.default_backend()!r}; pass backend=None (the fastest that runs here), 'jnp', "
            "or 'interpret' (the Pallas kernels on an interpreter, slow)"
        )
    return backend


def _on_nvidia() -> bool:
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    return "nvidia" in jax.devices()[0].device_kind.lower() or _cuda_platform()


def _cuda_platform() -> bool:
    version = getattr(jax.devices()[0].client, "platform_version", "")
    return "cuda" in version.lower()
