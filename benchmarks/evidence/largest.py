"""The largest model that fits a GPU, by ways: XLA's memory of steps at two depths.

    python benchmarks/evidence/largest.py --ways zero-checkpoint-scanned:5/2.5  # compiles alone

It takes the GPUs of the mesh: two for the table, whose ways `make results ONLY=scanned` names.
Layers are those of 7 B parameters. A step's memory is what it takes, what
it makes beyond that, and XLA's temporaries; each layer adds the same. NCCL and CUDA take some GiB
beside it, so ``--memory`` is less than a GPU has.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from dynamiq_jax.commands.bench import tables

sys.path.append(str(Path(__file__).resolve().parents[1]))

import step_time
import ways

DEPTHS = 32, 64
BATCH = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A way's step at one depth."""

    method: str
    layers: int
    parameters: int
    state_bytes: int
    """Parameters, moments, masters and tokens of one device."""
    temporary_bytes: int
    """XLA's, and results that replace no argument."""

    @property
    def memory(self) -> int:
        """Bytes of one device."""
        return self.state_bytes + self.temporary_bytes


def row_of(name: str, layers: int, attention: Any, model: str = "7b") -> Row:
    """Compiles the step of a way."""
    run = step_time.make_run(model, batch=BATCH, attention=attention, layers=layers)
    way = ways.make_way(name, run.training)
    found = ways.lower(way, way.like, run.tokens(way)).compile().memory_analysis()
    own = found.output_size_in_bytes - found.alias_size_in_bytes
    return Row(
        method=name, layers=layers,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(way.model.shapes)),
        state_bytes=found.argument_size_in_bytes,
        temporary_bytes=found.temp_size_in_bytes + own,
    )  # fmt: skip


def largest(rows: Sequence[Row], memory: float) -> float:
    """The parameters of the model that takes so many bytes, from a way's rows of two depths."""
    less, more = sorted(rows, key=lambda row: row.layers)
    per_parameter = (more.memory - less.memory) / (more.parameters - less.parameters)
    return less.parameters + (memory - less.memory) / per_parameter


def main(
    names: Annotated[str, typer.Option("--ways", help="Names of `ways.py`.")],
    memory: Annotated[float, typer.Option(help="GiB of a GPU for a step.")] = 130,
    attention: Annotated[str, typer.Option(help="As of step_time.py.")] = "cudnn",
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows land here.")] = None,
) -> None:
    """Compiles each way at two depths, and prints the largest model of each."""
    found = []
    for name in names.split(","):
        rows = [row_of(name, layers, attention) for layers in DEPTHS]
        fits = largest(rows, memory * 2**30)
        found += [dataclasses.asdict(row) for row in rows]
        gib = ", ".join(f"{row.layers} layers {row.memory / 2**30:.1f} GiB" for row in rows)
        print(f"{name:42} {fits / 1e9:5.1f} B; {gib}", flush=True)
        if json_file:
            about = tables.surroundings(jax.devices())
            kept = {"about": about, "attention": attention, "memory_gib": memory, "rows": found}
            json_file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
