"""Methods that run over topologies: agree on shared values, then encode hop by hop.

Such a method defines what workers must agree on (`measure`, for a small all-reduce), what is
computed from this (`share`), and how a worker's gradient is then encoded (`codec`). It calls no
collectives.
"""

import functools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.axis import Axis
from dynamiq_jax.core.fingerprint import assert_same_on_workers
from dynamiq_jax.core.seeds import Seed, fold_seed
from dynamiq_jax.core.warned import warn
from dynamiq_jax.executors.codec import ChunkCodec, Encoder, Payload
from dynamiq_jax.executors.collectives import all_reduce
from dynamiq_jax.methods.base import Call, Collective, Outcome, TellsLosses
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.topologies import Direct, Topology
from dynamiq_jax.topologies.schedules import check_schedule

Message = Any
"""A pytree of arrays: the contribution of one worker to the agreement, or that of all."""
Shared = Any
"""A pytree of arrays: the values that all workers know before the first hop."""
Layout = Any
"""The static sizes of a collective: `dynamiq.layout.Layout`, or `methods.plain.ChunkLayout`."""

ALONE = Direct(streams=1)
"""The topology under which a block is the only chunk of one worker."""


class HopMethod(TellsLosses):
    """Members of methods that run over topologies."""

    __slots__ = ()

    debug_checks: bool = False
    """Whether values that should be the same on all workers are compared at run time."""
    agreement: ClassVar[Literal["sum", "max"]] = "sum"
    """How the workers' messages are combined."""

    def layout(self, size: int, n_workers: int, topology: Topology) -> Layout:
        """Static sizes for ``size`` coordinates."""
        raise NotImplementedError

    def measure(self, x: Float[Array, " d"], layout: Layout) -> Message:
        """One worker's message; `None` if workers need not agree on anything."""
        return None

    def share(self, message: Message, layout: Layout, call: Call) -> Shared:
        """The shared values that are computed from all workers' message and the seed."""
        return ()

    def codec(
        self, x: Float[Array, " d"], shared: Shared, layout: Layout, call: Call
    ) -> ChunkCodec:
        """The operations on one worker's ``x``; the result, after the division, has its dtype.

        With `Call.keep_error` the codec returns the errors of its encodings.
        """
        raise NotImplementedError

    def facts(self, shared: Shared, result: Array, layout: Layout, call: Call) -> PayloadFacts:
        """The facts of the payloads, for `Metrics`."""
        return PayloadFacts()

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `Method` and `TellsLosses`."""
        self.warn(call)
        assert call.topology is not None
        layout = self.layout(x.shape[0], call.n_workers, call.topology)
        with jax.named_scope(f"{type(self).__name__.lower()}_all_reduce"):
            shared = self.agreed(x, layout, call)
            codec = self.codec(x, shared, layout, call)
            result, lost = all_reduce(call.topology, codec, call.axis, layout.chunks_per_worker)
            if lost is not None:
                lost = lost.reshape(-1)[: x.shape[0]]
            if self.debug_checks:
                assert_same_on_workers(result, call.axis, "the result")
            value = result.reshape(-1)[: x.shape[0]]
            facts = self.facts(shared, value, layout, call) if call.metrics else PayloadFacts()
            return Outcome(value, call.state, facts, lost)

    def warn(self, call: Call, collective: Collective = "all_reduce") -> None:
        """Warns of a relative error that is too large, and of slower kernels than the fastest."""
        advice = self.advice(call.n_workers, call.topology, collective)
        if advice is not None:
            warn(advice)
        kernels = self.kernels
        if kernels is not None and kernels.backend == "jnp" and kernels.reason:
            warn(
                f"{type(self).__name__} runs kernels that XLA makes, which take longer: "
                f"{kernels.reason}; pass backend='jnp' to choose them without this warning"
            )

    def agreed(self, x: Float[Array, " d"], layout: Layout, call: Call) -> Shared:
        """The shared values, after the small all-reduce of the messages."""
        message = self.measure(x, layout)
        if message is not None:
            topology, reduce = call.topology, getattr(call.axis, f"p{self.agreement}")
            if topology is not None and self.agreement == "sum":
                check_schedule(topology, call.n_workers)
                reduce = functools.partial(topology.sends.psum, call.axis)
            message = reduce(message)
        shared = self.share(message, layout, call)
        if self.debug_checks:
            assert_same_on_workers(shared, call.axis, "the plan")
        return shared

    # --- Blocks: encoded once, by one worker, for all_gather and all_to_all -----------------------

    def encode_block(self, x: Float[Array, " s"], seed: Seed) -> tuple[Message, Payload]:
        """A block as the only chunk of one worker: its message and its payload, which are sent."""
        layout, call = self.layout(x.shape[0], 1, ALONE), Call(Axis(()), ALONE, seed)
        message = self.measure(x, layout)
        codec = self.codec(x, self.share(message, layout, call), layout, call)
        chunk = jnp.zeros(1, jnp.int32)  # the block is chunk 0, in slot 0
        return message, codec.encode((), chunk, Encoder(0, 0, 0), None)[0]

    def decode_block(
        self, encoded: tuple[Message, Payload], size: int, dtype: Any, seed: Seed
    ) -> Float[Array, " s"]:
        """The block that `encode_block` encoded under the same seed, [size] of ``dtype``."""
        message, payload = encoded
        layout, call = self.layout(size, 1, ALONE), Call(Axis(()), ALONE, seed)
        shared = self.share(message, layout, call)
        codec = self.codec(jnp.zeros(size, dtype), shared, layout, call)
        chunk = jnp.zeros(1, jnp.int32)
        return codec.decode(payload, chunk, Encoder(0, chunk, chunk), None).reshape(-1)[:size]

    def block_bits(self, size: int) -> int:
        """Wire bits of a block of ``size`` coordinates, its message included."""
        x, seed = jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint32)
        encoded = jax.tree.leaves(jax.eval_shape(self.encode_block, x, seed))
        return sum(8 * part.size * part.dtype.itemsize for part in encoded)

    def all_gather(
        self, x: Float[Array, " s"], call: Call, *, invarying: bool = False
    ) -> Float[Array, "n s"]:
        """See `Method`; each worker's ``x`` is a block, with the seed of the worker's index."""
        with jax.named_scope(f"{type(self).__name__.lower()}_all_gather"):
            own = self.pack(x, call)
            return self.unpack(own, x.shape[0], x.dtype, call, invarying=invarying)

    def pack(self, x: Float[Array, " s"], call: Call) -> tuple[Message, Payload]:
        """See `Method`: the message and the payload of this worker's block."""
        self.warn(call._replace(topology=ALONE), "all_gather")
        return self.encode_block(x, fold_seed(call.seed, call.axis.index))

    def unpack(
        self,
        packed: tuple[Message, Payload],
        size: int,
        dtype: Any,
        call: Call,
        *,
        invarying: bool = False,
    ) -> Float[Array, "n s"]:
        """See `Method`."""
        axis, to = call.axis, "invarying" if invarying else "varying"
        gathered = jax.tree.map(lambda part: axis.all_gather(part, to=to), packed)

        def decode(encoded: tuple[Message, Payload], sender: Array) -> Array:
            return self.decode_block(encoded, size, dtype, fold_seed(call.seed, sender))

        return jax.vmap(decode)(gathered, jnp.arange(call.n_workers, dtype=jnp.int32))

    def exchanges(self, n_workers: int) -> bool:
        """Whether the method encodes blocks without an agreement between workers."""
        return self.shards and not self.needs_state

    def exchange_bits(self, size: int, n_workers: int) -> int:
        """Bits that one worker sends to exchange blocks of ``size`` coordinates."""
        return (n_workers - 1) * self.block_bits(size)

    def exchange(self, x: Float[Array, "n s"], call: Call) -> Float[Array, "n s"]:
        """Sends row j of ``x`` to worker j; row i of the result is from worker i.

        Every row is a block, with a seed of its sender and receiver.
        """
        n, size = x.shape
        axis, everyone = call.axis, jnp.arange(n, dtype=jnp.int32)
        # The exchanges are numbered by sender, then by receiver.
        seed = lambda sender, receiver: fold_seed(call.seed, sender * n + receiver)
        encode = lambda row, receiver: self.encode_block(row, seed(axis.index, receiver))
        arrived = axis.all_to_all(jax.vmap(encode)(x, everyone))

        def decode(encoded: tuple[Message, Payload], sender: Array) -> Array:
            return self.decode_block(encoded, size, x.dtype, seed(sender, axis.index))

        return jax.vmap(decode)(arrived, everyone)
