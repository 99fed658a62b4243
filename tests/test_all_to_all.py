"""`all_to_all` against JAX's own: shapes, noise, derivatives, zeros, NaN, bytes, errors."""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asserts import assert_same_bits, relative_error
from cases import CHEAP, daily, small
from hlo import OPERATION, arrays_of, bits_of
from jax import lax
from jax.sharding import PartitionSpec as P
from workers import OnHost, auto_mesh, gradient, mesh_of

import dynamiq_jax as dq
from dynamiq_jax import contrib

N, KEY = 4, jax.random.key(3)
EIGHT = small(dq.DynamiQ(bits=8.5))
SOME_SMALL = dq.Compression(dq.DynamiQ(bits=8.5), min_leaf_size=500, min_bucket_size=500)
LARGEST_STEP = 8 / (32 * (1 + 2 + 4 + 8))
"""The step of width 8, relative to the largest magnitude of a group."""


tiled_rows = partial(dq.all_to_all, axis_name="data", split_axis=0, concat_axis=0, tiled=True)


@functools.cache
def ours(split, concat, tiled=True, n=N, **options):
    """jit of (tree with leading worker axis, key) -> every worker's result."""

    def one(tree, key):
        return dq.all_to_all(tree, "data", split, concat, tiled=tiled, key=key, **options)

    return OnHost(jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data")))


def native(tree, split, concat, tiled=True):
    """The tree after `jax.lax`'s exchange; axes count from the first."""
    one = lambda tree: lax.all_to_all(tree, "data", split, concat, tiled=tiled)
    return jax.jit(jax.vmap(one, axis_name="data"))(tree)


def normal(*shape, dtype="float32"):
    """Distinct data on all workers."""
    x = np.random.default_rng(len(shape)).standard_normal((N, *shape))
    return jnp.asarray(40 * x if dtype == "int32" else x, dtype)


AXES = [(0, 0, True), (2, 0, True), (1, -1, True), (-3, 2, False)]


@pytest.mark.parametrize(("split", "concat", "tiled"), daily(AXES, AXES[2:]))
@pytest.mark.usefixtures("padding_is_free")
def test_blocks_have_the_shapes_and_values_of_lax(split, concat, tiled):
    """Leaves of all kinds, of which small ones, integers and empty ones travel exactly."""
    shape = [8, 12, 20] if tiled else [4, 4, 70]
    empty = [0 if axis not in (split % 3, concat % 3) else 4 for axis in range(3)]
    tree = {
        "lossy": [normal(*shape, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")],
        "exact": [normal(4, 4, 4), normal(*shape, dtype="int32"), normal(*empty)],
    }
    found = ours(split, concat, tiled, compression=SOME_SMALL)(tree, KEY)
    expected = native(tree, split % 3, concat % 3, tiled)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_same_bits(found["exact"], jax.device_get(expected["exact"]))
    for left, right in zip(found["lossy"], expected["lossy"], strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        error = np.abs(np.asarray(left, np.float64) - np.asarray(right, np.float64))
        most = np.max(np.abs(np.asarray(right, np.float64)))
        assert 0 < np.max(error) < most * (1.01 * LARGEST_STEP + 2.0**-8)
        assert 1e-6 < relative_error(left, right) < 2e-4


METHODS = {
    "6 bits": (dq.DynamiQ(bits=6.5), 1e-3, 2e-3),
    "scale axis": (dq.DynamiQ(bits=8.5, format=dq.Format(scale_axis=1)), 5e-5, 2e-4),
    "16 bits": (dq.DynamiQ(widths=(16,), bits=17), 1e-6, 1e-5),
    "mxfp8": (contrib.MXFP8(), 5e-4, 1e-3),
    "minmax": (contrib.MinMax(bits=8), 3e-5, 1e-4),
    "qsgd": (contrib.GlobalQSGD(piece_size=256), 3e-5, 2e-4),  # the scale travels along
}


@pytest.mark.parametrize("name", daily(METHODS, ["6 bits", "scale axis", "qsgd"]))
@pytest.mark.usefixtures("padding_is_free")
def test_methods_of_blocks(name):
    """Blocks of very different magnitude: none is decoded as another one."""
    method, least, most = METHODS[name]
    magnitude = 10.0 ** np.repeat(np.arange(N * N), 2).reshape(N, 8, 1, 1)
    x = normal(8, 16, 37) * jnp.asarray(magnitude, jnp.float32)
    found = np.asarray(ours(0, 0, compression=small(method))(x, KEY), np.float64)
    expected = np.asarray(native(x, 0, 0), np.float64)
    errors = np.sum((found - expected) ** 2, axis=(2, 3)) / np.sum(expected**2, axis=(2, 3))
    assert np.all(errors < 4 * most)
    assert least < np.mean(errors) < most


@pytest.mark.parametrize(
    ("method", "dtype"), [(dq.F32(), "float32"), (dq.F32(), "bfloat16"), (dq.BF16(), "bfloat16")]
)
def test_exact_methods_are_exact(method, dtype):
    x = normal(8, 9, 5, dtype=dtype)
    found = ours(0, 1, compression=both(small(method)))(x, KEY)
    assert_same_bits(found, native(x, 0, 1))


def both(compression):
    """The policy of one method forth and back."""
    return dq.Policy(activations=compression, cotangents=compression)


def pulled(collective, x, cotangent):
    def one(x, cotangent):
        y, pull = jax.vjp(collective, x)
        return y, pull(cotangent)[0]

    return jax.jit(jax.vmap(one, axis_name="data"))(x, cotangent)


@pytest.mark.usefixtures("padding_is_free")
def test_one_worker_sends_nothing():
    x = normal(2, 37)[:1]
    for options in ({}, {"compression": CHEAP}, {"compression": small(contrib.MXFP8())}):
        found = pulled(partial(tiled_rows, key=KEY, **options), x, 2 * x)
        assert_same_bits(found, (x, 2 * x))


@pytest.mark.usefixtures("padding_is_free")
def test_the_backward_pass_has_bits_and_noise_of_its_own():
    x, cotangent = normal(8, 6, 50), gradient(1, N, 2 * 24 * 50).reshape(N, 2, 24, 50)
    y, exact = pulled(lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True), x, cotangent)

    def errors(method, back=None):
        policy = dq.Policy(activations=small(method), cotangents=back)
        own = {"tiled": True, "compression": policy, "key": KEY}
        found = pulled(lambda x: dq.all_to_all(x, "data", 0, 1, **own), x, cotangent)
        assert found[1].shape == x.shape
        return [relative_error(*pair) for pair in zip(found, (y, exact), strict=True)]

    eight, five, none = (3e-5, 2e-4), (3e-3, 2e-2), (-1, 1e-30)
    cases = [
        (errors(dq.DynamiQ(bits=5.5)), five, eight),  # the default: codes of 8 bits
        (errors(dq.F32()), none, none),
        (errors(dq.DynamiQ(bits=8.5), dq.F32()), eight, none),
        (errors(dq.DynamiQ(bits=5.5), dq.DynamiQ(bits=5.5)), five, five),
    ]
    for found, *bounds in cases:
        for error, (least, most) in zip(found, bounds, strict=True):
            assert least < error < most


def test_cotangents_may_have_a_method_by_path():
    """Excluded ones travel exactly; leaves of one bucket need the same method."""
    x = {name: normal(8, 64) for name in "ab"}

    def errors(activations, cotangents):
        policy = dq.Policy(activations=activations, cotangents=cotangents)
        found = pulled(partial(tiled_rows, compression=policy, key=KEY), x, x)[1]
        _, exact = pulled(partial(lax.all_to_all, axis_name="data", split_axis=0, concat_axis=0,
            tiled=True), x, x)  # fmt: skip
        return [relative_error(found[name], exact[name]) for name in "ab"]

    by_path = lambda a, b: lambda path, leaf: a if path == "a" else b
    lossy = small(by_path(dq.contrib.MinMax(), dq.contrib.MinMax(bits=8)))
    one, other = errors(lossy, by_path(dq.BF16(), None))
    assert 0 < one < 1e-4 and other == 0
    with pytest.raises(ValueError, match=r"leaves \['a'\] and \['b'\] share a bucket.*one for all"):
        errors(small(dq.contrib.MinMax()), by_path(dq.BF16(), dq.F32()))


@pytest.mark.usefixtures("padding_is_free")
def test_rounding_backwards_is_not_that_of_the_way_forth():
    exchange = partial(tiled_rows, compression=both(CHEAP), key=KEY)

    def one(x):
        y, pull = jax.vjp(exchange, x)
        back = pull(x)[0]
        # An exchange of rows is its own transpose: it differs by its noise alone.
        squared = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(exchange(x) ** 2))(x)))
        return y, back, squared(x)

    x = normal(8, 3, 64)
    y, back, second = jax.jit(jax.vmap(one, axis_name="data"))(x)
    assert np.mean(np.asarray(y) != np.asarray(back)) > 0.2
    np.testing.assert_allclose(second, 2.0, rtol=0.5)  # the Hessian of a sum of squares


