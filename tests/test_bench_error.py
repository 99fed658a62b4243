"""`dynamiq error`: rows that say what psum does, files it reads, the bound they are held to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL, vmapped
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.bench import contenders, error
from dynamiq_jax.cli import app


def rows_of(text, topology, gradients, seeds=1):
    contender = contenders.parse_method(text, contenders.parse_topology(topology))
    return list(error.bench_error([(contender, topology)], gradients, seeds))


def test_a_row_is_the_error_of_psum():
    (x,) = error.synthetic_gradients(4, 64, 1)
    (row,) = rows_of("dynamiq:5", "butterfly", [x])
    out = vmapped(dq.DynamiQ(**SMALL), dq.Butterfly())(x, jax.random.key(0))
    assert row.vnmse == pytest.approx(float(dq.vnmse(out[0], x.sum(axis=0))), rel=1e-5)
    wire = dq.wire_bits(x[0], 4, method=dq.DynamiQ(**SMALL), topology=dq.Butterfly())
    assert row.bits_per_coord == pytest.approx(wire / (1.5 * x.shape[1]), rel=1e-5)
    assert row.lowest == row.vnmse == row.highest


def test_seeds_draw_data_or_rounding():
    drawn = list(error.synthetic_gradients(2, 32, 2))
    assert np.any(drawn[0] != drawn[1])
    for gradients in (drawn, drawn[:1]):
        (row,) = rows_of("dynamiq:5", "direct", gradients, seeds=2)
        assert row.lowest < row.highest
        assert row.vnmse == pytest.approx((row.lowest + row.highest) / 2)


def test_bound_of_equal_variances_is_a_quarter_per_bit():
    x = jax.random.normal(jax.random.key(0), (4, 256 * 64))
    rows = np.asarray(x).sum(axis=0).reshape(-1, 256)
    x = jnp.asarray((rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))).reshape(1, -1))
    assert error.rate_distortion(x, [0, 1, 3]) == pytest.approx([1, 1 / 4, 1 / 64], rel=1e-3)
    # An empty half costs nothing: twice the bits for the other.
    half = jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    assert error.rate_distortion(half, [1]) == pytest.approx([1 / 16], rel=1e-3)


def test_bound_is_below_what_methods_reach():
    (x,) = error.synthetic_gradients(8, 256, 1)
    (row,) = rows_of("dynamiq:5", "direct", [x])
    (bound,) = error.rate_distortion(x, [row.bits_per_coord])
    assert bound < row.vnmse


def test_command_reads_files_and_writes_json_and_plots(tmp_path):
    file = tmp_path / "g.npz"
    np.savez(file, gradients=np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32))
    json_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    options = ["--gradients", file, "--methods", "dynamiq:5,thc:4", "--seeds", 1]
    options += ["--topology", "direct", "--json", json_file, "--plot", plot]
    ran = CliRunner().invoke(app, ["error", *map(str, options)])
    assert ran.exit_code == 0, ran.output
    assert "dynamiq:5" in ran.output
    assert "3 workers" in ran.output
    assert '"n_workers": 3' in json_file.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_files_that_do_not_serve_are_refused(tmp_path):
    file = tmp_path / "g.npz"
    np.savez(file, grads=np.ones((2, 8)))
    with pytest.raises(ValueError, match=r"holds \['grads'\].*'gradients'"):
        error.load_gradients(file, None)
    np.savez(file, gradients=np.ones((2, 8)))
    with pytest.raises(ValueError, match=r"shape \(2, 8\) and 3.*fewer --workers"):
        error.load_gradients(file, 3)
    assert error.load_gradients(file, None).shape == (2, 8)
