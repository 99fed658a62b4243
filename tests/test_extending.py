"""The quantiser of docs/extending.md, as pasted, in every way that the page lists."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ways
import ways
from cases import OVER, SMALL, daily, small
from test_recipes import blocks
from workers import auto_mesh

import dynamiq_jax as dq
from dynamiq_jax import methods
from dynamiq_jax.contrib import lanes
from dynamiq_jax.methods.metrics import vnmse

ROOT = Path(__file__).parent.parent
N, KEY = 4, jax.random.key(3)
CLASS, USE, TRAINING = blocks("docs/extending.md")


@cache
def page():
    """The variables of the page's blocks."""
    module = ModuleType("extending")
    sys.modules["extending"] = module  # dataclasses look their module up
    exec(compile(CLASS + USE + TRAINING, "docs/extending.md", "exec"), vars(module))
    return module


def test_the_quantiser_has_twenty_lines():
    lines = CLASS[CLASS.index("@dataclass") :].splitlines()
    assert len([line for line in lines if line.strip()]) <= 20


@cache
def shares() -> np.ndarray:
    """f32[worker, n, s]: rows of very different magnitude."""
    x = np.random.default_rng(0).standard_normal((N, N, 700)).astype(np.float32)
    return x * np.float32(10) ** np.arange(N, dtype=np.float32)[:, None]


def test_the_collectives_of_the_page():
    x = shares()
    run = jax.jit(jax.vmap(page().collectives, (0, None), axis_name="data"))
    total, part, gathered, exchanged = jax.device_get(run(x, KEY))
    exact = x.sum(0)
    for found in total, gathered:
        assert all(np.array_equal(found[0], other) for other in found[1:])
    # Each row by itself: a row in another's place or in its scale would be far off.
    turned = x.swapaxes(0, 1)
    for found, right in (
        (total[0], exact), (part, exact), (gathered[0], part), (exchanged, turned),
    ):  # fmt: skip
        errors = np.sum((found - right) ** 2, -1) / np.sum(right**2, -1)
        assert np.all(errors > 1e-6) and np.all(errors < 2e-3), errors


def test_the_trainings_of_the_page():
    """Each way's gradient is near the exact one; SGD of rate 1 takes masters this far."""
    told, mesh, spec, whole = page(), auto_mesh(N), jax.P("data"), jax.P()
    draw = lambda *shape: np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
    params, x = {"up": draw(64, 128) / 8, "down": draw(128, 64) / 11}, draw(16, 64)
    state = dq.optax.init(
        told.optimizer, jax.device_put(params, jax.NamedSharding(mesh, whole)), mesh
    )
    of_state = dq.optax.state_specs(state)

    def mapped(function, specs, out):
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)

    @jax.jit
    def run(params, state, x, key):
        update = mapped(told.sharded_update, (whole, of_state, spec), (whole, of_state))
        return (
            jax.grad(told.loss_fn)(params, x),
            mapped(told.data_parallel, (whole, spec, whole), whole)(params, x, key),
            update(params, state, x)[1].masters,
            mapped(told.fsdp, (spec, spec, whole), spec)(params, x, key),
        )

    exact, parallel, masters, fsdp = jax.device_get(run(params, state, x, KEY))
    for name, right in exact.items():
        for found in parallel[name], params[name] - masters[name], fsdp[name]:
            assert 1e-6 < np.sum((found - right) ** 2) / np.sum(right**2) < 2e-3


def test_small_arrays_travel_as_the_page_says():
    """At the limits of the page, and one coordinate below."""
    text = (ROOT / "docs" / "extending.md").read_text()
    (leaf,) = re.findall(r"`min_leaf_size` \((\d+) coordinates\)", text)
    (bucket,) = re.findall(r"`min_bucket_size` \((\d+) coordinates\)", text)

    def compressed(size: str, less: int, **limits) -> bool:
        x = jax.ShapeDtypeStruct((int(size) - less,), jnp.float32)
        method = dq.Compression(page().Int8(), topology=dq.Direct(), **limits)
        return dq.explain(x, N, compression=method, verbose=False).rows[0].route == "compressed"

    assert compressed(bucket, 0)
    assert not compressed(bucket, 1)
    assert compressed(leaf, 0, min_bucket_bytes=0)
    assert not compressed(leaf, 1, min_bucket_bytes=0)
    assert compressed(leaf, 1, min_bucket_bytes=0, min_leaf_size=0)


