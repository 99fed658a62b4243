"""What can be simulated, and how the command line names it."""

import dataclasses
from typing import Any

from dynamiq_jax.bench import contenders
from dynamiq_jax.methods import MXFP8, DynamiQ
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
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    if not text.isdecimal():
        raise ValueError(f"floor {text!r} is not known: pass auto, none or a width, such as 4")
    return int(text)


def parse_methods(name: str, bits: str, options: dict[str, Any]) -> list[HopMethod]:
    """What ``name`` means: DynamiQ with each of ``bits`` (as in "5,6"), or a comparator.

    Raises:
      ValueError: there is no such method, or it has no such bits or options.
    """
    if name == "dynamiq":
        return [DynamiQ(bits=float(text), **options) for text in bits.split(",")]
    if name not in ("mxfp8", "mxfp8-own"):
        raise ValueError(f"method {name!r} is not known: pass dynamiq, mxfp8 or mxfp8-own")
    return [MXFP8(sum="recompress" if name == "mxfp8-own" else "shared-scale")]
