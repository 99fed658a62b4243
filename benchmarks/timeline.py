"""Where the milliseconds of a training step go: a table and a picture of JAX's profile.

    python benchmarks/hosts.py --hosts 2 --rate 25gbit --gpus 1 -- \
      python benchmarks/step_time.py --model 1b --ways zero-pipeline:5/2.5 --profile runs/profile
    python benchmarks/timeline.py runs/profile --picture step.png

`step_time.py --profile` keeps a trace of three steps for each way, and beside it the file
`COLLECTIVES`, which says of each collective whether it crosses hosts and how many bytes it moves. A
collective is one of three kinds:

* *payload*: it crosses hosts;
* *light*: it crosses hosts, and moves at most `LIGHT` bytes, as the sum of statistics does;
* *inside*: it stays inside of a host.

The table counts the first GPU of each host. *no payload* is the time in which no payload is on the
network: what a step takes beyond the time of the wire.
"""

import gzip
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

COLLECTIVES = "collectives.json"
LIGHT = 2**21
"""Bytes; the statistics of a layer of 60 M coordinates take half a megabyte."""
KINDS = ("computes", "payload", "light", "inside")
_OPS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8}
"""Bytes of a number; 4 for all others."""

Spans = list[tuple[float, float]]
"""(start, end) of each event, in ms."""


# --- The compiled program -------------------------------------------------------------------------


