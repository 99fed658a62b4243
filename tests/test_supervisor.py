"""`dynamiq-jax run`: whatever ends one host, all others end in time and name it; then they go on.

Processes here are those of `supervised`, without JAX. `tests/release/test_training_goes_on.py` has
trainings and links that are cut.
"""

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import goodput
import pytest
from cases import daily
from supervised import Supervised, free_ports
from typer.testing import CliRunner

from dynamiq_jax.commands import cli
from dynamiq_jax.core.interrupts import of_command
from dynamiq_jax.hosts.addresses import Address, Book, parse_hosts
from dynamiq_jax.hosts.beats import Beat, Phase, connected, decode
from dynamiq_jax.hosts.child import Child
from dynamiq_jax.hosts.supervisor import Settings, Supervisor

ALONE = ("--min-hosts", "1", "--wait", "0.5")
VICTIM = 1
BEGUN = r"rank \d of 3 from"

FAULTS = {
    "killed": ("kill", r"host 1 \(127.0.0.1\): killed by SIGKILL"),
    "stopped": ("stop", r"host 1 \(127.0.0.1\): its process is stopped \(SIGSTOP\)"),
    "hangs": ("hang", r"host 1 \(127.0.0.1\): no step for 3 s, at step \d+, others at \d+"),
    "ends with a status": ("exit", r"host 1 \(127.0.0.1\): ended with status 7: rank 1 of 3"),
    "raises": ("raise", r"host 1 \(127.0.0.1\): ended with status 1: ZeroDivisionError: div"),
    "wants memory": ("memory", r"host 1 \(127.0.0.1\): ended with status 1: MemoryError"),
    "aborts": ("terminate", r"host 1 \(127.0.0.1\): killed by SIGABRT: rank 1"),
    "a supervisor killed": (signal.SIGKILL, r"host 1 \(127.0.0.1\): no heartbeat for 2 s"),
    "a supervisor stopped": (signal.SIGSTOP, r"host 1 \(127.0.0.1\): no heartbeat for 2 s"),
    "told to end": (signal.SIGTERM, r"host 1 \(127.0.0.1\): told to end \(SIGTERM\)"),
    "does not come": (None, r"host 1 \(127.0.0.1\) did not come within 3 s; 2 of 3 hosts"),
}
"""{name: what host 1 does, or the signal to its supervisor; the last line of the other hosts}"""

QUICK = "--silence", "2", "--wait", "1", "--stall", "3"


@pytest.mark.parametrize("fault", daily(FAULTS, ["killed"]))
def test_the_last_line_of_every_other_host_names_host_and_cause(tmp_path, fault):
    order, cause = FAULTS[fault]
    options = *QUICK, "--restarts", "0", "--min-hosts", "3"
    with Supervised(tmp_path, 3, *options, *(() if order else ("--patience", "3"))) as hosts:
        if order is None:
            hosts.start(0, 2)
        else:
            hosts.start()
            hosts.until_said(BEGUN, seconds=30)
            time.sleep(0.5)
            if isinstance(order, str):
                hosts.order(VICTIM, order)
            else:
                hosts.processes[VICTIM].send_signal(order)
        assert hosts.statuses(0, 2) == [1, 1]
        for i in (0, 2):
            hosts.until_said(rf"{cause}.*\n\Z", i, seconds=1)
        if order == signal.SIGSTOP:
            hosts.processes[VICTIM].send_signal(signal.SIGCONT)
            assert hosts.statuses(VICTIM) == [1]  # it has lost the others


def test_hosts_go_on_without_a_dead_one_and_take_it_back(tmp_path):
    with Supervised(tmp_path, 3, *QUICK[:4]) as hosts:
        hosts.start()
        hosts.until_said(BEGUN, seconds=30)
        hosts.until(lambda: hosts.reached(0) > 0)  # or it begins from 0 again
        hosts.processes[0].kill()  # the first one: none is special
        hosts.until_said(r"start \d+ with 2 hosts, without host 0 \(127.0.0.1\)\nrank", 1, 2)
        hosts.start(0)
        hosts.until_said(r"host 0 \(127.0.0.1\) came back: all save and start again", 1)
        hosts.until_said(r"start \d+ with 3 hosts\nrank \d of 3 from [1-9]")
        for i in range(3):
            hosts.processes[i].send_signal(signal.SIGTERM)
        assert hosts.statuses() == [143] * 3


