"""The page of ``train_llm.py --report``: its numbers are those of the runs."""

from html.parser import HTMLParser

import jax
import llm_report
import numpy as np
import pytest
import train_llm
from workers import auto_mesh


class Cells(HTMLParser):
    """Rows of the table, and what the page would fetch."""

    def __init__(self):
        super().__init__()
        self.rows, self.fetched, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        self.fetched += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self.inside:
            self.rows[-1].append(data)
            self.inside = False


def result(method, loss, wire_bytes, **fields):
    seconds, losses = [2.0, 0.1, 0.3, 0.2], [5.0, 4.0, 3.5, 3.0]
    return train_llm.Result(
        method=method, validation_loss=loss, wire_bytes=wire_bytes, bits_per_coord=5.0,
        seconds=seconds, losses=losses, **fields,
    )  # fmt: skip


def parsed(results, title="tiny <8>"):
    cells = Cells()
    cells.feed(llm_report.page(results, title))
    assert not cells.fetched
    head, *rows = cells.rows
    assert tuple(head) == llm_report.COLUMNS
    return rows


def test_numbers_are_those_of_the_runs():
    runs = [
        result("dynamiq", 2.02, 1_160_000, replicas=14, replicas_differ=0),
        result("bf16", 2.0, 3_700_000, replicas=14, replicas_differ=3),
        result("f32", 1.99, float("nan")),
    ]
    steps = ["2000.0", "200.0", "280.0"]  # the first; 50th, 90th percentile of 100, 200, 300
    assert parsed(runs) == [
        ["dynamiq", "2.0200", "+1.00%", "1,160.0", *steps, "14, all equal"],
        ["bf16", "2.0000", "+0.00%", "3,700.0", *steps, "14, 3 DIFFER"],
        ["f32", "1.9900", "-0.50%", "–", *steps, "–"],
    ]


def test_without_bf16_nothing_is_compared_with_it():
    only = result("dynamiq", 2.0, 1e6)
    only.seconds, only.losses = [2.0], [5.0]
    assert parsed([only])[0][1:3] == ["2.0000", "–"]


def test_a_run_that_diverged_is_drawn_as_far_as_it_went():
    diverged = result("bf16", float("nan"), 1e6)
    diverged.losses = [5.0, float("inf"), float("nan")]
    page = llm_report.page([diverged], "tiny")
    assert 'points="50.0,' in page and page.count(",nan") == page.count("inf") == 0
    assert parsed([diverged])[0][1] == "nan"


@pytest.mark.parametrize("wrong", [(), (3,), (0, 5)])
def test_a_replica_that_differs_is_counted(wrong):
    """The first copy is what others are compared with: if it differs, all others do."""
    mesh = auto_mesh()
    whole = jax.NamedSharding(mesh, jax.P())
    copies = [np.float32([1, 2, 3]) for _ in range(mesh.size)]
    for place in wrong:
        copies[place] = np.float32([1, 2, 4 + place])
    devices = mesh.devices.flat
    placed = [jax.device_put(copy, device) for copy, device in zip(copies, devices, strict=True)]
    leaf = jax.make_array_from_single_device_arrays((3,), whole, placed)
    shards = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
    expected = mesh.size - 1 if 0 in wrong else len(wrong)
    params = {"leaf": leaf, "shards": shards}
    assert train_llm.compare_replicas(params) == (mesh.size - 1, expected)


def test_the_picture_of_a_comparison_has_the_noise(monkeypatch, tmp_path):
    """A band around f32; one run alone has nothing to compare."""
    drawn = []
    monkeypatch.setattr(train_llm.Figure, "savefig", lambda self, file, **_: drawn.append(self))
    both = [result("dynamiq", 2.0, 5e5), result("f32", 2.1, 4e6)]
    for runs, noise in ((both, 1.0), (both, None), (both[:1], 1.0)):
        train_llm.plot(runs, "tiny", tmp_path / "a.png", noise)
    bands = [figure.axes[1].patches for figure in drawn]
    assert [len(found) for found in bands] == [1, 0, 0]
    assert [bands[0][0].get_y(), bands[0][0].get_height()] == [-1, 2]
