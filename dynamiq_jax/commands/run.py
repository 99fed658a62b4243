"""`dynamiq-jax run`: starts a training script on several hosts, and again when a host dies."""

import shutil
import signal
from pathlib import Path
from typing import Annotated

import typer

from dynamiq_jax.commands.options import checked, checked_file
from dynamiq_jax.hosts import notice
from dynamiq_jax.hosts.addresses import file_of, parse_hosts
from dynamiq_jax.hosts.supervisor import Settings, Supervisor

Seconds = typer.Option(min=0.1)


def command(
    command: Annotated[
        list[str],
        typer.Argument(
            help="After --. {coordinator}, {processes} and {process_id} in it are filled in."
        ),
    ],
    hosts: Annotated[
        str,
        typer.Option(
            help="NAME:PORT of every host's supervisor, by commas; @FILE: one in each line."
        ),
    ],
    host_id: Annotated[int, typer.Option(min=0, help="Which of the hosts this is, from 0.")],
    min_hosts: Annotated[
        int | None, typer.Option(min=1, help="Fewest hosts that train (default: a majority).")
    ] = None,
    silence: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a host is lost.")
    ] = Settings.silence,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for missing hosts before the others start.")
    ] = Settings.wait,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for --min-hosts hosts before giving up.")
    ] = Settings.patience,
    stall: Annotated[
        float, typer.Option(help="Seconds without a step after which processes are restarted.")
    ] = Settings.stall,
    restarts: Annotated[
        int, typer.Option(min=0, help="Failures within a minute each, in a row, before giving up.")
    ] = Settings.restarts,
    ready: Annotated[
        str,
        typer.Option(
            help="Modules, by commas: a process that has imported them waits for the next start."
        ),
    ] = "",
    events: Annotated[
        Path | None, typer.Option(help="Append what happens to this file, as lines of JSON.")
    ] = None,
) -> None:
    """Run a training script on several hosts, and start it again when a host dies.

    Run it on every host with the same options but --host-id. When one process ends, all others end
    within seconds, and the last line of each names the host and the cause. Then the processes start
    again on the hosts that are left; the script goes on from its newest checkpoint. A host that
    comes back is taken in.
    """
    addresses = checked("--hosts", parse_hosts, hosts)
    least = min_hosts or len(addresses) // 2 + 1  # two halves of a cut network never both train
    settings = checked(
        "--hosts --host-id --min-hosts --silence --wait --patience --stall --ready", Settings,
        hosts=addresses, file=file_of(hosts), host=host_id, command=command, least=least,
        silence=silence, wait=wait, patience=patience, stall=stall, restarts=restarts,
        events=events, ready=tuple(filter(None, ready.split(","))),
    )  # fmt: skip
    if shutil.which(command[0]) is None:
        raise typer.BadParameter(
            f"{command[0]!r} is no program of this host: pass one after --, as python3 train.py",
            param_hint="COMMAND",
        )
    if events is not None:
        with checked_file(events, "--events"):
            events.open("a").close()
    supervisor = Supervisor(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.leave)
    checked(notice.VARIABLE, notice.watch, supervisor.notified, supervisor.say)
    raise typer.Exit(supervisor.run())
