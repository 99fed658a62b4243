"""SIGINT while the command starts ends it at once; this module must be imported before JAX.

Python makes an exception of SIGINT. Code that runs while JAX is imported may ignore exceptions:
then a run would begin that its user has ended.
"""

import signal
import sys
from pathlib import Path


def of_command(argv0: str, words: list[str]) -> bool:
    """Whether this process is the `dynamiq-jax` command, and not a program that imports us.

    Args:
      argv0: ``sys.argv[0]``, which is "-m" while Python imports the package of ``python -m``.
      words: ``sys.orig_argv``.
    """
    if argv0 != "-m":
        return Path(argv0).stem == "dynamiq-jax"
    return words[words.index("-m") + 1 :][:1] == ["dynamiq_jax"]


def once_started() -> None:
    """Lets SIGINT raise again, after all imports.

    `run` has a handler of its own instead: what parses its options might lose an exception, too.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if of_command(sys.argv[0] if sys.argv else "", sys.orig_argv):
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
