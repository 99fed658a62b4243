"""Compares the arguments of all workers: `Compression.check_agreement` does so before training.

If workers differed in configuration, version, tree or key, they would wait for ever, or average
garbage silently. Collectives call `compare_first`, which compares less. Both use JAX's coordination
service. It needs neither devices nor programs, so processes can compare while they trace.
"""

import collections
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec, get_abstract_mesh

import pallas_kernels as pk
from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.compat import coordination_client
from dynamiq_jax.core.warned import warn
from dynamiq_jax.tree.leaves import Leaf

FACT_BYTES = 4096
"""The longest text of one fact of one process; longer ones are cut and hashed."""
PATIENCE, LONG_PATIENCE, SHORT_PATIENCE = 60.0, 600.0, 20.0
"""Seconds for which a process waits in `compare_first`, in `check`, and in `compare_batches`."""
ABSENT = "processes"
"""The name of the difference that a process does not come."""
_COMPLAINT = (
    "workers would not reduce gradients alike; start all of them with the same versions, "
    "configuration, model and key. What differs: "
)
_compared: set[tuple[str, Any]] = set()
"""Collectives whose first call was compared, and the connection over which it was."""
_checks: collections.Counter[Any] = collections.Counter()
"""Calls of `check` over each connection."""


def check(tell: Callable[[], dict[str, str]]) -> None:
    """Compares the results of ``tell`` on all processes, outside of jit; see `check_agreement`."""
    facts, refusal = versions() | {"arguments": "accepted"}, None
    try:
        facts |= tell()
    except (ValueError, NotImplementedError) as error:
        facts["arguments"], refusal = f"{type(error).__name__}: {error}", error
    if jax.process_count() > 1:  # also where arguments were refused: the others are waiting
        client = coordination_client()
        if client is None:
            raise RuntimeError(
                f"{jax.process_count()} processes and no coordination service, over which they are "
                "compared; call jax.distributed.initialize() first"
            )
        _checks[client] += 1
        found = _exchange(client, f"check {_checks[client]}", facts, LONG_PATIENCE)
        if ABSENT in found and refusal is None:
            raise RuntimeError(
                f"check_agreement compared nothing: {found[ABSENT]}; call it on all processes"
            )
        if found and refusal is None:
            # If arguments were refused, nothing else is known.
            texts = [found["arguments"]] if "arguments" in found else found.values()
            raise RuntimeError(_COMPLAINT + "; ".join(texts))
    if refusal is not None:
        raise refusal


def versions() -> dict[str, str]:
    """The versions and the platform of this process, and whether it has push kernels.

    The latter depends on its NCCL. A process that pushes would wait for ever for one that does not.
    """
    package = sys.modules["dynamiq_jax"]  # which imports this module
    return {
        "version of dynamiq_jax": package.__version__,  # that of an editable install may be older
        "version of jax": jax.__version__,
        "platform": jax.default_backend(),
        "push kernels": "run" if pk.needs_of_push() is None else "do not run",
    }


def described(options: dict[str, Any]) -> dict[str, str]:
    """Arguments of a collective as text; of a key, weight and state only whether it is given."""
    texts = {}
    for name, value in options.items():
        if name == "specs":
            is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
            specs = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_spec)
            told = (f"{jax.tree_util.keystr(path)} {spec}".strip() for path, spec in specs)
            texts[name] = "; ".join(told)
        elif name in ("key", "state", "weight"):
            texts[name] = "none" if value is None else "given"
        else:
            texts[name] = repr(value)
    return texts


def compare_first(
    collective: str, axis: Axis, leaves: list[Leaf], tell: Callable[[], dict[str, str]]
) -> None:
    """Raises unless ``tell`` returns the same on all processes for their first ``collective``.

    A process waits for others once for each collective at most.
    """
    mesh = get_abstract_mesh()
    if set(axis.names).isdisjoint(mesh.manual_axes) or all(leaf.shape == () for leaf in leaves):
        return  # this process traces for itself, or it is no collective of gradients
    client = _to_ask(collective, mesh)
    if client is None:
        return
    found = _exchange(client, f"first {collective}", versions() | tell(), PATIENCE)
    text = "; ".join(found.values())
    if ABSENT not in found and found.keys() & {"axis_name", "tree"}:
        text = f"they came to different ones; {text}"
    elif found and ABSENT not in found:
        raise RuntimeError(_COMPLAINT + text)
    if found:
        warn(
            f"the first {collective} of all processes was not compared: {text}. If that is meant, "
            "set DYNAMIQ_JAX_AGREEMENT=0 on all processes; if not, they may wait for each other "
            "for ever, and check_agreement of a dq.Compression tells what differs",
        )


