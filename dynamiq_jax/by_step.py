"""Methods by step: uncompressed at first, other bits later, one compilation for each."""

import dataclasses
import operator
from collections.abc import Mapping

from dynamiq_jax.arguments import AnyMethod, check_kinds, chooses_by_path


@dataclasses.dataclass(frozen=True)
class ByStep:
    """A schedule, as `by_step` makes it; ``schedule(step)`` is the method of a step.

    Attributes:
      settings: (first step, method) of every setting, the first step rising from 0.
    """

    settings: tuple[tuple[int, AnyMethod | None], ...]

    def __call__(self, step: int) -> AnyMethod | None:
        """The method of step number ``step``, on the host: a Python int, 0 or more.

        Raises:
          ValueError: ``step`` is negative, or a value that jit traces.
        """
        try:
            number = operator.index(step)
        except TypeError as error:
            raise ValueError(
                f"step={step!r}: a schedule is asked outside of jax.jit, with an int; pass the "
                "method that it gives to the jitted step as a static argument"
            ) from error
        if number < 0:
            raise ValueError(f"step={number} must not be negative; the first step is 0")
        return [method for start, method in self.settings if start <= number][-1]


def by_step(settings: Mapping[int, AnyMethod | None]) -> ByStep:
    """A schedule of methods, to be asked once per step on the host.

    ``by_step({0: BF16(), 100: DynamiQ(bits=5), 1000: DynamiQ(bits=4)})`` is bf16 for 100 steps,
    then 5 bits, then 4. Methods are hashable: give ``schedule(step)`` to the jitted step as a
    static argument, and every setting compiles once, when it is first met.

    Args:
      settings: the method from each step on (`None`: the default, ``DynamiQ()``); one is from 0 on.

    Raises:
      ValueError: no setting is from step 0 on, a step is negative or no int, or a method is none.
    """
    steps = sorted(settings)
    if not steps or steps[0] != 0 or not all(isinstance(step, int) for step in steps):
        raise ValueError(
            f"by_step has settings from steps {steps}; pass ints of which the first is 0, as "
            "dq.by_step({0: dq.BF16(), 100: dq.DynamiQ()})"
        )
    for method in settings.values():
        if not chooses_by_path(method):
            check_kinds(method, None)
    return ByStep(tuple((step, settings[step]) for step in steps))
