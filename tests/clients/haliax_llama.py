"""A Llama of haliax's layers (`trainers/haliax_llama.py`); haliax imports constraints by name."""

from clients.client import Change, Client, Trained
from clients.stubs import stand_in, token_rows

FILE = "haliax_llama.py"
PATCH = (
    Change(FILE, "import equinox as eqx\n", "import equinox as eqx\nimport dynamiq_jax as dq\n"),
    Change(
        FILE,
        "    loss, grads = jax.value_and_grad(loss_fn)(model, rows)\n",
        """\
    named = lambda model, rows: loss_fn(model, hax.named(rows, ("batch", "position")))
    tokens = lambda model, rows: jnp.sum(rows[:, 1:] > 0)
    grad_fn = dq.value_and_grad(named, axis_name="data", weight=tokens, method=METHOD)
    loss, grads = grad_fn(model, rows.array)
""",
    ),
)
VARIANTS = {
    "DP": Client(
        repository="tests/clients/trainers",
        commit="",
        folder=FILE,
        mesh="8 data, Auto",
        step="jit_train_step",
        patch=PATCH,
    )
}


def train(steps: int) -> Trained:
    """Trains on a mesh of Auto axes."""
    stand_in("aqt", "aqt.jax", "aqt.jax.v2", "aqt.jax.v2.config", "aqt.jax.v2.aqt_dot_general")
    import haliax as hax
    import haliax_llama as trainer
    import jax

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = jax.device_put(trainer.Llama.init(jax.random.key(0)), jax.P())
        opt_state = jax.device_put(trainer.optimizer.init(model), jax.P())
        losses = []
        for rows in token_rows(steps, 16, 32, 256):
            placed = hax.named(jax.device_put(rows, jax.P("data")), ("batch", "position"))
            model, opt_state, loss = trainer.train_step(model, opt_state, placed)
            losses.append(float(loss))
    return Trained(losses, (model, opt_state))
