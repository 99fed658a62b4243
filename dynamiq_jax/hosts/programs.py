"""Compiled programs that outlive a process: the next one neither traces, lowers nor compiles.

JAX's compilation cache spares a restart the compiler alone, and its key takes the traced and
lowered program. Files of this module are found without: by shapes, versions and a key of the
caller's, and they count only while all source files are as they were.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from dynamiq_jax.core.warned import warn
from dynamiq_jax.hosts.told import rows_of_all

READ = "XLA_", "LIBTPU_", "NCCL_", "CUDA_"
"""How variables begin that compilers and topologies read."""
CACHES = "jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"
"""JAX's settings of caches: its folder, and which caches of XLA's have folders in it."""
Source = tuple[int, int]
"""A source file as Python's own caches tell it from others: time of its change, and its bytes."""


def load_or_compile(step: Any, *args: Any, key: object) -> Callable[..., Any]:
    """Returns the compiled ``step``, loaded if an earlier process of this host has compiled it.

    All processes of a run call it alike, as they call a collective::

        step = load_or_compile(step, state, batch, key=(config, learning_rate))
        state, loss = step(state, batch)

    A loaded step is read while the process does other things, and its first call waits: call this
    before the state is restored, with shapes in the place of arrays.

    Programs are kept in the folder ``jax_compilation_cache_dir``, which `dynamiq-jax run` sets. It
    must be as trustworthy as the script, since what is loaded from it runs. They are loaded if
    every process has one that was compiled for the same ``args``, ``key``, devices, versions and
    configuration of JAX, and no source file of an imported module has changed since. Without the
    folder ``step`` comes back as it is.

    Args:
      step: a function that `jax.jit` or `dynamiq_jax.jit` returns.
      args: its arguments; arrays, or `jax.ShapeDtypeStruct`s with shardings.
      key: everything else that the program depends on, such as sizes and rates that ``step`` closes
        over: its ``repr`` must tell two programs apart. A value that is left out, and differs in
        the next process, is that of the first one in the loaded program.

    Returns:
      A function of the same arguments.

    Raises:
      ValueError: the ``repr`` of ``key`` has the address of an object, which changes.
    """
    if re.search(" at 0x[0-9a-f]+", repr(key)):
        raise ValueError(f"key={key!r}: an address differs in the next process; give plain values")
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder:  # files of a cloud's store are JAX's own matter
        return step
    lower = step.lower  # `dynamiq_jax.jit` sets variables of NCCL here, loaded or not
    common = _digest(_facts_of_all(step, args, key))
    own = _digest([common, *_own_facts()]).hex()
    file = Path(folder) / f"dynamiq_jax-{own}-{jax.process_index()}.program"
    found = _kept(file)
    # It begins before processes meet for the first time, which takes a part of a second.
    compiled = functools.partial(_compiled, step, lower, file)
    loaded = _Loaded(found, file, jax.tree.map(_shaped, args), compiled) if found else None
    told = np.append(np.frombuffer(common, np.uint32), np.uint32(loaded is not None))
    everywhere = rows_of_all(told)
    if (everywhere[:, :-1] != told[:-1]).any():
        warn("load_or_compile: processes differ in key, arguments or devices, so that every start "
             "compiles the step: give all of them the same")  # fmt: skip
    # Tracing may ask all processes, so none of them loads what another one traces.
    if loaded is not None and (everywhere == told).all():
        return loaded
    return compiled(args)


class _Loaded(Compiled):
    """A program that a thread loads; whatever is asked of it waits.

    Args:
      found: what `_kept` has returned.
      file: where that was.
      args: the arguments for which it was compiled, without arrays: nobody may call it for long.
      compiled: compiles the step for them, if the program cannot be loaded in some process.
    """

    def __init__(
        self, found: Any, file: Path, args: Any, compiled: Callable[[Any], Callable[..., Any]]
    ) -> None:
        threads = concurrent.futures.ThreadPoolExecutor(1)
        self._loading = threads.submit(_load, found, args)
        threads.shutdown(wait=False)
        self._file, self._args, self._compiled = file, args, compiled
        self._first = threading.RLock()  # of several threads' first calls one asks all processes
        self._program: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._agreed()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Reads from the program what `Compiled` has. JAX asks all that it gets for other names."""
        if name.startswith("__") or "_program" not in vars(self):  # as in a copy, at first
            raise AttributeError(name)
        # One process alone may ask for it, so that it does not wait for others if it need not.
        loaded = self._program is None and self._loading.exception() is None
        return getattr(self._loading.result() if loaded else self._agreed(), name)

    def _agreed(self) -> Callable[..., Any]:
        """The program, which all processes have loaded, or which all have compiled."""
        with self._first:
            if self._program is None:
                if error := self._loading.exception():
                    _tell(self._file, error, "the step is compiled instead")
                everywhere = rows_of_all(np.array(error is None)).all()
                self._program = self._loading.result() if everywhere else self._compiled(self._args)
        return self._program


def _shaped(leaf: Any) -> Any:
    """An array's shape, dtype and place, without its memory."""
    if not isinstance(leaf, jax.Array):
        return leaf
    where = leaf.sharding if leaf.committed else None
    weak = getattr(leaf, "weak_type", False)  # keys have none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where, weak_type=weak)


