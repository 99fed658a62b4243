"""flax/examples/gemma: a Flax NNX transformer, FSDP on Explicit axes."""

import dataclasses
import itertools
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import Batches, locals_at_the_end, stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

PATCH = (
    Change("from absl import logging\n", "from absl import logging\nimport dynamiq_jax as dq\n"),
    Change(
        "grad_fn = jax.value_and_grad(loss_fn, has_aux=True)",
        "grad_fn = dq.value_and_grad(loss_fn, has_aux=True, axis_name='fsdp', compression=METHOD)",
    ),
)
HOSTS = (
    Change("import numpy as np\n", "import numpy as np\nimport dynamiq_jax\n"),
    Change("mesh = jax.make_mesh(", "mesh = dynamiq_jax.make_mesh("),
)
"""A mesh of hosts without NVLink between them; JAX refuses to make one."""
OWN = Client(
    "examples/gemma/train.py", "8 fsdp, Explicit", "jit_jax_train_step", PATCH, setting=HOSTS
)
REPLICATED = Change(
    """ShardingConfig.fsdp_tp_sharding(
      fsdp_axis_name="fsdp", tensor_parallel_axis_name="tensor"
  )""",
    """ShardingConfig(act_btd=jax.P("fsdp"), act_btf=jax.P("fsdp"),
      act_btnh=jax.P("fsdp"), act_sbtnh=jax.P(None, "fsdp"))""",
)
"""The batch is sharded, and parameters are not."""
DP = dataclasses.replace(OWN, mesh=f"{OWN.mesh}, replicated", setting=(*HOSTS, REPLICATED))
UPDATES = (
    PATCH[0],
    Change(PATCH[1].old, PATCH[1].new.replace("compression", "unreduced=True, compression")),
    Change("        tx=optax.adamw(\n", "        tx=dq.optax.sharded(optax.adamw(\n"),
    Change(
        "            weight_decay=config.weight_decay,\n        ),\n",
        "            weight_decay=config.weight_decay,\n        ), 'fsdp', compression=METHOD),\n",
    ),
)
VARIANTS = {
    "DP": DP,
    "sharded updates": dataclasses.replace(DP, patch=UPDATES),
    "FSDP": OWN,
    "FSDP, bf16": dataclasses.replace(OWN, mesh=f"{OWN.mesh}, bf16", options={"bfloat16": True}),
    "FSDP × TP": dataclasses.replace(
        OWN, mesh="4 fsdp × 2 tensor, Explicit", options={"fsdp": 4, "tensor": 2}
    ),
}
MODEL = {
    "num_layers": 2, "embed_dim": 128, "hidden_dim": 512, "num_heads": 4, "head_dim": 32,
    "num_kv_heads": 1, "use_post_attn_norm": True, "use_post_ffw_norm": True, "use_qk_norm": True,
    "sliding_window_size": 16, "final_logit_softcap": None,
}  # fmt: skip


LARGE = {
    "num_layers": 6, "embed_dim": 2048, "hidden_dim": 8192, "num_heads": 16, "head_dim": 128,
    "sliding_window_size": 512,
}  # fmt: skip


def train(
    steps: int, fsdp: int = 8, tensor: int = 1, bfloat16: bool = False, large: bool = False
) -> Trained:
    stand_in("sentencepiece", "grain", "input_pipeline", "tokenizer", "sampler", "clu")
    import jax
    import train as trainer
    import transformer_cfg
    from configs import tiny

    rows, length, vocabulary = ROWS, LENGTH, VOCABULARY
    if large:
        fsdp = jax.device_count() // tensor
        rows, length, vocabulary = 3 * jax.device_count(), 1024, 32_000
    totals: list[float] = []

    def watch(seen: dict[str, Any]) -> None:
        totals.append(float(seen["train_metrics"].loss.total[...]) / rows)

    batches = list(map(_batch, token_rows(steps, rows, length + 1, vocabulary)))
    encoder = SimpleNamespace(vocab_size=lambda: vocabulary, pad_id=lambda: 0)
    pipeline: Any = sys.modules["input_pipeline"]

    def get_datasets(config, *, vocab_path, data_sharding):
        placed = (jax.device_put(batch, data_sharding) for batch in batches)
        return Batches(placed, "train_and_evaluate", watch), None, encoder

    pipeline.get_datasets = get_datasets
    kinds = transformer_cfg.AttentionType
    model = MODEL | (LARGE if large else {})
    model["attention_types"] = (kinds.LOCAL_SLIDING, kinds.GLOBAL) * (model["num_layers"] // 2)
    config = tiny.get_config().replace(
        transformer_params=model,
        fsdp_parallelism=fsdp,
        tensor_parallelism=tensor,
        num_train_steps=steps + 2,
        warmup_steps=5,
        learning_rate=1e-3 if large else 0.005,
        use_bfloat16=bfloat16,
        restore_checkpoints=False,
    )
    found = locals_at_the_end(trainer.train_and_evaluate, config, tempfile.mkdtemp())
    state = trainer.nnx.state((found["model"], found["optimizer"]))
    losses = [after - before for before, after in itertools.pairwise(totals)]
    return Trained(losses, state)


def _batch(rows) -> dict[str, Any]:
    inputs = rows[:, :-1]
    places = np.arange(inputs.shape[1], dtype=np.int32)
    return {
        "inputs": inputs,
        "targets": rows[:, 1:],
        "inputs_position": np.broadcast_to(places, inputs.shape),
        "inputs_segmentation": (inputs > 0).astype(np.int32),
    }
