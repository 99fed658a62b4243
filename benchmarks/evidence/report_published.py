"""The figures of the paper's evaluation (arXiv 2602.08923) that report.py shows beside ours.

All are vNMSE, |estimate - sum|² / |sum|², of eight workers. Those of its simulation are
`dynamiq_jax.commands.simulate.PUBLISHED`.
"""

from collections.abc import Mapping

Figures = tuple[float, ...]

WORKLOADS = ("BERT-large", "LLaMA-1B chat", "Gemma-1B chat", "LLaMA-1B MMLU")
METHODS: Mapping[str, Figures] = {
    "DynamiQ": (0.00217, 0.00149, 0.00122, 0.00096),
    "MXFP8": (0.00591, 0.00320, 0.00308, 0.00299),
    "MXFP6": (0.0233, 0.0135, 0.0146, 0.0130),
    "MXFP4": (0.121, 0.111, 0.116, 0.0904),
    "OmniReduce": (0.155, 0.0804, 0.0468, 0.0453),
    "THC": (0.00897, 0.120, 0.152, 0.196),
}
"""Ring, DynamiQ at 5 bits and MXFP8 at 8.5: a figure for each of `WORKLOADS`."""

BITS: Mapping[float, Figures] = {
    3.0: (0.01603, 0.02334),
    4.0: (0.00589, 0.00831),
    5.0: (0.00096, 0.00122),
    6.0: (0.00059, 0.00053),
}
"""DynamiQ on a ring by bits per coordinate: LLaMA-1B MMLU and Gemma-1B chat."""

BUTTERFLY: Mapping[str, Figures] = {
    "DynamiQ": (0.00067,),
    "MXFP8": (0.00203,),
    "MXFP6": (0.0201,),
    "MXFP4": (0.171,),
}
"""LLaMA-1B MMLU."""

ABLATION: Figures = (0.1278, 0.0707, 0.0198, 0.0138, 0.0091)
"""Ring, 5 bits, LLaMA-1B chat: the ingredients in the order of `accuracy.PAPERS_ABLATION`."""
