"""vNMSE on the synthetic mixture by topology, and the ablation of DynamiQ's ingredients.

    python benchmarks/accuracy.py [--seeds 6] [--super-groups 4096] [--workers 8]
    python benchmarks/accuracy.py --gradients FILE.npz     # as written by train_llm.py
    python benchmarks/accuracy.py --topology ring,butterfly,direct --rows "default, 5"

Prints one row per configuration: mean vNMSE over seeds, and its spread.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax.synthetic import lognormal_mixture

PAPER = {"levels": "geometric", "rounding": "correlated"}
ROWS = {
    **{f"default, {b} bits": dq.DynamiQ(bits=b) for b in (3.0, 4.0, 5.0, 6.0)},
    **{
        f"paper's levels and rounding, {b} bits": dq.DynamiQ(bits=b, **PAPER)
        for b in (3.0, 4.0, 5.0, 6.0)
    },
    "ablation, 5 bits: one width, uniform levels, bf16 scales": dq.DynamiQ(
        widths=(4,), bits=5.0, levels="uniform", rounding="independent", group_scale="bf16",
        group_size=32,
    ),
    "ablation, 5 bits: + non-uniform levels": dq.DynamiQ(
        widths=(4,), bits=5.0, levels="geometric", rounding="independent", group_scale="bf16",
        group_size=32,
    ),
    "ablation, 5 bits: + variable width": dq.DynamiQ(
        bits=5.0, levels="geometric", rounding="independent", group_scale="bf16", group_size=32
    ),
    "ablation, 5 bits: + hierarchical scales": dq.DynamiQ(
        bits=5.0, levels="geometric", rounding="independent"
    ),
    "ablation, 5 bits: + correlated rounding": dq.DynamiQ(bits=5.0, **PAPER),
    "ours: antithetic rounding": dq.DynamiQ(
        bits=5.0, levels="geometric", rounding="antithetic"
    ),
    "ours: + piecewise levels (the default)": dq.DynamiQ(bits=5.0),
}  # fmt: skip


TOPOLOGIES = {
    "ring": dq.Ring(unroll_up_to=8),
    "butterfly": dq.Butterfly(),
    "direct": dq.Direct(),
}


def measure(method: dq.DynamiQ, topology, gradients: list, seeds: int) -> list[float]:
    """vNMSE of each gradient (f32[n, d]) under each seed."""
    method = dataclasses.replace(method, min_leaf_size=1, min_bucket_size=1)

    @jax.jit
    def error(x, key):
        def one(x):
            return dq.psum(x, "w", method=method, topology=topology, key=key)

        out = jax.vmap(one, axis_name="w")(x)
        return dq.vnmse(out[0], jnp.sum(x, axis=0))

    return [float(error(x, jax.random.key(s))) for x in gradients for s in range(seeds)]


def main() -> None:
    """Measures every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--super-groups", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gradients", default=None)
    parser.add_argument("--topology", default="ring", help=", ".join(TOPOLOGIES))
    parser.add_argument("--rows", default="", help="only those whose name contains this")
    args = parser.parse_args()
    if args.gradients:
        gradients, seeds = [jnp.asarray(np.load(args.gradients)["gradients"])], args.seeds
    else:
        keys = [jax.random.key(s) for s in range(args.seeds)]
        gradients = [lognormal_mixture(k, args.workers, args.super_groups) for k in keys]
        seeds = 1
    table = Table("configuration", "topology", "vNMSE", "lowest", "highest")
    for name, method in ROWS.items():
        for topology in args.topology.split(",") if args.rows in name else ():
            values = measure(method, TOPOLOGIES[topology], gradients, seeds)
            figures = (f"{v:.3e}" for v in (np.mean(values), min(values), max(values)))
            table.add_row(name, topology, *figures)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
