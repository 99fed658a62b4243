"""Processes that tests start side by side, which find each other over loopback."""

import socket
import subprocess


def coordinator() -> str:
    """The address of a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def outputs(commands, env) -> list[tuple[str, str]]:
    """(stdout, stderr) of commands that all end well, within two minutes each."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=env, **pipes) for command in commands]
    try:
        ends = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), ends
    return ends
