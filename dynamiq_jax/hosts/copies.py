"""Copies of a training's state in the memory of its hosts, from which it starts again.

Every host keeps what its own devices hold, and the shards of the host before it. So the state is
whole as long as no two hosts in a row are lost. `dynamiq-jax run` has the memory, or a folder in
memory, such as one in ``/dev/shm``: it outlives the process that trains.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax.hosts import notice
from dynamiq_jax.hosts.rounds import Block, Incoming, Piece, Read
from dynamiq_jax.hosts.slots import Kept, Slots
from dynamiq_jax.hosts.told import rows_of_all, told_by_all
from dynamiq_jax.tree.leaves import name_of, shown

Tree = TypeVar("Tree")
Placed = Array | jax.ShapeDtypeStruct
Spans = tuple[tuple[int, int], ...]
"""From where to where a part of a leaf goes in each dimension."""

PIECE = 2**28
"""Bytes that a device holds at most while hosts send each other a copy."""
FIELDS = 7
"""How many numbers tell of one slot."""


class Copy(NamedTuple, Generic[Tree]):
    """A copy that `Copies.restore` has found."""

    step: int
    """The step that the copy was saved with."""
    state: Tree
    """The state. A leaf of another shape than now is an array of numpy, with its whole shape."""
    note: Any
    """The note that the copy was saved with."""


class Told(NamedTuple):
    """A host's report about one of its slots. Of two copies the greater one was saved later."""

    session: int = 0
    """The start whose processes wrote it, as `session_after` numbers it."""
    number: int = 0
    """How many copies these processes had saved, this one included; 0 in copies of version 0.4."""
    step: int = 0
    processes: int = 0
    """How many there were; 0: the slot has no copy."""
    process: int = 0
    """Which of them wrote it."""
    whole: bool = False
    """Whether it has all of the state, and not only two hosts' shards of it."""

    @property
    def copy(self) -> "Told":
        """The fields that all hosts tell alike of a copy."""
        return self._replace(process=0, whole=False)