def test_four_bits_are_packed_and_unpacked_as_the_page_says():
    codes = np.arange(64, dtype=np.uint32) % 16

    @jax.jit
    def there_and_back(codes):
        words = lanes.pack_bits(codes, 4)
        assert (words.shape, words.dtype) == ((8,), jnp.uint32)
        return lanes.unpack_bits(words, 64, 4)

    found = there_and_back(codes)
    assert found.dtype == jnp.uint32
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_makes_its_block_nan_on_all_workers(value):
    """In every place of a block: a maximum may drop a NaN in some lanes."""
    x = np.ones((N, N * 64 * 64), np.float32)
    places = np.arange(0, x.shape[1], 65)  # one in nearly every block, each time a place further
    x[1, places] = value
    method = small(page().Int8(), topology=dq.Ring())
    run = jax.jit(
        jax.vmap(lambda x: dq.psum(x, "data", compression=method, key=KEY), axis_name="data")
    )
    found, expected = np.asarray(run(x)), np.zeros(x.shape[1] // 64, bool)
    expected[places // 64] = True
    np.testing.assert_array_equal(np.isnan(found), np.tile(np.repeat(expected, 64), (N, 1)))


STREAMS = {"streams": 2}
EXACT_OVER = [dq.Ring(**STREAMS), dq.Butterfly(**STREAMS), dq.Direct(**STREAMS), None]
EXACT_OVER += [dq.Direct(transport="permutes"), dq.Ring(unroll_up_to=1)]


@pytest.mark.parametrize("topology", daily(EXACT_OVER, [EXACT_OVER[0], None]), ids=str)
def test_a_derived_scatter_puts_every_sum_in_its_place(topology):
    """F32 loses nothing, so that its scatter is JAX's up to the order of additions."""
    x, method = shares(), small(dq.F32(), topology=topology)
    ours = lambda x: dq.psum_scatter(x, "data", compression=method)
    theirs = lambda x: jax.lax.psum_scatter(x, "data")
    found, right = (jax.jit(jax.vmap(f, axis_name="data"))(x) for f in (ours, theirs))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_every_comparator_that_hops_without_memory_shards():
    names = {name for name, method in dq.contrib.METHODS.items() if method.shards}
    assert names >= {"MXFP8", "MXFP6", "MXFP4", "MinMax", "GlobalQSGD"}


@pytest.mark.parametrize("route", daily(OVER, ["ring"]))
def test_error_feedback_makes_up_for_what_it_lost(route):
    method = dq.Compression(dq.ErrorFeedback(page().Int8()), topology=OVER[route], **SMALL)
    x = {"w": shares()[:, 0]}
    state = method.init_state(jax.tree.map(lambda x: x[0], x), N)
    states = jax.tree.map(lambda s: jnp.broadcast_to(s, (N, *s.shape)), state)

    def step(x, key, state):
        return dq.reduce(x, "data", op="sum", compression=method, key=key, state=state)

    run = jax.jit(jax.vmap(step, (0, None, 0), axis_name="data"))
    exact, found = {"w": x["w"].sum(0)}, []
    for i in range(8):
        reduced = run(x, jax.random.fold_in(KEY, i), states)
        states = reduced.state
        found.append(reduced.tree["w"][0])
    first = float(vnmse({"w": found[0]}, exact))
    assert 0 < float(vnmse({"w": np.mean(found, 0)}, exact)) < first / 8


def test_explain_knows_its_bits_and_the_ways_to_train():
    leaf = jax.ShapeDtypeStruct((N * 64 * 100,), jnp.float32)
    told = dq.explain(
        leaf, N, compression=small(page().Int8(), topology=dq.Direct()), verbose=False
    )
    assert told.bits_per_coord == pytest.approx(8 + 32 / 64)
    sent = {way.name: way.sent_bytes for way in told.ways}
    # The scatter is half of an all-reduce; the rest is the default for parameters.
    half = (N - 1) / N * leaf.size * 8.5 / 8
    assert sent["data parallel"] == pytest.approx(2 * half)
    assert half < sent["sharded updates"] < sent["data parallel"]


class Pasted(ways.Training):
    """A training whose gradients and parameters all travel by the page's quantiser."""

    def request(self, text: str, dither: bool = False) -> dq.Compression:
        return dq.Compression(page().Int8(), topology=self.topology, **test_ways.LIMITS)


WAYS = ["zero-pipeline:5/2.5", "fsdp-layers:5/8", "fsdp:5/8", "fsdp-keep:5/8", "zero:5/2.5", "dp:5"]
WAYS += ["auto:5", "explicit:5", "zero-explicit:5/2.5", "fsdp-explicit:5/8"]


@pytest.mark.usefixtures("dtypes_promoted")
@pytest.mark.parametrize("text", daily(WAYS, ["fsdp-layers:5/8"]))
def test_a_model_trains_by_it_in_every_way(text):
    t = Pasted(**vars(test_ways.training(auto_mesh(N))))
    way, program = test_ways.lowered(text, t)
    test_ways.check_compressed(way, program.compile(), t, least=1e-4)


def test_an_unfinished_quantiser_is_told_what_it_lacks():
    class Nothing(methods.PlainMethod):
        unit = 64

    class Odd(page().Int8):
        unit = 6

    x = jax.ShapeDtypeStruct((N, 1000), jnp.float32)
    for method, error, text in (
        (Nothing(), NotImplementedError, "Nothing has neither encode and decode nor operations"),
        (Odd(), ValueError, "Odd.unit=6 is not a multiple of 4.*pass unit=8"),
    ):
        own = small(method, topology=dq.Direct())
        with pytest.raises(error, match=text):
            jax.eval_shape(
                jax.vmap(lambda x, m=own: dq.psum(x, "data", compression=m), axis_name="data"), x
            )


def shaped(method) -> tuple[int, ...]:
    """The shape of a sum by a method."""
    x = jax.ShapeDtypeStruct((N, 1000), jnp.float32)
    total = lambda x: dq.psum(x, "data", compression=small(method, topology=dq.Direct()))
    return jax.eval_shape(jax.vmap(total, axis_name="data"), x).shape


def explained(method):
    """The explanation of an all-reduce by a method."""
    leaf = jax.ShapeDtypeStruct((1000,), jnp.float32)
    return dq.explain(leaf, N, compression=small(method, topology=dq.Direct()), verbose=False)


class Whole(methods.PlainMethod):
    """Sends f32 as it is, and has no unit."""

    def encode(self, values, noise):
        return values

    def decode(self, payload, size):
        return payload


@pytest.mark.parametrize("ask", [shaped, explained])
@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (None, "Unitless has no unit.*a multiple of 4, such as unit=64"),
        (64.0, r"Unitless.unit=64.0 is of type float.*pass an int that is a multiple of 4"),
        ("64", "Unitless.unit='64' is of type str.*pass an int that is a multiple of 4"),
        (0, "Unitless.unit=0 is not positive; pass a multiple of 4"),
        (-64, "Unitless.unit=-64 is not positive; pass a multiple of 4"),
    ],
)
def test_a_unit_is_a_positive_integer(ask, unit, text):
    class Unitless(Whole):
        pass

    if unit is not None:
        Unitless.unit = unit
    with pytest.raises(ValueError, match=text):
        ask(Unitless())


