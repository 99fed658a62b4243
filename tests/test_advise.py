"""Advice: what follows from made-up rows, what is measured on eight CPU devices, and its files."""

import itertools
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_llm
import train_multihost
import typer
from processes import coordinator, outputs
from test_cli import plain, ran, run

import dynamiq_jax as dq
from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import all_reduce, settings, timing
from dynamiq_jax.commands.bench.advice import check, decide, step_times
from dynamiq_jax.commands.bench.settings import SettingRow
from dynamiq_jax.commands.models import floating_leaves
from dynamiq_jax.plan.model_tree import load_model_tree, save_model_tree

ERRORS = {5: 0.018, 4: 0.078, 3.5: 0.17}
"""About those of `Direct` among 8 workers."""


pytestmark = pytest.mark.usefixtures("keep_xla_flags")


# --- The decision ---------------------------------------------------------------------------------


def native(ms, spread=0.01):
    return row(None, None, ms, spread=spread)


def row(bits, topology, ms, *, spread=0.01, dither=False, limits=None, **facts):
    time_us, setting = 1e3 * ms, None
    if bits:
        method = dq.DynamiQ(bits=bits, dither=dither)
        setting = dq.Compression(method, topology=getattr(dq, topology)(), **limits or {})
    facts = {
        "setting": setting,
        "time_us": time_us,
        "p10_us": time_us * (1 - spread),
        "p90_us": time_us * (1 + spread),
        "wire_bytes": 1e6 * (bits or 16),
        "compressed": 1.0 if bits else 0.0,
        "relative_error": ERRORS.get(bits),
    } | facts
    return SettingRow(**facts)


def directs(*times):
    """Rows of `Direct` at 5, 4 and 3.5 bits."""
    return [row(bits, "Direct", ms) for bits, ms in zip(ERRORS, times, strict=True)]


def text(said):
    return "\n".join(said.sentences)


SLOWER = [native(1.0), *directs(0.99, 0.97, 0.96)]
LONG = [native(30), *directs(14, 12, 10)]
WARNED = row(3.5, "Ring", 3.0, warning="too much error; pass bits=4")
ALL_WARNED = row(4, "Ring", 6.0, warning="W4"), row(3, "Ring", 5.0, warning="W3", relative_error=1)
DECISIONS = {
    # On fast links 4 bits gain 5%; 3.5 save less than as much again.
    "fast links": ([native(1.0), *directs(0.97, 0.94, 0.92)], None, 4, [
        "Use DynamiQ at 4 bits over Direct", "0.94 ms instead of 1 ms with bf16 psum (1.06x)",
        "Fewer bits cost training loss",
    ]),
    "slow network": ([native(300), *directs(135, 115, 100)], None, 3.5, [
        "(3.00x)", "pass --step-time-ms",
    ]),
    "nothing pays": (SLOWER, None, None, [
        "Do not bother", "saves 4.0% of the all-reduce, less than 5%",
    ]),
    "slower": ([native(1.0), *directs(2.0, 1.7, 1.6)], None, None, [
        "is slower than bf16 psum (0.62x)",
    ]),
    "half a percent more": ([*SLOWER[:-1], row(3.5, "Direct", 0.945)], None, 3.5, []),
    # Equal times are 3 times faster, and 2% of a long step.
    "long step": (LONG, 1000, None, ["saves 2.0% of the step, less than 5%"]),
    # 4 bits save 1.5% more of the step.
    "step": (LONG, 150, 5, [
        "134 ms (10.7% less) where the all-reduce follows", "150 ms where it runs under it",
        "Where the backward pass hides the all-reduce, do not bother.",
    ]),
    "short step": (LONG, 20, 3.5, ["takes 30 ms, more than the 20 ms of --step-time-ms"]),
    "all are warned of": ([native(10), *ALL_WARNED], None, 4, [
        "No setting pays without this warning: W4.",
    ]),
    "one is not": ([native(10), WARNED, row(4, "Ring", 9.0)], None, 4, []),
    "it does not pay": ([native(10), WARNED, row(4, "Ring", 9.9)], None, 3.5, [
        "No setting pays without this warning: too much error; pass bits=4",
    ]),
    "spread": ([native(10, spread=0.3), row(4, "Direct", 9, spread=0.3)], None, 4, [
        "The spread is as large as the gain",
    ]),
}  # fmt: skip
"""Rows and milliseconds of a step; the bits that are advised, what is said."""


