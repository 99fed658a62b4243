"""Counts the machine instructions that the GPU kernels compile to, per coordinate, without a GPU.

    python -m venv /path/to/venv && /path/to/venv/bin/pip install triton
    python benchmarks/static_instructions.py --python /path/to/venv/bin/python [--widths 4,5]

Takes what Pallas makes of each kernel, has a Triton of its own compile it for Hopper, and counts
the lines of machine code of one tile of one width. What such a kernel executes is within 10% of
that (`count_instructions.py`): it has hardly any branches. The Triton inside of XLA may be another
version than the one that is given here, and lay out a tile in another way.
"""

import collections
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
import typer
from jax._src.pallas.triton import lowering  # there is no public way to what it makes
from tune_kernels import arguments, calls, inputs

import pallas_kernels as pk
from pallas_kernels import backend
from pallas_kernels.tuning import tuning_for

COORDS = 2**18
COMPILE = """
import json, os, re, subprocess, sys, triton
from triton.backends.compiler import GPUTarget
file, warps = sys.argv[1], int(sys.argv[2])
options = {"num_warps": warps, "num_stages": 1}
kernel = triton.compile(file, target=GPUTarget("cuda", 90, 32), options=options)
with open(file + ".cubin", "wb") as cubin:
    cubin.write(kernel.asm["cubin"])
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
run = lambda option: subprocess.run(
    [tool, option, file + ".cubin"], capture_output=True, text=True, check=True
).stdout
line = re.compile(r"\\s+/\\*[0-9a-f]{4,}\\*/\\s+(?:@!?U?P\\w+\\s+)?([A-Z][A-Z0-9_]*)")
codes = [found[1] for found in map(line.match, run("-sass").splitlines()) if found]
registers = re.search(r"REG:(\\d+)", run("--dump-resource-usage"))[1]
print(json.dumps({"codes": codes, "registers": registers, "triton": triton.__version__}))
"""


def ir_of(function, *args) -> str:
    """The Triton IR of the one kernel that a jitted function calls."""
    found = []
    original = lowering.lower_jaxpr_to_triton_module

    def keep(*args, **options):
        result = original(*args, **options)
        found.append(str(result.module))
        return result

    lowering.lower_jaxpr_to_triton_module = keep
    try:
        function.trace(*args).lower(lowering_platforms=("cuda",))
    finally:
        lowering.lower_jaxpr_to_triton_module = original
    return found[0]


def kernels(width: int, dtype, dither: bool):
    """The kernels that `tune_kernels.py` times and their arguments, by name."""
    levels = "piecewise" if dither else "companded"
    fmt = pk.WireFormat(widths=(width,), levels=levels, dither=dither)
    layout, x, y, mean, order, tiles, noise = inputs(fmt, width + 1.0, COORDS, dtype=dtype)
    payload = jnp.zeros((1, layout.payload_words[0]), jnp.uint32)
    args = arguments(payload, x, y, mean, order, tiles, noise)
    del args["statistics"]
    functions = calls(fmt, layout, "triton", dtype)
    return {name: (functions[name], of) for name, of in args.items()}


def main(
    python: Annotated[Path, typer.Option(help="A Python that has Triton.")],
    widths: Annotated[str, typer.Option(help="Widths, one kernel each.")] = "4,5",
    dtype: Annotated[str, typer.Option(help="Of the gradient.")] = "bfloat16",
    dither: Annotated[bool, typer.Option(help="Of the format.")] = False,
) -> None:
    """Compiles and prints."""
    backend._on_nvidia = lambda: True  # they are only lowered
    for width in map(int, widths.split(",")):
        for name, (function, args) in kernels(width, jnp.dtype(dtype), dither).items():
            warps = tuning_for(name).num_warps
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "kernel.ttir"
                file.write_text(re.sub(r"loc\(.*?\)$", "", ir_of(function, *args), flags=re.M))
                command = [python, "-c", COMPILE, file, str(warps)]
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {python} failed:\n{done.stderr[-3000:]}")
            told = json.loads(done.stdout.splitlines()[-1])
            each = (
                warps * 32 / (pk.TILE_ROWS * pk.WireFormat().super_group_size)
            )  # of a line, per coordinate
            most = collections.Counter(told["codes"]).most_common(12)
            text = " ".join(f"{code}:{count * each:.2f}" for code, count in most)
            total = f"{len(told['codes']) * each:.1f}"
            print(f"width {width} {name}: {total}, {told['registers']} registers: {text}")


if __name__ == "__main__":
    typer.run(main)
