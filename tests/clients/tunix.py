"""Tunix: its PeftTrainer with its Llama 3, an NNX model on Auto axes (fsdp, tp)."""

import contextlib
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256
TRAINER = "tunix/sft/peft_trainer.py"

IMPORT = Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n")
GRADIENTS = Change(
    "    grad_fn = nnx.value_and_grad(\n        self.loss_fn,\n",
    """    grad_fn = dq.nnx.value_and_grad(
        self.loss_fn, axis_name='fsdp', mesh=pxla.thread_resources.env.physical_mesh, specs=SPECS,
        weight=lambda model, input_mask, **_: input_mask[:, 1:].sum(), compression=METHOD,
""",
)


def patch(specs: str, *more: Change) -> tuple[Change, ...]:
    return (IMPORT, Change(GRADIENTS.old, GRADIENTS.new.replace("SPECS", specs)), *more)


OWN = Client(
    TRAINER, "8 fsdp, Auto, replicated", "jit__train_step", patch("shd.PartitionSpec()"),
    package="tunix", options={"shape": (8, 1), "shards": False}, repository="google-tunix on PyPI",
    commit="0.1.7",
)  # fmt: skip
UPDATES = (
    IMPORT,
    Change(
        GRADIENTS.old,
        GRADIENTS.new.replace("SPECS", "shd.PartitionSpec(), unreduced=True"),
    ),
    Change(
        "    self.model = model\n    self.config",
        """    optimizer = optax.chain(dq.optax.sharded(optimizer, 'fsdp', compression=METHOD))
    self.model = model
    self.config""",
    ),
    Change(
        "    grad_norm = optax.global_norm(grads)\n    optimizer.update(model, grads)\n",
        "    optimizer.update(model, grads)\n    grad_norm = optimizer.opt_state[0].norm[...]\n",
    ),
    Change(
        "    if mesh.empty:\n      return\n    optimizer_state", "    return\n    optimizer_state"
    ),
)
SPECS = "nnx.get_partition_spec(nnx.state(model, nnx.Param))"
VARIANTS = {
    "DP": OWN,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(
        OWN, mesh="8 fsdp, Auto", patch=patch(SPECS), options={"shape": (8, 1)}
    ),
    "FSDP × TP": dataclasses.replace(
        OWN, mesh="4 fsdp × 2 tp, Auto", patch=patch(SPECS), options={"shape": (4, 2)}
    ),
}
MISSING = "metrax", "sentencepiece", "pandas", "perfetto.protos.perfetto.trace.perfetto_trace_pb2"


def train(steps: int, shape: tuple[int, int], shards: bool = True) -> Trained:
    import flax.training.checkpoints  # noqa: F401

    stand_in(*MISSING, "perfetto.trace_builder.proto_builder")
    import jax
    import optax
    from flax import nnx
    from jax.sharding import AxisType
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    names: Any = llama.ShardingConfig.get_default_sharding()
    if not shards:
        fields = dataclasses.fields(names)
        names = dataclasses.replace(
            names, **{x.name: (None,) * len(getattr(names, x.name)) for x in fields}
        )
    config = llama.ModelConfig(
        num_layers=2, vocab_size=VOCABULARY, embed_dim=128, hidden_dim=256, num_heads=8,
        head_dim=16, num_kv_heads=8, rope_theta=10_000, norm_eps=1e-5, shd_config=names,
    )  # fmt: skip
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    losses: list[float] = []

    def log(_: Any, name: str, value: Any, *__: Any, **___: Any) -> None:
        if name == "loss":
            losses.append(float(value))

    logger = SimpleNamespace(log=log, close=lambda: None, metric_exists=lambda *_: False)
    rows = token_rows(steps, ROWS, LENGTH, VOCABULARY)
    data = [peft_trainer.TrainingInput(input_tokens=x, input_mask=x > 0) for x in rows]
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))

    def inputs(x: Any) -> dict[str, Any]:
        return {
            "input_tokens": x.input_tokens,
            "input_mask": x.input_mask,
            "positions": jax.numpy.broadcast_to(np.arange(LENGTH), x.input_tokens.shape),
            "attention_mask": jax.numpy.broadcast_to(causal, (len(x.input_tokens), *causal.shape)),
        }

    with mesh, contextlib.redirect_stdout(sys.stderr):
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        put = lambda x, p: jax.device_put(x, jax.NamedSharding(mesh, p))
        nnx.update(model, jax.tree.map(put, state, specs))
        told = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=steps)
        trainer: Any = peft_trainer.PeftTrainer(
            model, optax.adamw(optax.linear_schedule(0.0, 0.003, 5)), told, logger
        )
        trainer.with_gen_model_input_fn(inputs).train(data)
    params = nnx.state(model, nnx.Param)
    return Trained(losses, (params, nnx.state(trainer.optimizer)), params)