class Copies:
    """Copies of a training's state in the memory of its hosts.

    All processes of a run call its methods alike, as they call a collective::

        copies = Copies()
        if (copy := copies.restore(state)) is not None:
            state = dq.optax.restore_state(copy.state, state)
        ...
        copies.save(step, state)  # after a step, before its arrays are donated

    `dynamiq-jax run` has memory for them. Under other engines the variable ``DYNAMIQ_JAX_COPIES``
    names a folder in each host's memory, which the run has for itself: ``/dev/shm/run1``. Without
    either, and on other systems than Linux, `save` keeps nothing and `restore` returns `None`.

    A host's memory takes twice (two copies) what its devices hold of the state, without
    repetitions, and once more the shards of another host. Besides what is restored, `restore`
    needs the memory of the largest whole leaf, and about 100 MB, for as long as it runs.
    """

    def __init__(self) -> None:
        notice.watch_for_process()
        self._slots = Slots.inherited()
        self._session: int | None = None
        self._number = 0  # how many copies have been saved

    def save(self, step: int, state: Any, note: Any = None) -> int:
        """Keeps a copy of the state, in place of the one before the last.

        Shards travel one host onwards by `jax.lax.ppermute`. Leaves that every host has do not
        travel. Between two calls the processes exchange something, as every training step does: the
        second call then writes only when all have ended the first.

        Args:
          step: how many steps the state has behind it, from 0 to 2^32 - 1.
          state: a tree of arrays of any shape and dtype, keys of `jax.random` among them. Arrays of
            several processes have a `jax.sharding.NamedSharding`; all others are the same in all
            processes.
          note: anything of JSON's types, the same in all processes.

        Returns:
          The bytes of this host's copy; 0 where nothing is kept.

        Raises:
          ValueError: the step is no number of 32 bits; an array of several processes has another
            sharding; or a mesh has more devices of one process than of another.
        """
        if not 0 <= step < 2**32:
            raise ValueError(f"step={step}: give a number from 0 to {2**32 - 1}")
        if self._slots is None:
            return 0
        if self._session is None:
            self._meet()
        assert self._session is not None
        self._number += 1
        paths, _ = jax.tree.flatten_with_path(_plain(state))
        leaves = [leaf for _, leaf in paths]
        impls = [str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
                 for leaf in jax.tree.leaves(state)]  # fmt: skip
        for path, leaf in paths:
            _check(path, leaf)
        me, n = jax.process_index(), jax.process_count()
        moving = {number: leaf for number, leaf in enumerate(leaves) if _travels(leaf)}
        sizes = _all_sizes(leaves, moving)
        header = {
            "step": step, "session": divmod(self._session, 2**32), "number": self._number,
            "processes": n, "process": me, "whole": not moving, "note": note,
            "leaves": [[name_of(path), np.shape(leaf), np.dtype(leaf.dtype).name, impl]
                       for (path, leaf), impl in zip(paths, impls, strict=True)],
            "blocks": [[*block, size] for block, size in sizes.items()],
        }  # fmt: skip
        jax.block_until_ready(leaves)  # of a step that all began after their last copy
        self._slots.write(header, _all_bytes(leaves, moving))
        return sum(sizes.values())

    def restore(self, state: Tree) -> Copy[Tree] | None:
        """Returns the copy that was saved last, of those that all hosts together have whole.

        A training may go back to an older step: what it saves from then on counts, and copies with
        higher steps from before no longer do.

        The copy may be of another number of hosts. A leaf whose shape depends on that number comes
        back with the old shape; `dynamiq_jax.optax.restore_state` then starts what each worker had
        of its own anew.

        Args:
          state: a tree with the structure, shapes, dtypes and shardings that are wanted: of arrays,
            or of `jax.ShapeDtypeStruct`s, which take no memory.

        Returns:
          The copy; `None` if no copy is whole.

        Raises:
          ValueError: the copy was made of a tree with other leaves.
        """
        if self._slots is None:
            return None
        best, mine, lacking = self._meet()
        if best is None:
            return None
        # Where nobody lacks anything, each host is alone with its slot.
        headers = told_by_all(mine and mine.header) if lacking else [mine and mine.header]
        header = next(header for header in headers if header)
        _check_names(header, state)
        held = [_sizes(header) for header in headers]
        own = _needs(header, state)
        needs = told_by_all(own) if lacking else [own]
        every = _parts_of_all(held)
        wanted = [_overlapping(every, regions) for regions in needs]
        me, read = jax.process_index() if lacking else 0, self._reader(mine)
        incoming = Incoming(held, wanted, read, me)
        restored = _restored(header, incoming, wanted[me], read, state)
        return Copy(header["step"], restored, header["note"])

    def _meet(self) -> tuple[Told | None, Kept | None, bool]:
        """Begins a session: all copies from now on are later than those of which hosts tell.

        Returns:
          The copy that counts, if there is one; what this host has of it, over which the next copy
          does not go; and whether some host lacks a part.
        """
        assert self._slots is not None
        kept = self._slots.kept()
        words = [*_words(kept[:1]), *_words(kept[1:]), *divmod(time.time_ns(), 2**32)]
        rows = rows_of_all(np.array(words, np.uint32)).tolist()
        told = [[_told(row[:FIELDS]), _told(row[FIELDS:-2])] for row in rows]
        self._session = session_after(told, [high * 2**32 + low for *_, high, low in rows])
        best = newest(told)
        mine = next((k for k in kept if _told(_words([k])).copy == best), None)
        if mine:
            self._slots.keep(mine)
        return best, mine, best is not None and _lacking(told, best)

    def _reader(self, mine: Kept | None) -> Read:
        """A function that reads bytes of a block from this host's slot."""
        places, end = {}, 0
        for block, size in _sizes(mine and mine.header).items():
            places[block], end = end, end + size

        def read(block: Block, start: int, into: np.ndarray) -> None:
            if into.size:
                assert self._slots is not None
                assert mine is not None
                self._slots.read(mine, places[block] + start, into)

        return read


def session_after(told: Sequence[Sequence[Told]], clocks: Sequence[int]) -> int:
    """Returns a session later than all of which hosts have a copy, whatever their clocks say.

    Args:
      told: what each host tells of its slots.
      clocks: each host's time in nanoseconds; they may differ, and go back.
    """
    return max(*clocks, *(slot.session + 1 for host in told for slot in host))


def newest(told: Sequence[Sequence[Told]]) -> Told | None:
    """Returns the last copy of which hosts have every process's shards; `None` without one.

    A host's copy has the shards of the process that wrote it, and of the one before that. Copies
    are in the order in which the run saved them: by session, and within a session by number. Their
    steps say nothing, since a training may go back. Shards of different copies do not make up one,
    even if their steps are the same.

    Args:
      told: what each host tells of its slots.
    """
    owners: dict[Told, set[int]] = {}
    for slot in (slot for host in told for slot in host if slot.processes):
        held = range(slot.processes) if slot.whole else (slot.process, slot.process - 1)
        owners.setdefault(slot.copy, set()).update(p % slot.processes for p in held)
    complete = [copy for copy, held in owners.items() if len(held) == copy.processes]
    return max(complete, default=None)


