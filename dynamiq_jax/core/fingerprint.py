"""Do all workers hold the same bits? Hashes inside jit, compared by pmin and pmax.

`DynamiQ(debug_checks=True)` compares plans and results so in every step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.core.axis import Axis
from pallas_kernels import mix


def fingerprint(tree) -> Array:
    """A 32-bit hash of the bits of all arrays of a tree, and of their places: uint32 scalar."""
    total = jnp.uint32(0)
    for number, x in enumerate(jax.tree.leaves(tree)):
        if jnp.issubdtype(x.dtype, jnp.bool_):
            x = x.astype(jnp.uint8)
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(-1)
        place = jnp.arange(bits.size, dtype=jnp.uint32) + jnp.uint32(0x9E3779B9) * number
        total = total + jnp.sum(mix(bits.astype(jnp.uint32) ^ mix(place)), dtype=jnp.uint32)
    return total


def assert_same_on_workers(tree, axis: Axis, what: str) -> None:
    """Inside jit: an error at run time unless ``tree`` has the same bits on all workers."""
    own = axis.to_varying(fingerprint(tree))
    low, high = ~axis.pmax(~own), axis.pmax(own)

    def complain(*arrays):
        # As numbers of Python: an operation on arrays of JAX would wait for a device whose program
        # waits, in its next collective, for the device of this callback.
        own, low, high, me = (int(np.asarray(x)) for x in arrays)
        if low != high:
            raise RuntimeError(
                f"{what} differs between the workers of axis {axis.name!r}: worker {me} has hash "
                f"{own:08x}, all of them range from {low:08x} to {high:08x}; see "
                "dq.Compression.check_agreement for what may differ"
            )

    jax.debug.callback(complain, own, low, high, axis.index)
