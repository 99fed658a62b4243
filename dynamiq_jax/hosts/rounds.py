"""Rounds in which hosts send each other the blocks of a copy that they lack.

A block goes from one host to another by `jax.lax.ppermute`. Where more hosts lack a block than have
it, `jax.lax.all_gather` takes it to all. One device of each process sends and receives.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Block = tuple[int, tuple[tuple[int, int], ...]]
"""A part of a leaf: the leaf's number, and from where to where it goes in each dimension."""

Piece = tuple[int, int, np.ndarray | None]
"""Bytes of a block: from where to where, and themselves, uint8[n]; `None`: in the own slot."""

Read = Callable[[Block, int, np.ndarray], None]
"""Reads the bytes of a block of the own slot, from one on, into uint8[n]."""

ROUND = 2**23
"""Bytes that a host sends to another at a time, and reads from its slot."""
SMALLER = 2**16, 2**19, 2**21, 2**22
"""Sizes of rounds with less to send: a program is compiled for each size."""
AT_ONCE = 3
"""Rounds that travel at a time: one is put onto devices, one passed on, and one taken from them."""
NOBODY = -2
"""The source of what no host that has it can send in a round."""
ALL = -1
"""The target of what goes to all hosts."""


class Sent(NamedTuple):
    """A part of a block that one host sends in a round."""

    source: int
    target: int
    """The host that gets it, or `ALL`."""
    block: Block
    start: int
    stop: int


