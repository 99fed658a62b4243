"""Hosts on one machine: network namespaces with a shaped link each, and a command in all of them.

    python benchmarks/hosts.py --hosts 2 --rate 25gbit --gpus 1 -- \
      python benchmarks/step_time.py --model 350m

A host has a network stack, a hostname (``host0``, ...), an ``/etc/hosts`` and a NIC, ``eth0``. Its
rate holds in both directions. Two hosts are joined by a veth pair, more by a bridge in a namespace
of its own, so that no packet leaves the namespaces. Every byte goes through the kernel's TCP. That
is the bound of a rate which is left out.

The command finds the other hosts by ``%i`` (this host's number) or by three variables:

    jax.distributed.initialize(
        os.environ["COORDINATOR"], int(os.environ["NUM_HOSTS"]), int(os.environ["HOST_ID"])
    )

``--devices`` gives each host virtual CPU devices, ``--gpus`` GPUs of its own: NCCL then takes
sockets over ``eth0`` (``NCCL_SOCKET_NTHREADS``, 1, and ``NCCL_NSOCKS_PERTHREAD``, 4, may be set).

``--tenant 50%`` gives half of every link to another job, as far as TCP lets it have that: each host
sends to the next one by `STREAMS` connections, which together are bounded by that share of
``--rate``. What arrived is printed at the end.

The output of host 0 is printed, and all outputs land in ``--logs``. If a host fails, the others get
`GRACE` seconds to say why. No process, namespace or file outlives the run, even one that is killed.

It takes root, iproute2 and util-linux. Where iproute2 is not installed, ``PATH`` and
``LD_LIBRARY_PATH`` may lead to an unpacked one.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from dynamiq_jax.compression.ways import bytes_per_second

GRACE = 30
"""Seconds that hosts may go on after one of them has failed."""
NIC, PORT = "eth0", 29400
TENANT_PORT, STREAMS = 29399, 4
"""The second job's port, and how many connections it has from each host."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables that gRPC would follow; no proxy can be reached from a host."""

GUARD = """
trap '' HUP INT TERM
cat >/dev/null
for name; do
  for _ in $(seq 100); do
    pids=$(ip netns pids "$name" 2>/dev/null) && [ -n "$pids" ] || break
    kill -9 $pids 2>/dev/null
    sleep 0.05
  done
  ip netns delete "$name" 2>/dev/null
  rm -rf "/etc/netns/$name"
done
rmdir /etc/netns 2>/dev/null
true
"""
"""Waits until its input ends, which also the death of the other end does, then removes all."""

TENANT = """
import socket, sys, threading, time
own, to, port, streams, rate, report = sys.argv[1:]
PACING = 47  # SO_MAX_PACING_RATE, bytes per second: the kernel holds packets back
port, streams, rate = int(port), int(streams), int(float(rate) / int(streams))
arrived = [0] * streams
server = socket.create_server((own, port))

def receive(i):
    connection, _ = server.accept()
    room = bytearray(2**20)
    while got := connection.recv_into(room):
        arrived[i] += got

def send():
    while True:
        try:
            connection = socket.create_connection((to, port), timeout=1)
            break
        except OSError:
            time.sleep(0.05)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, PACING, rate)
    chunk = bytes(min(2**20, max(2**12, rate // 100)))
    while True:
        connection.sendall(chunk)

for i in range(streams):
    threading.Thread(target=receive, args=(i,), daemon=True).start()
    threading.Thread(target=send, daemon=True).start()
while not sum(arrived):
    time.sleep(0.01)
first, start = sum(arrived), time.monotonic()
while True:
    time.sleep(0.2)
    with open(report, "w") as file:
        file.write(f"{sum(arrived) - first} {time.monotonic() - start}")
"""
"""The second job of a host: it sends to one host and receives from another one."""


class Unavailable(RuntimeError):
    """This machine cannot have hosts; the text says why, in one sentence."""


