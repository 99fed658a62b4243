"""Gradients for training steps under `jax.jit`, which have no psum to replace."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.compression import agreement
from dynamiq_jax.compression.compression import AnyPolicy, as_compression
from dynamiq_jax.compression.shards import told_gathers
from dynamiq_jax.core.axis import Axis, AxisName, check_set_mesh, is_explicit, mesh_of, set_around
from dynamiq_jax.core.checks import Op, check_axis, sizes_on
from dynamiq_jax.former import formerly, unless
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.training.auto_axes import AutoGrad, StaticArguments
from dynamiq_jax.training.explicit_axes import ExplicitGrad
from dynamiq_jax.training.lifting import Losses, lifted
from dynamiq_jax.training.loss import ARRAYS, Told, Wanted, apart, leaf_specs, together
from dynamiq_jax.tree.leaves import check_nodes


@formerly(reduce=unless("unreduced", default=True), gather=unless("ungathered", default=True))
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    compression: AnyPolicy | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    metrics: bool = False,
    op: Op = "mean",
    unreduced: bool = False,
    ungathered: bool = False,
    specs: Any = None,
    batch_specs: Any = None,
    closed_specs: Any = None,
    weight: Callable[..., Any] | None = None,
    aux: Any = None,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """`jax.value_and_grad` of the global batch's loss (Explicit axes) or a worker's (Auto axes).

    Gradients are reduced over the data axes, compressed. On a mesh of Explicit axes ``loss_fn``
    takes the global batch and returns its loss. On a mesh of Auto axes it takes one worker's
    examples and returns their mean loss; the result is the mean over all workers.

    On Auto axes, arrays among the loss's arguments are split over workers along their leading axis,
    unless ``batch_specs`` says otherwise. Inside of `jax.jit` their shardings are not visible:
    there pass P() for arguments that every worker needs whole, such as a table. Outside of
    `jax.jit`, an array that is whole on every device stays whole if other arguments are sharded
    over the data axes.

    **On a mesh of Explicit axes**, which `dq.make_mesh` makes by default, the loss is a function
    of global arrays, as it is for `jax.jit`. Large parameters are typed as reduced over the data
    axes, so that JAX leaves their gradients unreduced, and one compressed collective sums them. JAX
    sums the gradients of parameters that the method does not compress. JAX has no rule for some
    uses of reduced values, such as elementwise products with examples. JAX then sums the gradient
    of this use exactly; other uses of the parameter stay compressed. If this affects more than 1%
    of the bytes of a leaf, a warning names the leaf and the use. Every loss that plain JAX can
    train also works here.

    **On a mesh of Auto axes** the loss runs under `jax.shard_map` over the data axes. It takes its
    worker's examples and whole parameters, and returns a mean over these examples. If the loss is a
    sum over examples, pass ``op="sum"``: without it, value and gradients are those of the sum
    divided by the number of workers, and this cannot be detected. If `jax.lax.psum` or `pmean` has
    made the loss the same on all workers, it counts as the loss of all examples. Statistics of a
    batch, as in a BatchNorm, are those of the worker's examples, unless the layer averages them
    over the axis. Data axes are removed from the loss's sharding constraints. Every worker folds
    its index into the PRNG keys that the loss takes; an array of uint32 with as many words as a key
    is one.

    Arrays of the traced program that the loss closes over count as arguments (``closed_specs``).
    Objects, dicts and lists there, such as generators of keys, end up as plain JAX leaves them.
    Constants that the loss closes over are whole on every worker; a warning appears if nothing is
    split.

    Every device reduces its own shards of the gradient, only over the data axes. Gradients of
    parameters that are sharded over a data axis (FSDP) are scattered over it, compressed, and
    all-reduced over the other data axes (HSDP). With `Hierarchical` the scatter over the last data
    axis is native, in 16 bits; then its results are scattered over the other axes, compressed.

    **Sharded parameters are gathered before the loss**, all at once: every device then holds the
    whole model. If this takes more than 1 GiB, a warning says how many bytes. They travel exactly,
    in their own dtype, unless ``compression`` is a `Policy` whose ``parameters`` say how. To gather
    one layer at a time call `fsdp` in the layers: on Explicit axes with ``ungathered=True``; on
    Auto axes under `jax.shard_map`, instead of this function.

    **Experts** that are sharded over the data axes of an Explicit mesh can be passed as shards to a
    `jax.shard_map` in the loss, with ``ungathered=True``. Leave out the map's ``in_specs``, since
    P() refuses parameters that are typed as reduced. JAX sums gradients of experts over data axes
    that do not shard them.

    Args:
      loss_fn: ``loss_fn(*args, **kwargs) -> loss``, or ``-> (loss, aux)`` with ``has_aux``. It must
        be pure, as for `jax.jit`.
      axis_name: the data-parallel axis, or a tuple of data-parallel axes, the outermost first:
        "data", "fsdp" or ("replica", "fsdp"). On Explicit axes name all axes over which the batch
        is sharded.
      argnums: which arguments of ``loss_fn`` are parameters; see `jax.value_and_grad`.
      has_aux: whether ``loss_fn`` returns more than the loss.
      compression: as for `psum`; or a `Policy`, whose ``parameters`` say how shards are gathered.
      mesh: a mesh with Auto or Explicit axes. Default: that of `jax.set_mesh`, else that of the
        parameters.
      metrics: whether ``f`` returns the `Metrics` of the gradient.
      op: "mean" or "sum": how the loss combines its worker's examples, on Auto axes. It has no
        effect on Explicit axes, where the loss covers all examples.
      unreduced: whether gradients are returned before their sum over workers. Call `psum` outside
        of maps to sum them. Before that, ``jax.tree.map(jnp.add, ...)`` can add up the gradients of
        several calls: gradient accumulation with one reduction. On Explicit axes large gradients
        are of JAX's unreduced type. On Auto axes every leaf has a leading axis of workers, sharded
        over the data axes.
      ungathered: whether the loss takes the shards of sharded parameters, on Explicit axes. By
        default these are gathered before the loss. A warning names large shards that are passed
        neither to `fsdp` nor to a `jax.shard_map`: JAX sums their gradients.
      specs: how parameters are sharded over a mesh with Auto axes: PartitionSpecs, a tree like the
        parameters or a prefix of it. Outside of `jax.jit` the default is the sharding of the
        arrays. While JAX traces, the sharding is not visible: then ``specs`` are needed if the mesh
        has Auto axes besides ``axis_name``, and for parameters that are sharded over ``axis_name``
        (FSDP). Without specs every device gathers these parameters and returns whole gradients.
      batch_specs: how the other arguments are split over Auto data axes: a dict of PartitionSpecs,
        or of trees of them, by the names of the loss's arguments, positional or keywords (``*args``
        need a tuple); or a tuple with one entry for each positional argument except the parameters.
        P() leaves an argument whole, and a PRNG key the same on all workers. Without a spec, or
        with `None` instead of it, arrays are split along their leading axis; scalars and keys are
        whole. Numbers, strings and `None` among the arguments are constants of the program. Frozen
        weights that are sharded over the data axes are gathered before the loss if their spec is
        P(). With their own spec every worker holds its shards. In the layers, `jax.lax.all_gather`
        gathers these exactly, and `all_gather` at 8 bits if the mesh has no other axes.
      closed_specs: how arrays of the traced program that the loss closes over are split over Auto
        data axes: a dict of PartitionSpecs, or of trees of them, by the names of variables; or one
        spec for all but scalars and keys. Without a spec, arrays with as many rows as the examples
        among the arguments are split along their leading axis, and others are whole, with a
        warning. If no argument is split, all of these arrays must have the same number of rows.
      weight: a function of the arguments of ``loss_fn``, for Auto axes. It returns the weight of
        this worker's examples, such as the number of their tokens. Loss, gradients and means of aux
        are then weighted, see `reduce`.
      aux: how aux is combined on Auto axes: a tree like aux, or a prefix of it, of the words
        "mean", "sum", "rows" (the rows of all workers, one after the other) and "same" (equal on
        all workers). A warning names a "same" leaf that depends on a worker's own examples
        according to JAX's types. A dict may leave out keys. Without a word, floating-point scalars
        are reduced like the loss, by ``op`` and ``weight`` (for a number of tokens pass "sum").
        Integer scalars are summed and arrays with as many rows as the worker's examples are joined,
        with a warning. All other leaves need a word.
      allow_int: whether parameters may have leaves of integers or booleans, as for
        `jax.value_and_grad`. Their gradients are zeros of dtype float0, which are not sent.
        Integers that are sharded over data axes are gathered before the loss, like other
        parameters.

    Returns:
      ``f(*args, key=None, state=None, **kwargs) -> (loss, grads)`` (``((loss, aux), grads)`` with
      ``has_aux``; with ``metrics`` or a ``state``, a `Reduced` as from `reduce` replaces
      ``grads``). Call it inside or outside `jax.jit`; outside it is one program, compiled once for
      all calls with the same shapes, dtypes and shardings. ``key`` and ``state`` are as for
      `reduce`, and are not passed to ``loss_fn``. Gradients are sharded like parameters. The first
      state is from `Compression.init_state` with ``stacked=True``, later ones from the previous
      step: the leading axis is that of the workers.

    Raises:
      ValueError: metrics, a state, a key or ``allow_int`` are used with ``unreduced``; there is
        no mesh, or it has axes of both types; ``axis_name`` is not in the mesh, or is mapped around
        the call; no argument is sharded over it (Explicit axes); a batch axis is not a multiple of
        its size; ``specs`` are missing or do not fit; a leaf of aux has no word; the loss closes
        over traced arrays of several numbers of rows, or where they cannot be exchanged, or changes
        what it closes over to values of examples (Auto axes); a constant has no hash; or a
        derivative is taken outside of `jax.jit` and no mesh is set (Explicit axes).
      TypeError: the loss is not a floating-point scalar, or a parameter is neither floating-point
        nor, with ``allow_int``, of integers.
      NotImplementedError: a state, metrics or ``unreduced`` are used and parameters are sharded
        over data axes; or `jax.vmap` is used on Explicit axes.
    """
    total = Reduction(check_axis(axis_name), as_compression(compression), op)
    kept = argnums if isinstance(argnums, int) else tuple(argnums)
    told = metrics, unreduced, ungathered, allow_int, told_gathers(compression)
    wanted = Wanted(total, kept, has_aux, *told)
    return gradients(loss_fn, wanted, mesh, ForAuto(specs, batch_specs, aux, weight, closed_specs))


class ForAuto(NamedTuple):
    """The arguments of `value_and_grad` that Auto axes alone take."""

    specs: Any
    batch_specs: Any
    """Also a function of ``(other positional arguments, keywords)`` to what `leaf_specs` returns;
    not with `Wanted.allow_int`, where integers of the parameters follow."""
    aux: Any
    weight: Callable[..., Any] | None
    closed_specs: Any = None


def gradients(
    loss_fn: Callable[..., Any],
    wanted: Wanted,
    mesh: Mesh | AbstractMesh | None,
    for_auto: ForAuto,
) -> Callable[..., Any]:
    """`value_and_grad` of what is wanted; without a mesh, on that which is around a call."""
    wanted.check(for_auto.weight)
    axis, allow_int = wanted.total.axis, wanted.allow_int

    # One for each mesh: calls share its checks and its compiled program.
    @functools.cache
    def on(mesh: Mesh | AbstractMesh) -> Callable[..., tuple[Any, Callable[[], Any]]]:
        abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
        _check_mesh(abstract, wanted, for_auto)
        if is_explicit(abstract):
            return _on_explicit_axes(loss_fn, wanted, mesh)
        grad = _on_auto_axes(loss_fn, wanted, mesh, for_auto)
        losses = Losses(loss_fn, for_auto.weight, wanted.joined)
        bound = functools.partial(lifted, grad, losses, for_auto.closed_specs)
        alone = not grad.others
        return lambda *args, **rest: (set_around(mesh, alone=alone), bound(*args, **rest))

    def reduced(*args, key=None, state=None, **kwargs):
        check_names(loss_fn, args, key=key, state=state)
        _check_call(axis, wanted.unreduced, metrics=wanted.metrics or None, state=state, key=key)
        params, others = wanted.positions.split(args)
        _check_params(params, allow_int)
        own_mesh = mesh_around(params) if mesh is None else mesh
        within = on(own_mesh)
        # Ahead of the step, in which processes whose programs differ may wait for each other.
        _compare_batches(loss_fn, wanted, own_mesh, for_auto.weight, (others, kwargs))
        moving, *integers = apart(params) if allow_int else (params,)
        context, run = within(moving, (others, kwargs, *integers), key=key, state=state)
        with context:
            value, found = run()
        return value, _with_float0(found, integers[0]) if allow_int else found

    if mesh is not None:
        on(mesh)  # refuses what does not go together
    return reduced


def _on_explicit_axes(
    loss_fn: Callable[..., Any], wanted: Wanted, mesh: Mesh | AbstractMesh
) -> Callable[..., tuple[Any, Callable[[], Any]]]:
    """A function of parameters and data: the context of the derivative, and what runs in it."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    grad = ExplicitGrad(abstract, wanted)
    # Types may name axes of one device, and need not agree in them.
    run = grad.without_unit_axes if 1 in abstract.axis_sizes else grad
    return _in_context(functools.partial(run, wanted.joined(loss_fn)), mesh)


