"""MaxText: pre-training of its default model, NNX with scanned layers, on Auto axes."""

import contextlib
import dataclasses
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import Batches, stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

IMPORT = Change(
    "import jax\nimport jax.numpy", "import jax\nimport dynamiq_jax as dq\nimport jax.numpy"
)
CALL = "grad_func = jax.value_and_grad(diff_wrapper, argnums=(0, 1), has_aux=True)\n"


def patch(axis: str, options: str = "") -> tuple[Change, ...]:
    """The dropout's keys are whole on all workers; the loss's weight is its number of tokens."""
    new = f"""grad_func = dq.value_and_grad(
          diff_wrapper, argnums=(0, 1), has_aux=True, axis_name="{axis}", compression=METHOD,
          batch_specs={{"rest": jax.P()}}, aux=(AUX, "same"){options},
          weight=lambda *args: jnp.sum(args[-1]["targets_segmentation"] != 0))
""".replace("AUX", '{"xent_sum": "sum", "total_weights": "sum"}')
    return IMPORT, Change(CALL, new)


SPECS = ", specs=(jax.tree.map(lambda x: x.spec, params_shardings), None)"
OWN = Client(
    "src/maxtext/trainers/pre_train/train.py", "8 data, Auto", "jit_train_step",
    patch("data"), package="src/maxtext", repository="AI-Hypercomputer/maxtext",
    commit="e591f30c", options={"parallelism": {"ici_data_parallelism": 8}},
)  # fmt: skip
UTILS, STATE = "src/maxtext/utils/train_utils.py", "src/maxtext/utils/maxtext_utils.py"
NAMED = "state_mesh_shardings = maxtext_utils_nnx.nnx_extract_named_sharding(abstract_state)\n"
UPDATES = (
    *patch("data", ", unreduced=True"),
    Change(
        "grads = maxtext_utils.apply_gradient_clipping(raw_grads, None, "
        "config.gradient_clipping_threshold)",
        "grads = raw_grads",
    ),
    Change(
        "  tx = optimizers.get_optimizer(config, learning_rate_schedule, model)\n",
        """  tx = optimizers.get_optimizer(config, learning_rate_schedule, model)
  tx = dq.optax.sharded(tx, "data", mesh=model.mesh, compression=METHOD,
      max_norm=config.gradient_clipping_threshold)
""",
        UTILS,
    ),
    Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n", UTILS),
    Change(
        NAMED,
        f"""{NAMED}  state_mesh_shardings.optimizer = jax.tree.map(
      lambda p: NamedSharding(mesh, p), nnx.state(dq.optax.state_specs(abs_model.optimizer)))
""",
        STATE,
    ),
    Change("import jax\n", "import jax\nimport dynamiq_jax as dq\n", STATE),
)
VARIANTS = {
    "DP": OWN,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(
        OWN,
        mesh="8 fsdp, Auto",
        patch=patch("fsdp", SPECS),
        options={"parallelism": {"ici_fsdp_parallelism": 8}},
    ),
}
MISSING = (
    "pathwaysutils", "pathwaysutils.elastic", "jinja2", "immutabledict", "xprof.cli.tools",
    "einshape.src.jax", "grain.experimental", "grain.python", "transformers", "tiktoken.load",
    "sentencepiece", "sympy", "ml_goodput_measurement",
)  # fmt: skip
PIPELINE = "maxtext.input_pipeline.input_pipeline_interface"
OWN_MISSING = (
    "maxtext.checkpoint_conversion.utils.load_dynamic",
    "maxtext.checkpoint_conversion.utils.hf_model_configs",
    "maxtext.checkpoint_conversion.utils.param_mapping",
)
MODEL = {
    "base_emb_dim": 128, "base_num_query_heads": 8, "base_num_kv_heads": 8, "head_dim": 16,
    "base_mlp_dim": 512, "base_num_decoder_layers": 2, "vocab_size": VOCABULARY,
    "max_target_length": LENGTH, "per_device_batch_size": ROWS // 8, "attention": "dot_product",
    "dtype": "float32", "logits_via_embedding": True,
}  # fmt: skip


def train(steps: int, parallelism: dict[str, int]) -> Trained:
    import flax.training.checkpoints  # noqa: F401

    stand_in(*MISSING)
    import maxtext  # noqa: F401

    stand_in(*OWN_MISSING)
    from flax import nnx
    from maxtext.trainers.pre_train import train as trainer

    stand_in(PIPELINE)
    losses: list[float] = []

    def write(metrics: Any, *_: Any, **__: Any) -> None:
        losses.append(float(metrics["scalar"]["learning/loss"]))

    trainer.metric_logger.MetricLogger = lambda **_: SimpleNamespace(
        buffer_and_write_metrics=write,
        write_setup_info_to_tensorboard=lambda _: None,
        flush_metrics_and_cleanup=lambda: None,
    )
    batches = Batches(_batch(rows) for rows in token_rows(steps, ROWS, LENGTH + 1, VOCABULARY))
    sys.modules[PIPELINE].create_data_iterator = lambda *_: (batches, None)
    options = MODEL | {"ici_fsdp_parallelism": 1} | parallelism
    options |= {
        "run_name": "client",
        "hardware": "cpu",
        "steps": steps,
        "learning_rate": 0.003,
        "warmup_steps_fraction": 0.25,
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "base_output_directory": tempfile.mkdtemp(),
        "learning_rate_schedule_steps": steps,
    }
    words = [f"{name}={value}" for name, value in options.items()]
    folder = trainer.__file__.partition("/trainers/")[0]
    with contextlib.redirect_stdout(sys.stderr):
        config = trainer.pyconfig.initialize(["", f"{folder}/configs/base.yml", *words])
        state = trainer.train_loop(config, None)
    return Trained(losses, state, nnx.filter_state(state, nnx.Param))


def _batch(rows: np.ndarray) -> dict[str, Any]:
    inputs, targets = rows[:, :-1], rows[:, 1:]
    places = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    own = {"inputs": inputs, "targets": targets}
    for name, x in list(own.items()):
        own |= {f"{name}_position": places, f"{name}_segmentation": (x > 0).astype(np.int32)}
    return own
