"""Levanter: a LLaMA of haliax, on Auto or Explicit axes; the model is an equinox module."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from clients.client import Change, Client, Trained
from clients.stubs import stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

IMPORT = Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n")
CALL = "eqx.filter_value_and_grad(loss_fn, has_aux=True)\n"
GRADIENTS = Change(
    f"grad_fn = {CALL}",
    """grad_fn = dq.equinox.filter_value_and_grad(
            loss_fn, has_aux=True, axis_name="data", compression=METHOD)
""",
)
PACKAGES = (
    "aqt.jax.v2.aqt_dot_general", "aqt.jax.v2.config", "botocore.config", "botocore.exceptions",
    "botocore.session", "chex", "datasets", "git", "google.api_core.exceptions", "google.cloud",
    "iris.actor.client", "iris.actor.server", "iris.client.client",
    "iris.cluster.client.job_info", "iris.cluster.constraints", "iris.cluster.types", "iris.rpc",
    "iris.runtime.jax_init", "jinja2.ext", "jinja2.sandbox", "opentelemetry._logs",
    "pyarrow.parquet", "wandb", "xxhash",
)  # fmt: skip
"""Packages that it imports for data, jobs and logs."""
OWN = Client(
    "levanter/trainer.py", "8 data, Explicit", "jit__train_step", (IMPORT, GRADIENTS),
    package="levanter", repository="marin-levanter", commit="0.2.20",
    options={"explicit": True},
)  # fmt: skip
CALL_ON_AUTO = """grad_fn = dq.equinox.filter_value_and_grad(
            loss_fn, has_aux=True, axis_name="data", mesh=self.device_mesh, compression=METHOD,
            weight=lambda _, example, key: example.loss_weight["position", :-1].sum().array)
"""
SPECS = """,
            specs=hax.partitioning.pspec_for(
                eqx.filter(model, eqx.is_inexact_array), self.parameter_axis_mapping))
"""
AUTO = (
    IMPORT,
    Change(GRADIENTS.old, CALL_ON_AUTO),
    Change(
        "            self.mp,\n            self.compute_axis_mapping,\n        )\n",
        "            self.mp,\n            {},\n        )\n",
    ),
    Change(
        '    if mesh is None or getattr(mesh, "empty", False):\n        output = fused',
        "    if mesh is None or not current_thread_local_mapping():\n        output = fused",
        "levanter/models/loss.py",
    ),
)
"""Workers run the loss on their own rows, in a map, where haliax has nothing to split."""
SHARDED = (AUTO[0], Change(GRADIENTS.old, CALL_ON_AUTO[:-2] + SPECS), *AUTO[2:])
UPDATES = (
    IMPORT,
    Change(GRADIENTS.old, GRADIENTS.new.replace("compression", "unreduced=True, compression")),
    Change(
        "        self.optimizer = optimizer\n",
        """        mesh, leaves = self.device_mesh, jax.tree.leaves
        inner = dq.optax.sharded(optimizer, "data", mesh=mesh, compression=METHOD)
        self.optimizer = optimizer._replace(
            init=lambda p: inner.init(leaves(p)),
            update=lambda g, state, params, **_: (lambda found: (jax.tree.unflatten(
                jax.tree.structure(params), found[0]), found[1]))(
                    inner.update(leaves(g), state, leaves(params))))
""",
    ),
)
"""haliax would make the arrays of a state whole that it knows by name."""
VARIANTS = {
    "DP": dataclasses.replace(OWN, patch=AUTO, mesh="8 data, Auto", options={"explicit": False}),
    "DP, Explicit": OWN,
    "sharded updates, Explicit": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(
        OWN, patch=SHARDED, mesh="8 data, Auto", options={"explicit": False, "over": "embed"}
    ),
}


def train(steps: int, explicit: bool, over: str = "") -> Trained:
    stand_in(*PACKAGES)
    import haliax
    import jax
    import levanter.trainer as trainer
    import optax
    from levanter.checkpoint import CheckpointerConfig
    from levanter.layers.attention import AttentionMask
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.tracker import NoopConfig

    Batch = haliax.Axis("batch", ROWS)
    model = LlamaConfig(
        max_seq_len=LENGTH, hidden_dim=128, intermediate_dim=512, num_heads=8, num_kv_heads=8,
        num_layers=2,
    )  # fmt: skip
    mesh = trainer.MeshConfig(param_mapping={over: "data"} if over else {})  # else replicated
    config = trainer.TrainerConfig(
        tracker=NoopConfig(), train_batch_size=ROWS, num_train_steps=steps, mesh=mesh,
        log_jaxprs=False, log_xla_hlo=False, use_explicit_mesh_axes=explicit,
        require_accelerator=False, log_dir=Path(tempfile.mkdtemp()),
        checkpointer=CheckpointerConfig(base_path="/nonexistent"),
    )  # fmt: skip
    config.initialize()
    optimizer = optax.adamw(0.003)
    losses: list[float] = []

    def loss_function(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with trainer.Trainer(config, optimizer, loss_function, add_default_hooks=False) as own:
        key = jax.random.PRNGKey(0)
        vocabulary = haliax.Axis("vocab", VOCABULARY)
        state = own.initial_state(key, model_init=lambda: model.build(vocabulary, key=key))
        position = model.max_Pos
        for row in token_rows(steps, ROWS, LENGTH, VOCABULARY):
            tokens = haliax.named(row, (Batch, position))
            weight = haliax.named((row > 0).astype("float32"), (Batch, position))
            mask = AttentionMask.causal()
            example = LmExample(tokens=tokens, loss_weight=weight, attn_mask=mask)
            with haliax.axis_mapping(own.compute_axis_mapping):
                example = haliax.shard(example)
            info = own.train_step(state, example)
            state = info.state
            losses.append(info.loss)
    return Trained(losses, state, state.model)
