"""Golden hashes: SHA-256 of plans, payloads, results and states of fixed calls.

`golden.json` holds the hashes, `test_golden` compares them. A change that should move no bit keeps
them all. After a change that moves bits on purpose, ``python tests/golden.py --renew`` rewrites the
file, and `CHANGELOG.md` gets a line that says which bits moved and why.

Every call works on the same kind of input (`exact_gradients`): sums of squares are exact in
bfloat16 in whatever order they are taken. So the hashes depend neither on the processor nor on what
XLA fuses or reorders: they are equal on JAX 0.10.2 and 0.12.0, with and without optimisations.
Methods of matrices and THC are left out, since their products and rotations round.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as conftest does before JAX starts
    import os

    from compiler import FLAGS

    os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from cases import (
    EVERY_METHOD,
    METHODS,
    OVER,
    TWO_STREAMS,
    over,
    sharded,
    stepper,
    vmapped,
    without_limit_of_padding,
)
from kernel_runs import FORMATS, Operands, programs, used_words
from kernel_runs import payloads as arriving

import dynamiq_jax as dq
import pallas_kernels as pk
from dynamiq_jax.methods.dynamiq.codec import make_plan, order_and_tiles
from dynamiq_jax.methods.dynamiq.layout import Layout

FILE = Path(__file__).with_name("golden.json")
KEY = 7


@cache
def _row() -> tuple[np.ndarray, np.random.Generator]:
    """256 integers of at most 127 in absolute value: sum 256, sum of squares 2^19.

    The second result is the generator that goes on.
    """
    rng = np.random.default_rng(20261123)
    c = np.arange(111)
    while True:
        v = np.clip(np.rint(rng.laplace(0, 28, 124)), -110, 110).astype(int)
        rest = 2**18 - 128 - int(np.sum(v**2))
        for a, b in rng.integers(0, 110, (400, 2)) if rest > 0 else ():
            left = rest - a * a - b * b - c**2
            d = np.rint(np.sqrt(np.maximum(left, 0))).astype(int)
            found = np.flatnonzero((d**2 == left) & (d <= 110))
            if found.size:
                v = np.concatenate([v, [a, b, found[0], d[found[0]]]])
                return rng.permutation(np.concatenate([v + 1, 1 - v])), rng


@cache
def exact_gradients(n: int, size: int) -> np.ndarray:
    """f32[n, size], distinct on each worker, of exact statistics.

    A super-group of 256 coordinates has the sum of squares 4^k 2^19, and one k for all workers. A
    started super-group has 64 coordinates of 1 or -1, and zeros.
    """
    template, rng = deepcopy(_row())
    rows, rest = divmod(size, 256)
    assert rest == 0 or rest >= 64
    scale = 2.0 ** rng.integers(-6, 3, (rows, 1))
    x = np.stack([[rng.permutation(template) for _ in range(rows)] for _ in range(n)])
    x = (x * scale).reshape(n, -1)
    if rest:
        tail = [rng.permutation(np.arange(rest) < 64) * rng.choice([-1, 1], rest) for _ in range(n)]
        x = np.concatenate([x, tail], axis=1)
    return x.astype(np.float32)


def digest(tree: Any) -> str:
    """SHA-256 of the dtypes, shapes and bytes of all leaves, in order."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        leaf = np.asarray(leaf)
        found.update(f"{leaf.dtype.name}{leaf.shape}".encode())
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


CALLS: dict[str, Callable[[], Any]] = {}
"""Name -> function of no arguments, which returns what is hashed."""


def key() -> jax.Array:
    """The PRNG key of all calls."""
    return jax.random.key(KEY)


def summed(method, topology, n: int, size: int = 4 * 2048 + 356, dtype=np.float32, **options):
    """`dq.psum` of one leaf."""
    x = jnp.asarray(exact_gradients(n, size), dtype)
    return vmapped(method, topology, **options)(x, key())


def plan_of(layout: Layout, n: int) -> Any:
    """The plan for n workers' statistics, with the seed that follows from them."""
    x = exact_gradients(n, layout.size)
    x = np.pad(x, ((0, 0), (0, layout.rows * 256 - layout.size))).reshape(n, layout.rows, 256)
    parts = [np.sum(x**2, axis=(0, 2))]
    if layout.stats_per_super_group == 2:
        parts.append(np.sum(x, axis=(0, 2)) / (256 * n))
    stats = jnp.asarray(np.stack(parts), jnp.bfloat16)
    return jax.jit(lambda stats: make_plan(stats, jnp.uint32(0), layout))(stats)


