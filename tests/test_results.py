"""`make results`: what scripts measured becomes rows of small files; failures change none."""

import json
import sys

import pytest
import results

ROW = {"step_ms": 190.04, "p10_ms": 188.0, "p90_ms": 191.26}


def test_steps_replace_those_of_their_links_and_cards():
    kept = {"runs": [{"links": "NVLink", "cards": "2 × H200", "ms": {"dp:5": [1], "none": [2]}}]}
    found = {"runs": [{"about": {"jax": "0"}, "rows": [ROW | {"method": "dp:5"}]}]}
    results.steps(kept, found, "command", "NVLink; 2 × H200")
    results.steps(kept, found, "command", "25 Gb/s; 2 × H200")
    near, far = kept["runs"]
    assert near["ms"] == {"dp:5": [190.0, 188.0, 191.3], "none": [2]}
    assert far["ms"] == {"dp:5": [190.0, 188.0, 191.3]} and far["command"] == "command"


def test_all_reduces_stay_in_their_place():
    rows = [{"links": links, "cards": "2", "size": "1"} for links in "aab"]
    kept, found = (
        {"rows": rows},
        {"about": {}, "rows": [{"size": "4"}, {"size": "5"}, {"size": "6"}]},
    )
    results.all_reduces(kept, found, "command", "a; 2")
    assert [(row["links"], row["size"]) for row in kept["rows"]] == [
        ("a", "4"),
        ("a", "5"),
        ("a", "6"),
        ("b", "1"),
    ]


def test_losses_replace_those_of_the_same_training():
    settings = {"model": "tiny", "init": "unit", "topology": "direct", "steps": 2, "seeds": 2}
    settings |= {"learning_rate": 1.0, "method": "dynamiq:5"}
    row = {"settings": settings, "bits_per_coord": 5.004, "invocation": 0}
    row["summary"] = {"validation": {"percent": 0.1, "error": 0.02}}
    exact = row | {"settings": settings | {"method": "exact"}}
    found = {"invocations": [{"device": "cpu"}], "rows": [exact, row]}
    kept = {"rows": []}
    for _ in range(2):
        results.losses(kept, found, "command", "")
    (own,) = kept["rows"]
    assert (own["method"], own["bits"], own["percent"], own["device"]) == (
        "dynamiq:5",
        5,
        0.1,
        "cpu",
    )


@pytest.mark.parametrize("ends", [0, 1])
def test_a_failed_command_leaves_the_rows(tmp_path, monkeypatch, ends):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    (tmp_path / "own.json").write_text('{"rows": ["old"]}')
    code = "import sys; open(sys.argv[1], 'w').write('{\\\"rows\\\": [\\\"new\\\"]}'); sys.exit(%d)"
    job = results.Job("own.json", "nothing", f'X=1 python -c "{code % ends}" {{json}}')
    assert results.run(job) == (ends == 0)
    kept = json.loads((tmp_path / "own.json").read_text())["rows"]
    assert kept == [["new"], ["old"]][ends]


def test_an_unknown_table_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results.py", "--only", "stepz"])
    with pytest.raises(SystemExit):
        results.main()
    assert "no table stepz: pass some of steps," in capsys.readouterr().err
