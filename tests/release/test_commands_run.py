"""Commands of the pages that a CPU can run in a minute run; each other one says what it needs."""

import re
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_commands_in_docs import OTHERS, PAGES, ROOT, found_in

from dynamiq_jax.plan.model_tree import save_model_tree

RUN = {
    "dynamiq-jax explain model.json": "wire",
    "dynamiq-jax error --gradients FILE.npz": "dynamiq:5",
    "dynamiq-jax error --methods dynamiq-mse:5": "dynamiq-mse-dither:5",
    "dynamiq-jax error --topology direct --methods NAME": "dynamiq:5",
    "python benchmarks/coding_kernels.py": "",
}
"""How commands begin that run here, and what they print."""

NEED = {
    "GPUs": (
        r".*(bench all-reduce|all_reduce|step_times?\.|against_the_clock|crossover)"
        "|make test-gpu|make results|python benchmarks/results"
    ),
    "links to measure (tests/test_{advise,report}.py)": "dynamiq-jax (advise|report)",
    "hosts (tests/test_hosts.py, test_four_hosts.py, release/test_training_goes_on.py)": (
        r".*(train_multihost|hosts\.py|goodput)|dynamiq-jax run"
    ),
    "a package index (.ci/release-check)": "pip|make (demo|test)$",
    "a checkout of JAX": "python tests/conformance",
    "SLURM": "pytest -s --release tests/release/test_slurm",
    "minutes to hours": (
        r"python (benchmarks/evidence/(training|classifier|finetuned|lossless)"
        r"|examples/(train_(local_steps|llm)|one_gpu|recipes/\w+|four_hosts))"
        r"|dynamiq-jax simulate .*8192"
    ),
    "a profile of a GPU": "python benchmarks/timeline",
    "nothing: tests/test_documents.py": r"make figures|python benchmarks/evidence/pages",
}
"""The needs of other commands, by how these begin."""


def ours():
    """All commands of the pages but mentions of a command by its name, without repetitions."""
    found = {}
    for page in PAGES:
        for command in found_in((ROOT / page).read_text()):
            mention = command.inline and all(w.startswith("--") for w in command.words[2:])
            mention &= command.words[0] == "dynamiq-jax"
            if command.words[0] not in OTHERS and not mention:
                found[" ".join(command.words)] = command
    return found


def beginning(text):
    """The entry of `RUN` for a command."""
    return next((own for own in RUN if text.startswith(own)), None)


def test_every_command_runs_here_or_says_what_it_needs():
    unknown = [
        text
        for text, command in ours().items()
        if beginning(text) is None and not any(re.match(pattern, text) for pattern in NEED.values())
    ]
    assert not unknown


@pytest.mark.parametrize("text", [text for text in ours() if beginning(text) is not None])
def test_the_command_runs(text, tmp_path):
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    save_model_tree(tmp_path / "model.json", shapes)
    gradients = np.random.default_rng(0).normal(size=(4, 2**16)).astype(np.float32)
    np.savez(tmp_path / "FILE.npz", gradients=gradients)
    words = [{"NAME": "dynamiq:5", "N": "4"}.get(word, word) for word in shlex.split(text)]
    program, *args = words
    if program == "dynamiq-jax":
        args = ["-m", "dynamiq_jax", *args]
    else:
        args = [str(ROOT / args[0]), *args[1:]]
    if "coding_kernels.py" in text:
        args += ["--size", "512KiB"]  # enough for a CPU
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *args], cwd=tmp_path, env=path, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    assert RUN[beginning(text)] in done.stdout
