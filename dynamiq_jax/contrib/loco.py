"""LoCo: a moving average of compression errors, kept in 8 bits (Xie et al., arXiv 2407.04480).

A worker has a gradient g and a memory e. It sends g + e, and lost is the part of that which is
missing in the sum (`TellsLosses`). Then e becomes (1 - beta) e + beta lost. So e follows the mean
error of a biased method, and random errors hardly enter it. Every ``period`` steps e starts again
from zero.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Int8

from dynamiq_jax.core.checks import check_fields
from dynamiq_jax.methods.base import Call, Outcome, State, WrappedMethod
from dynamiq_jax.methods.error_feedback import ErrorFeedback, ErrorFeedbackState

BLOCK = 256
"""Coordinates of the memory that share a scale."""
MOST = 127
"""The largest magnitude of a code."""


class LoCoState(NamedTuple):
    """The state from step to step."""

    codes: Int8[Array, " d"]
    """The memory in units of its blocks' scales, different on every worker."""
    scales: Float[Array, " blocks"]
    """The largest magnitude of each block of the memory over 127, f32."""
    step: Int[Array, ""]
    """Steps since the memory was empty, the same on all workers."""
    inner: State
    """The method's own state."""


@dataclass(frozen=True, slots=True)
class LoCo(WrappedMethod):
    """A method with a moving average of its compression errors as memory.

        method = dq.contrib.LoCo(dq.contrib.BlockInt(bits=4))
        state = dq.Compression(method).init_state(params, n_workers)
        grads, state, _ = dq.reduce(grads, "data", compression=method, state=state)

    A coordinate takes one byte of memory and 4 bytes of 256 share a scale. As with
    `dq.ErrorFeedback`, a coordinate whose result is not finite keeps its memory, but for rounding
    to the scale that its block has after the step.

    Attributes:
      method: the method that compresses, as for `dq.ErrorFeedback`.
      beta: the weight of the newest error in the average, above 0 and at most 1.
      period: steps after which the memory starts again from zero; `None`: never.
    """

    method: Any
    beta: float = 0.1
    period: int | None = 512

    def __post_init__(self):
        """Checks every field."""
        check_fields(self)
        self._feedback()  # refuses methods that have no losses or have a memory
        if not 0 < self.beta <= 1:
            raise ValueError(f"beta={self.beta} must be above 0 and at most 1, such as 0.1")
        if self.period is not None and self.period < 1:
            raise ValueError(f"period={self.period} must be a positive number of steps, as 512")

    def _feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self.method)

    def init(self, size: int, n_workers: int) -> LoCoState:
        """The initial state: no errors."""
        return LoCoState(
            codes=jnp.zeros(size, jnp.int8),
            scales=jnp.zeros(-(-size // BLOCK), jnp.float32),
            step=jnp.zeros((), jnp.int32),
            inner=self.method.init(size, n_workers),
        )

    def all_reduce(self, x: Float[Array, " d"], call: Call) -> Outcome:
        """See `methods.base.Method`."""
        state = call.state
        memory = _spread(state.scales, state.codes.shape[0]) * state.codes.astype(jnp.float32)
        own = ErrorFeedbackState(memory, None, None, None, None, state.inner)
        outcome = self._feedback().all_reduce(x, call._replace(state=own))
        after = outcome.state
        average = memory + self.beta * (after.residual - memory)
        step = state.step + 1
        if self.period is not None:
            step = jnp.where(step >= self.period, 0, step)
            average = jnp.where(step == 0, 0.0, average)
        codes, scales = _encoded(average)
        return outcome._replace(state=LoCoState(codes, scales, step, after.inner))


def _spread(scales: Float[Array, " blocks"], size: int) -> Float[Array, " d"]:
    return jnp.repeat(scales, BLOCK)[:size]


def _encoded(x: Float[Array, " d"]) -> tuple[Int8[Array, " d"], Float[Array, " blocks"]]:
    """The nearest codes of finite values, and the scales."""
    size = x.shape[0]
    blocks = jnp.pad(x, (0, -size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1) / MOST
    scales = jnp.where(scales > 2.0**-100, scales, 0.0)
    inverse = jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1.0), 0.0)
    codes = jnp.clip(jnp.round(x * _spread(inverse, size)), -MOST, MOST)
    return codes.astype(jnp.int8), scales
