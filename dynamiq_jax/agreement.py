"""Were all workers told the same? `check_agreement` asks them once, before training.

Workers whose configuration, version, tree or key differ would average garbage in silence.
"""

import zlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dynamiq_jax._compat import AxisNames, axis_tuple
from dynamiq_jax.arguments import AnyMethod, AnyTopology, check_axis, chooses_by_path, resolve
from dynamiq_jax.buckets import describe_leaves
from dynamiq_jax.by_path import methods_of
from dynamiq_jax.seeds import key_words

FACT_BYTES = 4096
"""What one process says of one fact, as text cut to this length and its hash."""

FACTS = (
    "arguments", "version of dynamiq_jax", "version of jax", "platform", "mesh", "axis_name",
    "method", "topology", "limits", "key", "tree",
)  # fmt: skip
"""What processes compare; "arguments" are accepted or refused, and with these nothing else is."""


def check_agreement(
    tree,
    mesh: Mesh,
    axis_name: AxisNames,
    *,
    method: AnyMethod | None = None,
    topology: AnyTopology | None = None,
    key: Array | None = None,
) -> None:
    """Raises unless all processes would reduce ``tree`` alike. Run it once, outside of jit.

    Args:
      tree: parameters or gradients; only names, shapes and dtypes are looked at.
      mesh: the mesh of the training step.
      axis_name: as for `psum`.
      method: as for `psum`.
      topology: as for `psum`.
      key: as for `psum`.

    Raises:
      RuntimeError: names what differs, on which processes, and both values.
      ValueError, NotImplementedError: what `psum` would refuse, on the processes where it would;
        the others say so as well, and wait for nobody.
    """
    refusal = None
    try:
        facts = facts_of(tree, mesh, axis_name, method=method, topology=topology, key=key)
    except (ValueError, NotImplementedError) as error:
        refusal = error
        facts = dict.fromkeys(FACTS, "") | {"arguments": f"{type(error).__name__}: {error}"}
    if jax.process_count() > 1:  # also where arguments were refused: the others are waiting
        gathered = multihost_utils.process_allgather(_encode(facts))
        if refusal is None:
            compare([_decode(row, list(FACTS)) for row in gathered])
    if refusal is not None:
        raise refusal


def facts_of(tree, mesh: Mesh, axis_name: AxisNames, *, method, topology, key) -> dict[str, str]:
    """Everything that must be the same on all processes, as text."""
    names = axis_tuple(check_axis(axis_name))
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        raise ValueError(f"axis_name={missing[0]!r} is not in the mesh; it has {mesh.axis_names}")
    sizes = tuple(mesh.shape[name] for name in names)
    chosen = None
    if chooses_by_path(method):
        chosen, method = methods_of(tree, method), None
        for own in {own for _, own in chosen} - {None}:
            resolve(own, topology, sizes)
    resolved = resolve(method, topology, sizes)
    words = key_words(key)
    leaves = describe_leaves(tree)
    facts = {
        "arguments": "accepted",
        "version of dynamiq_jax": _version(),
        "version of jax": jax.__version__,
        "platform": jax.default_backend(),
        "mesh": f"{dict(mesh.shape)} of devices {[d.id for d in mesh.devices.flat]}",
        "axis_name": repr(names),
        "method": repr(resolved.method) if chosen is None else repr(chosen),
        "topology": f"{resolved.topology!r} ({resolved.reason})",
        "limits": repr(resolved.limits()),
        "key": "none" if words is None else str(np.asarray(words).tolist()),
        "tree": "; ".join(f"{x.name}: {x.dtype.name}{list(x.shape)}" for x in leaves),
    }
    assert tuple(facts) == FACTS
    return facts


def compare(rows: Sequence[dict[str, str]]) -> None:
    """Raises unless all processes say the same; ``rows[i]`` are the facts of process i."""
    complaints = []
    refused = any(row["arguments"] != rows[0]["arguments"] for row in rows)
    for fact in ("arguments",) if refused else FACTS:
        first = rows[0][fact]
        others = [i for i, row in enumerate(rows) if row[fact] != first]
        if others:
            theirs = rows[others[0]][fact]
            start = next(
                (i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b), 0
            )
            start = max(start - 40, 0)
            complaints.append(
                f"{fact}: process 0 has {first[start : start + 160]!r}, "
                f"process {others[0]} has {theirs[start : start + 160]!r} "
                f"(differs from process 0 on {others})"
            )
    if complaints:
        raise RuntimeError(
            "workers would not reduce gradients alike; start all of them with the same versions, "
            "configuration, model and key. What differs: " + "; ".join(complaints)
        )


def _version() -> str:
    try:
        return version("dynamiq_jax")
    except PackageNotFoundError:  # run from a source tree
        return "not installed"


def _encode(facts: dict[str, str]) -> np.ndarray:
    """uint8[facts, FACT_BYTES + 4]: the text, and a hash of all of it where it was cut."""
    rows = np.zeros((len(facts), FACT_BYTES + 4), np.uint8)
    for row, text in zip(rows, facts.values(), strict=True):
        raw = text.encode()
        row[: min(len(raw), FACT_BYTES)] = np.frombuffer(raw[:FACT_BYTES], np.uint8)
        if len(raw) > FACT_BYTES:
            checksum = np.array([hash_bytes(raw)], np.uint32)
            row[FACT_BYTES:] = checksum.view(np.uint8)
    return rows


def _decode(rows: np.ndarray, names: list[str]) -> dict[str, str]:
    facts = {}
    for name, row in zip(names, np.asarray(rows), strict=True):
        text = row[:FACT_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")
        checksum = int(np.ascontiguousarray(row[FACT_BYTES:]).view(np.uint32)[0])
        facts[name] = text + (f"... (hash {checksum:08x})" if checksum else "")
    return facts


def hash_bytes(raw: bytes) -> int:
    """A non-zero 32-bit hash that is the same in every process (unlike Python's)."""
    return zlib.crc32(raw) or 1
