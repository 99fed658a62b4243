"""Bad input is refused at trace time, with the numbers and the remedy."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import pallas_kernels as pk

BAD_FIELDS = [
    ({"widths": ()}, r"widths=\(\).*at least one"),
    ({"widths": (2, 2)}, r"widths=\(2, 2\) must be distinct"),
    ({"widths": (2, 17)}, r"17\) must be integers from 0 to 16"),
    ({"bits": 2.0}, r"bits=2\.0 is below 2\.688.*raise bits"),
    ({"bits": 40.0}, r"bits=40\.0 exceeds 32.*lower bits"),
    ({"group_size": 12}, r"group_size=12; expected one of \(8, 16, 32, 64\)"),
    ({"super_group_size": 100}, r"super_group_size=100; expected one of \(128, 256"),
    ({"group_size": 64, "super_group_size": 128}, r"fewer than 4 groups.*group_size <= 32"),
    ({"levels": "log"}, r"levels='log'; expected one of \('piecewise'"),
    ({"rounding": "none"}, r"rounding='none'; expected one of \('antithetic'"),
    ({"group_scale": "f32"}, r"group_scale='f32'; expected one of \('uint8'"),
    ({"backend": "cuda"}, r"backend='cuda'; expected one of"),
    ({"widths": (2, 12), "levels": "geometric"}, r"\(2, 12\) exceed 10.*levels='piecewise'"),
    ({"min_leaf_size": -1}, r"min_leaf_size=-1 must not be negative; pass 0"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda x: str(x)[:30])
def test_dynamiq_checks_its_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        dq.DynamiQ(**fields)


def test_options_are_frozen_and_hashable():
    assert hash(dq.DynamiQ(bits=4.0)) == hash(dq.DynamiQ(bits=4.0))
    with pytest.raises(AttributeError):
        dq.DynamiQ().bits = 3.0  # type: ignore[misc]


def _traced(**options):
    axis = options.pop("axis_name", "w")
    struct = jax.ShapeDtypeStruct((2, 2**17), jnp.float32)
    return jax.eval_shape(jax.vmap(lambda x: dq.psum(x, axis, **options), axis_name="w"), struct)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis_name": ("w",)}, NotImplementedError, "one axis name"),
        ({"topology": dq.Ring}, ValueError, r"not a topology; pass for example dq.Ring\(\)"),
        ({"method": "dynamiq"}, ValueError, r"'dynamiq' is not a method.*dq.DynamiQ\(bits=5\)"),
        ({"key": 3}, ValueError, r"key=3 is not a PRNG key; pass jax.random.key\(seed\)"),
        ({"key": jnp.zeros(2)}, ValueError, r"float32 and shape \(2,\).*expected one PRNG key"),
        (
            {"method": dq.DynamiQ(backend="pallas")},
            NotImplementedError,
            "default platform here is 'cpu'; pass backend=None",
        ),
    ],
)
def test_psum_refuses(options, error, message):
    if error is NotImplementedError and "method" in options and jax.default_backend() != "cpu":
        pytest.skip("the Pallas kernels run here")
    with pytest.raises(error, match=message):
        _traced(**options)


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='triton'; expected None or one of"):
        pk.statistics(jnp.zeros(256), backend="triton")  # type: ignore[arg-type]


def test_stream_count_is_checked():
    with pytest.raises(ValueError, match="streams=0 must be at least 1"):
        dq.Ring(streams=0)


def test_leaf_that_does_not_vary_is_refused_by_name():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    def reduce(x, w):
        return dq.psum({"x": x, "w": w}, "data")

    with pytest.raises(ValueError, match=r"\['w'\] \(float32\[5\]\).*'data'.*all 8.*pcast"):
        reduce(jnp.zeros(16), jnp.zeros(5))


def _loss(params, batch):
    return jnp.mean((batch @ params) ** 2)


def test_value_and_grad_refuses_axes_and_batches_that_do_not_fit():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"'batch' is not in the mesh; it has \('data', 'model'\)"):
        dq.value_and_grad(_loss, mesh=mesh, axis_name="batch")
    with pytest.raises(NotImplementedError, match=r"the mesh has \{'model': 2\}"):
        dq.value_and_grad(_loss, mesh=mesh, axis_name="data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step = dq.value_and_grad(_loss, mesh=mesh, axis_name="data")
    with pytest.raises(ValueError, match=r"shape \(12, 3\).*multiple of the 8 workers"):
        step(jnp.zeros(3), jnp.zeros((12, 3)))