def _on_auto_axes(
    loss_fn: Callable[..., Any], wanted: Wanted, mesh: Mesh | AbstractMesh, for_auto: ForAuto
) -> AutoGrad:
    """A function of parameters and data: what runs."""
    told, weight = for_auto.batch_specs, for_auto.weight
    specs_of: Any = told if callable(told) else functools.partial(_specs_of, loss_fn, wanted, told)
    return AutoGrad(
        loss=wanted.joined(loss_fn),
        mesh=mesh,
        wanted=wanted,
        specs=for_auto.specs,
        batch_specs=specs_of,
        aux=for_auto.aux,
        weight=None if weight is None else wanted.joined(weight),
    )


def _specs_of(
    loss_fn: Callable[..., Any], wanted: Wanted, batch_specs: Any, data: Any
) -> list[Told]:
    """The name and the spec of every leaf of data, as `Wanted.joined` takes it."""
    argnums, positions = wanted.argnums, wanted.positions
    # `None` has no leaves, so only the other arguments get names.
    places = None if isinstance(argnums, int) else (None,) * len(argnums)
    args, kwargs = positions.joined(lambda *args, **kwargs: (args, kwargs))(places, data)
    numbers = positions.among(len(args))
    found = leaf_specs(batch_specs, loss_fn, args, kwargs, numbers, wanted.total.axis)
    integers = jax.tree_util.tree_leaves_with_path(data[2:])
    names = ["parameter" + jax.tree_util.keystr(path[1:]) for path, _ in integers]
    return found + [Told(name, P()) for name in names]


