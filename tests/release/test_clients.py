"""Trainers of others, by `tests/clients`: packages where they are installed, and checkouts.

The environment variable DYNAMIQ_JAX_CLIENTS names the folder of the checkouts. Prints rows of the
table in `tests/clients/README.md`.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "clients" / "run.py"
PACKAGES = {"kauldron": "kauldron", "levanter": "levanter", "tunix": "tunix"}
CHECKOUTS = {
    "easylm": "EasyLM", "grug": "marin", "maxtext": "maxtext", "nanodo": "nanodo",
    **dict.fromkeys(("gemma", "imagenet", "lm1b", "mnist", "wmt"), "flax"),
}  # fmt: skip
LOSS = re.compile(
    r"^(native|F32|5 bits): \S+ to (\S+), copies (\w+), shardings (\w+), .* of (\S+) MB",
    re.MULTILINE,
)


def checkout(client):
    """The folder that `run.py` takes; skips where there is none."""
    if client in PACKAGES:
        spec = importlib.util.find_spec(PACKAGES[client])
        if spec is None or spec.origin is None:
            pytest.skip(f"{client} is not installed")
        return Path(spec.origin).parents[1]
    folder = Path(os.environ.get("DYNAMIQ_JAX_CLIENTS", "/none")) / CHECKOUTS[client]
    if not folder.exists():
        pytest.skip(f"DYNAMIQ_JAX_CLIENTS has no checkout {CHECKOUTS[client]}")
    return folder


@pytest.mark.parametrize("client", [*PACKAGES, *CHECKOUTS])
def test_trains_as_without_ours(client):
    """Exactly to four digits without dropout masks of its own, and nearly so at 5 bits."""
    command = [sys.executable, str(RUN), client, str(checkout(client))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    for part in done.stdout.split("\n\n"):
        rows = {name: rest for name, *rest in LOSS.findall(part)}
        if not rows:
            continue
        print(part)
        native, exact, compressed = (float(rows[n][0]) for n in ("native", "F32", "5 bits"))
        assert all(rest[1:3] == ["equal", "kept"] for rest in rows.values()), part
        if "sharded updates" in part:  # moments and masters are split
            assert float(rows["5 bits"][3]) < 0.8 * float(rows["native"][3]), part
        small = "mnist" in client  # its losses are nearly 0
        assert compressed == pytest.approx(exact, rel=0.03, abs=0.01 if small else 0), part
        if "no dropout" in part or client not in ("lm1b", "mnist"):
            assert exact == pytest.approx(native, rel=1e-3, abs=1e-3), part
