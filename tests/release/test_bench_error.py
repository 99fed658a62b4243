"""`dynamiq-jax error`: rows that say what psum does, files it reads, the bound they are held to."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import small, vmapped, wire_bits
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import error
from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.commands.cli import app
from dynamiq_jax.methods.metrics import vnmse


def row_of(text, topology, gradients):
    contender = contenders.parse_method(text, contenders.parse_topology(topology))
    return error.bench_error(contender, topology, gradients, 1)


@pytest.mark.parametrize(
    ("text", "bits", "low", "high"),
    [
        ("powersgd", 16 * 4 * (1 / 15 + 1 / 1024), 0.3, 0.99),
        ("arc-top-k:8", 8 * 16 / 15 + 1 / 16, 0.05, 0.6),
    ],
)
def test_methods_of_matrices_fold_flat_gradients(text, bits, low, high):
    """14.6 rows of 1024, the last one filled up with zeros, which the wire bits count."""
    x = jax.random.normal(jax.random.key(3), (3, 15_000)) * jnp.repeat(jnp.arange(15.0), 1000)[None]
    row = row_of(text, "ring", [x])
    assert low < row.vnmse < high
    assert row.bits_per_coord == pytest.approx(bits * 15 * 1024 / 15_000, rel=1e-3)


SIZES = (4095, 4096, 5000, 4096)
LEAVES = error.Leaves(("norm", "embed", "layer.w", "unused"), SIZES)
SUMS = (2.0, 10.0, 1.0, 0.0)  # of every coordinate of a leaf
ERRORS = ((1.0, 1.0, 0.0, 0.5), (1.0, 1.0, 0.5, 0.5))  # by seed; what an estimate differs by


def by_leaf(values):
    return jnp.repeat(jnp.array(values, jnp.float32), np.array(SIZES))


def known_gradients():
    return jnp.stack([by_leaf(SUMS) / 4, by_leaf(SUMS) * 3 / 4])


def known_contender(errors=ERRORS):
    """A method that is wrong by ``errors``, of the key's seed."""

    def reduce(x, axis_name, key, errors):
        seed = jax.random.key_data(key)[1]
        return jax.lax.psum(x, axis_name) + jnp.stack([by_leaf(e) for e in errors])[seed]

    reduce = partial(reduce, errors=errors)
    return contenders.Contender("known", reduce, lambda size, sizes: 2 * size)


def measured(errors):
    return error.bench_error(known_contender(errors), "ring", [known_gradients()], 2, LEAVES)


def test_a_row_is_the_error_of_psum():
    (x,) = error.synthetic_gradients(4, 64, 1)
    row = row_of("dynamiq:5", "butterfly", [x])
    out = vmapped(small(dq.DynamiQ()), dq.Butterfly())(x, jax.random.key(0))
    assert row.vnmse == pytest.approx(float(vnmse(out[0], x.sum(axis=0))), rel=1e-5)
    wire = wire_bits(small(dq.DynamiQ()), dq.Butterfly())(x[0], 4)
    assert row.bits_per_coord == pytest.approx(wire / (1.5 * x.shape[1]), rel=1e-5)
    assert row.lowest == row.vnmse == row.highest


def test_command_reads_files_and_writes_json(tmp_path):
    file = tmp_path / "g.npz"
    np.savez(file, gradients=np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32))
    json_file = tmp_path / "rows.json"
    options = ["--gradients", file, "--methods", "dynamiq:5,thc:4", "--seeds", 1]
    options += ["--topology", "direct", "--json", json_file]
    ran = CliRunner().invoke(app, ["error", *map(str, options)])
    assert ran.exit_code == 0, ran.output
    assert "dynamiq:5" in ran.stdout and "3 workers" in ran.stdout
    assert ran.stderr.splitlines() == ["1 of 2: dynamiq:5 direct", "2 of 2: thc:4 native"]
    assert '"n_workers": 3' in json_file.read_text()
    document = json.loads(json_file.read_text())
    assert document.keys() == {"about", "rows"}
    assert document["rows"][0]["worst_leaf"] is document["rows"][0]["worst_leaf_error"] is None


def test_every_leaf_is_measured_by_itself():
    found = error.measure(known_contender().reduce, [known_gradients()], 2, SIZES)
    energies = [n * s * s for n, s in zip(SIZES, SUMS, strict=True)]
    np.testing.assert_allclose(
        found[:, 1:], [[0.25, 0.01, 0, np.inf], [0.25, 0.01, 0.25, np.inf]], rtol=1e-5
    )
    wrong = [sum(n * e * e for n, e in zip(SIZES, errors, strict=True)) for errors in ERRORS]
    np.testing.assert_allclose(found[:, 0], np.array(wrong) / sum(energies), rtol=1e-5)


def test_worst_leaf_is_neither_small_nor_zero_and_a_mean_over_seeds():
    # "norm" has 4095 coordinates, "unused" a zero sum, and both a larger error.
    row = measured(ERRORS)
    assert row.worst_leaf == "layer.w"
    assert row.worst_leaf_error == pytest.approx(0.25 / 2, rel=1e-5)
    # .16 under one seed and 0 under the other is less than .09 under both.
    row = measured(((0, 3.0, 0, 0), (0, 3.0, 0.4, 0)))
    assert (row.worst_leaf, row.worst_leaf_error) == ("embed", pytest.approx(0.09, rel=1e-5))
