"""`dq.scan` on Explicit axes, outside of maps: a scan whose backward pass sums terms of a layer.

A layer's large parameters are typed as reduced over the data axes, so that JAX leaves their
gradients unreduced. A turn of the backward loop carries those of the layer after it, and sums them
beside its own products. JAX sums gradients of small leaves in the turn itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from dynamiq_jax.core.axis import mesh_of, resharded
from dynamiq_jax.core.compat import refusals, traced_for
from dynamiq_jax.core.warned import warn
from dynamiq_jax.plan.plan import described
from dynamiq_jax.reduction.explicit_sums import large_leaves, reduce_unreduced
from dynamiq_jax.reduction.reduction import Reduction
from dynamiq_jax.training.explicit_axes import BACKWARD
from dynamiq_jax.training.in_backward import gradient_like, inexact_leaves
from dynamiq_jax.training.interleaved import Seeds, without
from dynamiq_jax.training.layers import Body, Loop, row_of, row_of_gradients
from dynamiq_jax.tree.leaves import axes_of, describe_leaves


class Outside(NamedTuple):
    """A scan over layers, of which each holds whole parameters on all workers."""

    total: Reduction
    """How the terms of one layer's gradients are summed."""
    mesh: AbstractMesh
    loop: Loop
    like: Any
    """One layer's parameters, in their types."""
    large: frozenset[int]
    """The leaves whose gradients are left unreduced."""

    @classmethod
    def of(cls, total: Reduction, xs: Any, loop: Loop) -> "Outside":
        """The scan over these stacked leaves; refuses shards."""
        mesh, like = mesh_of(xs), jax.eval_shape(lambda xs: row_of(xs, 0), xs)
        placed = [P(*x.sharding.spec.partitions) for x in jax.tree.leaves(like)]
        for x in jax.tree.leaves(xs):
            spec = jax.typeof(x).sharding.spec
            if axes_of(P(*spec.partitions)) & {*total.axis.names}:
                raise ValueError(
                    f"scan outside of maps got stacked leaves that are sharded as {spec}, over "
                    f"data axis {total.axis.name!r}; call dq.fsdp in the layer of jax.lax.scan, or "
                    "run the loss under jax.shard_map, with dq.scan(specs=...)"
                )
        # By the sizes of one layer: its terms travel, not those of the stack.
        large = large_leaves(total, like, placed, mesh)
        return cls(total, mesh, loop, like, frozenset(large))

    def taken_by(self, program: Callable[["Outside"], Any]) -> tuple["Outside", Any]:
        """The scan with those large leaves that JAX takes typed, and the layer's program for it.

        JAX sums the gradients of others. A leaf has one type in the whole layer, since each turn
        of the loop carries terms of the same leaves; in other losses it has one in each use.
        """
        try:
            return self, program(self)
        except refusals() as refused:
            error = refused

        def taken(*large: int) -> Any:
            try:
                return program(self._replace(large=frozenset(large)))
            except refusals():
                return None

        # Without any typed leaf, too: the error is not about types.
        if taken() is None:
            raise error
        large = sorted(i for i in self.large if taken(i) is not None)
        self._warn_of_native(self.large.difference(large))
        scan = self._replace(large=frozenset(large))
        return scan, program(scan)

    def _warn_of_native(self, native: frozenset[int]) -> None:
        """Warns of large gradients that JAX sums."""
        leaves = [x for x in describe_leaves(self.like) if x.index in self.large]
        alone = [x for x in leaves if x.index in native]
        nbytes = sum(x.nbytes for x in alone)
        # Below a percent of the bytes the warning would be noise, as of norms' scales.
        if nbytes <= sum(x.nbytes for x in leaves) / 100:
            return
        warn(
            f"JAX sums gradients of {described(alone)} of each layer of dq.scan ({nbytes:,} "
            "bytes), uncompressed: it has no rule for a use of parameters that are typed as "
            f"reduced over axis {self.total.axis.name!r}. "
            "scan(compression=dq.Compression(exclude=...)) says that it is meant; a mesh of Auto "
            "axes compresses all"
        )

    def typed(self, xs: Any, step: Any) -> Any:
        """One layer's parameters; large ones are typed as reduced."""
        leaves, treedef = jax.tree.flatten(row_of(xs, self.loop.place(step)))
        reduced = frozenset(self.total.axis.names)
        for i in self.large:
            spec = P(*jax.typeof(leaves[i]).sharding.spec.partitions, reduced=reduced)
            leaves[i] = resharded(leaves[i], self.mesh, spec)
        return treedef.unflatten(leaves)

    def forward(self, body: Body, xs: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        """The results of the scan, and the derivative of each step."""

        def turn(x: Any, t: Array) -> tuple[Any, Any]:
            own = self.typed(xs, t)
            (x, output), pull = jax.vjp(body, own, shared, x)
            return x, (output, without(pull, (own, shared)))

        x, (outputs, pulls) = self.loop.scan(turn, x, range(self.loop.length))
        # Outputs are in the order of steps, and `left` brings them into that of layers.
        return self.loop.left(x, outputs), pulls

    def summed(self, held: list[Array], step: Any, seeds: Seeds) -> list[Array]:
        """One layer's gradients, from terms of large leaves and sums of others."""
        gradients = iter(held)
        is_moving = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
        tree = jax.tree.map(lambda x: next(gradients) if is_moving(x) else None, self.like)
        words = seeds.words(self.loop.place(step))
        return jax.tree.leaves(reduce_unreduced(self.total, tree, words).tree)

    def backward(
        self, xs: Any, shared: Any, pulls: Any, words: Array | None, gradients: Any
    ) -> tuple[Any, Any, Any]:
        """The gradients of the layers, of what they share, and of the first carry."""
        gradient, outputs = gradients
        seeds = Seeds(words, 1).of_layers(0, self.loop.length)

        def step(passing: list[Array], t: Any) -> tuple[list[Array], list[Array], list[Array]]:
            place = self.loop.place(t)
            given = gradient_like(gradient, passing), row_of_gradients(outputs, place)
            # Parameters are read from the stack again: the forward pass would keep a second one.
            pull = row_of(pulls, t)((self.typed(xs, t), shared))
            own, of_shared, x = pull(given)
            return inexact_leaves(own), inexact_leaves(of_shared), inexact_leaves(x)

        def turn(carry: Any, t: Array) -> tuple[Any, list[Array]]:
            held, added, passing = carry
            # The layer before in this pass; neither takes a result of the other, so they run
            # together.
            done = self.summed(held, t + 1, seeds)
            held, of_shared, passing = step(passing, t)
            added = [a + b for a, b in zip(added, of_shared, strict=True)]
            return (held, added, passing), done

        last = self.loop.length - 1
        # Before the loop, since nothing travels beside this step.
        carry = step(inexact_leaves(gradient), last)
        carry, rows = self.loop.scan(turn, carry, range(last - 1, -1, -1))
        held, added, passing = carry
        first = self.summed(held, 0, seeds)
        found = [jnp.concatenate([x, y[None]]) for x, y in zip(rows, first, strict=True)]
        # They are in the order of the backward pass, which is that of layers if it is reversed.
        found = found if self.loop.reverse else [jnp.flip(x, 0) for x in found]
        return gradient_like(xs, found), gradient_like(shared, added), passing


def _no_body(own: Any, shared: Any, x: Any) -> tuple[Any, Any]:
    raise AssertionError("the body is known once the layers have their types")


def scan_outside(
    total: Reduction,
    closed: Callable,
    init: Any,
    xs: Any,
    order: tuple[int, bool, int | bool],
    words: Array | None,
) -> tuple[Any, Any]:
    """`dq.scan` in a loss of global arrays that `value_and_grad` differentiates.

    ``closed(init, own, length)`` gives the first carry, values for all layers, and the body;
    ``order`` is (length, reverse, unroll).
    """
    # The body's program needs a layer's types, which `Outside` tells.
    scan = Outside.of(total, xs, Loop(_no_body, *order, alone=True))

    def program(scan: Outside) -> tuple[Any, Any, Body]:
        own = jax.eval_shape(lambda xs: scan.typed(xs, 0), xs)
        return closed(init, own, scan.loop.length)

    scan, (init, shared, body) = scan.taken_by(program)

    @jax.custom_vjp
    def run(xs: Any, shared: Any, x: Any, words: Array | None) -> Any:
        return scan.forward(body, xs, shared, x)[0]

    def forward(xs: Any, shared: Any, x: Any, words: Array | None) -> Any:
        found, pulls = scan.forward(body, xs, shared, x)
        return found, (xs, shared, pulls, words)

    def backward(kept: Any, gradients: Any) -> tuple[Any, Any, Any, None]:
        # Only `value_and_grad` starts with a cotangent that counts once for all devices.
        if traced_for.value != BACKWARD:
            raise ValueError(
                "dq.scan outside of maps found a derivative that is not dq.value_and_grad's: every "
                "device would add all of JAX's seed to the terms that are summed over "
                f"{total.axis.names}; pass the loss to dq.value_and_grad"
            )
        xs, shared, pulls, words = kept
        own, of_shared, passing = scan.backward(xs, shared, pulls, words, gradients)
        return own, of_shared, gradient_like(gradients[0], passing), None

    run.defvjp(forward, backward)
    return run(xs, shared, init, words)
