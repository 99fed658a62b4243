"""kauldron: its train step with a Flax Linen network, on Auto axes ("devices")."""

import dataclasses
from typing import Any

import numpy as np
from clients.client import Change, Client, Trained
from clients.stubs import images, stand_in

ROWS, SIDE, CLASSES = 32, 16, 16

IMPORT = Change("import flax\n", "import dynamiq_jax as dq\nimport flax\n")
GRADIENTS = Change(
    """    grad_fn: GradFn = jax.grad(
        forward_with_loss,
        argnums=0,
        has_aux=True,
        allow_int=True,
    )
""",
    """    words = context_lib.Context(*"same rows same same rows rows sum mean".split())
    grad_fn = dq.value_and_grad(
        lambda p, context, **rest: forward_with_loss(context.replace(params=p), **rest),
        has_aux=True, axis_name="devices", mesh=sharding_lib.DEVICES_MESH, aux=words,
        specs=self.sharding.params, compression=METHOD,
    )
""",
)
CALL = Change(
    "    context_grads, context = grad_fn(\n        context,\n",
    """    (_, context), params_grads = grad_fn(
        context.params, context.replace(params=None, opt_state=None),
""",
)
GRADS = Change("    params_grads = context_grads.params\n", "")
PATCH = (IMPORT, GRADIENTS, CALL, GRADS)


def with_line(old: str, new: str) -> tuple[Change, ...]:
    """The patch, with other options of the gradient."""
    assert old in GRADIENTS.new
    return (IMPORT, Change(GRADIENTS.old, GRADIENTS.new.replace(old, new)), CALL, GRADS)


OWN = Client(
    "kauldron/train/train_step.py", "8 devices, Auto", "jit_step", PATCH, package="kauldron",
    repository="kauldron on PyPI", commit="1.4.2",
)  # fmt: skip
UPDATES = (
    *with_line("compression=", "unreduced=True, compression="),
    Change(
        "    opt_state = self.optimizer.init(",
        "    opt_state = sharded(self.optimizer).init(",
    ),
    Change("jax.named_call(self.optimizer.update)(", "sharded(self.optimizer).update("),
    Change(
        "# MARK: TrainStep\n",
        """def sharded(inner):
  mesh = sharding_lib.DEVICES_MESH
  return dq.optax.sharded(inner, "devices", mesh=mesh, compression=METHOD)

# MARK: TrainStep
""",
    ),
)
VARIANTS = {
    "DP": OWN,
    "sharded updates": dataclasses.replace(OWN, patch=UPDATES),
    "FSDP": dataclasses.replace(
        OWN,
        patch=with_line("self.sharding.params,", "self.sharding.params(state.params),"),
        options={"fsdp": True},
    ),
}


def train(steps: int, fsdp: bool = False) -> Trained:
    stand_in(
        "tensorflow",
        "portpicker",
        "tensorflow_datasets",
        "mediapy",
        "pandas",
        "clu.data.dataset_iterator",
        "clu.metric_writers",
    )
    import jax
    import optax
    from flax import linen as nn
    from kauldron import kd

    class Net(nn.Module):
        image: kd.kontext.Key = "batch.image"

        @nn.compact
        def __call__(self, image):
            x = nn.relu(nn.Dense(512)(image.reshape(*image.shape[:-3], -1)))
            return nn.Dense(CLASSES)(nn.relu(nn.Dense(512)(x)))

    batches = images(steps, ROWS, SIDE, 1, CLASSES)
    split = {} if not fsdp else {"params": kd.sharding.FSDPSharding(min_size_to_shard_mb=0)}
    sharding = kd.sharding.ShardingStrategy(**split)
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.label")
    trainer = kd.train.Trainer(
        train_ds=kd.data.InMemoryPipeline(loader=dict, batch_size=ROWS),
        model=Net(),
        optimizer=optax.adam(optax.linear_schedule(0.0, 0.0001, 5)),
        train_losses={"xentropy": loss},
        sharding=sharding,
        num_train_steps=steps,
    )
    rows = [{"image": x["image"], "label": x["label"][:, None]} for x in batches]
    from etils import etree

    state: Any = trainer.trainstep.init(etree.spec_like(rows[0]))
    losses = []
    for batch in rows:
        batch = kd.sharding.device_put(batch, sharding.batch)
        state, aux = trainer.trainstep.step(state, batch, return_losses=True)
        found = aux.compute().loss_values
        losses.append(float(np.asarray(next(iter(found.values())))))
    return Trained(losses, jax.tree.map(lambda x: x, state), state.params)