def _lacking(told: Sequence[Sequence[Told]], best: Told) -> bool:
    """Whether a host lacks a part of a copy."""
    return not all(any(slot.copy == best and slot.whole for slot in host) for host in told)


def _words(kept: Sequence[Kept]) -> list[int]:
    """A `Told` in numbers, of a slot that has a copy or of none."""
    if not kept:
        return [0] * FIELDS
    header = kept[0].header
    names = "step", "processes", "process", "whole"
    return [*header["session"], header.get("number", 0), *(int(header[name]) for name in names)]


def _told(words: Sequence[int]) -> Told:
    high, low, number, step, processes, process, whole = words
    return Told(high * 2**32 + low, number, step, processes, process, bool(whole))


# --- Leaves and their blocks ----------------------------------------------------------------------


def _plain(tree: Any) -> Any:
    """The tree with the numbers of its keys in place of these."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else _array(x), tree)


def _is_key(x: Any) -> bool:
    return isinstance(x, Placed) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _array(x: Any) -> Any:
    return x if isinstance(x, Array) else np.asarray(x)


def _spans(leaf: Any) -> bool:
    """Whether a leaf lies on devices of several processes."""
    return isinstance(leaf, Array) and not leaf.is_fully_addressable


def _check(path: tuple, leaf: Any) -> None:
    name = shown(name_of(path)) or "the state"
    if _spans(leaf) and not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(
            f"{name} has a {type(leaf.sharding).__name__}; place it with a NamedSharding, "
            "by out_shardings= of jax.jit"
        )
    try:
        found = np.dtype(leaf.dtype.name)
    except TypeError:
        found = None
    if found != leaf.dtype or leaf.dtype.hasobject:
        raise ValueError(
            f"{name} has dtype {leaf.dtype}, and copies keep numbers alone, in this machine's "
            "order of bytes; convert it by jax.numpy.asarray, or pass it as note="
        )


def _held(sharding: Any, shape: tuple[int, ...]) -> dict[int, dict[Any, Spans]]:
    """{process: {device: the part of a leaf that it holds}}."""
    found: dict[int, dict[Any, Spans]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        part = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        found.setdefault(device.process_index, {})[device] = part
    return found


def _travels(leaf: Any) -> bool:
    """Whether some process does not hold every part of a leaf."""
    if not _spans(leaf):
        return False
    held = [set(parts.values()) for parts in _held(leaf.sharding, leaf.shape).values()]
    return len(held) < jax.process_count() or any(parts != held[0] for parts in held)


def _parts(leaf: Any, process: int) -> dict[Spans, int]:
    """{part of a leaf: which of a process's devices is the first that holds it}."""
    if not _spans(leaf):
        return {tuple((0, n) for n in leaf.shape): 0}
    parts = [*enumerate(_held(leaf.sharding, leaf.shape).get(process, {}).values())]
    return {part: place for place, part in reversed(parts)}


def _size(leaf: Any, part: Spans) -> int:
    """The bytes of a part."""
    return math.prod(stop - start for start, stop in part) * leaf.dtype.itemsize


def _on_host(leaf: Any, place: int) -> np.ndarray:
    """The bytes that a device of this process holds, or all of a leaf of this process."""
    if _spans(leaf):
        held = _held(leaf.sharding, leaf.shape)[jax.process_index()]
        shards = {shard.device: shard.data for shard in leaf.addressable_shards}
        leaf = shards[[*held][place]]
    if isinstance(leaf, Array):  # an array keeps its copy on the host, so another one makes it
        own = [shard.data for shard in leaf.addressable_shards]
        leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, own)
    return _as_bytes(np.asarray(leaf))


def _all_bytes(leaves: Sequence[Any], moving: Mapping[int, Any]) -> Iterator[np.ndarray]:
    """The bytes of `_all_sizes`, of which the host holds few at a time."""
    me, n = jax.process_index(), jax.process_count()
    for leaf in leaves:
        for place in _parts(leaf, me).values():
            yield _on_host(leaf, place)
    for number, arrived in _pass_on(moving):
        own = _parts(moving[number], me)
        for part, place in _parts(moving[number], (me - 1) % n).items():
            if part not in own:
                yield _on_host(arrived, place)


