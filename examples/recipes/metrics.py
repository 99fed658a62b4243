"""Writes the loss and the metrics of each step to a CSV file.

    python examples/recipes/metrics.py

prints

    loss 0.346, 12 rows in metrics.csv
"""

import csv

import jax
from start import batches, compression, loss_fn, mesh, params, sgd

import dynamiq_jax as dq
from dynamiq_jax.metrics import scalars

f = dq.value_and_grad(loss_fn, mesh=mesh, axis_name="data", compression=compression, metrics=True)


@jax.jit
def step(params, batch):
    loss, reduced = f(params, batch)
    return sgd(params, reduced.tree, 0.1), loss, reduced.metrics


with open("metrics.csv", "w", newline="") as file:
    log = csv.writer(file)
    for number, batch in enumerate(batches):
        params, loss, metrics = step(params, batch)
        row = {"step": number, "loss": float(loss), **scalars(metrics)}
        if number == 0:
            log.writerow(row)
        log.writerow(row.values())
print(f"loss {loss:.3f}, {number + 1} rows in metrics.csv")
