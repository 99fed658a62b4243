"""Hosts send each other what they lack: who sends what, and whole restores of simulated hosts."""

import gc
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from cases import daily

from dynamiq_jax.hosts import copies, rounds
from dynamiq_jax.hosts.copies import Copies
from dynamiq_jax.hosts.rounds import ALL
from dynamiq_jax.hosts.slots import Slots


def hosts_at_random(rng):
    """Blocks of some hosts, and the blocks that each wants."""
    n = int(rng.integers(1, 7))
    every = {(i, ((0, int(rng.integers(9))),)): int(rng.integers(0, 80)) for i in range(9)}
    held, wanted = [{} for _ in range(n)], [set() for _ in range(n)]
    for block, size in every.items():
        for host in {int(rng.integers(n)), *np.flatnonzero(rng.random(n) < rng.random()).tolist()}:
            held[host][block] = size
        for host in np.flatnonzero(rng.random(n) < rng.random()).tolist():
            wanted[host].add(block)
    return n, held, wanted, every


@pytest.mark.parametrize("count", daily([200, 20_000], [200]))
def test_rounds_send_what_each_host_lacks_once_and_in_order(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        (n, held, wanted, every), room = hosts_at_random(rng), int(rng.integers(1, 30))
        ends: list[list] = [[] for _ in range(n)]  # of what has arrived: [block, stop]s
        for parts in rounds.rounds(held, wanted, room):
            used: Counter = Counter()
            pairs = {(source, target) for source, target, *_ in parts if target != ALL}
            assert len(pairs) == len({s for s, _ in pairs}) == len({t for _, t in pairs})
            for source, target, block, start, stop in parts:
                assert block in held[source]
                used[source, target] += stop - start
                for host in range(n) if target == ALL else [target]:
                    if block in held[host] or block not in wanted[host]:
                        assert target == ALL
                        continue
                    if start:
                        assert ends[host].pop() == (block, start)
                    ends[host].append((block, stop))
            assert 0 < max(used.values()) <= room
            assert sum(used[host, ALL] for host in range(n)) <= max(n, 4 * room)
        for host in range(n):
            lacks = sorted(wanted[host] - {*held[host]})
            assert ends[host] == [(block, every[block]) for block in lacks if every[block]]


def test_one_host_that_lacks_all_gets_whole_rows():
    """Three have what the fourth lacks, in leaves of any size."""
    sizes = {(i, ()): size for i, size in enumerate([5, 100, 1, 1, 30, 7, 0, 3])}
    found = [*rounds.rounds([sizes, sizes, sizes, {}], [{*sizes}] * 4, 10)]
    assert [sum(s.stop - s.start for s in parts) for parts in found] == [10] * 14 + [7]
    assert {s.target for parts in found for s in parts} == {3}


@pytest.mark.parametrize("hosts", [3, 5, 7, 9, 100, 299, 512])
def test_what_a_round_brings_from_all_hosts_takes_little_memory(hosts):
    """With 7 hosts rows of 5 MB took 8 MiB each."""
    block = (0, ())
    held, wanted = [{block: 2**26}, *[{}] * (hosts - 1)], [[block]] * hosts
    parts = next(rounds.rounds(held, wanted, rounds.ROUND))
    assert {sent.target for sent in parts} == {ALL}
    sent = sum(sent.stop - sent.start for sent in parts)
    row = next((n for n in rounds.SMALLER if n >= sent), rounds.ROUND)
    assert hosts * row <= 4 * rounds.ROUND
    assert 2 * sent >= row


def test_zeros_are_on_devices_only_while_a_process_that_sends_nothing_restores():
    """Whoever sends made them, too, and after an error they stayed."""
    size = rounds.SMALLER[0]
    rows = lambda: [x for x in jax.live_arrays() if x.shape == (1, size)]
    block = (0, ((0, 8),))
    sender = rounds.Incoming([{block: 8}, {}], [[], [block]], lambda *_: None, 0)
    receiver = rounds.Incoming([{}, {block: 8}], [[block], []], lambda *_: None, 0)
    for host, count in ((sender, 0), (receiver, 1)):
        with pytest.raises((IndexError, ValueError)):  # JAX has no second host here
            host.finish()
        assert len(rows()) == count
    del sender, receiver, host
    gc.collect()
    assert not rows()


# --- Simulated hosts ------------------------------------------------------------------------------


class Killed(Exception):
    """In the place of SIGKILL."""


class Leaf:
    """An array whose rows are split among the processes of a run, or whole in all of them."""

    def __init__(self, data, split):
        self.data, self.split = data, split
        self.shape, self.dtype, self.sharding = data.shape, data.dtype, self

    def part(self, process, n):
        """The part that a process has."""
        if not self.shape:
            return ()
        rows = self.shape[0]
        cuts = [i * rows // n for i in (process, process + 1)] if self.split else [0, rows]
        return (tuple(cuts), *((0, m) for m in self.shape[1:]))

    def devices_indices_map(self, shape):
        n = jax.process_count()
        parts = [self.part(p, n) for p in range(n)]
        return {Device(p): tuple(slice(*span) for span in part) for p, part in enumerate(parts)}


class Device:
    def __init__(self, process):
        self.process_index = process


class Processes:
    """A run's processes as threads, which meet wherever processes exchange something."""

    def __init__(self, slots, monkeypatch):
        self.slots, self.local = slots, threading.local()
        self.told = [None] * len(slots)
        self.barrier = threading.Barrier(len(slots), timeout=20)
        n = len(slots)
        for module, name, fake in (
            (jax, "process_index", lambda: self.local.me), (jax, "process_count", lambda: n),
            (copies, "rows_of_all", lambda row: np.stack(self.exchange(row))),
            (copies, "told_by_all", self.exchange), (rounds, "_passed", self.passed),
            (copies, "Placed", Leaf | copies.Placed), (copies, "_array", lambda leaf: leaf),
            (copies, "_put", lambda array, like: array), (rounds, "_own", lambda rows, _: rows),
            (copies, "_travels", lambda leaf: leaf.split and n > 1),
            (copies, "_parts", lambda leaf, p: {leaf.part(p, n): p}),
            (copies, "_on_host", self.on_host), (copies, "_pass_on", lambda moving: moving.items()),
            (Slots, "inherited", lambda: self.slots[self.local.me]),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, fake)

    def exchange(self, own):
        self.told[self.local.me] = own
        self.barrier.wait()
        told = [*self.told]
        self.barrier.wait()
        return told

    def passed(self, row, size, pairs, _):
        rows = self.exchange(np.zeros(size, np.uint8) if row is None else row)
        if pairs is None:
            return np.stack(rows)
        sources = [source for source, target in pairs if target == self.local.me]
        return rows[sources[0]] if sources else np.zeros(size, np.uint8)

    def on_host(self, leaf, process):
        part = leaf.data[tuple(slice(*span) for span in leaf.part(process, len(self.slots)))]
        return np.frombuffer(part.tobytes(), np.uint8)

    def run(self, act):
        """Runs ``act(process)`` in each; returns the results."""
        results = [None] * len(self.slots)

        def body(me):
            self.local.me = me
            try:
                results[me] = act(me)
            except Killed:
                pass
            except BaseException as error:
                results[me] = error
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(me,)) for me in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


SHAPES = ((7, 3), (12,), (1, 2), (), (0, 4), (300, 5))


def state_of(moment, splits):
    """Leaves whose bytes tell the moment at which the state was."""
    rng = np.random.default_rng(moment)
    return [Leaf(rng.integers(0, 256, shape, np.uint8).view(np.int8), split)
            for shape, split in zip(SHAPES, splits, strict=True)]  # fmt: skip


class Fleet:
    """Hosts on which a training saves, is killed, loses memory, and starts again, at random.

    The model knows which copies each host's two slots have: (moment, processes, process).
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.made = [Slots.made() for _ in range(int(self.rng.integers(1, 5)))]
        self.slots = [made.__enter__() for made in self.made]
        self.has: list[list] = [[None, None] for _ in self.slots]
        self.splits = [bool(shape and self.rng.random() < self.rng.random()) for shape in SHAPES]
        self.moment = 0
        self.noted = {}  # {moment: step}

    def close(self):
        for made in self.made:
            made.__exit__(None, None, None)

    def whole(self, here):
        """The last moment of which these hosts have all."""
        found = {}
        for i in here:
            for moment, n, process in filter(None, self.has[i]):
                held = {process, (process - 1) % n} if n > 1 and any(self.splits) else {*range(n)}
                found.setdefault((moment, n), set()).update(held)
        return max((m for (m, n), held in found.items() if len(held) == n), default=None)

    def start(self, here, monkeypatch):
        """A run on some hosts: it restores what the model says, saves, and may be killed."""
        expected, n = self.whole(here), len(here)
        processes = Processes([Slots(self.slots[i].files) for i in here], monkeypatch)
        mine = processes.run(lambda _: Copies())
        changed = int(self.rng.integers(-5, len(SHAPES)))  # a leaf that has another shape now
        wanted = state_of(0, self.splits)
        if changed >= 0:
            wanted[changed].shape = (9, 9, 9)
        found = processes.run(lambda me: mine[me].restore(wanted))
        assert [copy and copy.note for copy in found] == [expected] * n
        for process, copy in enumerate(found if expected is not None else []):
            assert copy.step == self.noted[expected]
            for number, leaf in enumerate(state_of(expected, self.splits)):
                own = leaf.part(process, n) if number != changed else [(0, m) for m in leaf.shape]
                index = tuple(slice(*span) for span in own)
                np.testing.assert_array_equal(copy.state[number][index], leaf.data[index])
        counts = [expected is not None and copy is not None and copy[0] == expected
                  for i in here for copy in self.has[i][:1]]  # fmt: skip
        into = [int(first) for first in counts]  # the slot without the copy that counts
        for _ in range(int(self.rng.integers(0, 4))):
            if self.save(here, processes, mine, into):
                return

    def save(self, here, processes, mine, into):
        """All save; whoever is killed has no copy, or not the new one. Whether somebody was."""
        self.moment += 1
        torn, n = self.rng.random() < 0.4, len(here)
        fates = self.rng.integers(0, 3, n).tolist() if torn else [2] * n  # before, during, after
        self.noted[self.moment] = step = int(self.rng.integers(0, 9))  # it may go back
        all_bytes = copies._all_bytes

        def bytes_of(leaves, moving):
            parts = [*all_bytes(leaves, moving)]
            half = sum(len(part) for part in parts) // 2
            for part in parts:
                if fates[processes.local.me] == 1 and (half := half - len(part)) < 0:
                    raise Killed
                yield part

        def act(me):
            if fates[me]:
                mine[me].save(step, state_of(self.moment, self.splits), self.moment)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(copies, "_all_bytes", bytes_of)
            processes.run(act)
        for process, i in enumerate(here):
            if fates[process]:
                whole = fates[process] == 2
                self.has[i][into[process]] = (self.moment, n, process) if whole else None
                into[process] = 1 - into[process]
        return torn

    def lose(self, i):
        """A host comes back without its memory."""
        self.made[i].__exit__(None, None, None)
        self.made[i] = Slots.made()
        self.slots[i], self.has[i] = self.made[i].__enter__(), [None, None]


def goes_on_at_random(seed):
    fleet = Fleet(seed)
    try:
        for _ in range(8):
            count = int(fleet.rng.integers(1, len(fleet.slots) + 1))
            here = fleet.rng.permutation(len(fleet.slots))[:count].tolist()
            with pytest.MonkeyPatch.context() as patched:
                fleet.start(here, patched)
            if fleet.rng.random() < 0.3:
                fleet.lose(int(fleet.rng.integers(len(fleet.slots))))
    finally:
        fleet.close()


def sent_in(processes, mine, wanted):
    """{target: bytes} that hosts send each other while all restore."""
    seen: list[Counter] = [Counter() for _ in processes.slots]

    def rounds_of(*args, plan=rounds.rounds):
        for parts in plan(*args):
            for sent in parts:
                seen[processes.local.me][sent.target] += sent.stop - sent.start
            yield parts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "rounds", rounds_of)
        assert all(processes.run(lambda me: mine[me].restore(wanted)))
    assert all(own == seen[0] for own in seen)
    return dict(seen[0])


def test_a_host_gets_only_what_it_places_and_lacks(monkeypatch):
    """All got all of every shard, even where each had its own in its slot."""
    fleet = [Slots.made() for _ in range(4)]
    slots = [made.__enter__() for made in fleet]
    whole, split = np.arange(100, dtype=np.int8), np.arange(80, dtype=np.int8)
    state = [Leaf(whole, False), Leaf(split, True)]
    with monkeypatch.context() as patched:
        processes = Processes(slots, patched)
        mine = processes.run(lambda _: Copies())
        processes.run(lambda me: mine[me].save(1, state))
        assert sent_in(processes, mine, state) == {}
        everything = [Leaf(whole, False), Leaf(split, False)]  # each has 40 of 80
        assert sent_in(processes, mine, everything) == {0: 40, 1: 40, 2: 40, 3: 40}
    with monkeypatch.context() as patched, Slots.made() as empty:
        processes = Processes([*slots[:2], empty, slots[3]], patched)
        mine = processes.run(lambda _: Copies())
        assert sent_in(processes, mine, state) == {2: 100 + 20}
    for made in fleet:
        made.__exit__(None, None, None)


@pytest.mark.parametrize("count", daily([20, 1000], [20]))
def test_simulated_hosts_go_on_from_the_last_copy_that_is_whole(count, monkeypatch):
    """Each has what it places, bit for bit, though small rounds take it in many pieces."""
    monkeypatch.setattr(rounds, "ROUND", 16)
    monkeypatch.setattr(rounds, "SMALLER", (2, 4))
    for seed in range(count):
        goes_on_at_random(seed)
