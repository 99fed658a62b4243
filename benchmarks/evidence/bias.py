"""Squared error and squared bias of paired roundings, by topology and number of workers.

    python benchmarks/evidence/bias.py [--coordinates 65536] [--keys 24] [--bits 5]

Gradients are Gaussian and unrelated between workers. The squared bias is that of the mean over all
keys, less what the noise of that mean contributes.
"""

import argparse

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq

WORKERS = (2, 3, 4, 5, 8)


def errors(method: dq.DynamiQ, topology, n: int, size: int, keys: int) -> tuple[float, float]:
    """Mean vNMSE over keys, and squared bias over squared error (unitless)."""
    x = jax.random.normal(jax.random.key(n), (n, size))
    exact = np.asarray(x, np.float64).sum(axis=0)

    def one(x, key):
        return dq.psum(x, "data", method=method, topology=topology, key=key)

    run = jax.jit(jax.vmap(one, in_axes=(0, None), axis_name="data"))
    norm = np.sum(exact**2)
    total, squares = np.zeros(size), []
    for i in range(keys):
        error = np.asarray(run(x, jax.random.key(i))[0], np.float64) - exact
        squares.append(np.sum(error**2) / norm)
        total += error
    error = float(np.mean(squares))
    bias = np.sum((total / keys) ** 2) / norm
    return error, float((bias - error / keys) * keys / (keys - 1) / error)


def main():
    """Prints one row for every number of workers and topology."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinates", type=int, default=65_536)
    parser.add_argument("--keys", type=int, default=24)
    parser.add_argument("--bits", type=float, default=5.0)
    given = parser.parse_args()
    table = Table("workers", "topology", "vNMSE", "bias² / error²", "independent rounding")
    for n in WORKERS:
        for topology in (dq.Direct(), dq.Ring()):
            (error, bias), (alone, _) = (
                errors(
                    dq.Compression(dq.DynamiQ(bits=given.bits, rounding=r), min_bucket_bytes=0),
                    topology,
                    n,
                    given.coordinates,
                    given.keys,
                )
                for r in ("antithetic", "independent")
            )
            name = type(topology).__name__
            table.add_row(str(n), name, f"{error:.4f}", f"{bias:.1%}", f"{alone:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