def test_zeros_stay_zeros():
    """Whole rows, such as padding and dropped tokens, and single ones among others."""
    x = normal(8, 6, 300)
    zero = jax.random.bernoulli(KEY, 0.3, x.shape).at[:, 2].set(True).at[:, :, 3].set(True)
    x = jnp.where(zero, 0.0, x)
    for method in (EIGHT, small(dq.DynamiQ(bits=5.5)), small(contrib.MXFP8())):
        found = np.asarray(ours(0, 0, compression=method)(x, KEY))
        zeros = np.asarray(native(zero, 0, 0))
        np.testing.assert_array_equal(found[zeros], 0.0)
        assert np.mean(found[~zeros] != 0) > 0.8


@pytest.mark.parametrize(
    ("method", "reach"), [(EIGHT, 256), (small(contrib.MXFP8()), 32), (small(dq.BF16()), 1)]
)
@pytest.mark.parametrize("dtype", daily(["float32", "bfloat16"], ["bfloat16"]))
def test_what_is_not_finite_takes_its_block_along_and_no_more(method, reach, dtype):
    size = 2 * 8 * 256 - 77  # coordinates for each worker
    x = gradient(0, N, N * size).reshape(N, N, size).astype(dtype)
    places = [(0, 1, 300, jnp.nan), (2, 1, 0, jnp.inf), (3, 0, size - 1, -jnp.inf)]
    sick = np.zeros((N, N, size), bool)
    for sender, receiver, at, value in places:
        x = x.at[sender, receiver, at].set(value)
        sick[receiver, sender, at // reach * reach : (at // reach + 1) * reach] = True
    found = np.asarray(ours(0, 0, compression=method)(x, KEY), np.float32)
    np.testing.assert_array_equal(np.isfinite(found), ~sick)
    if reach > 1:
        assert np.all(np.isnan(found[sick]))


@pytest.mark.usefixtures("padding_is_free")
def test_the_largest_values_of_float16_stay_finite():
    largest = float(jnp.finfo(jnp.float16).max)
    x = jnp.full((N, N, 300), largest, jnp.float16).at[:, :, ::2].set(-largest)
    found = np.asarray(ours(0, 0, compression=EIGHT)(x.at[0, 0, 0].set(jnp.inf), KEY), np.float64)
    assert np.all(np.isnan(found[0, 0, :256]))  # as anywhere
    np.testing.assert_allclose(found[1:], np.asarray(x, np.float64)[1:], rtol=0.02)


@pytest.mark.parametrize("mapped_by", daily(["checked", "unchecked", "pmap"], ["checked"]))
def test_shard_map_and_pmap_give_the_bits_of_vmap(mapped_by):
    """Forth and back, whether JAX checks what varies or not."""
    n = 8
    x = gradient(1, n, n * 2 * 300).reshape(n, n * 2, 300)

    def one(x, key):
        def there(x):
            return dq.all_to_all(x, "data", 0, 1, tiled=True, compression=both(CHEAP), key=key)

        y, pull = jax.vjp(there, x)
        return y, pull(y)[0]

    expected = jax.jit(jax.vmap(one, (0, None), axis_name="data"))(x, KEY)
    assert 1e-3 < relative_error(expected[1], x) < 0.1

    def mapped(x, key):
        return jax.tree.map(lambda y: y[None], one(x[0], key))

    check = mapped_by == "checked"
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "check_vma": check}
    run = jax.jit(jax.shard_map(mapped, mesh=auto_mesh(n), **specs))
    if mapped_by == "pmap":
        run = jax.pmap(one, in_axes=(0, None), axis_name="data")
    assert_same_bits(jax.device_get(run(x, KEY)), jax.device_get(expected))