class TestDecision:
    @pytest.mark.parametrize("name", DECISIONS)
    def test_the_bits_what_they_save_and_why(self, name):
        rows, step_ms, bits, sentences = DECISIONS[name]
        said = decide(rows, step_ms=step_ms)
        assert said.row.bits == (bits or 16)
        assert said.setting.method == (dq.DynamiQ(bits=bits) if bits else dq.BF16())
        for sentence in sentences:
            assert sentence in text(said)
        assert ("spread" in text(said)) == (name == "spread")
        assert "not bother" not in text(decide(LONG, step_ms=31))

    def test_dither_is_taken_where_it_costs_nothing(self):
        """It errs less; where kernels are the limit it is slower."""

        def rows(ms):
            dithered = row(4, "Direct", ms, dither=True, relative_error=0.03)
            return [native(300), row(4, "Direct", 100), dithered]

        said = decide(rows(101.5))
        assert said.setting.method == dq.DynamiQ(bits=4, dither=True)
        assert "Use DynamiQ at 4 bits with dither over Direct" in text(said)
        assert "dither=True" in said.snippet()
        assert decide(rows(104)).setting.method == dq.DynamiQ(bits=4)

    def test_a_model_that_is_too_small_travels_natively(self):
        said = decide([native(1.0)], reason="bucket of 10 coordinates < min_bucket_size 20")
        assert (
            "everything would travel natively (bucket of 10 coordinates < min_bucket_size 20)"
            in text(said)
        )
        assert said.setting == dq.Compression(dq.BF16())

    def test_the_fastest_topology_of_equally_fast_ones_that_of_less_error(self):
        slow, fast = row(4, "Ring", 5.0, relative_error=0.01), row(4, "Butterfly", 4.0)
        assert decide([native(10), slow, fast]).row is fast
        as_fast = row(4, "Direct", 4.05, relative_error=0.05)
        assert decide([native(10), slow, fast, as_fast]).row is as_fast

    def test_snippet_is_python_that_means_the_configuration(self):
        limits = {"min_bucket_size": 65536}
        said = decide([native(10), row(4, "Hierarchical", 5, limits=limits)])
        (line,) = said.snippet(("node", "gpu")).splitlines()
        found = {}
        pmean = lambda tree, axis_name, **rest: found.update(rest, axis_name=axis_name)
        public = {name: getattr(dq, name) for name in dq.__all__} | {"pmean": pmean}
        exec(line, {"grads": None, "dq": type("dq", (), public)})
        assert found.pop("axis_name") == ("node", "gpu")
        assert found == {"compression": said.setting}
        assert said.setting.topology == dq.Hierarchical()
        assert said.setting.min_bucket_size == 65536
        assert 'dq.pmean(grads, "data", compression=' in said.snippet()
        by_engines = decide([native(10), row(4, "Direct", 5, transport="permutes")])
        assert "step = dq.jit(step)" in by_engines.snippet()


@pytest.mark.parametrize(
    ("step_ms", "native_ms", "ours_ms", "exposed", "hidden"),
    [
        (100, 60, 30, 70, 100),  # all hidden before
        (100, 60, 80, 120, 340 / 3),  # 80 - 2/3 100 stick out of 100
        (100, 80, 50, 70, 70),  # 60 compute, 40 of that hide 80, then 50
        (100, 80, 20, 40, 60),
        (100, 100, 40, 40, 40),  # nothing computes
        (50, 100, 40, 40, 40),
    ],
)
def test_step_times_by_hand(step_ms, native_ms, ours_ms, exposed, hidden):
    found = step_times(step_ms, 1e3 * native_ms, 1e3 * ours_ms)
    assert found == pytest.approx((exposed, hidden))


