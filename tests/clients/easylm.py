"""EasyLM: a LLaMA of Flax Linen on Auto axes; the loss closes over a batch and draws keys."""

import dataclasses
import tempfile
from types import SimpleNamespace
from typing import Any

from clients.client import Change, Client, Trained
from clients.stubs import Batches, StandIn, locals_at_the_end, stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

IMPORT = Change("import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport dynamiq_jax as dq\n")
GRADIENTS = Change(
    "        grad_fn = jax.value_and_grad(loss_and_accuracy, has_aux=True)\n",
    """        grad_fn = dq.value_and_grad(loss_and_accuracy, has_aux=True, mesh=mesh,
            axis_name=AXES, closed_specs=PS(AXES), compression=METHOD)
""",
)


def patch(axes: str, options: str = "", *more: Change) -> tuple[Change, ...]:
    new = GRADIENTS.new.replace("AXES", axes).replace("compression", f"{options}compression")
    return (IMPORT, Change(GRADIENTS.old, new), *more)


UPDATES = patch(
    "'dp'",
    "specs=PS(), unreduced=True, ",
    Change(
        "    def create_trainstate_from_params(params):\n",
        """    mesh = LLaMAConfigurator.get_jax_mesh(FLAGS.mesh_dim)
    optimizer = dq.optax.sharded(optimizer, 'dp', mesh=mesh, max_norm=1.0, compression=METHOD)

    def create_trainstate_from_params(params):
""",
    ),
    Change(
        "    shard_fns, gather_fns = make",
        """    train_state_partition = train_state_partition.replace(
        opt_state=dq.optax.state_specs(train_state_shapes.opt_state))
    shard_fns, gather_fns = make""",
    ),
    Change(
        "optax.clip_by_global_norm(config.clip_gradient),\n                optax.adamw",
        "optax.adamw",
        "EasyLM/optimizers.py",
    ),
)
MODEL = "EasyLM/models/llama/llama_model.py"
MODULE = "EasyLM/models/llama/llama_train.py"
OWN = Client(
    MODULE, "8 dp, Auto", "jit_train_step", patch("'dp'", "specs=PS(), "), package="EasyLM",
    setting=(Change("axis=-1) - 1, a_min=0)", "axis=-1) - 1, min=0)", MODEL),),  # JAX's new name
    options={"mesh": "8,1,1"}, repository="young-geng/EasyLM", commit="fe5b2c3"
)  # fmt: skip
SPECS = "specs=train_state_partition.params, "
VARIANTS = {
    "DP": OWN,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(
        OWN, mesh="8 fsdp, Auto", patch=patch("('dp', 'fsdp')", SPECS), options={"mesh": "1,8,1"}
    ),
    "FSDP × TP": dataclasses.replace(
        OWN,
        mesh="4 fsdp × 2 mp, Auto",
        patch=patch("('dp', 'fsdp')", SPECS),
        options={"mesh": "1,4,2"},
    ),
}


def train(steps: int, mesh: str) -> Trained:
    import transformers  # noqa: F401

    stand_in("gcsfs", "wandb", "cloudpickle", "datasets")
    from EasyLM.models.llama import llama_train as trainer

    losses: list[float] = []
    rows = token_rows(steps, ROWS, LENGTH + 1, VOCABULARY)

    def watch(seen: dict[str, Any]) -> None:
        if "metrics" in seen:
            losses.append(float(seen["metrics"]["loss"]))

    own = ({"input_tokens": x[:, :-1], "target_tokens": x[:, 1:], "loss_masks": (x[:, 1:] > 0)}
           for x in rows)  # fmt: skip
    batches: Any = Batches(((x, {}) for x in own), "main", watch)
    batches.seq_length = LENGTH
    factory: Any = trainer.DatasetFactory
    factory.load_dataset = lambda *_: batches
    tokenizer: Any = trainer
    tokenizer.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: None)
    logger: Any = StandIn()
    logger.output_dir = tempfile.mkdtemp()
    trainer.mlxu.WandBLogger = lambda **_: logger
    trainer.mlxu.user_flags_to_config_dict = trainer.mlxu.get_user_flags = lambda *_: {}
    flags = trainer.FLAGS
    flags(["llama_train", f"--mesh_dim={mesh}", "--total_steps=100"])
    flags.llama.update(base_model="debug", vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    flags.llama.update(num_attention_heads=8, num_key_value_heads=8)
    flags.optimizer.adamw_optimizer.update(lr=0.003, end_lr=0.003, lr_warmup_steps=5)
    found = locals_at_the_end(trainer.main, [])
    state = found["train_state"]
    return Trained(losses, state, state.params)
