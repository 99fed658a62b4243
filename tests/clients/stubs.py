"""Stand-ins for what trainers import and 20 steps do not need, and batches of random data.

A stand-in module has every attribute, and each is a stand-in again: data sets, tokenizers and
writers of summaries. The trainer's model, loss, state, shardings and step are its own.
"""

import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import numpy as np

SEED = 0
"""The seed of all batches; `run.py` sets it."""


class Enough(Exception):
    """The batches are used up; the trainer's frame holds what it has made until then."""


class StandIn(types.ModuleType):
    """A module, function or class that does nothing, of any name."""

    def __init__(self, name: str = "stand-in"):
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, StandIn(name))
        return getattr(self, name)

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        return StandIn()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()  # a class of it has its other bases alone

    def __getitem__(self, _: Any) -> "StandIn":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, _: Any) -> Any:
        return Any

    __ror__ = __or__

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def stand_in(*names: str) -> None:
    """Puts stand-ins in the places of modules; ``a.b`` is an attribute of ``a``, too."""
    for name in names:
        parent, _, last = name.rpartition(".")
        if parent and parent not in sys.modules:
            stand_in(parent)
        sys.modules[name] = module = StandIn(name)
        if parent:
            setattr(sys.modules[parent], last, module)


def stand_in_for_tensorflow(*names: str) -> None:
    """Puts a stand-in in the place of TensorFlow, too, after Flax has looked for it."""
    import flax.training.checkpoints  # noqa: F401

    stand_in("tensorflow", *names)


class Batches:
    """An iterator over batches that raises `Enough` after the last one.

    Before each batch ``watch`` sees the local variables of the trainer's loop, the function of the
    name ``loop``: so it can read the losses of the steps before.
    """

    asked_at: ClassVar[list[float]] = []
    """When the trainer asked for each batch, in seconds."""

    tell: ClassVar[Callable[[list[float]], None]] = staticmethod(lambda _: None)
    """Hears of every batch that the trainer asks for: ``asked_at``."""

    def __init__(self, batches: Any, loop: str = "", watch: Callable[[dict], None] | None = None):
        self._batches, self._loop, self._watch = iter(batches), loop, watch

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        if self._watch is not None:
            frame: Any = sys._getframe()
            while frame.f_code.co_name != self._loop:
                frame = frame.f_back
            self._watch(frame.f_locals)
        self.asked_at.append(time.time())
        self.tell(self.asked_at)
        for batch in self._batches:
            return batch
        raise Enough


def locals_at_the_end(loop: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """Runs a trainer's loop until its batches are used up; the loop's local variables then."""
    try:
        loop(*args, **options)
    except Enough as error:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_name == loop.__name__:
                return trace.tb_frame.f_locals
            trace = trace.tb_next
    raise RuntimeError(f"{loop.__name__} ended by itself, before its batches did")


def token_rows(n_batches: int, rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Batches of token ids that a small model can learn, each row padded by 0 to its own length.

    Every id follows from the one before it in three of four places. Rows of the first devices are
    short and of the last ones long: devices count different numbers of tokens.
    """
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(1, vocabulary, (n_batches, rows, length), dtype=np.int32)
    for i in range(1, length):
        follows = 1 + (5 * tokens[..., i - 1] + 3) % (vocabulary - 1)
        tokens[..., i] = np.where(rng.random((n_batches, rows)) < 0.75, follows, tokens[..., i])
    lengths = np.linspace(length // 4, length, rows).astype(int)
    return np.where(np.arange(length) < lengths[:, None], tokens, 0)


def images(n_batches: int, rows: int, side: int, channels: int, classes: int) -> list[dict]:
    """Batches of images with labels, each a noisy copy of its class's own image."""
    rng = np.random.default_rng(SEED)
    of_class = rng.standard_normal((classes, side, side, channels)).astype(np.float32)

    def batch() -> dict[str, np.ndarray]:
        labels = rng.integers(0, classes, rows, dtype=np.int32)
        noise = rng.standard_normal((rows, side, side, channels)).astype(np.float32)
        return {"image": of_class[labels] + noise, "label": labels}

    return [batch() for _ in range(n_batches)]
