"""`dynamiq-jax simulate`: the error of an all-reduce among thousands of workers, on one device.

The vNMSE of one all-reduce, with the library's own plan, stages, noise and kernels but without
its collectives (`dynamiq_jax.executors.sequential`): workers' gradients are made from a
counter-based hash when their turn comes, and what is alive is one partial sum (of a butterfly log2
n), however many workers there are.

One chunk stands for all. It holds every super-group of the gradient and has, in every stage, the
bits per coordinate that the library gives to chunks; its path or tree visits workers 0, 1, ... in
order. Real workers would each own an n-th of the super-groups, and the chunks would visit the
workers in orders of their own. But gradients of different workers are independent and have the
same distribution, so that the order does not matter to the expected error; and at 8192 workers a
chunk of the paper's 32768 super-groups would be half a tile.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.error import SUPER_GROUP, ErrorRow
from dynamiq_jax.commands.options import announce, checked
from dynamiq_jax.commands.synthetic import lognormal_magnitudes
from dynamiq_jax.executors import ChunkCodec
from dynamiq_jax.executors.sequential import SYNC_EVERY, decode_chunk, reduce_chunk
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.hops import Bound, HopMethod, Message, Shared
from dynamiq_jax.methods.plain import ChunkLayout
from dynamiq_jax.topologies import Topology
from pallas_kernels import mix, seed_words

Values = Float[Array, " d"]
Progress = Callable[[int, int], object]
"""(workers done, of how many)."""


def command(
    workers: Annotated[int, typer.Option(min=2, help="Number of workers.")] = 8192,
    super_groups: options.SuperGroups = None,
    topology: Annotated[
        str, typer.Option(help="ring, butterfly, direct, or several.")
    ] = "ring,butterfly",
    methods: Annotated[
        str, typer.Option(help="Methods over topologies, as `error` has them.")
    ] = "dynamiq:5",
    seeds: options.Seeds = 1,
    json_file: options.JsonFile = None,
) -> None:
    """Simulate the error of an all-reduce among thousands of workers on one device.

    By default a worker has 32768 super-groups, on a CPU 256.
    """
    options.writable({"--json": json_file})
    device = jax.devices()[:1]
    super_groups = super_groups or (256 if options.on_cpu(device) else 32768)
    cases = {}
    for text in contenders.parts(methods):
        method = checked("--methods", contenders.make_method, text)
        for name in contenders.parts(topology):
            route = checked("--topology", contenders.parse_topology, name)
            told = method, route, workers, super_groups
            cases[text, name] = checked("--methods --topology --workers", workers_of, *told)
    rows = [study(case, names, seeds) for names, case in cases.items()]
    title = f"vNMSE of one all-reduce, {super_groups} super-groups, {seeds} seed(s), on one "
    title += device[0].device_kind
    tables.report(rows, tables.ERROR_COLUMNS, title, device, json_file)


# --- Gradients ------------------------------------------------------------------------------------


class Source(NamedTuple):
    """The source of all workers' gradients: independent N(0, M_j² / 256) in super-group j."""

    seed: UInt[Array, " 2"]
    deviation: Float[Array, " M"]
    """Standard deviation of the coordinates of every super-group, common to all workers."""


def mixture_source(key: Array, super_groups: int) -> Source:
    """The paper's mixture."""
    magnitude_key, value_key = jax.random.split(key)
    deviation = lognormal_magnitudes(magnitude_key, super_groups) / math.sqrt(SUPER_GROUP)
    return Source(jax.random.bits(value_key, (2,), jnp.uint32), deviation)


