"""The contenders of the all-reduce benchmark, and their names on the command line."""

import inspect
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.contrib.native import MatrixMethod, NativeMethod
from dynamiq_jax.topologies.links import known


def _whole_bits(method: Callable[..., Any], bits: float | None = None, **options) -> Any:
    """A method whose ``bits`` are those of a code or index; it refuses what is not an integer."""
    if bits is not None:
        options["bits"] = int(bits) if bits == int(bits) else bits
    return method(**options)


def by_density(
    method: Callable[..., Any], bits: float, spare: float = 0, each=16, **options
) -> Any:
    """The density at which ``bits`` are those of what is sent, of ``each``, and ``spare`` ones."""
    return method(density=(bits - spare) / each, **options)


def remembered(
    kind: Any, method: Callable[..., Any] = dq.DynamiQ, bits: float | None = None, **options
) -> dq.ErrorFeedback:
    """Error feedback of that kind around a method of ``bits``, by default DynamiQ."""
    if bits is not None:
        options["bits"] = bits
    return dq.ErrorFeedback(method(**options), kind=kind)


def over_lossy_links(
    method: Callable[..., Any] = dq.DynamiQ, bits: float | None = None
) -> dq.contrib.PacketLoss:
    """The method, by default DynamiQ, where a tenth of the packets of gradients is lost."""
    options = {} if bits is None else {"bits": bits}
    return dq.contrib.PacketLoss(method(**options), rate=0.1)


PAPER = {
    "widths": (2, 4, 8), "floor": None, "rounding": "correlated",
    "format": dq.Format(group_size=16, levels="geometric", subtract_mean=True),
}  # fmt: skip
"""The paper's configuration of DynamiQ."""

LEAST_SQUARED_ERROR = {"floor": None, "format": dq.Format(levels="piecewise")}
"""The options for the least squared error: floors and companded levels, its defaults,
are for the loss of training with Adam (docs/results.md)."""

NARROW = {"widths": (1, 2, 3), "floor": None}
"""The options for about 2 bits, below what the default widths hold with their metadata."""

_NAMED: Mapping[str, Callable[..., Any]] = {
    "dynamiq": dq.DynamiQ,
    "dynamiq-dither": partial(dq.DynamiQ, dither=True),
    "dynamiq-planned": partial(dq.DynamiQ, plan=True),
    "dynamiq-planned-dither": partial(dq.DynamiQ, plan=True, dither=True),
    "dynamiq-even": partial(dq.DynamiQ, plan=False),
    "dynamiq-even-dither": partial(dq.DynamiQ, plan=False, dither=True),
    "dynamiq-mse": partial(dq.DynamiQ, **LEAST_SQUARED_ERROR),
    "dynamiq-mse-dither": partial(dq.DynamiQ, **LEAST_SQUARED_ERROR, dither=True),
    "dynamiq-paper": partial(dq.DynamiQ, **PAPER),
    "bf16": dq.BF16,
    "f32": dq.F32,
    "mxfp8": dq.contrib.MXFP8,
    "mxfp6": dq.contrib.MXFP6,
    "mxfp4": dq.contrib.MXFP4,
    "minmax": partial(_whole_bits, dq.contrib.MinMax),
    "flash": partial(_whole_bits, dq.contrib.MinMax, rounding="nearest"),
    "block-int": partial(_whole_bits, dq.contrib.BlockInt),
    "sdp4bit": partial(dq.contrib.BlockInt, bits=4, smooth=True),
    "loco": lambda: dq.contrib.LoCo(dq.contrib.BlockInt(bits=4)),
    "qsgd": partial(_whole_bits, dq.contrib.GlobalQSGD),
    "thc": partial(_whole_bits, dq.contrib.THC),
    "omnireduce": partial(by_density, dq.contrib.OmniReduce, bits=8, spare=16 / 256),
    "topk-chunked": partial(
        by_density, dq.contrib.OmniReduce, bits=4, spare=16 / 64, block_size=64
    ),
    "dynamiq-ef14": partial(remembered, "ef14"),
    "dynamiq-ef21": partial(remembered, "ef21"),
    "dynamiq-ef21m": partial(remembered, "ef21m"),
    "dynamiq-econtrol": partial(remembered, "econtrol"),
    "marsit": dq.contrib.Marsit,
    "perm-k": dq.contrib.PermK,
    "clt-k": partial(by_density, dq.contrib.CLTK, bits=4, each=24),
    "sidco": partial(by_density, dq.contrib.SIDCo, bits=4, spare=16 / 64, block_size=64),
    "powersgd": dq.contrib.PowerSGD,
    "arc-top-k": partial(by_density, dq.contrib.ARCTopK, bits=3.2),
    "packet-loss": over_lossy_links,
    "f32-packet-loss": lambda: over_lossy_links(dq.F32),
}
"""Methods whose name or options are not those of their class."""


