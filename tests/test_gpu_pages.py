"""`make test-gpu-pages`: which rows it has, and how they end."""

import sys
import time
from pathlib import Path

import pytest
from test_recipes import RECIPES

sys.path.append(str(Path(__file__).parent / "gpu"))
import gpu_pages as pages

TWO = pages.Machine(2, virtual=True)


def python(code):
    """A row of one program."""
    return pages.Row("row", [[sys.executable, "block.py"]], code)


def test_every_recipe_and_example_has_a_row():
    made = {row.name: row for row in pages.rows(TWO)}
    assert {row[7:] for row in made if row.startswith("recipe ")} == RECIPES.keys()
    scripts = pages.ROOT.joinpath("examples").glob("*.py")
    no_rows = ("llm_", "multihost_", "train_ray")  # modules of others, and what needs a cluster
    runnable = {s.name for s in scripts if not s.stem.startswith(no_rows)}
    assert {row[8:] for row in made if row.startswith("example ")} == runnable


def test_commands_of_pages_have_rows_unless_they_are_for_hosts():
    made = {row.name: row.commands[0] for row in pages.commands()}
    assert any("bench all-reduce" in name for name in made)
    assert not [name for name in made if "hosts.py" in name or "10.0.0." in name or "FILE" in name]
    assert all(command[0] == sys.executable for command in made.values())
    scripts = [c[1] for c in made.values() if c[1] not in ("-m", "block.py")]
    assert all(Path(script).exists() for script in scripts)


def test_rows_that_cannot_run_say_why():
    alone = {row.name: row.reason for row in pages.rows(pages.Machine(1, virtual=True))}
    assert alone["recipe grid"] == "needs an even number of devices, here are 1"
    assert alone["two hosts four_hosts.py"] == "needs 2 devices, here is 1"
    assert alone["README.md"] == ""
    assert pages.missing("import jax, no_such_module.part") == "no_such_module"
    assert pages.run(pages.Row("row", [], "", "needs rain"), TWO, 1) == ("-", 0, "needs rain")


@pytest.mark.parametrize("code, status", [("print('well')", "0"), ("exit('ill')", "1")])
def test_a_row_ends_with_its_status_and_last_words(code, status):
    ended = pages.run(python(f"print('first')\n{code}"), TWO, 60)
    assert ended[::2] == (status, {"0": "well", "1": "ill"}[status])


def test_a_row_is_ended_at_its_limit():
    start = time.monotonic()
    ended = pages.run(python("import time\nprint('on', flush=True)\ntime.sleep(60)"), TWO, 3)
    assert ended.status == "late" and ended.last == "on" and time.monotonic() - start < 30


def test_pages_find_the_devices_of_the_machine():
    flag = "xla_force_host_platform_device_count="
    ended = pages.run(python(f"import os\nprint(os.environ['XLA_FLAGS'], '{flag}8')"), TWO, 60)
    assert ended.last == f"--{flag}2 {flag}2"
