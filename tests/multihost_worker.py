"""Runs one process of `test_multihost` or `test_hosts`.

    python multihost_worker.py MODE FOLDER [HEARTBEAT_TIMEOUT]

It prints a line whenever something is done, and leaves its results in the folder.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from cases import LOOP, over, small
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from workers import plan_is_exact

import dynamiq_jax as dq

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples", "benchmarks")]

import llm_data
import train_llm
import train_multihost
import ways
from small_llm import CONFIG
from train_multihost import AXES, Run

HEARTBEAT_TIMEOUT = 10
BRIEF = "COLLECTIVES_ALONE"
"""The environment variable with which `library` does not train."""
VICTIM = 1
"""The process that dies when one has to."""

# --- Collectives ----------------------------------------------------------------------------------

NODE = AXES[0]
SIZE = 2 * 8 * 8 * 256
METHOD = small(dq.DynamiQ(widths=(4,)))  # one width compiles in half the time of three


def on(collective, axis_name, topology=None, size=SIZE):
    compression = over(topology, METHOD)
    return lambda x, key: collective(x[:size], axis_name, key=key, compression=compression)


psum = partial(on, dq.psum, size=SIZE - 100)
scatter, gather = (partial(f, tiled=True) for f in (dq.psum_scatter, dq.all_gather))
COLLECTIVES = {
    4: {"psum, two axes, ring": psum(AXES, LOOP),
        "psum, two axes, butterfly": psum(AXES, dq.Butterfly()),
        "psum, two axes, direct": psum(AXES, dq.Direct()),
        "psum, hierarchical": psum(AXES, dq.Hierarchical()), "psum, nodes, ring": psum(NODE, LOOP),
        "psum_scatter, nodes, direct": on(scatter, NODE, dq.Direct()),
        "all_gather, two axes": on(gather, AXES)},
    2: {"psum, two axes, direct": psum(AXES, dq.Direct()),
        "psum_scatter, two axes, ring": on(scatter, AXES, LOOP),
        "all_gather, nodes": on(gather, NODE)},
}  # fmt: skip
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

STEPS, CHECKPOINT_EVERY, DIES_BEFORE_STEP = 10, 3, 7
STEPS_ON_HOSTS = 16
RECIPE = train_llm.Recipe(steps=STEPS, batch_size=2, learning_rate=5e-3, validation_batches=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        method=small(Remembering(widths=(3, 6)), topology=dq.Hierarchical(outer=LOOP)),
    )  # fmt: skip


def corpus():
    """Tokens that are 0, 1 or 2 above their predecessors."""
    tokens = np.cumsum(np.random.default_rng(0).integers(0, 3, 20_000)) % CONFIG.vocab_size
    return llm_data.Corpus(tokens.astype(np.int32), tokens[:0], CONFIG.vocab_size)


def hashes(tree):
    """One hash for each copy of a replicated tree on this process's devices."""
    digests = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            digest = digests.setdefault(shard.device.id, hashlib.sha256())
            digest.update(np.asarray(shard.data).tobytes())
    return [digest.hexdigest() for digest in digests.values()]


# --- Ways of training -----------------------------------------------------------------------------

WAYS = {"psum:5": None, "auto:5": dq.Direct(), "zero:5/2.5": dq.Direct(), "fsdp-layers:5/8": LOOP}
"""Names of `benchmarks/ways.py`, and topologies; `None` is what several processes take."""


class OneWidth(ways.Training):
    """All that travels has `METHOD`."""

    def request(self, text, dither=False):
        return dataclasses.replace(METHOD, topology=self.topology)


def two_matrices(checkpoint):
    """A model of two functions."""
    functions = lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.mean(jnp.square(x @ w - 1))
    shapes = (jax.ShapeDtypeStruct((192, 192), jnp.float32),) * 2
    return ways.Model(functions, shapes, lambda params: params)


def steps_by(name, mesh):
    """The state and the loss after each step of a way, for ever."""
    alone = dq.Hierarchical(outer=dq.Butterfly()) if jax.process_count() == 1 else None
    training = {"make_model": two_matrices, "optimizer": optax.adam(1e-2), "mesh": mesh}
    way = ways.make_way(name, OneWidth(topology=WAYS[name] or alone, **training))
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(w.shape, np.float32) / 14 for w in way.model.shapes]
    x = rng.standard_normal((2 * mesh.size, 192), np.float32)
    state, x = way.init(tuple(params)), jax.device_put(x, NamedSharding(mesh, P(AXES)))
    step = jax.jit(way.step)
    while True:
        state, loss = jax.block_until_ready(step(state, x))
        yield way.read(state)[0], loss


def trained(mesh):
    """{"way/leaf/worker": result} of two steps by all `WAYS`, as this process has them."""
    rows, workers = {}, {device: worker for worker, device in enumerate(mesh.devices.flat)}
    for way in WAYS:
        (_, ((first, last), loss)) = itertools.islice(steps_by(way, mesh), 2)
        for name, leaf in {"first": first, "last": last, "loss": loss}.items():
            for shard in leaf.addressable_shards:
                rows[f"{way}/{name}/{workers[shard.device]}"] = np.asarray(shard.data)
        say(way)
    return rows


