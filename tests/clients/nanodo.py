"""google-deepmind/nanodo: a Flax Linen transformer, FSDP by the shardings of `jax.jit`."""

import dataclasses
import tempfile
from typing import Any

from clients.client import Change, Client, Trained
from clients.stubs import Batches, locals_at_the_end, stand_in, token_rows

ROWS, LENGTH, VOCABULARY = 16, 32, 256

FILE = "nanodo/train.py"
EXPLICIT = (
    Change(
        FILE,
        'mesh = Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), ("data",))',
        'jax.set_mesh(mesh := jax.make_mesh((jax.device_count(),), ("data",)))',
    ),
    Change(FILE, "in_BxL = jax.lax.with_sharding_constraint(", "in_BxL = jax.reshard("),
    Change(
        "nanodo/model.py",
        "y_BxLxD = self.embed(y_BxL)",
        "y_BxLxD = self.embed.embedding.at[y_BxL].get(out_sharding=jax.typeof(y_BxL).sharding)",
    ),
)
IMPORT = Change(FILE, "import jax\n", "import jax\nimport dynamiq_jax as dq\n")
ON_EXPLICIT = (
    IMPORT,
    Change(
        FILE,
        "get_loss_fn(in_BxL, state.apply_fn, c), has_aux=True\n",
        "get_loss_fn(in_BxL, state.apply_fn, c), has_aux=True, axis_name='data', method=METHOD\n",
    ),
    Change(FILE, "grad_fn = jax.value_and_grad(", "grad_fn = dq.value_and_grad("),
)
ON_AUTO = (
    IMPORT,
    Change(
        FILE,
        """  grad_fn = jax.value_and_grad(
      get_loss_fn(in_BxL, state.apply_fn, c), has_aux=True
  )
  (loss, aux_data), grads = grad_fn(state.params)
""",
        """\
  grad_fn = dq.value_and_grad(lambda p, x: get_loss_fn(x, state.apply_fn, c)(p), method=METHOD,
      has_aux=True, aux=loss_lib.LossAuxData('sum', 'mean', 'mean'), axis_name='data',
      weight=lambda p, x: data.get_in_out(x)[2].sum(), specs=nn.get_partition_spec(state.params)
  )
  (loss, aux_data), grads = grad_fn(state.params, in_BxL)
""",
    ),
)
OWN = Client(
    repository="google-deepmind/nanodo",
    commit="10aefdeed40a63293daf112b91a5538cd24fa3a4",
    folder="nanodo",
    mesh="8 data, Auto",
    step="jit__train_step",
    patch=ON_AUTO,
    options={"fsdp": False},
)
VARIANTS = {
    "FSDP": dataclasses.replace(OWN, mesh="8 data, Auto", options={}),
    "DP": OWN,
    "DP, Explicit": dataclasses.replace(
        OWN,
        mesh="8 data, Explicit",
        patch=ON_EXPLICIT,
        setting=EXPLICIT,
        exclude="pos_embed",  # JAX has no rule for table[ids] of what is typed as reduced
    ),
}


def train(steps: int, fsdp: bool = True) -> Trained:
    stand_in("tensorflow_datasets", "sentencepiece", "grain", "grain.python")
    stand_in("clu", "clu.metric_writers", "clu.periodic_actions")
    from nanodo import data, evaluate
    from nanodo import train as trainer
    from nanodo.configs import default

    batches = token_rows(steps, ROWS, LENGTH, VOCABULARY)
    losses: list[Any] = []
    watched = Batches(batches, "train_and_evaluate", lambda seen: losses.extend(_new(seen)))
    data.py_batched_tfds = lambda *, split, **_: watched if split == "train" else ()
    data.get_py_tokenizer = lambda _: Tokenizer()
    evaluate.Evaluator.eval = lambda self, params: {}
    c = default.get_config()
    c.model.update(D=128, H=4, L=LENGTH, N=2, F=512, dtype="float32")
    c.model.fsdp_enabled = fsdp
    c.opt.update(num_train_steps=steps, warmup_steps=5, peak_learning_rate=0.01)
    c.update(batch_size=ROWS, checkpoint=False, workdir=tempfile.mkdtemp())
    c.log_internal_metrics = False
    found = locals_at_the_end(trainer.train_and_evaluate, c)
    return Trained(losses, found["trainer"].state)


def _new(seen: dict[str, Any]) -> list[float]:
    return [float(m["train_loss"]) for m in seen["pending_microbatch_metrics"]]


class Tokenizer:
    """A tokenizer of which the trainer asks the number of ids alone."""

    def GetPieceSize(self) -> int:
        return VOCABULARY
