"""Whether all workers were told the same: `Compression.check_agreement` asks before training.

Workers whose configuration, version, tree or key differ would wait for ever, or average garbage in
silence. `compare_first` asks without being called, and knows less.
"""

import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec, get_abstract_mesh

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import coordination_client
from dynamiq_jax.tree.leaves import Leaf

FACT_BYTES = 4096
"""The longest text of one fact of one process; longer ones are cut and hashed."""
HASH_BYTES = 32
"""Room for the hash."""

FACTS = (
    "arguments", "version of dynamiq_jax", "version of jax", "platform", "mesh", "axis_name",
    "method", "topology", "limits", "op", "weight", "specs", "key", "tree",
)  # fmt: skip
"""The facts that processes compare. "arguments" is "accepted", or the refusal.

A refused call has no other facts.
"""

SWITCH = "DYNAMIQ_JAX_AGREEMENT"
"""The environment variable that turns `compare_first` off where it is 0."""
PATIENCE = 60.0
"""Seconds for which a process waits for another one in `compare_first`."""
_compared: set[tuple[str, Any]] = set()
"""Collectives whose first call was compared, and the connection over which it was."""


def check(tell: Callable[[], dict[str, str]]) -> None:
    """Compares what ``tell`` says on all processes, outside of jit; see `check_agreement`.

    Raises:
      RuntimeError: names what differs, on which processes, and both values.
      ValueError, NotImplementedError: what ``tell`` raises, on the processes where it does.
    """
    refusal = None
    try:
        facts = complete(tell())
    except (ValueError, NotImplementedError) as error:
        refusal = error
        facts = dict.fromkeys(FACTS, "") | {"arguments": f"{type(error).__name__}: {error}"}
    if jax.process_count() > 1:  # also where arguments were refused: the others are waiting
        gathered = multihost_utils.process_allgather(_encode(facts))
        if refusal is None:
            compare([_decode(row, list(FACTS)) for row in gathered])
    if refusal is not None:
        raise refusal


def complete(told: dict[str, str]) -> dict[str, str]:
    """All `FACTS` in their order, from those that a request tells."""
    told = versions() | told | {"arguments": "accepted"}
    return {fact: told[fact] for fact in FACTS}


def versions() -> dict[str, str]:
    """The versions and the platform of this process."""
    return {
        "version of dynamiq_jax": _version(),
        "version of jax": jax.__version__,
        "platform": jax.default_backend(),
    }


def described(options: dict[str, Any]) -> dict[str, str]:
    """Arguments of a collective as text; of a key, a weight and a state whether there is one."""
    texts = {}
    for name, value in options.items():
        if name == "specs":
            texts[name] = _describe_specs(value)
        elif name in ("key", "state", "weight"):
            texts[name] = "none" if value is None else "given"
        else:
            texts[name] = repr(value)
    return texts


def _describe_specs(specs: Any) -> str:
    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    found = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    return "; ".join(f"{jax.tree_util.keystr(path)} {spec}".strip() for path, spec in found)


def compare_first(
    collective: str, axis: Axis, leaves: list[Leaf], tell: Callable[[], dict[str, str]]
) -> None:
    """Raises unless all processes trace their first ``collective`` alike.

    Processes talk over JAX's coordination service, which knows neither devices nor programs: so
    they can while they trace. A process waits for others once for each collective at most.

    Args:
      collective: its name in messages.
      axis: the workers.
      leaves: the leaves of this call.
      tell: says what has to be the same.

    Raises:
      RuntimeError: names what differs, on which processes, and both values.
    """
    client = coordination_client()
    if client is None or jax.process_count() == 1 or (collective, client) in _compared:
        return
    mesh = get_abstract_mesh()
    if mesh.size != jax.device_count() or set(axis.names).isdisjoint(mesh.manual_axes):
        return  # some processes may not take part, or this one traces for itself
    if all(leaf.shape == () for leaf in leaves) or os.environ.get(SWITCH) == "0":
        return
    _compared.add((collective, client))
    facts = versions() | tell()
    try:
        outcome, text = _exchange(client, collective, facts)
    except RuntimeError as error:  # JAX's, of the service
        outcome, text = "warning", f"no answer from process 0: {error}"
    if outcome == "error":
        raise RuntimeError(text)
    if outcome == "warning":
        warnings.warn(
            f"the first {collective} of all processes was not compared: {text}. If that is meant, "
            "set DYNAMIQ_JAX_AGREEMENT=0 on all processes; if not, they may wait for each other "
            "for ever, and check_agreement of a dq.Compression tells what differs",
            stacklevel=2,
        )


