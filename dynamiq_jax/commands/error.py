"""`dynamiq-jax error`: vNMSE of methods and topologies on synthetic or dumped gradients.

All workers run on one device, by ``jax.vmap(axis_name=...)``: errors do not depend on where workers
are. The gradient is reduced as one flat array. If a file says which leaves it consists of, the
worst is named, too; `methods.metrics.worst_leaf_error` says why that matters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from dynamiq_jax.commands import options
from dynamiq_jax.commands.bench import contenders, tables
from dynamiq_jax.commands.bench.contenders import Contender
from dynamiq_jax.commands.options import announce, checked, out_of_memory
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.base import MIN_LEAF_SIZE
from dynamiq_jax.methods.metrics import vnmse

AXIS = "data"
SUPER_GROUP = 256
PREDICTS = (
    "vNMSE does not predict the loss: compare losses of short trainings, or the worst leaf's error "
    "of a gradient (--gradients; docs/results.md)"
)
"""The line under the table."""


class Leaves(NamedTuple):
    """The leaves that a flat gradient consists of, one after the other."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    """Coordinates of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRow:
    """The error of one method on one topology: vNMSE as mean, least and largest over seeds.

    Wire bits are in units in which a bf16 all-reduce takes 16. The worst leaf has the largest error
    (mean over seeds) of those of `MIN_LEAF_SIZE` coordinates and more whose sums are not zero;
    `None` if there are none.
    """

    method: str
    topology: str
    n_workers: int
    bits_per_coord: float
    vnmse: float
    lowest: float
    highest: float
    seeds: int
    worst_leaf: str | None = None
    worst_leaf_error: float | None = None


