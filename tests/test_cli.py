"""The command: rows of its benchmarks, and what it refuses before it measures."""

import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from processes import outputs
from typer.testing import CliRunner

import dynamiq_jax as dq
from dynamiq_jax.commands import cli, error, simulate
from dynamiq_jax.commands.bench import all_reduce, contenders, settings, tables, timing
from dynamiq_jax.plan.model_tree import save_model_tree

pytestmark = pytest.mark.usefixtures("keep_xla_flags")


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def ran(*arguments):
    """Runs a command, which must end well; returns its result."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def plain(text):
    """Text without its line breaks."""
    return " ".join(text.split())


def refused(*arguments):
    """The one line of a command that refuses an option."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exception, result.output)
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ") and len(line) < 700
    return line


CHOSEN = [
    contenders.parse_method(name, contenders.parse_topology("direct"))
    for name in ("dynamiq:5", "mxfp8")
]


def timed(sizes, chosen):
    return all_reduce.bench_all_reduce(sizes, chosen, devices=jax.devices()[:2], repeats=3)


@pytest.fixture(scope="module")
def all_reduce_rows():
    rows = timed([2**16, 2**18], CHOSEN)
    return {(row.size_bytes, row.method): row for row in rows}


class TestAllReduce:
    def test_the_command_times_every_method_on_every_topology(
        self, all_reduce_rows, monkeypatch, tmp_path
    ):
        seen, file = [], tmp_path / "rows.json"

        def measured(sizes, methods, **_):
            seen.extend([sizes, *(contender.label for contender in methods)])
            return list(all_reduce_rows.values())

        monkeypatch.setattr(all_reduce, "bench_all_reduce", measured)
        chosen = ["--methods", "dynamiq:5,mxfp8,dynamiq:5", "--topology", "ring, direct"]
        chosen += ["--sizes", "64KiB,256KiB", "--json", file]
        lines = ran("bench", "all-reduce", *chosen).stdout.splitlines()
        labels = [f"{name} {route}" for name in ("dynamiq:5", "mxfp8") for route in TOPOLOGIES]
        assert seen == [[2**16, 2**18], *labels]
        header = next(line for line in lines if line.lstrip().startswith("size"))
        assert all(column.title in header for column in tables.ALL_REDUCE_COLUMNS)
        assert "8 CPU device(s)" in lines[0] or jax.default_backend() != "cpu"
        expected = ["bf16 psum", "dynamiq:5 direct", "mxfp8 direct"]
        for size in ("64KiB", "256KiB"):
            found = [line for line in lines if line.split()[:1] == [size]]
            assert [name for line in found for name in expected if name in line] == expected
        document = json.loads(file.read_text())
        about = document["about"]
        versions = f"jax {about['jax']}; jaxlib {about['jaxlib']}; "
        assert lines[-1].startswith(versions) and about["jax"] == jax.__version__
        assert "XLA_FLAGS=" + about["environment"]["XLA_FLAGS"].strip() in lines[-1]
        assert document["about"]["n_devices"] == len(jax.devices())
        assert len(document["rows"]) == 6
        assert all(row["transport"] and row["backend"] for row in document["rows"])

    def test_gpus_also_time_psum_under_each_of_its_options_that_is_known(self, monkeypatch):
        """The options reach the compiler: it refuses one that it does not know."""
        assert [c.label for c in contenders.tuned()] == [
            "bf16 psum, symmetric", "bf16 psum, one-shot"
        ]  # fmt: skip
        wrong = contenders.uncompressed()._replace(options={"xla_no_such_option": True})
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            timed([2**16], [wrong])
        monkeypatch.setattr(contenders, "NATIVE_OPTIONS", {"new": wrong.options})
        assert contenders.tuned() == []

    def test_replicas_agree_for_methods_and_baseline(self, all_reduce_rows):
        assert [row.wrong for row in all_reduce_rows.values()] == [0] * 6

    def test_bandwidths_and_speedups_follow_from_bytes_and_time(self, all_reduce_rows):
        for (size_bytes, _), row in all_reduce_rows.items():
            n, seconds = row.n_workers, row.time_us / 1e6
            busbw = row.size_bytes / seconds / 1e9 * 2 * (n - 1) / n
            assert row.busbw_gb_per_s == pytest.approx(busbw)
            assert row.wire_gb_per_s == pytest.approx(row.wire_bytes / seconds / 1e9)
            assert 0 < row.p10_us <= row.time_us <= row.p90_us
            baseline = all_reduce_rows[size_bytes, "bf16 psum"]
            assert row.speedup == pytest.approx(baseline.time_us / row.time_us)

    def test_wire_bytes_and_error_fit_the_method(self, all_reduce_rows):
        native, five, eight = (
            all_reduce_rows[2**18, name]
            for name in ("bf16 psum", "dynamiq:5 direct", "mxfp8 direct")
        )
        assert native.wire_bytes == 2**18
        assert five.wire_bytes / native.wire_bytes == pytest.approx(5 / 16, rel=0.02)
        assert native.vnmse < eight.vnmse < five.vnmse < 0.02


