"""Shows low bits on your own gradients: widths and errors leaf by leaf, and errors by budget.

    python examples/train_llm.py --method f32 --steps 61 --dump-gradients grads.npz --dump-step 60
    python examples/inspect_gradients.py grads.npz

reads every worker's gradient of one step, as ``train_llm.py`` and ``save_gradients`` there write
them: ``gradients`` f32 [workers, d], ``names`` and ``sizes`` of the leaves in it. It averages them
with DynamiQ at several bits on one device, and shows

* the mean widths that DynamiQ gives each leaf at ``--bits``, in the first encoding, of a worker's
  own share, and in the last, of the sum: wide where the *sum* is large, above a floor for all;
* each leaf's relative error, |mean - exact|^2 / |exact|^2, at every budget;
* the error of the whole gradient and of its worst leaf against the bytes that a worker sends.

The table goes to the terminal, a picture and all numbers to ``--out``. Own training codes write
such a file with `save_gradients(file, step, grads)`, whose leaves have a leading axis of workers.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

import dynamiq_jax as dq
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.methods.base import MIN_LEAF_SIZE, Call
from dynamiq_jax.methods.dynamiq.plan import plan_widths

AXIS = "data"
EXACT_WIDTH = 16.0
"""That stands for leaves which are too small to compress."""
Leaves = Mapping[str, np.ndarray]
"""f32 [workers, size] of every leaf by name."""
Widths = Mapping[str, float]
"""The mean width of every leaf."""


class Found(NamedTuple):
    """Errors and bytes of one budget."""

    bits: float
    leaf_errors: dict[str, float]
    vnmse: float
    wire_bytes: float


def read(file: Path) -> Leaves:
    """The leaves of a file.

    Raises:
      ValueError: it is no such file, or the sizes of its leaves are not those of its gradients.
    """
    try:
        with np.load(file) as kept:
            gradients, names, sizes = (kept[name] for name in ("gradients", "names", "sizes"))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{file} has no gradients, names and sizes: {error}") from error
    if gradients.ndim != 2 or gradients.shape[0] < 2:
        raise ValueError(
            f"{file}: gradients of shape {gradients.shape}; expected those of two workers or more, "
            "[workers, d]"
        )
    if sizes.sum() != gradients.shape[1]:
        raise ValueError(
            f"{file}: leaves of {sizes.sum()} coordinates in all, and gradients of "
            f"{gradients.shape[1]}; write both from the same tree"
        )
    parts = np.split(gradients, np.cumsum(sizes)[:-1], axis=1)
    return dict(zip(map(str, names), parts, strict=True))


def exact_mean(leaves: Leaves) -> dict[str, np.ndarray]:
    """f64 [size] of every leaf."""
    return {name: leaf.astype(np.float64).mean(axis=0) for name, leaf in leaves.items()}


def relative(error: np.ndarray, exact: np.ndarray) -> float:
    """|error|^2 / |exact|^2; 0 of nothing."""
    norm = float(np.sum(exact**2))
    return float(np.sum(error**2)) / norm if norm else 0.0


def average(leaves: Leaves, bits: float) -> Found:
    """Reduces gradients at ``bits`` per coordinate, and compares with their exact mean."""
    method = dq.Compression(
        dq.DynamiQ(bits=bits), topology=dq.Direct(), min_bucket_size=1, min_bucket_bytes=0
    )
    n_workers = next(iter(leaves.values())).shape[0]

    @jax.jit
    def mean(leaves: Leaves) -> dict[str, jax.Array]:
        own = jax.vmap(lambda tree: dq.pmean(tree, AXIS, method=method), axis_name=AXIS)(
            dict(leaves)
        )
        return jax.tree.map(lambda copies: copies[0], own)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="bits=.* slows training")  # what is shown here
        found, exact = jax.device_get(mean(leaves)), exact_mean(leaves)
    errors = {name: found[name] - exact[name] for name in leaves}
    whole = [np.concatenate([part[name] for name in leaves]) for part in (errors, exact)]
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in leaves.items()
    }
    cost = method.explain(shapes, n_workers, verbose=False)
    return Found(
        bits,
        {name: relative(errors[name], exact[name]) for name in leaves},
        relative(*whole),
        cost.wire_bytes,
    )


def mean_widths(leaves: Leaves, bits: float, stage: int) -> dict[str, float]:
    """The mean width, in bits, that an encoding gives each leaf; 16 of small leaves.

    Stage 0 is the first encoding, of a worker's own share; stage -1 the last, of the finished sum.

    A super-group on the border of two leaves counts for both, by its coordinates.
    """
    method = dq.DynamiQ(bits=bits)
    large = {k: v for k, v in leaves.items() if v.shape[1] >= MIN_LEAF_SIZE}
    if not large:
        return dict.fromkeys(leaves, EXACT_WIDTH)
    flat = np.concatenate([large[name] for name in sorted(large)], axis=1)  # a dict's tree order
    bound = method.bind(flat.shape[1], flat.shape[0], dq.Direct())
    seed = jax.numpy.zeros((), "uint32")  # rounding does not matter here
    call = Call(Axis((AXIS,)), dq.Direct(), seed)

    @jax.jit
    def widths(flat: jax.Array) -> jax.Array:
        plans = jax.vmap(lambda x: method.agreed(x, call, bound).plan, axis_name=AXIS)(flat)
        return plan_widths(jax.tree.map(lambda x: x[0], plans), stage)

    each = np.repeat(np.asarray(widths(flat)), method.format.super_group_size)[: flat.shape[1]]
    ends = np.cumsum([large[name].shape[1] for name in sorted(large)])[:-1]
    parts = dict(zip(sorted(large), np.split(each, ends), strict=True))
    return {name: float(parts[name].mean()) if name in parts else EXACT_WIDTH for name in leaves}


def table(
    leaves: Leaves, first: Widths, last: Widths, found: Sequence[Found], bits: float
) -> Table:
    """A row for every leaf, and one for all."""
    exact = exact_mean(leaves)
    energy = {name: float(np.sum(x**2)) for name, x in exact.items()}
    total, coords = sum(energy.values()) or 1.0, sum(x.size for x in exact.values())
    columns = ["leaf", "coords", "energy", f"widths at {bits:g}"]
    columns += [f"{f.bits:g} bits" for f in found]
    title = "relative errors of the mean of each leaf"
    out = Table(*(Column(name, justify="right", no_wrap=True) for name in columns), title=title)
    for name, x in exact.items():
        exactly = first[name] == EXACT_WIDTH
        errors = ("exact" if exactly else f"{f.leaf_errors[name]:.1e}" for f in found)
        out.add_row(
            name,
            f"{x.size:,}",
            f"{energy[name] / total:.1%}",
            f"{first[name]:.1f}, {last[name]:.1f}",
            *errors,
        )
    out.add_section()
    out.add_row("all", f"{coords:,}", "100%", "", *(f"{f.vnmse:.1e}" for f in found))
    return out


def draw(first: Widths, last: Widths, found: Sequence[Found], bits: float, file: Path) -> None:
    """Widths and errors by leaf, errors by budget."""
    names = list(first)
    figure = Figure(figsize=(15, 1.8 + 0.16 * len(names)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    rows = np.arange(len(names))
    for moved, label, widths in ((-0.2, "first encoding", first), (0.2, "last", last)):
        left.barh(rows + moved, [widths[name] for name in names], height=0.4, label=label)
    left.legend(fontsize="small")
    left.set_yticks(rows, names, fontsize="x-small")
    left.set(xlabel=f"mean width at {bits:g} bits", ylim=(len(names), -1))
    for f in found:
        large = [i for i, name in enumerate(names) if first[name] != EXACT_WIDTH]
        errors = [f.leaf_errors[names[i]] for i in large]
        middle.plot(errors, large, "o", label=f"{f.bits:g} bits")
    middle.set(xscale="log", xlabel="relative error of the leaf", ylim=(len(names), -1), yticks=[])
    middle.legend(fontsize="small")
    sent = [f.wire_bytes / 1e6 for f in found]
    right.plot(sent, [f.vnmse for f in found], "o-", label="whole gradient (vNMSE)")
    right.plot(sent, [max(f.leaf_errors.values()) for f in found], "s--", label="worst leaf")
    for x, f in zip(sent, found, strict=True):
        right.annotate(f"{f.bits:g}", (x, f.vnmse), textcoords="offset points", xytext=(4, 4))
    right.set(yscale="log", xlabel="MB sent by a worker in a step", ylabel="relative error")
    right.legend(fontsize="small")
    figure.savefig(file, dpi=130)


def main(
    file: Annotated[Path, typer.Argument(help="of gradients, names and sizes")],
    budgets: Annotated[str, typer.Option(help="bits per coordinate")] = "3,3.5,4,5,6",
    bits: Annotated[float, typer.Option(help="whose widths are shown")] = 5.0,
    out: Annotated[Path, typer.Option(file_okay=False, help="for PNG and JSON")] = Path("runs"),
) -> None:
    """Shows what bits do to the gradients of a file."""
    try:
        leaves = read(file)
        found = [average(leaves, float(budget)) for budget in budgets.split(",")]
        first, last = (mean_widths(leaves, bits, stage) for stage in (0, -1))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console(width=max(Console().width, 120)).print(table(leaves, first, last, found, bits))
    out.mkdir(parents=True, exist_ok=True)
    draw(first, last, found, bits, out / "gradients.png")
    widths = {"first": first, "last": last}
    record = {"file": str(file), "widths": widths, "budgets": [f._asdict() for f in found]}
    (out / "gradients.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"picture and numbers: {out / 'gradients.png'}, .json")


if __name__ == "__main__":
    typer.run(main)
