"""Thousands of workers on one device: the study at n = 8192 (benchmarks/evidence/REPORT.md).

The vNMSE of one all-reduce, with the library's own plan, stages, noise and kernels but without
its collectives (`dynamiq_jax.executors.sequential`): workers' gradients are made from a
counter-based hash when their turn comes, and what is alive is one partial sum (of a butterfly log2
n), however many workers there are.

One chunk stands for all. It holds every super-group of the gradient and has, in every stage, the
bits per coordinate that the library gives to chunks; its path or tree visits workers 0, 1, ... in
order. Real workers would each own an n-th of the super-groups, and the chunks would visit the
workers in orders of their own. But gradients of different workers are independent and have the
same distribution, so that the order does not matter to the expected error; and at 8192 workers a
chunk of the paper's 32768 super-groups would be half a tile.
"""

from dynamiq_jax.commands.simulate.study import Case, Result, simulate, study

__all__ = ["Case", "Result", "simulate", "study"]