@pytest.mark.release
@pytest.mark.usefixtures("padding_is_free")
def test_groups_of_workers_and_tuples_of_axes():
    """Numbers of workers are those within a group, and row-major over several axes."""
    x = normal(8, 40)
    specs = {"mesh": auto_mesh(N), "in_specs": P("data"), "out_specs": P("data")}

    def run(collective, names="data", specs=specs, **options):
        def one(x):
            return collective(x[0], names, 0, 1, tiled=True, **options)[None]

        return jax.jit(jax.shard_map(one, **specs))(x)

    exact = {"compression": small(dq.F32())}
    groups = {"axis_index_groups": [[0, 2], [3, 1]]}
    expected = run(lax.all_to_all, specs=specs | {"check_vma": False}, **groups)
    for check in (True, False):
        checked = specs | {"check_vma": check}
        assert_same_bits(run(dq.all_to_all, specs=checked, **groups, **exact), expected)
        noisy = run(dq.all_to_all, specs=checked, **groups, compression=EIGHT)
        assert 1e-6 < relative_error(noisy, expected) < 2e-4
    names = ("node", "gpu")
    over = {"mesh": mesh_of(2, 2, names=names), "in_specs": P(names), "out_specs": P(names)}
    expected = run(lax.all_to_all)
    assert_same_bits(run(lax.all_to_all, names, over), expected)
    assert_same_bits(run(dq.all_to_all, names, over, **exact), expected)
    assert (
        1e-6 < relative_error(run(dq.all_to_all, names, over, compression=EIGHT), expected) < 2e-4
    )


