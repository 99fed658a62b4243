"""Goodput: how much of a run's time makes progress while hosts are killed, and what the rest is.

    python benchmarks/goodput.py --minutes 10 --every 60

Three hosts of `hosts.py` run ``examples/train_multihost.py`` under ``dynamiq-jax run``. At equal
distances a fault happens to the next host: its process is killed, or is stopped, or the process and
its supervisor are killed, which starts again after ``--away`` seconds. Numbers land in
``OUT/goodput.json``, and their picture in ``OUT/goodput.png``.

The clock starts with the first step after a fault that does not count, which fills the cache of
compiled programs. `KINDS` says what time is counted as. ``--hosts 2 --gpus 1
--model 125m`` gives each host a GPU instead of a virtual CPU device. Where no step comes, it ends
with the ends of the hosts' logs. It takes root, iproute2 and util-linux, as `hosts.py` does.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from hosts import Hosts

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_multihost.py"
PORT = 29500

TRAINING = f"""
import runpy, sys
sys.argv[0] = {str(EXAMPLE)!r}
sys.path.insert(0, {str(EXAMPLE.parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The example."""

CACHE_OF_ALL = """
import sys
from jax._src import compiler, distributed
write, state = compiler._cache_write, distributed.global_state
def write_of_every_process(*args, **options):
    own, state.process_id = state.process_id, 0
    try:
        write(*args, **options)
    finally:
        state.process_id = own
compiler._cache_write = write_of_every_process
"""
"""On CPU each process has programs of its own, and JAX keeps those of process 0 alone. On GPUs all
processes have the same key in the cache, and need no such change."""

KINDS = {
    "steps": "steps that count",
    "repeated": "steps since the last checkpoint, which are repeated",
    "detection": "from the fault until all processes have ended",
    "gathering": "until the next processes start",
    "start": "Python, imports, and JAX's meeting",
    "restore": "placing and restoring the state",
    "compile": "loading or compiling the step, and the first step beyond the median one",
}
"""{name: what the time is}, in the order in which they follow a step."""

COLORS = ["#2a9d5c", "#e9c46a", "#d62828", "#f4a261", "#457b9d", "#8d99ae", "#6d597a"]


class Watched:
    """Supervisors on all hosts, and the faults."""

    def __init__(self, made: Hosts, folder: Path, options: list[str], own: list[str]) -> None:
        self.made, self.folder = made, folder
        hosts = ",".join(f"{made.address(i)}:{PORT}" for i in range(made.n))
        training = [
            sys.executable, "-u", "-c", (TRAINING if made.gpus else CACHE_OF_ALL + TRAINING),
            "--steps", "1000000", "--batch-size", "1", "--checkpoint-dir", str(folder / "kept"),
            "--coordinator", "{coordinator}", "--num-processes", "{processes}",
            "--process-id", "{process_id}", "--out", str(folder / "runs"), *own,
        ]  # fmt: skip
        self.command = ["--hosts", hosts, *options, "--", *training]
        self.env = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent), *sys.path[1:]]),
        }
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for i in range(made.n):
            self.start(i)

    def start(self, i: int) -> None:
        """Starts the supervisor of a host; its log and events go on."""
        run = [sys.executable, "-m", "dynamiq_jax", "run", "--host-id", str(i)]
        run += ["--events", str(self.events_file(i)), *self.command]
        keep = ["sh", "-c", f'exec "$@" >>"{self.folder}/host{i}.log" 2>&1', "sh"]
        self.processes[i] = self.made.start(i, keep + run, env=self.env)

    def events_file(self, i: int) -> Path:
        """Where the supervisor of a host writes what happens."""
        return self.folder / f"host{i}.events"

    def events(self) -> list[dict[str, Any]]:
        """All events of all hosts, by time."""
        lines = []
        for i in range(self.made.n):
            with contextlib.suppress(FileNotFoundError):
                lines += self.events_file(i).read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda event: event["time"])

    def ends(self, most: int = 3000) -> str:
        """The last characters of all logs."""
        files = [self.folder / f"host{i}.log" for i in range(self.made.n)]
        texts = [(f, f.read_text(errors="replace") if f.exists() else "") for f in files]
        return "\n".join(f"--- {file}:\n{text[-most:]}" for file, text in texts)

    def training(self, i: int) -> int | None:
        """The process that trains on a host, by the newest start that its supervisor tells of."""
        pids = [e["pid"] for e in self.events() if e["host"] == i and e["event"] == "start"]
        return pids[-1] if pids else None

    def fault(self, name: str, i: int, away: float) -> None:
        """Makes a fault happen to a host."""
        pid = self.training(i)
        if name == "host killed":
            self.made.kill(i)
            self.processes[i].wait()
            time.sleep(away)
            self.start(i)
        elif pid:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the next one comes
                os.kill(pid, signal.SIGKILL if name == "process killed" else signal.SIGSTOP)


PATIENCE = 600.0
"""Seconds until the first steps: without a cache one process tunes and compiles for all GPUs, on
cores that other jobs may use."""
FAULTS = "process killed", "host killed", "process stopped"


def until_steps(watched: Watched, generation: int = 1, patience: float = PATIENCE) -> float:
    """Waits for the first steps of a generation; returns when the second one began.

    It prints what happens meanwhile.

    Raises:
      RuntimeError: none came, with the ends of all logs.
    """
    began, told = time.time(), []
    while time.time() < began + patience:
        events = watched.events()
        news = [e for e in events if e["event"] != "step" and e["time"] > began and e not in told]
        for event in news:
            what = event.get("reached") or event.get("cause") or ""
            text = f"host {event['host']}: {event['event']} {event['generation']} {what}"
            print(f"{event['time'] - began:6.1f} s  {text}", flush=True)
        told += news
        steps = [e for e in events if e["event"] == "step" and e["host"] == 0]
        times = [event["time"] for event in steps if event["generation"] >= generation]
        if len(times) > 1:
            print(f"{times[1] - began:6.1f} s  host 0: the second step", flush=True)
            return times[1]
        if over := [i for i, process in watched.processes.items() if process.poll() is not None]:
            raise RuntimeError(f"supervisors {over} have ended\n{watched.ends()}")
        time.sleep(0.2)
    raise RuntimeError(f"no second step within {patience:g} s (--patience)\n{watched.ends()}")


def segments(
    events: list[dict[str, Any]], faults: list[dict[str, Any]], began: float, until: float
) -> list[dict[str, Any]]:
    """The stretches of time from ``began`` to ``until``: kind, start, end, generation."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    stages: dict[tuple[int, str], float] = {}
    steps: dict[int, dict[int, float]] = defaultdict(dict)
    for event in events:
        number, when = event["generation"], event["time"]
        if event["event"] == "start":
            starts.setdefault(number, when)
        elif event["event"] == "end":
            ends[number] = when  # the last host's
        elif event["event"] == "stage":
            stages[number, event["reached"]] = when  # the last host's
        elif event["event"] == "step":
            steps[number].setdefault(int(event["reached"]), when)  # the first host's
    found = []
    for number, after in itertools.zip_longest(sorted(starts), sorted(starts)[1:]):
        end = ends.get(number, until)
        hit = min((f["time"] for f in faults if starts[number] <= f["time"] <= end), default=end)
        begun = steps[number]
        joined = stages.get((number, "joined"), hit)
        restored = stages.get((number, "restored"))
        first = min(begun.values(), default=hit)
        times = sorted(begun.items())
        each = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(times)]
        median = statistics.median(each[1:] or each or [0.0])
        restored = first if restored is None else min(restored, first)
        compiled = first + max((each or [0.0])[0] - median, 0)
        # The next generation repeats the steps from its own first one on.
        again = min(steps[after], default=None) if after else None
        kept = hit if again is None else next((t for step, t in times if step >= again), hit)
        marks = [("start", starts[number]), ("restore", joined), ("compile", restored),
                 ("steps", compiled), ("repeated", kept), ("detection", hit),
                 ("gathering", end), (None, starts.get(after, until))]  # fmt: skip
        for (kind, a), (_, b) in itertools.pairwise(marks):
            a, b = (min(max(t, began), until) for t in (a, b))
            if b > a:
                found.append({"kind": kind, "start": a, "end": b, "generation": number})
    return found


def summary(found: list[dict[str, Any]], faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of time by kind, and seconds of each recovery."""
    total = sum(row["end"] - row["start"] for row in found)
    seconds = dict.fromkeys(KINDS, 0.0)
    for row in found:
        seconds[row["kind"]] += row["end"] - row["start"]
    recoveries = []
    for fault in faults:
        later = [row for row in found if row["kind"] == "steps" and row["start"] > fault["time"]]
        if later:
            seconds_to_step = later[0]["start"] - fault["time"]
            recoveries.append({"fault": fault["name"], "seconds": seconds_to_step})
    return {
        "seconds": total, "goodput": seconds["steps"] / total,
        "share": {kind: spent / total for kind, spent in seconds.items()},
        "seconds per fault": {
            kind: spent / max(len(faults), 1) for kind, spent in seconds.items() if kind != "steps"
        },
        "recoveries": recoveries,
    }  # fmt: skip


def draw(found: list[dict[str, Any]], faults: list[dict[str, Any]], said: Any, file: Path) -> None:
    """A line of time, and below it the seconds of each recovery by kind."""
    from matplotlib.figure import Figure

    began, colors = found[0]["start"], dict(zip(KINDS, COLORS, strict=True))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS:
        spans = [(r["start"] - began, r["end"] - r["start"]) for r in found if r["kind"] == kind]
        label = f"{kind}: {100 * said['share'][kind]:.1f}%"
        axes.broken_barh(spans, (0, 1), facecolors=colors[kind], label=label)
    for fault in faults:
        axes.annotate(fault["name"], (fault["time"] - began, 1), (0, 3), rotation=40, fontsize=7,
                      textcoords="offset points")  # fmt: skip
    axes.set(yticks=[], xlabel="seconds", ylim=(0, 1.9))
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.set_title(f"{100 * said['goodput']:.1f}% of the time made progress", loc="left")
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    figure.savefig(file, dpi=120)


def main(
    hosts: Annotated[int, typer.Option(min=2)] = 3,
    minutes: Annotated[float, typer.Option(help="how long")] = 10,
    every: Annotated[float, typer.Option(help="seconds between two faults")] = 60,
    away: Annotated[float, typer.Option(help="seconds until a killed host is back")] = 5,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="steps")] = 10,
    copy_every: Annotated[int, typer.Option(min=1, help="steps, as of train_multihost.py")] = 1,
    silence: Annotated[float, typer.Option(help="seconds, as of dynamiq-jax run")] = 3,
    wait: Annotated[float, typer.Option(help="seconds, as of dynamiq-jax run")] = 3,
    ready: Annotated[str, typer.Option(help="modules, as of dynamiq-jax run")] = "",
    kinds: Annotated[str, typer.Option(help="faults, by commas")] = ",".join(FAULTS),
    gpus: Annotated[
        int | None, typer.Option(min=1, help="of each host; default: a virtual CPU device")
    ] = None,
    model: Annotated[str, typer.Option(help="as of train_multihost.py")] = "tiny",
    rate: Annotated[str | None, typer.Option(help="of each host's NIC, as of hosts.py")] = None,
    patience: Annotated[float, typer.Option(help="seconds until the first steps")] = PATIENCE,
    warm: Annotated[bool, typer.Option(help="fill the compilation cache first")] = True,
    out: Annotated[Path, typer.Option(file_okay=False)] = Path("runs/goodput"),
) -> None:
    """Trains on several hosts of this machine while they are killed, and tells what it costs."""
    names = kinds.split(",")
    if unknown := set(names) - set(FAULTS):
        raise typer.BadParameter(f"--kinds {sorted(unknown)}: give some of {', '.join(FAULTS)}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    folder, faults = out.absolute(), []
    options = ["--silence", f"{silence:g}", "--wait", f"{wait:g}"]
    options += ["--ready", ready] if ready else []
    own = ["--model", model, "--checkpoint-every", str(checkpoint_every)]
    own += ["--copy-every", str(copy_every)]
    with Hosts(hosts, rate=rate, devices=None if gpus else 1, gpus=gpus) as made:
        watched = Watched(made, folder, options, own)
        began = until_steps(watched, patience=patience)
        if warm:  # one fault that does not count, after which the cache is full
            time.sleep(5)
            watched.fault("process killed", 0, away)
            began = until_steps(watched, 2, patience)
        for number in range(int(60 * minutes / every)):
            time.sleep(max(began + (number + 1) * every - every / 2 - time.time(), 0))
            name, victim = names[number % len(names)], number % hosts
            print(f"{time.time() - began:6.1f} s  host {victim}: {name}", flush=True)
            faults.append({"time": time.time(), "name": name, "host": victim})
            watched.fault(name, victim, away)
        time.sleep(max(began + 60 * minutes - time.time(), 0))
        until, events = time.time(), watched.events()
    found = segments(events, faults, began, until)
    said = summary(found, faults)
    record = said | {"faults": faults, "segments": found, "hosts": hosts, "every": every,
                     "checkpoint_every": checkpoint_every, "copy_every": copy_every}  # fmt: skip
    (folder / "goodput.json").write_text(json.dumps(record, indent=1))
    draw(found, faults, said, folder / "goodput.png")
    print(f"{100 * said['goodput']:.1f}% of {said['seconds']:.0f} s made progress")
    for kind, spent in said["seconds per fault"].items():
        print(f"{kind:10} {spent:6.2f} s per fault: {KINDS[kind]}")
    for recovery in said["recoveries"]:
        print(f"{recovery['fault']}: a step that counts after {recovery['seconds']:.1f} s")
    print(f"{out}/goodput.json, {out}/goodput.png")


if __name__ == "__main__":
    typer.run(main)