def test_a_unit_may_be_an_integer_of_numpy():
    class Scalar(Whole):
        unit = np.int16(64)

    assert shaped(Scalar()) == (N, 1000)
    # Chunks of 256 coordinates: a product of so many would not fit int16.
    assert explained(Scalar()).wire_bytes == 2 * (N - 1) * 256 * 4
    layout = Scalar().layout(2**20, N, dq.Direct())
    assert type(layout.chunk_size) is int
    assert layout.padded_size == 2**20


@pytest.mark.parametrize("ask", [shaped, explained])
@pytest.mark.parametrize("payload", [None, ()])
def test_a_payload_without_arrays_is_refused(ask, payload):
    class Empty(Whole):
        unit = 64

        def encode(self, values, noise):
            return payload

    text = rf"Empty.encode returned {re.escape(repr(payload))} for a chunk of 256 coordinates.*"
    with pytest.raises(ValueError, match=text + "return the payload, a pytree of arrays"):
        ask(Empty())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda values: values[:64], r"shape \(64,\)"),
        (lambda values: values.reshape(-1, 64), r"shape \(4, 64\)"),
        (lambda values: values[:1], r"shape \(1,\)"),
        (lambda values: None, "None"),
        (lambda values: (values, values), r"shape \(\(256,\), \(256,\)\)"),
    ],
)
def test_a_decoded_chunk_has_the_shape_of_the_chunk(wrong, told):
    class Bent(Whole):
        unit = 64

        def decode(self, payload, size):
            return wrong(payload)

    text = rf"Bent.decode returned {told} for a chunk of 256 coordinates; .*of shape \(256,\)"
    with pytest.raises(ValueError, match=text):
        shaped(Bent())


