"""Error benchmark: vNMSE of methods and topologies on synthetic or dumped gradients.

All workers run on one device, by ``jax.vmap(axis_name=...)``: errors do not depend on where workers
are. If a file says which leaves its gradients consist of, each leaf is measured by itself, too, and
the worst is named; `dq.worst_leaf_error` says why that matters. The whole gradient is reduced as
one flat array, in which small leaves share super-groups with their neighbours. `dq.psum` would sum
them exactly, so that none below `MIN_LEAF_SIZE` is the worst.
"""

import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.contenders import Contender
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.base import MIN_LEAF_SIZE

AXIS = "data"
SUPER_GROUP = 256


class Leaves(NamedTuple):
    """The leaves that a flat gradient consists of, one after the other."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Coordinates of each."""


class Errors(NamedTuple):
    """How far estimates are from the exact sum: arrays, stacked over seeds if of several."""

    vnmse: Any
    """[]: |estimate - sum|^2 / |sum|^2 of the whole gradient."""
    leaves: Any
    """[leaves]: the same of every leaf. Of a leaf whose sum is zero: 0 or infinity."""
    energies: Any
    """[leaves]: |sum|^2 of every leaf."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRow:
    """The error of one method on one topology, over seeds.

    Attributes:
      method: its name, with its bits.
      topology: how payloads travelled.
      n_workers: workers.
      bits_per_coord: wire bits, in units in which a bf16 all-reduce takes 16.
      vnmse: mean over seeds of |estimate - sum|^2 / |sum|^2.
      lowest: the least of them.
      highest: the largest.
      seeds: how many.
      worst_leaf: the name of the leaf with the largest relative error (mean over seeds), see
        `worst_leaf`; None if the gradients come without leaves, or if no leaf counts.
      worst_leaf_error: that error, |estimate - sum|^2 / |sum|^2 of this leaf.
    """

    method: str
    topology: str
    n_workers: int
    bits_per_coord: float
    vnmse: float
    lowest: float
    highest: float
    seeds: int
    worst_leaf: str | None
    worst_leaf_error: float | None


def load_gradients(file: Path, n_workers: int | None) -> jax.Array:
    """``gradients`` f32[n, d] of a .npz file, the first ``n_workers`` of them.

    Raises:
      ValueError: the file is not a .npz file, lacks the array, or holds fewer workers; numbers are
        NaN or infinite, or all are zero.
    """
    arrays = _read(file, "gradients")
    if "gradients" not in arrays:
        with np.load(file) as held:
            raise ValueError(
                f"{file} holds {sorted(held)}: save an array 'gradients' of shape [workers, d], "
                "as train_llm.py --dump-gradients does"
            )
    found, what = arrays["gradients"], f"'gradients' of {file}"
    if found.ndim != 2 or (n_workers or 2) > found.shape[0] or found.shape[0] < 2:
        raise ValueError(
            f"{what} has shape {found.shape} and {n_workers or 'at least 2'} "
            "workers are asked for: save [workers, d], or pass fewer --workers"
        )
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{what} has dtype {found.dtype}: save f32")
    with np.errstate(over="ignore"):  # f64 beyond f32 counts as infinite
        found = found[:n_workers].astype(np.float32)
    broken = found.size - np.count_nonzero(np.isfinite(found))
    if broken or not found.any():
        state = f"{broken:,} NaN or infinite" if broken else "no number but 0"
        raise ValueError(
            f"{what} has {state} among {found.size:,} numbers: dump the gradients of another step"
        )
    return jnp.asarray(found)


def _read(file: Path, *names: str) -> dict[str, np.ndarray]:
    """The arrays ``names`` of a .npz file, as far as it has them.

    Raises:
      ValueError: the file is of another kind, or broken.
    """
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise ValueError(f"{file} is not a .npz file: write it by numpy.savez")
    try:
        with np.load(file) as arrays:
            return {name: np.asarray(arrays[name]) for name in names if name in arrays}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read ({error}): write it again") from error


def load_leaves(file: Path, size: int) -> Leaves | None:
    """The leaves by ``names`` and ``sizes`` of a .npz file, or None if it has neither array.

    Args:
      file: where the gradients are.
      size: coordinates of a worker's gradient, which the leaves must add up to.

    Raises:
      ValueError: there are not as many names as sizes, or sizes are not whole numbers from 0 that
        add up.
    """
    arrays = _read(file, *Leaves._fields)
    if not arrays:
        return None
    names, sizes = (np.atleast_1d(arrays.get(key, ())).tolist() for key in Leaves._fields)
    if len(names) != len(sizes):
        raise ValueError(
            f"'names' of {file} has {len(names)} leaves and 'sizes' has {len(sizes)}: save one "
            "name and one size for each leaf, or neither array"
        )
    wrong = [n for n in sizes if not isinstance(n, int) or n < 0]
    if wrong:
        raise ValueError(
            f"'sizes' of {file} has {wrong[0]!r}: save whole numbers of coordinates, 0 or more"
        )
    if sum(sizes) != size:
        raise ValueError(
            f"'sizes' of {file} add up to {sum(sizes)} coordinates and 'gradients' has {size} of "
            "each worker: save the sizes of all leaves, in the order of their coordinates"
        )
    return Leaves(tuple(map(str, names)), tuple(map(int, sizes)))


def synthetic_gradients(n_workers: int, super_groups: int, seeds: int) -> Iterator[jax.Array]:
    """One draw of the paper's mixture per seed: f32[n, 256 * super_groups]."""
    for seed in range(seeds):
        yield lognormal_mixture(jax.random.key(seed), n_workers, super_groups, SUPER_GROUP)


