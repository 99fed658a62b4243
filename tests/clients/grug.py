"""marin's grug: a Llama of equinox modules with FSDP over "data", on Explicit axes."""

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

OWN = Client(
    "experiments/grug/base/train.py", "8 data, Explicit", "jit_train_step",
    (
        Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n"),
        Change(
            "loss, grads = jax.value_and_grad(loss_fn)(state.params)",
            "loss, grads = dq.value_and_grad(loss_fn, axis_name='data', compression=METHOD)"
            "(state.params)",
        ),
    ),
    package="experiments", repository="marin-community/marin", commit="29c1e474",
)  # fmt: skip
VARIANTS = {"FSDP": OWN}
PACKAGES = (
    "cachebox", "cloudpickle", "dataclasses_json", "datasets", "git", "iris.actor.client",
    "iris.actor.server", "iris.client.client", "iris.cluster.client.job_info",
    "iris.cluster.constraints", "iris.cluster.types", "iris.rpc", "iris.runtime.jax_init",
    "jinja2.ext", "jinja2.sandbox", "pyarrow.parquet", "regex", "requests", "tqdm_loggable.auto",
    "tqdm_loggable.tqdm_logging", "wandb", "zephyr.writers",
)  # fmt: skip
"""Packages that it imports for data, jobs and logs."""


def train(steps: int) -> Trained:
    stand_in(*PACKAGES)
    import jax
    import jmp
    import optax
    from experiments.grug.base import train as trainer
    from jax.sharding import AxisType
    from levanter.grug.attention import AttentionMask

    config = trainer.GrugModelConfig(
        vocab_size=VOCABULARY, hidden_dim=128, intermediate_dim=512, num_layers=2, num_heads=8,
        num_kv_heads=8, max_seq_len=LENGTH,
    )  # fmt: skip
    mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    optimizer, policy = optax.adamw(0.003), jmp.get_policy("f32")
    losses: list[float] = []
    with jax.set_mesh(mesh):
        step = trainer._make_train_step(optimizer, policy, z_loss_weight=0.0, ema_beta=None)
        init = jax.jit(
            lambda key: trainer.initial_state(
                config, optimizer=optimizer, mp=policy, key=key, ema_beta=None
            )
        )
        state = init(jax.random.PRNGKey(0))
        put = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P(("data",))))
        for row in token_rows(steps, ROWS, LENGTH, VOCABULARY):
            weight = (row > 0).astype(np.float32)
            weight[:, -1] = 0
            example = trainer.GrugLmExample(put(row), put(weight), AttentionMask.causal())
            state, metrics, _ = step(state, example)
            losses.append(float(metrics["train/loss"]))
    return Trained(losses, state, state.params)