def payloads_of(name: str) -> Any:
    """Payloads of `compress` and one hop under format ``name``, without unspecified words."""
    fmt = FORMATS[name]
    size = 2 * 8 * 2 * fmt.super_group_size + 1000
    groups = {"group_size": fmt.group_size, "super_group_size": fmt.super_group_size}
    scales = {"group_scale": fmt.group_scale, "levels": fmt.levels, "subtract_mean": True}
    layout = dq.DynamiQ(
        widths=fmt.widths, floor=None, bits=5.25, rounding=fmt.rounding, dither=fmt.dither,
        format=dq.Format(**groups, **scales),
    ).layout(size, 2, dq.Ring(balance=0.8))  # fmt: skip
    x = jnp.asarray(exact_gradients(4, size))
    rows = jnp.pad(x, ((0, 0), (0, layout.rows * fmt.super_group_size - size)))
    rows = rows.reshape(4, layout.rows, -1)
    pad = (0, layout.super_groups - layout.rows)
    order, tiles, _ = jax.jit(lambda energy: order_and_tiles(energy, layout))(
        jnp.sum(rows**2, axis=(0, 2))
    )
    mean = jnp.pad(jnp.mean(rows[0], axis=1), pad).astype(jnp.bfloat16).astype(jnp.float32)
    noise = pk.slot_noise(jnp.array([3, 4], jnp.uint32), 5, fmt.rounding)
    given = Operands(x, mean, 2 * mean, order, tiles, noise)
    kernels = programs(layout, fmt, jnp.float32, "jnp")
    arrived = arriving(layout, fmt, given)
    words = [used_words(part, fmt) for part in tiles]
    first = jax.jit(kernels["compress"])(given, arrived)[:, : words[0]]
    hop = jax.jit(kernels["decompress_accumulate_recompress"])(given, arrived)[:, : words[1]]
    return order, tiles, first, hop, jax.jit(kernels["decompress"])(given, arrived)


def with_states(method, topology) -> Any:
    """Results and states of two steps."""
    n = 4
    x = exact_gradients(n, 2 * 2048 + 100)
    state = over(topology, method).init_state(jnp.asarray(x[0]), n)
    state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), state)
    found = []
    for i in range(2):
        total, state = stepper(method, topology)(x * 2.0**i, jax.random.key(i), state)
        found += [total, state]
    return found


def half(collective, dtype=np.float32, **options) -> Any:
    """`psum_scatter` or `all_gather` of one leaf among four workers."""

    def one(x, key):
        return collective(x, "data", tiled=True, key=key, **options)

    x = jnp.asarray(exact_gradients(4, 4 * 2048), dtype)
    return jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))(x, key())


def two_axes(topology, method) -> Any:
    """`dq.psum` over the axes "node" (2) and "gpu" (4)."""

    def one(x, key):
        return dq.psum(x, ("node", "gpu"), compression=over(topology, method), key=key)

    inner = jax.vmap(one, in_axes=(0, None), axis_name="gpu")
    x = exact_gradients(8, 4 * 2048 + 356).reshape(2, 4, -1)
    return jax.jit(jax.vmap(inner, in_axes=(0, None), axis_name="node"))(x, key())


def tree() -> Any:
    """A mean of leaves of several dtypes, in two buckets, with small leaves, methods by path."""
    x = exact_gradients(4, 4 * 2048 + 356)
    leaves = {
        "embed": x[:, : 16 * 256].reshape(4, 64, 64),
        "head": jnp.asarray(x[:, 256:5376].reshape(4, 64, 80), jnp.bfloat16),
        "norm": x[:, :96],
        "step": np.arange(4, dtype=np.int32),
        "up": x[:, 1024:7168].reshape(4, 96, 64),
    }

    def by_path(path, leaf):
        return dq.DynamiQ(bits=4 if path == "up" else 5, format=dq.Format(scale_axis="auto"))

    request = dq.Compression(by_path, min_leaf_size=1000, min_bucket_size=1000)
    return vmapped(request, dq.Direct(), mean=True)(leaves, key())


DEFAULT = METHODS["default"]
LAYOUTS = {
    "direct of 8": (DEFAULT, dq.Direct(), 8),
    "ring of 4": (DEFAULT, dq.Ring(), 4),
    "paper": (METHODS["paper"], dq.Ring(balance=0.0), 4),
}
for _name, (_method, _topology, _n) in LAYOUTS.items():
    _layout = _method.method.layout(40 * 2048 + 356, _n, _topology)
    CALLS[f"plan, {_name}"] = partial(plan_of, _layout, _n)
CALLS["plan, scatter"] = partial(
    plan_of, DEFAULT.method.layout(9 * 256, 4, dq.Direct(), "reduce_scatter"), 4
)
for _name in ("default", "paper", "odd widths", "bf16 scales", "dither", "uniform"):
    CALLS[f"payloads, {_name}"] = partial(payloads_of, _name)