def named(comparators: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Methods by name: those of `_NAMED`, and other comparators by their class's in lower case."""
    known = {part for made in _NAMED.values() for part in (made, *getattr(made, "args", ()))}
    others = {name.lower(): made for name, made in comparators.items() if made not in known}
    for name, made in others.items():
        if "bits" in inspect.signature(made).parameters:
            others[name] = partial(_whole_bits, made)
    return {**_NAMED, **others}


METHODS = named(dq.contrib.METHODS)
"""Methods by the name the command line knows. What is asked for runs, also at sizes that the method
would otherwise leave to native psum. "dynamiq-planned" has a plan over links of any kind,
"dynamiq-even" over none. "flash" is Flash Communication's min-max quantisation. Methods with memory
begin with an empty one, as in a first step."""

MAX_COORDS = 2**31 - 1
"""Coordinates of the largest leaf that is measured."""

COLUMNS = 1024
"""Columns of the matrix that a flat leaf becomes for methods of matrices."""

TOPOLOGIES: Mapping[str, Callable[..., Any]] = {
    "direct": dq.Direct,
    "ring": dq.Ring,
    "butterfly": dq.Butterfly,
    "hierarchical": dq.Hierarchical,
}

NATIVE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "symmetric": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True},
    "one-shot": {"xla_gpu_unsupported_use_all_reduce_one_shot_kernel": True},
}
"""XLA's options for one psum, off by default: NCCL's kernels for symmetric buffers, and a kernel of
XLA in the place of NCCL's for small arrays."""


class Contender(NamedTuple):
    """One way to reduce the leaf."""

    label: str
    reduce: Callable[..., Any]
    """(leaf or tree, axis name or names, key=None) -> what one worker ends with."""
    wire_bytes: Callable[[int, tuple[int, ...]], int] = lambda *_: 0
    """Bytes one worker sends for a leaf of (coordinates, sizes of the axes)."""
    backend: str = "xla"
    topology: Any = None
    """`None`: native collectives."""
    compression: dq.Compression | None = None
    """The options of `dq.psum` in `reduce`; `None`: native collectives."""
    replicated: bool = True
    """Whether all workers end with the same."""
    remembers: bool = False
    """Whether it has memory from step to step, and `reduce` is that of a first step."""
    options: Mapping[str, Any] = MappingProxyType({})
    """XLA's options for its program alone."""


_SIZES = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
_COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}


def _quantity(text: str, units: Mapping[str, int]) -> Decimal | None:
    """The number meant by ``text``, which may end in a unit; `None` if it is not a number."""
    number, factor = text.strip().upper(), 1
    for unit, value in units.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), value
            break
    try:
        exact = Decimal(number) * factor  # 1.1B has no error of rounding
    except ArithmeticError:
        return None
    return exact if exact.is_finite() else None


def parse_size(text: str) -> int:
    """Bytes meant by ``text``: a number with B, KiB, MiB, GiB (powers of 2) or KB, MB, GB."""
    size_bytes = _quantity(text, _SIZES)
    if size_bytes is None:
        raise ValueError(f"size {text!r} is not a size: write for example 16MiB or 1GiB")
    if not 2 <= size_bytes < 2**32 or size_bytes % 2:
        raise ValueError(
            f"size {text!r} is {size_bytes:g} bytes: a bf16 leaf takes an even number of bytes "
            f"from 2 to {2**32 - 2} (under 4GiB)"
        )
    return int(size_bytes)


def parse_sizes(text: str) -> list[int]:
    """The bytes of comma-separated sizes; see `parse_size`."""
    return [parse_size(part) for part in parts(text)]


def parse_params(text: str) -> int:
    """Parameters meant by ``text``: a number with K, M, B or G (powers of ten), as 125M or 1.1B."""
    count = _quantity(text, _COUNTS)
    if count is None or (0 < count <= MAX_COORDS and count % 1):
        raise ValueError(
            f"{text!r} is neither a file nor a whole number of parameters: pass a file of "
            "save_model_tree, or for example 125M"
        )
    if not 1 <= count <= MAX_COORDS:
        raise ValueError(
            f"{text!r} is {count:,.15g} parameters: one leaf takes 1 to {MAX_COORDS:,}; pass the "
            "leaves of a larger model in a file of save_model_tree"
        )
    return int(count)


def parse_topology(text: str, nodes: int | None = None) -> Any:
    """The topology called ``text``, for one axis, or for two if there are several nodes.

    ``nodes`` is `None` where the command has no such option.
    """
    if text not in TOPOLOGIES:
        raise ValueError(f"topology {text!r} is not known: pass one of {', '.join(TOPOLOGIES)}")
    if text == "hierarchical" and (nodes or 1) == 1:
        raise ValueError(
            "topology 'hierarchical' reduces over two axes, and here is one: pass direct, ring or "
            "butterfly" + ("" if nodes is None else ", or --nodes 2 or more")
        )
    return TOPOLOGIES[text]()


