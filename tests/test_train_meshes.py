"""The example on meshes of several axes: losses as of plain `jax.jit`, and parameters in place."""

from functools import partial

import jax
import llm_model
import numpy as np
import optax
import pytest
import small_llm
import train_llm
import typer
from cases import daily
from rich.console import Console
from small_llm import CONFIG, sequences

import dynamiq_jax as dq

pytestmark = pytest.mark.usefixtures("dtypes_promoted")
STEPS = 8
RECIPE = train_llm.Recipe(steps=STEPS, batch_size=2, learning_rate=5e-3, validation_batches=1)
MESHES = ("data=4,model=2", "replica=2,fsdp=4", "fsdp=2,model=4", "replica=2,fsdp=2,model=2")
BITS = dq.Compression(dq.DynamiQ(bits=8), min_leaf_size=1, min_bucket_size=4096)


make_run = partial(
    small_llm.make_run, recipe=RECIPE, loss_fn=llm_model.make_loss(CONFIG), console=Console()
)


def losses(run, value_and_grad):
    """Losses of training on a few sequences again and again, so that a few steps learn."""
    method = train_llm.Method("", value_and_grad, None, 0.0, 0.0)
    optimizer = train_llm.make_optimizer(RECIPE)
    params, found = run.init(), []
    opt_state, step = run.init_optimizer(optimizer, params), train_llm.make_step(method, optimizer)
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state, run.shard(sequences()))
        found.append(float(loss))
    return found, (params, optax.tree_utils.tree_get(opt_state, "mu"))


def assert_placed(run, trees):
    """Parameters, and moments of them, are where they were put before training."""
    for tree in trees:
        expected = jax.tree.leaves(run.shardings(tree))
        for leaf, sharding in zip(jax.tree.leaves(tree), expected, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("text", daily(MESHES, list(MESHES)[:1]))
def test_losses_are_those_of_plain_jit(text):
    run = make_run(mesh=train_llm.make_mesh(text))
    params = jax.eval_shape(run.init)
    ours = train_llm.on_mesh(run.loss_fn, params, run.mesh, "f32", BITS)
    found, trees = losses(run, ours.value_and_grad)
    plain, _ = losses(run, jax.value_and_grad(run.loss_fn))
    assert_placed(run, trees)
    assert found[-1] < found[0] - 0.5
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert np.isnan(ours.wire_bytes) == ("fsdp" in text)


@pytest.mark.release
def test_compressed_losses_are_close_and_not_equal():
    run = make_run(mesh=train_llm.make_mesh("replica=2,fsdp=4"))
    params = jax.eval_shape(run.init)
    ours = train_llm.on_mesh(run.loss_fn, params, run.mesh, "dynamiq", BITS)
    found, trees = losses(run, ours.value_and_grad)
    plain, _ = losses(run, jax.value_and_grad(run.loss_fn))
    assert_placed(run, trees)
    assert found[2:] != plain[2:]
    np.testing.assert_allclose(found, plain, rtol=0.02)


@pytest.mark.parametrize("text", ["data=4", "model=8", "data=x", "gpu=8", "data", "data=4,model=4"])
def test_meshes_that_do_not_fit_are_refused(text):
    with pytest.raises(typer.BadParameter, match=text):
        train_llm.make_mesh(text)
