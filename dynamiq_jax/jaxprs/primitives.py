"""The names of JAX's primitives, by what they do. No other file lists them.

`core.compat.name_of` gives an equation's name, which differs between versions of JAX.
"""

JITS = frozenset("jit pjit closed_call core_call".split())
"""Calls that only run the program in their parameters, once."""

CUSTOM = frozenset("custom_jvp_call custom_vjp_call".split())
"""Calls with a derivative of their own, which run the first program in their parameters. Where
nothing is differentiated any more, they are like `JITS`."""

CHECKPOINTS = frozenset("checkpoint remat2".split())
"""Primitives of `jax.checkpoint`: calls whose derivative runs the program again."""

CALLS = JITS | CUSTOM | CHECKPOINTS
"""Primitives that run one program once, with their operands as its inputs."""

MAP = "shard_map"
"""The primitive of `jax.shard_map`; its operands are the inputs of its program."""

CONTROL = frozenset((*"scan while cond".split(), MAP))
"""Loops, branches and maps."""

OWN_DERIVATIVE = ("custom_vjp", MAP, "pure_callback", "io_callback")
"""How primitives begin whose backward pass need not be linear, or may not be vmapped."""

CASTS = frozenset("pcast pvary".split())
"""Primitives that only make a type varying."""

SAME = CASTS | frozenset("copy copy_p optimization_barrier assume_invarying typed_as_equal".split())
"""Primitives whose result number i has the value of operand number i."""

VIEWS = frozenset("reshape slice squeeze".split())
"""Primitives that compute nothing. XLA joins them with what takes their results."""

FILLS = CASTS | {"broadcast_in_dim"}
"""Primitives that make an array of one number, if they take no other array."""

RESHAPES = frozenset("broadcast_in_dim reshape squeeze transpose slice rev".split())
"""Primitives that make an array of equal entries of another one."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "cbrt ceil clamp clz complex conj convert_element_type copy cos cosh "
    "digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag "
    "integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg "
    "nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_"
    "beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin "
    "sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
"""Primitives whose results have at every place what follows from the operands at this place."""

KEPT = frozenset("bitcast_convert_type optimization_barrier".split())
"""Primitives that change no order of entries, though they are not in `ELEMENTWISE`."""

PRODUCTS = frozenset(
    "dot_general cholesky eig eigh householder_product lu qr geqrf svd triangular_solve".split()
)
"""Primitives of whole matrices."""

REDUCTIONS = ("reduce_", "arg", "dot_general")
"""How primitives begin that make one entry of many."""

TYPED = frozenset(
    "broadcast_in_dim convert_element_type copy dot_general dynamic_slice expand_dims gather "
    "reshape slice squeeze transpose".split()
)
"""Primitives for which JAX may have rules for typed values, forwards and backwards."""

ON_AUTO = frozenset("conv_general_dilated dot_general gather".split())
"""Primitives whose gradients are terms on Auto axes too, if data axes split the result."""

SUMS = frozenset("psum pmax pmin".split())
"""All-reduces: their results are the same on all workers."""

_PARTS = frozenset("all_gather all_to_all reduce_scatter ppermute ragged_all_to_all".split())

COLLECTIVES = SUMS | _PARTS
"""Collectives by the names that `collective_of` gives them."""


def collective_of(name: str) -> str | None:
    """The collective that a primitive is, else `None`: JAX has variants for types of results.

    A collective that is not in `COLLECTIVES` counts as computation.
    """
    name = name.removesuffix("_invariant").removesuffix("_reduced").removeprefix("unreduced_")
    return name if name in COLLECTIVES else None


MARK = "name"
"""The identity of `jax.ad_checkpoint.checkpoint_name`."""