@pytest.mark.parametrize("name", ["auto", "explicit"])
def test_training_passes_on_what_a_quantiser_is_told(name):
    """No way takes a refusal of the class for one of JAX's, and sums natively instead."""

    class Bent(Whole):
        unit = 64

        def decode(self, payload, size):
            return payload[:64]

    mesh = auto_mesh(N) if name == "auto" else jax.make_mesh((N,), ("data",))
    place = lambda shape, spec: jax.device_put(
        np.ones(shape, np.float32), jax.NamedSharding(mesh, spec)
    )
    w, x = place((64, 64), jax.P()), place((N, 64), jax.P("data"))
    method = small(Bent(), topology=dq.Direct())
    loss = lambda w, x: jnp.mean((x @ w) ** 2)
    grad_fn = dq.value_and_grad(loss, mesh=mesh, axis_name="data", compression=method)
    with pytest.raises(ValueError, match=r"Bent.decode returned shape \(64,\)"):
        jax.jit(grad_fn).lower(w, x)


@pytest.mark.release
def test_one_line_of_a_list_makes_a_quantiser_a_comparator(tmp_path, monkeypatch):
    """A package with the page's file, and its line in `contrib/__init__.py`, in a process."""
    folder = tmp_path / "dynamiq_jax"
    shutil.copytree(ROOT / "dynamiq_jax", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "contrib" / "int8.py").write_text(f'"""8 bits."""\n\n{CLASS}')
    listed = folder / "contrib" / "__init__.py"
    line = "from dynamiq_jax.contrib.minmax import MinMax as MinMax\n"
    new = "from dynamiq_jax.contrib.int8 import Int8 as Int8\n"
    assert listed.read_text().count(line) == 1
    listed.write_text(listed.read_text().replace(line, new + line))
    paths = [str(path) for path in (tmp_path, ROOT, ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    told = {"env": environment, "cwd": tmp_path, "text": True, "check": True}
    code = "import cases; print(cases.EVERY_METHOD['int8'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, **told)
    assert "Int8()" in found.stdout and "reach=64" in found.stdout
    options = ["--workers", "2", "--super-groups", "2", "--seeds", "1", "--methods", "int8,mxfp8"]
    command = [sys.executable, "-m", "dynamiq_jax", "error", *options]
    assert "int8" in subprocess.run(command, capture_output=True, **told).stdout
