"""`dynamiq-jax simulate`: the error of an all-reduce among thousands of workers, on one device.

It runs the method's own plan, noise and kernels, but no collectives
(`dynamiq_jax.executors.sequential`). A worker's gradient is made from a hash when its turn comes.

One chunk stands for all. It holds every super-group of the gradient, and has in every stage the
bits per coordinate that the library gives to chunks. Its path or tree visits workers 0, 1, ... in
order. Real workers would each own an n-th of the super-groups, and the chunks would visit the
workers in orders of their own. Gradients of different workers are independent and have the same
distribution, so that the order does not matter to the expected error.
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
from jaxtyping import Float, UInt

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.error import SUPER_GROUP, ErrorRow
from dynamiq_jax.commands.options import announce, checked
from dynamiq_jax.commands.synthetic import lognormal_magnitudes
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.executors.codec import ChunkCodec
from dynamiq_jax.executors.sequential import SYNC_EVERY, decode_chunk, reduce_chunk
from dynamiq_jax.methods.base import Call, HopMethod, Message, Shared
from dynamiq_jax.methods.dynamiq.layout import Layout
from dynamiq_jax.methods.plain import ChunkLayout
from dynamiq_jax.topologies import Topology
from pallas_kernels import mix, seed_words

Values = Float[Array, " d"]
Progress = Callable[[int, int], object]
"""(workers done, of how many)."""

MOST_WORKERS = 2**16
"""Tables of who sends what to whom have n or more entries of every step."""


def command(
    workers: Annotated[str, typer.Option(help="Numbers of workers, comma-separated.")] = "8,64,512",
    topology: Annotated[
        str, typer.Option(help="ring, butterfly, direct, or several.")
    ] = "ring,butterfly",
    methods: Annotated[
        str, typer.Option(help="Methods over topologies, as `error` has them.")
    ] = "dynamiq:5",
    super_groups: options.SuperGroups = None,
    seeds: options.Seeds = 1,
    json_file: options.JsonFile = None,
) -> None:
    """Simulate the error of an all-reduce among thousands of workers on one device.

    By default a worker has 4096 super-groups, on a CPU 64.
    """
    options.writable(json_file)
    device = jax.devices()[:1]
    super_groups = super_groups or (64 if options.on_cpu(device) else 4096)
    counts = checked("--workers", numbers_of_workers, workers)
    cases = {}
    for text in contenders.parts(methods):
        method = checked("--methods", contenders.make_method, text)
        for name in contenders.parts(topology):
            route = checked("--topology", contenders.parse_topology, name)
            for n in counts:
                told = method, route, n, super_groups
                cases[text, name, n] = checked("--methods --topology --workers", workers_of, *told)
    rows = [study(case, text, name, seeds) for (text, name, _), case in cases.items()]
    title = f"vNMSE of one simulated all-reduce, {super_groups} super-groups, {seeds} seed(s)"
    tables.report(rows, tables.ERROR_COLUMNS, title, device, json_file)


def numbers_of_workers(text: str) -> list[int]:
    """The comma-separated numbers of workers.

    Raises:
      ValueError: one of them is no integer from 2 to `MOST_WORKERS`.
    """
    for part in contenders.parts(text):
        if not part.isdecimal() or not 2 <= int(part) <= MOST_WORKERS:
            raise ValueError(
                f"{part!r} is not a number of workers from 2 to {MOST_WORKERS}; pass for example "
                "8,64,8192"
            )
    return [int(part) for part in contenders.parts(text)]


# --- Gradients ------------------------------------------------------------------------------------


class Source(NamedTuple):
    """The source of all workers' gradients: independent N(0, M_j² / 256) in super-group j."""

    seed: UInt[Array, " 2"]
    deviation: Float[Array, " M"]
    """Standard deviation of the coordinates of every super-group, common to all workers."""


@partial(jax.jit, static_argnums=1)
def mixture_source(key: Array, super_groups: int) -> Source:
    """The paper's mixture."""
    pick_key, wide_key, value_key = jax.random.split(key, 3)
    magnitude = lognormal_magnitudes(pick_key, wide_key, super_groups)
    deviation = magnitude / math.sqrt(SUPER_GROUP)
    return Source(jax.random.bits(value_key, (2,), jnp.uint32), deviation)