def sh(*command: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Raises:
      RuntimeError: with the command and what it said, if it fails.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done


def join_hosts() -> None:
    """Waits for the processes that the environment names, if it does, as `Hosts` does."""
    if "COORDINATOR" in os.environ:
        numbers = (int(os.environ[name]) for name in ("NUM_HOSTS", "HOST_ID"))
        jax.distributed.initialize(os.environ["COORDINATOR"], *numbers)


class Hosts:
    """``n`` hosts, from the start of a ``with`` block to its end.

    Args:
      n: the number of hosts, from 2 to 250.
      rate: of every host's NIC in each direction, as 25gbit or 25Gb/s; `None`: TCP's own.
      devices: virtual CPU devices of each host.
      gpus: GPUs of each host.

    Raises:
      ValueError: an argument is not understood.
      Unavailable: this machine cannot have hosts.
    """

    def __init__(
        self,
        n: int,
        *,
        rate: str | None = None,
        devices: int | None = None,
        gpus: int | None = None,
    ) -> None:
        if not 2 <= n <= 250:
            raise ValueError(f"hosts={n}: give 2 to 250")
        if devices and gpus:
            raise ValueError(f"devices={devices} and gpus={gpus}: give one of them")
        self.n, self.devices, self.gpus, self.rate = n, devices, gpus, rate
        self.bytes_per_second = bytes_per_second(rate) if rate else None
        run = f"dq{secrets.token_hex(3)}"
        self.names = [f"{run}-{i}" for i in range(n)]
        self.switch = f"{run}-switch"
        self.coordinator = f"{self.address(0)}:{PORT}"
        self._started: list[subprocess.Popen[bytes]] = []

    def address(self, i: int) -> str:
        """The IPv4 address of a host."""
        return f"10.7.0.{i + 1}"

    def __enter__(self) -> "Hosts":
        check_machine()
        guard = ["sh", "-c", GUARD, "sh", *self.names, self.switch]
        self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes of all hosts, then removes the hosts."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        for process in self._started:
            process.wait()

    def _build(self) -> None:
        for name in self.names:
            sh("ip", "netns", "add", name)
        ends = [(name, NIC) for name in self.names]
        if self.n == 2:
            a, b = self.names
            sh("ip", "link", "add", NIC, "netns", a, "type", "veth", "peer", NIC, "netns", b)
        else:
            ends += self._add_switch()
        lines = [f"{self.address(i)} host{i}\n" for i in range(self.n)]
        for i, name in enumerate(self.names):
            sh("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", NIC)
            sh("ip", "-n", name, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        for name, device in ends:
            sh("ip", "-n", name, "link", "set", device, "mtu", 9000, "up")
            self._shape(name, device)

    def _add_switch(self) -> list[tuple[str, str]]:
        """Joins all hosts in one more namespace; returns that one's ends of the links."""
        sh("ip", "netns", "add", self.switch)
        sh("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            veth = ("type", "veth", "peer", f"port{i}", "netns", self.switch)
            sh("ip", "link", "add", NIC, "netns", name, *veth)
            sh("ip", "-n", self.switch, "link", "set", f"port{i}", "master", "bridge")
        return [(self.switch, f"port{i}") for i in range(self.n)]

    def _shape(self, name: str, device: str) -> None:
        """Sets the rate at which a device sends."""
        if per_second := self.bytes_per_second:
            queue = max(2**18, int(0.05 * per_second))  # a shorter one loses packets
            # Hosts send at the rate. What several send to one at a time may come in bursts.
            burst = max(2**14, int(0.001 * per_second)) if device == NIC else queue
            bits = f"{round(8 * per_second)}bit"  # as `tc` has it
            bucket = ("rate", bits, "burst", f"{burst}b", "limit", f"{queue + burst}b")
            sh("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *bucket)

    def environment(self, i: int) -> dict[str, str]:
        """The variables of host i."""
        env = {name: text for name, text in os.environ.items() if name.lower() not in PROXIES}
        env |= {"HOST_ID": str(i), "NUM_HOSTS": str(self.n), "COORDINATOR": self.coordinator}
        flags = [env.get("XLA_FLAGS", "")]
        if self.devices:
            env["JAX_PLATFORMS"] = "cpu"
            flags.append(f"--xla_force_host_platform_device_count={self.devices}")
        if self.gpus:
            all_gpus = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
            own = range(i * self.gpus, (i + 1) * self.gpus)
            if all_gpus != [""] and own.stop > len(all_gpus):
                wanted, held = self.n * self.gpus, len(all_gpus)
                raise ValueError(f"{wanted} GPUs, but CUDA_VISIBLE_DEVICES lists {held}")
            visible = own if all_gpus == [""] else [all_gpus[gpu] for gpu in own]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
            # Without the first, NCCL finds one machine, and takes NVLink.
            env |= {"NCCL_HOSTID": f"host{i}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": NIC}
            # Without it JAX finds one machine, and the library takes its links for NVLink.
            env["JAX_PARTITION_INDEX"] = str(i)
            env.setdefault("NCCL_SOCKET_NTHREADS", "1")
            env.setdefault("NCCL_NSOCKS_PERTHREAD", "4")
            # Processes that tune kernels apart compile programs whose collectives differ in order:
            # NCCL then ends with "message truncated", or hangs. So one compiles for all, and alone.
            flags.append("--xla_gpu_shard_autotuning=false")
            env.setdefault("JAX_SHARE_BINARY_BETWEEN_HOSTS", "1")
            # JAX names a program by its text, which has a pointer where cuDNN's attention is split.
            # A host whose name differs waits for a program that nobody sends.
            env.setdefault("JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY", "1")
        env["XLA_FLAGS"] = " ".join(flags).strip()
        return env

    def start(
        self,
        i: int,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a command on host i.

        Args:
          i: the host.
          command: the words of the command, without a shell; ``%i`` in them becomes ``i``.
          env: variables besides those of `environment`.
          log: a file for both outputs; `None`: they go where this process's do.

        Returns:
          The command's own process.
        """
        named = f'echo host{i} >/proc/sys/kernel/hostname && exec "$@"'
        enter = ["ip", "netns", "exec", self.names[i], "unshare", "--uts", "sh", "-c", named, "sh"]
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(log.open("wb")) if log else None
            process = subprocess.Popen(
                [*enter, *(word.replace("%i", str(i)) for word in command)],
                env=self.environment(i) | (env or {}), stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT if out else None, start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def share(self, part: float, logs: Path) -> list[Path]:
        """Starts a second job on all hosts, which lasts as long as they do.

        Args:
          part: its share of every link in each direction, from 0 to 1.
          logs: a folder, which gets a file of the bytes that each host received, and the seconds.

        Returns:
          The files, for `received`.

        Raises:
          ValueError: the hosts have no rate, or ``part`` is not between 0 and 1.
        """
        if self.bytes_per_second is None:
            raise ValueError("a tenant has a share of the rate, and the hosts have none: give rate")
        if not 0 < part < 1:
            raise ValueError(f"the tenant's share is {part:.0%} of a link: give 1% to 99%")
        logs.mkdir(parents=True, exist_ok=True)
        files = [logs / f"tenant{i}.txt" for i in range(self.n)]
        for i, file in enumerate(files):
            file.unlink(missing_ok=True)
            own, to = self.address(i), self.address((i + 1) % self.n)
            words = own, to, TENANT_PORT, STREAMS, part * self.bytes_per_second, file.absolute()
            self.start(i, [sys.executable, "-c", TENANT, *map(str, words)])
        return files

    def kill(self, i: int) -> None:
        """Ends all processes of host i at once."""
        for pid in sh("ip", "netns", "pids", self.names[i]).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def cut(self, i: int) -> None:
        """Takes host i off the network; its processes do not learn of it."""
        sh("ip", "-n", self.names[i], "link", "set", NIC, "down")

    def drop(self, i: int) -> None:
        """Loses all that host i sends to others; what they send to it arrives."""
        for half in ("10.7.0.0/25", "10.7.0.128/25"):  # narrower than the NIC's route
            sh("ip", "-n", self.names[i], "route", "add", "blackhole", half)

    def mend(self, i: int) -> None:
        """Takes host i back after `cut`."""
        sh("ip", "-n", self.names[i], "link", "set", NIC, "up")


def received(file: Path) -> float:
    """Bytes per second that a host's second job has received; see `Hosts.share`."""
    count, seconds = map(float, file.read_text().split())
    return count / seconds


def percent(text: str) -> float:
    """A share: 50% is 0.5."""
    number = text.strip().removesuffix("%")
    try:
        return float(number) / 100
    except ValueError:
        raise ValueError(f"tenant {text!r} is not a share of the link: write 50%") from None


def check_machine() -> None:
    """Raises `Unavailable` unless this process may make namespaces and has the tools for it."""
    if sys.platform != "linux" or os.geteuid():
        raise Unavailable("hosts are made of network namespaces, which take Linux and root")
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if missing:
        packages = "install iproute2 (ip, tc) and util-linux (unshare)"
        raise Unavailable(f"hosts are made by {', '.join(missing)}, not found in PATH: {packages}")
    probe = f"dq{secrets.token_hex(3)}-probe"
    try:
        sh("ip", "netns", "add", probe)
        sh("ip", "-n", probe, "link", "add", NIC, "type", "veth", "peer", "eth1")
        sh("ip", "netns", "exec", probe, "unshare", "--uts", "true")
    except RuntimeError as error:
        raise Unavailable(f"this machine does not let root make network hosts: {error}") from error
    finally:
        sh("ip", "netns", "delete", probe, check=False)


def run(hosts: Hosts, command: list[str], logs: Path) -> list[int | None]:
    """Runs a command on all hosts, prints what host 0 says, and returns all exit statuses.

    Where one fails and others do not end within `GRACE` seconds, theirs are `None`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    files = [logs / f"host{i}.log" for i in range(hosts.n)]
    processes = [hosts.start(i, command, log=file) for i, file in enumerate(files)]
    deadline = None
    with files[0].open() as said:
        while True:
            statuses = [process.poll() for process in processes]
            print(said.read(), end="", flush=True)
            if None not in statuses or (deadline and time.monotonic() > deadline):
                return statuses
            if deadline is None and any(statuses):
                deadline = time.monotonic() + GRACE
            time.sleep(0.1)


def main(
    command: Annotated[list[str], typer.Argument(help="after --; %i is the host's number")],
    hosts: Annotated[int, typer.Option(help="how many")] = 2,
    rate: Annotated[str | None, typer.Option(help="25gbit; default: as fast as TCP goes")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="virtual CPU devices a host")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs a host")] = None,
    tenant: Annotated[str | None, typer.Option(help="50%: another job's share of links")] = None,
    logs: Annotated[Path, typer.Option(help="folder of host0.log, ...")] = Path("runs/hosts"),
) -> None:
    """Runs a command on several hosts made on this machine."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        with Hosts(hosts, rate=rate, devices=devices, gpus=gpus) as made:
            shares = made.share(percent(tenant), logs) if tenant else []
            statuses = run(made, command, logs)
            for i, file in enumerate(shares):
                part = received(file) / made.bytes_per_second if file.exists() else 0
                typer.echo(f"tenant: {part:.0%} of the link to host {i}")
    except (ValueError, RuntimeError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from error
    failed = {i: status for i, status in enumerate(statuses) if status}
    for i, status in enumerate(statuses):
        if status is None:
            typer.echo(f"host {i}: ended {GRACE} s after another failed", err=True)
        elif status:
            tail = (logs / f"host{i}.log").read_text().splitlines()[-5:] if i else []
            how = f"signal {-status}" if status < 0 else f"status {status}"
            typer.echo("\n".join([f"host {i}: {how}, {logs / f'host{i}.log'}", *tail]), err=True)
    if failed:
        first = next(iter(failed.values()))
        raise typer.Exit(first if first > 0 else 128 - first)


if __name__ == "__main__":
    typer.run(main)
