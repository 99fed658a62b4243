"""Brax: proximal policy optimization by its own `jax.pmap`, in a toy environment of its own."""

from typing import Any

from clients.client import Change, Client, Trained
from clients.stubs import Enough, locals_at_the_end

FILE = "brax/training/gradients.py"
VARIANTS = {
    "PPO": Client(
        repository="google/brax, 0.14.2 of PyPI; the path is the folder of its package",
        commit="",
        folder="brax",
        mesh="8 i, pmap",
        step="jit__fun",
        patch=(
            Change(FILE, "import jax\n", "import jax\nimport dynamiq_jax as dq\n"),
            Change(
                FILE,
                "return value, jax.lax.pmean(grad, axis_name=pmap_axis_name)",
                "return value, dq.pmean(grad, axis_name=pmap_axis_name, method=METHOD)",
            ),
        ),
    )
}


def train(steps: int) -> Trained:
    """Every epoch is one gradient."""
    import jax
    import numpy as np

    def replicated(tree: Any, devices: Any) -> Any:
        sharding = jax.NamedSharding(jax.sharding.Mesh(devices, "i"), jax.P("i"))
        copies = jax.tree.map(lambda x: np.stack([x] * len(devices)), tree)
        return jax.device_put(copies, sharding)

    vars(jax)["device_put_replicated"] = replicated  # JAX 0.10 does not have it
    from brax.envs.fast import Fast
    from brax.training.agents.ppo import train as trainer

    losses: list[float] = []

    def watch(_: int, metrics: dict[str, Any]) -> None:
        losses.append(float(metrics["training/total_loss"]))
        if len(losses) == steps:
            raise Enough

    options = {"num_envs": 64, "batch_size": 64, "unroll_length": 5, "episode_length": 64}
    options |= {"num_minibatches": 1, "num_updates_per_batch": 1, "run_evals": False}
    options |= {"num_timesteps": steps * 64 * 5, "num_evals": steps + 1, "learning_rate": 1e-3}
    found = locals_at_the_end(trainer.train, Fast(), progress_fn=watch, **options)
    state = found["training_state"]
    return Trained(losses, jax.tree.map(_joined, state))


def _joined(x: Any) -> Any:
    """The copies of a leaf, which lie along its leading axis, as one array on all devices."""
    import jax

    shape = x.shape[1:]
    mesh = jax.sharding.Mesh([shard.device for shard in x.addressable_shards], "i")
    parts = [shard.data.reshape(shape) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, jax.NamedSharding(mesh, jax.P()), parts)