def _compare_batches(
    loss_fn: Callable[..., Any], wanted: Wanted, mesh: Any, weight: Any, data: Any
) -> None:
    """Warns of processes with different numbers of rows, whose loss is a mean without weights."""
    explicit = is_explicit(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)
    # A sum and a weighted mean do not depend on how many rows each process has.
    if weight is not None or (wanted.total.op == "sum" and not explicit):
        return

    def shapes() -> dict[str, tuple[int, ...]]:
        names = (own.name for own in _specs_of(loss_fn, wanted, None, data))
        leaves = zip(names, jax.tree.leaves(data), strict=True)
        return {name: jnp.shape(x) for name, x in leaves if isinstance(x, ARRAYS)}

    weighs = "" if explicit else ", and pass weight= with that sum, or else the number of rows"
    remedy = (
        "For that, fill up short batches with rows that a mask leaves out, let the loss divide by "
        f"the sum of the mask{weighs} (docs/data-parallel.md, Batches that end early)"
    )
    agreement.compare_batches(shapes, mesh, remedy)


def _with_float0(found: Any, integers: Any) -> Any:
    """Gradients, or a `Reduced`, with zeros of dtype float0 for the integers."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)
    if isinstance(found, Reduced):
        return found._replace(tree=together(found.tree, zeros))
    return together(found, zeros)


def _check_mesh(mesh: AbstractMesh, wanted: Wanted, for_auto: ForAuto) -> None:
    """Refuses a mesh without the data axes, and arguments that are not for its type of axes."""
    total = wanted.total
    total.compression.route(sizes_on(mesh, total.axis))  # refuses what cannot be
    given = [(name, x) for name, x in for_auto._asdict().items() if x is not None]
    if given and is_explicit(mesh):
        raise ValueError(
            f"{given[0][0]}={given[0][1]!r} is for Auto axes. On Explicit ones types say how "
            "arrays are sharded, and loss and aux are those of all examples; leave it out"
        )
    if is_explicit(mesh):
        return
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    # An axis of one device may be of either type: nothing travels along it.
    if any(kind == AxisType.Explicit and mesh.shape[name] > 1 for name, kind in kinds):
        raise ValueError(
            f"the mesh has axes {mesh.axis_names} of types {mesh.axis_types}: gradients go one way "
            "on Explicit axes and another on Auto ones; make all axes Explicit, or all Auto"
        )
    if wanted.ungathered:
        raise ValueError(
            "ungathered=True is for Explicit axes; on Auto axes call jax.value_and_grad under "
            "jax.shard_map, and dq.fsdp in each layer of the loss"
        )


def _check_call(axis: Axis, unreduced: bool, **own: Any) -> None:
    """Refuses arguments of a reduction if there is none, and a call inside of a map."""
    given = [name for name, value in own.items() if value is not None]
    if given and unreduced:
        raise ValueError(
            f"unreduced=True and {given[0]}=, which is for the reduction; pass it to "
            f"dq.reduce(grads, {axis.name!r}, op='sum', {given[0]}=...) in its place"
        )
    if axis.mapped:
        raise ValueError(
            f"value_and_grad is called inside of a map over axis {axis.name!r}; call "
            "jax.value_and_grad there, and dq.pmean of the gradients"
        )


def _in_context(
    run: Callable[..., Any], mesh: Mesh | AbstractMesh
) -> Callable[..., tuple[Any, Callable[[], Any]]]:
    """A function that calls ``run`` in the context of the mesh, compiled if not traced."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh

    @functools.partial(jax.jit, static_argnums=0)
    def compiled(told, arrays, params, **options):
        return run(params, told.join(arrays), **options)

    def within(params: Any, data: Any, **options: Any) -> tuple[Any, Callable[[], Any]]:
        leaves = jax.tree.leaves((params, data, options))
        traced = any(isinstance(x, Tracer) for x in leaves)
        if traced and isinstance(jnp.zeros(()), Tracer):  # in `jax.jit`, not in `jax.vmap` alone
            check_set_mesh(abstract)
            own = functools.partial(run, params, data, **options)
            return jax.sharding.use_abstract_mesh(abstract), own
        own = functools.partial(compiled, *StaticArguments.of(data), params, **options)
        if not traced:
            around = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext()
            return around, own
        if get_abstract_mesh().empty:
            raise ValueError(
                "value_and_grad is transformed outside of jax.jit, and no mesh is set for the "
                "derivative or the batch; call it in jax.jit, or in jax.set_mesh(mesh)"
            )
        return jax.sharding.use_abstract_mesh(abstract), own

    return within


