"""Measures the host memory of `Copies`, in processes with a state of `MIB`.

    python copies_memory_worker.py ADDRESS PROCESSES PROCESS [MIB]

It prints, as JSON, by how many times the state's bytes memory grows at most: while a copy is saved,
restored with all copies, and restored without those of the last process. CPU devices have their
arrays in host memory, too.
"""

import ctypes
import gc
import json
import os
import sys

import jax
import jax.experimental.multihost_utils
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.hosts import copies
from dynamiq_jax.hosts.copies import PIECE, Copies
from dynamiq_jax.hosts.slots import Slots

MIB, LEAVES = int(sys.argv[4]) if len(sys.argv) > 4 else 128, 16
SPECS = P("data"), P(None, "data"), P()  # in one piece of memory, in many, and on every host
SHAPE = 2048, MIB * 2**20 // LEAVES // 4 // 2048


def values(number):
    return np.arange(number, number + SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


def memory(what):
    """A row of the system's table of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{what}:"))


def growth(act):
    """The result of ``act``, and the most that memory grows meanwhile, over the state's bytes."""
    jax.experimental.multihost_utils.sync_global_devices("begin")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the C library gives back what is free
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = memory("VmRSS")
    result = act()
    return result, (memory("VmHWM") - before) / (MIB * 2**20)


def restored(shapes):
    """The growth of a restore."""
    copy, most = growth(lambda: Copies().restore(shapes))
    assert copy and copy.step == 1
    for number, leaf in enumerate(copy.state):
        assert leaf.sharding == shapes[number].sharding
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, values(number)[shard.index])
    return most


def main(address, processes, process):
    jax.distributed.initialize(address, processes, process, shutdown_timeout_seconds=10)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    shardings = [NamedSharding(mesh, SPECS[i % len(SPECS)]) for i in range(LEAVES)]
    shapes = [jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=s) for s in shardings]
    with Slots.made() as slots, Slots.made() as empty:
        os.environ |= slots.environment
        state = [
            jax.make_array_from_callback(SHAPE, s, lambda index, i=i: values(i)[index])
            for i, s in enumerate(shardings)
        ]
        copies.PIECE = 2**22  # what travels at a time
        Copies().save(0, state)  # compiles
        found = [growth(lambda: Copies().save(1, state))[1]]
        copies.PIECE = PIECE
        state.clear()
        found.append(restored(shapes))
        os.environ |= (empty if process == processes - 1 else slots).environment
        found.append(restored(shapes))
        print(json.dumps(found))
        jax.experimental.multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