@pytest.mark.release
def test_a_run_ends_when_all_have_ended_well(tmp_path):
    with Supervised(tmp_path, 3) as hosts:
        hosts.command[-2:] = "30", "0.02"
        hosts.start()
        assert hosts.statuses(seconds=30) == [0, 0, 0]
        assert hosts.last(1).endswith("the run has ended well")


@pytest.mark.release
def test_a_process_that_waits_takes_the_next_start(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, sys; print('imported by', os.getpid(), 'for', *sys.argv[1:], flush=True)"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with Supervised(tmp_path, 2, *ALONE, "--ready", "json,slow", env=env) as hosts:
        waiting = lambda: re.findall(r"imported by (\d+)", hosts.said(0))
        hosts.start(0)
        for start in (2, 3):
            hosts.until(lambda start=start: len(waiting()) == start, 30)
            hosts.until(lambda: hosts.reached(0) > 0)
            hosts.order(0, "raise")
            again = rf"start {start} with 1 hosts.*\nrank 0 of 1 from [1-9]"
            hosts.until_said(rf"ZeroDivisionError(.|\n)*{again}", 0)
            # The process goes on as what it was: the supervisor's child.
            stat = Path(f"/proc/{waiting()[start - 1]}/stat").read_text()
            assert stat.split()[3] == str(hosts.processes[0].pid)
        hosts.until(lambda: len(waiting()) == 4, 30)
        assert f"imported by {waiting()[-1]} for 100000 0.05" in hosts.said(0)
        hosts.processes[0].terminate()
        assert hosts.statuses(0) == [143]
        assert not any(Path(f"/proc/{pid}").exists() for pid in waiting())


def test_a_process_gets_ready_while_its_host_waits_for_others(tmp_path):
    """As on a host that was away, and comes back."""
    (tmp_path / "slow.py").write_text("print('imported', flush=True)")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with Supervised(tmp_path, 2, "--ready", "slow", env=env) as hosts:
        hosts.start(0)
        hosts.until_said(r"\Aimported\n\Z", 0, seconds=30)
        hosts.start(1)
        hosts.until_said(r"start 1 with 2 hosts\n(imported\n)?rank \d of 2 from 0", seconds=30)
        assert re.search(r"\Aimported\n.*start 1 with 2 hosts\nrank 0 of 2", hosts.said(0))


def test_without_a_process_that_waits_another_starts(tmp_path):
    with Supervised(tmp_path, 2, *ALONE, "--ready", "no_such_module") as hosts:
        hosts.start(0)
        told = "waits for the next start ended with status 1: ModuleNotFoundError"
        hosts.until_said(told, 0, seconds=30)
        hosts.until(lambda: hosts.reached(0) > 0)
        hosts.order(0, "exit")
        hosts.until_said(r"start 2 with 1 hosts.*\nrank 0 of 1 from [1-9]", 0)


@pytest.mark.parametrize(
    ("own", "address", "waits"),
    [
        (1, "127.0.0.1", True),
        (0, "127.0.0.1", False),
        pytest.param(1, "::1", True, marks=pytest.mark.release),
    ],
)
def test_a_waiting_process_begins_when_the_coordinator_listens(tmp_path, own, address, waits):
    """Whoever asks earlier waits for gRPC's next try, which comes after seconds."""
    (tmp_path / "jax.py").write_text("")
    said, (port,) = [], free_ports(1)
    command = [sys.executable, "-c", "print('begun', flush=True)"]
    env = {"PYTHONPATH": str(tmp_path)}
    child = Child(command, env, said.append, ready=("jax",))
    try:
        coordinator = Address(address, 0).at(port)
        child.begin(command, {"COORDINATOR": coordinator, "HOST_ID": str(own)})
        deadline = time.monotonic() + (1.5 if waits else 30)
        while time.monotonic() < deadline and not said:
            child.pump()
            time.sleep(0.05)
        assert said == ([] if waits else [b"begun\n"])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, port), family=family):
            while not child.ended():
                time.sleep(0.05)
        child.pump()
        assert said == [b"begun\n"]
    finally:
        child.close()


@pytest.mark.release
def test_a_waiting_process_asks_for_the_coordinator_no_longer_than_ten_seconds(tmp_path):
    """Servers of names may take longer, and names may be none."""
    slow = "import socket, time; socket.getaddrinfo = lambda *_: time.sleep(100)"
    for module, name, most in ((slow, "host.test", 14), ("", f"{'x' * 64}.test", 14)):
        (tmp_path / "jax.py").write_text(module)
        said, begun = [], time.monotonic()
        command = [sys.executable, "-c", "print('begun', flush=True)"]
        child = Child(command, {"PYTHONPATH": str(tmp_path)}, said.append, ready=("jax",))
        try:
            child.begin(command, {"COORDINATOR": f"{name}:29500", "HOST_ID": "1"})
            while not child.ended():
                time.sleep(0.05)
            assert said == [b"begun\n"]
            assert 9 < time.monotonic() - begun < most
        finally:
            child.close()


