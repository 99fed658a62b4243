"""Every way to train, by name: `make_way` gives its first state and its step.

A name is ``WAY[-checkpoint][-scanned][:GRADIENTS[/OTHERS]]``, as ``zero-pipeline:5/2.5``. `KINDS`
lists the ways. ``checkpoint`` computes each block again in the backward pass. ``scanned`` stacks
the blocks, and runs them in a scan. GRADIENTS says how gradients travel. OTHERS says it of
parameters' differences (zero) or of parameters (fsdp). Each is a number of bits of DynamiQ, with
``d`` after it for dither (``4d``), a method of ``dynamiq-jax error`` (``mxfp8``, ``f32``), or
``few`` of `dq.optax.few_bits`. Differences always have dither. Fewer than 2.375 bits (``4d/2``)
have the widths 1 to 3, and no floor. A method alone (``dynamiq:5``) means ``dp:`` with it.

``f32`` turns each way into its exact twin: `tests/test_ways.py` compares these with plain JAX.
"""

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_jax.optax
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.topologies.links import compiled_by, compiler_options

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from llm_model import Config, init_params, make_stages  # pyright: ignore[reportMissingImports]

State = Any
LEAST_BITS = 2.375
"""Wire bits per coordinate of DynamiQ's narrowest default width, 2, with its metadata."""

ValueAndGrad = Callable[[Any, Array], tuple[Array, Any]]
"""(parameters of every function, tokens) -> (the loss, its gradients)."""


class Model(NamedTuple):
    """A loss as functions that follow each other."""

    functions: tuple[Callable[[Any, Any], Any], ...]
    """From (own parameters, x) to the next one's x, the first of tokens, the last to the loss."""
    shapes: tuple[Any, ...]
    """Shapes of the parameters of each function, f32."""
    split: Callable[[Any], tuple[Any, ...]]
    """From the model's own parameters to those of each function."""
    first_on_explicit: Callable[[Any, str | tuple[str, ...]], Callable] | None = None
    """From (the first function, the workers' axes) to one that says how its result is split."""

    def loss(self, params: Any, tokens: Array) -> Array:
        """The loss, without reductions."""
        x: Any = tokens
        for function, own in zip(self.functions, params, strict=True):
            x = function(own, x)
        return x

    def on_explicit(self, axes: str | tuple[str, ...]) -> "Model":
        """The model for a mesh of Explicit axes."""
        if self.first_on_explicit is None:
            return self
        first = self.first_on_explicit(self.functions[0], axes)
        return self._replace(functions=(first, *self.functions[1:]))


def llama(config: Config, checkpoint: bool = False, scanned: bool = False) -> Model:
    """The example's model: the embedding, every block or all stacked, the head and loss."""
    stages = make_stages(dataclasses.replace(config, remat=checkpoint), scanned)
    shapes = jax.eval_shape(lambda key: stages.split(init_params(config, key)), jax.random.key(0))

    def first_on_explicit(function: Any, axes: Any) -> Callable:
        def embed(params: Any, tokens: Array) -> tuple[Array, Array]:
            # Rows of a table by indices that are split: JAX wants to be told how the rows are.
            (table,) = jax.tree.leaves(params)
            rows = table.at[tokens[:, :-1]].get(out_sharding=P(axes))
            return rows.astype(config.dtype), tokens[:, 1:]

        return embed

    return Model(stages.functions, shapes, stages.split, first_on_explicit)