def _exchange(client: Any, collective: str, facts: dict[str, str]) -> tuple[str, str]:
    """Sends this process's facts and waits for the finding of process 0.

    Returns "agreement", "warning" or "error", and a text.
    """
    me, milliseconds = jax.process_index(), int(1000 * PATIENCE)
    place = f"dynamiq_jax/first {collective}"
    mine = json.dumps({fact: _cut(text) for fact, text in facts.items()})
    client.key_value_set(f"{place}/{me}", mine, allow_overwrite=True)
    if me:
        client.blocking_key_value_get(f"{place}/0", milliseconds)  # as late as it may come
        return tuple(json.loads(client.blocking_key_value_get(f"{place}/found", 2 * milliseconds)))
    found = _found(client, place, time.monotonic() + PATIENCE)
    client.key_value_set(f"{place}/found", json.dumps(found), allow_overwrite=True)
    return found


def _found(client: Any, place: str, deadline: float) -> tuple[str, str]:
    rows = []
    for i in range(jax.process_count()):
        left = max(deadline - time.monotonic(), 0.1)
        try:
            rows.append(json.loads(client.blocking_key_value_get(f"{place}/{i}", int(1000 * left))))
        except RuntimeError:
            return "warning", f"process {i} did not come to one within {PATIENCE:g} s"
    different = differences(rows)
    text = "; ".join(different.values())
    if different.keys() & {"axis_name", "tree"}:
        return "warning", f"they came to different ones; {text}"
    return ("error", _COMPLAINT + text) if different else ("agreement", "")


_COMPLAINT = (
    "workers would not reduce gradients alike; start all of them with the same versions, "
    "configuration, model and key. What differs: "
)


def compare(rows: Sequence[dict[str, str]]) -> None:
    """Raises unless all processes say the same; ``rows[i]`` are the facts of process i."""
    if different := differences(rows):
        # With arguments that were refused nothing else is known.
        texts = [different["arguments"]] if "arguments" in different else different.values()
        raise RuntimeError(_COMPLAINT + "; ".join(texts))


def differences(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """The facts that differ, by name: on which processes, and two of the values."""
    found = {}
    for fact, first in rows[0].items():
        others = [i for i, row in enumerate(rows) if row.get(fact) != first]
        if others:
            theirs = rows[others[0]].get(fact, "")
            start = next(
                (i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b), 0
            )
            start = max(start - 40, 0)
            found[fact] = (
                f"{fact}: process 0 has {first[start : start + 160]!r}, "
                f"process {others[0]} has {theirs[start : start + 160]!r} "
                f"(differs from process 0 on {others})"
            )
    return found


def _version() -> str:
    try:
        return version("dynamiq_jax")
    except PackageNotFoundError:  # run from a source tree
        return "not installed"


def _cut(text: str) -> str:
    """At most `FACT_BYTES`, and a hash of all of it where more was cut off.

    Objects' addresses, which differ between processes, are left out.
    """
    raw = re.sub(r" at 0x[0-9a-f]+", "", text).encode()
    cut = raw[:FACT_BYTES].decode(errors="ignore")
    return cut if len(raw) <= FACT_BYTES else f"{cut}... (hash {hash_bytes(raw):08x})"


def _encode(facts: dict[str, str]) -> np.ndarray:
    """uint8[facts, FACT_BYTES + HASH_BYTES]."""
    rows = np.zeros((len(facts), FACT_BYTES + HASH_BYTES), np.uint8)
    for row, text in zip(rows, facts.values(), strict=True):
        raw = np.frombuffer(_cut(text).encode(), np.uint8)
        row[: raw.size] = raw
    return rows


def _decode(rows: np.ndarray, names: list[str]) -> dict[str, str]:
    texts = (np.asarray(row).tobytes().rstrip(b"\0").decode() for row in rows)
    return dict(zip(names, texts, strict=True))


def hash_bytes(raw: bytes) -> int:
    """A 32-bit hash that is the same in every process (unlike Python's)."""
    return zlib.crc32(raw)
