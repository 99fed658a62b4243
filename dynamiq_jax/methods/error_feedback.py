"""Memory around methods: error feedback of four kinds.

g_i is worker i's gradient, y_i the input of the method, C(y) the result, which is a sum over
workers, and c_i worker i's part of it; e_i, h_i and v_i are f32 memories that start at zero:

* ``ef14`` (Seide et al., Interspeech 2014; EF-SGD, Karimireddy et al., ICML 2019): y = g + e, the
  result is C(y), and e becomes y - c, the part that is missing in the result.
* ``ef21`` (Richtárik et al., NeurIPS 2021): y = g - h, h becomes h + c, and the result is the sum
  of all h. As gradients change less, the values that are sent get smaller, and so do errors.
* ``ef21m`` (EF21-SGDM, Fatkhullin et al., NeurIPS 2023): as ``ef21`` with v instead of g, where v
  becomes (1 - eta) v + eta g: the result is compressed momentum.
* ``econtrol`` (Gao et al., ICLR 2024): y = g - h + eta e, h becomes h + c, e becomes e + g - h with
  the new h, and the result is the sum of all h. With eta = 0 it would be ``ef21``.

A multi-hop all-reduce encodes partial sums again, which belong to no single worker. lost_i, the
*loss* of worker i, is the error of its encodings, one for every chunk: of its share plus the
payloads that it added to it, and of the finished sums that it owns. c_i = y_i - lost_i is the
*delivered* part. So the c_i of all workers add up to the result, for any topology. It is not enough
to encode and decode only a worker's own y: no memory would have the noise of further hops, and the
sum of the h_i, which every worker keeps, would drift away from the h_i without bound.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.core.warned import warn
from dynamiq_jax.methods.base import (
    Call,
    Collective,
    Method,
    Outcome,
    State,
    TellsLosses,
    WrappedMethod,
    clipped,
    with_memory,
)
from dynamiq_jax.topologies import Topology

Kind = Literal["ef14", "ef21", "ef21m", "econtrol"]

ETA = 0.1
"""The weight of the newest gradient in momentum, and of the residual in "econtrol"'s input."""


class ErrorFeedbackState(NamedTuple):
    """The state from step to step, f32; a part that a kind does not need is `None`."""

    residual: Float[Array, " d"] | None
    """e, different on every worker: with "ef14" and "econtrol"."""
    sent: Float[Array, " d"] | None
    """h, different on every worker: with all kinds but "ef14"."""
    total: Float[Array, " d"] | None
    """The sum of h over workers, the same on all: with all kinds but "ef14"."""
    momentum: Float[Array, " d"] | None
    """v, different on every worker: with "ef21m"."""
    started: Bool[Array, ""] | None
    """Whether v has been set, the same on all workers: with "ef21m"."""
    inner: State
    """The method's own state."""