class _Round:
    """One round: each host sends to one other host, and to all."""

    def __init__(self, room: int, hosts: int) -> None:
        self.parts: list[Sent] = []
        self._room = room
        # Every host gets what each sends to all: more hosts send less, for want of memory.
        # A row is of one of few sizes, so that what exceeds one by little would take the next one.
        most = min(room, max(1, 4 * room // hosts))
        self._room_to_all = max((n for n in (*SMALLER, room) if n <= most), default=most)
        self._sources: dict[int, int] = {}  # of each target; no host has two targets or sources
        self._to_one = [0] * hosts
        self._to_all = [0] * hosts

    def takes(self, target: int, holders: Sequence[int], sent: tuple[Block, int, int]) -> int:
        """Adds as much of a block's part as there is room for; returns where the rest begins."""
        block, start, stop = sent
        if target == ALL:
            source, used = min(holders, key=self._to_all.__getitem__), self._to_all
            room = self._room_to_all
        else:
            busy = self._sources.values()
            free = [host for host in holders if host not in busy]
            source, used = self._sources.get(target, free[0] if free else NOBODY), self._to_one
            if source not in holders:
                return start
            room = self._room
        stop = min(stop, start + room - used[source])
        if stop > start:
            if target != ALL:
                self._sources[target] = source
            self.parts.append(Sent(source, target, block, start, stop))
            used[source] += stop - start
        return stop


def rounds(
    held: Sequence[Mapping[Block, int]], wanted: Sequence[Collection[Block]], room: int
) -> Iterator[list[Sent]]:
    """Who sends what in each round, in the order of blocks: all hosts find the same.

    Args:
      held: the bytes of each host's blocks.
      wanted: the blocks that each host wants.
      room: how many bytes a host sends at most in a round to one host, and again to all.
    """
    now = _Round(room, len(held))
    having = _hosts_of(held)
    lacking = _hosts_of([{*own} - {*has} for own, has in zip(wanted, held, strict=True)])
    for block, holders in sorted(having.items()):
        size, lack = held[holders[0]][block], lacking.get(block, [])
        targets = lack if len(lack) <= len(holders) else [ALL]
        for begin in range(0, size, room):  # targets take turns
            for target in targets:
                start, end = begin, min(size, begin + room)
                while (start := now.takes(target, holders, (block, start, end))) < end:
                    yield now.parts
                    now = _Round(room, len(held))
    if now.parts:
        yield now.parts


def _hosts_of(blocks: Sequence[Collection[Block]]) -> dict[Block, list[int]]:
    """The hosts of each block, from the blocks of each host."""
    found: dict[Block, list[int]] = {}
    for host, own in enumerate(blocks):
        for block in own:
            found.setdefault(block, []).append(host)
    return found


class Incoming:
    """The pieces of the blocks that this host wants; all hosts make one alike.

    Args:
      held: the bytes of each host's blocks.
      wanted: the blocks that each host wants.
      read: reads a block that this host has.
      me: which of the hosts this one is.
    """

    def __init__(
        self,
        held: Sequence[Mapping[Block, int]],
        wanted: Sequence[Collection[Block]],
        read: Read,
        me: int,
    ) -> None:
        self._me, self._hosts = me, len(held)
        self._held, self._wanted, self._read = held[self._me], wanted[self._me], read
        self._sizes = {block: n for own in held for block, n in own.items()}
        self._rounds = rounds(held, wanted, ROUND)
        self._next = next(self._rounds, None)
        self._travel: collections.deque[tuple[list[Sent], dict[int, Array]]] = collections.deque()
        self._arrived: collections.deque[tuple[Sent, np.ndarray]] = collections.deque()
        self._zeros = functools.cache(_zeros)  # they leave the device with this object

    def of(self, block: Block) -> Iterator[Piece]:
        """The pieces of a block; blocks come in their order."""
        size = self._sizes[block]
        if block in self._held or not size:
            while self._next and self._next[0].block <= block:  # others wait for it
                self._advance()
            for start in range(0, size, ROUND):
                yield start, min(size, start + ROUND), None
            return
        end = 0
        while end < size:
            while not self._arrived:
                self._advance()
            sent, data = self._arrived.popleft()
            assert (sent.block, sent.start) == (block, end)
            yield sent.start, sent.stop, data
            end = sent.stop

    def finish(self) -> None:
        """Sends what others still lack."""
        while self._next or self._travel:
            self._advance()

    def _advance(self) -> None:
        """Begins a round, then waits for the oldest one if as many travel as may."""
        if self._next:
            self._travel.append((self._next, self._begun(self._next)))
            self._next = next(self._rounds, None)
            if self._next and len(self._travel) < AT_ONCE:
                return
        parts, results = self._travel.popleft()
        rows = {target: _own(result, target == ALL) for target, result in results.items()}
        for sent, place in _places(parts, self._hosts):
            if self._gets(sent):
                row = rows[ALL][sent.source] if sent.target == ALL else rows[0]
                self._arrived.append((sent, row[place : place + sent.stop - sent.start]))
        # Whoever gets nothing waits, too: what travels would take memory without limit.
        jax.block_until_ready([*results.values()])

    def _gets(self, sent: Sent) -> bool:
        ours = sent.target in (ALL, self._me)
        return ours and sent.block in self._wanted and sent.block not in self._held

    def _begun(self, parts: Sequence[Sent]) -> dict[int, Array]:
        """Results of a round's programs that have begun: of parts for all (`ALL`), and for one."""
        results = {}
        for key in sorted({min(sent.target, 0) for sent in parts}):
            placed = [
                (s, place) for s, place in _places(parts, self._hosts) if min(s.target, 0) == key
            ]
            longest = max(place + s.stop - s.start for s, place in placed)
            size = next((n for n in SMALLER if n >= longest), ROUND)
            row = None
            for (source, _, block, start, stop), place in placed:
                if source == self._me:
                    row = np.empty(size, np.uint8) if row is None else row
                    self._read(block, start, row[place : place + stop - start])
            pairs = tuple(sorted({(s.source, s.target) for s, _ in placed})) if key != ALL else None
            results[key] = _passed(row, size, pairs, self._zeros)
        return results


def _places(parts: Sequence[Sent], hosts: int) -> Iterator[tuple[Sent, int]]:
    """Parts, and where each begins in its host's row: of those for all, or of those for one."""
    ends = {True: [0] * hosts, False: [0] * hosts}
    for sent in parts:
        used = ends[sent.target == ALL]
        yield sent, used[sent.source]
        used[sent.source] += sent.stop - sent.start


def _own(result: Array, to_all: bool) -> np.ndarray:
    """This process's part of a result: every host's row, or one row."""
    data = result.addressable_data(0)
    return np.asarray(data) if to_all else np.asarray(data)[0]


@functools.cache
def _mesh() -> Mesh:
    """One device of each process."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh([first[process] for process in sorted(first)], ("hosts",))


@functools.lru_cache(maxsize=256)
def _program(pairs: tuple[tuple[int, int], ...] | None) -> Callable[[Array], Array]:
    """The program that passes rows on between pairs of hosts; `None`: from each to all."""

    def passed(row: Array) -> Array:
        if pairs is None:
            return lax.all_gather(row[0], "hosts")
        return lax.ppermute(row, "hosts", pairs)

    out = P() if pairs is None else P("hosts")
    options = {"in_specs": P("hosts"), "out_specs": out, "check_vma": False}
    return jax.jit(jax.shard_map(passed, mesh=_mesh(), **options))


def _zeros(size: int) -> Array:
    """The row of a process that sends nothing, uint8[1, n], on its device."""
    return _on_device(np.zeros(size, np.uint8))


def _on_device(row: np.ndarray) -> Array:
    return jax.device_put(row[None], _mesh().devices[jax.process_index()])


def _passed(
    row: np.ndarray | None,
    size: int,
    pairs: tuple[tuple[int, int], ...] | None,
    zeros: Callable[[int], Array],
) -> Array:
    """The result of a program that has begun to pass on this process's row, uint8[n], if any."""
    mesh = _mesh()
    own = zeros(size) if row is None else _on_device(row)
    shape, sharding = (mesh.size, size), NamedSharding(mesh, P("hosts"))
    with jax.set_mesh(mesh):
        placed = jax.make_array_from_single_device_arrays(shape, sharding, [own])
        return _program(pairs)(placed)