def worker_gradient(source: Source, worker: Array | int) -> Values:
    """The gradient of one worker: a function of the seed, its number and the coordinate alone."""
    a, b = seed_words(source.seed + mix(jnp.asarray(worker, jnp.uint32) + jnp.uint32(1)))
    counter = jnp.arange(source.deviation.size * SUPER_GROUP, dtype=jnp.uint32)
    word = mix(mix(counter ^ a) + b)
    # Odd multiples of 2^-23 between -1 and 1: symmetric, and exact in f32.
    uniform = ((word >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1.0
    normal = lax.erf_inv(uniform).reshape(-1, SUPER_GROUP)
    return (normal * (math.sqrt(2.0) * source.deviation)[:, None]).reshape(-1)


# --- One simulation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member(Axis):
    """One of ``count`` workers, without a mapped axis.

    Attributes:
      count: workers that reduce together.
      number: this worker's number, int32.
    """

    count: int = 1
    number: Any = 0

    @property
    def size(self) -> int:
        """Workers that reduce together."""
        return self.count

    @property
    def index(self) -> Array:
        """This worker's number, int32."""
        return self.number


class Given(NamedTuple):
    """The arrays that every encoding needs."""

    source: Source
    shared: Shared
    seed: UInt[Array, " 2"]


@dataclass(frozen=True, slots=True)
class Workers:
    """The method and its sizes, for one chunk that all add to; called, one worker's codec."""

    method: HopMethod
    topology: Topology
    n_workers: int
    layout: Any

    def call(self, worker: Array | int, seed: UInt[Array, " 2"]) -> Call:
        """Returns the call by which the method runs this worker's part."""
        return Call(Member((), count=self.n_workers, number=worker), self.topology, seed)

    def __call__(self, given: Given, worker: Array) -> ChunkCodec:
        """The codec of one worker's gradient."""
        x, call = worker_gradient(given.source, worker), self.call(worker, given.seed)
        return self.method.codec(x, given.shared, self.layout, call)


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
    method.check(n_workers, topology)
    size = super_groups * SUPER_GROUP
    one_stream = dataclasses.replace(topology, streams=1)
    layout = one_chunk(method.layout(n_workers * size, n_workers, one_stream), size)
    return Workers(method, one_stream, n_workers, layout)


class _OneChunk(Layout):
    """A layout of a single chunk that all ``n_workers`` add to."""

    __slots__ = ()

    @property
    def chunks(self) -> int:
        """One, whatever the number of workers."""
        return 1


def one_chunk(layout: Any, size: int) -> Any:
    """Sizes for one chunk of ``size`` coordinates, as the n chunks of ``layout`` have them.

    So every stage has the bits that the library gives it, with no padding but that of one chunk.
    """
    assert layout.chunks_per_worker == 1
    if isinstance(layout, ChunkLayout):
        return dataclasses.replace(layout, size=size, n_workers=1)
    fields: dict[str, Any] = {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
    fields["size"] = size
    return _OneChunk(**fields)


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
    method = workers.method

    def first(worker: Array | int) -> Totals:
        """One worker's gradient and message, whose floats are f32 as long as they are added."""
        x = worker_gradient(source, worker)
        sent = jax.tree.map(
            lambda m: m.astype(jnp.float32) if jnp.issubdtype(m.dtype, jnp.floating) else m,
            method.measure(x, workers.layout),
        )
        return Totals(x, jnp.zeros_like(x), sent)

    def add(worker: Array, totals: Totals) -> Totals:
        own = first(worker)
        together = jnp.add if method.agreement == "sum" else jnp.maximum
        message = jax.tree.map(together, totals.message, own.message)
        return Totals(*add_exactly((totals.high, totals.low), own.high), message)

    return lax.fori_loop(1, workers.n_workers, add, first(0))


@partial(jax.jit, static_argnums=0)
def shared_by_all(workers: Workers, x: Values, message: Message, seed) -> Shared:
    """The plan that every worker has after the small all-reduce; ``x`` is any worker's gradient."""
    sent: Any = jax.eval_shape(lambda x: workers.method.measure(x, workers.layout), x)
    message = jax.tree.map(lambda found, own: found.astype(own.dtype), message, sent)
    return workers.method.share(message, workers.layout, workers.call(0, seed))


def simulate(workers: Workers, key: Array, progress: Progress = lambda done, of: None) -> float:
    """The vNMSE of one all-reduce, |estimate - sum|² / |sum|², of data that follow from the key."""
    topology, n, layout = workers.topology, workers.n_workers, workers.layout
    data_key, seed_key = jax.random.split(key)
    source = mixture_source(data_key, layout.size // SUPER_GROUP)
    totals = survey(workers, source)
    seed = jax.random.bits(seed_key, (2,), jnp.uint32)
    given = Given(source, shared_by_all(workers, totals.high, totals.message, seed), seed)
    payload = reduce_chunk(topology, n, workers, given, progress)
    estimate = decode_chunk(workers, topology, n, given, payload)[: layout.size]
    exact = np.asarray(totals.high, np.float64) + np.asarray(totals.low, np.float64)
    error = np.asarray(estimate, np.float64) - exact
    return float(np.sum(error**2) / np.sum(exact**2))


def study(workers: Workers, method: str, topology: str, seeds: int) -> ErrorRow:
    """`simulate` for every seed; it announces every tenth of the workers of large reductions."""
    n, size = workers.n_workers, workers.n_workers * workers.layout.size

    def show(done: int, of: int) -> None:
        if done < of and 10 * done // of > 10 * (done - SYNC_EVERY) // of:
            announce(f"{method} {topology}: {done} of {of} workers")

    found = [simulate(workers, jax.random.key(seed), show) for seed in range(seeds)]
    announce(f"{method} {topology}: {n} workers, vNMSE {np.mean(found):.3e}")
    return ErrorRow(
        method=method,
        topology=topology,
        n_workers=n,
        # A bandwidth-optimal all-reduce passes 2 (n - 1) / n of all coordinates through a worker.
        bits_per_coord=workers.method.wire_bits(size, n, workers.topology)
        / (2 * (n - 1) / n * size),
        vnmse=float(np.mean(found)),
        lowest=min(found),
        highest=max(found),
        seeds=seeds,
    )
