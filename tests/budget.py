"""Costs of each file of tests: programs compiled and seconds of a core, held by `budget.json`.

While tests run, `Census` counts per file; `conftest` fails a file that exceeds its budget, and
``--census FILE`` keeps the counts. ``python tests/budget.py FILE`` prints them as a table for
BUILD.md, and with ``--renew`` makes them the budget of the files that were counted, with room for
what differs between runs: a file also pays for small programs that another file has left behind
when it ran in the same process, and processors differ.
"""

import json
import math
import sys
import time
from pathlib import Path

FILE = Path(__file__).with_name("budget.json")
NEW_FILE = {"programs": 60, "seconds": 25}
"""The budget of a file that `budget.json` does not name."""

PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}


class Census:
    """Counts of one process: tests, programs, and seconds of all its threads, by file."""

    def __init__(self):
        self.files: dict[str, dict[str, float]] = {}
        self._file = None

    def start(self, file: str, tests: int):
        """Counts all that follows for this file, of so many tests."""
        if not self.files:
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._note)
        columns = dict.fromkeys(("programs", *PHASES.values(), "seconds"), 0)
        self.files[file] = {"tests": tests} | columns
        self._file, self._since = file, time.process_time()

    def _note(self, event, duration, **_):
        if self._file and event in PHASES:
            self.files[self._file][PHASES[event]] += duration
            self.files[self._file]["programs"] += PHASES[event] == "compiling"

    def stop(self) -> str | None:
        """Ends the file, and tells by how much it exceeds its budget, if it does."""
        file, self._file = self._file, None
        assert file is not None
        counts = self.files[file]
        counts["seconds"] += time.process_time() - self._since
        return excess(file, counts, json.loads(FILE.read_text()))


def excess(file: str, counts, budgets: dict) -> str | None:
    """An error for a file of which ``counts`` exceed the budget."""
    budget = budgets.get(file, NEW_FILE)
    over = [
        f"{counts[k]:.0f} {k} (budget {most})" for k, most in budget.items() if counts[k] > most
    ]
    if not over:
        return None
    return (
        f"{file} took {' and '.join(over)}: share programs between tests or move some of them to "
        "tests/release/; if it is worth it, raise tests/budget.json"
    )


def renewed(census: dict, before: dict) -> dict:
    """The budget under which a run of this census passes with room to spare.

    Files that it did not count keep what they had, as long as they are there.
    """
    kept = {file: own for file, own in before.items() if FILE.with_name(file).exists()}
    counted = {
        file: {
            "programs": 10 * math.ceil(1.2 * counts["programs"] / 10) + 30,
            "seconds": 5 * math.ceil(2 * counts["seconds"] / 5) + 10,
        }
        for file, counts in census.items()
    }
    return dict(sorted((kept | counted).items()))


def table(census: dict) -> str:
    """Markdown, one row per file, the dearest first, and their sum."""
    columns = ("tests", "programs", "tracing", "lowering", "compiling", "seconds")
    rows = sorted(census.items(), key=lambda item: -item[1]["seconds"])
    rows.append(("all", {name: sum(row[name] for _, row in rows) for name in columns}))
    lines = ["| file | " + " | ".join(columns) + " |", "|---" * 7 + "|"]
    for name, counts in rows:
        lines.append(f"| {name} | " + " | ".join(f"{counts[key]:.0f}" for key in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    print(table(found))
    if "--renew" in sys.argv:
        budget = renewed(found, json.loads(FILE.read_text()))
        FILE.write_text(json.dumps(budget, indent=1) + "\n")
