"""`explain`: all that a step sends, or would send."""

from collections.abc import Callable
from typing import Any, overload

from jax.sharding import Mesh

from dynamiq_jax.compression.compression import explained
from dynamiq_jax.compression.explanation import Explanation
from dynamiq_jax.compression.policy import AnyPolicy, Policy, as_compression, as_topology
from dynamiq_jax.compression.ways import bytes_per_second
from dynamiq_jax.former import formerly
from dynamiq_jax.plan.step import StepExplanation, explain_step, is_step


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
    options: dict[str, Any] = {"mesh": mesh, "specs": specs, "rate": rate}
    if isinstance(compression, Policy) and compression.parameters is not None:
        options["parameters"] = as_compression(compression, "parameters").methods_of
    explanation = explained(as_compression(compression), tree, sizes[0], **options)
    if verbose:
        print(explanation)
    return explanation
