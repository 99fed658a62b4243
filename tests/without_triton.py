"""Programs for an interpreter whose JAX has lost Pallas' Triton lowering, and trainings by it.

    python without_triton.py train [BACKEND]
    python without_triton.py lower
    PYTHONPATH=$PWD/tests python -m pytest -p without_triton tests/gpu

The first two print JSON: the backend and the losses of ten steps on the devices here, and the
kernels of programs that are lowered for a Hopper GPU, which this process pretends to have. JAX
keeps Triton if a backend is named. The last one runs tests.
"""

import json
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from cases import over
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import pallas_kernels as pk

N = 4
"""Workers."""
LOST = "jax.experimental.pallas.triton", "jax._src.pallas.triton"


class Lost:
    """Refuses to import Pallas' modules of Triton."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(LOST):
            raise ImportError(f"{name} is lost")


def pytest_configure() -> None:
    """Lets the tests of a process do without Triton."""
    sys.meta_path.insert(0, Lost())


def method(backend: pk.Backend | None = None, **options: Any) -> dq.Compression:
    """Compresses however small a leaf is; two widths, if there is a plan."""
    options = {"widths": (4, 6) if options.get("plan") else None} | options
    own = dq.DynamiQ(backend=backend, **options)
    return dq.Compression(own, min_leaf_size=1, min_bucket_size=1, min_bucket_bytes=0)


def mx_floats(backend: pk.Backend | None = None) -> dq.Compression:
    """As `method`."""
    return dq.Compression(dq.contrib.MXFP8(backend=backend), min_leaf_size=1, min_bucket_size=1)


def loss_fn(params, x):
    """A loss of one hidden layer."""
    found = jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean((found - jnp.sin(x[:, :8])) ** 2)


def start():
    """Parameters, and one batch for each worker."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (64, 96)) / 8}
    params["down"] = jax.random.normal(keys[1], (96, 8)) / 10
    return params, jax.random.normal(keys[2], (N, 16, 64))


def losses_of_psum(compression: dq.Compression) -> list[float]:
    """Ten steps of workers under `jax.vmap`: on one device."""
    params, batches = start()

    @jax.jit
    def step(params, key):
        def worker(x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return loss, dq.psum(grads, "data", key=key, compression=compression)

        losses, sums = jax.vmap(worker, axis_name="data")(batches)
        return jax.tree.map(lambda p, g: p - 0.5 / N * g[0], params, sums), losses.mean()

    found = []
    for i in range(10):
        params, loss = step(params, jax.random.key(i))
        found.append(float(loss))
    return found


def sharded_step(optimizer, params, mesh):
    """The state of sharded updates, its specs, and a worker's (params, state, x) -> the same."""
    state = dq.optax.init(optimizer, params, mesh)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(jax.lax.pcast(params, "data", to="varying"), x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    return state, dq.optax.state_specs(state), step


def losses_of_sharded(compression: dq.Compression, n: int) -> list[float]:
    """Ten steps with AdamW's state on owners, on n devices."""
    params, batches = start()
    mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    batches = jax.device_put(batches.reshape(-1, 64), jax.NamedSharding(mesh, P("data")))
    optimizer = dq.optax.sharded(optax.adamw(1e-2), "data", compression=compression)
    state, specs, step = sharded_step(optimizer, params, mesh)
    maps = {"mesh": mesh, "in_specs": (P(), specs, P("data")), "out_specs": (P(), specs, P())}
    step, found = jax.jit(jax.shard_map(step, **maps)), []
    for _ in range(10):
        params, state, loss = step(params, state, batches)
        found.append(float(loss))
    return found


def trained(backend: pk.Backend | None, n: int) -> dict[str, list[float]]:
    """Losses by way: sums without and with a plan, and sharded updates on n devices, if several."""
    ways = {"psum": losses_of_psum(method(backend, plan=False))}
    ways["plan"] = losses_of_psum(method(backend, plan=True))
    ways["MX floats"] = losses_of_psum(mx_floats(backend))
    if n > 1:
        ways["sharded"] = losses_of_sharded(method(backend, plan=False), n)
    return ways


def pretend_hopper() -> None:
    """Makes JAX tell of a GPU that is not there."""
    gpu: Any = SimpleNamespace(device_kind="NVIDIA H100", platform="gpu", compute_capability="9.0")
    devices: Any = jax.devices
    jax.devices = lambda *kind: devices(*kind) if kind else [gpu]
    jax.default_backend = lambda: "gpu"


def lowered() -> dict[str, Any]:
    """The kernels of programs that are lowered for a Hopper GPU, by program."""
    from kernel_runs import lowered_for_cuda

    params, _ = start()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    x, compression = jax.ShapeDtypeStruct((N, 2**16), jnp.float32), method(plan=True)
    options: Any = {"compression": compression, "tiled": True}
    optimizer = dq.optax.sharded(optax.adamw(1e-2), "data", compression=compression)
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:N])
    state, specs, step = sharded_step(optimizer, params, mesh)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    batch = jax.ShapeDtypeStruct((16 * N, 64), jnp.float32)
    pretend_hopper()
    route, data = dq.Direct(transport="collectives"), P("data")

    def summed(x, compression=compression):
        return dq.psum(x[0], "data", compression=over(route, compression))

    def by_permutes(x):
        route = dq.Direct(transport="permutes")
        return dq.psum(x[0], "data", compression=over(route, compression))

    def there_and_back(x):
        return dq.all_gather(dq.psum_scatter(x[0], "data", **options), "data", **options)[None]

    programs = {
        "psum": (summed, data, P(), (x,)),
        "psum by permutes": (by_permutes, data, P(), (x,)),
        "psum_scatter": (lambda x: dq.psum_scatter(x[0], "data", **options), data, data, (x,)),
        "all_gather": (lambda x: dq.all_gather(x[0], "data", **options), data, data, (x,)),
        "scattered, gathered": (there_and_back, data, data, (x,)),
        "all_to_all": (lambda x: dq.all_to_all(x[0], "data", 0, 0, **options), data, data, (x,)),
        "sharded": (step, (P(), specs, data), (P(), specs, P()), (shapes, state, batch)),
        "MX floats": (lambda x: summed(x, mx_floats()), data, P(), (x,)),
    }
    found: dict[str, Any] = {"explained": str(dq.explain(shapes, N, verbose=False))}
    for name, (run, in_specs, out_specs, args) in programs.items():
        mapped = jax.shard_map(run, in_specs=in_specs, out_specs=out_specs)
        text = lowered_for_cuda(mapped, *args, mesh=((N,), ("data",)))
        calls = re.findall(r"custom_call @([\w.$]+)", text)
        found[name] = sorted({*calls, *re.findall(r"dynamiq_[a-z]\w*", text)})
    return found


def main(task: str, named: Any = None) -> None:
    """Prints what the module says."""
    if named is None:
        sys.meta_path.insert(0, Lost())
    if task == "train":
        trained_by = pk.resolve_backend(named)
        found = {"kernels": trained_by, **trained(named, min(jax.device_count(), N))}
    else:
        found = lowered()
    print(json.dumps(found))
    loaded = [name for name in sys.modules if name.startswith((*LOST, "pallas_kernels.triton"))]
    assert named or not loaded, loaded


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    main(*sys.argv[1:])
