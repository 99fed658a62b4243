"""A training step of a standard model by four ways: bf16 and compressed, all-reduced and ZeRO-1.

The model is a row of residual blocks of two matrices, in bf16, with AdamW on f32 masters. Every
worker has rows of its own. All ways take the same number of steps, so that losses compare.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.all_reduce import replicas_of
from dynamiq_jax.commands.bench.timing import Timing, time_calls
from dynamiq_jax.commands.options import announce
from dynamiq_jax.core.fingerprint import fingerprint

FIVE_BITS = dq.Compression(dq.DynamiQ(bits=5), min_bucket_bytes=0)
"""Buckets of any size are compressed, since the report compares what it names."""

FULL_RATE = 0.06
"""The learning rate times the width: Adam's steps of wide matrices have to be smaller, or they
diverge, and losses of the ways no longer compare."""

State = Any
Step = Callable[[State, Array], tuple[State, Array]]
"""(state, rows of a worker) -> (state, mean loss), inside of a map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The sizes of the standard model.

    Attributes:
      blocks: residual blocks, each with two matrices.
      width: of the rows.
      hidden: of the rows between both matrices.
      rows: rows of each worker.
    """

    blocks: int = 8
    width: int = 2048
    hidden: int = 8192
    rows: int = 4096

    @property
    def parameters(self) -> int:
        """How many there are."""
        return 2 * self.blocks * self.width * self.hidden

    def init(self) -> list[dict[str, Array]]:
        """The first parameters, f32."""
        keys = jax.random.split(jax.random.key(0), (self.blocks, 2))
        shapes = {"up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        return [
            {
                name: jax.random.normal(key, shape) / math.sqrt(shape[0])
                for key, (name, shape) in zip(own, shapes.items(), strict=True)
            }
            for own in keys
        ]

    def batch(self, mesh: Mesh) -> Array:
        """bf16 rows of all workers; different on each of them."""
        rows = NamedSharding(mesh, P(mesh.axis_names))
        shape = (mesh.size * self.rows, self.width)
        draw = partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
        return jax.jit(draw, out_shardings=rows)(jax.random.key(1))


SMALL = Model(blocks=2, width=64, hidden=256, rows=16)
"""The model of CPU devices, which check that all ways run."""


def loss_of(params: list[dict[str, Array]], x: Array) -> Array:
    """The mean squared distance between what the blocks make of rows, and a function of them."""
    wanted, scale = jnp.sin(3 * jnp.roll(x, 1, axis=-1)), 1 / math.sqrt(len(params))
    for block in params:
        x = x + scale * (jax.nn.gelu(x @ block["up"]) @ block["down"])
    return jnp.mean(jnp.square((x - wanted).astype(jnp.float32)))


def bf16(tree: Any) -> Any:
    """A copy of a tree, in bf16."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def f32(tree: Any) -> Any:
    """A tree, in f32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


class Way(NamedTuple):
    """One way to train."""

    name: str
    state: State
    """The first state, on the mesh."""
    specs: Any
    """How the state is split."""
    step: Step
    copies: Callable[[State], Any]
    """The parameters of a state, which all workers hold."""
    sent_bytes: float
    """Bytes that one worker sends in a step."""
    ours: bool
    """Whether `dq.jit` compiles it, and not `jax.jit`."""
    check_vma: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow(Timing):
    """One way's step.

    Attributes:
      way: its name.
      speedup: over the first way.
      sent_bytes: bytes that one worker sends.
      steps: steps that were taken in all.
      loss: of the last of them.
      hashes: of the parameters' bits, of every worker.
    """

    way: str
    speedup: float
    sent_bytes: float
    steps: int
    loss: float
    hashes: tuple[str, ...]


def optimizer_of(params: Any) -> optax.GradientTransformation:
    """AdamW at the learning rate for the width of these parameters."""
    return optax.adamw(FULL_RATE / params[0]["up"].shape[0])


def names_of(mesh: Mesh) -> Any:
    """The name of the workers' axis, or their names."""
    return mesh.axis_names if len(mesh.axis_names) > 1 else "".join(mesh.axis_names)


def replicated(name: str, mesh: Mesh, params: Any, mean: Callable[..., Any], sent: float) -> Way:
    """Data parallel: every worker updates all, by the mean gradients."""
    axes, optimizer = names_of(mesh), optimizer_of(params)

    def step(state: State, x: Array) -> tuple[State, Array]:
        masters, inner = state
        copies = lax.pcast(bf16(masters), axes, to="varying")
        loss, grads = jax.value_and_grad(loss_of)(copies, x)
        updates, inner = optimizer.update(f32(mean(grads, axes)), inner, masters)
        return (optax.apply_updates(masters, updates), inner), lax.pmean(loss, axes)

    masters = jax.tree.map(partial(jnp.array, copy=True), params)
    inner = jax.jit(optimizer.init, out_shardings=NamedSharding(mesh, P()))(masters)
    ours = mean is not lax.pmean
    return Way(name, (masters, inner), P(), step, lambda state: state[0], sent, ours)


