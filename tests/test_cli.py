"""The benchmarks and their command line."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import cli
from dynamiq_jax.commands.bench import (
    advice,
    all_reduce,
    contenders,
    error,
    kernels,
    tables,
    timing,
)
from pallas_kernels import TILE_ROWS

REPEATS = ["--repeats", "3"]
MIX = ["4,8", "4", "8"]


@pytest.fixture(autouse=True, scope="module")
def keep_xla_flags():
    """The command extends XLA_FLAGS of its process; other tests must not see that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def plain(text):
    """Error text without the frame and line breaks that a terminal adds."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


@pytest.fixture(scope="module")
def all_reduce_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all_reduce")
    files = ["--json", folder / "rows.json"]
    chosen = ["--sizes", "64KiB,256KiB", "--methods", "dynamiq:5,dynamiq:8", "--devices", 2]
    result = invoke("all-reduce", *chosen, *REPEATS, *files)
    assert result.exit_code == 0, result.output
    return folder, result, json.loads((folder / "rows.json").read_text())


def by_size_and_method(document):
    return {(row["size_bytes"], row["method"]): row for row in document["rows"]}


class TestAllReduce:
    def test_table_has_a_line_per_size_and_method(self, all_reduce_run):
        _, result, document = all_reduce_run
        lines = result.stdout.splitlines()
        header = next(line for line in lines if line.lstrip().startswith("size"))
        for column in tables.ALL_REDUCE_COLUMNS:
            assert column.title in header
        assert "2 CPU device(s)" in lines[0] or jax.default_backend() != "cpu"
        expected = ["bf16 psum", "dynamiq:5 direct", "dynamiq:8 direct"]
        for size in ("64KiB", "256KiB"):
            found = [line for line in lines if line.split()[:1] == [size]]
            assert [name for line in found for name in expected if name in line] == expected
        assert len(document["rows"]) == 6

    def test_every_method_is_timed_on_every_topology(self, monkeypatch):
        seen = []
        timed = lambda sizes, methods, *_, **__: seen.extend(m.label for m in methods) or []  # noqa: E731
        monkeypatch.setattr(all_reduce, "bench_all_reduce", timed)
        chosen = ["--methods", "dynamiq:5,mxfp8,dynamiq:5", "--topology", "ring, direct"]
        assert invoke("all-reduce", *chosen).exit_code == 0
        assert seen == [
            f"{name} {route}" for name in ("dynamiq:5", "mxfp8") for route in ("ring", "direct")
        ]

    def test_it_says_how_far_it_is_beside_the_table(self, all_reduce_run):
        said = all_reduce_run[1].stderr.splitlines()
        assert said == [f"compiled {i} of 3 programs" for i in range(1, 4)] * 2

    def test_replicas_agree_for_methods_and_baseline(self, all_reduce_run):
        assert [row["wrong"] for row in all_reduce_run[2]["rows"]] == [0] * 6

    def test_speedup_is_the_ratio_of_medians(self, all_reduce_run):
        rows = by_size_and_method(all_reduce_run[2])
        for (size_bytes, _), row in rows.items():
            baseline = rows[size_bytes, "bf16 psum"]
            assert row["speedup"] == pytest.approx(baseline["time_us"] / row["time_us"])

    def test_bandwidths_follow_from_bytes_and_time(self, all_reduce_run):
        for row in all_reduce_run[2]["rows"]:
            n, seconds = row["n_workers"], row["time_us"] / 1e6
            algbw = row["size_bytes"] / seconds / 1e9
            assert row["algbw_gb_per_s"] == pytest.approx(algbw)
            assert row["busbw_gb_per_s"] == pytest.approx(algbw * 2 * (n - 1) / n)
            assert row["wire_gb_per_s"] == pytest.approx(row["wire_bytes"] / seconds / 1e9)
            assert 0 < row["p10_us"] <= row["time_us"] <= row["p90_us"]

    def test_wire_bytes_and_error_fit_the_method(self, all_reduce_run):
        rows = by_size_and_method(all_reduce_run[2])
        native, five, eight = (
            rows[2**18, name] for name in ("bf16 psum", "dynamiq:5 direct", "dynamiq:8 direct")
        )
        n = native["n_workers"]
        assert native["wire_bytes"] == 2 * (n - 1) * 2**18 // n
        assert five["wire_bytes"] / native["wire_bytes"] == pytest.approx(5 / 16, rel=0.02)
        assert native["vnmse"] < eight["vnmse"] < five["vnmse"] < 0.02

    def test_halves_move_half_the_bytes(self, tmp_path):
        chosen = ["--collective", "psum_scatter", "--sizes", "256KiB", "--methods", "dynamiq:5"]
        file = tmp_path / "rows.json"
        result = invoke("all-reduce", *chosen, "--devices", 2, *REPEATS, "--json", file)
        assert result.exit_code == 0, result.output
        native, five = json.loads(file.read_text())["rows"]
        assert [native["method"], five["method"]] == ["bf16 psum_scatter", "dynamiq:5 direct"]
        assert native["wire_bytes"] == 2**18 // 2
        assert five["wire_bytes"] / native["wire_bytes"] == pytest.approx(5 / 16, rel=0.03)
        assert native["vnmse"] < five["vnmse"] < 0.02
        for row in (native, five):
            algbw = row["size_bytes"] / row["time_us"] / 1e3
            assert row["busbw_gb_per_s"] == pytest.approx(algbw / 2)

    def test_json_says_where_it_ran(self, all_reduce_run):
        about = all_reduce_run[2]["about"]
        assert about["jax"] == jax.__version__
        assert about["n_devices"] == 2
        assert all(row["transport"] and row["backend"] for row in all_reduce_run[2]["rows"])

    def test_without_a_gpu_eight_cpu_workers_stand_in(self):
        command = [sys.executable, "-m", "dynamiq_jax", "bench", "all-reduce"]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        result = subprocess.run(
            [*command, "--devices", "9"],
            env=environment | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert "9 devices asked for, 8 found" in plain(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["all-reduce", "--methods", "dynamic:5"], "method 'dynamic' is not known"),
        (["all-reduce", "--methods", "dynamiq:five"], "'five' is not a number of bits"),
        (["all-reduce", "--methods", "dynamiq:99"], "99"),
        (["all-reduce", "--topology", "torus"], "topology 'torus' is not known"),
        (["all-reduce", "--collective", "all_to_all"], "pass psum or psum_scatter"),
        (["all-reduce", "--baseline", "int8"], "baseline 'int8' is not known"),
        (["all-reduce", "--sizes", "16Mb1"], "size '16Mb1' is not a size"),
        (["all-reduce", "--sizes", "1MiB,3B"], "size '3B' is 3 bytes"),
        (["all-reduce", "--sizes", "0"], "size '0' is 0 bytes"),
        (["all-reduce", "--sizes", "4GiB"], "under 4GiB"),
        (["all-reduce", "--repeats", "0"], "Invalid value for '--repeats'"),
        (["all-reduce", "--iterations", "0"], "Invalid value for '--iterations'"),
        (["all-reduce", "--devices", "4096"], "4096 devices asked for"),
        (["all-reduce", "--topology", "hierarchical"], "reduces over two axes"),
        (["all-reduce", "--json", "nowhere/rows.json"], "there is no folder nowhere"),
        (["kernels", "--coords", "many"], "coords 'many' is not a whole number"),
        (["kernels", "--coords", "2^31"], "pass 1 to 2^31 - 1"),
        (["kernels", "--widths", "2,x"], "widths '2,x' is not a list"),
        (["kernels", "--widths", "4,4"], "different widths"),
        (["kernels", "--bits", "1"], "raise bits, or pass a narrower"),
        (["kernels", "--backend", "cuda"], "'cuda'"),
        (["kernels", "--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(arguments, complaint):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert complaint in plain(result.output)


@pytest.fixture(scope="module")
def kernels_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    files = ["--json", folder / "rows.json"]
    chosen = ["--coords", "2^14", "--widths", "4,8", "--single-widths", *REPEATS]
    result = invoke("kernels", *chosen, *files)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((folder / "rows.json").read_text())


class TestKernels:
    def test_every_kernel_at_the_mix_and_at_each_width(self, kernels_run):
        output, document = kernels_run
        coding = ("compress", "decompress", "decompress-accumulate-recompress")
        first = ("copy", "join leaves", "concatenate leaves", "statistics")
        expected = [*((kernel, "") for kernel in first), ("plan", MIX[0])]
        expected += [(kernel, widths) for widths in MIX for kernel in coding]
        assert [(row["kernel"], row["widths"]) for row in document["rows"]] == expected
        for column in tables.KERNEL_COLUMNS:
            assert column.title in output

    def test_rates_follow_from_bytes_and_time(self, kernels_run):
        rows = kernels_run[1]["rows"]
        for row in rows:
            assert row["ns_per_coord"] == pytest.approx(row["time_us"] * 1e3 / 2**14)
            assert row["gb_per_s"] == pytest.approx(row["moved_bytes"] / row["time_us"] / 1e3)
            fraction = row["gb_per_s"] / rows[0]["gb_per_s"]
            assert row["copy_fraction"] == pytest.approx(fraction)
        assert rows[0]["moved_bytes"] == 2 * 2 * 2**14

    def test_moved_bytes_are_gradient_codes_and_plan(self, kernels_run):
        rows = kernels_run[1]["rows"]
        moved = {(row["kernel"], row["widths"]): row["moved_bytes"] for row in rows}
        gradient, super_groups = 2 * 2**14, 2**14 // 256
        codes = 2**14 // 256 * (256 * 4 // 8 + 8 + 2)  # width 4, uint8 scales and one bf16
        plan = super_groups * (4 + 4) + super_groups // TILE_ROWS * 4
        assert moved["compress", "4"] == gradient + codes + plan
        assert moved["decompress", "4"] == gradient + codes + plan
        assert moved["decompress-accumulate-recompress", "4"] == gradient + 2 * codes + plan

    def test_dither_is_timed_on_the_bytes_of_the_default_widths(self, tmp_path):
        file = tmp_path / "rows.json"
        result = invoke("kernels", "--coords", "2^14", "--dither", *REPEATS, "--json", file)
        assert result.exit_code == 0, result.output
        rows = {row["kernel"]: row for row in json.loads(file.read_text())["rows"]}
        assert rows["compress"]["widths"] == "3,4,5,6,8,10"
        layout = kernels.single_chunk(2**14, 5, kernels.allocate_for(dq.DynamiQ()))
        plan = layout.super_groups * (4 + 4) + layout.super_groups // TILE_ROWS * 4
        sent, gathered = (4 * words for words in layout.payload_words)
        moved = [rows[name]["moved_bytes"] for name in ("compress", "decompress")]
        assert moved == [2 * 2**14 + size + plan for size in (sent, gathered)]
        assert "dither" in result.output


# --- What is refused before anything is measured --------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments):
    """The message of a command that refuses an option."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exception, result.output)
    return plain(result.output)


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measure(*_, **__):
        raise AssertionError("measured")

    places = [(all_reduce, "bench_all_reduce"), (kernels, "bench_kernels"), (cli, "study")]
    places += [(error, "bench_error"), (error, "synthetic_gradients"), (advice, "bench_links")]
    for module, name in places:
        monkeypatch.setattr(module, name, measure)