def worker_gradient(source: Source, worker: Int[Array, ""] | int) -> Values:
    """The gradient of one worker: a function of the seed, its number and the coordinate alone."""
    a, b = seed_words(source.seed + mix(jnp.asarray(worker, jnp.uint32) + jnp.uint32(1)))
    counter = jnp.arange(source.deviation.size * SUPER_GROUP, dtype=jnp.uint32)
    word = mix(mix(counter ^ a) + b)
    # Odd multiples of 2^-23 between -1 and 1: symmetric, and exact in f32.
    uniform = ((word >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
    normal = lax.erf_inv(uniform).reshape(-1, SUPER_GROUP)
    return (normal * (math.sqrt(2.0) * source.deviation)[:, None]).reshape(-1)


# --- One simulation -------------------------------------------------------------------------------


class Given(NamedTuple):
    """The arrays that every encoding needs."""

    source: Source
    shared: Shared


@dataclass(frozen=True, slots=True)
class Workers:
    """The method and its sizes, for one chunk that all add to; called, one worker's codec."""

    method: HopMethod
    bound: Bound

    def __call__(self, given: Given, worker: Array) -> ChunkCodec:
        """The codec of one worker's gradient."""
        x = worker_gradient(given.source, worker)
        return self.method.codec(x, given.shared, self.bound, dtype=jnp.float32)


def workers_of(method: Any, topology: Topology, n_workers: int, super_groups: int) -> Workers:
    """The workers of a simulation, whose payloads travel in one stream.

    Raises:
      ValueError: the topology does not serve so many workers.
      NotImplementedError: the method does not run over topologies, or has memory.
    """
    if not isinstance(method, HopMethod) or method.needs_state:
        raise NotImplementedError(
            f"{method!r}: one step of a method over topologies and without memory is simulated; "
            "pass for example dynamiq:5 or mxfp8"
        )
    topology.check(n_workers)
    size = super_groups * SUPER_GROUP
    one_stream: Any = dataclasses.replace(topology, streams=1)
    return Workers(method, one_chunk(method.bind(n_workers * size, n_workers, one_stream), size))


class _OneChunk(Layout):
    """A layout of a single chunk that all ``n_workers`` add to."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


def one_chunk(bound: Bound, size: int) -> Bound:
    """Sizes for one chunk of ``size`` coordinates, as the n chunks of ``bound`` have them.

    So every stage has the bits that the library gives it, with no padding but that of one chunk.
    """
    layout = bound.layout
    assert layout.chunks_per_worker == 1
    if isinstance(layout, ChunkLayout):
        return bound._replace(layout=dataclasses.replace(layout, size=size, n_workers=1))
    names = (field.name for field in dataclasses.fields(layout))
    fields: dict[str, Any] = {name: getattr(layout, name) for name in names}
    fields["size"] = size
    return bound._replace(layout=_OneChunk(**fields))


class Totals(NamedTuple):
    """The findings of a pass over all workers ahead of the first hop."""

    high: Values
    """The exact sum of all gradients is high + low, in twice f32's precision."""
    low: Values
    message: Message
    """Floats are summed in f32."""


def add_exactly(sums: tuple[Values, Values], x: Values) -> tuple[Values, Values]:
    """``(high, low)`` plus ``x``: what high rounds off goes to low."""
    high, low = sums
    total = high + x
    added = total - high
    return total, low + ((high - (total - added)) + (x - added))


@partial(jax.jit, static_argnums=0)
def survey(workers: Workers, source: Source) -> Totals:
    """Exact sum and message of all workers."""
    method, n = workers.method, workers.bound.n_workers

    def message_of(x: Values) -> Message:
        """One worker's message as it is sent; floats as f32."""
        sent = method.measure(x, workers.bound)
        widen = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        return jax.tree.map(widen, sent)

    def add(worker: Array, totals: Totals) -> Totals:
        x = worker_gradient(source, worker)
        together = jnp.add if method.agreement == "sum" else jnp.maximum
        message = jax.tree.map(together, totals.message, message_of(x))
        return Totals(*add_exactly((totals.high, totals.low), x), message)

    zeros = jnp.zeros((source.deviation.size * SUPER_GROUP,), jnp.float32)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(message_of, zeros))
    return lax.fori_loop(0, n, add, Totals(zeros, zeros, empty))


@partial(jax.jit, static_argnums=0)
def shared_by_all(workers: Workers, x: Values, message: Message, seed) -> Shared:
    """The plan that every worker has after the small all-reduce; ``x`` is any worker's gradient."""
    method, bound = workers.method, workers.bound
    kind: Any = jax.eval_shape(partial(method.measure, bound=bound), x)
    message = jax.tree.map(lambda leaf, sent: leaf.astype(sent.dtype), message, kind)
    return method.share(message, seed, bound)


def simulate(workers: Workers, key: Array, progress: Progress = lambda done, of: None) -> float:
    """The vNMSE of one all-reduce, |estimate - sum|² / |sum|², of data that follow from the key."""
    layout, route, n = workers.bound
    data_key, seed_key = jax.random.split(key)
    source = mixture_source(data_key, layout.size // SUPER_GROUP)
    totals = survey(workers, source)
    seed = jax.random.bits(seed_key, (2,), jnp.uint32)
    given = Given(source, shared_by_all(workers, totals.high, totals.message, seed))
    payload = reduce_chunk(route, n, workers, given, progress)
    estimate = decode_chunk(workers, route, n, given, payload)
    exact = np.asarray(totals.high, np.float64) + np.asarray(totals.low, np.float64)
    error = np.asarray(estimate, np.float64) - exact
    return float(np.sum(error**2) / np.sum(exact**2))


def study(workers: Workers, names: tuple[str, str], seeds: int) -> ErrorRow:
    """`simulate` for every seed, which says how far it is at every tenth of the workers."""

    def show(done: int, of: int) -> None:
        if 10 * done // of > 10 * (done - SYNC_EVERY) // of:
            announce(f"{' '.join(names)}: {done} of {of} workers")

    found = [simulate(workers, jax.random.key(seed), show) for seed in range(seeds)]
    layout, route, n = workers.bound
    sent = workers.method.wire_bits(n * layout.size, n, route)
    return ErrorRow.of(*names, n, sent / (2 * (n - 1) * layout.size), found)
