"""Differences between JAX versions, and facts from JAX's tracing state.

Every function may need this file; its last section has what only Explicit axes need. No other file
of this package handles versions. Some of it has no public interface in JAX. Each such use raises
where it does not find what it expects, or is tried once (`tried`) on a small example with a known
answer.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import batching, mlir, partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

KNOWN_VERSIONS = "0.10.2 to 0.12"
"""The versions of JAX whose private parts this file knows."""


def unknown(part: str) -> str:
    """The error for a private part of JAX that is not as expected."""
    return (
        f"JAX {jax.__version__} differs from the versions {KNOWN_VERSIONS} that this version of "
        f"dynamiq_jax knows, in {part}; install one of these, or a newer dynamiq_jax"
    )


@contextlib.contextmanager
def private(part: str) -> Iterator[None]:
    """Names the known versions if a private part of JAX is not where it was."""
    try:
        yield
    except ImportError as error:
        raise ImportError(unknown(part)) from error
    except (AttributeError, KeyError) as error:
        raise RuntimeError(unknown(part)) from error


def aside(function: Callable[[], Any]) -> Any:
    """Calls ``function`` in a new thread, where no trace is around it."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def tried(part: str, example: Callable[[], bool]) -> Callable[..., Any]:
    """A decorator: before its first call a function is tried on an example.

    Raises:
      RuntimeError: (the decorated function) the example returns `False`, or raises.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def answer() -> bool | Exception:
            try:
                return aside(example)
            except Exception as error:
                return error

        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            if (own := answer()) is not True:
                cause = own if isinstance(own, Exception) else None
                raise RuntimeError(unknown(part)) from cause
            return function(*args)

        return checked

    return decorated


def coordination_client() -> Any:
    """The client of JAX's coordination service; `None` where `jax.distributed` was not started."""
    if not jax.distributed.is_initialized():
        return None
    with private("jax._src.distributed, the client of the coordination service"):
        from jax._src import distributed  # there is no public way to it

        client = distributed.global_state.client
    if client is None:
        raise RuntimeError(unknown("jax._src.distributed: it is started and has no client"))
    return client


def needs_devices(primitive: Primitive) -> None:
    """Has JAX lower programs with this primitive anew for other devices, or another order of them.

    Else JAX lowers programs once for all meshes of `jax.set_mesh` that differ only in devices.
    """
    with private("the primitives that need devices (jax._src.dispatch)"):
        from jax._src import dispatch  # there is no public way to it

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def concrete_mesh() -> Mesh:
    """The mesh of devices that `jax.set_mesh` has set, also where JAX traces; it may be empty."""
    with private("the mesh of jax.set_mesh (jax._src.mesh)"):
        from jax._src import mesh  # the public function refuses calls under a trace

        return mesh.get_concrete_mesh()


def is_mesh_set() -> bool:
    """Whether `jax.set_mesh` has set a mesh of devices, also where JAX traces or lowers."""
    return not concrete_mesh().empty


