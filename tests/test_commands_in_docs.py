"""Every command of the pages is one that the tools take: names, options, values, files, targets.

Nothing runs but bash, on blocks of shell: it finds no program, and writes down the words of every
command instead. So variables, loops and quotes mean what they mean to users. `tests/release/`
runs those commands that a CPU can run.
"""

import argparse
import ast
import importlib
import itertools
import os
import re
import shlex
import subprocess
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import results
import training
import typer
import ways
from typer.main import get_command

from dynamiq_jax.commands.bench import contenders
from dynamiq_jax.commands.cli import app

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
PAGES.append("benchmarks/README.md")
OURS = ("dynamiq-jax", "python", "python3", "make", "pytest", "pip")
OTHERS = ("git", "srun", "sbatch", "mpirun", "scontrol", "bash", "echo", "tr")
"""Programs that are not ours. What they start is checked, if it is ours."""

# bash calls this for a program that it does not find. It writes words, each with a NUL behind it.
LISTENER = r"""
command_not_found_handle() {
  local code=""
  [ "$1 $2" = "python -" ] && code=$(</dev/stdin)
  printf '%s\0' "$#" "$@" "$code" >&3
}
"""


class Command(NamedTuple):
    """A command of a page: its words, its standard input, and the text around it."""

    words: list[str]
    code: str
    around: str
    inline: bool


TRAINING = SimpleNamespace(topology=None, limits={})
"""The part of a training that `ways.parse` reads: the methods behind the parts of a name."""
TRAINING.request = partial(ways.Training.request, TRAINING)


OF_TRAINING = training.METHODS.keys() - contenders.METHODS.keys()
"""Methods that `training.py` has alone, without bits."""


class Refused(Exception):
    """The command would end in an error."""


# --- Commands of a page ---------------------------------------------------------------------------


def found_in(text):
    """All commands of a page: of its blocks of shell, indented blocks and inline code."""
    fence = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
    for block in fence.finditer(text):
        if block[2] in ("sh", "bash", "console", "shell"):
            yield from in_shell(block[3], around(text, block.start(), block.end()))
    prose = fence.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    for block in re.finditer(r"(?<=\n\n)(?: {4}.*\n)+", prose):
        if first_word(block[0]) in OURS:
            yield from in_shell(block[0], around(text, block.start(), block.end()))
    for code in re.finditer(r"`([^`]+)`", prose):
        script = re.match(r"benchmarks/\w+\.sh\b", code[1])
        if (script or first_word(code[1]) in OURS) and len(code[1].split()) > 1:
            words = shlex.split(code[1])
            while "=" in words[0]:  # variables of the environment
                words.pop(0)
            yield Command(words, "", around(text, code.start(), code.end()), True)


def first_word(code):
    """The program's name."""
    return next((word for word in code.split() if "=" not in word), "")


def around(text, start, end):
    """The text with the paragraphs, or blocks, before and behind it."""
    before, behind = text[:start].rstrip("\n"), text[end:].lstrip("\n")
    opening = before.rfind("\n\n", 0, before.rfind("\n\n") if before else None)
    closing = behind.find("\n\n", behind.find("\n\n") + 2)
    return text[max(opening, 0) : len(text) - len(behind) + (closing if closing > 0 else 10**9)]


def in_shell(code, around):
    """The commands that bash would run, in an environment without programs."""
    read, write = os.pipe()
    with os.fdopen(read) as heard:
        done = subprocess.run(
            ["/bin/bash", "-r", "-c", f"exec 3>&{write}\n{LISTENER}\n{code}"],
            env={"PATH": "/nonexistent"}, pass_fds=[write], capture_output=True, text=True,
        )  # fmt: skip
        os.close(write)
        told = heard.read().split("\0")[:-1]
    if done.stderr:  # such as a path in the place of a command, which bash -r does not start
        raise Refused(done.stderr)
    while told:
        count = int(told.pop(0))
        words, told = told[:count], told[count:]
        yield Command(words, told.pop(0), around, False)