@dataclass(frozen=True, slots=True)
class ErrorFeedback(WrappedMethod):
    """A method with a memory of its compression errors.

        method = dq.ErrorFeedback(dq.contrib.MXFP4(), kind="ef21")
        state = dq.Compression(method).init_state(params, n_workers)
        grads, state, _ = dq.reduce(grads, "data", compression=method, state=state)

    With "ef14" each result has the noise of two steps: its own, and the correction of the previous
    step. This is about twice the squared error of the method alone, and more at few bits. Only the
    average of the results becomes exact. With the other kinds results are running estimates, whose
    error decreases as gradients change less from step to step. For sums over workers, up to the
    rounding of f32:

    * "ef14" and "econtrol": all past results and the residuals add up to all gradients.
    * all kinds but "ef14": the result is the sum of all h, so a later step corrects a loss. This
      holds from step to step; f32 rounding errors add up over steps.

    Neither is exact with sums that XLA adds in bf16 (`OmniReduce`, `SIDCo`, `CLTK`, `BF16` without
    a topology), since the errors of these additions are not known, nor if values saturate at the
    largest bf16 number. Results in bf16 and f16 are rounded from f32 values that are exact in this
    sense. In a hierarchy only the outer reduction has memory; its inner sums are native.

    Memories stay bounded if the encodings of one step together lose less than workers send: a
    contraction, which the proofs of all four kinds assume. A warning says if `DynamiQ` is not a
    contraction: at low bits, and over a ring sooner than over `Direct` (docs/results.md).

    Coordinates whose result is not finite do not change any memory, so memories are always finite,
    and a bad step has no later effect. If a finite sum in a bucket overflows f16, none of the
    bucket's memory changes. Memories have the unit of the gradients: if a loss scale changes,
    reduce gradients that are divided by it. On every worker a coordinate takes 4 bytes with "ef14",
    8 with "ef21", 12 with the others. The wire bits do not change.

    Attributes:
      method: the method that compresses; it has no memory itself.
      kind: "ef14", "ef21", "ef21m" or "econtrol", see the module; eta is 0.1. The papers of the
        latter two start by sending exact gradients. Here momentum starts with the first gradient
        that is finite on all workers, compressed like all others.
    """

    method: TellsLosses
    kind: Kind = field(default="ef14", kw_only=True)

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        method: Any = self.method
        if not isinstance(method, Method):
            raise ValueError(
                f"method={method!r} is not a method; pass for example "
                "dq.ErrorFeedback(dq.DynamiQ(bits=4)), and to choose by path a function that "
                "returns such"
            )
        if method.needs_state:
            raise ValueError(
                f"method={method!r} keeps a memory of gradients itself, and errors would be fed "
                "back twice; pass it to dq.reduce as it is, or another method here"
            )
        if not isinstance(method, TellsLosses):
            raise ValueError(
                f"method={method!r} does not tell what its encodings lose; derive its class from "
                "methods.base.TellsLosses, or pass for example dq.DynamiQ()"
            )

    def advice(
        self, n_workers: int, topology: Topology | None, collective: Collective = "all_reduce"
    ) -> str | None:
        """The method's advice, and advice against a memory that grows."""
        own = self.method.advice(n_workers, topology, collective)
        return " ".join(filter(None, (own, self._growth(n_workers, topology)))) or None

    def _growth(self, n_workers: int, topology: Topology | None) -> str | None:
        lost = self.method.lost(n_workers, topology)
        if lost is None or lost < 1:
            return None
        return (
            f"{self.method!r} over {type(topology).__name__} among {n_workers} workers loses about "
            f"{lost:.2g} times the energy of what they send, and from 1 on the memory of "
            "dq.ErrorFeedback grows from step to step; pass more bits, or the method without memory"
        )

    def init(self, size: int, n_workers: int) -> ErrorFeedbackState:
        """The initial state: no losses, no estimates."""

        def zeros(*kinds: Kind) -> Array | None:
            return jnp.zeros(size, jnp.float32) if self.kind in kinds else None

        return ErrorFeedbackState(
            residual=zeros("ef14", "econtrol"),
            sent=zeros("ef21", "ef21m", "econtrol"),
            total=zeros("ef21", "ef21m", "econtrol"),
            momentum=zeros("ef21m"),
            started=jnp.zeros((), bool) if self.kind == "ef21m" else None,
            inner=self.method.init(size, n_workers),
        )

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`."""
        state, divisor = call.state, call.divisor
        growth = self._growth(call.n_workers, call.topology)
        if growth is not None:
            warn(growth)
        with jax.named_scope("error_feedback"):
            own, momentum = x, state.momentum
            if momentum is not None:
                eta = jnp.where(state.started, jnp.float32(ETA), 1.0)
                own = with_memory(x.astype(jnp.float32) * eta, (1 - eta) * momentum)
            memory = state.residual
            if state.sent is not None:
                memory = -state.sent if memory is None else ETA * memory - state.sent
            y = with_memory(own, memory)
            inner = call._replace(state=state.inner, divisor=1, keep_error=True)
            delivered = self.method.all_reduce(y, inner)
            value, lost = delivered.value, delivered.lost
            assert lost is not None
            good = jnp.isfinite(value)
            if state.total is not None:  # the same on all workers, as what was added to it
                total = call.axis.assume_invarying(state.total)
                value = jnp.where(good, clipped(total + value), value)
            result = (value / divisor if divisor != 1 else value).astype(x.dtype)
            fits = jnp.isfinite(result)
            good &= jnp.all(fits == good) if x.dtype == jnp.float16 else fits  # f16 ends early

            def kept(new: Array, old: Any) -> Array:
                new = clipped(new)
                return jnp.where(good & ~jnp.isnan(new), new, old)

            after = state._replace(inner=delivered.state)
            if state.sent is None:
                after = after._replace(residual=kept(lost, state.residual))
            else:
                sent = kept(state.sent + (y - lost), state.sent)
                after = after._replace(sent=sent, total=kept(value, state.total))
                if state.residual is not None:
                    missing = own.astype(jnp.float32) - sent
                    residual = kept(state.residual + missing, state.residual)
                    after = after._replace(residual=residual)
            if momentum is not None:
                started = state.started | jnp.all(good)
                after = after._replace(momentum=kept(own, momentum), started=started)
            facts = delivered.facts._replace(error=delivered.facts.error / divisor**2)
            return Outcome(result, after, facts)
