"""The `dynamiq` command: benchmarks of all-reduce and of the kernels."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import typer

from dynamiq_jax.bench import all_reduce, contenders, kernels, report
from dynamiq_jax.methods import DynamiQ
from pallas_kernels import resolve_backend

CPU_DEVICES = 8
"""Workers that a machine without a GPU stands in for."""

T = TypeVar("T")

app = typer.Typer(
    help="Compressed multi-hop all-reduce for JAX.", no_args_is_help=True, add_completion=False
)
bench = typer.Typer(help="Measure speed on the devices of this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Repeats = Annotated[
    int | None, typer.Option(min=1, help="Timed samples per row (default: 20; on CPU 5).")
]


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses early what could not be written after minutes of measuring."""
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}: create it first")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", callback=_in_a_folder, help="Write the rows to this file."),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", callback=_in_a_folder, help="Draw the rows to this image."),
]


@app.callback()
def _main() -> None:
    """Lets XLA split the CPU into eight devices; read when JAX first looks for devices."""
    # The flag concerns the CPU platform alone, so that no look for a GPU is needed beforehand.
    flags = os.environ.get("XLA_FLAGS", "")
    own_count = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in flags
    if not own_count:
        flag = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


@bench.command("all-reduce")
def bench_all_reduce(
    sizes: Annotated[
        str | None,
        typer.Option(help="bf16 leaf per device (default: 16MiB,64MiB,1GiB; on CPU 1MiB,4MiB)."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Methods with their wire bits per coordinate.")
    ] = "dynamiq:5,dynamiq:4",
    topology: Annotated[str, typer.Option(help="How payloads travel.")] = "ring",
    baseline: Annotated[str, typer.Option(help="Native psum by wire dtype: bf16, f32.")] = "bf16",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many devices (default: all).")
    ] = None,
    repeats: Repeats = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="All-reduces per sample (default: by size).")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time compressed all-reduces against native psum on one mesh axis."""
    route = _checked("--topology", contenders.parse_topology, topology)
    chosen = [
        _checked("--methods", contenders.parse_method, text, route) for text in methods.split(",")
    ]
    reference = _checked("--baseline", contenders.native, baseline)
    if plot_file:
        _checked("--plot", report.require_matplotlib)
    found = jax.devices()
    if devices is not None and devices > len(found):
        raise typer.BadParameter(f"{devices} devices asked for, {len(found)} found: pass fewer")
    workers = found[:devices]
    on_cpu = workers[0].platform == "cpu"
    repeats = repeats or (5 if on_cpu else 20)
    sizes = sizes or ("1MiB,4MiB" if on_cpu else "16MiB,64MiB,1GiB")
    sizes_bytes = [_checked("--sizes", contenders.parse_size, text) for text in sizes.split(",")]

    title = f"all-reduce of one bf16 leaf, {_workers(workers)}, {repeats} repeats"
    rows = all_reduce.bench_all_reduce(
        sizes_bytes,
        chosen,
        reference,
        devices=workers,
        repeats=repeats,
        iterations=iterations,
    )
    report.print_table(rows, report.ALL_REDUCE_COLUMNS, title)
    if json_file:
        report.write_json(json_file, rows, report.surroundings(workers))
    if plot_file:
        report.plot_all_reduce(plot_file, rows, title)


@bench.command("kernels")
def bench_kernels(
    coords: Annotated[
        str | None, typer.Option(help="bf16 coordinates (default: 2^28; on CPU 2^18).")
    ] = None,
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate of the mix.")] = 5.0,
    widths: Annotated[str, typer.Option(help="Bit widths of the mix.")] = "2,4,8",
    single_widths: Annotated[
        bool, typer.Option("--single-widths", help="Time every width by itself, too.")
    ] = False,
    repeats: Repeats = None,
    backend: Annotated[
        str | None, typer.Option(help="pallas, jnp or interpret (default: the fastest here).")
    ] = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Time the coding kernels on one device against a plain copy."""
    mix = _checked("--widths", kernels.parse_widths, widths)
    _checked("--bits", lambda: DynamiQ(bits=bits, widths=mix))
    if plot_file:
        _checked("--plot", report.require_matplotlib)
    workers = jax.devices()[:1]
    on_cpu = workers[0].platform == "cpu"
    repeats = repeats or (5 if on_cpu else 20)
    coords = coords or ("2^18" if on_cpu else "2^28")
    size = _checked("--coords", kernels.parse_coords, coords)
    ran = _checked("--backend", resolve_backend, backend)

    title = f"kernels on {coords} bf16 coordinates, {_workers(workers)}, {repeats} repeats"
    rows = kernels.bench_kernels(
        size,
        bits=bits,
        widths=mix,
        single_widths=single_widths,
        repeats=repeats,
        backend=ran,
    )
    report.print_table(rows, report.KERNEL_COLUMNS, title)
    if json_file:
        report.write_json(json_file, rows, report.surroundings(workers))
    if plot_file:
        report.plot_kernels(plot_file, rows, title)


def _checked(option: str, parse: Callable[..., T], *args: object, **kwargs: object) -> T:
    """``parse(...)``, with what it refuses reported as a wrong use of ``option``."""
    try:
        return parse(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _workers(devices: list[Any]) -> str:
    if devices[0].platform == "cpu":
        return f"{len(devices)} CPU device(s) of one machine: a check, not a measure of speed"
    return f"{len(devices)} x {devices[0].device_kind}"


if __name__ == "__main__":
    app()
