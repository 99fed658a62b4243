"""Memory in which a process keeps copies: it outlives the process.

There are two slots. A new copy goes into the slot without the copy that counts. So a process that
is killed while it writes leaves the copy before. A supervisor's memory has no name: it is gone with
the supervisor, however that ends. Under other engines the slots are files of a folder in memory.
"""

import contextlib
import errno
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VARIABLE = "DYNAMIQ_JAX_COPIES"
"""The environment variable with a folder, or the file descriptors of both slots, by a comma."""

NAME = "dynamiq_jax_"
"""How the system lists the memory, before the number of the slot."""
LENGTH = 8
"""Bytes of the number at the beginning of a slot: how long the header is; 0 without a copy."""


class Kept(NamedTuple):
    """A whole copy in a slot."""

    slot: int
    """0 or 1."""
    header: dict[str, Any]
    """The header that was written with the copy."""
    start: int
    """Where its bytes begin in the slot."""


class Slots:
    """Two slots of memory.

    Args:
      files: a file descriptor for each.
    """

    def __init__(self, files: tuple[int, int]) -> None:
        self.files = files
        self._next = 0

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator["Slots | None"]:
        """Empty slots for a block; `None` where the system has no memory without a name."""
        if not hasattr(os, "memfd_create"):  # Linux alone has it
            yield None
            return
        files = os.memfd_create(f"{NAME}0"), os.memfd_create(f"{NAME}1")
        try:
            yield cls(files)
        finally:
            for file in files:
                os.close(file)

    @classmethod
    @functools.cache  # all of a process have the same pair of files
    def of_folder(cls, folder: Path) -> "Slots":
        """Slots that are files of a folder, the first pair that no other process has.

        Raises:
          ValueError: the files belong to another user.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = next(filter(None, (_pair(folder, number) for number in itertools.count())))
        if (owner := os.fstat(files[0]).st_uid) != os.geteuid():
            raise ValueError(
                f"the files in {folder} belong to user {owner}, and this process to "
                f"{os.geteuid()}; give a folder of your own in {VARIABLE}"
            )
        return cls(files)

    @classmethod
    def inherited(cls) -> "Slots | None":
        """The slots that the variable names: a supervisor's, or a folder's; `None` without it.

        Raises:
          ValueError: the variable names file descriptors that this process does not have, or a
            folder by no absolute path.
        """
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        if text.startswith("/"):
            return cls.of_folder(Path(text))
        if not text.replace(",", "").isdecimal():
            raise ValueError(f"{VARIABLE}={text}: give the absolute path of a folder")
        files = tuple(map(int, text.split(",")))
        for slot, file in enumerate(files):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{NAME}{slot}"):
                    continue
            raise ValueError(
                f"{VARIABLE}={text}: file descriptor {file} is not a supervisor's memory; start "
                "this process with the file descriptors that dynamiq-jax run gives its command, or "
                f"without {VARIABLE}"
            )
        return cls((files[0], files[1]))

    @property
    def environment(self) -> dict[str, str]:
        """The variable for a process that inherits the file descriptors."""
        return {VARIABLE: ",".join(map(str, self.files))}

    def write(self, header: dict[str, Any], parts: Iterable[np.ndarray]) -> None:
        """Writes a copy over the one that no longer counts.

        Args:
          header: what `Kept.header` shall be, of JSON's types.
          parts: uint8[n] each; their bytes follow each other.
        """
        text = json.dumps(header).encode()  # raises, if it does, ahead of any change
        file = self.files[self._next]
        os.pwrite(file, bytes(LENGTH), 0)  # from here on the slot has no copy
        try:
            end = _write(file, text, LENGTH)
            for part in parts:
                end = _write(file, part.data, end)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _full(file) from error
            raise
        if os.fstat(file).st_size > end:
            os.ftruncate(file, end)
        os.pwrite(file, len(text).to_bytes(LENGTH, "little"), 0)  # and now it has one
        self._next = 1 - self._next

    def kept(self) -> list[Kept]:
        """All whole copies, in the order of slots."""
        found = []
        for slot, file in enumerate(self.files):
            length = int.from_bytes(os.pread(file, LENGTH, 0), "little")
            if length:
                header = json.loads(os.pread(file, length, LENGTH))
                found.append(Kept(slot, header, LENGTH + length))
        return found

    def read(self, kept: Kept, start: int, into: np.ndarray) -> None:
        """Reads the bytes of a copy from ``start`` on, as many as ``into``, uint8[n], takes.

        They are no view of the slot: a file that is mapped loses its lock when the map ends.
        """
        done, place, size = 0, kept.start + start, into.size
        while done < size:  # the system gives 2 GiB at a time
            count = os.preadv(self.files[kept.slot], [into[done:].data], place + done)
            if not count:
                raise OSError(f"a slot ends {size - done} bytes ahead of its copy's end")
            done += count

    def keep(self, kept: Kept) -> None:
        """Makes a copy the one that counts: the next copy does not go over it."""
        self._next = 1 - kept.slot


def _write(file: int, data: Any, offset: int) -> int:
    """Writes all of ``data``, of which the system takes 2 GiB at a time; returns the end."""
    left = memoryview(data)
    while len(left):
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
    return offset


def _pair(folder: Path, number: int) -> tuple[int, int] | None:
    """The file descriptors of a folder's pair of slots; `None` if another process has it."""
    import fcntl  # Windows has none

    names = folder / f"{NAME}{number}_0", folder / f"{NAME}{number}_1"
    first, second = (os.open(n, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600) for n in names)
    try:
        fcntl.lockf(first, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends
    except BlockingIOError:
        os.close(first)
        os.close(second)
        return None
    return first, second


def _full(file: int) -> OSError:
    """The error of a folder without room."""
    path = Path(os.readlink(f"/proc/self/fd/{file}"))
    total, _, free = shutil.disk_usage(path.parent)
    held = os.fstat(file).st_size
    os.ftruncate(file, 0)
    return OSError(
        errno.ENOSPC,
        f"{path.parent} has {total} bytes, of which {free} are free, and a copy takes more than "
        f"{held}; give the folder twice a copy's bytes, or unset {VARIABLE}",
    )