def bf16_zero(name: str, mesh: Mesh, params: Any, sent: float) -> Way:
    """ZeRO-1 by JAX's own collectives; leaves are split as flat arrays with zeros at the end."""
    axes, n, optimizer = names_of(mesh), mesh.size, optimizer_of(params)
    split = P(mesh.axis_names)

    def flat(x: Array) -> Array:
        return jnp.pad(x.reshape(-1), (0, -x.size % n))

    def scatter(grad: Array) -> Array:
        return lax.psum_scatter(flat(grad), axes, tiled=True).astype(jnp.float32) / n

    def gather(master: Array, shape: tuple[int, ...]) -> Array:
        whole = lax.all_gather(master.astype(jnp.bfloat16), axes, tiled=True)
        return whole[: math.prod(shape)].reshape(shape)

    def step(state: State, x: Array) -> tuple[State, Array]:
        copies, masters, inner = state
        loss, grads = jax.value_and_grad(loss_of)(copies, x)
        updates, inner = optimizer.update(jax.tree.map(scatter, grads), inner, masters)
        masters = optax.apply_updates(masters, updates)
        copies = jax.tree.map(lambda x, like: gather(x, like.shape), masters, copies)
        return (copies, masters, inner), lax.pmean(loss, axes)

    def init(params: Any) -> State:
        masters = jax.tree.map(flat, params)
        return bf16(params), masters, optimizer.init(masters)

    *_, inner = jax.eval_shape(init, params)
    specs = P(), split, jax.tree.map(lambda x: split if x.ndim else P(), inner)
    placed = jax.tree.map(partial(NamedSharding, mesh), specs)
    state = jax.jit(init, out_shardings=placed)(params)
    # The types of what `lax.all_gather` returns do not say that it is the same on all workers.
    return Way(name, state, specs, step, lambda s: s[0], sent, ours=False, check_vma=False)


def sharded_updates(name: str, mesh: Mesh, params: Any, sent: float) -> Way:
    """ZeRO-1 by `dq.optax.sharded`: gradients at 5 bits, differences at its default, 2.5."""
    axes = names_of(mesh)
    optimizer = dq.optax.sharded(optimizer_of(params), axes, compression=FIVE_BITS)

    def step(state: State, x: Array) -> tuple[State, Array]:
        copies, inner = state
        varying = lax.pcast(copies, axes, to="varying")
        loss, grads = jax.value_and_grad(loss_of)(varying, x)
        updates, inner = optimizer.update(grads, inner, copies)
        return (optax.apply_updates(copies, updates), inner), lax.pmean(loss, axes)

    params = bf16(params)
    inner = dq.optax.init(optimizer, params, mesh)
    specs = P(), dq.optax.state_specs(inner)
    return Way(name, (params, inner), specs, step, lambda s: s[0], sent, ours=True)


def ways(mesh: Mesh, model: Model) -> list[Way]:
    """The four ways, with equal first parameters."""
    params = jax.jit(model.init, out_shardings=NamedSharding(mesh, P()))()
    plans = FIVE_BITS.explain(bf16(params), mesh.devices.shape, verbose=False).ways
    ours = {plan.name: plan.sent_bytes for plan in plans}
    native = 2 * (mesh.size - 1) / mesh.size * 2 * model.parameters
    five_bits = partial(dq.pmean, compression=FIVE_BITS)
    return [
        replicated("bf16 psum", mesh, params, lax.pmean, native),
        replicated("dq.pmean, 5 bits", mesh, params, five_bits, ours["data parallel"]),
        bf16_zero("bf16 ZeRO-1", mesh, params, native),
        sharded_updates("dq.optax.sharded, 5 + 2.5 bits", mesh, params, ours["sharded updates"]),
    ]


def hashes_of(mesh: Mesh, tree: Any) -> tuple[str, ...]:
    """A hash of the bits of a replicated tree on every worker, in the order of the mesh."""
    rows = NamedSharding(mesh, P(mesh.axis_names))

    def own(x: Array) -> Array:  # a program that gets one replicated array may take all for equal
        like: Any = jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=rows)
        return replicas_of(x, like)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names))
    def hashes(tree: Any) -> Array:
        return fingerprint(tree)[None]

    found = multihost_utils.process_allgather(hashes(jax.tree.map(own, tree)), tiled=True)
    return tuple(f"{int(number):08x}" for number in found)


def compiled(mesh: Mesh, way: Way, x: Array, number: int) -> Callable[[State, Array], Any]:
    """The program of a way's step."""

    def mapped(state: State, x: Array) -> tuple[State, Array]:
        specs: Any = {"in_specs": (way.specs, P(mesh.axis_names)), "out_specs": (way.specs, P())}
        return jax.shard_map(way.step, mesh=mesh, check_vma=way.check_vma, **specs)(state, x)

    # Processes that share one compiled program find it by the function's name.
    mapped.__name__ = f"report_step_{number}"
    jit = dq.jit if way.ours else jax.jit
    program = jit(mapped, donate_argnums=0).lower(way.state, x).compile()
    announce(f"compiled a step of {way.name}")
    return program


def bench_steps(
    mesh: Mesh, model: Model, repeats: Callable[[Sequence[Callable[[], Any]]], int]
) -> list[StepRow]:
    """Times a step of all ways in turn; ``repeats`` of the calls says how many steps are timed.

    All processes of the mesh call this function alike.
    """
    x, chosen = model.batch(mesh), ways(mesh, model)
    states, losses, taken = (
        [way.state for way in chosen],
        [jnp.zeros(())] * len(chosen),
        [0] * len(chosen),
    )
    programs = [compiled(mesh, way, x, number) for number, way in enumerate(chosen)]

    def call(number: int) -> Array:
        states[number], losses[number] = programs[number](states[number], x)
        taken[number] += 1
        return losses[number]

    calls = [partial(call, number) for number in range(len(chosen))]
    timings = time_calls(calls, repeats=repeats(calls))
    first = timings[0].time_us
    return [
        StepRow(
            way=way.name,
            speedup=first / timing.time_us,
            sent_bytes=way.sent_bytes,
            steps=taken[number],
            loss=float(losses[number]),
            hashes=hashes_of(mesh, way.copies(states[number])),
            **asdict(timing),
        )
        for number, (way, timing) in enumerate(zip(chosen, timings, strict=True))
    ]
