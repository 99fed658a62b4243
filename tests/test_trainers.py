"""Trainers of other libraries train with our lines as they do without.

A recipe runs three times: as its library has it, with the exact method, with 5 bits.
"""

import re

import jax
import numpy as np
import pytest
from test_recipes import RECIPES, START, execute, promoted  # noqa: F401

pytestmark = [
    # Keras and equinox use what newer versions of JAX and NumPy deprecate.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(keras|equinox)"),
]

KERAS, EQUINOX, MULTI_STEPS = (RECIPES[n] for n in ("keras_model", "equinox_net", "multi_steps"))
EXPLICIT = 'with jax.set_mesh(dq.make_mesh((-1,), ("data",))):'
ON_LINES = """dq.optax.sharded(  # 1: was {}
        optax.adam(1e-3), "data", compression=compression
    )"""
GRADIENTS = """dq.{}value_and_grad(  # 2
        {}, axis_name="data", compression=compression, unreduced=True
    )"""


def replaced(code, changes):
    for old, new in changes.items():
        assert code.count(old) == 1, f"{code.count(old)} times {old!r}"
        code = code.replace(old, new)
    return code


EQUINOX_DP = replaced(
    EQUINOX,
    {
        ON_LINES.format("optax.adam(1e-3)"): "optax.adam(1e-3)",
        "# 2: was eqx": "# 1: was eqx",
        ", unreduced=True": "",
    },
)
WHOLE = "    net = eqx.combine(jax.device_put(arrays, P()), static)"
SHARDS = '    net = eqx.combine(jax.device_put(arrays, P("data")), static)  # 2: was P()'
EQUINOX_FSDP = replaced(EQUINOX_DP, {WHOLE: SHARDS})
EQUINOX_ALONE = {
    """dq.equinox.filter_value_and_grad(  # 1: was eqx.filter_value_and_grad
        net_loss, axis_name="data", compression=compression
    )""": "eqx.filter_value_and_grad(net_loss)",
}
IN_FIT = """callbacks=[keras.callbacks.LambdaCallback(on_train_begin=shard)], x="""
KERAS_FSDP = replaced(
    KERAS,
    {
        "    history = model.fit(rows": f"""    def shard(_):  # 5: new, and in fit
        for v in [*model.trainable_variables, *model.optimizer.variables]:
            if v.ndim and v.shape[0] % jax.device_count() == 0:
                v.assign(jax.device_put(v.value, P("data")))

    history = model.fit({IN_FIT}rows""",
        ', rows["y"],': ', y=rows["y"],',
    },
)
KERAS_ALONE = {
    "model = DataParallel(": "model = keras.Sequential(",
    " Dropout(0.1)": " layers.Dropout(0.1)",
    EXPLICIT: "if True:",
}
PLAIN = {
    "keras": (KERAS, KERAS_ALONE),
    "keras, FSDP": (KERAS_FSDP, KERAS_ALONE | {IN_FIT: "x="}),
    "equinox": (
        EQUINOX,
        {
            ON_LINES.format("optax.adam(1e-3)"): "optax.adam(1e-3)",
            """dq.equinox.filter_value_and_grad(  # 2: was eqx.filter_value_and_grad
        net_loss, axis_name="data", compression=compression, unreduced=True
    )""": "eqx.filter_value_and_grad(net_loss)",
        },
    ),
    "equinox, data parallel": (EQUINOX_DP, EQUINOX_ALONE),
    "equinox, FSDP": (EQUINOX_FSDP, EQUINOX_ALONE | {SHARDS: WHOLE}),  # alone it takes no shards
    "multi steps": (
        MULTI_STEPS,
        {
            ON_LINES.format("optax.MultiSteps(optax.adam(1e-3), WINDOW)"): "optax.MultiSteps("
            "optax.adam(1e-3), WINDOW)",
            MULTI_STEPS.partition("    grad_fn = ")[2]: """jax.value_and_grad(loss_fn)

    @jax.jit
    def one(weights, opt_state, batch):
        loss, grads = grad_fn(weights, batch)
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    losses = []
    for batch in batches:
        weights, opt_state, loss = one(weights, opt_state, jax.device_put(batch, P("data")))
        losses.append(loss)
loss = sum(losses[-WINDOW:]) / WINDOW
""",
        },
    ),
    "train state": (
        RECIPES["train_state"],
        {
            ON_LINES.format("optax.adam(1e-3)"): "optax.adam(1e-3)",
            GRADIENTS.format("", "loss_fn"): "jax.value_and_grad(loss_fn)",
        },
    ),
    "nnx optimizer": (
        RECIPES["nnx_optimizer"],
        {
            ON_LINES.format("optax.adam(1e-3)"): "optax.adam(1e-3)",
            GRADIENTS.format("nnx.", "net_loss"): "nnx.value_and_grad(net_loss)",
        },
    ),
}  # fmt: skip
"""Scripts by name, each with texts and what its library has in their places."""


def script(name, how, seed=0):
    """A recipe natively, by the exact method or by 5 bits, and a start with batches of a seed."""
    code, plain = PLAIN[name]
    start = replaced(START, {"default_rng(0)": f"default_rng({seed})"})
    if how == "native":
        return replaced(code, plain), start
    if how == "exact":
        start = replaced(start, {"dq.DynamiQ(bits=5)": "dq.F32()"})
    return code, start


@pytest.fixture
def loss_of(execute, monkeypatch):  # noqa: F811
    """The last loss of a script, which skips without its library."""

    def loss_of(name, how, seed=0):
        library = name.partition(",")[0]
        if library in ("keras", "equinox"):
            monkeypatch.setenv("KERAS_BACKEND", "jax")
            pytest.importorskip(library, reason="pip install '.[clients]'", exc_type=ImportError)
        code, start = script(name, how, seed)
        found = execute(code, f"{name}, {how}", start)
        return float(found["loss"]), found

    return loss_of


@pytest.mark.parametrize("name", ["equinox"])
def test_a_trainer_trains_at_five_bits(loss_of, capsys, name):
    loss, found = loss_of(name, "5 bits")
    assert f"loss {loss:.3f}\n" in capsys.readouterr().out
    native, _ = loss_of(name, "native")
    assert loss == pytest.approx(native, rel=0.01) and loss != native
    masters = jax.tree.leaves(found["opt_state"].masters)
    split = [x.addressable_shards[0].data.size < x.size for x in masters]
    assert all(split[i] for i in np.argsort([x.size for x in masters])[-2:])


@pytest.mark.release
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", PLAIN)
def test_losses_are_those_of_the_trainer_without_ours(loss_of, name, seed):
    """By the exact method to four digits, at 5 bits within 1%."""
    native, exact, compressed = (loss_of(name, how, seed)[0] for how in ("native", "exact", "5"))
    print(f"{name}, seed {seed}: {native:.5f}, {exact:.5f}, {compressed:.5f}")
    assert exact == pytest.approx(native, rel=1e-4)
    assert compressed == pytest.approx(native, rel=0.01) and compressed != exact


def test_at_most_five_places_change():
    """They are numbered from 1."""
    for code, _ in PLAIN.values():
        numbers = [int(n) for n in re.findall(r"  # (\d+)\b", code)]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)) and 1 <= len(numbers) <= 5
