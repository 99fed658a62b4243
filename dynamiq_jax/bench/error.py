"""Error benchmark: vNMSE of methods and topologies on synthetic or dumped gradients.

All workers run on one device, by ``jax.vmap(axis_name=...)``: errors do not depend on where workers
are. The limit line is the rate-distortion bound of the exact sum, for Gaussian coordinates whose
variance is that of their super-group: what a single encoding by any code could reach at best, when
the variances are known for nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynamiq_jax as dq
from dynamiq_jax.bench.contenders import Contender
from dynamiq_jax.synthetic import lognormal_mixture

AXIS = "data"
SUPER_GROUP = 256


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
    """

    method: str
    topology: str
    n_workers: int
    bits_per_coord: float
    vnmse: float
    lowest: float
    highest: float
    seeds: int


def load_gradients(file: Path, n_workers: int | None) -> jax.Array:
    """``gradients`` f32[n, d] of a .npz file, the first ``n_workers`` of them.

    Raises:
      ValueError: the file lacks the array, or holds fewer workers.
    """
    with np.load(file) as arrays:
        if "gradients" not in arrays:
            raise ValueError(
                f"{file} holds {sorted(arrays)}: save an array 'gradients' of shape [workers, d], "
                "as train_llm.py --dump-gradients does"
            )
        found = arrays["gradients"]
    if found.ndim != 2 or (n_workers or 2) > found.shape[0] or found.shape[0] < 2:
        raise ValueError(
            f"'gradients' of {file} has shape {found.shape} and {n_workers or 'at least 2'} "
            "workers are asked for: save [workers, d], or pass fewer --workers"
        )
    return jnp.asarray(found[:n_workers], jnp.float32)


def synthetic_gradients(n_workers: int, super_groups: int, seeds: int) -> Iterator[jax.Array]:
    """One draw of the paper's mixture per seed: f32[n, 256 * super_groups]."""
    for seed in range(seeds):
        yield lognormal_mixture(jax.random.key(seed), n_workers, super_groups, SUPER_GROUP)


def error_of(reduce: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The compiled function (f32[n, d], key) -> vNMSE of ``reduce(row, axis name, key=key)``."""

    @jax.jit
    def error(x: jax.Array, key: jax.Array) -> jax.Array:
        out = jax.vmap(lambda row: reduce(row, AXIS, key=key), axis_name=AXIS)(x)
        return dq.vnmse(out[0], jnp.sum(x, axis=0))

    return error


def bench_error(
    contenders: Sequence[tuple[Contender, str]], gradients: Sequence[jax.Array], seeds: int
) -> Iterator[ErrorRow]:
    """One row for each (contender, name of its topology).

    Args:
      contenders: what is compared.
      gradients: one for every seed, or one for all of them.
      seeds: how often each is measured.
    """
    for contender, topology in contenders:
        error = error_of(contender.reduce)
        keys = [jax.random.key(seed) for seed in range(seeds)]
        values = [float(error(gradients[i % len(gradients)], key)) for i, key in enumerate(keys)]
        n_workers, size = gradients[0].shape
        passed = 2 * (n_workers - 1) / n_workers * size
        yield ErrorRow(
            method=contender.label.split()[0],
            topology=topology,
            n_workers=n_workers,
            bits_per_coord=8 * contender.wire_bytes(size, (n_workers,)) / passed,
            vnmse=float(np.mean(values)),
            lowest=min(values),
            highest=max(values),
            seeds=seeds,
        )


def rate_distortion(gradient: jax.Array, bits: Sequence[float]) -> list[float]:
    """The bound on vNMSE at each number of bits per coordinate, by reverse water-filling.

    Args:
      gradient: f32[n, d]; its exact sum is what is coded.
      bits: bits per coordinate.
    """
    total = np.asarray(gradient, np.float64).sum(axis=0)
    rows = np.pad(total, (0, -total.size % SUPER_GROUP)).reshape(-1, SUPER_GROUP)
    variance = np.sort((rows**2).mean(axis=1))[::-1]
    variance = variance[variance > 0]
    share = len(variance) / len(rows)
    bounds = []
    for b in bits:
        low, high = np.log2(variance[-1]) - 2 * b - 64, np.log2(variance[0])
        for _ in range(80):
            water = (low + high) / 2
            rate = share * np.mean(np.maximum(np.log2(variance) - water, 0)) / 2
            low, high = (water, high) if rate > b else (low, water)
        bounds.append(float(np.minimum(variance, 2.0**high).sum() / variance.sum()))
    return bounds


def plot_error(path: Path, rows: Sequence[ErrorRow], gradient: jax.Array, title: str) -> None:
    """Error against wire bits, one curve per method and topology, and the bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Any = figure.subplots()
    for curve in dict.fromkeys((row.method.split(":")[0], row.topology) for row in rows):
        own = [row for row in rows if (row.method.split(":")[0], row.topology) == curve]
        own.sort(key=lambda row: row.bits_per_coord)
        bits = [row.bits_per_coord for row in own]
        style = "-" if len(own) > 1 else ""
        axes.plot(bits, [row.vnmse for row in own], marker="o", ls=style, label=" ".join(curve))
    span = [row.bits_per_coord for row in rows]
    bits = np.linspace(min(2.0, *span), max(9.0, *span) if max(span) < 16 else 16, 60).tolist()
    bound = rate_distortion(gradient, bits)
    axes.plot(bits, bound, color="black", linestyle="--", label="rate-distortion bound")
    axes.set(yscale="log", xlabel="wire bits per coordinate", ylabel="vNMSE")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, fontsize="medium", wrap=True)
    figure.savefig(path, dpi=150)
