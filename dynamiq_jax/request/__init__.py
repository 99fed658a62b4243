"""The former name of `dynamiq_jax.compression`. It warns, and goes with the next version."""

import sys
import warnings

from dynamiq_jax.compression import compression, explanation

for _name, _module in {"compression": compression, "explanation": explanation}.items():
    sys.modules[f"{__name__}.{_name}"] = _module
warnings.warn(
    "dynamiq_jax.request is now dynamiq_jax.compression; this name goes with the next version",
    DeprecationWarning,
    stacklevel=2,
)
