"""Schedules say who encodes what when; any that keeps their promises can be run."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cases import small, vmapped

import dynamiq_jax as dq
from dynamiq_jax.topologies import Rounds, Stage, Step, Topology, steps_of
from dynamiq_jax.topologies.schedules import n_slots, sink_slot

SCHEDULES = [
    (topology, n)
    for topology in (dq.Direct(), dq.Ring(), dq.Butterfly())
    for n in (1, 2, 3, 4, 7, 8, 16)
    if not isinstance(topology, dq.Butterfly) or n & (n - 1) == 0
]


def encodings(topology, n):
    """(worker, owner of the chunk, stage, slot, receiver) of all encodings but the sinks."""
    for step in steps_of(topology.schedule(n)):
        for worker in range(n):
            for owner in step.chunks(worker).tolist():
                to = owner if step.to is None else step.to(worker)
                if step.to is not None or owner != worker:
                    yield worker, owner, step.stage, int(step.slot(worker)), to


@pytest.mark.parametrize(("topology", "n"), SCHEDULES, ids=str)
def test_every_worker_sends_every_chunk_of_others_once_and_owners_get_all(topology, n):
    stages, found = topology.stages(n), list(encodings(topology, n))
    once = Counter((worker, owner) for worker, owner, *_ in found)
    assert once == Counter((w, c) for w in range(n) for c in range(n) if w != c)
    sent = Counter((worker, stage) for worker, _, stage, *_ in found)
    assert all(sent[w, i] == s.sent for w in range(n) for i, s in enumerate(stages[:-1]))
    assert (stages[-1].sent, stages[-1].error) == (n - 1, 1)
    assert all(slot in stages[stage].slots for _, _, stage, slot, _ in found)
    for chunk in range(n):
        # One slot each, and none is left, whose partner in antithetic rounding never encoded.
        slots = [slot for _, owner, _, slot, _ in found if owner == chunk]
        slots.append(sink_slot(stages, chunk))
        assert slots[-1] in stages[-1].slots
        assert sorted(slots) == list(range(n_slots(stages)))
        held = [{w} for w in range(n)]  # whose gradients a worker's sum has
        for worker, owner, _, _, to in found:
            if owner == chunk:
                assert not held[to] & held[worker]
                held[to], held[worker] = held[to] | held[worker], set()
        assert held[chunk] == set(range(n))


def test_the_energy_of_a_ring_is_that_of_its_hops():
    """Hop t encodes t + 1 of n unrelated gradients; paired roundings halve the error."""
    for n in (3, 8, 16):
        hops, _ = dq.Ring().stages(n)
        assert hops.error == pytest.approx(sum((t + 1) / (2 * n) for t in range(n - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoArms(Topology):
    """Chunks come to their owner from both sides, through half as many hops each."""

    looped: bool = False

    def stages(self, n_workers: int) -> tuple[Stage, ...]:
        n = n_workers
        return Stage(n - 1, range(n - 1), (n + 1) / 8), Stage(n - 1, range(n - 1, n), 1.0)

    def chunks_per_worker(self, size: int) -> int:
        return 1

    def schedule(self, n_workers: int):
        n, one = n_workers, np.zeros(1, np.int32)
        rounds, first = [], 0
        for hops, way in (((n - 1) // 2, 1), (n // 2, -1)):

            def step(t, hops=hops, way=way, first=first):
                chunks, to = lambda w: (w + way * (hops - t)) % n + one, lambda w: (w + way) % n
                return Step(0, chunks, slot=lambda w: first + t, to=to)

            rounds.append(Rounds(hops, step, looped=self.looped))
            first += hops
        return tuple(rounds)


@pytest.mark.parametrize(("n", "looped"), [(2, False), (5, False), (8, False), (8, True)])
def test_a_topology_of_ones_own(n, looped):
    """Its schedule keeps the promises, and everything else follows."""
    topology: Any = TwoArms(looped=looped)
    test_every_worker_sends_every_chunk_of_others_once_and_owners_get_all(topology, n)
    x = np.random.default_rng(n).integers(-99, 100, (n, 1000)).astype(np.float32)
    found = vmapped(small(dq.F32()), topology)(x, None)
    np.testing.assert_array_equal(found, np.broadcast_to(x.sum(axis=0), x.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken(TwoArms):
    """A topology of two stages whose schedule is ``made`` of the number of workers."""

    made: Callable[[int], tuple[Rounds, ...]]

    def schedule(self, n_workers: int):
        return self.made(n_workers)


def partial(_):
    """Encodes in one step a chunk that something arrived for and one that nothing did, of five."""

    def step(owners, way, slot):
        chunks = np.array(owners, np.int32)
        return Step(0, lambda w: (w + chunks) % 5, lambda w: slot, lambda w: (w + way) % 5)

    steps = step([4], 1, 0), step([3, 2], 2, 1), step([1], 1, 2)
    return (Rounds(3, lambda t: steps[t]),)


def shifts(n):
    """Sends straight to the owners, one after the other: no hop adds what came with the last."""
    one = np.zeros(1, np.int32)

    def step(t):
        def owner(w):
            return (w + 1 + t) % n

        return Step(0, lambda w: owner(w) + one, slot=lambda w: t, to=owner)

    return (Rounds(n - 1, step, looped=True),)


def to_itself(n):
    """A worker sends its first chunk to itself, before it sends it on."""
    first = TwoArms().schedule(n)
    return (Rounds(1, lambda t: first[0].step(0)._replace(to=lambda w: w)), *first)


def doubled(n):
    """Encodes every chunk twice in a step."""

    def twice(step):
        return step._replace(chunks=lambda w: np.repeat(step.chunks(w), 2, axis=-1))

    return tuple(r._replace(step=lambda t, r=r: twice(r.step(t))) for r in TwoArms().schedule(n))


@pytest.mark.parametrize(
    ("complaint", "made"),
    [
        ("encode in one step chunks that arrived together", partial),
        ("encodes other chunks; pass Rounds", shifts),
        ("the owner of chunk 0 gets 3 of 5 gradients", lambda n: TwoArms().schedule(n)[:1]),
        ("one that it has sent before", lambda n: TwoArms().schedule(n)[:1] * 2),
        ("encodes chunk 2 for worker 0", to_itself),
        ("of 5 gradients; its", doubled),
    ],
)
def test_schedules_that_break_their_promises_are_refused(complaint, made):
    with pytest.raises(ValueError, match=complaint):
        vmapped(small(dq.F32()), Broken(made=made))(jnp.ones((5, 4096)), None)
