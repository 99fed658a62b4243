r"""Losses of sharded updates with fewer bits, and of what might allow them; see training.py.

    python benchmarks/evidence/half_bit.py screen --part 0/4 --seconds 400 --out FOLDER  # GPU
    python benchmarks/evidence/half_bit.py table FOLDER/*.jsonl --json FILE

A queue is a list of rows (model, initialisation, method). ``--part 1/4`` trains every fourth row
from the second on, so that four processes share a GPU and its processor. Every row is written as
soon as it is trained, and no row starts after ``--seconds``; rows that FOLDER has when a part
starts are not trained again. ``table`` joins the rows of all parts
and compares them, seed by seed, with the exact mean.

Methods are those of training.py, and

* ``A>B/C``: sharded updates, with gradients by A in the first tenth of the steps and by B later;
* ``A|B/C``: sharded updates, with gradients of the embedding and the output head by A;
* ``A/half=B``: sharded updates that send differences of one half of the leaves in even steps, and
  of the other half in odd steps, by B; what is not sent stays in the owner's gap;
* ``A/every=B``: sharded updates that send all differences in odd steps, by B;
* ``nearest-L``: blocks of 32 with one scale of 8 bits, whose values go to the nearest of L levels;
* ``dynamiq-nearest``: DynamiQ with ``rounding="nearest"``.
"""

import itertools
import json
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import training
import typer
from jax import Array, lax
from training import EIGHT, LARGE_GROUPS, METHODS, MODELS, Task, Way

import dynamiq_jax as dq
from dynamiq_jax.methods.plain import PlainMethod

FIRST = 0.1
"""The part of the steps that `>` means."""
LEAST_SEEDS = 3
EDGES = re.compile("embed|head")


def _levels(levels: Any) -> Callable[..., Any]:
    return partial(dq.DynamiQ, dither=True, format=replace(LARGE_GROUPS, levels=levels))


def loco(bits: float, beta: float = 0.1, **options: Any) -> Any:
    """LoCo's memory around DynamiQ with dither."""
    options |= {"format": dq.Format(scale_axis="auto"), "dither": True}
    return dq.contrib.LoCo(dq.DynamiQ(bits=bits, **options), beta=beta)


