"""Methods that run over topologies: agree on what all must know, then encode hop by hop.

Such a method says what workers have to agree on (`measure`, a small all-reduce), what follows from
it (`share`), and how a worker's gradient is encoded then (`codec`). It calls no collectives.
"""

import warnings
from typing import Any, ClassVar, Literal

import jax
from jax import Array
from jaxtyping import Float

from dynamiq_jax.core.fingerprint import assert_same_on_workers
from dynamiq_jax.executors.codec import ChunkCodec
from dynamiq_jax.executors.collectives import all_reduce
from dynamiq_jax.methods.base import Call, Collective, Outcome, TellsLosses
from dynamiq_jax.methods.metrics import PayloadFacts
from dynamiq_jax.topologies import Topology
from dynamiq_jax.topologies.base import check_schedule

Message = Any
"""A pytree of arrays; what one worker contributes to the agreement, or what all did."""
Shared = Any
"""A pytree of arrays; what all workers know ahead of the first hop."""
Layout = Any
"""The static sizes of a collective: `dynamiq.layout.Layout`, or `methods.plain.ChunkLayout`."""


class HopMethod(TellsLosses):
    """Members of methods that run over topologies."""

    __slots__ = ()

    debug_checks: bool = False
    """Whether what all workers should hold alike is compared at run time."""
    agreement: ClassVar[Literal["sum", "max"]] = "sum"
    """How the workers' messages are put together."""

    def layout(self, size: int, n_workers: int, topology: Topology) -> Layout:
        """Static sizes for ``size`` coordinates."""
        raise NotImplementedError

    def measure(self, x: Float[Array, " d"], layout: Layout) -> Message:
        """One worker's message; `None` if nothing has to be agreed on."""
        return None

    def share(self, message: Message, layout: Layout, call: Call) -> Shared:
        """The shared facts that follow from the message of all, and from the seed."""
        return ()

    def codec(
        self, x: Float[Array, " d"], shared: Shared, layout: Layout, call: Call
    ) -> ChunkCodec:
        """The operations on one worker's ``x``; the result, over the divisor, has its dtype.

        With `Call.keep_error` the codec tells what its encodings lose.
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
        """Warns of a relative error that is too large."""
        advice = self.advice(call.n_workers, call.topology, collective)
        if advice is not None:
            warnings.warn(advice, stacklevel=2)

    def agreed(self, x: Float[Array, " d"], layout: Layout, call: Call) -> Shared:
        """The shared facts, after the small all-reduce of the messages."""
        message = self.measure(x, layout)
        if message is not None:
            reduce, topology = f"p{self.agreement}", call.topology
            if topology is not None and topology.transport == "push" and reduce == "psum":
                check_schedule(topology, call.n_workers)
                reduce = "psum_by_push"
            message = getattr(call.axis, reduce)(message)
        shared = self.share(message, layout, call)
        if self.debug_checks:
            assert_same_on_workers(shared, call.axis, "the plan")
        return shared
