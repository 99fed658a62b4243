"""The cases of the simulator, and their names on the command line."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.comparators import MXFP8
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.methods.dynamiq.allocation import Floor
from dynamiq_jax.methods.hops import HopMethod
from dynamiq_jax.topologies import Hierarchical, across_hosts


def parse_topology(name: str, balance: float | None, workers: int, inner: int) -> Any:
    """The topology called ``name``, a hierarchy with the outer one that the library chooses.

    Raises:
      ValueError: there is no such topology, or no such balance.
    """
    nested = name == "hierarchical"
    flat: Any = across_hosts(workers // inner) if nested else contenders.parse_topology(name)
    if balance is not None:
        flat = dataclasses.replace(flat, balance=balance)
    return Hierarchical(outer=flat) if nested else flat


def parse_floor(text: str) -> Floor:
    """The floor meant by ``text``: auto, none or a width.

    Raises:
      ValueError: none of these.
    """
    if text.lower() == "auto":
        return "auto"
    if text.lower() == "none":
        return None
    if not text.isdecimal():
        raise ValueError(f"floor {text!r} is not known: pass auto, none or a width, such as 4")
    return int(text)


def parse_methods(name: str, bits: Sequence[float], options: dict[str, Any]) -> list[HopMethod]:
    """The methods that ``name`` means: DynamiQ with each of ``bits``, or a comparator.

    Raises:
      ValueError: there is no such method, or it has no such bits or options.
    """
    if name == "dynamiq":
        return [DynamiQ(bits=b, **options) for b in bits]
    if name not in ("mxfp8", "mxfp8-own"):
        raise ValueError(f"method {name!r} is not known: pass dynamiq, mxfp8 or mxfp8-own")
    return [MXFP8(sum="recompress" if name == "mxfp8-own" else "shared-scale")]
