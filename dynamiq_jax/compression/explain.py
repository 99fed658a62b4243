"""`explain`: all that a step sends, or would send."""

from collections.abc import Callable
from typing import Any, overload

from jax.sharding import Mesh

from dynamiq_jax.compression.compression import AnyPolicy, as_compression, as_topology
from dynamiq_jax.compression.explanation import Explanation, explain_plan
from dynamiq_jax.compression.ways import bytes_per_second, ways_of
from dynamiq_jax.core.checks import axis_counts
from dynamiq_jax.former import formerly
from dynamiq_jax.plan.step import StepExplanation, explain_step, is_step
from dynamiq_jax.topologies import Hierarchical
from dynamiq_jax.topologies.schedules import assumed
from dynamiq_jax.tree.leaves import placed_leaves


@overload
def explain(
    tree: Callable, *args: Any, verbose: bool = True, rate: str | None = None
) -> StepExplanation: ...


@overload
def explain(
    tree: Any,
    n_workers: int | tuple[int, ...],
    *,
    compression: AnyPolicy | None = None,
    verbose: bool = True,
    mesh: Mesh | None = None,
    specs: Any = None,
    rate: str | None = None,
) -> Explanation: ...


@formerly(topology=as_topology)
def explain(
    tree: Any,
    *args: Any,
    n_workers: int | tuple[int, ...] | None = None,
    compression: AnyPolicy | None = None,
    verbose: bool = True,
    mesh: Mesh | None = None,
    specs: Any = None,
    rate: str | None = None,
) -> Explanation | StepExplanation:
    """Tells all that a step sends, or what `psum` of a tree would; prints a table.

        dq.explain(step, params, batch)  # a step that is there: reads its compiled program
        dq.explain(params, 16, rate="25gbit")  # plans for 16 workers: nothing is compiled

    **A step** is any function of yours, jitted or not, on any kind of mesh; it is compiled. The
    table has every plan that it runs, the collectives of your own and those that XLA put there, and
    the leaves that travel natively with their reasons.

    Args:
      tree: a step; or arrays or `jax.ShapeDtypeStruct`s, as one worker passes them to `psum`.
      args: the arguments of a step, arrays or `jax.ShapeDtypeStruct`s with shardings. Bind keyword
        arguments with `functools.partial`. For a tree, ``n_workers``.
      n_workers: for a tree, the size of the axis, or of every axis, the outermost first.
      compression: for a tree, as for `psum`; `Policy.parameters` is what FSDP gathers and sharded
        updates send. A step has its own.
      verbose: whether to print the table.
      mesh: the mesh of ``specs``, as for `Compression.explain`.
      specs: how other axes of the mesh split the leaves, as for `Compression.explain`.
      rate: the rate of a host's link in each direction, a string such as "25gbit". The explanation
        then has the wire's times, in ms, as for `Compression.explain`.

    Returns:
      For a step a `StepExplanation`: its plans, other collectives and their bytes. For a tree an
      `Explanation`: the route, the bytes and the bits per coordinate of every leaf, and their
      totals for one worker.

    Raises:
      ValueError: an argument is invalid, or the method does not support this number of workers.
      TypeError: a tree comes without ``n_workers``.
    """
    if is_step(tree):
        given = dict(compression=compression, mesh=mesh, specs=specs, n_workers=n_workers)
        if told := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"explain got a step, and {' and '.join(told)}, which a step has inside; leave it "
                "out, or pass parameters and n_workers to plan a step that is not there"
            )
        per_second = None if rate is None else bytes_per_second(rate)
        found = explain_step(tree, args, rate=rate, per_second=per_second)
        if verbose:
            print(found)
        return found
    sizes = args if n_workers is None else (*args, n_workers)
    if len(sizes) != 1:
        raise TypeError(
            f"explain takes a tree and n_workers, and got {len(sizes)} arguments after the tree; "
            "pass explain(params, 8), or a step and its arguments"
        )
    explanation = explained(compression, tree, sizes[0], mesh=mesh, specs=specs, rate=rate)
    if verbose:
        print(explanation)
    return explanation


def explained(
    policy: AnyPolicy | None,
    tree: Any,
    n_workers: int | tuple[int, ...],
    *,
    mesh: Mesh | None,
    specs: Any,
    rate: str | None,
) -> Explanation:
    """The plan of an all-reduce of ``tree``, and those of the ways to train."""
    compression = as_compression(policy)
    per_second = None if rate is None else bytes_per_second(rate)
    sizes = axis_counts(n_workers)
    elsewhere = assumed(sizes)
    if rate is not None and elsewhere is None:
        elsewhere = f"assumed, as links carry {rate}: they are slower than NVLink"
    here = elsewhere is None
    leaves, _ = placed_leaves(tree, mesh, specs)
    plan = compression.plan(leaves, sizes, here=here)
    routes = list(dict.fromkeys(bucket.route for bucket in plan.buckets))
    # Nothing is compressed: the routes of the methods that the plan has asked, if it asked any.
    chosen = [method for method in dict.fromkeys(plan.methods) if method is not None]
    routes = routes or [compression.route(sizes, method, here=here) for method in chosen]
    explanation = explain_plan(plan, routes, elsewhere, ways_of(leaves, plan, policy, here=here))
    if per_second:
        per_host = sizes[-1] if sum(size > 1 for size in sizes) > 1 else 1
        if per_host > 1 and not all(isinstance(x.topology, Hierarchical) for x in routes):
            raise ValueError(
                f"rate={rate!r} with n_workers={sizes} and topology={routes[0].topology}: how "
                "many of its bytes cross hosts is not known; leave the topology out, or pass "
                "dq.Hierarchical()"
            )
        explanation = explanation.at_rate(str(rate), per_second, per_host)
    return explanation