WIDTHS = [(8.5, 8), (6.5, 6), (5.4, 5), (6, 5)]


@pytest.mark.parametrize(("bits", "width"), daily(WIDTHS, WIDTHS[-1:]))
def test_bytes_are_those_of_the_width(bits, width):
    """One collective forth and one back; scales and flags take 11/32 bits of a coordinate."""
    n, size = 8, 8 * 16 * 2048

    def one(x):
        exchange = partial(tiled_rows, compression=both(small(dq.DynamiQ(bits=bits))))
        y, pull = jax.vjp(lambda x: exchange(x[0]), x)
        return pull(y)[0]

    specs = {"in_specs": P("data"), "out_specs": P("data")}
    run = jax.jit(jax.shard_map(one, mesh=auto_mesh(n), **specs))
    x = jax.ShapeDtypeStruct((n, 8 * 16, 2048), jnp.bfloat16)
    hlo = run.lower(x).compile().as_text()
    found = [match for match in map(OPERATION.search, hlo.splitlines()) if match]
    assert [match["name"] for match in found] == ["all-to-all"] * 2
    for match in found:
        moved = sum(bits_of(*array) for array in arrays_of(match["type"]))
        assert moved == size * (width + 11 / 32)
        assert moved <= size * bits


@pytest.mark.parametrize("method", [CHEAP, small(contrib.MinMax(bits=4))])
@pytest.mark.parametrize("key", [KEY, None])
def test_senders_and_receivers_round_by_noise_of_their_own(method, key):
    """All send the same. Noise follows the key, or without one the sender's data.

    `test_codec_error` shows that rounding is unbiased.
    """
    x = jnp.broadcast_to(gradient(0, 1, 2048)[:, None], (N, N, 2048))
    exchange = ours(0, 0, compression=method)
    found = exchange(x, key)
    assert_same_bits(found, exchange(x, key))
    drawn = method == CHEAP or key is not None
    assert not drawn or np.mean(np.asarray(found[0, 0] != found[0, 1])) > 0.2
    assert np.mean(np.asarray(found[0, 0] != found[1, 0])) > 0.2
    if key is not None:
        assert np.mean(found != exchange(x, jax.random.key(4))) > 0.2
    if method == CHEAP and key is None:
        other = exchange(x.at[0, 0, 0].mul(1.01), None)
        assert np.mean(np.asarray(found[1, 0] != other[1, 0])) > 0.2
        assert_same_bits(found[1, 1], other[1, 1])  # another sender's