def collectives_of(text: str, devices_per_host: int) -> dict[str, dict[str, Any]]:
    """The collectives of a compiled program, by name: whether each crosses hosts, and its bytes.

    A profile has the names of asynchronous operations, which call a computation with a collective.

    Args:
      text: the program as `as_text` of a compiled function prints it.
      devices_per_host: devices are numbered host by host.
    """
    found: dict[str, dict[str, Any]] = {}
    within: dict[str, dict[str, Any]] = {}  # by computation, which an asynchronous one calls
    computation = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        if match := re.match(rf"\s*(?:ROOT )?%?([\w.\-]+) = (.*?)\s(?:{_OPS})(?:-start)?\(", line):
            groups = _groups(line)
            hosts = [{device // devices_per_host for device in group} for group in groups]
            crosses = not groups or any(len(own) > 1 for own in hosts)
            facts = {"crosses": crosses, "bytes": _largest(match[2])}
            found[_plain(match[1])] = within[computation] = facts
    for name, called in re.findall(r"%?([\w.\-]+) = .*? async-start\(.*calls=%?([\w.\-]+)", text):
        if called in within:
            found[_plain(name)] = within[called]
    return found


def _groups(line: str) -> list[list[int]]:
    """The devices that talk to each other, from an instruction's text; nothing means all."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return [list(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [
            list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
    # From JAX 0.12 a mesh of named sizes, in the order of devices, and the axes of a group.
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(.*?)'=(\d+)", named[1])}
        inside = [list(sizes).index(name) for name in re.findall(r"'(.*?)'", named[2])]
        devices = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
        last = range(devices.ndim - len(inside), devices.ndim)
        size = math.prod(devices.shape[axis] for axis in inside)
        return np.moveaxis(devices, inside, [*last]).reshape(-1, size).tolist()
    # A compact form: [groups,size]<=[shape]T(order), the devices of a shape in an order of axes.
    compact = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if compact is None:
        return []
    sizes, shape = (tuple(map(int, x.split(","))) for x in compact.groups()[:2])
    devices = np.arange(math.prod(shape)).reshape(shape)
    if compact[3]:
        devices = devices.transpose(tuple(map(int, compact[3].split(","))))
    return devices.reshape(sizes).tolist()


def _largest(shapes: str) -> int:
    """The bytes of the largest array in an instruction's type."""
    sizes = [0]
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        sizes.append(math.prod(map(int, filter(None, dims.split(",")))) * _BYTES.get(dtype, 4))
    return max(sizes)


# --- The trace ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """The events of one step on one GPU, in ms from its beginning."""

    ms: float
    spans: dict[str, Spans]
    """By kind."""

    def busy(self, *kinds: str) -> float:
        """The ms in which at least one event of these kinds runs."""
        return length(union(span for kind in kinds for span in self.spans[kind]))


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The time of these spans as spans that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """The sum of all lengths."""
    return sum(end - start for start, end in spans)


def read_step(trace: Path, collectives: dict[str, dict[str, Any]]) -> Step:
    """The second step of a trace, on the first GPU.

    Raises:
      ValueError: the trace has no GPU, or fewer than two steps.
    """
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    gpus = sorted(pid for pid, name in named.items() if name.startswith("/device:GPU"))
    own = [e for e in events if e.get("ph") == "X" and e["pid"] in gpus[:1]]
    # Copies from the host do not tell of steps: those of later ones may run beside the first.
    own = [e for e in own if not e["name"].startswith("MemcpyH2D")]
    if not own:
        raise ValueError(f"{trace}: no GPU computes in this trace; profile a step on GPUs")
    own.sort(key=lambda e: e["ts"])
    # A step begins where the kernel that begins the trace stands again.
    first = [e["ts"] for e in own if _same(e, own[0])]
    if len(first) < 2:
        raise ValueError(f"{trace}: there is one step in this trace; profile two or more")
    end = first[2] if len(first) > 2 else math.inf
    steps = [e for e in own if first[1] <= e["ts"] < end]
    spans: dict[str, Spans] = {kind: [] for kind in KINDS}
    for e in steps:
        start = (e["ts"] - first[1]) / 1e3
        spans[_kind(e, collectives)].append((start, start + e["dur"] / 1e3))
    return Step(max(stop for kind in spans.values() for _, stop in kind), spans)


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    op = lambda e: (e["name"], e.get("args", {}).get("cuda_graph_node_id"), _op(e))
    return op(a) == op(b)


def _op(event: dict[str, Any]) -> str:
    return _plain(event.get("args", {}).get("hlo_op", ""))


def _plain(name: str) -> str:
    """An instruction's name, the same for the beginning and the end of a collective."""
    return re.sub(r"-(start|done)", "", name)


def _kind(event: dict[str, Any], collectives: dict[str, dict[str, Any]]) -> str:
    """The kind of an event; a collective that the program does not list counts as payload."""
    if "nccl" not in event["name"].lower():
        return "computes"
    known = collectives.get(_op(event), {"crosses": True, "bytes": LIGHT + 1})
    if not known["crosses"]:
        return "inside"
    return "payload" if known["bytes"] > LIGHT else "light"


# --- Table and picture ----------------------------------------------------------------------------


def table(steps: dict[str, Step]) -> str:
    """Markdown: ms per step, by host."""
    head = ["", "step", *KINDS, "idle collectives", "no payload"]
    rows = [head, ["---"] * len(head)]
    for name, step in steps.items():
        busy = step.busy("payload", "light", "inside")
        own = [step.busy(kind) for kind in KINDS]
        figures = [step.ms, *own, step.ms - busy, step.ms - own[1]]
        rows.append([name, *(f"{figure:.1f}" for figure in figures)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(steps: dict[str, Step], picture: Path) -> None:
    """One row of bars for each kind and step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(KINDS, ("#8c8c8c", "#1f77b4", "#d62728", "#ff7f0e"), strict=True))
    figure, rows = plt.subplots(
        len(steps), 1, figsize=(10, 1.7 * len(steps) + 0.6), sharex=True, squeeze=False
    )
    for row, (name, step) in zip(rows[:, 0], steps.items(), strict=True):
        for place, kind in enumerate(reversed(KINDS)):
            bars = [(start, end - start) for start, end in union(step.spans[kind])]
            row.broken_barh(bars, (place - 0.4, 0.8), color=colours[kind])
        row.set_yticks(range(len(KINDS)), reversed(KINDS))
        row.set_title(f"{name}: {step.ms:.0f} ms", loc="left", fontsize=10)
    rows[-1, 0].set_xlabel("ms from the beginning of the step")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def read_folder(folder: Path) -> dict[str, Step]:
    """The steps of all ways in a folder of profiles, each of its first host."""
    steps = {}
    for path in sorted(folder.rglob(COLLECTIVES)):
        traces: Sequence[Path] = sorted(path.parent.rglob("*.trace.json.gz"))
        if traces:
            steps[path.parent.name] = read_step(traces[0], json.loads(path.read_text()))
    return steps


def main(
    folders: Annotated[list[Path], typer.Argument(help="of step_time.py --profile")],
    picture: Annotated[Path | None, typer.Option(help="a PNG or SVG file")] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", help="of each step, in the place of its way")
    ] = None,
) -> None:
    """Prints the table; draws."""
    steps: dict[str, Step] = {}
    for folder in folders:
        own = read_folder(folder)
        if not own:
            raise typer.BadParameter(f"{folder} holds no profile: run step_time.py --profile first")
        several = len(folders) > 1
        for way, step in own.items():
            steps[f"{folder.name}, {way}" if several and folder.name != way else way] = step
    if labels:
        if len(labels) != len(steps):
            raise typer.BadParameter(f"{len(labels)} labels for {len(steps)} steps: {[*steps]}")
        steps = dict(zip(labels, steps.values(), strict=True))
    print(table(steps))
    if picture:
        draw(steps, picture)


if __name__ == "__main__":
    typer.run(main)