def error_of(reduce: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The compiled function (f32[n, d], key) -> vNMSE of ``reduce(row, axis name, key=key)``."""
    errors = errors_of(reduce)
    return lambda x, key: errors(x, key).vnmse


def errors_of(
    reduce: Callable[..., jax.Array], sizes: Sequence[int] = ()
) -> Callable[[jax.Array, jax.Array], Errors]:
    """The compiled function (f32[n, d], key) -> `Errors` of ``reduce(row, axis name, key=key)``.

    Args:
      reduce: what is measured.
      sizes: coordinates of the leaves, one after the other.
    """
    bounds = np.cumsum([0, *sizes]).tolist()

    def leaves(x: jax.Array) -> list[jax.Array]:
        return [x[begin:end] for begin, end in pairwise(bounds)]

    @jax.jit
    def errors(x: jax.Array, key: jax.Array) -> Errors:
        out = jax.vmap(lambda row: reduce(row, AXIS, key=key), axis_name=AXIS)(x)
        estimate, exact = out[0], jnp.sum(x, axis=0)
        return Errors(
            vnmse=dq.vnmse(estimate, exact),
            leaves=jnp.array(jax.tree.map(dq.vnmse, leaves(estimate), leaves(exact)), jnp.float32),
            energies=jnp.array([jnp.sum(leaf**2) for leaf in leaves(exact)], jnp.float32),
        )

    return errors


def measure(
    reduce: Callable[..., jax.Array],
    gradients: Sequence[jax.Array],
    seeds: int,
    sizes: Sequence[int] = (),
) -> Errors:
    """The errors of every seed: f64[seeds], f64[seeds, leaves], f64[seeds, leaves].

    Args:
      reduce: what is measured, as for `errors_of`.
      gradients: f32[n, d], one for every seed, or one for all of them.
      seeds: how often.
      sizes: coordinates of the leaves, one after the other.
    """
    errors = errors_of(reduce, sizes)
    found = [
        jax.device_get(errors(gradients[i % len(gradients)], jax.random.key(i)))
        for i in range(seeds)
    ]
    return Errors(*(np.asarray(field, np.float64) for field in zip(*found, strict=True)))


def worst_leaf(found: Errors, sizes: Sequence[int]) -> int | None:
    """Which leaf has the largest error (mean over seeds), or None if no leaf counts.

    Leaves of less than `MIN_LEAF_SIZE` coordinates do not count, nor do those whose sum is zero: an
    estimate that is not zero would be infinitely wrong and hide all other leaves.
    """
    counts = (np.asarray(sizes) >= MIN_LEAF_SIZE) & np.any(found.energies != 0, axis=0)
    if not counts.any():
        return None
    return int(np.argmax(np.where(counts, found.leaves.mean(axis=0), -1)))


def bench_error(
    contenders: Sequence[tuple[Contender, str]],
    gradients: Sequence[jax.Array],
    seeds: int,
    leaves: Leaves | None = None,
) -> Iterator[tuple[ErrorRow, Errors]]:
    """One row for each (contender, name of its topology), and the errors of all its seeds.

    Args:
      contenders: what is compared.
      gradients: one for every seed, or one for all of them.
      seeds: how often each is measured.
      leaves: what the gradients consist of, if it is known.
    """
    names, sizes = leaves or Leaves((), ())
    for contender, topology in contenders:
        found = measure(contender.reduce, gradients, seeds, sizes)
        worst = worst_leaf(found, sizes)
        n_workers, size = gradients[0].shape
        passed = 2 * (n_workers - 1) / n_workers * size
        row = ErrorRow(
            method=contender.label.split()[0],
            topology=topology,
            n_workers=n_workers,
            bits_per_coord=8 * contender.wire_bytes(size, (n_workers,)) / passed,
            vnmse=float(found.vnmse.mean()),
            lowest=float(found.vnmse.min()),
            highest=float(found.vnmse.max()),
            seeds=seeds,
            worst_leaf=None if worst is None else names[worst],
            worst_leaf_error=None if worst is None else float(found.leaves[:, worst].mean()),
        )
        yield row, found
