"""The `dynamiq-jax` command."""

import os
import sys
from typing import Annotated, Any

import jax
import typer
from typer.core import TyperGroup

from dynamiq_jax import __version__
from dynamiq_jax.commands import advise, error, explain, run, simulate
from dynamiq_jax.commands.bench import all_reduce
from dynamiq_jax.commands.options import out_of_memory, printable
from dynamiq_jax.commands.report import command as report
from dynamiq_jax.core.interrupts import once_started

CPU_DEVICES = 8
"""Workers that a machine without a GPU stands in for."""

_CLICK_EXCEPTION: Any = typer.BadParameter.__mro__[2]
"""The exception with which click refuses; typer has click as a dependency or as a copy."""


class _Commands(TyperGroup):
    """Reports errors of users, of the library and of the system in a line, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except typer.Abort:
            code, said = 1, "aborted"
        except _CLICK_EXCEPTION as error:
            code, said = error.exit_code, error.format_message()
        except (ValueError, NotImplementedError, OverflowError, MemoryError, OSError) as error:
            code, said = 2, str(error) or type(error).__name__
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            code, said = 2, f"{error}; pass smaller sizes, fewer workers or fewer super-groups"
        else:
            sys.exit(code if isinstance(code, int) else 0)
        if said:
            typer.echo(f"Error: {printable(said)}", err=True)
        sys.exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Compressed multi-hop all-reduce for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("advise")(advise.command)
app.command("explain")(explain.command)
app.command("error")(error.command)
app.command("simulate")(simulate.command)
app.command("report")(report.command)
app.command("run")(run.command)
bench = typer.Typer(help="Measure speed on the devices of this machine.", no_args_is_help=True)
bench.command("all-reduce")(all_reduce.command)
app.add_typer(bench, name="bench")


def _version(given: bool) -> None:
    if given:
        typer.echo(f"dynamiq_jax {__version__}, jax {jax.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Lets XLA split the CPU into eight devices; read when JAX first looks for devices."""
    # The flag concerns the CPU platform alone, so that no look for a GPU is needed beforehand.
    flags = os.environ.get("XLA_FLAGS", "")
    if context.invoked_subcommand == "run":
        return  # its processes have devices of their own, and SIGINT ends it until it has a handler
    once_started()
    own_count = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in flags
    if not own_count:
        flag = f"--xla_force_host_platform_device_count={CPU_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
