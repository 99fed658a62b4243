"""`Policy`: how all that a program sends travels, for every function that takes ``compression``.

A function reads the fields of a policy that name what it sends; `Policy` has the table.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from dynamiq_jax.compression.compression import ByPath, Compression, check_method, chooses
from dynamiq_jax.core.checks import Options
from dynamiq_jax.methods import Method

Field = Literal["gradients", "parameters", "activations", "cotangents"]
"""A field of `Policy`: it names what travels."""

AnyCompression = Compression | Method | ByPath
"""How one of these travels: a `Compression`, a method, or a function that chooses one by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Options):
    """How gradients, parameters, activations and cotangents travel: one object for all functions.

        policy = dq.Policy(gradients=dq.DynamiQ(bits=5), parameters=dq.DynamiQ(bits=8))
        weights = dq.fsdp(shards, "data", specs=P("data"), compression=policy)

    Every function of this library takes a policy as ``compression``, and reads from it:

    | functions | fields |
    |---|---|
    | `psum`, `pmean`, `reduce`, `psum_scatter`, `optax.all_reduce` | gradients |
    | `all_gather`, `optax.pack` | parameters |
    | `value_and_grad`, `fsdp`, `overlapped`, `optax.sharded` | gradients and parameters |
    | `all_to_all` | activations and cotangents |

    What is passed without a policy, such as a bare method, is the first of the function's fields.
    Each field is a `Compression`, a method, or a function of path and leaf that chooses a method.
    `None` means the function's default, which its documentation states. If ``gradients`` or
    ``activations`` travel in `BF16` or `F32`, so does the function's other field by default: exact
    gradients alone make a function exact.

    Attributes:
      gradients: all sums and scatters.
      parameters: gathers of shards (FSDP), and parameters' differences (sharded updates). Beside
        gradients, a bare method has the limits of ``gradients``, such as ``min_bucket_bytes``, and
        leaves out what ``gradients`` excludes.
      activations: blocks of `all_to_all`, such as tokens for experts.
      cotangents: blocks of the backward pass of `all_to_all`. Leaves whose activations share a
        bucket need the same method. It applies to leaves that are compressed in ``activations``.
    """

    gradients: AnyCompression | None = None
    parameters: AnyCompression | None = None
    activations: AnyCompression | None = None
    cotangents: AnyCompression | None = None

    def __post_init__(self):
        """Checks every field; errors name the value and what to pass."""
        for name in self.__slots__:
            _check(getattr(self, name), name)


AnyPolicy = Policy | AnyCompression
"""Values of ``compression``; what is not a `Policy` is the first field that the function reads."""


def as_compression(
    given: AnyPolicy | None, field: Field = "gradients", default: Method | None = None
) -> Compression:
    """The `Compression` that ``compression`` of a function says for its first field.

    Without a method it has the ``default``, whatever else it says.
    """
    told = getattr(given, field) if isinstance(given, Policy) else given
    if isinstance(told, Compression):
        unsaid = default is not None and told.method is None
        return replace(told, method=default) if unsaid else told
    _check(told, "compression")
    return Compression(default if told is None else told)


def _check(value: Any, name: str) -> None:
    if value is not None and not isinstance(value, Compression) and not chooses(value):
        check_method(value, name)


# --- Former keywords ------------------------------------------------------------------------------


def as_topology(value: Any, compression: Any) -> dict[str, Any]:
    """``topology=`` in the `Compression` of the first field."""
    if value is None:
        return {}
    own = as_compression(compression)
    if own.topology not in (None, value):
        raise ValueError(
            f"topology={value!r}, and compression has topology={own.topology!r}; pass one of them"
        )
    own = replace(own, topology=value)
    is_policy = isinstance(compression, Policy)
    return {"compression": replace(compression, gradients=own) if is_policy else own}


def as_parameters(value: Any, compression: Any) -> dict[str, Any]:
    """``gather=`` and ``differences=`` as `Policy.parameters`."""
    if value is None:
        return {}
    policy = compression if isinstance(compression, Policy) else Policy(gradients=compression)
    return {"compression": replace(policy, parameters=value)}


def as_cotangents(value: Any, compression: Any) -> dict[str, Any]:
    """``backward=`` as `Policy.cotangents`; `None` meant the method of ``activations``."""
    policy = compression if isinstance(compression, Policy) else Policy(activations=compression)
    value = policy.activations if value is None else value
    if value is None or value == "auto":
        return {}
    return {"compression": replace(policy, cotangents=value)}