# --- Measuring ------------------------------------------------------------------------------------

TREE = {
    "embedding": jax.ShapeDtypeStruct((600, 500), jnp.float32),
    "norm": jax.ShapeDtypeStruct((500,), jnp.float32),
    "half": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "empty": jax.ShapeDtypeStruct((0, 7), jnp.float32),
}


def label(request):
    return type(request.topology).__name__, request.method.bits, request.method.dither


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advise")
    save_model_tree(folder / "model.json", TREE)
    chosen = ["--bits", 5, "--repeats", 3, "--json", folder / "rows.json"]
    result = ran("advise", folder / "model.json", *chosen)
    said = result.stderr.splitlines()[-5:]
    assert said == [f"round {i} of 5" + ", untimed" * (i < 3) for i in range(1, 6)]
    return result.output, json.loads((folder / "rows.json").read_text())


class TestCommand:
    def test_rows_are_those_of_the_tree(self, measured):
        native, five = measured[1]["rows"]
        leaves = floating_leaves(TREE)
        coords = 600 * 500 + 500 + 15
        said = dq.explain(
            leaves, 8, compression=dq.Compression(topology=dq.Direct()), verbose=False
        )
        assert native["setting"] is None
        assert native["wire_bytes"] == 2 * 7 * 2 * coords // 8
        assert eval(five["setting"], vars(dq)) == dq.Compression(dq.DynamiQ(), topology=dq.Direct())
        assert five["wire_bytes"] == said.wire_bytes < native["wire_bytes"] / 3
        assert five["relative_error"] == said.relative_error
        assert five["compressed"] == pytest.approx(300_000 / coords)
        assert five["transport"] == "collectives"
        for row in (native, five):
            assert 0 < row["p10_us"] <= row["time_us"] <= row["p90_us"]

    def test_a_cpu_says_that_it_checked_and_gives_no_advice(self, measured):
        output, document = measured
        said = plain(output)
        found = []
        for row in document["rows"]:
            setting = row["setting"] and eval(row["setting"], vars(dq))
            found.append(row | {"setting": setting})
        assert plain(check([SettingRow(**row) for row in found])) in said
        assert said.count("Checked, not measured: bf16 psum and 1 setting(s) ran.") == 1
        assert not re.search("Do not bother|Use DynamiQ|dq.pmean", said)
        for expected in ("8 CPU device(s)", "bf16 psum", "DynamiQ at 5 bits"):
            assert expected in output

    def test_a_model_that_is_too_small_is_not_measured_compressed(self):
        said = plain(ran("advise", "10K", "--repeats", 1).output)
        assert "everything would travel natively" in said
        assert "10,000 coordinates; exact: bucket of 10000 coordinates < min_bucket_size" in said

    @pytest.mark.parametrize(
        ("cpu", "arguments", "expected"),
        [
            (True, [], [("Direct", 5, False), ("Direct", 4, False)]),
            (True, ["--bits", "5", "--topology", "ring"], [("Ring", 5, False)]),
            (False, ["--bits", "3.5"], [
                (name, 3.5, dither)
                for name in ("Direct", "Ring", "Butterfly") for dither in (False, True)
            ]),
        ],
    )  # fmt: skip
    def test_gpus_advise_and_a_cpu_tries_few_settings(self, cpu, arguments, expected, monkeypatch):
        tried = []

        def measure(mesh, tree, chosen, **_):
            tried.extend(map(label, chosen))
            return [native(30), *directs(14, 12, 10)]

        monkeypatch.setattr(options, "on_cpu", lambda _: cpu)
        monkeypatch.setattr(settings, "bench_settings", measure)
        told = [] if cpu else ["--step-time-ms", 150]
        result = ran("advise", "1M", *arguments, *told)
        assert tried == expected
        if cpu:
            return
        said = decide([native(30), *directs(14, 12, 10)], step_ms=150)
        for sentence in (*said.sentences, *said.snippet().splitlines()):
            assert plain(sentence) in plain(result.output)

    def test_explain_prints_what_the_library_explains(self, tmp_path):
        save_model_tree(tmp_path / "model.json", TREE)
        chosen = ["--workers", 8, "--bits", 4, "--rate", "25gbit"]
        result = ran("explain", tmp_path / "model.json", *chosen)
        tree = load_model_tree(tmp_path / "model.json")
        method = dq.DynamiQ(bits=4.0)
        found = dq.explain(tree, 8, compression=method, rate="25gbit", verbose=False)
        assert result.stdout == f"model.json: {found}\n"

    def test_processes_join_as_told_or_as_slurm_says(self, monkeypatch):
        joined = []
        monkeypatch.setattr(jax.distributed, "initialize", lambda *told: joined.append(told))
        stop = ["advise", "1M", "--nodes", "99"]
        run(*stop, "--processes", 2, "--process-id", 1, "--coordinator", "host:1")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
        run(*stop)
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
        run(*stop)
        assert joined == [("host:1", 2, 1), ()]


