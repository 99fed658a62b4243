"""Counts the machine instructions that the GPU kernels execute per coordinate.

    python benchmarks/count_instructions.py [--widths 2,4,8]

Runs each kernel once on 2^24 coordinates under Nsight Compute (``ncu`` must be on the PATH) and
divides the thread instructions it counted by the number of coordinates. Beside the totals it
prints the opcodes that make them up.
"""

import argparse
import collections
import csv
import io
import os
import re
import subprocess
import sys

COORDS = 2**24
METRICS = {
    "smsp__inst_executed.sum": "warp instructions",
    "sm__inst_executed_pipe_alu.sum": "ALU",
    "sm__inst_executed_pipe_fma.sum": "FMA",
    "sm__inst_executed_pipe_xu.sum": "XU",
    "sm__inst_executed_pipe_lsu.sum": "LSU",
}


def worker(width: int) -> None:
    """Runs the kernels, for ncu to watch."""
    import jax
    import jax.numpy as jnp
    from tune_kernels import arguments, calls, inputs

    import pallas_kernels as pk

    fmt = pk.WireFormat() if width < 0 else pk.WireFormat(widths=(width,))
    layout, x, y, mean, order, tiles, noise = inputs(fmt, 5.0 if width < 0 else width + 1, COORDS)
    fs = calls(fmt, layout, "triton", jnp.bfloat16)
    payload = fs["compress"](x, order, tiles, noise[0])
    args = arguments(payload, x, y, mean, order, tiles, noise)
    for name in ("decompress_accumulate_recompress", "decompress", "statistics"):
        jax.block_until_ready(fs[name](*args[name]))


def ncu(width: str, *options: str) -> list[list[str]]:
    """CSV rows of one profiled worker."""
    command = ["ncu", "--clock-control", "none", "-k", "regex:dynamiq", "--csv", *options]
    command += [sys.executable, __file__, "--worker", width]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise SystemExit(f"ncu reported nothing:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return list(csv.reader(io.StringIO("\n".join(lines))))


def opcodes(width: str) -> dict[str, collections.Counter]:
    """Thread instructions per coordinate by opcode, for each kernel."""
    found, columns, kernel = {}, None, ""
    for row in ncu(width, "--section", "SourceCounters", "--page", "source"):
        if row[0] == "Kernel Name":
            kernel = row[1]
            found[kernel] = collections.Counter()
        elif "Source" in row and "# Warp Instructions Executed" in " ".join(row):
            columns = row
        elif columns and kernel and len(row) == len(columns):
            entry = dict(zip(columns, row, strict=True))
            opcode = re.sub(r"^@!?U?P\d+\s+", "", entry["Source"].strip()).split(" ")[0]
            count = next((v for k, v in entry.items() if "Instructions Executed" in k), "0")
            found[kernel][opcode.split(".")[0]] += int(float(count or 0)) * 32 / COORDS
    return found


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default="2,4,8", help="-1 is the default mix at 5 bits")
    parser.add_argument("--worker", type=int, default=None)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker)
        return
    for width in args.widths.split(","):
        rows = ncu(width, "--metrics", ",".join(METRICS))
        header = rows[0]
        name, metric, value = (
            header.index(c) for c in ("Kernel Name", "Metric Name", "Metric Value")
        )
        per_kernel = collections.defaultdict(dict)
        for row in rows[1:]:
            count = float(row[value].replace(",", "")) * 32 / COORDS
            per_kernel[row[name]][METRICS.get(row[metric], row[metric])] = count
        for kernel, counts in per_kernel.items():
            text = "  ".join(f"{k} {v:.1f}" for k, v in counts.items())
            print(f"width {width} {kernel}: per coordinate: {text}", flush=True)
        for kernel, counter in opcodes(width).items():
            text = " ".join(f"{op}:{n:.2f}" for op, n in counter.most_common(24))
            print(f"width {width} {kernel} {sum(counter.values()):.1f}: {text}", flush=True)


if __name__ == "__main__":
    main()