CALLS |= {
    "psum, direct of 8": partial(summed, DEFAULT, dq.Direct(), 8),
    "psum, direct of 3, bf16": partial(summed, DEFAULT, dq.Direct(), 3, dtype=jnp.bfloat16),
    "psum, direct of 2, f16": partial(summed, DEFAULT, dq.Direct(), 2, dtype=np.float16),
    "psum, ring of 4": partial(summed, DEFAULT, dq.Ring(unroll_up_to=4), 4),
    "psum, ring of 5, a loop": partial(summed, DEFAULT, OVER["ring"], 5),
    "psum, butterfly of 8": partial(summed, DEFAULT, dq.Butterfly(), 8),
    "psum, two streams": partial(summed, DEFAULT, dq.Direct(**TWO_STREAMS), 4, 8 * 2048),
    "pmean, direct of 3": partial(summed, DEFAULT, dq.Direct(), 3, mean=True),
    "psum, dither, butterfly": partial(summed, METHODS["dither"], dq.Butterfly(), 4),
    "psum, paper, ring": partial(summed, METHODS["paper"], OVER["ring"], 4),
    "psum, correlated": partial(summed, METHODS["correlated"], OVER["ring"], 4),
    "psum, squared error": partial(summed, METHODS["squared_error"], dq.Direct(), 4),
    "psum, no key": lambda: jax.jit(
        jax.vmap(
            lambda x: dq.psum(x, "data", compression=over(dq.Direct(), DEFAULT)),
            axis_name="data",
        )
    )(exact_gradients(4, 4 * 2048)),
    "psum, devices": lambda: sharded(DEFAULT, dq.Direct(), n=4)(exact_gradients(4, 8292), key()),
    "psum, devices, permutes": lambda: sharded(DEFAULT, dq.Direct(transport="permutes"), n=4)(
        exact_gradients(4, 8292), key()
    ),
    "psum, hierarchical": without_limit_of_padding()(
        lambda: two_axes(dq.Hierarchical(outer=dq.Ring()), DEFAULT)
    ),
    "psum, hierarchical, inner": lambda: two_axes(
        dq.Hierarchical(inner=dq.Direct(), outer=dq.Direct()), DEFAULT
    ),
    "pmean, tree": tree,
    "psum_scatter": partial(half, dq.psum_scatter, compression=over(dq.Direct(), DEFAULT)),
    "psum_scatter, ring, bf16": partial(
        half, dq.psum_scatter, jnp.bfloat16, compression=over(dq.Ring(unroll_up_to=4), DEFAULT)
    ),
    "all_gather": partial(half, dq.all_gather, compression=DEFAULT),
    "all_gather, bf16": partial(half, dq.all_gather, jnp.bfloat16, compression=DEFAULT),
}
COMPARATORS = {
    "mxfp8": "direct", "mxfp6": "butterfly", "mxfp4": "direct",
    "minmax": "direct", "minmax, nearest": "direct", "qsgd": "direct",
    "omnireduce": "native", "clt-k": "native", "perm-k": "native",
    "bf16": "ring", "f32": "direct",
}  # fmt: skip
for _name, _route in COMPARATORS.items():
    _row_of = EVERY_METHOD[_name]
    CALLS[f"method, {_name}"] = partial(summed, _row_of.method, _row_of.routes[_route], 4)
STATEFUL = {
    "dynamiq, memory": "ring", "dynamiq, ef21": "direct", "minmax, ef14": "direct",
    "mxfp4, econtrol": "ring",
    "sidco, memory": "native", "clt-k, memory": "native", "marsit, full rounds": "ring",
}  # fmt: skip
for _name, _route in STATEFUL.items():
    _row_of = EVERY_METHOD[_name]
    CALLS[f"states, {_name}"] = partial(with_states, _row_of.method, _row_of.routes[_route])

DAILY = (
    "plan, direct of 8", "plan, paper", "plan, scatter", "payloads, default", "payloads, dither",
    "psum, direct of 8", "psum, devices, permutes", "pmean, tree",
    "psum_scatter, ring, bf16", "all_gather", "method, mxfp4", "states, dynamiq, memory",
)  # fmt: skip
"""Calls that `make test` compares; `make test-release` compares all."""


def main() -> int:
    """Compares all calls, or those named; ``--renew`` writes the file instead."""
    renew = "--renew" in sys.argv
    wanted = [name for name in sys.argv[1:] if name != "--renew"] or list(CALLS)
    found = {}
    for name in wanted:
        found[name] = digest(CALLS[name]())
        print(f"{found[name][:16]}  {name}", flush=True)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if renew:
        known = {name: (known | found)[name] for name in CALLS if name in known | found}
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        return 0
    moved = [name for name in wanted if found[name] != known.get(name)]
    print(f"{len(wanted) - len(moved)} equal, {len(moved)} moved: {', '.join(moved)}")
    return bool(moved)


if __name__ == "__main__":
    sys.exit(main())