@pytest.mark.release
def test_several_processes_measure_together_and_the_first_reports(tmp_path):
    """Two of one device each, and a model that travels natively, which compiles at once."""
    command = [sys.executable, "-m", "dynamiq_jax", "advise", "10K", "--repeats", "2"]
    command += ["--processes", "2", "--coordinator", coordinator()]
    each = [[*command, "--process-id", str(i), "--json", tmp_path / f"{i}.json"] for i in range(2)]
    flags = "--xla_force_host_platform_device_count=1"
    ends = outputs(each, os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})
    assert "2 CPU device(s) of one machine" in ends[0][0]
    assert "2 process(es)" in ends[0][0]
    assert "everything would travel natively" in ends[0][0]
    assert "all-reduce of" not in ends[1][0] and "natively" not in ends[1][0]
    assert [file.name for file in tmp_path.iterdir()] == ["0.json"]


def test_settings_are_all_combinations_over_topologies_that_suit():
    leaf = [jax.ShapeDtypeStruct((2**20,), jnp.bfloat16)]
    found = settings.settings(leaf, (8,), [5, 4], [dq.Direct(), dq.Ring()], [False, True])
    expected = itertools.product(("Direct", "Ring"), (5, 4), (False, True))
    assert [*map(label, found)] == [*expected]
    assert settings.suiting_topologies((8,)) == ["direct", "ring", "butterfly"]
    assert settings.suiting_topologies((6,)) == ["direct", "ring"]
    assert settings.suiting_topologies((2, 3)) == ["direct", "ring", "hierarchical"]


def test_settings_lift_the_limit_for_fast_links_where_it_stops_everything(monkeypatch):
    """It goes by the kind of GPU. It stays where something is compressed."""
    monkeypatch.setattr("dynamiq_jax.compression.compression.fast_links", lambda: True)
    small, large = (jax.ShapeDtypeStruct((size,), jnp.bfloat16) for size in (2**20, 2**28))
    for tree, lifted in (([small], 8 * 16 * 8 * 256), ([small, large], None)):
        (found,) = settings.settings(tree, (8,), [4], [dq.Ring()])
        options = {"topology": dq.Ring(), "min_bucket_size": lifted}
        assert found == dq.Compression(dq.DynamiQ(bits=4), **options)
    tiny = [jax.ShapeDtypeStruct((9,), jnp.float32)]
    assert settings.settings(tiny, (8,), [4], [dq.Ring()]) == []


def test_every_leaf_of_a_repeated_tree_depends_on_the_repetition_before():
    """Else XLA could reduce it once and for all."""
    runs = []

    def count(x):
        def add(y):
            runs.append(y.shape)
            return np.asarray(y) + 1

        return jax.pure_callback(add, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(()), "c": jnp.zeros(4)}
    work = lambda x: jax.tree.map(count, x)
    result = jax.jit(timing.repeat_on_device(work, 3))(tree)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, jnp.ones_like(x)), result)
    assert sorted(runs) == sorted([x.shape for x in tree.values()] * 3)