METHODS |= {  # type: ignore[operator]
    "dynamiq-64": partial(dq.DynamiQ, format=LARGE_GROUPS),
    "dynamiq-dither-64-planned": partial(dq.DynamiQ, dither=True, format=LARGE_GROUPS, plan=True),
    "dynamiq-dither-64-uniform": _levels("uniform"),
    "dynamiq-dither-64-companded": _levels("companded"),
    "dynamiq-loco": loco,
    "dynamiq-loco-slow": partial(loco, beta=0.02),
    "mxfp4-loco": lambda **own: dq.contrib.LoCo(dq.contrib.MXFP4(**own)),
}
"""``64`` means groups of 64 in super-groups of 512, along the residual stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nothing(PlainMethod):
    """Sends nothing that counts: every value decodes as zero."""

    unit: ClassVar[int] = 32

    def encode(self, values: Any, noise: Any) -> tuple[Array]:
        """See `PlainMethod`."""
        return (jnp.zeros(values.size // 32, jnp.uint32),)

    def decode(self, payload: tuple[Array], size: int) -> Array:
        """See `PlainMethod`."""
        return jnp.zeros(size, jnp.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest(PlainMethod):
    """The nearest of a few levels, in units of the largest magnitude of a block.

    Its payload has a byte for every code; `by_hand` has the bits of packed ones.
    """

    levels: tuple[float, ...]
    """Magnitudes from 0 to 1."""
    block_size: int = 32

    @property
    def unit(self) -> int:
        """Chunks have whole blocks."""
        return self.block_size

    def encode(self, values: Any, noise: Any) -> tuple[Array, Array]:
        """See `PlainMethod`."""
        x = values.astype(jnp.float32).reshape(-1, self.block_size)
        top = jnp.max(jnp.abs(x), axis=1)
        octave = jnp.where(top > 1e-18, jnp.ceil(4 * jnp.log2(jnp.maximum(top, 1e-18))), -127)
        z = jnp.abs(x) / jnp.exp2(octave / 4)[:, None]
        cuts = jnp.asarray([(a + b) / 2 for a, b in itertools.pairwise(self.levels)])
        codes = jnp.searchsorted(cuts, z, method="compare_all").astype(jnp.int8)
        return octave.astype(jnp.int16), jnp.where(x < 0, -codes, codes).reshape(-1)

    def decode(self, payload: tuple[Array, Array], size: int) -> Array:
        """See `PlainMethod`."""
        octave, codes = payload
        scale = jnp.exp2(octave.astype(jnp.float32) / 4)[:, None]
        value = jnp.asarray(self.levels)[jnp.abs(codes)] * jnp.sign(codes)
        return (value.reshape(-1, self.block_size) * scale).reshape(size)


METHODS |= {  # type: ignore[operator]
    "nearest-0124": lambda **own: Nearest(levels=(0, 0.25, 0.5, 1)),
    "nearest-0123": lambda **own: Nearest(levels=(0, 1 / 3, 2 / 3, 1)),
    "nearest-lloyd": lambda **own: Nearest(levels=(0, 0.22, 0.5, 0.92)),
    "nearest-ternary": lambda **own: Nearest(levels=(0, 0.7)),
    "nearest-five": lambda **own: Nearest(levels=(0, 0.4, 0.9)),
    "nearest-eight": lambda **own: Nearest(levels=(0, 0.1, 0.2, 0.3, 0.42, 0.56, 0.74, 0.96)),
    "nearest-64": lambda **own: Nearest(levels=(0, 0.22, 0.5, 0.92), block_size=64),
    "dynamiq-nearest-64": partial(dq.DynamiQ, rounding="nearest", format=LARGE_GROUPS),
}

BY_HAND = {
    "nearest-0124": 2.75, "nearest-0123": 2.75, "nearest-lloyd": 2.75, "nearest-64": 2.69,
    "nearest-ternary": 2.1, "nearest-five": 2.42, "nearest-eight": 3.25,
}  # fmt: skip
"""Bits of `Nearest` with packed codes, and differences of 2.25 bits."""

D, G = "dynamiq-dither-axis", "dynamiq-dither-64"
OLD, NEW = "dynamiq-dither:2.5", f"{G}:2.25"

RIVALS = [
    "block-int:8", "block-int:4", "sdp4bit", "loco", "sdp4bit/block-int:4",
    "block-int:4/block-int:8/whole",
]  # fmt: skip
"""Integers by block, SDP4Bit without and with differences, LoCo, and ZeRO++."""
TINY = [
    "exact", "bf16-psum", "mxfp4", f"mxfp4/{OLD}",
    f"dynamiq:5/{OLD}", f"dynamiq-dither:4/{OLD}", f"{D}:4/{OLD}",
    f"{G}:3.5/{NEW}", f"{G}:3.25/{NEW}", f"exact/{NEW}", f"{G}:3.5/{OLD}", f"{G}:3.25/{OLD}",
    f"{D}:3.5/{OLD}", f"{D}:3.25/{OLD}", f"{D}:3.5/dynamiq-dither-1-2-3:2",
    f"{G}-planned:3.25/{NEW}", f"exact/{G}:2.19", f"{G}-companded:3.25/{NEW}",
    f"{G}-uniform:3.25/{NEW}", f"{D}:4>{G}:3.25/{NEW}", f"{G}:4|{G}:3.25/{NEW}",
    f"{G}:3.25|{G}:3.5/{NEW}",
    f"{D}:3.5", "dynamiq-loco:3.5", "dynamiq-loco-slow:3.5", "mxfp4-loco",
    *RIVALS, f"{G}:3.19/{G}:2.19", f"mxfp4/{NEW}",
]  # fmt: skip
MID = [
    "exact", "bf16-psum", f"mxfp4/{OLD}", f"{G}:3.5/{NEW}", f"{G}:3.25/{NEW}", f"{D}:3.5/{OLD}",
]  # fmt: skip
HALVES = [f"{G}:4/half={G}:3.5", f"{G}:3.5/half={G}:4.5", f"exact/half={G}:3.5"]
MORE = [
    "exact", f"exact/{NEW}", f"{D}:4/{OLD}", *HALVES, f"{G}:4/{NEW}", f"{G}:3.5/{OLD}",
    f"{G}:4/every={G}:3.5", f"exact/{OLD}", f"mxfp4/half={G}:3.5", f"mxfp4/{NEW}",
    f"dynamiq-dither:4/{OLD}", f"{G}:3.75/half={G}:4",
]  # fmt: skip


FLOATS = [
    f"nearest-{levels}/{NEW}" for levels in
    ("lloyd", "0124", "five", "64", "0123", "ternary", "eight")
]  # fmt: skip
WITHOUT_NOISE = [
    f"dynamiq-nearest{how}/{NEW}" for how in (":3.5", "-64:3.25", ":4", "-64:2.75")
]  # fmt: skip


def _rows(model: str, init: str, methods: list[str]) -> list[tuple[str, str, str]]:
    return [(model, init, method) for method in methods]


QUEUES = {
    "smoke": _rows("micro", "unit", ["exact", f"{D}:4>{G}:3.25/{NEW}", f"{G}:4|{G}:3.25/{NEW}",
                                     "dynamiq-loco:3.5", "sdp4bit/block-int:4", HALVES[0],
                                     f"{G}:4/every={G}:3.5"]),
    "floats": _rows("tiny", "unit", ["exact", *FLOATS]) + _rows("mid", "unit", FLOATS),
    "without-noise": _rows("tiny", "unit", ["exact", *WITHOUT_NOISE])
    + _rows("mid", "unit", WITHOUT_NOISE),
    "rivals": _rows("mid", "unit", ["exact", *RIVALS])
    + _rows("tiny", "unit", ["exact", *RIVALS]),
    "large": _rows("125m", "unit", ["exact", WITHOUT_NOISE[0], "bf16-psum", f"mxfp4/{OLD}"]),
    "gpt2": _rows("tiny", "gpt2", ["exact", *WITHOUT_NOISE[:3], f"mxfp4/{OLD}", TINY[7], TINY[5],
                                   FLOATS[-1], "bf16-psum", TINY[4]]),
    "more": _rows("mid", "unit", MORE)
    + _rows("tiny", "unit", ["exact", *HALVES, f"{G}:4/every={G}:3.5", f"mxfp4/half={G}:3.5"]),
    "screen": _rows("tiny", "unit", TINY[:16]) + _rows("mid", "unit", MID)
    + _rows("tiny", "unit", TINY[16:]) + _rows("tiny", "gpt2", TINY[:16] + TINY[22:]),
}  # fmt: skip


def by_step(texts: tuple[str, str], differences: str, recipe: Any) -> Way:
    """Sharded updates whose first steps have the gradients of another method."""
    ways = [training.sharded(f"{text}/{differences}", "direct", recipe, EIGHT) for text in texts]
    first, later = ways
    switch = round(FIRST * recipe.steps)

    def init(params: Any) -> Any:
        return later.init(params), jnp.int32(0)

    def update(grads: Any, state: Any, params: Any, key: Any) -> Any:
        inner, step = state
        branches = (first.update, later.update)
        params, inner = lax.cond(step < switch, *branches, grads, inner, params, key)
        return params, (inner, step + 1)

    bits = [way.bits_per_coord(None) for way in ways]
    mean = FIRST * bits[0] + (1 - FIRST) * bits[1]
    return Way(f"{texts[0]}>{texts[1]}/{differences}", "direct", lambda _: mean, init, update)


def by_leaf(texts: tuple[str, str], differences: str, recipe: Any) -> Way:
    """Sharded updates with the first method for gradients of the embedding and the head."""
    edges, inner = (training.make_method(text) for text in texts)

    def choose(path: str, leaf: Any) -> Any:
        return edges if EDGES.search(path) else inner

    name = "|".join(texts)
    make = training.make_method
    training.make_method = lambda text, *own: choose if text == name else make(text, *own)
    try:
        way = training.sharded(f"{name}/{differences}", "direct", recipe, EIGHT)
    finally:
        training.make_method = make
    each = [training.sharded(f"{text}/{differences}", "direct", recipe, EIGHT) for text in texts]
    costs = [one.bits_per_coord(None) for one in each]

    def bits(grads: Any) -> float:
        leaves = jax.tree_util.tree_leaves_with_path(grads)
        sizes = [(bool(EDGES.search(jax.tree_util.keystr(path))), x.size) for path, x in leaves]
        share = sum(size for edge, size in sizes if edge) / sum(size for _, size in sizes)
        return share * costs[0] + (1 - share) * costs[1]

    return way._replace(method=f"{name}/{differences}", bits_per_coord=bits)


def alternating(gradients: str, how: str, inner: str, recipe: Any) -> Way:
    """Sharded updates that send differences of a half of the leaves, or every second step."""
    method, make = training.make_method(inner), training.make_method

    def chooser(step: int) -> Any:
        def choose(path: str, leaf: Any) -> Any:
            number = zlib.crc32(path.encode()) % 2 if how == "half" else 1
            return method if number == step else Nothing()

        return choose

    ways = []
    for step in range(2):
        chosen = chooser(step)
        training.make_method = lambda text, *own: chosen if text == how else make(text, *own)  # noqa: B023
        try:
            ways.append(training.sharded(f"{gradients}/{how}", "direct", recipe, EIGHT))
        finally:
            training.make_method = make

    def init(params: Any) -> Any:
        return ways[0].init(params), jnp.int32(0)

    def update(grads: Any, state: Any, params: Any, key: Any) -> Any:
        own, step = state
        branches = [way.update for way in ways]
        params, own = lax.switch(step % 2, branches, grads, own, params, key)
        return params, (own, step + 1)

    whole = training.sharded(f"{gradients}/{inner}", "direct", recipe, EIGHT).bits_per_coord(None)
    alone = training.sharded(f"{gradients}/{gradients}", "direct", recipe, EIGHT)
    bits = alone.bits_per_coord(None) / 2 + (whole - alone.bits_per_coord(None) / 2) / 2
    return Way(f"{gradients}/{how}={inner}", "direct", lambda _: bits, init, update)


def make_way(text: str, recipe: Any) -> Way:
    """The way that a row means."""
    if "=" in text:
        gradients, _, differences = text.partition("/")
        return alternating(gradients, *differences.split("="), recipe)
    for mark, make in ((">", by_step), ("|", by_leaf)):
        if mark in text:
            gradients, _, differences = text.partition("/")
            first, _, second = gradients.partition(mark)
            return make((first, second), differences, recipe)
    return training.make_ways([text], ["direct"], recipe, EIGHT)[-1]


def task_of(model: str, init: str, steps: int | None, folder: Path | None) -> Task:
    """As in training.py."""
    own = MODELS[model]
    rate = training.LEARNING_RATES.get((model, init), own.recipe.learning_rate)
    recipe = own.recipe._replace(learning_rate=rate, steps=steps or own.recipe.steps)
    own = own._replace(config=replace(own.config, init=init), recipe=recipe)
    return Task(model, own, training.corpus_of(own.config.vocab_size, folder), EIGHT)


app = typer.Typer()


@app.command()
def train(
    queue: Annotated[str, typer.Argument(help=f"one of {', '.join(QUEUES)}")],
    part: str = "0/1",
    seconds: float = 1e9,
    out: Path = Path("runs"),
    seeds: Annotated[int | None, typer.Option(help="default: as many as a GPU trains")] = None,
    steps: int | None = None,
    folder: training.Text = None,
    threads: int = 4,
) -> None:
    """Trains a part of a queue's rows."""
    start = time.monotonic()
    number, _, parts = part.partition("/")
    out.mkdir(parents=True, exist_ok=True)
    trained = [json.loads(line)["settings"] for f in out.glob("*.jsonl") for line in f.open()]
    trained = {(own["model"], own["init"], own["method"]) for own in trained}
    rows = [row for row in QUEUES[queue] if row not in trained][int(number) :: int(parts)]
    tasks = {pair: task_of(*pair, steps, folder) for pair in {row[:2] for row in rows}}
    data: dict[Any, Any] = {}
    file = out / f"{queue}-{number}.jsonl"

    lock = threading.Lock()

    def compiled(row: tuple[str, str, str]) -> Any:
        if time.monotonic() - start > seconds:
            return None
        task = tasks[row[:2]]
        way = make_way(row[2], task.model.recipe)
        count = seeds or max(task.model.seeds_at_once, LEAST_SEEDS)
        at_once = min(count, task.model.seeds_at_once)
        with lock:
            if row[:2] not in data:
                parts = np.arange(count, dtype=np.int32).reshape(-1, at_once)
                tokens = [np.stack([task.tokens(seed) for seed in part]) for part in parts]
                windows = task.validation()
                data[row[:2]] = [(*own, windows) for own in zip(parts, tokens, strict=True)]
        program = training.make_trainer(task.model, way)
        return task, way, count, program.lower(*data[row[:2]][0]).compile()

    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(compiled, row) for row in rows]
        for row, future in zip(rows, waiting, strict=True):
            try:
                made = future.result()
                if made is None or time.monotonic() - start > seconds:
                    print("no time for", *row, flush=True)
                    continue
                task, way, count, program = made
                before = time.monotonic()
                parts = [jax.device_get(program(*part)) for part in data[row[:2]]]
                found = training.figures(*map(np.concatenate, zip(*parts, strict=True)))
                line = {"settings": training.settings_of(task, way, count) | {"method": row[2]}}
                line |= {"bits_per_coord": way.bits_per_coord(task.gradients), **found}
                line |= {"seconds": round(time.monotonic() - before, 2)}
                with file.open("a") as stream:
                    stream.write(json.dumps(line | {"invocation": training.invocation()}) + "\n")
                losses = [np.nan if x is None else x for x in found["validation_loss"]]
                at = time.monotonic() - start
                print(*row, f"{np.mean(losses):.5f}", line["seconds"], f"{at:.0f} s", flush=True)
            except Exception as error:  # the other rows are worth training
                print("FAILED", *row, repr(error)[:600], flush=True)