def this_host():
    """Coordinator, number of hosts and number of this one, as `benchmarks/hosts.py` tells them."""
    return os.environ["COORDINATOR"], int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"])


def steps_on_hosts(folder, heartbeat_timeout):
    """On hosts: steps for ever."""
    train_multihost.join(*this_host(), int(heartbeat_timeout))
    endless(train_multihost.make_mesh())


def training_on_hosts(folder):
    """The example on hosts, as `command_line` runs it, but without memory and longer."""
    method = small(METHOD.method, topology=dq.Hierarchical(outer=LOOP))
    if os.environ.get("METHOD") == "exact":
        method = dq.Compression(dq.F32())
    fault = os.environ.get("FAULT")
    if fault == "processes disagree" and this_host()[-1] == VICTIM:
        method = small(METHOD.method, topology=dq.Hierarchical(outer=dq.Direct()))
    fields = {"model": CONFIG, "recipe": RECIPE._replace(steps=STEPS_ON_HOSTS), "seed": 0}

    def make_run(mesh):
        return Run(mesh=mesh, method=method, **fields)

    begun = []

    def before(step):
        begun.append(step)
        if fault == "told to end" and begun == [step] != [0]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)  # all hosts have heard of it before the step is over
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.2")))  # a test watches
        if fault == "a process raises" and step == 4 and this_host()[-1] == VICTIM:
            raise ZeroDivisionError("division by zero")

    example(folder, make_run, before)


def endless(mesh):
    """Steps until one fails."""
    for count, _ in enumerate(steps_by("psum:5", mesh), start=1):
        say(f"step {count}")


# --- Modes ----------------------------------------------------------------------------------------


def say(line):
    print(line, flush=True)


def library(mesh, folder, n_nodes):
    """Collectives, ways, the example: `COLLECTIVES`, `WAYS`, `make_run` for so many nodes."""
    rows = {}
    for name, collective in COLLECTIVES[n_nodes].items():
        for worker, row in held_rows(reduced(mesh, collective)).items():
            rows[f"{name}/{worker}"] = row
        say(name)
    rows |= trained(mesh) if n_nodes == 4 else {}
    np.savez(folder / f"{jax.process_index()}.npz", **rows)
    if os.environ.get(BRIEF):
        return
    outcome = train_multihost.train(make_run(mesh), corpus(), log=say)
    record = {"mesh": dict(mesh.shape), "losses": outcome.losses}
    record["hashes"] = hashes(outcome.state.params)
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(record))


def alone(folder):
    """In this process alone, with a mesh as several would have it: what to compare with."""
    n_nodes = jax.device_count() // 2
    devices = np.array(jax.devices()).reshape(n_nodes, 2)
    library(Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2), folder, n_nodes)


def together(folder):
    """In several processes; at the end one of four dies while the others wait for it."""
    coordinator, num_processes, process_id = this_host()
    train_multihost.join(coordinator, num_processes, process_id, HEARTBEAT_TIMEOUT)
    library(train_multihost.make_mesh(), folder, num_processes)
    if num_processes == 4:
        if process_id == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        multihost_utils.sync_global_devices("in vain")


def example(folder, make_run, before):
    """The example as its users run it, but for a smaller run; ``before(step)`` comes first."""
    windows = train_multihost.windows

    def windows_of(corpus, step, *args):
        before(step)
        say(f"step {step}")
        return windows(corpus, step, *args)

    coordinator, num_processes, process_id = this_host()
    train_multihost.windows = windows_of
    train_multihost.Run = lambda **fields: make_run(fields["mesh"])
    train_multihost.load_corpus = lambda vocab_size: corpus()
    try:
        train_multihost.main(
            coordinator=coordinator, num_processes=num_processes, process_id=process_id,
            heartbeat_timeout=HEARTBEAT_TIMEOUT, checkpoint_dir=folder / "checkpoints",
            checkpoint_every=CHECKPOINT_EVERY, out=folder / "out",
        )  # fmt: skip
    except typer.Exit as ended:  # as a command line ends
        sys.exit(ended.exit_code)


def command_line(folder, *, dies):
    """The example; one process may die in its midst."""

    def or_death(step):
        if dies and step == DIES_BEFORE_STEP and this_host()[-1] == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

    example(folder, make_run, or_death)


MODES = {
    "alone": alone, "together": together, "command_line": partial(command_line, dies=False),
    "command_line_dies": partial(command_line, dies=True), "steps_on_hosts": steps_on_hosts,
    "training_on_hosts": training_on_hosts,
}  # fmt: skip

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # JAX ends by abort
    mode, folder, *more = sys.argv[1:]
    MODES[mode](Path(folder), *more)