WRITERS = [
    (["bench", "all-reduce"], "--json"),
    (["bench", "kernels"], "--json"),
    (["error"], "--json"),
    (["simulate"], "--json"),
    (["advise", "--params", "1M"], "--json"),
    (["advise", "--params", "1M"], "--config"),
]


@pytest.mark.parametrize(("command", "option"), WRITERS, ids=lambda part: str(part))
@pytest.mark.usefixtures("nothing_is_measured")
def test_what_cannot_be_written_is_refused_early(command, option, monkeypatch, tmp_path):
    name = "rows.json"
    folder, file = tmp_path / f"folder-{name}", tmp_path / name
    folder.mkdir()
    assert "is a directory" in refused(*command, option, folder)
    assert option in refused(*command, option, folder)
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    said = refused(*command, option, file)
    assert option in said and "is not writable" in said
    file.touch()
    said = refused(*command, option, file)
    assert option in said and "is not writable" in said


GRADIENTS = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
BROKEN = np.where(np.arange(1024).reshape(2, 512) % 300, GRADIENTS, np.nan)
LEAVES = {"names": ["a", "b"]}


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"gradients": GRADIENTS + np.nan}, "has 1,024 NaN or infinite among 1,024 numbers"),
        ({"gradients": BROKEN}, "'gradients' of g.npz has 4 NaN or infinite among 1,024 numbers"),
        ({"gradients": 1e39 * np.ones((2, 4))}, "has 8 NaN or infinite among 8"),
        ({"gradients": np.zeros((2, 4))}, "has no number but 0 among 8 numbers"),
        ({"gradients": np.zeros((2, 0))}, "has no number but 0 among 0 numbers"),
        ({"gradients": np.array([["a"], ["b"]])}, "has dtype <U1: save f32"),
        ({"gradients": np.array([[{}], [{}]])}, "g.npz cannot be read"),
        ({"gradients": GRADIENTS, "sizes": [511.5, 0.5], **LEAVES}, "'sizes' of g.npz has 511.5"),
        ({"gradients": GRADIENTS, "sizes": [513, -1], **LEAVES}, "'sizes' of g.npz has -1"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_gradients_that_cannot_be_measured_are_refused(arrays, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("g.npz", **arrays)
    said = refused("error", "--gradients", "g.npz")
    assert "--gradients" in said and complaint in said


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("missing", "does not exist"),
        ("folder", "is a directory"),
        ("empty", "is not a .npz file"),
        ("text", "is not a .npz file"),
        ("npy", "is not a .npz file"),
        ("cut", "is not a .npz file"),
        ("damaged", "cannot be read"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_files_that_hold_no_gradients_are_refused(kind, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("good.npz", gradients=GRADIENTS)
    whole = (tmp_path / "good.npz").read_bytes()
    np.save("array.npy", GRADIENTS)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    held = {"empty": b"", "text": b"loss", "cut": whole[:1000], "damaged": bytes(damaged)}
    held["npy"] = (tmp_path / "array.npy").read_bytes()
    if kind == "folder":
        (tmp_path / "g.npz").mkdir()
    elif kind != "missing":
        (tmp_path / "g.npz").write_bytes(held[kind])
    said = refused("error", "--gradients", "g.npz")
    assert "--gradients" in said and complaint in said


@pytest.mark.parametrize(
    ("arguments", "option", "complaint"),
    [
        # Errors name the option that they are about.
        (["bench", "all-reduce", "--transport", "nccl"], "--transport", "transport='nccl'"),
        (["bench", "all-reduce", "--devices", "99"], "--devices", "99 devices"),
        (["bench", "all-reduce", "--topology", "hierarchical"], "--topology", "or --nodes 2"),
        (["bench", "kernels", "--widths", "4,15", "--dither"], "--widths", "widths=(4, 15)"),
        (["simulate", "--bits", "2"], "--bits", "bits=2"),
        (["simulate", "--bits", "x"], "--bits", "'x' is not a number of bits"),
        (["simulate", "--bits", "5,nan"], "--bits", "'nan' is not a number of bits"),
        (["simulate", "--floor", "99"], "--floor", "floor=99"),
        (["simulate", "--levels", "up"], "--levels", "levels='up'"),
        (["simulate", "--rounding", "up"], "--rounding", "rounding='up'"),
        (["simulate", "--balance", "nan"], "--balance", "balance=nan"),
        (["simulate", "--inner", "5", "--topology", "hierarchical"], "--inner", "sets of 5"),
        (["error", "--topology", "hierarchical"], "--topology", "direct, ring or butterfly"),
        # What does not go together is known before it is compiled.
        (["error", "--workers", "3", "--topology", "butterfly"], "--topology", "the axis has 3"),
        (
            ["bench", "all-reduce", "--devices", "6", "--topology", "butterfly"],
            "--topology",
            "the axis has 6",
        ),
        (
            ["bench", "all-reduce", "--devices", "3", "--collective", "psum_scatter"],
            "--sizes",
            "multiple of 6 bytes",
        ),
        (["bench", "all-reduce", "--process-id", "1"], "--process-id", "not below --processes 1"),
        (
            ["advise", "--params", "1M", "--processes", "2", "--process-id", "2"],
            "--process-id",
            "2 is not below --processes 2",
        ),
        (
            ["advise", "--params", "1M", "--processes", "2", "--coordinator", "host"],
            "--coordinator",
            "'host' has no port",
        ),
        # Numbers that are none.
        (["bench", "all-reduce", "--methods", "thc:nan"], "--methods", "'nan' is not a number"),
        (["bench", "all-reduce", "--methods", "thc:inf"], "--methods", "'inf' is not a number"),
        (["bench", "kernels", "--coords", "9^99999999"], "--coords", "pass 1 to 2^31 - 1"),
        (["error", "--super-groups", "8388608"], "--super-groups", ""),
        (["simulate", "--super-groups", "8388608"], "--super-groups", ""),
        (["advise", "--params", "1.5"], "--params", "'1.5' is not a whole number of parameters"),
        (["advise", "--params", "nan"], "--params", "'nan' is not a whole number"),
        (["advise", "--sizes", "6B", "--dtype", "f32"], "--sizes", "multiple of 4 bytes"),
        (["advise", "--params", "1M", "--bits", ","], "--bits", "'' is not a number of bits"),
        (["advise", "--params", "1M", "--step-time-ms", "0"], "--step-time-ms", "0 is not a pos"),
        (["advise", "--params", "1M", "--step-time-ms", "inf"], "--step-time-ms", "inf is not"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_errors_name_the_option_before_anything_is_measured(
    arguments, option, complaint, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: None)
    said = refused(*arguments)
    assert re.search(f"Invalid value for '?{option}'?: ", said)
    assert complaint in said


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, OSError])
def test_what_the_library_or_the_system_refuses_is_a_message(monkeypatch, kind):
    def refuse(*_, **__):
        raise kind("widths are too wide")

    monkeypatch.setattr(kernels, "bench_kernels", refuse)
    assert "Invalid value: widths are too wide" in refused("bench", "kernels")


def test_the_version_is_that_of_the_library_and_of_jax():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"dynamiq_jax {dq.__version__}, jax {jax.__version__}\n"


class TestData:
    def test_distinct_values_of_shared_magnitudes(self):
        mesh = Mesh(np.array(jax.devices()), all_reduce.AXES[-1:], axis_types=(AxisType.Auto,))
        data = all_reduce.heavy_tailed_gradients(mesh, 256 * 64 + 3, seed=0)
        rows = np.asarray(data.astype(jnp.float32))
        assert rows.shape == (len(jax.devices()), 256 * 64 + 3)
        assert len(np.unique(rows, axis=0)) == len(rows)
        norms = np.linalg.norm(rows[:, : 256 * 64].reshape(len(rows), 64, 256), axis=2)
        np.testing.assert_allclose(norms, np.broadcast_to(norms[0], norms.shape), rtol=0.4)
        assert norms[0].max() > 10 * np.median(norms[0])

    def test_quality_counts_differing_bits_and_takes_the_worst_replica(self):
        mesh = Mesh(np.array(jax.devices()), all_reduce.AXES[-1:], axis_types=(AxisType.Auto,))
        data = np.ones((len(jax.devices()), 10), jnp.bfloat16)
        replicas = len(data) * data
        quality = all_reduce.quality_program(mesh, "psum")
        assert [float(value) for value in quality(data, replicas)] == [0.0, 0.0]
        replicas[:, 2] = 0.0
        replicas[-1, 2] = -0.0  # other bits, same value
        replicas[-1, 3] = 0.0
        vnmse, wrong = quality(data, replicas)
        assert float(vnmse) == pytest.approx(2 / 10)
        assert int(wrong) == (2 if len(data) > 1 else 0)

    def test_replicas_are_each_device_own_buffer(self):
        devices = jax.devices()[:2]
        mesh = Mesh(np.array(devices), all_reduce.AXES[-1:], axis_types=(AxisType.Auto,))
        copies = [jax.device_put(jnp.full(3, i), device) for i, device in enumerate(devices)]
        everywhere = NamedSharding(mesh, PartitionSpec())
        result = jax.make_array_from_single_device_arrays((3,), everywhere, copies)
        rows = jax.device_put(
            np.zeros((len(devices), 3), int),
            NamedSharding(mesh, PartitionSpec(all_reduce.AXES[-1])),
        )
        replicas = np.asarray(all_reduce.replicas_of(result, rows))
        np.testing.assert_array_equal(replicas, [[i] * 3 for i in range(len(devices))])


class TestTiming:
    def test_rounds_interleave_the_calls(self):
        calls = []
        result = timing.time_calls(
            [lambda: calls.append("a"), lambda: calls.append("b")],
            repeats=3,
            in_flight=2,
            warm_up=1,
        )
        assert "".join(calls) == "ab" + "aabb" * 3
        assert len(result) == 2

    def test_percentiles_are_per_iteration(self, monkeypatch):
        clock = iter([0.0, 1e-3, 0.0, 3e-3, 0.0, 2e-3])
        monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
        (result,) = timing.time_calls([lambda: None], repeats=3, iterations=10, warm_up=0)
        assert result == pytest.approx((200.0, 120.0, 280.0))

    def test_no_repetition_is_hoisted_or_merged(self):
        runs = []

        def work(x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(lambda y: runs.append(0) or np.asarray(y) + 1, shape, x)

        result = jax.jit(timing.repeat_on_device(work, 5))(jnp.zeros(4))
        np.testing.assert_array_equal(result, np.ones(4))
        assert len(runs) == 5

    @pytest.mark.parametrize("count", ["repeats", "iterations", "in_flight"])
    def test_counts_below_one_are_refused(self, count):
        with pytest.raises(ValueError, match=f"{count} is 0"):
            timing.time_calls([], **({"repeats": 1} | {count: 0}))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("16MiB", 2**24), ("1GiB", 2**30), ("64kib", 2**16), ("3MB", 3_000_000), ("512", 512)],
)
def test_sizes(text, size_bytes):
    assert contenders.parse_size(text) == size_bytes
    if text.endswith("iB"):
        assert tables.format_size(size_bytes) == text


@pytest.mark.parametrize(("text", "coords"), [("2^28", 2**28), ("2**10", 1024), ("1000", 1000)])
def test_coords(text, coords):
    assert kernels.parse_coords(text) == coords


@pytest.mark.parametrize(
    ("told", "label"),
    [
        ({}, "p2p, NCCL"),
        ({"NCCL_SHM_DISABLE": "1"}, "p2p, NCCL"),
        ({"NCCL_HOSTID": "node0", "NCCL_NET": "Socket"}, "p2p, NCCL + socket"),
        ({"NCCL_HOSTID": "node0", "NCCL_P2P_DISABLE": "1"}, "shm + net"),
        ({"NCCL_P2P_DISABLE": "1"}, "shm"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}, "socket"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "net"),
    ],
)
def test_transport_label(told, label):
    assert all_reduce.transport("gpu", None, told) == label
    assert all_reduce.transport("gpu", dq.Direct(transport="collectives"), told) == label
    assert all_reduce.transport("cpu", None, told) == "cpu"


def test_transport_label_of_copy_engines(monkeypatch):
    monkeypatch.setattr(all_reduce, "copy_engines", lambda: "they are asked for")
    permutes, collectives = (dq.Direct(transport=t) for t in ("permutes", "collectives"))
    assert all_reduce.transport("gpu", permutes, {}) == "p2p, copy engines"
    symmetric = "--xla_enable_nccl_symmetric_buffers_for_collectives=AllGather,AllToAll"
    told = {"NCCL_CTA_POLICY": "2", "XLA_FLAGS": symmetric}
    assert all_reduce.transport("gpu", collectives, told) == "p2p, NCCL copy engines"
    assert all_reduce.transport("gpu", None, told) == "p2p, NCCL"
    assert all_reduce.transport("gpu", None, {"NCCL_CTA_POLICY": "2"}) == "p2p, NCCL"


def test_a_transport_is_that_of_the_topology_or_of_the_outer_one():
    assert contenders.parse_topology("ring", 1, "permutes") == dq.Ring(transport="permutes")
    outer = contenders.parse_topology("hierarchical", 2, "permutes").outer
    assert outer == dq.Butterfly(transport="permutes")
    with pytest.raises(ValueError, match="transport='nccl'"):
        contenders.parse_topology("ring", 1, "nccl")