def column_of(settings: Any) -> tuple[str, str, int]:
    """Model, initialisation, and the steps if they are others than the model's."""
    model, steps = settings["model"], settings["steps"]
    return model, settings["init"], 0 if steps == MODELS[model].recipe.steps else steps


def text_of(percent: float | None, error: float | None) -> str:
    """A cell; a run that diverged has no value, and one seed no error."""
    if percent is None:
        return "–"
    return f"{percent:+.2f}" if error is None else f"{percent:+.2f} ± {error:.2f}"


@app.command()
def table(files: list[Path], json_file: Annotated[Path | None, typer.Option("--json")] = None):
    """Joins the rows of parts and compares them with exact means."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    same = "model", "init", "steps", "seeds", "text", "platform"

    def exact_of(row: Any) -> Any:
        alike = [
            other for other in rows if other["settings"]["method"] == training.EXACT
            and all(other["settings"][name] == row["settings"][name] for name in same)
        ]  # fmt: skip
        return alike[0] if alike else None

    kept: list[Any] = []
    invocations: list[Any] = []
    for row in rows:
        own = {key: x for key, x in row.pop("invocation").items() if key != "started"}
        row["validation_loss"] = [x and round(x, 6) for x in row["validation_loss"]]
        if own not in invocations:
            invocations.append(own)
        row["invocation"] = invocations.index(own)
        if exact := exact_of(row):
            values = [x["validation_loss"] for x in (row, exact)]
            failed = None in values[0]
            apart = {"percent": None, "error": None} if failed else training.difference(*values)
            row["summary"] = {"validation": apart}
        kept.append(row)
    columns = sorted({column_of(row["settings"]) for row in kept})
    cells: dict[str, dict[Any, str]] = {}
    bits = {}
    for row in kept:
        own, apart = row["settings"], row.get("summary", {}).get("validation", {})
        told = text_of(apart.get("percent"), apart.get("error"))
        cells.setdefault(own["method"], {})[column_of(own)] = told
        bits[own["method"]] = BY_HAND.get(own["method"].partition("/")[0], row["bits_per_coord"])
    names = {"tiny": "1.1 M", "mid": "17 M", "125m": "123 M", "micro": ".1 M"}
    heads = [f"{names[m]}, {init}" + (f", {n:,} steps" if n else "") for m, init, n in columns]
    print("| method | bits |", " | ".join(heads), "|")
    print("|---|---|" + "---|" * len(columns))
    for method in sorted(cells, key=lambda name: bits[name]):
        row = " | ".join(cells[method].get(column, "") for column in columns)
        escaped = method.replace("|", "\\|")
        print(f"| `{escaped}` | {bits[method]:.3f} | {row} |")
    if json_file:
        names = "settings", "bits_per_coord", "validation_loss", "summary", "invocation"
        short = [json.dumps({name: row[name] for name in names if name in row}) for row in kept]
        told = [json.dumps(own) for own in invocations]
        start, middle = '{"invocations": [\n', '\n], "rows": [\n'
        json_file.write_text(start + ",\n".join(told) + middle + ",\n".join(short) + "\n]}\n")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    app()