# --- Checks ---------------------------------------------------------------------------------------


def check(command):
    """Raises `Refused` where the command would be refused."""
    words = [re.sub(r"%i|\{\w+\}", "1", word) for word in command.words]  # numbers of hosts
    program, *args = words
    if program in OTHERS:
        ours = [place for place, word in enumerate(args) if word in OURS]
        if ours and program != "echo":
            check(command._replace(words=args[ours[0] :]))
    elif program == "dynamiq-jax":
        parse(get_command(app), args, command)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if unknown := {word for word in args if "=" not in word} - {*targets}:
            raise Refused(f"the Makefile has no {', '.join(unknown)}")
    elif program == "pytest":
        for name in [word for word in args if "/" in word]:
            if not (ROOT / name.split("::")[0]).exists():
                raise Refused(f"there is no {name}")
    elif program == "pip":
        pip(args)
    elif program.endswith(".sh"):
        if not os.access(ROOT / program, os.X_OK):
            raise Refused(f"there is no {program} that may be run")
    elif program in ("python", "python3"):
        python(args, command)
    else:
        raise Refused(f"{program} is not among {', '.join(OURS + OTHERS)}")


def pip(args):
    """Our extras are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:^| )(?:\.|dynamiq_jax)\[([\w,]+)\]", " ".join(args)):
        if unknown := {*extras.split(",")} - {*project["optional-dependencies"]}:
            raise Refused(f"pyproject.toml has no extra {', '.join(unknown)}")


def python(args, command):
    """A script of ours takes the arguments; a program from standard input imports what is there."""
    if args[0] == "-":
        for node in ast.walk(ast.parse(command.code)):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    try:
                        exec(f"from {node.module} import {name.name}", {})
                    except ImportError as error:
                        raise Refused(str(error)) from None
        return
    if args[0] == "-m":
        if args[1] == "dynamiq_jax":
            return parse(get_command(app), args[2:], command)
        raise Refused(f"-m {args[1]} is not a module of ours")
    script, *args = args
    if not (ROOT / script).exists():
        raise Refused(f"there is no {script}")
    source = (ROOT / script).read_text()
    if not re.search(r"^import (argparse|typer)$", source, re.MULTILINE):  # it runs when imported
        wanted = max(map(int, re.findall(r"sys\.argv\[(\d)\]", source)), default=0)
        if len(args) != wanted or any(word.startswith("-") for word in args):
            raise Refused(f"{script} takes {wanted} arguments and no options, not {args}")
        return
    module = importlib.import_module(Path(script).stem)
    assert module.__file__ and Path(module.__file__) == ROOT / script, module.__file__
    if hasattr(module, "argparse"):
        return parse_by_argparse(module, args)
    own = getattr(module, "app", None)
    if own is None:
        own = typer.Typer(add_completion=False)
        own.command()(module.main)
    parse(get_command(own), args, command)


def parse_by_argparse(module, args):
    """`main` makes the parser; it is taken, and `main` left, where it would look at sys.argv."""

    class Taken(Exception):
        pass

    def take(parser, *_):
        raise Taken(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", take)
        with pytest.raises(Taken) as taken:
            module.main()
    try:
        taken.value.args[0].parse_args(args)
    except SystemExit:
        raise Refused(f"{module.__name__} takes no {args}") from None


def parse(command, args, page, name="command"):
    """Has click read the arguments, down to the last subcommand, and checks what they name."""
    placeholders = {"N": "2"}  # where an option wants a number
    args = [placeholders.get(word, word) for word in args]
    rest = args[args.index("--") + 1 :] if "--" in args else []
    while hasattr(command, "commands"):
        if not args and page.inline:
            return
        if not args or args[0] not in command.commands:
            raise Refused(f"{name} {args[:1]}: choose one of {', '.join(command.commands)}")
        name, command, args = args[0], command.commands[args[0]], args[1:]
    known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
    if page.inline and all(word.startswith("--") for word in args):  # a mention, without values
        if unknown := {*args} - known - {"--"}:
            raise Refused(f"{name} has no option {', '.join(unknown)}")
        return
    for word in args:
        if re.fullmatch(r"\w+\.(npz|json)", word):  # the reader's own
            Path(word).touch()
    try:
        command.make_context(name, [*args])
    except Exception as error:  # click's, which typer has as a dependency or as a copy
        if not hasattr(error, "format_message"):
            raise
        raise Refused(f"{name}: {error.format_message()}") from None
    check_names(args, {"NAME", "bf16-psum", *OF_TRAINING} if name == "command" else {"NAME"})
    if rest and rest[0] in OURS:
        check(page._replace(words=rest))


def check_names(args, others):
    """Methods and topologies by name, which click takes as text.

    Methods may also be of ``others``: trainings have bf16 psum among them, and benchmarks have not.
    """
    for option, value in itertools.pairwise(args):
        parts = contenders.parts(value) if value.strip(",") else []
        for text in parts:
            try:
                known = text in others or text.partition(":")[0] in others
                if option == "--methods" and not known and "/" not in text:
                    contenders.make_method(text)
                if option == "--topology" and not (text == "hierarchical" and "--nodes" in args):
                    contenders.parse_topology(text)
                if option == "--ways":
                    ways.parse(text, TRAINING)
            except ValueError as error:
                raise Refused(str(error)) from None


@pytest.mark.parametrize(
    "code",
    [
        "dynamiq-jax explain model.json --worker 16",
        "dynamiq-jax explain",
        "dynamiq-jax explain model.json --workers many",
        "dynamiq-jax imagine --workers 8",
        "dynamiq-jax bench error",
        "dynamiq-jax error --methods dynamite:5",
        "dynamiq-jax error --methods bf16-psum",
        "python benchmarks/evidence/training.py --methods bf16-psum,dynamite:5",
        "python examples/train.py",
        "A=--model; python examples/train_zero.py $A tiny \\\n  --bitz 5",
        "NCCL_P2P_DISABLE=1 python benchmarks/step_time.py --ways none,dynamite:5",
        "python benchmarks/step_time.py --attention",
        "python benchmarks/evidence/pages.py --all",
        "python benchmarks/hosts.py --hosts 2 -- python benchmarks/step_time.py --oops 1",
        "srun --nodes 2 python examples/train_multihost.py --process-id %i --oops 1",
        "sbatch examples/train.sbatch python examples/train_multihost.py --oops 1",
        "bash examples/again.sh mpirun -n 2 python examples/train_multihost.py --oops 1",
        "for i in 1 2; do python tests/conformance/jax_own_tests.py; done",
        "python - <<'EOF'\nfrom dynamiq_jax.commands.bench import no_such_name\nEOF",
        "make demos",
        "pytest tests/no_such_file.py",
        "pip install '.[cude]'",
        "dynamiq explain model.json",
        "benchmarks/no_such_file.sh 4",
    ],
)
def test_a_broken_command_is_refused(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused):
        for command in found_in(f"Text\n\n```sh\n{code}\n```\n"):
            check(command)
    if "\n" not in code and code.split()[0] in OURS:
        with pytest.raises(Refused):
            for command in found_in(f"Text `{code} --no-such-option 1` goes on.\n"):
                check(command)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_taken(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = []
    for command in found_in((ROOT / page).read_text()):
        try:
            check(command)
        except Refused as error:
            refused.append(f"{shlex.join(command.words)}\n  {error}")
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("job", [job for jobs in results.TABLES.values() for job in jobs])
def test_commands_of_results_are_taken(job, tmp_path, monkeypatch):
    """`make results` runs them, down to the names of ways and methods."""
    monkeypatch.chdir(tmp_path)
    command = job.command.format(json=tmp_path / "rows.json")
    (found,) = found_in(f"Text\n\n```sh\n{command}\n```\n")
    check(found)
