"""The examples of FSDP and ZeRO-1: trainings as with whole parameters, and what is where."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import llm_model
import numpy as np
import pytest
import train_fsdp
import train_llm
import train_zero
from asserts import assert_replicas_equal, assert_same_bits
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_llm import CONFIG, sequences
from workers import auto_mesh, put

import dynamiq_jax as dq
from dynamiq_jax.core.compat import inner_jaxprs, with_constants
from dynamiq_jax.methods.metrics import vnmse

N, STEPS = 8, 12
pytestmark = pytest.mark.usefixtures("dtypes_promoted")
CONFIG = replace(CONFIG, remat=True)
RECIPE = train_llm.Recipe(steps=STEPS, batch_size=2, learning_rate=5e-3, validation_batches=1)
BLOCK, ENDS = 4 * 64**2 + 3 * 64 * 128, 2 * 64**2
LARGE = {"min_leaf_size": 1, "min_bucket_size": BLOCK}  # spares compiling for embedding and head
METHODS = {
    "exact": {"compression": dq.Policy(gradients=dq.Compression(exclude=""), parameters=dq.F32())},
    "compressed": {
        "compression": dq.Compression(dq.DynamiQ(bits=5), topology=dq.Direct(), **LARGE)
    },
}


def sharded(name):
    """``init`` and ``step``."""
    run = SimpleNamespace(model=CONFIG, recipe=RECIPE, mesh=auto_mesh(N))
    return train_fsdp.make_sharded(run, **METHODS[name])


def trained(step, params, opt_state):
    """A few sequences again and again, so that a dozen steps have something to learn."""
    tokens, losses = put(sequences(), auto_mesh(N), P("data")), []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))
    return params, opt_state, losses


def difference(tree, expected):
    """vNMSE, on the host: eager arithmetic on shards keeps several collectives in flight at once,
    for which the CPU's threads may not suffice."""
    return vnmse(jax.device_get(tree), jax.device_get(expected))


def whole_run():
    """Every worker holds all, and gradients are averaged by lax.pmean in f32."""
    replicated = NamedSharding(auto_mesh(N), P())
    init = partial(llm_model.init_params, CONFIG)
    params = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
    optimizer = train_llm.make_optimizer(RECIPE)
    opt_state = jax.jit(optimizer.init)(params)
    method = train_llm.lax_psum(llm_model.make_loss(CONFIG), params, auto_mesh(N), "f32")
    return trained(train_llm.make_step(method, optimizer), params, opt_state)


@pytest.mark.release
def test_it_trains_as_whole_parameters_do_and_every_worker_holds_an_eighth():
    """Exact collectives give the same parameters and moments, and compressed ones are close."""
    whole, (exact, compressed) = (
        whole_run(),
        (trained(step, *init(jax.random.key(0))) for init, step in map(sharded, METHODS)),
    )
    assert exact[2][-1] < exact[2][0] - 0.5
    np.testing.assert_allclose(exact[2], whole[2], rtol=1e-5)
    for tree, expected in zip(exact[:2], whole[:2], strict=True):
        assert jax.tree.structure(tree) == jax.tree.structure(expected)
        assert difference(tree, expected) < 1e-9
    for leaf in jax.tree.leaves(exact[:2]):
        held = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(held) == N
        if leaf.ndim > 1:
            assert {h.size for h in held} == {leaf.size // N}
            assert_same_bits(np.concatenate(held), np.asarray(leaf))
        else:
            assert_replicas_equal(np.stack(held))
    assert difference(compressed[0], exact[0]) > 1e-7  # compression took place
    np.testing.assert_allclose(compressed[2], exact[2], rtol=0.01)


def test_layers_travel_at_the_bits_asked_for():
    init, step = sharded("compressed")
    tokens = jax.ShapeDtypeStruct((2 * N, CONFIG.seq_len + 1), jnp.int32)
    state = jax.eval_shape(init, jax.random.key(0))
    sent = {"all_gather": 0, "all_to_all": 0}  # bits of all payloads

    def walk(jaxpr):  # the text would show a function that is called twice once
        for equation in with_constants(jaxpr)[0].eqns:
            name, x = equation.primitive.name, equation.outvars[0].aval
            if name in sent and jnp.issubdtype(x.dtype, jnp.unsignedinteger):
                sent[name] += 8 * x.dtype.itemsize * x.size
            for inner in inner_jaxprs(equation):
                walk(inner)

    walk(jax.make_jaxpr(step)(*state, tokens))
    assert 0.998 * 5 * BLOCK < sent["all_to_all"] < (5 + 5 / 16) * BLOCK  # padding
    # Twice; 1 tile in 6 is padding.
    assert 0.998 * 16 * BLOCK < sent["all_gather"] < (16 + 2) * BLOCK


@pytest.mark.release
def test_sharded_updates_train_as_the_whole_optimizer_does(tmp_path, capsys):
    """And the example prints its table."""
    train_zero.main(steps=3, compare=True, out=tmp_path)
    row = re.compile(r"^(sharded|f32) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", re.MULTILINE)
    (name, loss, sent, bits, held), (whole, expected, *others) = row.findall(
        capsys.readouterr().out
    )
    assert (name, whole) == ("sharded", "f32")
    assert float(loss) == pytest.approx(float(expected), rel=2e-3)
    assert (sent, bits) == ("0.87", "3.75")
    assert float(held) < 0.26 * float(others[2])  # 16 bytes of an eighth, and 8 bytes of all
    assert {file.name for file in tmp_path.iterdir()} == {
        "tiny-zero-compare.json", "tiny-zero-compare.png",
    }  # fmt: skip
    assert len(Path(train_zero.__file__).read_text().splitlines()) <= 120