TOPOLOGIES = ("ring", "direct")


def test_without_a_gpu_eight_cpu_workers_stand_in():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "dynamiq_jax", "explain", "1M"]
    ((told, _),) = outputs([command], environment | {"JAX_PLATFORMS": "cpu"})
    assert told.startswith("1M bf16 parameters: 8 workers")


# --- What is refused before anything is measured --------------------------------------------------


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measure(*_, **__):
        raise AssertionError("measured")

    places = [(all_reduce, "bench_all_reduce")]
    places += [(error, "bench_error"), (error, "synthetic_gradients"), (settings, "bench_settings")]
    for module, name in places:
        monkeypatch.setattr(module, name, measure)


GRADIENTS = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
BROKEN = np.where(np.arange(1024).reshape(2, 512) % 300, GRADIENTS, np.nan)
LEAVES = {"names": ["a", "b"]}
ARRAYS = {
    "g": {"gradients": GRADIENTS},
    "grads": {"grads": GRADIENTS},
    "broken": {"gradients": BROKEN},
    "over": {"gradients": 1e39 * np.ones((2, 4))},
    "text": {"gradients": np.array([["a"], ["b"]])},
    "sum": {"gradients": GRADIENTS, "sizes": [1, 2], **LEAVES},
    "nothing": {"gradients": GRADIENTS[:, :0]},
    "negative": {"gradients": GRADIENTS, "sizes": [-1, 513], **LEAVES},
    "names": {"gradients": GRADIENTS, "sizes": [512], **LEAVES},
}
"""Files of `error --gradients` by name."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of the files that commands are tried with."""
    folder = tmp_path_factory.mktemp("files")
    for name, arrays in ARRAYS.items():
        np.savez(folder / f"{name}.npz", **arrays)
    whole = (folder / "g.npz").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    (folder / "damaged.npz").write_bytes(bytes(damaged))
    save_model_tree(folder / "large.json", jax.ShapeDtypeStruct((4 * 10**12,), jnp.float32))
    (folder / "true.json").write_text('{"w": [[true], "float32"]}')
    (folder / "list.json").write_text('[[[4, 4], "float32"]]')
    (folder / "rows.json").write_text("kept")
    (folder / "linked.npz").hardlink_to(folder / "g.npz")
    (folder / "folder").mkdir()
    return folder


