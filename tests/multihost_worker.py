"""Runs one process of `test_multihost`.

    python multihost_worker.py MODE FOLDER [COORDINATOR NUM_PROCESSES PROCESS_ID]

It prints a line whenever something is done, and leaves its results in the folder.
"""

import hashlib
import json
import os
import resource
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from cases import LOOP, small
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_ring import plan_is_exact

import dynamiq_jax as dq
from dynamiq_jax.request.compression import as_compression

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import llm_data
import llm_model
import train_llm
import train_multihost
from train_multihost import AXES, Run

HEARTBEAT_TIMEOUT = 10
VICTIM = 1
"""The process that dies when one has to."""

# --- Collectives ----------------------------------------------------------------------------------

NODE, GPU = AXES
SIZE = 2 * 8 * 8 * 256
METHOD = small(dq.DynamiQ(widths=(4,)))  # one width compiles in half the time of three


def on(collective, axis_name, topology=None, size=SIZE):
    options = {"method": METHOD} | ({} if topology is None else {"topology": topology})
    return lambda x, key: collective(x[:size], axis_name, key=key, **options)


psum = partial(on, dq.psum, size=SIZE - 100)
scatter, gather = (partial(f, tiled=True) for f in (dq.psum_scatter, dq.all_gather))
COLLECTIVES = {
    4: {
        "psum, two axes, ring": psum(AXES, LOOP),
        "psum, two axes, butterfly": psum(AXES, dq.Butterfly()),
        "psum, two axes, direct": psum(AXES, dq.Direct()),
        "psum, hierarchical": psum(AXES, dq.Hierarchical()),
        "psum, nodes, ring": psum(NODE, LOOP),
        "psum_scatter, nodes, direct": on(scatter, NODE, dq.Direct()),
        "all_gather, two axes": on(gather, AXES),
    },
    2: {
        "psum, two axes, direct": psum(AXES, dq.Direct()),
        "psum, nodes, butterfly": psum(NODE, dq.Butterfly()),
        "psum, gpus, ring": psum(GPU, LOOP),
        "psum_scatter, two axes, ring": on(scatter, AXES, LOOP),
        "all_gather, nodes": on(gather, NODE),
    },
}
"""Functions that groups of processes run: {number of processes: {name: function of (x, key)}}."""


def reduced(mesh, collective):
    """f32[n_workers, ...]: what every worker gets, of distinct inputs.

    The inputs' statistics are exact in bf16, and so are sums of them in any order: gloo adds in
    another order than the threads of one process do, and here the plan must not depend on that.
    """

    def one(x, key):
        return collective(x[0], key)[None]

    specs = {"in_specs": (P(AXES), P()), "out_specs": P(AXES), "check_vma": False}
    x = np.asarray(plan_is_exact(mesh.size, SIZE))
    x = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(AXES)), lambda index: x[index])
    return jax.jit(jax.shard_map(one, mesh=mesh, **specs))(x, jax.random.key(3))


def held_rows(array):
    """{worker: row} of the workers whose devices belong to this process."""
    return {s.index[0].start or 0: np.asarray(s.data)[0] for s in array.addressable_shards}


# --- Training -------------------------------------------------------------------------------------

CONFIG = replace(
    llm_model.CONFIGS["tiny"],
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden=128, seq_len=16,
)  # fmt: skip
STEPS, CHECKPOINT_EVERY, DIES_BEFORE_STEP = 10, 3, 7
RECIPE = train_llm.Recipe(steps=STEPS, batch_size=2, learning_rate=5e-3, validation_batches=1)


@dataclass(frozen=True, kw_only=True)
class Remembering(dq.DynamiQ):
    """DynamiQ of a moving sum: a method that goes wrong when its memory is lost or mixed up."""

    def init(self, size, n_workers):
        return jnp.zeros(size)

    def all_reduce(self, x, call):
        state = x + call.state / 2
        outcome = dq.DynamiQ.all_reduce(self, state, call._replace(state=()))
        return outcome._replace(state=state)


def make_run(mesh):
    """The run of all modes; its gradients' widths follow from statistics.

    Small leaves are compressed, too: their `jax.lax.psum` in f32 depends on the order in which
    workers are added, which is another one in one process than in several. The statistics' psum,
    of bf16 numbers added up in f32, does not on gradients like these.
    """
    return Run(
        model=CONFIG, recipe=RECIPE, mesh=mesh, seed=0,
        method=small(Remembering(), topology=dq.Hierarchical(outer=LOOP)),
    )  # fmt: skip


