"""What the all-reduce benchmark compares, and how the command line names it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import dynamiq_jax as dq
from pallas_kernels import resolve_backend

AXIS = "data"

METHODS: Mapping[str, Callable[..., Any]] = {
    "dynamiq": partial(dq.DynamiQ, min_leaf_size=0, min_bucket_size=0),
}
"""Methods by the name the command line knows; each takes ``bits``. What is asked for runs, also
at sizes that the method would otherwise leave to native psum."""

TOPOLOGIES: Mapping[str, Callable[[], Any]] = {"ring": dq.Ring}

BASELINES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
"""Native all-reduces by the dtype on the wire."""


class Contender(NamedTuple):
    """One way to all-reduce the leaf."""

    label: str
    reduce: Callable[[jax.Array], jax.Array]
    wire_bytes: Callable[[int, int], int]
    """Bytes one worker sends for a leaf of (coordinates, workers)."""
    backend: str


def parse_size(text: str) -> int:
    """Bytes meant by ``text``: a number with B, KiB, MiB, GiB (powers of 2) or KB, MB, GB.

    Raises:
      ValueError: not such a size, or not a positive even number of bytes.
    """
    units = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, factor = text.strip().upper(), 1
    for unit, value in (units | {"B": 1}).items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), value
            break
    try:
        size_bytes = float(number) * factor
    except ValueError:
        raise ValueError(f"size {text!r} is not a size: write for example 16MiB or 1GiB") from None
    if not 2 <= size_bytes < 2**32 or size_bytes % 2:
        raise ValueError(
            f"size {text!r} is {size_bytes:g} bytes: a bf16 leaf takes an even number of bytes "
            f"from 2 to {2**32 - 2} (under 4GiB)"
        )
    return int(size_bytes)


def parse_topology(text: str) -> Any:
    """The topology called ``text``.

    Raises:
      ValueError: there is no such topology.
    """
    if text not in TOPOLOGIES:
        raise ValueError(f"topology {text!r} is not known: pass one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[text]()


def parse_method(text: str, topology: Any) -> Contender:
    """The contender meant by ``text``, for example ``dynamiq:5`` (name, wire bits per coordinate).

    Raises:
      ValueError: the method or its bits are not known.
    """
    name, _, bits = text.strip().partition(":")
    if name not in METHODS:
        raise ValueError(f"method {name!r} is not known: pass one of {', '.join(METHODS)}")
    try:
        options = {"bits": float(bits)} if bits else {}
    except ValueError:
        raise ValueError(
            f"method {text!r}: {bits!r} is not a number of bits: write for example {name}:5"
        ) from None
    method = METHODS[name](**options)

    def wire_bytes(coords: int, n_workers: int) -> int:
        leaf = jax.ShapeDtypeStruct((coords,), jnp.bfloat16)
        return dq.wire_bits(leaf, n_workers, method=method, topology=topology) // 8

    return Contender(
        label=f"{text.strip()} {type(topology).__name__.lower()}",
        reduce=lambda x: dq.psum(x, AXIS, method=method, topology=topology),
        wire_bytes=wire_bytes,
        backend=resolve_backend(method.backend),
    )


def native(name: str) -> Contender:
    """The baseline ``name``: `lax.psum` with that dtype on the wire.

    Raises:
      ValueError: there is no such baseline.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline {name!r} is not known: pass one of {', '.join(BASELINES)}")
    dtype = jnp.dtype(BASELINES[name])
    return Contender(
        label=f"{name} psum",
        reduce=lambda x: lax.psum(x.astype(dtype), AXIS).astype(x.dtype),
        wire_bytes=lambda coords, n: 2 * (n - 1) * coords * dtype.itemsize // n,
        backend="xla",
    )
