"""Gradients on meshes with automatic axes: the loss runs mapped over the data axes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.collectives.all_reduce import reduce
from dynamiq_jax.collectives.scattered import Reduction, gather, split_of
from dynamiq_jax.lax.axis import Axis, AxisName
from dynamiq_jax.methods.metrics import Reduced
from dynamiq_jax.request.compression import Compression
from dynamiq_jax.tree.leaves import describe_leaves
from dynamiq_jax.tree.placement import flat_specs, only, part, surroundings


def mapped_value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    mesh: Mesh,
    axis: Axis,
    compression: Compression,
    has_aux: bool,
    metrics: bool,
    specs: Any,
) -> Callable[..., Any]:
    """`value_and_grad` on meshes that have automatic axes; see there for arguments and errors.

    ``loss_fn`` runs under `jax.shard_map` over the data axes, on every worker with its examples.
    """
    axes, axis_name = axis.names, axis.name
    sizes = tuple(mesh.shape[name] for name in axes)
    n_workers = compression.route(sizes).n_workers
    others = tuple(name for name in mesh.axis_names if name not in axes and mesh.shape[name] > 1)
    manual = {*mesh.axis_names} - {*others}
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(name for name in mesh.axis_names if types[name] == AxisType.Explicit)
    hidden = {name: mesh.shape[name] for name in others if name not in explicit}
    # All but the loss sees automatic axes only: what maps over some axes and leaves others Explicit
    # would gather over these at its boundaries (JAX 0.10, and 0.12 where axes are of both types).
    plain = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(types))
    reduction = Reduction(axes, sizes, compression, "mean")

    @functools.partial(jax.jit, inline=True, static_argnames="placed")
    def mapped(params, key, state, *batch, placed: tuple[P, ...]):
        tree = jax.tree.structure(params)
        over_data = tree.unflatten(only(spec, axes) for spec in placed)
        over_others = tree.unflatten(only(spec, others) for spec in placed)
        splits = [split_of(spec, axes) for spec in placed]
        differentiate: Callable[..., Any] = jax.value_and_grad(loss_fn, has_aux=has_aux)
        seen = tuple(name for name in others if name in explicit)
        if seen:  # the loss has the types that it would have without us
            typed = functools.partial(_beyond_first, names=seen, first=P(None))
            of_batch = (jax.tree.map(typed, x) for x in batch)
            in_sharding = tree.unflatten(only(spec, seen) for spec in placed), *of_batch
            differentiate = jax.sharding.explicit_axes(
                differentiate, axes=seen, in_sharding=in_sharding
            )

        def local(params, key, state, *batch):
            around = surroundings(axis)
            if any(splits):
                whole = functools.partial(gather, splits=splits)
                params = around.per_part(whole, (over_others,), over_others)(params)
            params = axis.to_varying(params)
            value, grads = differentiate(params, *batch)
            if any(splits):
                mean = functools.partial(reduction, splits=splits)
                grads = around.per_part(mean, (over_others, P()), over_others)(grads, key)
                found = Reduced(grads, None, None)
            else:
                own = jax.tree.map(lambda x: x[0], state)
                stateful = {"key": key, "state": own, "metrics": metrics, "specs": over_others}
                found = reduce(grads, axis_name, method=compression, **stateful)
            after = jax.tree.map(lambda x: axis.to_varying(x)[None], found.state)
            value = jax.tree.map(lambda x: _reduce_value(x, axis), value)
            return value, found._replace(state=after)

        spec_of: Any = Reduced
        in_specs = over_data, P(), P(axis_name), *(P(axis_name) for _ in batch)
        out_specs = P(), spec_of(over_data, P(axis_name), P())
        maps = {"axis_names": manual, "in_specs": in_specs, "out_specs": out_specs}

        def program(*args):
            value, found = jax.shard_map(local, mesh=plain, **maps)(*args)
            if others:  # or the compiler would choose
                shardings = tree.unflatten(NamedSharding(plain, spec) for spec in placed)
                grads = lax.with_sharding_constraint(found.tree, shardings)
                found = found._replace(tree=grads)
            return value, found

        args = params, key, state, *batch
        if explicit:
            of_grads = tree.unflatten(only(spec, explicit) for spec in placed)
            first = functools.partial(_beyond_first, names=explicit, first=only(P(axes), explicit))
            out = P(), spec_of(of_grads, jax.tree.map(first, state), P())
            out = jax.tree.map(functools.partial(NamedSharding, mesh), out)
            viewed: Any = jax.sharding.auto_axes(program, axes=explicit, out_sharding=out)
            return viewed(*args)
        return program(*args)

    def reduced(params, *batch, key=None, state=None):
        _check_batch(batch, n_workers, axis_name)
        _check_stacked(state, sizes)
        placed = tuple(only(spec, axes + others) for spec in _placed(params, specs, mesh, hidden))
        if any(split_of(spec, axes) for spec in placed) and (metrics or state is not None):
            raise NotImplementedError(
                f"parameters are sharded over the data axes {axes}, and scattering their gradients "
                "keeps no state and has no metrics; pass metrics=False, no state, and a method "
                "without memory, or replicate the parameters over these axes"
            )
        value, found = mapped(params, key, state, *batch, placed=placed)
        return value, found if metrics or state is not None else found.tree

    return reduced


def _placed(params: Any, specs: Any, mesh: Mesh, hidden: dict[str, int]) -> tuple[P, ...]:
    """How every parameter is sharded over the mesh; over hidden axes tracers do not show it."""
    leaves = jax.tree.leaves(params)
    if specs is None and hidden and any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            f"how parameters are sharded over the automatic axes {hidden} cannot be seen inside "
            "jax.jit; pass value_and_grad(specs=jax.tree.map(lambda x: x.sharding.spec, params)), "
            "or specs=P() if they are replicated"
        )
    found = map(functools.partial(_spec_of, mesh=mesh), leaves)
    placed = tuple(found if specs is None else flat_specs(specs, params, mesh.axis_names))
    for leaf, spec in zip(describe_leaves(params), placed, strict=True):
        part(leaf, spec, mesh.shape)  # refuses what does not fit
    return placed


def _spec_of(x: Any, mesh: Mesh) -> P:
    """How an array is sharded over the mesh, as far as it can be seen; P() if over another one."""
    traced = isinstance(x, Tracer)
    sharding = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return P()
    return sharding.spec


def _beyond_first(x: Any, names: tuple[str, ...], first: P) -> P:
    """How some axes split an array: along its first dimension as told, then as its type says."""
    return P(*first, *only(jax.typeof(x).sharding.spec, names)[1:])


def _reduce_value(x: Any, axis: Axis) -> Array:
    x = axis.to_varying(jnp.asarray(x))
    return axis.pmean(x) if jnp.issubdtype(x.dtype, jnp.inexact) else axis.psum(x)


def _check_stacked(state, sizes: tuple[int, ...]) -> None:
    n_workers = math.prod(sizes)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(state)]
    wrong = [shape for shape in shapes if shape[:1] != (n_workers,)]
    if wrong:
        raise ValueError(
            f"state has a leaf of shape {wrong[0]}, whose leading axis is not that of the "
            f"{n_workers} workers; pass "
            "dq.Compression(method).init_state(params, "
            f"{sizes if len(sizes) > 1 else n_workers}, stacked=True)"
        )


def _check_batch(batch, n_workers: int, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % n_workers:
            raise ValueError(
                f"batch argument {jax.tree_util.keystr(path)} has shape {shape}; its leading axis "
                f"must be a multiple of the {n_workers} workers on axis {axis_name!r}"
            )
