"""Who raised an error while a user's function was traced: JAX, or the function itself."""

import dis

REFUSALS = TypeError, ValueError, AssertionError, NotImplementedError
"""The errors by which JAX refuses an operation for the types of its operands."""


def raised_by_jax(error: BaseException) -> bool:
    """Whether JAX raised an error, and not a ``raise`` or an ``assert`` in other code.

    JAX takes its own frames out of tracebacks. Then the innermost frame is the one that called JAX,
    and its last instruction is no ``raise``.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    package, _, _ = str(place.tb_frame.f_globals.get("__name__")).partition(".")
    if package == "jax":
        return True
    return place.tb_frame.f_code.co_code[place.tb_lasti] != dis.opmap["RAISE_VARARGS"]