def is_native(method: Any) -> bool:
    """Whether a method, or the one in a memory, has native collectives only."""
    return isinstance(getattr(method, "method", method), NativeMethod)


def parts(text: str) -> list[str]:
    """The comma-separated parts, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def parse_bits(text: str) -> list[float]:
    """The wire bits per coordinate of DynamiQ, comma-separated."""
    return [dq.DynamiQ(bits=bits_of(part)).bits for part in parts(text)]


def bits_of(text: str) -> float:
    """Wire bits per coordinate; refuses what is not a finite number."""
    try:
        bits = float(text)
    except ValueError:
        bits = math.nan
    if not math.isfinite(bits):
        raise ValueError(f"{text!r} is not a number of bits: write for example 5")
    return bits


def make_method(
    text: str, known: Mapping[str, Callable[..., Any]] = METHODS, **options: Any
) -> Any:
    """The method meant by ``text``, for example ``dynamiq:5`` (name, wire bits per coordinate)."""
    name, _, bits = text.strip().partition(":")
    if name not in known:
        raise ValueError(f"method {name!r} is not known: pass one of {', '.join(known)}")
    if bits:
        if "bits" not in inspect.signature(known[name]).parameters:
            raise ValueError(f"method {text!r}: {name} has no choice of bits: write {name}")
        try:
            options["bits"] = bits_of(bits)
        except ValueError as error:
            raise ValueError(f"method {text!r}: {error}") from None
    return known[name](**options)


def parse_method(text: str, topology: Any) -> Contender:
    """The contender meant by ``text``, as ``dynamiq:5`` (name, wire bits per coordinate)."""
    method = make_method(text)
    topology = None if is_native(method) else topology
    compression = dq.Compression(method, topology=topology, min_leaf_size=0, min_bucket_size=0)
    matrices = isinstance(method, MatrixMethod)

    def wire_bytes(coords: int, sizes: tuple[int, ...]) -> int:
        # Methods of matrices get rows of COLUMNS, the last one padded.
        shape = (-(-coords // COLUMNS), COLUMNS) if matrices else (coords,)
        leaf = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        return round(compression.explain(leaf, sizes, verbose=False).wire_bytes)

    reduce = _first_step if method.needs_state else dq.psum
    reduce = partial(_folded, reduce) if matrices else reduce
    return Contender(
        label=f"{text.strip()} {'native' if topology is None else type(topology).__name__.lower()}",
        reduce=partial(reduce, compression=compression),
        wire_bytes=wire_bytes,
        backend=method.kernels.backend if method.kernels else "xla",
        topology=topology,
        compression=None if topology is None else compression,
        remembers=method.needs_state,
    )


def _first_step(x: Any, axis_name: Any, key: Any = None, *, compression: dq.Compression) -> Any:
    """A sum by a method with memory, which is empty; what it remembers is thrown away."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    state = compression.init_state(x, tuple(lax.axis_size(name) for name in names))
    return dq.reduce(x, axis_name, op="sum", key=key, state=state, compression=compression).tree


def parse_timed(text: str, topology: Any) -> Contender:
    """`parse_method` of a method that can be timed."""
    contender = parse_method(text, topology)
    if contender.remembers:
        raise ValueError(
            f"method {text.strip()!r} has memory, which is empty here, and a step with it takes "
            "longer; time a training step, or pass a method without"
        )
    return contender


def _folded(reduce: Callable[..., Any], x: jax.Array, axis_name: Any, **options) -> jax.Array:
    """``reduce`` of a flat leaf as a matrix."""
    matrix = jnp.pad(x, (0, -x.size % COLUMNS)).reshape(-1, COLUMNS)
    return reduce(matrix, axis_name, **options).reshape(-1)[: x.size]


def uncompressed() -> Contender:
    """The baseline: `lax.psum` with bf16 on the wire."""

    def exact(x: jax.Array, axis_name: Any, key: Any = None) -> jax.Array:
        return lax.psum(x.astype(jnp.bfloat16), axis_name).astype(x.dtype)

    def wire_bytes(coords: int, sizes: tuple[int, ...]) -> int:
        n_workers = math.prod(sizes)
        return 2 * (n_workers - 1) * coords * 2 // n_workers

    return Contender("bf16 psum", exact, wire_bytes)


def tuned() -> list[Contender]:
    """The baseline's psum under each of `NATIVE_OPTIONS` that this JAX knows."""
    psum = uncompressed()
    return [
        psum._replace(label=f"{psum.label}, {name}", options=options)
        for name, options in NATIVE_OPTIONS.items()
        if known(options)
    ]
