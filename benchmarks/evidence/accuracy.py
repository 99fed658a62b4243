"""vNMSE on the synthetic mixture by topology, and the ablation of DynamiQ's ingredients.

    python benchmarks/evidence/accuracy.py [--seeds 6] [--super-groups 4096] [--workers 8]
    python benchmarks/evidence/accuracy.py --gradients FILE.npz     # as written by train_llm.py
    python benchmarks/evidence/accuracy.py --topology ring,butterfly,direct --rows "default, 5"

Prints one row per configuration: mean vNMSE over seeds, and its spread.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax.commands.bench.contenders import LEAST_SQUARED_ERROR, PAPER
from dynamiq_jax.commands.bench.error import error_of, load_gradients
from dynamiq_jax.commands.synthetic import lognormal_mixture

_FORMAT = dq.Format(group_size=16, levels="geometric", subtract_mean=True)
"""The paper's."""
_PLAIN = replace(_FORMAT, group_scale="bf16", group_size=32)
_START = PAPER | {"rounding": "independent", "format": _PLAIN}
_UNIFORM = {"widths": (4,), "format": replace(_PLAIN, levels="uniform")}
_PIECEWISE = {"rounding": "antithetic", "format": replace(_FORMAT, levels="piecewise")}
_SMALL_GROUPS = {"widths": (2, 4, 8), "format": dq.Format(levels="piecewise", group_size=16)}
PAPERS_ABLATION = {
    "one width, uniform levels, bf16 scales": _START | _UNIFORM,
    "+ non-uniform levels": _START | {"widths": (4,)},
    "+ variable width": _START,
    "+ hierarchical scales": PAPER | {"rounding": "independent"},
    "+ correlated rounding": PAPER,
}
"""The paper's ingredients, added one after the other."""

OUR_ABLATION = {
    "ours: antithetic rounding": PAPER | {"rounding": "antithetic"},
    "ours: + piecewise levels": PAPER | _PIECEWISE,
    "ours: + means not sent": LEAST_SQUARED_ERROR | _SMALL_GROUPS,
    "ours: + groups of 32": LEAST_SQUARED_ERROR | {"widths": (2, 4, 8)},
    "ours: + widths 6 and 10: the least squared error": LEAST_SQUARED_ERROR,
    "ours: + floors": {"format": dq.Format(levels="piecewise")},
    "ours: + companded levels: the default": {},
}
"""The library's changes to the paper's method, one after the other."""

BITS = (3.0, 4.0, 5.0, 6.0)
ROWS = {
    **{f"default, {b} bits": dq.DynamiQ(bits=b) for b in BITS},
    **{f"least squared error, {b} bits": dq.DynamiQ(bits=b, **LEAST_SQUARED_ERROR) for b in BITS},
    **{f"the paper's configuration, {b} bits": dq.DynamiQ(bits=b, **PAPER) for b in BITS},
    **{f"5 bits: {name}": dq.DynamiQ(**fields) for name, fields in PAPERS_ABLATION.items()},
    **{f"5 bits, {name}": dq.DynamiQ(**fields) for name, fields in OUR_ABLATION.items()},
}


TOPOLOGIES = {
    "ring": dq.Ring(unroll_up_to=1),
    "butterfly": dq.Butterfly(),
    "direct": dq.Direct(),
}


def measure(method: Any, topology: Any, gradients: list, seeds: int) -> list[float]:
    """vNMSE of each gradient (f32[n, d]) under each seed, however small its leaves are."""
    request = dq.Compression(method, topology=topology, min_leaf_size=1, min_bucket_size=1)
    error = error_of(partial(dq.psum, method=request))
    return [float(error(x, jax.random.key(s))) for x in gradients for s in range(seeds)]


def main() -> None:
    """Measures every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--super-groups", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gradients", type=Path)
    parser.add_argument("--topology", default="ring", help=", ".join(TOPOLOGIES))
    parser.add_argument("--rows", default="", help="only those whose name contains this")
    args = parser.parse_args()
    if args.gradients:
        gradients, seeds = [load_gradients(args.gradients, None)], args.seeds
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