def _compiled(step: Any, lower: Any, file: Path, args: Any) -> Callable[..., Any]:
    """The step, compiled for all processes and kept."""
    with _empty_cache():
        step.clear_cache()
        compiled = lower(*args).compile()
    _keep(file, compiled)
    return compiled


def _tell(file: Path, error: BaseException, then: str) -> None:
    warn(f"{file}: {type(error).__name__}: {error}; {then}")


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Lets JAX's cache of programs be an empty folder.

    On CPU what came from the cache serializes without its functions. Without any cache processes
    would not share programs (``jax_share_binary_between_hosts``): GPUs then tune kernels apart,
    and wait for each other if the order of their collectives differs. XLA's own caches stay out:
    JAX 0.10 names programs by their folder, too, and processes with other names never share.
    """
    before = {name: jax.config.values[name] for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="dynamiq_jax-") as folder:
        try:
            _use_caches(dict(zip(CACHES, (folder, ""), strict=True)))
            yield
        finally:
            _use_caches(before)


def _use_caches(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the settings once


def _facts_of_all(step: Any, args: Any, key: object) -> list[Any]:
    """Facts on which programs depend, and which all processes have alike."""
    leaves, tree = jax.tree.flatten(args)
    device = jax.devices()[0]
    return [
        jax.__version__, jaxlib.version.__version__, device.client.platform_version,
        [(d.id, d.device_kind, d.process_index) for d in jax.devices()],
        getattr(step, "__qualname__", type(step).__qualname__), tree, key,
        jax.sharding.get_abstract_mesh(),
        [(np.shape(leaf), leaf.dtype, getattr(leaf, "weak_type", False), _where(leaf))
         for leaf in leaves],
    ]  # fmt: skip


def _own_facts() -> list[Any]:
    """Facts on which programs depend, and which processes may have each for itself.

    ``NCCL_HOSTID`` names a host, and ``CUDA_VISIBLE_DEVICES`` the GPU of a process, which
    ``jax.distributed.initialize`` writes into JAX's configuration.
    """
    return [
        sorted(pair for pair in os.environ.items() if pair[0].startswith(READ)),
        # Each host may have a cache of its own.
        sorted((k, repr(v)) for k, v in jax.config.values.items() if "cache" not in k),
    ]


def _digest(facts: list[Any]) -> bytes:
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).digest()[:16]


def _where(leaf: Any) -> Any:
    """Where a leaf lies, with the order of devices, which a mesh does not show."""
    sharding = getattr(leaf, "sharding", None)
    return sharding, [device.id for device in _devices(sharding)]


def _devices(sharding: Any) -> list[Any]:
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return [*mesh.devices.flat] if isinstance(mesh, Mesh) else []


def _sources() -> dict[str, Source]:
    """The files of all modules that this process has imported."""
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    found = {}
    for file in filter(None, files):
        with contextlib.suppress(OSError):  # of a zip file, or of no file
            found[os.path.abspath(file)] = _source(file)
    return found


def _source(file: str) -> Source:
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_size


def _kept(file: Path) -> Any:
    """The serialized program of a file, with its trees; `None` if there is none that counts."""
    try:
        with file.open("rb") as opened:
            sources = pickle.load(opened)
            if any(_source(name) != source for name, source in sources.items()):
                return None
            return pickle.load(opened)
    except OSError:  # no such program, or no such module any more
        return None
    except Exception as error:  # whatever is wrong with it, the step can be compiled
        _tell(file, error, "the step is compiled instead")
        return None


def _load(found: Any, args: Any) -> Callable[..., Any]:
    """The program that was serialized, on the devices of the arguments."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    devices = next(filter(None, map(_devices, shardings)), None)
    return serialize_executable.deserialize_and_load(*found, execution_devices=devices)


def _keep(file: Path, compiled: Any) -> None:
    """Writes a program, for which a process that is killed leaves no half file."""
    try:
        program = serialize_executable.serialize(compiled)
        data = pickle.dumps(_sources()) + pickle.dumps(program)
        file.parent.mkdir(parents=True, exist_ok=True)
        half = file.with_suffix(f".{os.getpid()}")
        half.write_bytes(data)
        half.replace(file)
    except Exception as error:  # JAX's backends refuse in ways of their own
        _tell(file, error, "the next start compiles the step again")
