"""Notice before a host dies: by a file, or by an address here that answers as a cloud."""

import http.server
import threading
import time

import pytest
from test_supervisor import supervisor

from dynamiq_jax.hosts import notice
from dynamiq_jax.hosts.beats import Beat, Phase
from dynamiq_jax.hosts.notice import AWS, GCE, VARIABLE


class Metadata(http.server.BaseHTTPRequestHandler):
    """A cloud's metadata server. `answers` has {path: text}; with ``token`` it asks for one."""

    answers: dict[str, str] = {}
    token = ""
    log_message = lambda *_: None

    def do_GET(self):
        path = self.path
        google = path.startswith("/computeMetadata")
        if google and self.headers["Metadata-Flavor"] != "Google":
            return self.reply(403)
        if not google and self.headers["X-aws-ec2-metadata-token"] != (self.token or None):
            return self.reply(401)
        self.reply(200 if path in self.answers else 404, self.answers.get(path, "no such thing"))

    def do_PUT(self):
        right = self.path == "/latest/api/token"
        right = right and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self.reply(200 if right else 400, self.token)

    def reply(self, status, text=""):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def cloud(monkeypatch):
    """A server, and the sources of both clouds at its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        monkeypatch.setattr(Metadata, "answers", {})
        monkeypatch.setattr(Metadata, "token", "")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # it must not matter
        hosts = "http://metadata.google.internal", "http://169.254.169.254"
        assert (GCE.startswith(hosts[0]), AWS.startswith(hosts[1])) == (True, True)
        yield [s.replace(hosts[0], here).replace(hosts[1], here) for s in notice.sources("gce,aws")]
        server.shutdown()
        thread.join()


def path_of(source):
    return "/" + source.split("/", 3)[3]


@pytest.mark.parametrize(
    ("number", "none", "some"),
    [
        (0, ["FALSE"], "TRUE"),
        (1, ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"], "TERMINATE_ON_HOST_MAINTENANCE"),
        (2, [], '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'),
    ],
)
@pytest.mark.parametrize("token", ["", "secret"])
def test_answers_of_clouds(cloud, monkeypatch, token, number, none, some):
    monkeypatch.setattr(Metadata, "token", token)
    source = cloud[number]
    assert notice.read(source) is None  # AWS has no such path as long as all is well
    for text in none:
        Metadata.answers[path_of(source)] = text
        assert notice.read(source) is None
    Metadata.answers[path_of(source)] = some
    assert notice.read(source) == f"{source}: {some}"


def test_a_file_is_a_notice_and_its_text_the_reason(tmp_path):
    file = tmp_path / "notice"
    assert notice.read(str(file)) is None
    file.touch()
    assert notice.read(str(file)) == str(file)
    file.write_text("power is cut\nat five\n")
    assert notice.read(str(file)) == f"{file}: power is cut at five"


def test_the_first_notice_of_all_sources_is_told_once(tmp_path, monkeypatch, cloud):
    """A source that cannot be read is named once, and may be read later."""
    file, told, said = tmp_path / "notice", [], []
    file.mkdir()  # cannot be read
    monkeypatch.setattr(notice, "PERIOD", 0.01)
    monkeypatch.setenv(VARIABLE, f"{file},http://127.0.0.1:1/,{cloud[0]}")
    before = threading.active_count()
    notice.watch(told.append, said.append)
    until(lambda: len(said) == 2)
    time.sleep(0.1)
    assert not told and len(said) == 2
    assert str(file) in said[0] and "127.0.0.1:1/: <urlopen error" in said[1]
    Metadata.answers[path_of(cloud[0])] = "TRUE"
    until(lambda: told)
    file.rmdir()
    file.touch()
    until(lambda: threading.active_count() <= before)  # it has ended, so nothing more comes
    assert told == [f"{cloud[0]}: TRUE"]


def until(true):
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("text", ["notice", "gce,ftp://a", "azure"])
def test_unknown_sources_are_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=rf"{VARIABLE}={text}: .* is no absolute path, no URL"):
        notice.watch(lambda _: None, lambda _: None)


def test_without_the_variable_nothing_is_watched(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    before = threading.active_count()
    notice.watch(lambda _: None, lambda _: None)
    assert threading.active_count() == before


def test_a_signal_after_a_notice_lets_the_process_save():
    """Clouds give notice, and then the machine's own end sends SIGTERM."""
    own = supervisor()
    own.notified("/run/notice: at five")
    own.leave()
    assert own._signals == 1
    own.tick()
    assert (own.status, own.beat.phase) == (143, Phase.LEAVING)
    assert own.beat.cause == "told to end (/run/notice: at five)"


@pytest.mark.parametrize(("phase", "starts"), [(Phase.LEAVING, True), (Phase.READY, False)])
def test_nobody_waits_for_a_host_that_leaves(phase, starts):
    """Host 2 leaves, or does not hear this host."""
    own, started = supervisor("a:2000,b:2000,c:2000", least=2, wait=100), []
    own._start = lambda generation, members: started.append(members)
    for beat in (Beat(host=1, hears=(0,)), Beat(host=2, phase=phase)):
        own.take(beat.encode(own._run))
    own.tick()
    assert started == [(0, 1)] * starts