ENDING = {
    "raises": "raise RuntimeError('late')",
    "exits": "import sys; sys.exit()",  # as a script that nobody has meant to be imported
    "ends": "import os; os._exit(0)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "raise KeyboardInterrupt",
}
"""{name: what a module does that a waiting process imports}"""


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", daily(ENDING, ["exits"]))
def test_a_script_starts_though_the_process_ends_that_was_to_run_it(
    tmp_path, name, told, monkeypatch, capfdbinary
):
    """It is no end of the run's. The process may end before it is told to begin, or later."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "ends.py").write_text(ENDING[name])
    command = [sys.executable, "-S", "-c", "print('begun')"]
    own = supervisor("127.0.0.1:29610", command=command, ready=("ends",))
    own.spare = Child(command, {}, lambda line: None, ready=("ends",))
    while not told and own.spare._process.poll() is None:
        time.sleep(0.01)
    own._start(1, (0,))
    try:
        while own.beat.phase is Phase.RUNNING:
            own._watch()
            time.sleep(0.01)
    finally:
        for child in filter(None, (own.child, own.spare)):
            child.close()
    assert (own.beat.phase, own.beat.cause, own._failures) == (Phase.DONE, "", 0)
    assert not own._spares
    said = capfdbinary.readouterr()[0]
    assert b"the process that waits for the next start" in said
    assert said.endswith(b"begun\n")


def test_a_script_begins_in_a_waiting_process_as_python_begins_it(tmp_path):
    """Its classes are found by name, no module takes its start, and its options count."""
    (tmp_path / "reads.py").write_text("import sys; print(sys.stdin.read())")
    code = "import pickle, sys\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)), sys.path[0])"
    command = [sys.executable, "-P", "-S", "-c", code]
    said = []
    child = Child(command, {"PYTHONPATH": str(tmp_path)}, said.append, ready=("reads",))
    try:
        assert child.waits
        child.begin(command, {"HOST_ID": "0"})
        while not child.ended():
            time.sleep(0.01)
        assert not child.waits
    finally:
        child.close()
    assert b"".join(said).decode().split("\n") == ["", f"<class '__main__.A'> {tmp_path}", ""]


@pytest.mark.release
@pytest.mark.parametrize(("dies", "others"), [("supervisor", "peer"), ("process", "exit")])
def test_the_end_of_other_processes_does_not_hide_the_cause(tmp_path, dies, others):
    """They end by themselves, before it is noticed that host 1 is silent or has been killed."""
    with Supervised(tmp_path, 3, *QUICK, "--restarts", "0") as hosts:
        hosts.start()
        hosts.until_said(BEGUN, seconds=30)
        if dies == "process":
            hosts.order(VICTIM, "kill")
        else:
            hosts.processes[VICTIM].kill()
        hosts.order(0, others)
        hosts.order(2, others)
        assert hosts.statuses(0, 2) == [1, 1]
        for i in (0, 2):
            cause = "killed by SIGKILL" if dies == "process" else "no heartbeat"
            assert f"host 1 (127.0.0.1): {cause}" in hosts.last(i)


MET = "[Gloo] Rank 1 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2"
ENDS = {
    "os._exit(7)": (7, "ended with status 7: begun", False),
    "os.kill(os.getpid(), 11)": (-11, "killed by SIGSEGV: begun", False),
    "raise RuntimeError('[external/gloo/gloo/pair.cc:98] timed out')": (1, "timed out", True),
    "raise OSError('connect: No route to host')": (1, "No route to host", True),
    "raise ValueError('my own')": (1, "ended with status 1: ValueError: my own", False),
    # Rich wraps what it prints, and XLA may write after it.
    r"print('OSError: disk \nhas \n 3 bytes\nE1129 gloo'); os._exit(1)": (
        1, "status 1: OSError: disk has 3 bytes", False,
    ),
    # Typer's programs frame what is wrong with their words.
    r"print('│ --model: no \u2026 │\n╰──╯'); os._exit(2)": (2, "status 2: --model: no", False),
}  # fmt: skip
"""{what a process does last: its status, its text, whether another one's end may be the cause}"""


@pytest.mark.parametrize("last", ENDS)
def test_a_greeting_is_no_reason_for_an_end(last):
    """Gloo tells when a process has met the others; that was taken for the reason of its end."""
    code = f"import os; print('begun', flush=True); print({MET!r}, flush=True); {last}"
    child = Child([sys.executable, "-S", "-u", "-X", "utf8", "-c", code], {}, lambda line: None)
    while (end := child.ended()) is None:
        time.sleep(0.01)
    child.close()
    status, text, consequence = ENDS[last]
    assert (end.status, end.consequence) == (status, consequence)
    assert text in end.text


# --- One supervisor, in this process --------------------------------------------------------------


def supervisor(hosts="127.0.0.1:29610,127.0.0.1:29640", **fields):
    fields = {"host": 0, "command": ["true"], "least": 1} | fields
    return Supervisor(Settings(hosts=parse_hosts(hosts), **fields))


def test_a_supervisor_that_starts_anew_says_that_its_host_was_killed():
    own = supervisor()
    own.beat = Beat(host=0, phase=Phase.RUNNING, generation=3, members=(0, 1))
    beat = Beat(host=1, phase=Phase.RUNNING, generation=3, members=(0, 1), hears=(0,))
    own.take(beat.encode(own._run))
    assert own._anew == set()
    own.take(Beat(host=1, hears=(0,)).encode(own._run))
    assert own._cause() == "host 1 (127.0.0.1): killed with its supervisor, which has started anew"


def test_a_port_in_use_is_named(capfdbinary):
    (first, _) = parse_hosts(text := "127.0.0.1:29610,127.0.0.1:29640")
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("", first.port))
        with pytest.raises(OSError, match=r"^UDP port 29610 of host 0 is in use on this machine"):
            supervisor(text).run()
    with socket.socket() as other:  # of the coordinator's in the second generation
        other.bind(("", first.port + 3))
        other.listen()
        assert [supervisor(text)._free(generation) for generation in (1, 2)] == [1, 3]
    assert (
        b"TCP port 29613, for JAX's coordinator: Address already in use"
        in capfdbinary.readouterr()[0]
    )


