"""Metrics as numbers."""

import jax.numpy as jnp

from dynamiq_jax.commands.writers import scalars
from dynamiq_jax.methods.metrics import Metrics

METRICS = Metrics(
    vnmse=jnp.float32(0.25),
    norm=jnp.float32(9),
    nonfinite=jnp.float32(3),
    saturated=jnp.float32(0),
    widths=jnp.zeros(17).at[jnp.array([4, 6])].set(jnp.array([0.75, 0.25])),
    bits_per_coord=jnp.float32(5),
    wire_bytes=jnp.float32(1e6),
)


def test_scalars_have_a_name_for_every_field_and_width():
    found = scalars(METRICS)
    names = ["vnmse", "norm", "nonfinite", "saturated", "bits_per_coord", "wire_bytes"]
    assert list(found) == [*names, *(f"width_{w}" for w in range(17))]
    assert all(type(value) is float for value in found.values())
    assert [found[name] for name in names] == [0.25, 9, 3, 0, 5, 1e6]
    assert {n: x for n, x in found.items() if n.startswith("width") and x} == {
        "width_4": 0.75,
        "width_6": 0.25,
    }