GIVEN = ["error", "--gradients"]
ALL_REDUCE = ["bench", "all-reduce"]
HOSTS = ["run", "--hosts", "localhost:29871,localhost:29872", "--host-id", "0", "--patience", "1"]
TWO = ["advise", "1M", "--processes", "2"]
LONG = "a" * 4000
REFUSED = [
    # Files that hold no gradients.
    ([*GIVEN, "missing.npz"], "--gradients", "does not exist"),
    ([*GIVEN, "folder"], "--gradients", "is a directory"),
    ([*GIVEN, "damaged.npz"], "--gradients", "cannot be read"),
    ([*GIVEN, "grads.npz"], "--gradients", "has no array 'gradients'"),
    ([*GIVEN, "g.npz", "--workers", "3"], "--gradients", "shape (2, 512), and 3 workers are"),
    ([*GIVEN, "broken.npz"], "--gradients", "has 4 NaN or infinite among 1,024 numbers"),
    ([*GIVEN, "over.npz"], "--gradients", "has 8 NaN or infinite among 8"),
    ([*GIVEN, "text.npz"], "--gradients", "has dtype <U1: save f32"),
    ([*GIVEN, "sum.npz"], "--gradients", "with 3 coordinates, and 'gradients' has 512"),
    ([*GIVEN, "nothing.npz"], "--gradients", "shape (2, 0), without coordinates"),
    ([*GIVEN, "negative.npz"], "--gradients", "'sizes' of negative.npz has -1: save"),
    ([*GIVEN, "names.npz"], "--gradients", "names.npz has 2 names and 1 sizes of leaves"),
    # Models.
    (["advise", "large.json"], "MODEL", "has 4,000,000,000,000 coordinates"),
    (["advise", "true.json"], "MODEL", "leaf 'w' is [[True], 'float32']"),
    (["advise", "4e12"], "MODEL", "'4e12' is 4e+12 parameters: one leaf takes 1 to 2,147,483,647"),
    (["advise", "7B"], "MODEL", "pass the leaves of a larger model in a file of save_model_tree"),
    (["advise", "1.5"], "MODEL", "'1.5' is neither a file nor a whole number of parameters"),
    (["explain", "g.npz"], "MODEL", "g.npz is not JSON"),
    (["explain", "list.json"], "MODEL", "list.json holds a JSON list, not an object"),
    # Files that cannot be written.
    ([*GIVEN, "g.npz", "--json", "g.npz"], "--json", "g.npz cannot be written (read by this"),
    ([*GIVEN, "g.npz", "--json", "linked.npz"], "--json", "(read by this command)"),
    (["advise", "true.json", "--json", "true.json"], "MODEL", ""),
    *(
        ([*command, "--json", "/dev/full"], "--json", "(not a regular file)")
        for command in (["error"], ALL_REDUCE, ["advise", "1M"])
    ),
    (["error", "--json", "nowhere/a.json"], "--json", "cannot be written (No such file or dir"),
    # Long values.
    (["error", "--methods", LONG], "--methods", "is not known: pass one of dynamiq"),
    (["error", "--methods", "a " * 2000], "--methods", "powersgd, arc-top-k"),
    (["error", "--methods", "\x1b[31m:5"], "--methods", r"method '\x1b[31m' is not known"),
    # Options by name.
    ([*ALL_REDUCE, "--methods", "dynamic:5"], "--methods", "method 'dynamic' is not known"),
    ([*ALL_REDUCE, "--methods", "dynamiq:five"], "--methods", "'five' is not a number of bits"),
    ([*ALL_REDUCE, "--methods", "dynamiq:99"], "--methods", "99"),
    ([*ALL_REDUCE, "--methods", "thc:nan"], "--methods", "'nan' is not a number"),
    ([*ALL_REDUCE, "--methods", "marsit"], "--methods", "'marsit' has memory, which is empty"),
    ([*ALL_REDUCE, "--topology", "torus"], "--topology", "topology 'torus' is not known"),
    ([*ALL_REDUCE, "--topology", "hierarchical"], "--topology", "or --nodes 2 or more"),
    ([*ALL_REDUCE, "--sizes", "16Mb1"], "--sizes", "size '16Mb1' is not a size"),
    ([*ALL_REDUCE, "--sizes", "1MiB,3B"], "--sizes", "size '3B' is 3 bytes"),
    ([*ALL_REDUCE, "--sizes", "4GiB"], "--sizes", "under 4GiB"),
    ([*ALL_REDUCE, "--repeats", "0"], "--repeats", ""),
    ([*ALL_REDUCE, "--iterations", "0"], "--iterations", ""),
    ([*ALL_REDUCE, "--process-id", "1"], "--process-id", "not below --processes 1"),
    ([*ALL_REDUCE, "--nodes", "3"], "--nodes", "8 devices are not 3 equal nodes"),
    (["error", "--topology", "hierarchical"], "--topology", "direct, ring or butterfly"),
    (["error", "--workers", "3", "--topology", "butterfly"], "--topology", "the axis has 3"),
    (["error", "--super-groups", "8388608"], "--super-groups", ""),
    (["advise", "1M", "--bits", "4,x"], "--bits", "'x' is not a number of bits"),
    (["advise", "1M", "--bits", "1"], "--bits", "bits=1.0 is below"),
    (["advise", "1M", "--step-time-ms", "0"], "--step-time-ms", "0 is not a positive number"),
    (["advise", "1M", "--topology", "torus"], "--topology", "topology 'torus' is not known"),
    (["advise", "1M", "--topology", "hierarchical"], "--topology", "two axes"),
    ([*TWO, "--process-id", "2"], "--process-id", "2 is not below --processes 2"),
    ([*TWO, "--coordinator", "host"], "--coordinator", "'host' has no port"),
    (["explain", "1M", "--bits", "1"], "--bits", "bits=1.0 is below"),
    (["explain", "1M", "--bits", "0"], "--bits", "metadata at group_size=32; pass other --bits"),
    (["explain", "1M", "--bits", "33"], "--bits", "can use at most 14.38); pass other --bits"),
    (["explain", "1M", "--topology", ""], "--topology", "topology '' is not known"),
    ([*TWO, "--coordinator", "host:65536"], "--coordinator", "no port below 65536: pass"),
    ([*HOSTS, "--", ""], "COMMAND", "'' is no program of this host: pass one after --"),
    ([*HOSTS, "--", "./missing.sh"], "COMMAND", "'./missing.sh' is no program"),
    ([*HOSTS, "--events", "folder", "--", "true"], "--events", "folder cannot be written (Is a"),
    (
        [
            "explain",
            "1M",
            "--workers",
            "16",
            "--nodes",
            "4",
            "--topology",
            "ring",
            "--rate",
            "1gbit",
        ],
        "--rate",
        "how many of its bytes cross hosts is not known",
    ),
    (["explain", "1M", "--rate", "fast"], "--rate", "rate='fast'"),
    (["explain", "1M", "--workers", "8", "--nodes", "3"], "--nodes", "8 workers are not 3 equal"),
]