class Way(NamedTuple):
    """One way to train."""

    model: Model
    """Parameters of its functions are what `init` takes."""
    mesh: Mesh
    """The mesh that `jax.set_mesh` needs around all of this; tokens are split over all of it."""
    init: Callable[[Any], State]
    """From all functions' parameters, whole and f32, to the first state, placed on the mesh."""
    like: State
    """Shapes, dtypes and shardings of a state."""
    step: Callable[[State, Array], tuple[State, Array]]
    """(state, tokens) -> (state, mean loss); `jax.jit` it with `options`."""
    read: Callable[[State], tuple[Any, Any]]
    """The f32 parameters of a state, and the copies that functions take, or `None`."""
    options: dict[str, Any]
    """Options of the compiler."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, optimizer and devices that all ways share."""

    make_model: Callable[..., Model]
    """(checkpoint, scanned) -> the model, its blocks computed again or not, and stacked or not."""
    optimizer: optax.GradientTransformation
    """An optimizer without a clip."""
    mesh: Mesh
    """Auto axes, over all of which the batch is split."""
    max_norm: float | None = None
    """The largest norm of a gradient."""
    dtype: Any = jnp.float32
    """The dtype in which functions take parameters."""
    topology: Any = None
    limits: dict[str, Any] = field(default_factory=dict)
    """Further options of `dq.Compression`."""
    check_vma: bool = True

    @property
    def axes(self) -> Any:
        """The name of the workers' axis, or their names."""
        names = self.mesh.axis_names
        return names if len(names) > 1 else names[0]

    def cast(self, params: Any) -> Any:
        """Parameters as functions take them."""
        return jax.tree.map(lambda w: w.astype(self.dtype), params)

    def request(self, text: str, dither: bool = False) -> dq.Compression:
        """The compression that a part of a way's name says."""
        method, options = text, {}
        if bits := re.fullmatch(r"([\d.]+)(d?)", text):
            method = f"dynamiq-dither:{bits[1]}" if dither or bits[2] else f"dynamiq:{bits[1]}"
            if float(bits[1]) < LEAST_BITS:
                options = contenders.NARROW
        few = dynamiq_jax.optax.few_bits()
        known = contenders.METHODS | {"few": lambda: few.parameters if dither else few.gradients}
        made = contenders.make_method(method, known, **options)
        native = contenders.is_native(made) or isinstance(made, dq.BF16 | dq.F32)
        return dq.Compression(made, topology=None if native else self.topology, **self.limits)

    def copies(self, params: Any) -> Any:
        """Parameters as functions take them, in memory of their own."""
        return jax.tree.map(partial(jnp.array, dtype=self.dtype, copy=True), params)

    def map(self, f: Callable, in_specs: Any, out_specs: Any, check: bool = True) -> Callable:
        """`jax.shard_map` over all workers."""
        options = {"in_specs": in_specs, "out_specs": out_specs}
        check = check and self.check_vma
        return jax.shard_map(f, mesh=self.mesh, check_vma=check, **options)

    def update(self, params: Any, inner: Any, grads: Any, specs: Any = None) -> tuple[Any, Any]:
        """Parameters and the optimizer's state after a step; ``specs`` are those of shards."""
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if self.max_norm is not None:
            squares = jax.tree.map(lambda g: jnp.sum(g**2), grads)
            if specs is not None:
                total = partial(lax.psum, axis_name=self.axes)
                squares = jax.tree.map(lambda s, p: total(s) if _names(p) else s, squares, specs)
            norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
            scale = self.max_norm / jnp.maximum(norm, self.max_norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, inner = self.optimizer.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def start(self, params: Any, mesh: Mesh, specs: Any) -> tuple[Any, Any]:
        """f32 parameters and the optimizer's state, placed on a mesh as ``specs`` say."""
        params = place(params, mesh, specs)
        placed = jax.tree.map(partial(NamedSharding, mesh), self.inner(params, specs))
        return params, jax.jit(self.optimizer.init, out_shardings=placed)(params)

    def inner(self, params: Any, specs: Any) -> Any:
        """How the optimizer's state is split where parameters are split as ``specs`` say."""
        state = jax.eval_shape(self.optimizer.init, params)
        one = lambda _, spec: spec
        others = {"transform_non_params": lambda _: P()}
        return optax.tree_utils.tree_map_params(self.optimizer, one, state, specs, **others)


def _names(spec: P) -> bool:
    return any(entry is not None for entry in spec)


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Puts arrays on a mesh; ``specs`` is a tree of specs or a prefix of it."""
    return jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs))


def placed(shapes: Any, mesh: Mesh, specs: Any) -> Any:
    """Shapes with shardings; ``specs`` is a tree of specs or a prefix of it."""

    def split(spec: P, part: Any) -> Any:
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, spec)), part)

    return jax.tree.map(split, specs, shapes)


def shards(t: Training, model: Model) -> Any:
    """Specs of parameters whose matrices are split by rows."""

    def of_function(function: Any, own: Any) -> Any:
        layers = isinstance(function, dq.Scanned)  # of which the first dimension is the number
        spec = P(*[None] * layers, t.axes)
        return jax.tree.map(lambda w: spec if w.ndim - layers > 1 else P(), own)

    return tuple(map(of_function, model.functions, model.shapes))


def explicit(t: Training) -> Mesh:
    """The mesh with Explicit axes."""
    names = t.mesh.axis_names
    return Mesh(t.mesh.devices, names, axis_types=(AxisType.Explicit,) * len(names))


# --- Data parallel: everybody holds all, gradients are averaged -----------------------------------


def data_parallel(
    t: Training, model: Model, value_and_grad: ValueAndGrad, mesh: Mesh, options: dict
) -> Way:
    """Everybody updates all parameters, by the mean gradients that a function gives."""

    def init(params: Any) -> State:
        return t.start(params, mesh, jax.tree.map(lambda _: P(), params))

    def step(state: State, tokens: Array) -> tuple[State, Array]:
        params, inner = state
        loss, grads = value_and_grad(t.cast(params), tokens)
        return t.update(params, inner, grads), loss

    like = placed(jax.eval_shape(init, model.shapes), mesh, P())
    return Way(model, mesh, init, like, step, lambda state: (state[0], None), options)


def in_a_map(t: Training, checkpoint: bool, text: str = "", *, how: str) -> Way:
    """Data parallel by a map in which every worker differentiates its own loss."""
    request = t.request(text) if text else None
    model, axes = t.make_model(checkpoint and how != "layers"), t.axes
    told = {"compression": request}

    def pipeline(params: Any, tokens: Array) -> Array:
        return dq.overlapped(model.functions, params, tokens, axes, **told)

    def own(params: Any, tokens: Array) -> tuple[Array, Any]:
        losses = {"pipeline": pipeline, "layers": in_layers(model, axes, checkpoint, **told)}
        params = params if how in losses else lax.pcast(params, axes, to="varying")
        loss, grads = jax.value_and_grad(losses.get(how, model.loss))(params, tokens)
        if how == "pmean":
            grads = lax.pmean(grads, axes)
        elif how == "psum":
            grads = dq.pmean(grads, axes, **told)
        return lax.pmean(loss, axes), grads

    mapped = t.map(own, (P(), P(t.mesh.axis_names)), P(), how != "none")
    options = compiler_options() if request else {}  # XLA's own for its own reductions
    return data_parallel(t, model, mapped, t.mesh, options)


def in_layers(model: Model, axes: Any, checkpoint: bool, **options: Any) -> Callable:
    """A loss that reduces, and gathers shards, in each function: `dq.fsdp`."""
    middle = range(1, len(model.functions) - 1)
    specs = options.pop("specs", None) or [None] * len(model.functions)

    def run(number: int, own: Any, copies: Any, x: Any) -> Any:
        function, spec = model.functions[number], specs[number]

        def layer(x: Any, own: Any, copies: Any) -> Any:
            mine = dq.fsdp(own, axes, specs=spec, copies=copies, **options)
            return function(mine, x)

        layer = jax.checkpoint(layer) if checkpoint and number in middle else layer
        return layer(x, own, copies)

    def loss(params: Any, x: Any, copies: Any = None) -> Array:
        for number, own in enumerate(params):
            x = run(number, own, copies and copies[number], x)
        return x

    return loss


def on_mesh(t: Training, checkpoint: bool, text: str, *, kind: str) -> Way:
    """Data parallel by `dq.value_and_grad` on a mesh of Auto or Explicit axes."""
    mesh = explicit(t) if kind == "explicit" else t.mesh
    model = t.make_model(checkpoint)
    model = model.on_explicit(t.axes) if kind == "explicit" else model
    told = {"axis_name": t.axes, "compression": t.request(text), "mesh": mesh}
    value_and_grad = dq.value_and_grad(model.loss, **told)
    return data_parallel(t, model, value_and_grad, mesh, compiler_options())


# --- Sharded updates (ZeRO-1): everybody holds a copy, and updates its slices ---------------------


def sharded_updates(t: Training, checkpoint: bool, text: str, differences: str, *, how: str) -> Way:
    """`dq.optax.sharded` after the backward pass, in it, or outside of maps.

    "dear": in it, and differences of parameters travel beside the next step's forward pass.
    """
    mesh = explicit(t) if how == "explicit" else t.mesh
    model, axes = t.make_model(checkpoint and how != "layers"), t.axes
    model = model.on_explicit(axes) if how == "explicit" else model
    told = {"compression": t.request(text)}
    policy = dq.Policy(gradients=t.request(text), parameters=t.request(differences, dither=True))
    moves = {"max_norm": t.max_norm, "deferred": how == "dear"}
    optimizer = dq.optax.sharded(t.optimizer, axes, compression=policy, **moves)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(t.cast, model.shapes)
        inner = jax.eval_shape(optimizer.init, placed(shapes, mesh, P()))
    specs = dq.optax.state_specs(inner)

    def init(params: Any) -> State:
        # Made with the copies, the state keeps what it has sent in their dtype.
        copies = t.copies(params := place(params, mesh, P()))
        inner = dq.optax.init(optimizer, copies, mesh)
        return copies, dq.optax.set_masters(inner, params)

    def update(copies: Any, inner: Any, loss: Array, grads: Any) -> tuple[State, Array]:
        updates, inner = optimizer.update(grads, inner, copies)
        return (optax.apply_updates(copies, updates), inner), loss

    def scattered(masters: Any, copies: Any, pending: Any, tokens: Array) -> Any:
        options = {"specs": specs.masters, **told}
        if how == "layers":
            return in_layers(model, axes, checkpoint, **options)(masters, tokens, copies)
        options |= {"copies": copies, "pending": pending}
        return dq.overlapped(model.functions, masters, tokens, axes, **options)

    def own(state: State, tokens: Array) -> tuple[State, Array]:
        copies, inner = state
        if how == "after":
            varying = lax.pcast(copies, axes, to="varying")
            loss, grads = jax.value_and_grad(model.loss)(varying, tokens)
        elif how == "dear":
            both = jax.value_and_grad(scattered, has_aux=True)
            (loss, copies), grads = both(inner.masters, copies, inner.pending, tokens)
        else:
            loss, grads = jax.value_and_grad(scattered)(inner.masters, copies, None, tokens)
        return update(copies, inner, lax.pmean(loss, axes), grads)

    def outside(state: State, tokens: Array) -> tuple[State, Array]:
        own = {"axis_name": axes, "mesh": mesh, "unreduced": True, **told}
        value_and_grad = dq.value_and_grad(model.loss, **own)
        return update(*state, *value_and_grad(state[0], tokens))

    state = P(), specs
    maps = (state, P(mesh.axis_names)), (state, P())
    step = outside if how in ("auto", "explicit") else t.map(own, *maps)
    read = lambda state: (state[1].masters, dq.optax.gathered(*state, mesh=mesh))
    like = placed((jax.eval_shape(t.cast, model.shapes), inner), mesh, state)
    return Way(model, mesh, init, like, step, read, compiler_options())


def zero_by_hand(t: Training, checkpoint: bool) -> Way:
    """ZeRO-1 by `lax.psum_scatter` of gradients and `lax.all_gather` of parameters."""
    model, axes, n = t.make_model(checkpoint), t.axes, t.mesh.size
    specs = shards(t, model)
    of_inner = t.inner(model.shapes, specs)

    def init(params: Any) -> State:
        copies = t.copies(place(params, t.mesh, P()))
        return copies, t.start(params, t.mesh, specs)

    def scatter(grad: Array, spec: P) -> Array:
        if not _names(spec):
            return lax.pmean(grad, axes)
        own = lax.psum_scatter(grad, axes, scatter_dimension=len(spec) - 1, tiled=True)
        return own.astype(jnp.float32) / n

    def gather(master: Array, spec: P) -> Array:
        copy = master.astype(t.dtype)
        return lax.all_gather(copy, axes, axis=len(spec) - 1, tiled=True) if _names(spec) else copy

    def own(state: State, tokens: Array) -> tuple[State, Array]:
        copies, (masters, inner) = state
        loss, grads = jax.value_and_grad(model.loss)(copies, tokens)
        grads = jax.tree.map(scatter, grads, specs)
        masters, inner = t.update(masters, inner, grads, specs)
        copies = jax.tree.map(gather, masters, specs)
        return (copies, (masters, inner)), lax.pmean(loss, axes)

    split = P(), (specs, of_inner)
    step = t.map(own, (split, P(t.mesh.axis_names)), (split, P()), check=False)
    read = lambda state: (state[1][0], state[0])
    like = placed(jax.eval_shape(init, model.shapes), t.mesh, split)
    return Way(model, t.mesh, init, like, step, read, {})


# --- FSDP (ZeRO-3): everybody holds shards --------------------------------------------------------


def fsdp(t: Training, checkpoint: bool, text: str = "", gather: str = "", *, how: str) -> Way:
    """Shards that are gathered by a pipeline, in each layer, by `dq.value_and_grad`, or by XLA."""
    mesh = explicit(t) if how == "explicit" else t.mesh
    model, axes = t.make_model(checkpoint and how not in ("layers", "explicit")), t.axes
    specs = shards(t, model)
    model = model.on_explicit(axes) if how == "explicit" else model
    told: dict[str, Any] = {"compression": t.request(text)} if text else {}
    parameters = t.request(gather) if gather else None
    policy = dq.Policy(gradients=told.get("compression"), parameters=parameters)
    gathered: dict[str, Any] = {"compression": policy}
    of_inner = t.inner(model.shapes, specs)

    def init(params: Any) -> State:
        return t.start(params, mesh, specs)

    def pipeline(params: Any, tokens: Array) -> Array:
        options = {"specs": specs, "reshard_after_forward": how != "keep", **gathered}
        return dq.overlapped(model.functions, params, tokens, axes, **options)

    def own(state: State, tokens: Array) -> tuple[State, Array]:
        masters, inner = state
        layers = in_layers(model, axes, checkpoint, specs=specs, **gathered)
        loss = layers if how == "layers" else pipeline
        loss, grads = jax.value_and_grad(lambda m: loss(t.cast(m), tokens))(masters)
        return t.update(masters, inner, grads, specs), lax.pmean(loss, axes)

    def outside(state: State, tokens: Array) -> tuple[State, Array]:
        masters, inner = state
        options = {"axis_name": axes, "mesh": mesh, **told}
        if how == "explicit":
            value_and_grad = dq.value_and_grad(
                in_layers(model, axes, checkpoint, **gathered), ungathered=True, **options
            )
        elif how == "auto":
            value_and_grad = dq.value_and_grad(model.loss, specs=specs, **options)
        else:
            value_and_grad = jax.value_and_grad(model.loss)
        loss, grads = value_and_grad(t.cast(masters), tokens)
        state = t.update(masters, inner, grads)
        if how != "explicit":
            shardings = jax.tree.map(partial(NamedSharding, mesh), split)
            state = lax.with_sharding_constraint(state, shardings)
        return state, loss

    split = specs, of_inner
    inside = how in ("pipeline", "keep", "layers")
    step = t.map(own, (split, P(mesh.axis_names)), (split, P())) if inside else outside
    options = {} if how == "xla" else compiler_options()
    like = placed(jax.eval_shape(init, model.shapes), mesh, split)
    return Way(model, mesh, init, like, step, lambda state: (state[0], None), options)


# --- Names ----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A way without its methods."""

    build: Callable[..., Way]
    """(training, checkpoint, *methods) -> the way."""
    methods: tuple[str, ...] = ()
    """The methods, where the name has none."""
    about: str = ""
    scans: bool = True
    """Whether the exchange can be in a scan over the blocks, or there is none."""


ZERO, FSDP = ("5", "2.5"), ("5", "8")
KINDS = {
    "none": Kind(partial(in_a_map, how="none"), (), "data parallel without gradient exchange"),
    "bf16-psum": Kind(partial(in_a_map, how="pmean"), (), "lax.pmean after the backward pass"),
    "psum": Kind(partial(in_a_map, how="psum"), ("5",), "dq.pmean after the backward pass"),
    "dp": Kind(partial(in_a_map, how="pipeline"), ("5",), "dq.overlapped"),
    "dp-layers": Kind(partial(in_a_map, how="layers"), ("5",), "dq.fsdp", scans=False),
    "auto": Kind(partial(on_mesh, kind="auto"), ("5",), "dq.value_and_grad, Auto axes"),
    "explicit": Kind(partial(on_mesh, kind="explicit"), ("5",), "the same, Explicit axes"),
    "bf16-zero": Kind(zero_by_hand, (), "ZeRO-1 by lax.psum_scatter and lax.all_gather"),
    "zero": Kind(partial(sharded_updates, how="after"), ZERO, "dq.optax.sharded"),
    "zero-pipeline": Kind(partial(sharded_updates, how="pipeline"), ZERO, "after dq.overlapped"),
    "zero-dear": Kind(partial(sharded_updates, how="dear"), ZERO, "the same, in DeAR's order"),
    "zero-layers": Kind(partial(sharded_updates, how="layers"), ZERO, "after fsdp", scans=False),
    "zero-auto": Kind(
        partial(sharded_updates, how="auto"), ZERO, "after value_and_grad, Auto axes"
    ),
    "zero-explicit": Kind(
        partial(sharded_updates, how="explicit"), ZERO, "the same, Explicit axes"
    ),
    "xla-fsdp": Kind(partial(fsdp, how="xla"), (), "shards under jax.jit"),
    "bf16-fsdp": Kind(
        partial(fsdp, text="bf16", gather="bf16", how="layers"),
        (),
        "fsdp-layers in 16 bits",
        scans=False,
    ),
    "fsdp": Kind(partial(fsdp, how="pipeline"), FSDP, "dq.overlapped"),
    "fsdp-keep": Kind(partial(fsdp, how="keep"), FSDP, "the same; payloads stay for the way back"),
    "fsdp-layers": Kind(partial(fsdp, how="layers"), FSDP, "dq.fsdp", scans=False),
    "fsdp-explicit": Kind(
        partial(fsdp, how="explicit"), FSDP, "the same in dq.value_and_grad", scans=False
    ),
    "fsdp-auto": Kind(partial(fsdp, how="auto"), ("5",), "dq.value_and_grad; gathers all, exactly"),
}


def parse(text: str, training: Training) -> tuple[Kind, frozenset[str], tuple[str, ...]]:
    """The kind, what is done with blocks, and the methods of a name; see the module.

    Raises:
      ValueError: there is no such way or method, or the name has more methods than the way.
    """
    name, _, rest = text.partition(":")
    base, *options = re.split("-(?=checkpoint|scanned)", name)
    if base not in KINDS or {*options} - {"checkpoint", "scanned"}:
        try:
            training.request(text)
        except ValueError as error:
            raise ValueError(
                f"way {text!r}: pass one of {', '.join(KINDS)}, or a method; {error}"
            ) from error
        base, options, rest = "dp", [], text
    kind, methods = KINDS[base], tuple(rest.split("/") if rest else ())
    if "scanned" in options and not kind.scans:
        scanning = ", ".join(name for name, own in KINDS.items() if own.scans)
        raise ValueError(
            f"way {text!r}: {base} exchanges each layer by itself; in a scan run {scanning}"
        )
    if len(methods) > len(kind.methods):
        raise ValueError(
            f"way {text!r} has {len(methods)} methods, and {base} takes {len(kind.methods)}"
        )
    for method in methods:
        training.request(method)
    methods += kind.methods[len(methods) :]
    return kind, frozenset(options), methods


def make_way(text: str, training: Training) -> Way:
    """The way that a name means."""
    kind, blocks, methods = parse(text, training)
    if "scanned" in blocks:
        model = partial(training.make_model, scanned=True)
        training = dataclasses.replace(training, make_model=model)
    return kind.build(training, "checkpoint" in blocks, *methods)


_numbers = itertools.count()


def jitted(way: Way) -> Any:
    """The step under `jax.jit`; it donates the state."""

    @wraps(way.step)
    def step(state: Any, tokens: Any) -> Any:
        with compiled_by(way.options):
            return way.step(state, tokens)

    # Processes that share one compiled program find it by the function's name.
    step.__name__ = f"step_{next(_numbers)}"
    return jax.jit(step, donate_argnums=0, compiler_options=way.options or None)


def lower(way: Way, state: Any, tokens: Any) -> Any:
    """The program of a step."""
    with jax.set_mesh(way.mesh):
        return jitted(way).lower(state, tokens)
