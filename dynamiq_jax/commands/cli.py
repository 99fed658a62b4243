"""The `dynamiq-jax` command: benchmarks and simulations."""

import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from dynamiq_jax import __version__
from dynamiq_jax.commands.bench import (
    advice,
    all_reduce,
    contenders,
    error,
    kernels,
    simulations,
    tables,
)
from dynamiq_jax.commands.model_tree import load_model_tree
from dynamiq_jax.commands.simulate import Case, study
from dynamiq_jax.methods import DynamiQ, Format
from dynamiq_jax.request import ways
from dynamiq_jax.request.compression import Compression
from dynamiq_jax.request.configuration import SUFFIXES, parse
from pallas_kernels import resolve_backend

CPU_DEVICES = 8
"""Workers that a machine without a GPU stands in for."""

MAX_SUPER_GROUPS = 2**23 - 1
"""So many of 256 coordinates have indices of 31 bits."""

T = TypeVar("T")


class _Commands(TyperGroup):
    """Reports errors of the library and of the system as messages, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # typer ends quietly where nobody reads on
            raise
        except (ValueError, NotImplementedError, OSError) as error:
            raise typer.BadParameter(str(error)) from error


app = typer.Typer(
    cls=_Commands,
    help="Compressed multi-hop all-reduce for JAX.",
    no_args_is_help=True,
    add_completion=False,
)
bench = typer.Typer(help="Measure speed on the devices of this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Repeats = Annotated[
    int | None, typer.Option(min=1, help="Timed samples per row (default: 20; on CPU 5).")
]
Iterations = Annotated[
    int | None, typer.Option(min=1, help="All-reduces per sample (default: by size).")
]
Nodes = Annotated[
    int, typer.Option(min=1, help="Reduce over two axes, the outer one of this size.")
]
ProcessId = Annotated[int, typer.Option(min=0, help="Which of them this one is.")]
Coordinator = Annotated[str, typer.Option(help="HOST:PORT where process 0 listens to the others.")]


def _checked(options: str | None, parse: Callable[..., T], *args: object, **kwargs: object) -> T:
    """``parse(...)``, with what it refuses reported as a wrong use of an option.

    An error that begins with a field, as "floor=99 is ..." or "n_inner=5: ...", names the option of
    ``options`` that is called so; any other error is one of the first. In callbacks of an option,
    which typer names by itself, ``options`` is `None`.
    """
    try:
        return parse(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        names = (options or "").split()
        field = str(error).partition("=")[0].removeprefix("n_").replace("_", "-")
        named = f"--{field}" if f"--{field}" in names else None
        raise typer.BadParameter(str(error), param_hint=named or next(iter(names), None)) from error


def _output(path: Path | None) -> Path | None:
    """Refuses early what could not be written after minutes of measuring.

    Typer refuses folders, and files that are there and not writable.
    """
    if path and not path.exists():
        if not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}: create it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"folder {path.parent} is not writable: pass another one")
    return path


def _positive(value: float | None) -> float | None:
    """Refuses what is not a length of time."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"{value:g} is not a positive number: pass for example 180")
    return value


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        writable=True,
        callback=_output,
        help="Write the rows to this file.",
    ),
]