@pytest.mark.parametrize(
    ("arguments", "option", "complaint"), REFUSED, ids=lambda part: plain(str(part))[:40]
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_a_line_names_the_option_before_anything_is_measured(
    arguments, option, complaint, monkeypatch, files
):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: None)
    monkeypatch.chdir(files)
    said = refused(*arguments)
    assert re.search(f"Invalid value for '?{option}'?: ", said), said
    assert complaint in said
    assert (files / "rows.json").read_text() == "kept"


def test_memory_that_runs_out_is_one_line(monkeypatch):
    def allocate(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 7 bytes.")

    monkeypatch.setattr(simulate, "study", allocate)
    assert "allocating 7 bytes.; pass smaller" in refused("simulate", "--workers", 2)


def test_a_file_that_is_replaced_is_named_before(files, monkeypatch):
    monkeypatch.chdir(files)
    said = run("error", "--workers", "3", "--topology", "butterfly", "--json", "rows.json").stderr
    assert said.startswith("--json replaces rows.json (4 bytes)\n")


def test_markup_and_control_characters_in_names_of_users_do_nothing(tmp_path):
    file = tmp_path / "[b]g.npz"
    leaf = np.random.default_rng(0).normal(size=(2, 4096)).astype(np.float32)
    np.savez(file, gradients=leaf, names=["[/red]\x1b[31mx"], sizes=[4096])
    result = ran("error", "--gradients", file, "--methods", "bf16", "--seeds", 1)
    assert "[/red] [31mx" in result.stdout and "[b]g.npz" in result.stdout
    assert "vNMSE does not predict the loss" in result.stdout
    assert "\x1b" not in result.output


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError, OSError, MemoryError])
def test_refusals_of_the_library_and_the_system_are_a_line(monkeypatch, kind):
    def refuse(*_, **__):
        raise kind("widths are too wide")

    monkeypatch.setattr(error, "synthetic_gradients", refuse)
    assert refused("error", "--methods", "bf16") == "Error: widths are too wide"


def test_the_version_is_that_of_the_library_and_of_jax():
    assert ran("--version").output == f"dynamiq_jax {dq.__version__}, jax {jax.__version__}\n"


def mesh_of(devices):
    return Mesh(np.array(devices), all_reduce.AXES[-1:], axis_types=(AxisType.Auto,))