def varying_axes(x) -> frozenset[str]:
    """The mesh axes over which ``x`` is known to vary (empty where JAX does not track that)."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    with private("the type of arrays under jax.shard_map (manual_axis_type)"):
        return aval.manual_axis_type.varying


def half_reduced_axes(x) -> frozenset[str]:
    """The mesh axes over which JAX calls ``x`` "reduced" or "unreduced"."""
    with private("the type of arrays under jax.shard_map (manual_axis_type)"):
        kind = jax.typeof(x).manual_axis_type
        return kind.reduced | kind.unreduced


def is_constant(x) -> bool:
    """Whether ``x`` is a value that was there before any map: no tracer."""
    return not isinstance(x, jax.core.Tracer)


def _knows_linear_transpose() -> bool:
    """Whether `is_transposed` tells `jax.linear_transpose` from `jax.jit`."""
    found = []
    note = lambda x: (found.append(isinstance(x, partial_eval.JaxprTracer)), x)[1]
    number = jax.ShapeDtypeStruct((), jnp.float32)
    jax.make_jaxpr(jax.linear_transpose(note, number))(number)
    jax.make_jaxpr(note)(number)
    return found == [True, False]


@tried("the class of tracers of jax.linear_transpose", _knows_linear_transpose)
def is_transposed(x) -> bool:
    """Whether ``x`` is traced by `jax.linear_transpose`: what it reaches never runs forward."""
    # The tracer's class is private. No public way was found: a linear function is transposed by
    # partial evaluation, and the types of its arguments are as anywhere else.
    return isinstance(x, partial_eval.JaxprTracer)


def one_worker(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under a `jax.shard_map` of one worker, of replicated arrays; for tracing."""
    mesh = AbstractMesh((1,), ("worker",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P())


_FILE_OF_MAPS = inspect.unwrap(jax.shard_map).__code__.co_filename
"""The file of JAX that has `jax.shard_map`, its derivative, and no function of users."""


def _runs_backwards(frame: types.FrameType | None) -> bool | None:
    """Whether the innermost map on the stack is transposed; `None`: there is no map on it."""
    while frame is not None:
        if frame.f_code.co_filename == _FILE_OF_MAPS:
            return "trans" in frame.f_code.co_name
        frame = frame.f_back
    return None


def _knows_maps() -> bool:
    """Whether `_runs_backwards` tells `jax.grad` outside of a map from `jax.grad` in it."""
    found = []

    @jax.custom_vjp
    def noted(x: Array) -> Array:
        return x

    def backward(_: None, gradient: Array) -> tuple[Array]:
        found.append(_runs_backwards(sys._getframe()))
        return (gradient,)

    noted.defvjp(lambda x: (x, None), backward)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    for program in (
        jax.grad(one_worker(noted)),
        one_worker(jax.grad(noted)),
        jax.grad(noted),
    ):
        jax.make_jaxpr(program)(number)
    return found == [True, False, None]


_MAP_FRAMES = "the functions that trace jax.shard_map and its derivative"


@tried(_MAP_FRAMES, _knows_maps)
def transposes_a_map() -> bool:
    """Whether the innermost `jax.shard_map` runs backwards: `jax.grad` is outside of it.

    Call it under a `jax.shard_map`. JAX does not tell: types, axes, the mesh and the axis
    environment are alike in both cases. Scopes are named "transpose" only outside of scans, and a
    residual is the forward pass's object only outside of scans, `jit` and checkpoints. The function
    of JAX that transposes a map is on the stack then, nearer than the one that runs the user's.

    Raises:
      RuntimeError: neither function is on the stack, or an example shows that they are not told
        apart: this version of JAX is not known.
    """
    found = _runs_backwards(sys._getframe())
    if found is None:
        raise RuntimeError(unknown(_MAP_FRAMES))
    return found


# JAX reuses what it has traced of an inner `jax.jit`, unless the context of the trace differs. Only
# `training.explicit_axes` needs it. But JAX forbids making a context while another thread uses
# JAX, so it is made when the library is imported.
trace_number = jax.make_user_context(0)
"""The number of the trace of `dynamiq_jax.value_and_grad` on Explicit axes; 0 outside."""


def assume_invarying(x: Array, names: tuple[str, ...]) -> Array:
    """``x``, which has the same bits on all workers; JAX counts it as replicated from here on."""
    axes = varying_axes(x) & set(names)
    return _assume_invarying_p.bind(x, axes=axes) if axes else x


def _less_varying(x, *, axes: frozenset[str]):
    with private("the type of arrays under jax.shard_map (manual_axis_type)"):
        kind = x.manual_axis_type
        return x.update(manual_axis_type=kind.update(varying=kind.varying - axes))


# JAX has no operation for this: results of permutations count as varying for ever.
_assume_invarying_p = Primitive("assume_invarying")
_assume_invarying_p.def_abstract_eval(_less_varying)
_assume_invarying_p.def_impl(lambda x, **_: x)
batching.defvectorized(_assume_invarying_p)
mlir.register_lowering(_assume_invarying_p, lambda ctx, x, **_: [x])


_inline = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)  # before JAX had it: True
inlined = functools.partial(jax.jit, inline=_inline)
"""`jax.jit` that disappears within another `jax.jit`; eager operations become one program."""