def command(
    methods: Annotated[
        str, typer.Option(help="Methods, with their wire bits where they have a choice.")
    ] = "dynamiq:3,dynamiq:4,dynamiq:5,dynamiq:6,dynamiq-dither:4,mxfp8,mxfp4,minmax:4,thc:4",
    topology: Annotated[str, typer.Option(help="direct, ring, butterfly, or several.")] = "direct",
    workers: Annotated[
        int | None, typer.Option(min=2, help="Number of workers (default: 8, or all of the file).")
    ] = None,
    super_groups: options.SuperGroups = None,
    seeds: options.Seeds = 3,
    gradients: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help=".npz with an array 'gradients' [workers, d], and for the worst leaf 'names' and "
            "'sizes' of all leaves.",
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Measure the error of methods on synthetic or dumped gradients, and what they send.

    The worst leaf is the one with the largest relative error, if the file says what leaves it has:
    one of at least 4096 coordinates, since psum would sum smaller ones exactly.
    """
    options.writable(json_file, gradients)
    chosen = []
    for text in contenders.parts(methods):
        own = contenders.is_native(checked("--methods", contenders.make_method, text))
        for name in ["native"] if own else contenders.parts(topology):
            route = None if own else checked("--topology", contenders.parse_topology, name)
            chosen.append((checked("--methods", contenders.parse_method, text, route), name))
    rows_of, leaves = super_groups or 4096, Leaves()
    shape, found = (workers or 8, SUPER_GROUP * rows_of), []
    what = f"synthetic mixture, {rows_of} super-groups"
    if gradients is not None:
        own, leaves = checked("--gradients", load, gradients, workers)
        found, shape, what = [own], own.shape, str(gradients)
    for contender, _ in chosen:
        checked("--methods --topology", contender.wire_bytes, shape[1], shape[:1])
    rows = []
    try:
        found = found or jax.block_until_ready(synthetic_gradients(shape[0], rows_of, seeds))
        for done, (contender, name) in enumerate(chosen):
            announce(f"{done + 1} of {len(chosen)}: {contender.label}")
            rows.append(bench_error(contender, name, found, seeds, leaves))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        raise typer.BadParameter(
            f"{shape[0]} workers of {shape[1]:,} coordinates take {4 * math.prod(shape):,} bytes, "
            "and several times as much while they are reduced, which this device does not have: "
            "pass fewer, or fewer --super-groups",
            param_hint="--workers",
        ) from error
    title = f"vNMSE on {what}, {shape[0]} workers, {seeds} seed(s)"
    columns = tables.ERROR_COLUMNS + (tables.LEAF_COLUMNS if leaves.names else ())
    tables.report(rows, columns, title, jax.devices()[:1], json_file)
    typer.echo(PREDICTS)


def load(file: Path, n_workers: int | None) -> tuple[jax.Array, Leaves]:
    """The first ``n_workers`` of ``gradients`` f32[n, d] in a .npz file, and their leaves.

    It refuses other files, fewer workers, NaN and infinity, and leaves that do not fit.
    """
    names = ("gradients", *Leaves._fields)
    try:
        with np.load(file) as kept:
            arrays = {name: np.asarray(kept[name]) for name in names if name in kept}
    except Exception as error:  # NumPy, zipfile and zlib have many for files that are broken
        raise ValueError(
            f"{file} cannot be read ({error}): write a .npz file by numpy.savez"
        ) from error
    if "gradients" not in arrays:
        raise ValueError(
            f"{file} has no array 'gradients': save one of shape [workers, d], as train_llm.py "
            "--dump-gradients does"
        )
    found, what = arrays["gradients"], f"'gradients' of {file}"
    if found.ndim == 2 and not found.shape[1]:
        raise ValueError(f"{what} has shape {found.shape}, without coordinates: save [workers, d]")
    if found.ndim != 2 or (n_workers or 2) > found.shape[0] or found.shape[0] < 2:
        raise ValueError(
            f"{what} has shape {found.shape}, and {n_workers or 'at least 2'} workers are needed: "
            "save [workers, d], or pass fewer --workers"
        )
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{what} has dtype {found.dtype}: save f32")
    with np.errstate(over="ignore"):  # f64 beyond f32 counts as infinite
        found = found[:n_workers].astype(np.float32)
    if broken := found.size - np.count_nonzero(np.isfinite(found)):
        raise ValueError(
            f"{what} has {broken:,} NaN or infinite among {found.size:,} numbers: dump the "
            "gradients of another step"
        )
    names, sizes = (np.ravel(arrays.get(key, ())).tolist() for key in Leaves._fields)
    if wrong := [size for size in sizes if not isinstance(size, int) or size < 0]:
        raise ValueError(
            f"'sizes' of {file} has {wrong[0]!r}: save the coordinates of every leaf, as integers "
            "from 0 on"
        )
    if len(names) != len(sizes) or (sizes and sum(sizes) != found.shape[1]):
        raise ValueError(
            f"{file} has {len(names)} names and {len(sizes)} sizes of leaves with {sum(sizes):,} "
            f"coordinates, and 'gradients' has {found.shape[1]:,} of each worker: save name and "
            "size of every leaf in the order of their coordinates, or neither array"
        )
    return jnp.asarray(found), Leaves(tuple(map(str, names)), tuple(map(int, sizes)))


def synthetic_gradients(n_workers: int, super_groups: int, seeds: int) -> list[jax.Array]:
    """One draw of the paper's mixture per seed: f32[n, 256 * super_groups]."""
    keys = map(jax.random.key, range(seeds))
    return [lognormal_mixture(key, n_workers, super_groups, SUPER_GROUP) for key in keys]


def measure(
    reduce: Callable[..., jax.Array],
    gradients: Sequence[jax.Array],
    seeds: int,
    sizes: Sequence[int] = (),
) -> np.ndarray:
    """The vNMSE of ``reduce(row, axis name, key=key)``, f64[seeds, 1 + leaves]: first that of all.

    Gradients are f32[n, d], one for every seed, or one for all of them; ``sizes`` are the
    coordinates of the leaves, one after the other. A sum that is zero has 0 or infinity.
    """
    bounds = np.cumsum(sizes).tolist()[:-1]

    @jax.jit
    def errors(x: jax.Array, key: jax.Array) -> jax.Array:
        out = jax.vmap(lambda row: reduce(row, AXIS, key=key), axis_name=AXIS)(x)
        estimate, exact = out[0], jnp.sum(x, axis=0)
        leaves = (jnp.split(flat, bounds) if sizes else [] for flat in (estimate, exact))
        return jnp.stack([vnmse(estimate, exact), *map(vnmse, *leaves)])

    found = [errors(gradients[i % len(gradients)], jax.random.key(i)) for i in range(seeds)]
    return np.asarray(jax.device_get(found), np.float64)


def bench_error(
    contender: Contender,
    topology: str,
    gradients: Sequence[jax.Array],
    seeds: int,
    leaves: Leaves | None = None,
) -> ErrorRow:
    """The row of a contender over the topology of that name; gradients as `measure` has them."""
    names, sizes = leaves or Leaves()
    found = measure(contender.reduce, gradients, seeds, sizes)
    counted, leaf = found[:, 1:].mean(axis=0), {}
    # An estimate of a sum that is zero would be infinitely wrong and hide all other leaves.
    counted = np.where((np.array(sizes) >= MIN_LEAF_SIZE) & np.isfinite(counted), counted, -1)
    if np.any(counted >= 0):
        worst = int(np.argmax(counted))
        leaf = {"worst_leaf": names[worst], "worst_leaf_error": float(counted[worst])}
    n, size = gradients[0].shape
    return ErrorRow(
        method=contender.label.split()[0],
        topology=topology,
        n_workers=n,
        bits_per_coord=8 * contender.wire_bytes(size, (n,)) / (2 * (n - 1) / n * size),
        vnmse=float(np.mean(found[:, 0])),
        lowest=float(np.min(found[:, 0])),
        highest=float(np.max(found[:, 0])),
        seeds=seeds,
        **leaf,
    )