def _all_sizes(leaves: Sequence[Any], moving: Mapping[int, Any]) -> dict[Block, int]:
    """{block: its bytes} of what a copy of this host has."""
    me, n = jax.process_index(), jax.process_count()
    held = [(i, leaf, me) for i, leaf in enumerate(leaves)]
    held += [(i, leaf, (me - 1) % n) for i, leaf in moving.items()]
    return {(i, part): _size(leaf, part) for i, leaf, p in held for part in _parts(leaf, p)}


def _as_bytes(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _pass_on(leaves: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
    """(number, leaf) with the shards of the host before; each host's go to the next one.

    A device holds at most `PIECE` bytes of what arrives at a time, or one leaf, and twice as much
    while they travel.
    """
    groups: list[list[int]] = []
    sizes: list[int] = []
    for number, leaf in leaves.items():
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        alike = groups and leaf.sharding.mesh == leaves[groups[-1][0]].sharding.mesh
        if alike and sizes[-1] + size <= PIECE:
            groups[-1].append(number)
            sizes[-1] += size
        else:
            groups.append([number])
            sizes.append(size)
    for numbers in groups:
        shardings = [leaves[number].sharding for number in numbers]
        program = _program(shardings[0].mesh, tuple(own.spec for own in shardings))
        yield from zip(numbers, program([leaves[number] for number in numbers]), strict=True)


@functools.lru_cache(maxsize=256)  # one for each group of a state's leaves
def _program(mesh: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    """The compiled program of `_pass_on`, with one transfer for all leaves of a dtype."""
    rows: dict[int, list[int]] = {}
    for place, device in enumerate(mesh.devices.flat):
        rows.setdefault(device.process_index, []).append(place)
    sizes = {process: len(places) for process, places in rows.items()}
    n = jax.process_count()
    if sorted(sizes) != list(range(n)) or len({*sizes.values()}) > 1:
        raise ValueError(
            f"devices of the mesh by process: {sizes}, of {n} processes; give a mesh with equally "
            "many devices of each"
        )
    pairs = [pair for p in range(n) for pair in zip(rows[p], rows[(p + 1) % n], strict=True)]

    def onwards(leaves: list[Array]) -> list[Array]:
        moved = list(leaves)
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            numbers = [number for number, leaf in enumerate(leaves) if leaf.dtype == dtype]
            flat = jnp.concatenate([leaves[number].reshape(-1) for number in numbers])
            flat = lax.ppermute(flat, mesh.axis_names, pairs)
            ends = np.cumsum([leaves[number].size for number in numbers]).tolist()
            for number, part in zip(numbers, jnp.split(flat, ends[:-1]), strict=True):
                moved[number] = part.reshape(leaves[number].shape)
        return moved

    options = {"in_specs": (list(specs),), "out_specs": list(specs), "check_vma": False}
    return jax.jit(jax.shard_map(onwards, mesh=mesh, **options))


# --- From host to host ----------------------------------------------------------------------------


def _sizes(header: Any) -> dict[Block, int]:
    """{block: how many bytes it has}."""
    blocks = header["blocks"] if header else []
    return {(leaf, tuple(map(tuple, part))): size for leaf, part, size in blocks}


def _needs(header: Any, state: Any) -> list[list[Spans] | None]:
    """Which parts of each leaf this process places; `None`: all of it."""
    needs: list[list[Spans] | None] = []
    for number, like in enumerate(jax.tree.leaves(state)):
        _, shape, dtype, *_ = header["leaves"][number]
        if _fits(shape, dtype, _impl(header, number), like) and _is_placed(like):
            parts = _held(like.sharding, tuple(shape)).get(jax.process_index(), {})
            needs.append([*dict.fromkeys(parts.values())])
        else:
            needs.append(None)
    return needs


def _parts_of_all(held: Sequence[Mapping[Block, int]]) -> dict[int, set[Spans]]:
    """{number of a leaf: the parts of it that hosts have}."""
    every: dict[int, set[Spans]] = {}
    for number, part in itertools.chain.from_iterable(held):
        every.setdefault(number, set()).add(part)
    return every


def _overlapping(every: Mapping[int, set[Spans]], needs: Sequence[Any]) -> set[Block]:
    """The blocks that have something of the parts of leaves that a process places."""
    found: set[Block] = set()
    for number, regions in enumerate(needs):
        parts = every[number]
        for region in [()] if regions is None else regions:
            whole = tuple(map(tuple, region))  # as it was saved, mostly: blocks do not overlap
            near = {whole} if whole in parts else {part for part in parts if _overlap(part, region)}
            found.update((number, part) for part in near)
    return found


def _overlap(part: Spans, region: Sequence[Sequence[int]]) -> bool:
    """Whether two parts have something in common, as far as the second has dimensions."""
    return all(a < d and c < b for (a, b), (c, d) in zip(part, region, strict=False))


def _restored(
    header: Any, incoming: Incoming, wanted: Iterable[Block], read: Read, state: Tree
) -> Tree:
    """The copy as a tree like ``state``. One leaf at a time is whole on the host."""
    likes, treedef = jax.tree.flatten(state)
    blocks: dict[int, list[Block]] = {}
    for block in sorted(wanted):
        blocks.setdefault(block[0], []).append(block)
    leaves = []
    for number, ((_, shape, dtype, *_), like) in enumerate(
        zip(header["leaves"], likes, strict=True)
    ):
        whole = np.empty(shape, jnp.dtype(dtype))
        for block in blocks.get(number, ()):
            _fill(whole, block, incoming.of(block), read)
        leaves.append(_placed(whole, _impl(header, number), like))
    incoming.finish()
    return jax.tree.unflatten(treedef, leaves)


def _check_names(header: Any, state: Any) -> None:
    """Refuses a copy of other leaves. Version 0.4 joined the words of a name."""
    saved = [name for name, *_ in header["leaves"]]
    now: list[Any] = [list(name_of(path)) for path, _ in jax.tree.leaves_with_path(state)]
    if saved and isinstance(saved[0], str):
        now = ["/".join(name) for name in now]
    if saved != now:
        alone = sorted({*map(_shown, saved)} ^ {*map(_shown, now)})
        raise ValueError(
            f"the copy has {len(saved)} leaves and this state {len(now)}, which differ in "
            f"{', '.join(alone[:4]) or 'their order'}; start all supervisors anew, or remove "
            "the folders of copies on all hosts"
        )


def _shown(name: Any) -> str:
    """A name for messages; version 0.4 joined its words."""
    return name if isinstance(name, str) else shown(name)


def _impl(header: Any, number: int) -> str | None:
    """The implementation of the keys of a leaf; `None` for other leaves."""
    name, *_, last = header["leaves"][number]
    return header["keys"].get(name) if isinstance(name, str) else last


def _fill(whole: np.ndarray, block: Block, pieces: Iterable[Piece], read: Read) -> None:
    """Puts a block of its pieces into its leaf."""
    target = whole[(*(slice(*span) for span in block[1]), ...)]
    own = target if target.flags.c_contiguous else np.empty_like(target, order="C")
    data = own.reshape(-1).view(np.uint8)
    for start, stop, piece in pieces:
        if piece is None:
            read(block, start, data[start:stop])
        else:
            data[start:stop] = piece
    if own is not target:
        target[...] = own


def _placed(array: np.ndarray, impl: str | None, like: Any) -> Any:
    """A leaf where ``like`` is, if it has its shape and dtype; if not, an array of the host."""
    fits = _fits(array.shape, array.dtype, impl, like)
    if impl:
        data = _put(array, like) if fits else jnp.asarray(array)
        return jax.random.wrap_key_data(data, impl=impl)
    return _put(array, like) if fits else array


def _fits(shape: Sequence[int], dtype: Any, impl: str | None, like: Any) -> bool:
    """Whether a leaf that was saved has the shape and dtype of ``like``."""
    if not isinstance(like, Placed):
        return False
    if impl:  # of a leaf of keys
        return like.shape == tuple(shape[:-1])
    return (like.shape, like.dtype) == (tuple(shape), jnp.dtype(dtype))


def _is_placed(like: Placed) -> bool:
    return like.sharding is not None and getattr(like, "committed", True)


def _put(array: np.ndarray, like: Any) -> Any:
    """An array where ``like`` is; on the default device, not bound to it, if nobody placed that."""
    # A program moves what nobody placed to its devices, and refuses what is on others.
    if not _is_placed(like):
        return jnp.asarray(array)
    placed = jax.make_array_from_callback(array.shape, like.sharding, lambda index: array[index])
    return placed.block_until_ready()  # the host's memory is free then
