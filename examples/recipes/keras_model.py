"""A Keras model: its train_step with compressed gradients, on Explicit axes.

    python examples/recipes/keras_model.py

prints

    loss 0.370
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec as P
from start import batches, compression

import dynamiq_jax as dq


class DataParallel(keras.Sequential):
    def train_step(self, state, data):
        trainable, fixed, of_optimizer, of_metrics = state
        data = jax.reshard(data, P("data"))  # 1: new
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        grad_fn = dq.value_and_grad(  # 2: was jax.value_and_grad(..., has_aux=True)
            self.compute_loss_and_updates, has_aux=True, axis_name="data", compression=compression
        )
        (_, aux), grads = grad_fn(
            trainable, fixed, of_metrics, x, y, weight,
            training=True, optimizer_variables=of_optimizer,
        )  # fmt: skip
        loss, out, fixed, of_metrics = aux
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
        logs, of_metrics = self._update_metrics_variables(of_metrics, loss, x, y, out, weight)
        return logs, (trainable, fixed, of_optimizer, of_metrics)


class Dropout(keras.layers.Dropout):  # 3: for keras.layers.Dropout
    def call(self, x, training=False):
        kept = super().call(jnp.ones(x.shape, x.dtype), training=training)
        return x * jax.reshard(kept, jax.typeof(x).sharding)


keras.utils.set_random_seed(0)
with jax.set_mesh(dq.make_mesh((-1,), ("data",))):  # 4: new, around the model and fit
    layers = keras.layers
    dense, norm = layers.Dense(1024), layers.BatchNormalization()
    model = DataParallel([dense, norm, layers.ReLU(), Dropout(0.1), layers.Dense(8)])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse", metrics=["mae"])
    rows = {k: np.concatenate([batch[k] for batch in batches]) for k in ("x", "y")}
    history = model.fit(rows["x"], rows["y"], batch_size=64, epochs=2, verbose=0).history
loss = history["loss"][-1]
print(f"loss {loss:.3f}")