class TestData:
    def test_distinct_values_of_shared_magnitudes(self):
        data = all_reduce.heavy_tailed_gradients(mesh_of(jax.devices()), 256 * 64 + 3)
        rows = np.asarray(data.astype(jnp.float32))
        assert rows.shape == (len(jax.devices()), 256 * 64 + 3)
        assert len(np.unique(rows, axis=0)) == len(rows)
        norms = np.linalg.norm(rows[:, : 256 * 64].reshape(len(rows), 64, 256), axis=2)
        np.testing.assert_allclose(norms, np.broadcast_to(norms[0], norms.shape), rtol=0.4)
        assert norms[0].max() > 10 * np.median(norms[0])

    def test_quality_counts_differing_bits_and_takes_the_worst_replica(self):
        data = np.ones((len(jax.devices()), 10), jnp.bfloat16)
        replicas = len(data) * data
        quality = all_reduce.quality_program(mesh_of(jax.devices()))
        assert [float(value) for value in quality(data, replicas)] == [0.0, 0.0]
        replicas[:, 2] = 0.0
        replicas[-1, 2] = -0.0  # other bits, same value
        replicas[-1, 3] = 0.0
        vnmse, wrong = quality(data, replicas)
        assert float(vnmse) == pytest.approx(2 / 10)
        assert int(wrong) == (2 if len(data) > 1 else 0)

    def test_replicas_are_each_device_own_buffer(self):
        devices = jax.devices()[:2]
        mesh = mesh_of(devices)
        copies = [jax.device_put(jnp.full(3, i), device) for i, device in enumerate(devices)]
        everywhere = NamedSharding(mesh, PartitionSpec())
        result = jax.make_array_from_single_device_arrays((3,), everywhere, copies)
        split = NamedSharding(mesh, PartitionSpec(all_reduce.AXES[-1]))
        rows = jax.device_put(np.zeros((2, 3), int), split)
        replicas = np.asarray(all_reduce.replicas_of(result, rows))
        np.testing.assert_array_equal(replicas, [[0] * 3, [1] * 3])


class TestTiming:
    def test_rounds_interleave_the_calls(self):
        calls = []
        work = [lambda: calls.append("a"), lambda: calls.append("b")]
        result = timing.time_calls(work, repeats=3, in_flight=2, warm_up=1)
        assert "".join(calls) == "ab" + "aabb" * 3
        assert len(result) == 2

    def test_percentiles_are_per_iteration(self, monkeypatch):
        clock = iter([0.0, 1e-3, 0.0, 3e-3, 0.0, 2e-3])
        monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
        (result,) = timing.time_calls([lambda: None], repeats=3, iterations=10, warm_up=0)
        assert (result.time_us, result.p10_us, result.p90_us) == pytest.approx((200, 120, 280))

    @pytest.mark.parametrize("count", ["repeats", "iterations", "in_flight"])
    def test_counts_below_one_are_refused(self, count):
        with pytest.raises(ValueError, match=f"{count} is 0"):
            timing.time_calls([], **({"repeats": 1} | {count: 0}))


def test_payloads_travel_as_the_library_would_send_them(monkeypatch):
    def by(topology, sizes, size_bytes=2**20, **options):
        compression = topology and dq.Compression(dq.DynamiQ(**options), topology=topology)
        return all_reduce.payloads_by(compression, sizes, size_bytes)

    assert [by(None, (8,)), by(dq.Ring(), (8,))] == ["xla", "collectives"]
    assert by(dq.Direct(transport="permutes"), (8,)) == "permutes"
    assert by(dq.Direct(transport="push"), (8,)) == "push"
    monkeypatch.setattr("dynamiq_jax.topologies.schedules.copy_engines", lambda: "they are there")
    assert [by(dq.Direct(), (4,)), by(dq.Hierarchical(), (2, 2))] == ["permutes"] * 2


def test_sums_that_a_push_kernel_does_are_said_to_push(monkeypatch):
    """Whatever the transport of the topology is, and only sizes that push."""
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)
    monkeypatch.setattr("dynamiq_jax.topologies.schedules.copy_engines", lambda: "they are there")
    monkeypatch.setattr("pallas_kernels.needs_of_push", lambda names=(): None)
    monkeypatch.setattr(dq.DynamiQ, "pushed", lambda self, n: (2**15, 2**20))
    found = contenders.parse_method("dynamiq:5", dq.Direct()).compression
    said = [all_reduce.payloads_by(found, (2,), size) for size in (2**20, 2**20 + 2)]
    assert said == ["push", "permutes"]
    permutes = dq.Compression(topology=dq.Direct(transport="permutes"))
    assert all_reduce.payloads_by(permutes, (2,), 2**20) == "permutes"
    assert contenders.parse_method("bf16", None).compression is None
