"""How tests compile: with the least effort, since compilation takes most of their time.

Results have the same bits as with the optimisations that users have: `test_psum` and `test_golden`
compare them.
"""

import importlib.metadata

LEAST: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
}
SOME: dict[str, int | bool] = {"xla_backend_optimization_level": 1}
"""`compiler_options` of `jax.jit` for programs that run hundreds of times."""
AS_USERS: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
"""`compiler_options` for programs that must be optimised as users have them."""
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    LEAST["xla_cpu_use_fusion_emitters"] = False  # newer XLA refuses it
    AS_USERS["xla_cpu_use_fusion_emitters"] = True

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in LEAST.items())
"""`LEAST` for the environment variable XLA_FLAGS."""