def test_leaves_of_a_tree_have_their_shapes_and_dtypes():
    mesh = all_reduce.make_mesh(jax.devices()[:2])
    leaves = floating_leaves(TREE)
    assert [x.shape for x in leaves] == [(600, 500), (500,), (3, 5)]
    data = settings._gradients(mesh, leaves)
    assert [(x.shape, x.dtype) for x in data] == [((2, *x.shape), x.dtype) for x in leaves]
    assert all(np.ptp(np.asarray(x, np.float32)) > 0 for x in data)
    with pytest.raises(ValueError, match="none of 1 leaves has floating-point numbers"):
        floating_leaves({"step": TREE["step"]})


# --- Files ----------------------------------------------------------------------------------------


def test_model_trees_keep_names_shapes_dtypes_and_order(tmp_path):
    """The order decides which leaves share a bucket."""
    params = {"layers": [{"w": jnp.ones((70 + i, 1000), jnp.bfloat16)} for i in range(12)]}
    params |= {"b": jnp.ones(3), "z": jax.ShapeDtypeStruct((), jnp.int32)}
    save_model_tree(tmp_path / "model.json", params)
    found = load_model_tree(tmp_path / "model.json")
    expected = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in expected]
    assert [*found] == names and names[0] == "b" and names[1] == "layers/0/w"
    types = [(x.shape, x.dtype) for _, x in expected]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(found)] == types
    buckets = [
        [(row.bucket, row.route) for row in dq.explain(tree, 2, verbose=False).rows]
        for tree in (params, found)
    ]
    assert buckets[0] == buckets[1]
    save_model_tree(tmp_path / "alike.json", {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(4)})
    assert [*load_model_tree(tmp_path / "alike.json")] == ["['a']['b']", "['a/b']"]


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        ("[1", "is not JSON"),
        ("{}", "holds no leaves"),
        ('{"w": [[3, -4], "float32"]}', "leaf 'w' is"),
        ('{"w": [[3, 4]]}', "leaf 'w' is"),
        ('{"w": [[3, 4], "object"]}', "the dtype has to be one of numbers"),
        ('{"w": [[3, 4], null]}', "the dtype has to be one of numbers"),
        ('{"w": ["", "float32"]}', "the shape has to be a list of integers"),
        ('{"w": [[true], "float32"]}', "the shape has to be a list of integers"),
        (f'{{"w": [[0, {10**23}], "float32"]}}', "it has more than 9223372036854775807 bytes"),
        (f'{{"w": [[{2**31}, {2**31}], "float32"]}}', "it has more than 9223372036854775807 bytes"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_model_tree_is_refused(tmp_path, held, complaint):
    (tmp_path / "model.json").write_text(held)
    with pytest.raises(ValueError, match=complaint) as refused:
        load_model_tree(tmp_path / "model.json")
    assert "as save_model_tree writes it" in str(refused.value)


class TestExample:
    def test_options_make_the_request(self):
        expected = dq.Compression(dq.DynamiQ(bits=4), topology=dq.Direct())
        assert train_llm.choose("dynamiq", 4.0, "direct") == ("dynamiq", expected)
        assert train_multihost.choose(4.0) == dq.Compression(dq.DynamiQ(bits=4))

    def test_what_it_cannot_train_with_is_refused(self):
        with pytest.raises(typer.BadParameter, match="'mxfp8': choose one of dynamiq, bf16"):
            train_llm.choose("mxfp8", 5.0, "ring")
        for choose in (train_multihost.choose, lambda b: train_llm.choose("dynamiq", b, "ring")):
            with pytest.raises(typer.BadParameter, match=r"--bits 0.0: .*bits=0.0"):
                choose(0.0)