def _knows_vmap() -> bool:
    """Whether `jax.vmap`'s tracers have the attribute that `vmapped` looks for, and no others."""
    found = []

    def note(x: Array) -> Array:
        found.append(hasattr(lax.axis_index("worker"), "batch_dim"))
        return x

    number = jax.ShapeDtypeStruct((), jnp.float32)
    jax.make_jaxpr(one_worker(note))(number)
    several = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.make_jaxpr(jax.vmap(note, axis_name="worker"))(several)
    return found == [False, True]


@tried("the tracers of jax.vmap", _knows_vmap)
def vmapped(name: str) -> bool:
    """Whether the axis is `jax.vmap`'s (its tracers have a dim), outside of `jax.jit`."""
    # A batch tracer's attribute is private. No public way was found: an axis has a name and a size
    # whichever map it belongs to, and batching rules are asked only after a collective is bound.
    return hasattr(lax.axis_index(name), "batch_dim")


def with_constants(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr, and the values of its ``constvars``: JAX 0.11 made one class of two."""
    own = getattr(jaxpr, "jaxpr", jaxpr)
    if not isinstance(own, Jaxpr):
        raise RuntimeError(unknown(f"jaxprs, of which one is a {type(own).__name__}"))
    return own, getattr(jaxpr, "consts", ())


def name_of(equation: JaxprEqn) -> str:
    """The name of an equation's primitive; JAX 0.12 has ``vjp_node[...]`` around linear ones."""
    return equation.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def inner_jaxprs(equation: JaxprEqn) -> list[Any]:
    """The jaxprs in an equation's parameters: of calls, loops and branches."""
    kinds = Jaxpr, ClosedJaxpr
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds))
    return [value for value in values if isinstance(value, kinds)]


@functools.cache
def _empty_jaxpr() -> Jaxpr:
    """An empty jaxpr to fill: there is no public way to make the debug information of one."""
    return with_constants(jax.make_jaxpr(lambda: ())())[0]


