"""Host-clock timing of device work: warm up, interleave, report median and spread.

A sample is the time from the first dispatch until `jax.block_until_ready` returns. It covers
several iterations, so that dispatching costs little. Work shorter than its dispatch is repeated
inside one compiled program (`repeat_on_device`). Longer work is called several times and waited for
once (`in_flight`). Programs to compare are timed in turn within every round, so that a drift of
clocks or of the machine's load meets all of them alike.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from dynamiq_jax.commands.options import announce

UNROLLED = 8
"""Iterations that follow each other in a program without a loop."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one iteration in microseconds: the median and the 10th and 90th percentile.

    Rows of reports derive from it.
    """

    time_us: float
    p10_us: float
    p90_us: float


def compile_calls(programs: Sequence[Callable[[Any], Any]], x: Any) -> list[Callable[[], Any]]:
    """Compiles jitted programs of ``x`` side by side, and returns functions that call them.

    Where there are several processes they compile one after the other, all in the same order: XLA
    shares out the tuning of kernels, unless ``XLA_FLAGS`` has ``--xla_gpu_shard_autotuning=false``.
    """
    lowered = [program.lower(x) for program in programs]  # pyright: ignore[reportFunctionMemberAccess]
    alone = "--xla_gpu_shard_autotuning=false" in os.environ.get("XLA_FLAGS", "")
    shared = jax.process_count() > 1 and not alone
    threads = 1 if shared else min(len(lowered), os.cpu_count() or 1)
    ready = []
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        for program in pool.map(lambda program: program.compile(), lowered):
            ready.append(partial(program, x))
            announce(f"compiled {len(ready)} of {len(lowered)} programs")
    return ready


def time_calls(
    calls: Sequence[Callable[[], Any]],
    *,
    repeats: int,
    iterations: int = 1,
    in_flight: int = 1,
    warm_up: int = 2,
) -> list[Timing]:
    """Times functions against each other, one sample of each per round.

    A call dispatches ``iterations`` of the work and returns arrays of it; ``in_flight`` calls are
    waited for together. Returns the time of one iteration for each function.
    """
    for name, count in (("repeats", repeats), ("iterations", iterations), ("in_flight", in_flight)):
        if count < 1:
            raise ValueError(f"{name} is {count}: pass at least 1")
    for done in range(warm_up):
        for call in calls:
            jax.block_until_ready(call())
        announce(f"round {done + 1} of {warm_up + repeats}, untimed")
    samples_us: list[list[float]] = [[] for _ in calls]
    for done in range(repeats):
        for call, samples in zip(calls, samples_us, strict=True):
            start = time.perf_counter()
            for _ in range(in_flight - 1):
                call()  # the result is dropped, so that its memory serves the next call
            jax.block_until_ready(call())
            elapsed_us = (time.perf_counter() - start) * 1e6
            samples.append(elapsed_us / (iterations * in_flight))
        announce(f"round {warm_up + done + 1} of {warm_up + repeats}")
    times = [np.percentile(samples, [50, 10, 90]).tolist() for samples in samples_us]
    return [Timing(*found) for found in times]


def repeat_on_device(work: Callable[[Any], Any], iterations: int) -> Callable[[Any], Any]:
    """A function that does ``work`` so many times, from a tree of arrays to a tree like it.

    Nought times one number of each result is added to one number of the next input, in place, leaf
    by leaf: the compiler can neither hoist the work out of the loop nor merge two iterations.
    Several iterations are unrolled, since XLA may copy what a loop carries.
    """

    def tied(x: jax.Array, previous: jax.Array) -> jax.Array:
        return x.at[(0,) * x.ndim].add(0 * previous[(0,) * previous.ndim])

    def repeated(x: Any) -> Any:
        def body(_: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            x = jax.tree.map(tied, *carry)
            return x, work(x)

        left = iterations - 1
        unroll = True if left < UNROLLED else UNROLLED
        return lax.fori_loop(0, left, body, (x, work(x)), unroll=unroll)[1]

    return repeated
