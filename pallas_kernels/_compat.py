"""Differences between JAX versions for Pallas calls. The only such file of this package."""

import functools
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

RUNS_MOSAIC = jax.__version_info__ >= (0, 11)
"""Whether Mosaic GPU kernels take references to what they write into."""
JOINS_PROCESSES = jax.__version_info__ >= (0, 11, 2)
"""Whether Mosaic GPU has XLA put arrays of kernels between processes into symmetric memory."""


def triton() -> Any:
    """Pallas' module of Triton; `None` if this JAX has none."""
    try:
        from jax.experimental.pallas import triton
    except (ImportError, AttributeError):
        return None
    return triton


@functools.cache
def runs_triton() -> bool:
    """Whether this JAX lowers Pallas kernels for NVIDIA GPUs through Triton, by lowering one."""
    if (found := triton()) is None:
        return False
    from jax.experimental import pallas as pl

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def lower():
        x = jax.ShapeDtypeStruct((128,), "float32")
        call = pl.pallas_call(copy, out_shape=x, compiler_params=found.CompilerParams())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX announces the end of this lowering
            jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))

    # Another thread is in no map and on no mesh, and the caller may be.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(lower).result()
        except (AssertionError, AttributeError, NotImplementedError, ValueError):  # no rule
            return False
        except RuntimeError as error:
            return "No supported GPU devices" in str(error)  # the rule asks for one
    return True


def end_search_for_dialect(name: str = "jaxlib.mlir.dialects.tt") -> None:
    """Puts an empty module where MLIR looks for Triton's dialect, which JAX has elsewhere.

    MLIR looks for it at every type of a pointer. Python searched the disk 13,000 times in the
    lowering of a step, which took a third of the time.
    """
    if name not in sys.modules and find_spec(name) is None:
        sys.modules[name] = ModuleType(name)


def shape_struct(shape, dtype, *like) -> jax.ShapeDtypeStruct:
    """A `ShapeDtypeStruct` that varies over every mesh axis that one of ``like`` varies over."""
    kind = type(jax.typeof(like[0]).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind(varying=_varying(like)))


def typed_by_operands(call: Callable[..., Any]) -> Callable[..., Any]:
    """A Mosaic GPU kernel; its results vary over all mesh axes over which an operand varies.

    JAX types results of these kernels as equal on all workers, whatever operands are, and refuses
    references to what varies. So the kernel gets operands that are typed as equal, too.
    """

    def typed(*operands):
        axes = tuple(sorted(_varying(operands)))
        results = call(*(_typed_as_equal_p.bind(x) if _varying([x]) else x for x in operands))
        return jax.lax.pcast(results, axes, to="varying") if axes else results

    return typed


def _equal(x):
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=frozenset()))


_typed_as_equal_p = Primitive("typed_as_equal")
_typed_as_equal_p.def_abstract_eval(_equal)
_typed_as_equal_p.def_impl(lambda x: x)
batching.defvectorized(_typed_as_equal_p)
mlir.register_lowering(_typed_as_equal_p, lambda ctx, x: [x])


def _varying(like) -> frozenset[str]:
    """The mesh axes over which at least one of the arrays varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in like))


end_search_for_dialect()