def test_addresses_follow_a_file_and_servers_of_names(tmp_path, monkeypatch):
    file, said, heard = tmp_path / "hosts", [], set()
    file.write_text("# supervisors\n127.0.0.1:2000\n\npod-1.jaxpods:2000  # of a service\n")
    asked = []

    def getaddrinfo(name, port, *_):
        asked.append(name)
        if len(asked) == 1:
            raise OSError("not yet")
        return [(None, None, None, "", (f"10.0.0.{len(asked)}", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    book = Book(parse_hosts(f"@{file}"), file, heard.__contains__, said.append)
    assert book.numbers == [("127.0.0.1", 2000), None]
    book.look_up()
    assert book.numbers[1] is None
    book.look_up()
    assert book.numbers[1] == ("10.0.0.2", 2000)
    book.look_up()  # a host that is silent may have got another number
    assert book.numbers[1] == ("10.0.0.3", 2000)
    heard.add(1)
    book.look_up()
    assert book.numbers[1] == ("10.0.0.3", 2000) and not said
    for wrong, complaint in (("127.0.0.1:2000", "has 1 hosts, and this run 2"), ("x", "NAME:PORT")):
        file.write_text(wrong)
        book.look_up()
        book.look_up()
        assert complaint in said.pop() and not said
    file.write_text("127.0.0.1:2000\n127.0.0.9:2009\n")
    book.look_up()
    assert book.numbers[1] == ("127.0.0.9", 2009) and book.hosts[1].name == "127.0.0.9"


@pytest.mark.parametrize("text", ["[::1]:29610,[::1]:29640", "::1:29610,::1:29640"])
def test_numbers_of_ipv6_have_brackets_where_jax_reads_them(text):
    """Without them it looks for no port; with them nobody found the other supervisors."""
    own = supervisor(text)
    assert own.book.numbers == [("::1", 29610), ("::1", 29640)]
    own._start(1, (1, 0))
    own.child.close()
    assert own._told[1]["COORDINATOR"] == "[::1]:29642"


@pytest.mark.release
def test_a_host_comes_back_at_another_address(tmp_path):
    """Its line in the file is another one then, which the others follow."""
    with Supervised(tmp_path, 3, *QUICK[:4]) as hosts:
        own = hosts.hosts.split(",")
        (file := tmp_path / "hosts").write_text("\n".join(own))
        hosts.hosts = f"@{file}"
        hosts.start()
        hosts.until_said(BEGUN, seconds=30)
        hosts.until(lambda: hosts.reached(1) > 0)
        hosts.processes[0].kill()
        hosts.until_said(r"start \d+ with 2 hosts, without host 0", 1, 2)
        name, _, port = own[0].partition(":")
        file.write_text("\n".join([f"{name}:{int(port) + 15}", *own[1:]]))
        hosts.start(0)
        hosts.until_said(r"start \d+ with 3 hosts\nrank \d of 3 from [1-9]", seconds=30)


@pytest.mark.release
def test_one_host_alone_is_told_that_hangs_are_not_seen(tmp_path):
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1.5)"]
    with Supervised(tmp_path, 1, "--stall", "0.5", command=command) as hosts:
        hosts.start()
        assert hosts.statuses(seconds=30) == [0]
        told = r"has written no step into \$DYNAMIQ_JAX_PROGRESS for 0.5 s: .* is not noticed"
        assert len(re.findall(told, hosts.said(0))) == 1
        assert hosts.last(0).endswith("the run has ended well")


@pytest.mark.parametrize("seconds", daily([0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 6.0], [0.6]))
def test_an_interrupt_ends_a_run_whenever_it_comes(tmp_path, seconds):
    """While JAX was imported, Python's exception could be lost, and the run began."""
    with Supervised(tmp_path, 1) as hosts:
        hosts.start()
        time.sleep(seconds)
        hosts.processes[0].send_signal(signal.SIGINT)
        assert hosts.statuses(seconds=30)[0] in (-signal.SIGINT, 143, 1)
        # Python's own start, before the package is imported, may raise.
        assert not re.search(r"Traceback(.|\n)*/(dynamiq_)?jax/", hosts.said(0))


def test_an_interrupt_raises_nothing_before_the_supervisor_has_its_handler(monkeypatch):
    """Whatever parses options might lose the exception; other commands clean up after it."""
    raising = []
    monkeypatch.setattr(cli, "once_started", lambda: raising.append(True))
    runner = CliRunner()
    runner.invoke(cli.app, ["run", "--hosts", "no port", "--host-id", "0", "--", "true"])
    assert not raising
    runner.invoke(cli.app, ["simulate", "--help"])
    assert raising


def test_a_second_interrupt_does_not_wait_for_a_process_that_saves(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on'); time.sleep(100)"
    command = [sys.executable, "-S", "-u", "-c", code]
    with Supervised(tmp_path, 1, command=command) as hosts:
        hosts.start()
        hosts.until_said("^on$|\non\n", seconds=30)
        for _ in range(2):
            hosts.processes[0].send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert hosts.statuses() == [143]
        assert "told to end a second time, without saving" in hosts.said(0)


@pytest.mark.parametrize(
    ("argv0", "words", "expected"),
    [
        ("-m", ["python", "-u", "-m", "dynamiq_jax", "run"], True),
        ("/usr/bin/dynamiq-jax", ["python", "/usr/bin/dynamiq-jax"], True),
        ("-m", ["python", "-m", "trainer", "-m", "dynamiq_jax"], False),  # imports us
        ("train.py", ["python", "train.py"], False),
        ("", ["python"], False),
        ("-c", ["python", "-c", "import dynamiq_jax"], False),
    ],
)
def test_only_the_command_changes_what_an_interrupt_does(argv0, words, expected):
    assert of_command(argv0, words) == expected


def test_groups_are_of_hosts_that_hear_each_other():
    everyone = {0: (1, 2), 1: (0, 2), 2: (0, 1)}
    assert connected(1, everyone) == (0, 1, 2)
    one_way = everyone | {2: (0,)}  # host 2 does not hear host 1
    assert connected(1, one_way) == (0, 1)
    assert connected(2, one_way) == (0, 2)
    assert connected(0, {0: ()}) == (0,)


def test_foreign_datagrams_are_ignored():
    beat = Beat(host=1, phase=Phase.RUNNING, generation=3, members=(0, 1), cause="x" * 5000)
    datagram = beat.encode("mine")
    assert decode(datagram, "mine", 2).members == (0, 1)
    assert len(datagram) < 1400  # of one packet
    others = [beat.encode("another"), b"\xff", b"[]", b"{}", b"[" * 60_000]
    others += [datagram.replace(b"host", b"h"), datagram.replace(b"3,", b'"x",')]
    for other in others:
        assert decode(other, "mine", 2) is None
    assert decode(datagram, "mine", 1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": 2}, "host_id=2 of 2 hosts: count from 0 to 1"),
        ({"least": 3}, "min_hosts=3 of 2 hosts: give 1 to 2"),
        ({"silence": 0.2}, "silence=0.2 s: give at least 0.5 s"),
        ({"wait": 0}, "wait=0: give a positive number of seconds"),
        ({"ready": ("json",)}, "ready: the command is 'true', and only Python waits"),
        ({"ready": ("json",), "command": ["python3", "-u", "-"]}, "give python SCRIPT"),
    ],
)
def test_bad_options_are_refused(options, message):
    fields = {"hosts": parse_hosts("a:2000,b:2000"), "host": 0, "command": ["true"], "least": 2}
    with pytest.raises(ValueError, match=message):
        Settings(**fields | options)


@pytest.mark.parametrize("text", ["", "a:2000,a:2000", "a,b:2000", "a:80,b:2000", "a:x,b:2"])
def test_bad_lists_of_hosts_are_refused(text):
    with pytest.raises(ValueError, match=r"hosts=.*(give|names a host twice)"):
        parse_hosts(text)


@pytest.mark.release
def test_the_process_dies_with_its_supervisor(tmp_path):
    command = ["sh", "-c", "echo pid $$; exec sleep 1000"]
    with Supervised(tmp_path, 2, "--min-hosts", "1", command=command) as hosts:
        hosts.start()
        hosts.until_said(r"pid \d+", seconds=30)
        pid = int(hosts.said(0).partition("pid ")[2].split()[0])
        hosts.processes[0].kill()

        def gone():
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            return False

        hosts.until(gone, 5)


def test_goodput_shows_logs_where_no_step_comes(tmp_path, capsys):
    """Whether its patience ends or the supervisors do."""
    watched = goodput.Watched.__new__(goodput.Watched)
    watched.folder, watched.made, watched.processes = tmp_path, SimpleNamespace(n=2), {}
    joined = {"event": "stage", "time": time.time() + 1, "reached": "joined", "generation": 1}
    watched.events_file(1).write_text(json.dumps(joined | {"host": 1}) + "\n")
    (tmp_path / "host1.log").write_text("ModuleNotFoundError: orbax\n")
    with pytest.raises(RuntimeError, match=r"within 0.1 s (.|\n)*host1.log:\nModuleNotFoundError"):
        goodput.until_steps(watched, patience=0.1)
    assert "host 1: stage 1 joined" in capsys.readouterr().out
    watched.processes = {1: SimpleNamespace(poll=lambda: 1)}
    with pytest.raises(RuntimeError, match=r"\[1\] have ended(.|\n)*ModuleNotFoundError"):
        goodput.until_steps(watched)


def test_goodput_counts_every_second_once():
    """Two generations; the fault at 20 comes 3 s after the last checkpoint."""
    events = [{"event": "start", "time": 0.0}, {"event": "stage", "time": 1.0, "reached": "joined"}]
    # The first step takes 4 s, all others 1 s: step n begins at 5 + n.
    events += [{"event": "step", "time": 2.0, "reached": "0"}]
    events += [{"event": "step", "time": 5.0 + n, "reached": str(n)} for n in range(1, 16)]
    events += [{"event": "end", "time": t} for t in (20.5, 23.0)]
    events = [event | {"generation": 1, "host": 0} for event in events]
    after = [{"event": "start", "time": 26.0}]
    after += [{"event": "stage", "time": 28.0, "reached": "joined"}]
    after += [{"event": "stage", "time": 28.5, "reached": "restored"}]
    after += [{"event": "step", "time": 29.0, "reached": "12"}]
    after += [{"event": "step", "time": 31.0 + n, "reached": str(13 + n)} for n in range(5)]
    events += [event | {"generation": 2, "host": 0} for event in after]
    faults = [{"time": 20.0, "name": "host killed"}]
    found = goodput.segments(events, faults, 5.0, 40.0)
    said = goodput.summary(found, faults)
    seconds = {kind: 35 * share for kind, share in said["share"].items()}
    assert seconds == pytest.approx(
        # Steps: from 5 to 17, when step 12 began, and from 30, when the second compiled, to 40.
        {"steps": 22, "repeated": 3, "detection": 3, "gathering": 3, "start": 2, "restore": 0.5,
         "compile": 1.5}
    )  # fmt: skip
    assert said["recoveries"] == [{"fault": "host killed", "seconds": pytest.approx(10)}]
    for before, behind in zip(found, found[1:], strict=False):
        assert before["end"] == behind["start"]