@pytest.mark.usefixtures("padding_is_free")
def test_blocks_are_encoded_without_copies():
    """With split_axis 0 the kernels read the activations as they are."""

    def moves(split, size):
        x = jax.ShapeDtypeStruct((N, N * 2, N, size), jnp.float16)
        text = str(ours(split, 0, compression=EIGHT).trace(x, KEY).jaxpr)
        whole = N * N * 2 * N * size
        found = re.findall(r":f16\[([\d,]+)\] = (transpose|pad|concatenate|copy)\b", text)
        # A pad by nothing has operand and result of one size, and XLA drops it.
        return [
            name for shape, name in found if np.prod(eval(f"[{shape}]")) != whole or name != "pad"
        ]

    assert moves(0, 256) == []
    assert "transpose" in moves(1, 256)
    assert "pad" in moves(0, 100)


def traced(shape, *axes, n=N, **options):
    options = {"tiled": True} | options
    x = {"x": jax.ShapeDtypeStruct((n, *shape), jnp.float32)}
    mapped = jax.vmap(lambda x: dq.all_to_all(x, "data", *axes, **options), axis_name="data")
    return jax.eval_shape(mapped, x)


REFUSED = [
    ((8, 3), (1, 0), {}, "leaf ['x'] has 3 entries", "split_axis=1", "the 4 workers", "pad"),
    ((8, 3), (0, 0), {"tiled": False}, "8 entries", "each of the 4 workers", "tiled=True"),
    ((8, 3), (2, 0), {}, "split_axis=2", "shape (8, 3)", "every leaf has"),
    ((8, 3), (0, -3), {}, "concat_axis=-3", "shape (8, 3)", "every leaf has"),
    ((), (0, 0), {}, "split_axis=0", "shape ()"),
    ((8,), (0, 0), {"compression": 5}, "compression=5 is not a method"),
    ((8,), (0, 0), {"key": 7}, "key=7 is not a PRNG key"),
    ((8,), (0, None), {}, "concat_axis=None is not an integer"),
    ((8,), (1.0, 0), {}, "split_axis=1.0 is not an integer"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3])
def test_malformed_arguments_are_refused(case):
    shape, axes, options, *texts = case
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, texts))):
        traced(shape, *axes, **options)


NEED_MORE = [
    dq.DynamiQ(dither=True), dq.DynamiQ(floor=None), dq.DynamiQ(widths=(1, 8), bits=3, floor=1),
    dq.DynamiQ(format=dq.Format(subtract_mean=True)), dq.ErrorFeedback(dq.DynamiQ()),
    contrib.THC(), contrib.Marsit(), contrib.PacketLoss(dq.DynamiQ()),
    contrib.PacketLoss(contrib.MXFP8()),
]  # fmt: skip


@pytest.mark.parametrize("method", NEED_MORE, ids=lambda method: type(method).__name__)
def test_methods_that_need_more_are_refused(method):
    text = "=.*: all_to_all encodes at one width.*pass dq.DynamiQ"
    for name, options in (
        ("method", {"compression": small(method)}),
        ("cotangents", {"compression": dq.Policy(cotangents=method)}),
    ):
        with pytest.raises(NotImplementedError, match=name + text):
            traced((8, 4096), 0, 0, **options)


@pytest.mark.usefixtures("padding_is_free")
def test_other_refusals():
    with pytest.raises(NameError, match="call all_to_all under `jax.shard_map`"):
        dq.all_to_all(jnp.ones((8, 8)), "data", 0, 0)
    one = partial(tiled_rows, tiled=False, compression=CHEAP)
    x = jnp.ones((N, N, 5))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.vmap(lambda x: jax.jvp(one, (x,), (x,)), axis_name="data")(x)
    with pytest.raises(NotImplementedError, match="no groups"):
        jax.vmap(lambda x: one(x, axis_index_groups=[[0, 1], [2, 3]]), axis_name="data")(x)