def _check_params(params: Any, allow_int: bool) -> None:
    """Refuses parameters without a gradient, as `jax.grad` does, and nodes without specs."""
    check_nodes(params)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        try:
            kind = jax.typeof(x)
        except TypeError:
            raise TypeError(
                f"parameter {name} is a {type(x).__name__}, not an array: pass the arrays of a "
                "model alone. Of an equinox module these are params, static = "
                "eqx.partition(model, eqx.is_inexact_array), and the loss calls "
                "eqx.combine(params, static)"
            ) from None
        integers = jnp.issubdtype(kind.dtype, jnp.integer) or kind.dtype == bool
        if not jnp.issubdtype(kind.dtype, jnp.inexact) and not (allow_int and integers):
            raise TypeError(
                f"parameter {name} is {kind}, which has no gradient; pass it in an "
                "argument of the loss that argnums= does not name, and of a Flax model "
                "nnx.state(model, nnx.Param)"
                + ("; or allow_int=True, for zeros of dtype float0" if integers else "")
            )


def check_names(loss_fn: Callable[..., Any], args: tuple, **own: Any) -> None:
    """Refuses a keyword that the loss and the reduction both take."""
    try:
        signature = inspect.signature(loss_fn)
        # What is passed by position needs no keyword.
        filled = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return
    taken = [x for x in own if own[x] is not None and x in signature.parameters and x not in filled]
    if taken:
        meaning = {"key": "the key of the rounding", "state": "the state of the method"}[taken[0]]
        raise ValueError(
            f"the loss takes {taken[0]}, and {taken[0]}= is {meaning}, which the loss does not "
            "get; pass the loss its own by position, or under another name"
        )


def mesh_around(params: Any) -> Mesh | AbstractMesh:
    """The mesh of `jax.set_mesh`, or that of the parameters; raises ValueError if there is none."""
    # A mesh that is set comes first. Arrays outside of `jax.jit` say theirs with its devices.
    for x in jax.tree.leaves(params) if get_abstract_mesh().empty else ():
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    found = mesh_of(params)
    if not found.empty:
        return found
    raise ValueError(
        "there is no mesh: none was set by jax.set_mesh, and no parameter is on one; pass "
        "value_and_grad(mesh=mesh)"
    )