def corpus():
    """Tokens that are 0, 1 or 2 above their predecessors."""
    tokens = np.cumsum(np.random.default_rng(0).integers(0, 3, 20_000)) % CONFIG.vocab_size
    return llm_data.Corpus(tokens.astype(np.int32), tokens[:0], CONFIG.vocab_size, 1)


def hashes(tree):
    """One hash for each copy of a replicated tree on this process's devices."""
    digests = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            digest = digests.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return [digest.hexdigest() for digest in digests.values()]


def disagreements(mesh):
    """{what: a check of agreement}, in which the last process differs from others."""
    odd = jax.process_index() == jax.process_count() - 1
    tree = {"w": jnp.ones((300, 400)), "b": jnp.ones(7, jnp.bfloat16)}

    def told(tree=tree, axis_name=AXES, method=None, topology=None, **options):
        request = as_compression(method, topology)
        return partial(request.check_agreement, tree, mesh, axis_name, **options)

    return {
        "nothing": told(key=jax.random.key(1), method=METHOD, topology=dq.Hierarchical()),
        "method": told(method=dq.DynamiQ(bits=4.5) if odd else dq.DynamiQ()),
        "kind of method": told(method=dq.comparators.MXFP8() if odd else dq.DynamiQ()),
        "topology": told(topology=dq.Ring() if odd else dq.Direct()),
        "key": told(key=jax.random.key(2 if odd else 1)),
        "presence of a key": told(key=jax.random.key(1) if odd else None),
        "shape": told(tree | {"w": jnp.ones((400, 300))} if odd else tree),
        "dtype": told(tree | {"b": jnp.ones(7)} if odd else tree),
        "structure": told(tree | {"c": jnp.ones(3)} if odd else tree),
        "a refusal": told(axis_name="chip" if odd else AXES),
    }


def complaints(mesh):
    """{what: what the check says to this process, "" if nothing}."""
    found = {}
    for what, check in disagreements(mesh).items():
        found[what] = ""
        try:
            check()
        except (RuntimeError, ValueError) as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


# --- Modes ----------------------------------------------------------------------------------------


def say(line):
    print(line, flush=True)


def library(mesh, folder, n_nodes):
    """Collectives, then training, as `COLLECTIVES` and `make_run` have it for so many nodes."""
    rows = {}
    for name, collective in COLLECTIVES[n_nodes].items():
        for worker, row in held_rows(reduced(mesh, collective)).items():
            rows[f"{name}/{worker}"] = row
        say(name)
    np.savez(folder / f"{jax.process_index()}.npz", **rows)
    outcome = train_multihost.train(make_run(mesh), corpus(), log=say)
    record = {
        "mesh": dict(mesh.shape),
        "losses": outcome.losses,
        "hashes": hashes(outcome.state.params),
        "complaints": complaints(mesh),
    }
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(record))


def alone(folder):
    """In this process alone, with a mesh as several would have it: what to compare with."""
    n_nodes = jax.device_count() // 2
    devices = np.array(jax.devices()).reshape(n_nodes, 2)
    library(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2), folder, n_nodes)


def together(folder, coordinator, num_processes, process_id):
    """In several processes; at the end one of four dies while the others wait for it."""
    train_multihost.join(coordinator, num_processes, process_id, HEARTBEAT_TIMEOUT)
    library(train_multihost.make_mesh(), folder, num_processes)
    if num_processes == 4:
        if process_id == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        multihost_utils.sync_global_devices("in vain")


def command_line(folder, coordinator, num_processes, process_id, *, dies):
    """The example as its users run it, but for a smaller run; one process may die in its midst."""
    windows = train_multihost.windows

    def windows_or_death(corpus, step, *args):
        if dies and step == DIES_BEFORE_STEP and process_id == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        say(f"step {step}")
        return windows(corpus, step, *args)

    train_multihost.windows = windows_or_death
    train_multihost.Run = lambda **fields: make_run(fields["mesh"])
    train_multihost.load_corpus = lambda vocab_size: corpus()
    train_multihost.main(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id,
        heartbeat_timeout=HEARTBEAT_TIMEOUT, checkpoint_dir=folder / "checkpoints",
        checkpoint_every=CHECKPOINT_EVERY, out=folder / "out",
    )  # fmt: skip


MODES = {
    "alone": alone,
    "together": together,
    "command_line": partial(command_line, dies=False),
    "command_line_dies": partial(command_line, dies=True),
}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # JAX ends by abort
    mode, folder, *group = sys.argv[1:]
    who = [group[0], int(group[1]), int(group[2])] if group else []
    MODES[mode](Path(folder), *who)