def _version(given: bool) -> None:
    if given:
        typer.echo(f"dynamiq_jax {__version__}, jax {jax.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
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
    topology: Annotated[
        str, typer.Option(help="direct, ring, butterfly, hierarchical (needs --nodes), or several.")
    ] = "direct",
    transport: Annotated[
        str | None,
        typer.Option(help="collectives or permutes (default: permutes if copy engines serve)."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="Native psum by wire dtype: bf16, f32.")] = "bf16",
    collective: Annotated[
        str, typer.Option(help="psum, or psum_scatter: the half that sharded training needs.")
    ] = "psum",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many devices (default: all).")
    ] = None,
    nodes: Nodes = 1,
    processes: Annotated[
        int | None, typer.Option(min=1, help="This command runs in so many processes at once.")
    ] = None,
    process_id: ProcessId = 0,
    coordinator: Coordinator = "localhost:29400",
    repeats: Repeats = None,
    iterations: Iterations = None,
    json_file: JsonFile = None,
) -> None:
    """Time compressed all-reduces against native psum.

    With --processes, run it in every process; the first one reports.
    """
    _join(processes, process_id, coordinator)
    routes = [
        _checked("--topology --transport", contenders.parse_topology, name, nodes, transport)
        for name in contenders.parts(topology)
    ]
    if collective not in ("psum", "psum_scatter"):
        raise typer.BadParameter(f"--collective {collective!r}: pass psum or psum_scatter")
    if nodes > 1 and collective != "psum":
        raise typer.BadParameter(f"--nodes {nodes}: {collective} is timed on one axis; pass 1")
    chosen = [
        _checked("--methods", contenders.parse_method, text, route, collective)
        for text in contenders.parts(methods)
        for route in routes
    ]
    for contender in chosen:
        _checked("--methods", contenders.check_timed, contender)
    reference = _checked("--baseline", contenders.uncompressed, baseline, collective)
    found = jax.devices()
    if devices is not None and devices > len(found):
        raise typer.BadParameter(
            f"{devices} devices asked for, {len(found)} found: pass fewer", param_hint="--devices"
        )
    workers = found[:devices]
    on_cpu = workers[0].platform == "cpu"
    repeats = repeats or (5 if on_cpu else 20)
    sizes = sizes or ("1MiB,4MiB" if on_cpu else "16MiB,64MiB,1GiB")
    texts = contenders.parts(sizes)
    sizes_bytes = [_checked("--sizes", contenders.parse_size, text) for text in texts]
    mesh = _checked("--nodes", all_reduce.make_mesh, workers, nodes)
    for size_bytes in sizes_bytes:
        if collective == "psum_scatter" and size_bytes // 2 % mesh.size:
            raise typer.BadParameter(
                f"a bf16 leaf of {size_bytes} bytes has no {mesh.size} equal slices: pass a "
                f"multiple of {2 * mesh.size} bytes, or other --devices",
                param_hint="--sizes",
            )
        for contender in chosen:
            shape = mesh.devices.shape
            _checked("--methods --topology", contender.wire_bytes, size_bytes // 2, shape)
    title = f"{collective} of one bf16 leaf, {_workers(workers)}, {repeats} repeats"
    if nodes > 1 or processes:
        title += f", {nodes} node(s), {jax.process_count()} process(es)"
    rows = all_reduce.bench_all_reduce(
        sizes_bytes,
        chosen,
        reference,
        devices=workers,
        repeats=repeats,
        nodes=nodes,
        iterations=iterations,
        announce=_announce,
    )
    if jax.process_index() > 0:
        return
    tables.print_table(rows, tables.ALL_REDUCE_COLUMNS, title)
    if json_file:
        tables.write_json(json_file, rows, tables.surroundings(workers))


@bench.command("kernels")
def bench_kernels(
    coords: Annotated[
        str | None, typer.Option(help="bf16 coordinates (default: 2^28; on CPU 2^18).")
    ] = None,
    bits: Annotated[float, typer.Option(help="Wire bits per coordinate of the mix.")] = 5.0,
    widths: Annotated[
        str | None, typer.Option(help="Bit widths, mixed by squared error (default: DynamiQ's).")
    ] = None,
    single_widths: Annotated[
        bool, typer.Option("--single-widths", help="Time every width by itself, too.")
    ] = False,
    dither: Annotated[
        bool, typer.Option("--dither", help="Decode with the encoders' noise.")
    ] = False,
    repeats: Repeats = None,
    backend: Annotated[
        str | None,
        typer.Option(help="triton, mosaic, jnp or interpret (default: the fastest here)."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the coding kernels on one device against a plain copy."""
    mix = None if widths is None else _checked("--widths", kernels.parse_widths, widths)
    _checked("--bits --widths --dither", DynamiQ, bits=bits, widths=mix, dither=dither)
    workers = jax.devices()[:1]
    on_cpu = workers[0].platform == "cpu"
    repeats = repeats or (5 if on_cpu else 20)
    coords = coords or ("2^18" if on_cpu else "2^28")
    size = _checked("--coords", kernels.parse_coords, coords)
    ran = _checked("--backend", resolve_backend, backend)

    title = f"kernels on {coords} bf16 coordinates, {_workers(workers)}, {repeats} repeats"
    title += ", dither" if dither else ""
    rows = kernels.bench_kernels(
        size,
        bits=bits,
        widths=mix,
        single_widths=single_widths,
        dither=dither,
        repeats=repeats,
        backend=ran,
    )
    tables.print_table(rows, tables.KERNEL_COLUMNS, title)
    if json_file:
        tables.write_json(json_file, rows, tables.surroundings(workers))


@app.command("error")
def bench_error(
    methods: Annotated[
        str, typer.Option(help="Methods, with their wire bits where they have a choice.")
    ] = (
        "dynamiq:3,dynamiq:4,dynamiq:5,dynamiq:6,dynamiq-dither:4,mxfp8,mxfp6,mxfp4,minmax:4,flash:4,"
        "qsgd,thc:4,omnireduce:8"
    ),
    topology: Annotated[str, typer.Option(help="ring, butterfly, direct, or several.")] = "ring",
    workers: Annotated[
        int | None, typer.Option(min=2, help="How many (default: 8, or all of the file's).")
    ] = None,
    super_groups: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_SUPER_GROUPS,
            help="Size of the synthetic gradients, in 256 coordinates.",
        ),
    ] = 4096,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of data and rounding.")] = 3,
    gradients: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help=".npz with an array 'gradients' [workers, d], and for the worst leaf 'names' and "
            "'sizes' of all leaves.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the error of methods on synthetic or dumped gradients, and what they send.

    The worst leaf is the one with the largest relative error, if the file says what leaves it has:
    one of at least 4096 coordinates, since psum would sum smaller ones exactly.
    """
    chosen = []
    for text in contenders.parts(methods):
        own = contenders.native_only(text)
        for name in ["native"] if own else contenders.parts(topology):
            route = None if own else _checked("--topology", contenders.parse_topology, name)
            chosen.append((_checked("--methods", contenders.parse_method, text, route), name))
    if gradients is None:
        drawn, leaves, shape = [], None, (workers or 8, error.SUPER_GROUP * super_groups)
        what = f"synthetic mixture, {super_groups} super-groups"
    else:
        drawn, what = [_checked("--gradients", error.load_gradients, gradients, workers)], gradients
        shape = drawn[0].shape
        leaves = _checked("--gradients", error.load_leaves, gradients, shape[1])
    for contender, _ in chosen:
        _checked("--methods --topology", contender.wire_bytes, shape[1], shape[:1])
    drawn = drawn or list(error.synthetic_gradients(shape[0], super_groups, seeds))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        each = error.bench_error(chosen, drawn, seeds, leaves)
        measured = list(progress.track(each, total=len(chosen)))
    rows = [row for row, _ in measured]
    title = f"vNMSE on {what}, {drawn[0].shape[0]} workers"
    tables.print_table(rows, tables.ERROR_COLUMNS, title)
    if json_file:
        tables.write_json(json_file, rows, tables.surroundings(jax.devices()[:1]))


@app.command("simulate")
def simulate(
    workers: Annotated[int, typer.Option(min=2, help="How many reduce.")] = 8192,
    super_groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_SUPER_GROUPS,
            help="Of 256 coordinates, per worker (default: 32768; on CPU 256).",
        ),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="ring, butterfly, direct, hierarchical, or several.")
    ] = "ring,butterfly",
    method: Annotated[
        str, typer.Option(help="dynamiq, mxfp8 (shared scales), mxfp8-own, or several.")
    ] = "dynamiq",
    bits: Annotated[str, typer.Option(help="DynamiQ's wire bits per coordinate.")] = "5",
    widths: Annotated[
        str | None, typer.Option(help="DynamiQ's widths, such as 2,4,8. Default: by bits.")
    ] = None,
    floor: Annotated[str, typer.Option(help="DynamiQ's: auto, none or a width.")] = "auto",
    levels: Annotated[
        str, typer.Option(help="companded, piecewise, geometric or uniform.")
    ] = "companded",
    rounding: Annotated[
        str, typer.Option(help="antithetic, correlated or independent.")
    ] = "antithetic",
    balance: Annotated[
        float | None,
        typer.Option(help="Bits of hops beyond the all-gather (default: the topology's)."),
    ] = None,
    inner: Annotated[
        int, typer.Option(min=1, help="Workers of a hierarchy's native inner axis.")
    ] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the data and the rounding.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Simulate the error of an all-reduce among thousands of workers on one device."""
    device = jax.devices()[:1]
    super_groups = super_groups or (256 if device[0].platform == "cpu" else 32768)
    options = {
        "widths": None if widths is None else _checked("--widths", kernels.parse_widths, widths),
        "floor": _checked("--floor", simulations.parse_floor, floor),
        "format": _checked("--levels", Format, levels=levels),
        "rounding": rounding,
    }
    wire_bits = [_checked("--bits", contenders.bits_of, text) for text in contenders.parts(bits)]
    dynamiq = "--method --bits --widths --floor --levels --rounding"
    cases = [
        _checked(
            "--topology --workers --inner",
            Case,
            n_workers=workers,
            super_groups=super_groups,
            method=codec,
            topology=_checked(
                "--topology --balance", simulations.parse_topology, route, balance, workers, inner
            ),
            n_inner=inner,
        )
        for route in contenders.parts(topology)
        for name in contenders.parts(method)
        for codec in _checked(dynamiq, simulations.parse_methods, name, wire_bits, options)
    ]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")

        def show(loop: str, done: int, of: int) -> None:
            progress.update(task, description=loop, completed=done, total=of)

        rows = [study(case, range(seeds), show) for case in cases]
    title = f"vNMSE of one all-reduce, {seeds} seed(s), on one {device[0].device_kind}"
    tables.print_table(rows, tables.SIMULATION_COLUMNS, title)
    if json_file:
        tables.write_json(json_file, rows, tables.surroundings(device))


def _config_file(path: Path | None) -> Path | None:
    """Refuses early what could not be written or named."""
    if path and path.suffix not in SUFFIXES:
        raise typer.BadParameter(f"{path} must end in {' or '.join(SUFFIXES)}")
    return _output(path)


@app.command("advise")
def advise(
    model_tree: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Shapes and dtypes of a model, as save_model_tree writes them.",
        ),
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="Instead: one leaf of so many parameters, as 125M.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Instead: one leaf of each of these sizes, as 64MiB,1GiB.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of --params and --sizes: bf16 or f32.")] = "bf16",
    step_time_ms: Annotated[
        float | None,
        typer.Option(callback=_positive, help="A training step with bf16 psum, milliseconds."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Of a worker's link, as 25gbit, for wire times (default: as measured)."),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(help="Wire bits per coordinate to try (default: 5,4,3.5; on CPU 5,4)."),
    ] = None,
    dither: Annotated[
        str | None,
        typer.Option(
            help="DynamiQ without dither, with it: off, on (default: off,on; on CPU off)."
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            help="direct, ring, butterfly, hierarchical (default: all that suit; on CPU direct)."
        ),
    ] = None,
    nodes: Nodes = 1,
    devices: Annotated[
        int | None, typer.Option(min=2, help="Use the first so many devices (default: all).")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="This command runs in so many processes at once; not for srun."),
    ] = None,
    process_id: ProcessId = 0,
    coordinator: Coordinator = "localhost:29400",
    repeats: Repeats = None,
    iterations: Iterations = None,
    config: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            writable=True,
            callback=_config_file,
            help="Write the choice to FILE.json or FILE.toml.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure this machine or cluster, and say whether compression pays for a model, and how.

    A CPU tries few settings by default. How long all will take is said once the first has run.

    With --processes, or under srun, run it in every process; the first one reports.
    """
    if sum(given is not None for given in (model_tree, params, sizes)) != 1:
        raise typer.BadParameter(
            "what is to be reduced? Pass one of --model-tree FILE, --params 125M, --sizes 256MiB"
        )
    if config and sizes and "," in sizes:
        raise typer.BadParameter(f"--config holds one choice: pass one of the sizes {sizes}")
    if rate is not None:
        _checked("--rate", ways.bytes_per_second, rate)
        if nodes > 1:
            raise typer.BadParameter(f"--rate {rate} is of one axis: leave out --nodes {nodes}")
    trees = _trees(model_tree, params, sizes, dtype)
    _join(processes, process_id, coordinator)
    if not processes and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        jax.distributed.initialize()
    found = jax.devices()
    on_cpu = found[0].platform == "cpu"
    bits = bits or ("5,4" if on_cpu else "5,4,3.5")
    dither = dither or ("off" if on_cpu else "off,on")
    tried = [_checked("--bits", advice.parse_bits, text) for text in contenders.parts(bits)]
    dithers = [_checked("--dither", advice.parse_dither, text) for text in contenders.parts(dither)]
    if len(found) < (devices or 2):
        raise typer.BadParameter(
            f"{devices or 'at least 2'} devices asked for, {len(found)} found: an all-reduce takes "
            "two; with several processes pass --processes",
            param_hint="--devices",
        )
    workers = found[:devices]
    mesh = _checked("--nodes", all_reduce.make_mesh, workers, nodes)
    shape = mesh.devices.shape
    suiting = ["direct"] if on_cpu else advice.suiting_topologies(shape)
    names = contenders.parts(topology) if topology else suiting
    routes = [_checked("--topology", contenders.parse_topology, name, nodes) for name in names]
    for route in routes:
        _checked("--topology", Compression(topology=route).route, shape)
    repeats = repeats or (5 if on_cpu else 20)

    first = jax.process_index() == 0
    links = advice.bench_links(mesh, 2**20 if on_cpu else 2**26, repeats=repeats)
    if first:
        carrier = all_reduce.transport(workers[0].platform)
        title = f"links of {_workers(workers)}, {jax.process_count()} process(es), over {carrier}"
        tables.print_table(links, tables.LINK_COLUMNS, title)
        if on_cpu and jax.process_count() > 1:
            widened = "XLA's CPU backend sends bf16 as f32: bf16 psum takes twice its wire MB."
            said = " ".join(filter(None, (advice.slow_exchanges(links), widened)))
            typer.echo("\n" + textwrap.fill(said, 100) + "\n")
    measured = []
    for name, tree in trees.items():
        settings = advice.settings(tree, shape, tried, routes, dithers)
        if first:
            typer.echo(f"measuring {len(settings)} setting(s) and bf16 psum ...", err=True)
        rows = advice.bench_settings(
            mesh,
            tree,
            settings,
            name=name,
            repeats=repeats,
            iterations=iterations,
            announce=_announce,
        )
        if not first:
            continue
        measured += rows
        reason = None if settings else advice.native_reason(tree, shape)
        said = advice.decide(rows, step_ms=step_time_ms, reason=reason)
        among = " x ".join(map(str, shape))
        title = f"\nall-reduce of {name}, leaves: {len(tree)}, {among} workers, {repeats} repeats"
        tables.print_table(rows, tables.setting_columns(rows[0].time_us), title)
        for sentence in said.sentences:
            typer.echo("\n" + textwrap.fill(sentence, 100))
        typer.echo(
            "\n"
            + textwrap.indent(said.snippet(mesh.axis_names if nodes > 1 else ("data",)), "    ")
        )
        chosen = Compression(**parse(said.config))
        given = None if nodes > 1 else rate or links[-1].rate
        explained = chosen.explain(tree, shape, verbose=False, rate=given)
        if explained.ways:
            stats = workers[0].memory_stats() or {}
            sentence = advice.choose_way(explained.ways, stats.get("bytes_limit"))
            sentences = [text for text in (sentence, explained.fastest) if text]
            wrapped = [textwrap.fill(text, 100) for text in sentences]
            typer.echo("\n" + "\n".join([*ways.lines(explained.ways), *wrapped]))
        if config:
            chosen.save(config)
            typer.echo(f"\nwritten to {config}: dq.Compression.load reads it")
    if first and json_file:
        tables.write_json(json_file, measured, tables.surroundings(workers), links=links)


def _trees(
    model_tree: Path | None, params: str | None, sizes: str | None, dtype: str
) -> dict[str, list[jax.ShapeDtypeStruct]]:
    """The trees that `advise` reduces: floating leaves, by the name of the whole."""
    if model_tree:
        tree = _checked("--model-tree", load_model_tree, model_tree)
        return {model_tree.name: _checked("--model-tree", advice.floating_leaves, tree)}
    if dtype not in contenders.BASELINES:
        raise typer.BadParameter(f"--dtype {dtype!r}: pass {' or '.join(contenders.BASELINES)}")
    held = jnp.dtype(contenders.BASELINES[dtype])
    if params:
        coords = {f"{params} parameters": _checked("--params", contenders.parse_params, params)}
    else:
        texts = contenders.parts(sizes or "")
        parsed = {text: _checked("--sizes", contenders.parse_size, text) for text in texts}
        for text, size in parsed.items():
            if size % held.itemsize:
                raise typer.BadParameter(
                    f"{text} is not a whole number of {dtype} parameters: pass a multiple of "
                    f"{held.itemsize} bytes",
                    param_hint="--sizes",
                )
        coords = {text: size // held.itemsize for text, size in parsed.items()}
    return {f"{k} in {dtype}": [jax.ShapeDtypeStruct((n,), held)] for k, n in coords.items()}


def _join(processes: int | None, process_id: int, coordinator: str) -> None:
    """Waits for the others, where this command runs in several processes."""
    if process_id >= (processes or 1):
        raise typer.BadParameter(
            f"{process_id} is not below --processes {processes or 1}: count them from 0",
            param_hint="--process-id",
        )
    if not coordinator.rpartition(":")[2].isdecimal():
        raise typer.BadParameter(
            f"{coordinator!r} has no port: pass for example localhost:29400",
            param_hint="--coordinator",
        )
    if processes:
        jax.distributed.initialize(coordinator, processes, process_id)


def _announce(text: str) -> None:
    """Tells those who wait how far the measurement is; the first process alone speaks."""
    if jax.process_index() == 0:
        typer.echo(text, err=True)


def _workers(devices: list[Any]) -> str:
    if devices[0].platform == "cpu":
        return f"{len(devices)} CPU device(s) of one machine: a check, not a measure of speed"
    return f"{len(devices)} x {devices[0].device_kind}"
