"""Options that commands share, and the checks of their values."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import typer

T = TypeVar("T")

Repeats = Annotated[
    int | None, typer.Option(min=1, help="Timed samples per row (default: 20; on CPU 5).")
]
Nodes = Annotated[
    int, typer.Option(min=1, help="Size of the outer of two axes (default: one axis).")
]
Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes that run this command; not under srun."),
]
ProcessId = Annotated[int, typer.Option(min=0, help="Number of this process, from 0.")]
Coordinator = Annotated[str, typer.Option(help="HOST:PORT at which process 0 listens.")]
SuperGroups = Annotated[
    int | None,
    # So many of 256 coordinates have indices of 31 bits.
    typer.Option(min=1, max=2**23 - 1, help="Super-groups of 256 coordinates per worker."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Draws of the data and of the rounding.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]

Model = Annotated[
    str,
    typer.Argument(
        help="A file of save_model_tree, or a number of bf16 parameters in one leaf, as 125M."
    ),
]


def checked(
    options: str | None,
    parse: Callable[..., T],
    *args: object,
    remedy: str | None = None,
    **kwargs: object,
) -> T:
    """``parse(...)``, with what it refuses reported as a wrong use of an option.

    ``remedy`` stands in the place of the error's own, where that names what the command lacks.

    An error that begins with a field, as "floor=99 is ..." or "n_workers=5: ...", names the option
    of ``options`` that is called so; any other error is one of the first.
    """
    try:
        return parse(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        names = (options or "").split()
        field = str(error).partition("=")[0].removeprefix("n_").replace("_", "-")
        named = f"--{field}" if f"--{field}" in names else None
        said = f"{str(error).partition('; ')[0]}; {remedy}" if remedy else str(error)
        raise typer.BadParameter(said, param_hint=named or next(iter(names), None)) from error


@contextlib.contextmanager
def checked_file(path: Path, option: str) -> Iterator[None]:
    """The context in which a file is opened: an error of it is a wrong use of the option."""
    try:
        yield
    except OSError as error:
        refusal = f"{path} cannot be written ({error.strerror}): pass another file"
        raise typer.BadParameter(refusal, param_hint=option) from error


def out_of_memory(error: Exception) -> bool:
    """Whether the device has too little memory; JAX has no type for this error."""
    return "memory" in str(error).lower()


def writable(path: Path | None, source: Path | None = None, *, first: bool = True) -> None:
    """Refuses a file of --json that cannot be written, or is the command's ``source``.

    That is before anything is measured. The ``first`` process names a file that is replaced.
    """
    if path is None:
        return
    new = not path.exists()
    with checked_file(path, "--json"):
        if not new and not path.is_file():
            raise OSError(None, "not a regular file")
        if not new and source and path.samefile(source):
            raise OSError(None, "read by this command")
        path.open("ab").close()
    if new:
        path.unlink()
    elif first:
        typer.echo(f"--json replaces {path} ({path.stat().st_size:,} bytes)", err=True)


_VARIABLES = ("COORDINATOR", "NUM_HOSTS", "HOST_ID")
"""Variables of `examples/four_hosts.py` and `benchmarks/hosts.py`."""
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables with the number of processes that a cluster has started; JAX reads the others."""


def join(processes: int | None, process_id: int, coordinator: str) -> None:
    """Waits for the others, where this command runs in several processes.

    Without options the variables of `_VARIABLES` count, and then those of SLURM or Open MPI.
    """
    told = [os.environ.get(name, "") for name in _VARIABLES]
    if processes is None and told[0] and told[1].isdecimal() and told[2].isdecimal():
        coordinator, processes, process_id = told[0], int(told[1]), int(told[2])
    if process_id >= (processes or 1):
        raise typer.BadParameter(
            f"{process_id} is not below --processes {processes or 1}: count them from 0",
            param_hint="--process-id",
        )
    port = coordinator.rpartition(":")[2]
    if not port.isdecimal() or int(port) >= 2**16:
        raise typer.BadParameter(
            f"{coordinator!r} has no port below 65536: pass for example localhost:29400",
            param_hint="--coordinator",
        )
    if processes:
        jax.distributed.initialize(coordinator, processes, process_id)
    elif any(int(os.environ.get(name, "1")) > 1 for name in _TASKS):
        jax.distributed.initialize()


def announce(text: str) -> None:
    """Tells those who wait how far the measurement is; the first process alone speaks."""
    if jax.process_index() == 0:
        typer.echo(text, err=True)


def on_cpu(devices: Sequence[Any]) -> bool:
    """Whether these are devices of a CPU, on which all is checked and no time counts."""
    return devices[0].platform == "cpu"


def workers_text(devices: Sequence[Any]) -> str:
    """How many devices of what kind."""
    if on_cpu(devices):
        return f"{len(devices)} CPU device(s) of one machine: a check, not a measure of speed"
    return f"{len(devices)} x {devices[0].device_kind}"


def without_control(text: str) -> str:
    """``text`` without the control characters of terminals but line breaks."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]+", " ", text)


def printable(text: str) -> str:
    """One line without control characters, in which long words and long texts lose their middle."""
    line = without_control(text).replace("\n", " ").strip()
    line = re.sub(r"(\S{60})\S{80,}(\S{20})", r"\1...\2", line)
    return line if len(line) <= 600 else f"{line[:300]} ... {line[-300:]}"
