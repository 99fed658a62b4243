"""Every refusal says what was wrong, in numbers, and what to pass instead."""

import dataclasses
import functools
import itertools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import over
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_drop_in import COLLECTIVES
from workers import auto_mesh

import dynamiq_jax as dq
import dynamiq_jax.optax
import pallas_kernels.backend
from dynamiq_jax.compression.compression import as_compression
from dynamiq_jax.core import checks
from dynamiq_jax.reduction.worker_gradients import Placement, WorkerTerms
from pallas_kernels import resolve_backend

FIELDS = [
    ({"widths": ()}, ["widths=()", "at least one", "(2, 4, 6, 8, 10)"]),
    ({"widths": (4, 4)}, ["widths=(4, 4)", "distinct", "(2, 4, 6, 8, 10)"]),
    ({"widths": (2, 17)}, ["widths=(2, 17)", "0 to 16", "(2, 4, 6, 8, 10)"]),
    ({"widths": (2.5, 4)}, ["widths=(2.5, 4)", "tuple[int, ...], None", "widths=None"]),
    ({"bits": "5"}, ["bits='5'", "expected float", "bits=5.0"]),
    ({"dither": "off"}, ["dither='off'", "expected bool", "dither=False"]),
    ({"floor": 5.0}, ["floor=5.0", "expected one of int, 'auto', None", "floor='auto'"]),
    ({"rounding": "up"}, ["rounding='up'", "antithetic", "correlated", "independent", "nearest"]),
    ({"rounding": "nearest", "dither": True}, ["dither=True", "rounding='nearest'"]),
    ({"backend": "cuda"}, ["backend='cuda'", "None", "triton", "jnp", "interpret"]),
    ({"backend": "pallas"}, ["backend='pallas'", "pass backend='triton'"]),
    ({"format": dq.Format(levels="geometric"), "widths": (4, 11), "bits": 8},
        ["widths=(4, 11)", "exceed 10", "drop the widths 11..15", "levels='piecewise'"]),
    ({"bits": 2.2}, ["bits=2.2", "below 2.375", "narrowest width, 2", "raise bits", "narrower"]),
    ({"bits": float("nan")}, ["bits=nan"]),
    ({"bits": 33}, ["bits=33", "exceeds 32", "at most 14.38", "lower bits"]),
    ({"dither": True, "format": dq.Format(levels="geometric")},
        ["dither=True", "levels='piecewise'"]),
    ({"dither": True, "widths": (4, 15)}, ["widths=(4, 15)", "14 or 16"]),
    ({"floor": 5, "widths": (2, 4)}, ["floor=5", "(2, 4)", "'auto'", "None for no floor"]),
    ({"floor": 15}, ["floor=15", "13, 14)", "'auto'"]),
    ({"floor": 11, "format": dq.Format(levels="geometric"), "bits": 12}, ["floor=11", "9, 10)"]),
    ({"floor": 5}, ["bits=5.0", "below 5.375", "the floor, 5", "lower floor"]),
]  # fmt: skip
FORMAT_FIELDS = [
    ({"group_size": 32.0}, ["group_size=32.0", "expected int", "group_size=32"]),
    ({"group_size": 12}, ["group_size=12", "(8, 16, 32, 64)"]),
    ({"super_group_size": 300}, ["super_group_size=300", "(128, 256, 512, 1024)"]),
    (
        {"group_size": 64, "super_group_size": 128},
        ["super_group_size=128", "group_size=64", "fewer than 4", "group_size <= 32"],
    ),
    ({"levels": "log"}, ["levels='log'", "companded", "piecewise", "geometric", "uniform"]),
    ({"group_scale": "fp8"}, ["group_scale='fp8'", "uint8", "bf16"]),
    ({"scale_axis": "rows"}, ["scale_axis='rows'", "int, 'auto', None"]),
]
REQUEST_FIELDS = [
    ({"min_leaf_size": -1}, ["min_leaf_size=-1", "negative", "pass 0"]),
    ({"bucket_bytes": -2}, ["bucket_bytes=-2", "negative", "pass 0"]),
    ({"min_bucket_bytes": 0.5}, ["min_bucket_bytes=0.5", "expected", "int"]),
    ({"exclude": "norm["}, ["exclude='norm['", "not a regular expression", "as 'norm|bias'"]),
    ({"exclude": 3}, ["exclude=3", "expected"]),
    ({"topology": "ring"}, ["topology='ring'", "not a topology", "dq.Ring()"]),
    ({"topology": dq.Ring}, ["topology=", "not a topology", "dq.Ring()"]),
    ({"topology": dq.DynamiQ()}, ["topology=", "not a topology", "dq.Ring()"]),
    ({"method": dq.DynamiQ}, ["not a method", "dq.DynamiQ(bits=5)"]),
]


