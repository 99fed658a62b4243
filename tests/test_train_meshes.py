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
ROWS = [*((text, "f32") for text in MESHES), ("replica=2,fsdp=4", "dynamiq")]
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


@pytest.mark.parametrize(("text", "method"), daily(ROWS, ROWS[:1]))
def test_losses_are_those_of_plain_jit(text, method):
    """Close to them, and not equal, where gradients are compressed."""
    run = make_run(mesh=train_llm.make_mesh(text))
    params = jax.eval_shape(run.init)
    ours = train_llm.on_mesh(run.loss_fn, params, run.mesh, method, BITS)
    found, trees = losses(run, ours.value_and_grad)
    plain, _ = losses(run, jax.value_and_grad(run.loss_fn))
    for tree in trees:  # parameters, and moments of them, are where they were put before training
        expected = jax.tree.leaves(run.shardings(tree))
        for leaf, sharding in zip(jax.tree.leaves(tree), expected, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert found[-1] < found[0] - 0.5
    assert found[2:] != plain[2:] or method == "f32"
    np.testing.assert_allclose(found, plain, rtol=1e-5 if method == "f32" else 0.02)
    assert np.isnan(ours.wire_bytes) == ("fsdp" in text)


@pytest.mark.parametrize("text", ["data=4", "model=8", "data=x", "gpu=8", "data", "data=4,model=4"])
def test_meshes_that_do_not_fit_are_refused(text):
    with pytest.raises(typer.BadParameter, match=text):
        train_llm.make_mesh(text)
