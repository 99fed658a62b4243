"""States as `flax.serialization` saves them. The library itself does not need flax."""

import dataclasses
import sys
from typing import Any

import jax

_known: set[type] = set()
"""The types that flax knows."""


class Serializable:
    """A dataclass and pytree node that `flax.serialization` takes: a dict of its data fields."""

    def __post_init__(self):
        """Tells flax of the type, once flax is imported: soon enough for a state to be saved."""
        kind, flax = type(self), sys.modules.get("flax.serialization")
        if flax is None or kind in _known:
            return
        _known.add(kind)

        def to_dict(node: Any) -> dict[str, Any]:
            return {name: flax.to_state_dict(x) for name, x in _children(node).items()}

        def from_dict(node: Any, saved: dict[str, Any]) -> Any:
            own = _children(node)
            if own.keys() != saved.keys():
                raise ValueError(
                    f"{kind.__name__} has the fields {sorted(own)}, and {sorted(saved)} were "
                    "saved; pass flax.serialization.msgpack_restore(saved) to "
                    "dq.optax.restore_state"
                )
            found = {name: flax.from_state_dict(x, saved[name], name) for name, x in own.items()}
            return dataclasses.replace(node, **found)

        flax.register_serialization_state(kind, to_dict, from_dict, override=True)


def _children(node: Any) -> dict[str, Any]:
    """The data fields of a node, which are those that JAX knows as its children."""
    pairs = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    return {path[0].name: x for path, x in pairs}