def raises(exception, *texts):
    """pytest.raises for a message that holds all of the texts, in order."""
    return pytest.raises(exception, match="(?s)" + ".*".join(map(re.escape, texts)))


BAD = [(dq.DynamiQ, *case) for case in FIELDS]
BAD += [(dq.Format, *case) for case in FORMAT_FIELDS]
BAD += [(dq.Compression, *case) for case in REQUEST_FIELDS]
for flat in (dq.Ring, dq.Butterfly, dq.Direct):
    BAD.append((flat, {"streams": 0}, ["streams=0", "at least 1"]))
    for balance in (17, -16.5, float("nan"), float("inf")):
        texts = [f"balance={balance}", "between -16 and 16", "pass None"]
        BAD.append((flat, {"balance": balance}, texts))
for level, what in itertools.product(("inner", "outer"), ("ring", dq.Ring, dq.Hierarchical())):
    texts = [f"{level}=", "not a topology of one level", "dq.Ring()"]
    BAD.append((dq.Hierarchical, {level: what}, texts))


@pytest.mark.parametrize(("make", "fields", "texts"), BAD, ids=[str(case[1]) for case in BAD])
def test_bad_fields(make, fields, texts):
    with pytest.raises(ValueError) as info:
        make(**fields)
    for text in texts:
        assert text in str(info.value)


CLASSES = (dq.DynamiQ, dq.Format, dq.BF16, dq.F32, dq.ErrorFeedback)
CLASSES += (dq.Direct, dq.Ring, dq.Butterfly, dq.Hierarchical)
OPTIONS = {c.__name__: c for c in CLASSES}
OPTIONS |= dq.contrib.METHODS


