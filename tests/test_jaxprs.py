"""The interpreter of jaxprs: calls, branches, loops and maps, in evaluations and analyses."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import auto_mesh

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import constant_of, evaluate, inner_jaxprs, name_of
from dynamiq_jax.jaxprs import primitives
from dynamiq_jax.jaxprs.constraints import record
from dynamiq_jax.jaxprs.walk import equations_of, inputs_of, interpret, passed_arguments, scan_parts

X = jnp.arange(6.0).reshape(2, 3)


def program_of(function, *args):
    """A traced function; these tests compile nothing."""
    return jax.make_jaxpr(function)(*args)


def passed(function, *args):
    return passed_arguments(program_of(function, *args))


def taken(function, *args, **options):
    """The inputs of which operands of sines are made."""
    sines = lambda equation: equation.invars if name_of(equation) == "sin" else []
    return inputs_of(program_of(function, *args), sines, **options)


def test_interpret_runs_programs_with_calls_and_constants():
    """With values themselves it computes what the program computes."""
    program = program_of(lambda x: jax.jit(jnp.sin)(x) @ X.T + 2, X)

    def rule(equation, operands):
        if name_of(equation) in primitives.JITS:
            return run(inner_jaxprs(equation)[0], operands)
        return evaluate(equation, *operands)

    def run(program, args):
        return interpret(program, args, rule, literal=constant_of, constant=lambda x: x)

    (found,) = run(program, [X])
    assert jnp.array_equal(found, jnp.sin(X) @ X.T + 2)


def test_equations_within_equations_are_found():
    loop = lambda x: lax.scan(lambda c, row: (jax.jit(jnp.cos)(c), row), x, X)[0]
    names = [name_of(equation) for equation in equations_of(program_of(loop, X[0]))]
    assert names[0] == "scan" and "cos" in names


@pytest.mark.parametrize("n_rows", [0, 2])
def test_the_parts_of_a_scan_are_counted(n_rows):
    rows = (X,) * n_rows

    def body(carry, own):
        return (carry[0] + X[0, 0], 2 * carry[1]), own[:1]

    (scan,) = [
        equation
        for equation in equations_of(
            program_of(lambda a, b: lax.scan(body, (a, b), rows, length=2), 1.0, X)
        )
        if name_of(equation) == "scan"
    ]
    parts = scan_parts(scan)
    assert parts.carried == 2
    assert sum(parts) + n_rows == len(scan.invars)


def test_carries_that_change_places_are_not_passed():
    """After an odd number of turns each would be the other."""
    swap = lambda a, b: lax.fori_loop(0, 3, lambda _, ab: ab[::-1], (a, b))
    assert passed(swap, X, X) == [None, None]
    stay = lambda a, b: lax.fori_loop(0, 3, lambda _, ab: (ab[0], 2 * ab[1]), (a, b))
    assert passed(stay, X, X) == [0, None]


def test_rows_are_arguments_again_by_their_own_scan_alone():
    """A row of the outer loop is a constant of the inner one, which stacks copies of it."""
    rows = lambda x: lax.scan(lambda c, row: (c, row), 0.0, x)[1]
    assert passed(rows, X) == [0]

    def copies(x):
        same = lax.optimization_barrier  # else JAX takes a constant out of the loop
        inner = lambda row: lax.scan(lambda d, _: (d, same(row)), 0.0, x)[1]
        return lax.scan(lambda _, row: (inner(row), None), x, x)[0]

    assert passed(copies, X) == [None]

    def nested(x):
        inner = lambda row: lax.scan(lambda d, own: (d, own), 0.0, row)[1]
        return lax.scan(lambda c, row: (c, inner(row)), 0.0, x)[1]

    assert passed(nested, X) == [0]
    last = lambda x: lax.scan(lambda _, row: (row, None), x[0], x)[0]
    assert passed(last, X) == [None]


def test_branches_pass_what_all_pass():
    same = lambda i, a, b: lax.switch(i, [lambda a, b: (a, b), lambda a, b: (a, a)], a, b)
    assert passed(same, 0, X, X) == [1, None]


def test_inputs_that_a_loop_carries_on_are_found():
    """In the first turn the sine is of the first input alone, later of the second, too."""

    def loop(a, b, c):
        return lax.fori_loop(0, 3, lambda _, x: (jnp.sin(x[0]) + x[1], x[1]), (a, b))[0] + c

    assert taken(loop, X, X, X) == {0, 1}
    assert taken(loop, X, X, X, alone=True) == set()


def test_inputs_of_results_of_calls_are_told_apart():
    both = lambda a, b: jnp.sin(jax.jit(lambda a, b: (2 * a, 2 * b))(a, b)[0])
    assert taken(both, X, X) == {0}
    assert taken(both, X, X, alone=True) == {0}


def test_axes_go_around_loops_until_nothing_changes():
    """The last of three carries varies in the third turn."""

    def loop(x):
        shift = lambda _, abc: (x, abc[0], abc[1])
        zeros = jnp.zeros_like(x)
        return lax.fori_loop(0, 5, shift, (zeros, zeros, zeros))

    recorded = record(loop, (X,), auto_mesh(), Axis(("data",)), ("data",))
    varying = frozenset({"data"})
    assert recorded.varying(varying) == (varying,) * 3
    assert recorded.varying(frozenset()) == (frozenset(),) * 3


def test_maps_pass_what_they_put_together_as_they_took_it_apart():
    own = lambda after: jax.shard_map(
        lambda x: x, mesh=auto_mesh(), in_specs=P("data"), out_specs=after, check_vma=False
    )
    assert passed(own(P("data")), jnp.ones((8, 2))) == [0]
    assert passed(own(P()), jnp.ones((8, 2))) == [None]


def test_variants_of_collectives_are_known():
    assert primitives.collective_of("unreduced_psum") == "psum"
    assert primitives.collective_of("all_gather_invariant") == "all_gather"
    assert primitives.collective_of("psum2") is None


def test_primitives_are_listed_in_one_file():
    """Sets of names elsewhere would be forgotten when JAX has a new primitive."""
    root = Path(dq.__file__).parent
    files = [*(root / "jaxprs").glob("*.py"), *(root / "plan").glob("*.py")]
    listed = re.compile(r'frozenset\(\s*"|"\.split\(\)')
    found = {file.name for file in files if listed.search(file.read_text())}
    assert found == {"primitives.py"}
