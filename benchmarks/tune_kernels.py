"""Checks the GPU kernels against the reference and times launch parameters.

    python benchmarks/tune_kernels.py [--coords 28] [--warps 2,4,8] [--skip-check]

Prints one line per kernel, width mix and number of warps: milliseconds (median of 5 batches of 10
back-to-back calls after warm-up).
"""

import argparse
import dataclasses
import statistics as stats
import time

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dynamiq_jax.commands.bench.kernels import single_chunk
from dynamiq_jax.commands.synthetic import lognormal_mixture
from dynamiq_jax.methods.dynamiq.allocation import Allocation
from dynamiq_jax.methods.dynamiq.plan import order_and_tiles
from pallas_kernels import tuning


def inputs(fmt, bits, coords, *, dtype=jnp.bfloat16):
    """A gradient pair and its plan: (layout, x, y, mean, order, tiles, noise)."""
    narrowest = min(fmt.widths)
    even = Allocation(fmt, (narrowest, narrowest), (0.0, 0.0), pk.distortion(fmt, narrowest))
    layout = single_chunk(coords, bits, even)
    super_groups = -(-coords // fmt.super_group_size)
    keys = jax.random.split(jax.random.key(0))
    make = jax.jit(
        lambda k: lognormal_mixture(k, 1, super_groups, fmt.super_group_size)[0, :coords].astype(
            dtype
        )
    )
    x, y = make(keys[0]), make(keys[1])
    mean, sqnorm = pk.statistics(x, super_group_size=fmt.super_group_size, backend="jnp")
    order, (tiles, _), _ = jax.jit(lambda e: order_and_tiles(e, layout))(sqnorm)
    pad = layout.super_groups - mean.shape[0]
    mean = jnp.pad(mean, (0, pad)).astype(jnp.bfloat16).astype(jnp.float32)
    noise = pk.slot_noise(jnp.array([1, 2], jnp.uint32), 8, fmt.rounding)
    return layout, x, y, mean, order, tiles, noise


def calls(fmt, layout, backend, dtype):
    """Jitted kernels of one backend."""
    kw = {"fmt": fmt, "backend": backend}
    one = jnp.zeros((1,), jnp.int32)
    rows, words = -(-layout.size // fmt.super_group_size), layout.payload_words[0]
    return {
        "statistics": jax.jit(
            lambda x: pk.statistics(x, super_group_size=fmt.super_group_size, backend=backend)
        ),
        "compress": jax.jit(
            lambda x, o, t, z: pk.compress(pk.Source(x, None, o), one, pk.Target(t, z, words), **kw)
        ),
        "decompress_accumulate_recompress": jax.jit(
            lambda p, before, x, o, t, z: pk.decompress_accumulate_recompress(
                (pk.Input(p[None], t, noise=before[None]),),
                pk.Source(x, None, o),
                one,
                pk.Target(t, z, words),
                **kw,
            )
        ),
        "decompress": jax.jit(
            lambda p, before, m, o, t: pk.decompress(
                p, t, one, pk.Result(m, o, rows, dtype), before[None], **kw
            )
        ),
    }


def arguments(payload, x, y, mean, order, tiles, noise) -> dict[str, tuple]:
    """Arguments of `calls`: the payload of x is added to y, encoded again, and decoded."""
    return {
        "statistics": (x,),
        "compress": (x, order, tiles, noise[0]),
        "decompress_accumulate_recompress": (payload, noise[0], y, order, tiles, noise[1]),
        "decompress": (payload, noise[0], mean, order, tiles),
    }


def check(fmt, bits, coords, dtype) -> int:
    """Differing words or values between the kernels on GPU and the reference on CPU."""
    layout, x, y, mean, order, tiles, noise = inputs(fmt, bits, coords, dtype=dtype)
    results = []
    payload = None
    for backend, device in (("jnp", jax.devices("cpu")[0]), ("triton", jax.devices()[0])):
        fs = calls(fmt, layout, backend, dtype)
        with jax.default_device(device):
            first = fs["compress"](*jax.device_put((x, order, tiles, noise[0]), device))
            payload = first if payload is None else payload
            args = arguments(payload, x, y, mean, order, tiles, noise)
            hop, out = (
                fs[name](*jax.device_put(args[name], device))
                for name in ("decompress_accumulate_recompress", "decompress")
            )
        results.append([np.asarray(a) for a in (first[0], hop[0], out)])
    last = int(tiles[0, -1])
    used = (last >> 5) * 4 + fmt.tile_words(last & 31)
    pairs = [(a[:used], b[:used]) for a, b in zip(*results, strict=True)][:2]
    pairs.append((results[0][2], results[1][2]))
    return sum(int((a != b).sum()) for a, b in pairs)


def time_ms(function, *args) -> float:
    """Median milliseconds per call."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        out = [function(*args) for _ in range(10)]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / 10 * 1e3)
        del out
    return stats.median(times)


def main() -> None:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coords", type=int, default=28, help="log2 of the coordinates timed")
    parser.add_argument("--warps", default="4,8")
    parser.add_argument("--skip-check", action="store_true")
    args = parser.parse_args()
    print(jax.__version__, jax.devices())
    formats = [pk.WireFormat(), pk.WireFormat(rounding="correlated", levels="geometric")]
    formats += [pk.WireFormat(group_scale="bf16", group_size=32)]
    formats += [pk.WireFormat(dither=True), pk.WireFormat(levels="piecewise", dither=True)]
    formats += [pk.WireFormat(widths=(w,)) for w in (1, 2, 3, 4, 6, 7, 8, 12, 15, 16)]
    for fmt in [] if args.skip_check else formats:
        for dtype in (jnp.float32, jnp.bfloat16):
            wrong = check(fmt, max(fmt.widths[-1] - 2, fmt.widths[0] + 1), 2**18 + 256, dtype)
            print("check", fmt.widths, fmt.levels, fmt.rounding, np.dtype(dtype).name, wrong)
    base = dict(tuning._HOPPER)
    x = jnp.ones((2**args.coords,), jnp.bfloat16)
    copy_ms = time_ms(jax.jit(lambda x: x + jnp.bfloat16(1)), x)
    print(f"copy {copy_ms:.3f} ms = {4 * x.size / copy_ms / 1e9:.2f} TB/s")
    mixes = [(pk.WireFormat(widths=(w,)), w + 1.0) for w in (2, 4, 8)]
    piecewise = pk.WireFormat(widths=(3, 4, 6, 8), levels="piecewise")
    mixes += [(dataclasses.replace(piecewise, dither=d), 4.0) for d in (False, True)]
    for fmt, bits in [(pk.WireFormat(), 5.0), *mixes]:
        layout, x, y, mean, order, tiles, noise = inputs(fmt, bits, 2**args.coords)
        for warps in map(int, args.warps.split(",")):
            for name, value in base.items():
                tuning._HOPPER[name] = value._replace(num_warps=warps)
            fs = calls(fmt, layout, "triton", jnp.bfloat16)
            payload = fs["compress"](x, order, tiles, noise[0])
            operands = arguments(payload, x, y, mean, order, tiles, noise)
            row = {name: time_ms(fs[name], *of) for name, of in operands.items()}
            text = "  ".join(f"{k} {v:.3f}" for k, v in row.items())
            dither = " dither" if fmt.dither else ""
            print(f"widths {fmt.widths}{dither} warps {warps}: {text}", flush=True)


if __name__ == "__main__":
    main()