def test_a_trainers_settings_make_a_request():
    """As docs/choosing.md does it; lists of YAML are tuples."""
    text = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?settings = .*?)```", text, re.DOTALL)
    found: dict = {}
    exec(code, found)
    expected = dq.DynamiQ(bits=4.0, dither=True)
    expected = dq.Compression(expected, topology=dq.Direct(), exclude="norm|bias")
    assert found["method"] == expected
    assert dq.DynamiQ(widths=[2, 4]) == dq.DynamiQ(widths=(2, 4))  # type: ignore
    with pytest.raises(TypeError, match="bit"):
        dq.DynamiQ(**{"bit": 4})


@pytest.mark.parametrize("name", OPTIONS)
def test_no_field_takes_a_value_of_another_type(name):
    needed = {"method": dq.BF16()} if name == "ErrorFeedback" else {}
    for field in dataclasses.fields(OPTIONS[name]):
        takes_bool = field.type is bool or bool in get_args(field.type)
        for value in (b"4",) if takes_bool else (b"4", True, 4.5j):
            with raises(ValueError, f"{field.name}={value!r}"):
                OPTIONS[name](**needed | {field.name: value})


def test_options_print_what_is_not_at_its_default():
    method = dq.ErrorFeedback(dq.DynamiQ(bits=4, format=dq.Format(levels="uniform")), kind="ef21")
    inner = "DynamiQ(bits=4, format=Format(levels='uniform'))"
    assert repr(method) == f"ErrorFeedback(method={inner}, kind='ef21')"
    assert repr(dq.Hierarchical(outer=dq.Ring())) == "Hierarchical(outer=Ring())"
    assert repr(dq.Compression(exclude="norm")) == "Compression(exclude='norm')"
    for name, kind in OPTIONS.items():
        if name != "ErrorFeedback":
            told = [x.name for x in dataclasses.fields(kind) if x.name in checks.ALWAYS]
            told = [f"{field}={getattr(kind(), field)!r}" for field in told]
            assert repr(kind()) == f"{name}({', '.join(told)})"
    assert repr(dq.DynamiQ()) == "DynamiQ(bits=5.0)"
    assert repr(dq.contrib.PowerSGD()).startswith("PowerSGD(rank=")


def test_numbers_of_numpy_become_those_of_python():
    """So that methods of equal numbers print alike, and can be saved."""
    given = dq.DynamiQ(
        bits=np.float32(4.5),
        format=dq.Format(group_size=np.int64(64)),
        widths=[np.int8(2), 8],
        dither=np.bool_(1),
    )
    expected = dq.DynamiQ(bits=4.5, format=dq.Format(group_size=64), widths=(2, 8), dither=True)
    assert (given, repr(given)) == (expected, repr(expected))
    assert given == pickle.loads(pickle.dumps(given)) == dataclasses.replace(given)
    assert repr(dq.Ring(balance=np.float16(0.5))) == repr(dq.Ring(balance=0.5))
    assert dq.DynamiQ(widths=range(2, 10, 2)).widths == (2, 4, 6, 8)


def test_methods_are_hashable_values():
    same = dq.DynamiQ(widths=(8, 2, 4))
    assert same == dq.DynamiQ(widths=(2, 4, 8))
    assert hash(dq.DynamiQ(widths=[4, 2, 8])) == hash(same)
    assert dq.DynamiQ(bits=4) != dq.DynamiQ()
    with pytest.raises(AttributeError):
        dq.DynamiQ().bits = 3
    with pytest.raises(TypeError):
        dq.DynamiQ(5.0)


def psum_of_ones(n=2, size=70_000, **options):
    def one(x):
        return dq.psum(x, **{"axis_name": "data", **options})

    return jax.eval_shape(jax.vmap(one, axis_name="data"), np.ones((n, size), np.float32))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_groups_of_workers(name):
    def traced(collective, groups):
        def one(x):
            return collective(x, "data", axis_index_groups=groups)

        jax.eval_shape(jax.vmap(one, axis_name="data"), np.ones((4, 8), np.float32))

    ours, native = COLLECTIVES[name]
    texts = "axis_index_groups=((0, 1), (2, 3))", "jax.vmap has no", "axis_name='gpu'"
    with raises(NotImplementedError, *texts):
        traced(ours, [[0, 1], [2, 3]])
    with pytest.raises(NotImplementedError):
        traced(native, [[0, 1], [2, 3]])
    exactly = "cover all indices exactly once", "from 0 to 3"
    for groups, *texts in (
        ([[0, 1], [2, 2]], "((0, 1), (2, 2))", *exactly),
        ([[0, 1]], "((0, 1),)", *exactly),
        ([[0.5, 1], [2, 3]], "[[0.5, 1], [2, 3]] are not lists of worker indices", "pass for"),
        ([0, 1, 2, 3], "[0, 1, 2, 3] are not lists of worker indices", "[[0, 1], [2, 3]]"),
        ([[0, 1, 2], [3]], "((0, 1, 2), (3,))", "groups of [3, 1] workers", "the same size"),
    ):
        with raises(ValueError, *texts):
            traced(ours, groups)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_unknown_axis(name):
    """Errors are those of `jax.lax`, and then the remedy; also where JAX 0.10 asserts something."""
    ours, native = (functools.partial(f, axis_name="rows") for f in COLLECTIVES[name])
    for collective in (ours, native):
        with pytest.raises(NameError, match="unbound axis name: rows"):
            jax.eval_shape(jax.vmap(collective, axis_name="data"), np.ones(2, np.float32))
    with raises(NameError, "unbound axis name: rows", "jax.shard_map", "dq.value_and_grad"):
        shard_mapped(ours, jnp.ones(8), in_specs=P("data"))


@pytest.mark.parametrize("axis_name", ["row", ("data", "row")])
def test_axes_of_vmap_inside_of_a_map_with_types(axis_name):
    """JAX refuses them, too, by an assertion without words; also where the axis has the size 1."""

    def summed(rows, check_vma):
        ours = functools.partial(dq.psum, axis_name=axis_name, compression=dq.F32())
        over = lambda x: jax.lax.pmean(jax.vmap(ours, axis_name="row")(x)[0], "data")
        shard_mapped(over, jnp.ones((8 * rows, 8192)), in_specs=P("data"), check_vma=check_vma)

    for rows in (1, 2):
        with raises(NotImplementedError, "axis_name=", "axes of jax.vmap", "check_vma=False"):
            summed(rows, True)
        summed(rows, False)


UNMAPPED = {
    "psum": dq.psum, "pmean": dq.pmean, "reduce": dq.reduce, "psum_scatter": dq.psum_scatter,
    "all_gather": dq.all_gather, "fsdp": dq.fsdp,
    "all_reduce": lambda x, axis: dq.optax.all_reduce(axis).update(x, OF_NO_STEP),
}  # fmt: skip
OF_NO_STEP = dq.optax.AllReduceState(np.int32(0), None, None)


@pytest.mark.parametrize("name", UNMAPPED)
def test_errors_of_unmapped_axes_name_no_other_function(name):
    with pytest.raises(NameError, match=f"please call ({name}|the reduction) under"):
        UNMAPPED[name](np.ones(8, np.float32), "rows")


SUMS_AND_FACTS = {
    **{name: functools.partial(f, axis_name="data") for name, f in UNMAPPED.items()},
    "explain": functools.partial(dq.explain, n_workers=2),
    "init_state": functools.partial(dq.Compression().init_state, n_workers=2),
    "by path": functools.partial(
        dq.pmean, axis_name="data", compression=lambda path, x: dq.DynamiQ()
    ),
}
del SUMS_AND_FACTS["fsdp"], SUMS_AND_FACTS["all_reduce"]


@pytest.mark.parametrize("name", SUMS_AND_FACTS)
def test_leaves_that_are_no_numbers(name):
    def one(x):
        tree = {"w": x, "rngs": {"key": jax.random.split(jax.random.key(0), 8)}}
        return SUMS_AND_FACTS[name](tree)

    with raises(ValueError, "leaf ['rngs']['key'] is of type key<", "leave PRNG keys", "nnx.Param"):
        jax.eval_shape(jax.vmap(one, axis_name="data"), np.ones((2, 8), np.float32))


@pytest.mark.parametrize("name", [*COLLECTIVES, "all_to_all"])
def test_leaves_whose_size_is_open(name):
    """JAX has an error of its own for a comparison of such sizes."""
    rest = (1, 1) if name == "all_to_all" else ()
    one = jax.vmap(lambda x: getattr(dq, name)({"w": x}, "data", *rest), axis_name="data")
    (size,) = jax.export.symbolic_shape("b")
    like = jax.ShapeDtypeStruct((2, size, 2), np.float32)
    with raises(ValueError, "leaf ['w'] has shape (b, 2)", "shapes of numbers", "jax.lax"):
        jax.eval_shape(one, like)


def test_integers_whose_size_is_open_are_summed_as_by_lax():
    total = jax.vmap(lambda x: dq.psum(x, "data"), axis_name="data")
    (size,) = jax.export.symbolic_shape("b")
    found = jax.eval_shape(total, jax.ShapeDtypeStruct((2, size, 3), np.int32))
    assert found.shape == (2, size, 3)


def test_leaves_that_are_no_arrays():
    for leaf, kind in (("float32", "str"), (np.array(["a"]), "<U1"), (object(), "object")):
        with raises(ValueError, f"leaf ['x'] is of type {kind}, which is not one of numbers"):
            dq.explain({"x": leaf}, 2, verbose=False)


def test_a_backend_that_cannot_run_here():
    with raises(NotImplementedError, "backend='mosaic'", *NOT_HERE):
        resolve_backend("mosaic")
    with raises(ValueError, "backend='rocm'", "triton", "jnp", "interpret"):
        resolve_backend("rocm")
    with raises(ValueError, "backend='pallas'", "pass backend='triton'"):
        resolve_backend("pallas")
    assert resolve_backend(None) == "jnp"


NOT_HERE = "NVIDIA GPU", "'cpu'", "backend=None"
NO_METHOD = ("not a method", "dq.DynamiQ(bits=5)")
ONE_KEY = "expected one PRNG key"
REFUSED = [
    (NotImplementedError, {"axis_name": axis}, f"axis_name={axis!r}", "name of a mapped axis",
     "or a tuple of names") for axis in (0, None, ("data", 1))
]  # fmt: skip
REFUSED += [
    (ValueError, {"axis_name": ("data", "data")}, "('data', 'data')", "twice", "pass each once"),
    (NotImplementedError, {"compression": dq.DynamiQ(backend="triton")},
     "backend='triton'", *NOT_HERE),
    (ValueError, {"compression": 5.0}, "compression=5.0", *NO_METHOD),
    (ValueError, {"compression": dq.Ring()}, "compression=Ring()", *NO_METHOD),
    (ValueError, {"compression": dq.DynamiQ}, "DynamiQ", *NO_METHOD),
    (ValueError, {"compression": over(dq.Butterfly()), "n": 6}, "power of two", "has 6"),
    (ValueError, {"key": 7}, "key=7", "not a PRNG key", "jax.random.key(seed)"),
    (ValueError, {"key": jax.random.split(jax.random.key(0), 3)}, "key has dtype", "shape (3,",
     ONE_KEY, "fold_in"),
    (ValueError, {"key": jnp.ones(2)}, "float32", "(2,)", ONE_KEY, "jax.random.key(seed)"),
    (ValueError, {"key": np.uint32(3)}, "uint32", "()", ONE_KEY),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case[1]))
def test_arguments_that_psum_refuses(case):
    error, options, *texts = case
    with raises(error, *texts):
        psum_of_ones(**options)


def test_a_jax_with_too_little_of_mosaic(monkeypatch):
    monkeypatch.setattr(pallas_kernels.backend, "_on_nvidia", lambda: True)
    monkeypatch.setattr(pallas_kernels.backend, "RUNS_MOSAIC", False)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    with raises(NotImplementedError, "backend='mosaic'", "JAX >= 0.11", jax.__version__):
        resolve_backend("mosaic")
    assert resolve_backend("interpret") == "interpret"


def shard_mapped(one, *args, **options):
    mapped = jax.shard_map(one, mesh=auto_mesh(), out_specs=P(), **options)
    return jax.eval_shape(mapped, *args)


def test_a_leaf_that_does_not_vary():
    tree = {"w": jnp.ones((600, 500)), "b": jnp.ones(4_096), "step": jnp.int32(1)}

    def one(tree, x):
        return dq.psum({**tree, "fine": x}, "data")

    said = "leaf ['b'] (float32[4096]) and 1 more do not vary over axis 'data'", "all 8 workers"
    remedies = "multiply by 8", "dq.value_and_grad", "jax.lax.pcast(params, 'data', to='varying')"
    with raises(ValueError, *said, *remedies):
        shard_mapped(one, tree, jnp.ones(8), in_specs=(P(), P("data")))

    def summed(params, x):  # the usual mistake: under check_vma=True JAX has summed them already
        return dq.psum(jax.grad(lambda p: jnp.sum(p * x[0]))(params), "data")

    with raises(ValueError, "leaf <root>", "already summed", "dq.value_and_grad"):
        shard_mapped(summed, jnp.ones(300_000), jnp.ones(8), in_specs=(P(), P("data")))

    def scattered(w, x):
        return dq.psum_scatter({"w": w, "fine": x}, "data", tiled=True)

    with raises(ValueError, "leaf ['w'] (float32[524288])", "do not vary over axis 'data'"):
        shard_mapped(scattered, jnp.ones(2**19), jnp.ones(64), in_specs=(P(), P("data")))


def test_a_state_is_of_leaves_that_vary():
    method = dq.ErrorFeedback(dq.DynamiQ())
    tree = {"w": jnp.ones((600, 500))}

    def one(tree, x):
        state = as_compression(method).init_state(tree, 8)
        return dq.reduce(tree, "data", compression=method, state=state).tree

    with raises(ValueError, "leaf ['w']", "do not vary over axis 'data'", "to='varying'"):
        shard_mapped(one, tree, jnp.ones(8), in_specs=(P(), P("data")))


def loss(params, x):
    return jnp.mean(params * x)


def test_value_and_grad_refuses_meshes():
    mesh = auto_mesh()
    for name, words in (("batch", "'batch'"), (("data", "rows"), "'rows'")):
        with raises(ValueError, f"axis_name={words}", "not in the mesh", "'data'"):
            dq.value_and_grad(loss, mesh=mesh, axis_name=name)
    both = jax.make_mesh((4, 2), ("data", "model"))
    with raises(NotImplementedError, "axis_name=0", "name of a mapped axis"):
        dq.value_and_grad(loss, mesh=mesh, axis_name=0)
    with raises(ValueError, "mesh=(8,) is not a mesh", "dq.make_mesh"):
        dq.value_and_grad(loss, mesh=(8,), axis_name="data")
    # Several axes together may be the data-parallel one.
    dq.value_and_grad(loss, mesh=both, axis_name=("data", "model"))
    # A further axis of size 1 is no obstacle.
    dq.value_and_grad(loss, mesh=jax.make_mesh((8, 1), ("data", "model")), axis_name="data")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_losses_of_another_form_are_named_with_a_remedy(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = jax.device_put(np.ones((16, 3), np.float32), jax.NamedSharding(mesh, P("data")))
    w = jax.device_put(np.ones(3, np.float32), jax.NamedSharding(mesh, P()))
    product = lambda w, x: jnp.sum(x * w[None], axis=-1)
    told = functools.partial(dq.value_and_grad, mesh=mesh, axis_name="data")
    for loss, has_aux, *texts in (
        (product, False, "the loss has shape", "float32", "the mean over all examples"),
        (lambda w, x: (jnp.sum(w), x), False, "is a tuple of 2", "has_aux=True"),
        (lambda w, x: {"loss": jnp.sum(w)}, False, "is a dict of 1", "return a scalar"),
        (lambda w, x: None, False, "is a NoneType", "return a scalar"),
        (lambda w, x: jnp.sum(w), True, "has_aux=True", "returns a", "return (loss, aux)"),
        (lambda w, x: (1, x, w), True, "a tuple of 3", "return (loss, aux)"),
    ):
        with raises(TypeError, *texts):
            jax.eval_shape(told(loss, has_aux=has_aux), w, x)


def test_operators_of_one_workers_gradients_are_refused_with_a_remedy():
    """A number of Python does not ask the node for an array."""
    terms = WorkerTerms(jnp.ones((8, 4)), Placement(auto_mesh(), ("data",), P()))
    for f in (lambda g: 0.1 * g, lambda g: g / 2, lambda g: np.ones(4) - g, lambda g: -g):
        with raises(ValueError, "terms of 8 workers", "dq.psum(grads, 'data')", "divide the loss"):
            f(terms)


def test_value_and_grad_refuses_weights_that_are_no_function():
    with raises(ValueError, "weight='tokens' is no function", "lambda params, batch"):
        dq.value_and_grad(loss, mesh=auto_mesh(), axis_name="data", weight="tokens")


def test_value_and_grad_refuses_batches_that_do_not_divide():
    f = dq.value_and_grad(loss, mesh=auto_mesh(), axis_name="data")
    with raises(ValueError, "['x']", "(12, 3)", "multiple of the 8 workers", "axis 'data'"):
        f(jnp.ones(3), {"x": jnp.ones((12, 3))})


COUNTING = [functools.partial(dq.explain, verbose=False), dq.Compression().init_state]


NUMBERS = [
    (n, f"n_workers={n!r} is not a number of workers", f"mesh.shape['{axis}']",
     f"jax.lax.axis_size('{axis}')")
    for n, axis in (
        ("model", "model"), (("node", "model"), "node"), (2.0, "data"), ((2, False), "data"),
        (None, "data"),
    )
] + [(n, f"n_workers={n}", "at least 1") for n in (0, -2, (), (2, 0))]  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS, ids=lambda case: str(case[0]))
def test_what_is_no_number_of_workers(case):
    n, *texts = case
    for function in COUNTING:
        with raises(ValueError, *texts):
            function(np.ones(3), n)
    with raises(ValueError, "n_workers=a dict is not a number of workers", "pass an int"):
        dq.explain(8, {"w": np.ones(99)})  # the arguments are exchanged; no numbers of arrays
    for number in (np.int64(2), jax.device_put(np.int32(2))):
        assert type(dq.explain(np.ones(3), number, verbose=False).n_workers) is int


def test_a_parameter_that_is_no_array_is_named_with_a_remedy():
    """Modules of equinox have functions among their leaves."""
    loss = lambda p, x: jnp.mean(p["act"](x @ p["w"]))
    params, x = {"w": jnp.ones((8, 8)), "act": jnp.tanh}, jnp.ones((8, 8))
    with pytest.raises(TypeError, match=r"\['act'\] is a .*, not an array: .*eqx.partition"):
        dq.value_and_grad(loss, mesh=auto_mesh(), axis_name="data")(params, x)


@jax.tree_util.register_pytree_node_class
class Strict:
    """A node that checks its children wherever it is built."""

    def __init__(self, w):
        assert hasattr(w, "shape"), f"not an array: {w!r}"
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def test_nodes_that_check_their_children_are_taken_where_psum_takes_them_and_else_named():
    tree = Strict(jnp.ones((8, 4096)))
    run = lambda t: dq.pmean(t, "data").w
    mapped = jax.shard_map(run, mesh=auto_mesh(), in_specs=P("data"), out_specs=P())
    assert float(jax.jit(mapped)(tree).sum()) == 4096
    grad_fn = dq.value_and_grad(lambda p, x: jnp.mean(x @ p.w), mesh=auto_mesh(), axis_name="data")
    rule = dq.optax.sharded(optax.sgd(0.1), "data")
    for call, *args in (
        (grad_fn, tree, jnp.ones((8, 8))),
        (dq.optax.init, rule, tree, auto_mesh()),
    ):
        with pytest.raises(TypeError, match="(?s)no array in Strict.__init__ .*takes any child"):
            call(*args)
