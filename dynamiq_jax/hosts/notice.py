"""Notice before this host dies: from a file, or from the address at which a cloud tells of it.

A host that has notice does what it does after SIGTERM: its process copies and saves, then it
leaves. `dynamiq-jax run` watches for its process; under other engines `Copies` does.
"""

import functools
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

VARIABLE = "DYNAMIQ_JAX_NOTICE"
"""The environment variable with what to watch, by commas: paths, URLs and names of `CLOUDS`."""
GCE = "http://metadata.google.internal/computeMetadata/v1/instance"
AWS = "http://169.254.169.254/latest/meta-data"
CLOUDS = {
    "gce": (f"{GCE}/preempted", f"{GCE}/maintenance-event"),
    "aws": (f"{AWS}/spot/instance-action",),
}
"""{cloud: the addresses at which it tells a machine of its end}."""
NONE_YET = "", "FALSE", "NONE", "MIGRATE_ON_HOST_MAINTENANCE"
"""Answers that are no notice. A process survives a migration."""
PERIOD = 1.0
"""Seconds between two looks."""
TIMEOUT = 2.0
"""Seconds for an answer. The addresses are on the same machine, or nearly."""
LONGEST = 200
"""Characters of a notice that messages carry."""


def sources(text: str) -> tuple[str, ...]:
    """The paths and URLs that the variable names.

    Raises:
      ValueError: a word is no absolute path, no URL and no cloud.
    """
    found: list[str] = []
    for word in filter(None, text.split(",")):
        if not (word in CLOUDS or word.startswith(("/", "http://", "https://"))):
            raise ValueError(
                f"{VARIABLE}={text}: {word!r} is no absolute path, no URL, and none of "
                f"{', '.join(CLOUDS)}; give some of these, by commas"
            )
        found += CLOUDS.get(word, (word,))
    return tuple(found)


def read(source: str) -> str | None:
    """One look at a source: the notice in a line, or `None` as long as there is none.

    Raises:
      OSError: the source cannot be read.
    """
    if source.startswith("/"):
        if not Path(source).exists():
            return None
        text = Path(source).read_text(errors="replace")
    elif (text := _answer(source)).strip() in NONE_YET:
        return None
    return " ".join(f"{source}: {text}".split())[:LONGEST].removesuffix(":")


def _answer(url: str, token: str = "") -> str:
    """The text at an address; empty where there is none. AWS may ask for a token first."""
    headers = {"Metadata-Flavor": "Google"} | ({"X-aws-ec2-metadata-token": token} if token else {})
    try:
        return _text(urllib.request.Request(url, headers=headers))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return ""
        if error.code != 401 or token:
            raise
    asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    where = urllib.parse.urljoin(url, "/latest/api/token")
    return _answer(url, _text(urllib.request.Request(where, headers=asked, method="PUT")))


def _text(request: urllib.request.Request) -> str:
    # Metadata addresses are never behind a proxy, whatever the variables of proxies say.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=TIMEOUT) as answer:
        return answer.read(2**12).decode(errors="replace")


def watch(act: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Lets a thread call ``act`` with the first notice from the sources of the variable, if any.

    Args:
      act: called once, with the notice.
      say: called once for each source that cannot be read, which may be read later.

    Raises:
      ValueError: as `sources`.
    """
    if watched := sources(os.environ.get(VARIABLE, "")):
        threading.Thread(target=_watch, args=(watched, act, say), daemon=True).start()


def _watch(
    watched: tuple[str, ...], act: Callable[[str], None], say: Callable[[str], None]
) -> None:
    failed: set[str] = set()
    while True:
        for source in watched:
            try:
                notice = read(source)
            except OSError as error:
                if source not in failed:
                    say(f"{source}: {error}; no notice can come from there")
                failed.add(source)
                continue
            if notice:
                return act(notice)
        time.sleep(PERIOD)


@functools.cache  # a second SIGTERM may end the process ahead of its copy
def watch_for_process() -> None:
    """Sends this process SIGTERM at the first notice, as schedulers do.

    Raises:
      ValueError: as `sources`.
    """

    def say(text: str) -> None:
        print(f"dynamiq_jax: {text}", file=sys.stderr, flush=True)

    def act(notice: str) -> None:
        say(f"told to end ({notice})")
        os.kill(os.getpid(), signal.SIGTERM)

    watch(act, say)