def evaluate(equation: JaxprEqn, *args: Any) -> Sequence[Any]:
    """The results of one equation for these operands: JAX runs a jaxpr of it alone."""
    given = {v: x for v, x in zip(equation.invars, args, strict=True) if not isinstance(v, Literal)}
    alone = _empty_jaxpr().replace(
        invars=list(given),
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return jax.core.eval_jaxpr(alone, (), *given.values())


def evaluate_on(equation: JaxprEqn, x: Array) -> Sequence[Any]:
    """The results of an equation without programs in it, for an operand of another shape."""
    found = equation.primitive.bind(x, **equation.params)
    return found if equation.primitive.multiple_results else [found]


def evaluate_all(
    equations: Sequence[JaxprEqn], known: dict[Any, Any], results: Sequence[Any]
) -> Sequence[Any]:
    """The values of variables or constants, by equations of a program, from the ``known`` ones."""
    alone = _empty_jaxpr().replace(
        invars=list(known),
        outvars=list(results),
        eqns=list(equations),
        effects=frozenset().union(*(equation.effects for equation in equations)),
    )
    return jax.core.eval_jaxpr(alone, (), *known.values())


def constant_of(literal: Literal) -> Array:
    """The value of a constant in a program."""
    return jnp.asarray(literal.val, literal.aval.dtype)  # type: ignore[attr-defined]


def evaluate_here(
    equation: JaxprEqn, args: Sequence[Any], inside: Callable[[Any], Any]
) -> Sequence[Any]:
    """The results of an equation that was traced under other axis types, or under another map.

    Args:
      equation: its programs, such as loop bodies, are replaced by ``inside`` of them.
      args: its operands, which also replace its constants.
      inside: gets a program and returns one for operands as they are here. The latter has no
        constants if the former has no place for them.
    """
    kinds = Jaxpr, ClosedJaxpr

    def replaced(x: Any) -> Any:
        if isinstance(x, NamedSharding):  # the type of a result, which names Explicit axes alone
            return NamedSharding(jax.sharding.get_abstract_mesh(), x.spec)
        made = inside(x)
        if isinstance(x, ClosedJaxpr):
            return made
        own, constants = with_constants(made)
        if constants:
            raise NotImplementedError(f"constants in a program of {name_of(equation)}")
        return own

    params = dict(equation.params)
    for key, value in params.items():
        if isinstance(value, (*kinds, NamedSharding)):
            params[key] = replaced(value)
        elif isinstance(value, tuple) and any(isinstance(x, kinds) for x in value):
            made = [replaced(x) if isinstance(x, kinds) else x for x in value]
            named = getattr(value, "_make", tuple)  # `lax.custom_linear_solve` has a NamedTuple
            params[key] = named(made)
    with contextlib.ExitStack() as contexts:
        with private("the context of equations"):
            before: Any = equation.ctx
            if before.compute_type is not None:
                contexts.enter_context(compute_on(before.compute_type))
            if before.xla_metadata:
                contexts.enter_context(set_xla_metadata(**before.xla_metadata))
        traced = jax.make_jaxpr(lambda *xs: (jnp.negative(jnp.zeros(())), xs))(*args)
        program, _ = with_constants(traced)
        here = program.eqns[-1].ctx
        moved = equation.replace(params=params, invars=list(program.invars), ctx=here)
        return evaluate(moved, *args)


# --- Explicit axes --------------------------------------------------------------------------------


def _knows_contexts() -> bool:
    """Whether JAX traces an inner `jax.jit` once for each number."""
    found = []
    inner = jax.jit(lambda x: (found.append(trace_number.value), 2 * x)[1])
    for number in (1, 2, 1):
        with trace_number(number):
            jax.make_jaxpr(lambda x: inner(x))(jax.ShapeDtypeStruct((), jnp.float32))
    return found == [1, 2]


class _TracedFor:
    """``with traced_for(number):`` traces anew what was traced for another number."""

    @property
    def value(self) -> int:
        """The number of the trace around."""
        return trace_number.value

    __call__ = staticmethod(tried("the contexts of its traces", _knows_contexts)(trace_number))


traced_for = _TracedFor()


_EXPLICIT = AbstractMesh((2,), ("worker",), axis_types=(AxisType.Explicit,))


def _typed(spec: P) -> jax.ShapeDtypeStruct:
    """A matrix of 2 x 2 on the mesh of examples."""
    return jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=NamedSharding(_EXPLICIT, spec))


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Errors that JAX raises where it has no rule for an array's type; others are mistakes.

    One of them has no public name: JAX raises it for a sum of arrays that are split differently.
    """
    operands = _typed(P("worker")), _typed(P(None, "worker"))
    try:
        aside(lambda: jax.eval_shape(jnp.add, *operands))
    except Exception as error:
        if "shard" in str(error):
            return TypeError, ValueError, NotImplementedError, AssertionError, type(error)
    raise RuntimeError(unknown("sums of arrays on Explicit axes that are split differently"))


@functools.cache
def unrolls_typed() -> bool:
    """Whether JAX unrolls a loop of typed rows in part, for which it joins dimensions of them."""
    whole = NamedSharding(_EXPLICIT, P(unreduced=frozenset({"worker"})))
    rows = jax.ShapeDtypeStruct((2, 2, 2), jnp.float32, sharding=whole)
    try:
        aside(lambda: jax.eval_shape(lambda x: lax.reshape(x, (4, 2)), rows))
    except ValueError:
        return False
    return True


def check_partitioner() -> None:
    """Refuses XLA's former partitioner, which does not know values that are not summed yet.

    Raises:
      ValueError: `jax_use_shardy_partitioner` is off.
    """
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        raise ValueError(
            "jax_use_shardy_partitioner is False, and compression on Explicit axes needs Shardy: "
            "only it leaves gradients unreduced. Leave the option at its default, True; or take a "
            "mesh of Auto axes, as dq.make_mesh(..., axis_types=(AxisType.Auto,) * n)"
        )


def _knows_vjp() -> bool:
    """Whether `linear_program` of a map is an equation whose name `name_of` knows."""
    found = []

    def run(x: Array) -> Array:
        value, pullback = jax.vjp(one_worker(lambda x: 2 * x), x)
        back: Any = pullback  # its program is private
        found.extend(map(name_of, with_constants(back.jaxpr)[0].eqns))
        return value

    jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), jnp.float32))
    return found == ["shard_map"]


@tried("the linear program of jax.vjp", _knows_vjp)
def linear_program(back: Any) -> Jaxpr:
    """The linear program that `jax.vjp` transposes; its last inputs are the primals' tangents."""
    with private("the linear program of jax.vjp"):
        return with_constants(back.jaxpr)[0]