def compare_batches(tell: Callable[[], dict[str, tuple[int, ...]]], mesh: Any, remedy: str) -> None:
    """Warns if another process runs a program for batches of other shapes.

    An array of all processes has one shape. So a process whose batch has fewer rows than the
    others' takes the array for a smaller one, and compiles a program of its own.
    """
    if coordination_client() is None:
        return
    mine = tell()
    text = json.dumps(mine)
    what = f"batches {zlib.crc32(text.encode()):08x}"
    client = _to_ask(what, mesh)
    if client is None:
        return
    me, place = jax.process_index(), "dynamiq_jax/last batches"
    client.key_value_set(f"{place}/{me}", text, allow_overwrite=True)
    if not _exchange(client, what, {}, SHORT_PATIENCE):
        return
    for key, text in sorted(client.key_value_dir_get(place)):
        theirs = {name: tuple(shape) for name, shape in json.loads(text).items()}
        if other := [name for name in mine | theirs if mine.get(name) != theirs.get(name)]:
            process, name = key.rpartition("/")[2], other[0]
            warn(
                "processes pass batches of different sizes, each as if all had as many rows: "
                f"{name!r} has shape {mine.get(name)} on process {me}, and had "
                f"{theirs.get(name)} on process {process} when that last compiled a program. "
                f"The result is then the mean of workers' means, not that of all rows. {remedy}"
            )
            return


def _to_ask(what: str, mesh: Any) -> Any:
    """The coordination service, once for each ``what``; `None` if there is nobody to ask."""
    client = coordination_client()
    if client is None or jax.process_count() == 1 or (what, client) in _compared:
        return None
    if not compares(mesh.size):
        return None
    _compared.add((what, client))
    return client


def compares(n_devices: int) -> bool:
    """Whether processes compare their first collective on a mesh of so many devices."""
    if n_devices != jax.device_count():
        return False  # some processes may not take part
    return os.environ.get("DYNAMIQ_JAX_AGREEMENT") != "0"


def _exchange(client: Any, what: str, facts: dict[str, str], patience: float) -> dict[str, str]:
    """Process 0 compares the facts of all processes; all processes get the differences, by name."""
    me, place, deadline = jax.process_index(), f"dynamiq_jax/{what}", time.monotonic() + patience
    mine = json.dumps({fact: _cut(text) for fact, text in facts.items()})

    def read(key: Any, seconds: float) -> Any:
        return json.loads(client.blocking_key_value_get(f"{place}/{key}", int(1000 * seconds)))

    if me:
        try:
            client.key_value_set(f"{place}/{me}", mine, allow_overwrite=True)
            read(0, patience)  # as late as it may come
            return read("found", 2 * patience)
        except RuntimeError as error:  # JAX's, of the service
            return {ABSENT: f"no answer from process 0: {error}"}
    client.key_value_set(f"{place}/0", mine, allow_overwrite=True)
    rows, found = [], None
    for i in range(jax.process_count()):
        try:
            rows.append(read(i, max(deadline - time.monotonic(), 0.1)))
        except RuntimeError:
            found = {ABSENT: f"process {i} did not come to one within {patience:g} s"}
            break
    found = differences(rows) if found is None else found
    client.key_value_set(f"{place}/found", json.dumps(found), allow_overwrite=True)
    return found


def differences(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """The facts that differ, by name: the processes on which they differ, and two of the values."""
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


def _cut(text: str) -> str:
    """The text without addresses; beyond `FACT_BYTES` a hash of all of it replaces the rest."""
    raw = re.sub(r" at 0x[0-9a-f]+", "", text).encode()
    cut = raw[:FACT_BYTES].decode(errors="ignore")
    return cut if len(raw) <= FACT_BYTES else f"{cut}... (hash {zlib.crc32(raw):08x})"
