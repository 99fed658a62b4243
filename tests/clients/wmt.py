"""flax/examples/wmt: a Flax Linen encoder and decoder, by `jax.pmap`."""

import dataclasses
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

from clients.client import IMPORT, Change, Client, Trained
from clients.stubs import Batches, StandIn, locals_at_the_end, stand_in_for_tensorflow, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

PMEAN = Change(
    '    grads = jax.lax.pmean(grads, axis_name="batch")',
    '    grads = dq.pmean(grads, axis_name="batch", compression=METHOD)',
)
OWN = Client("examples/wmt/train.py", "8 batch, pmap", "jit__fun", (IMPORT, PMEAN))
UPDATES = (
    IMPORT,
    Change(f"{PMEAN.old}\n", ""),
    Change(
        "  state = jax_utils.replicate(state)\n",
        """  state = jax_utils.replicate(state.replace(
      opt_state=None, tx=dq.optax.sharded(state.tx, "batch", compression=METHOD)))
  state = state.replace(opt_state=jax.pmap(state.tx.init, axis_name="batch")(state.params))
""",
    ),
)
VARIANTS = {
    "f32, no dropout": OWN,
    "sharded updates, no dropout": dataclasses.replace(OWN, patch=UPDATES),
}


def train(steps: int) -> Trained:
    stand_in_for_tensorflow("tensorflow_datasets", "tensorflow_text", "input_pipeline", "clu")
    sys.modules["decode"] = StandIn("decode")
    sys.modules["bleu"] = StandIn("bleu")
    import jax
    import train as trainer
    from configs import default

    losses: list[float] = []

    def watch(seen: dict[str, Any]) -> None:
        own = seen.get("metrics")
        if own is not None:
            own = jax.tree.map(lambda x: float(x[0]), own)
            losses.append(own["loss"] / own["denominator"])

    rows = token_rows(steps, ROWS, LENGTH, VOCABULARY)
    own = ({"inputs": x, "targets": x} for x in rows)
    encoder = SimpleNamespace(vocab_size=lambda: VOCABULARY)
    pipeline: Any = sys.modules["input_pipeline"]
    batches = Batches(own, "train_and_evaluate", watch)
    pipeline.get_wmt_datasets = lambda **_: (batches, None, None, encoder)
    config = default.get_config()
    config.update(num_layers=2, qkv_dim=128, emb_dim=128, mlp_dim=512, num_heads=8)
    config.update(
        max_target_length=LENGTH, max_eval_target_length=LENGTH, use_mixed_precision=False
    )
    config.update(num_train_steps=steps + 2, eval_every_steps=10**9, warmup_steps=5)
    config.update(dropout_rate=0.0, attention_dropout_rate=0.0, learning_rate=0.005)
    config.update(
        per_device_batch_size=ROWS // 8, restore_checkpoints=False, save_checkpoints=False
    )
    trainer.evaluate = lambda **_: {"loss": 0.0}
    trainer.translate_and_calculate_bleu = lambda **_: ("", 0.0)
    found = locals_at_the_end(trainer.train_and_evaluate, config, tempfile.mkdtemp())
    return Trained(losses, found["state"], found["state"].params)
