"""Facts about the links between JAX's devices."""

import jax

from pallas_kernels.peers import connected, disabled


def in_one_domain() -> bool:
    """Whether every pair of JAX's devices talks at full rate, as far as JAX knows."""
    if jax.process_count() == 1:
        return True
    devices = jax.devices()
    domains = {getattr(d, "slice_index", None) for d in devices}
    return devices[0].platform in ("gpu", "cuda") and len(domains) == 1 and domains != {None}


def fast_links() -> bool:
    """Whether NVLink connects all GPUs, and NCCL may use it."""
    return _nvlink() and disabled() is None


def slow_by_choice() -> str | None:
    """The setting by which NCCL may not use the NVLink that connects all GPUs, else `None`."""
    return disabled() if _nvlink() else None


def _nvlink() -> bool:
    """Whether the GPUs are in one domain, and of a kind that is only built with NVLink.

    A virtual machine may have such GPUs without their links: CUDA tells this of one process's GPUs.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    known = ("SXM", "HBM3", "H200", "B200", "B300", "GB200", "GB300", "GH200")
    built = "PCIe" not in kind and any(name in kind for name in known)
    return built and in_one_domain() and (jax.process_count() > 1 or connected(devices))
