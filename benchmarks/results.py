"""Measures tables of docs/results.md on this machine, and draws them (`make results ONLY=steps`).

    python benchmarks/results.py --only steps,all-reduce
    python benchmarks/results.py --only loss --list  # prints the commands, and runs none

A table has commands of the other scripts. What they write as JSON is reduced to a small file in
``benchmarks/evidence/results``: medians, spreads, cards, versions and commands. Then
`benchmarks/evidence/pages.py` writes the pages. A command needs what its table says: GPUs, or root
for hosts with slow links. One that ends with an error leaves its rows as they were.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "evidence" / "results"
sys.path.append(str(ROOT / "benchmarks" / "evidence"))

TRAINING = "python benchmarks/evidence/training.py --json {json} --resume"
EACH = "bf16-psum,dynamiq:5,dynamiq:5/dynamiq-dither:2.5,mxfp8,mxfp4"
METHODS_1 = (
    "dynamiq-planned:5,dynamiq-even:5,dynamiq-planned:5/dynamiq-planned-dither:2.5,"
    "dynamiq-planned:5/dynamiq-even-dither:2.5,dynamiq-even:5/dynamiq-even-dither:2.5,"
    "dynamiq-planned-dither:4/dynamiq-planned-dither:2.5,"
    "dynamiq-even-dither:4/dynamiq-even-dither:2.5,dynamiq:5/dynamiq:8/whole,dynamiq:4,"
    "dynamiq:3.5,dynamiq:3,dynamiq-dither:4,dynamiq-dither:3.5,dynamiq-dither:3,mxfp8,mxfp6,"
    "mxfp4,bf16-psum"
)
FEW_BITS = "dynamiq-nearest:3.5/dynamiq-dither-64:2.25"
METHODS_125M = (
    "bf16-psum,mxfp8,mxfp6,mxfp4,thc,qsgd:8,omnireduce,perm-k,dynamiq:5,dynamiq:4,flash:5,"
    "mxfp4-ef21,minmax:4,sidco-memory,topk-chunked-memory:4,arc-top-k-memory:4,clt-k-memory:4,"
    "dynamiq-dither-axis:3.5,powersgd-memory,marsit"
)
METHODS_TIMED = (
    "dynamiq:5,dynamiq:4,dynamiq-dither:3.5,mxfp8,mxfp6,mxfp4,minmax:4,flash:5,omnireduce,qsgd:8,"
    "thc,powersgd,arc-top-k,sidco,topk-chunked,perm-k,clt-k"
)


def steps(kept: Any, found: Any, command: str, place: str) -> None:
    """Puts the rows of `step_time.py` in the place of those of its links and cards."""
    links, cards = place.split("; ")
    run = next((r for r in kept["runs"] if (r["links"], r["cards"]) == (links, cards)), None)
    if run is None:
        kept["runs"].append(run := {"links": links, "cards": cards, "ms": {}})
    (new,) = found["runs"]
    run["command"], run["about"] = command, new["about"]
    for row in new["rows"]:
        run["ms"][row["method"]] = [round(row[k], 1) for k in ("step_ms", "p10_ms", "p90_ms")]


def all_reduces(kept: Any, found: Any, command: str, place: str) -> None:
    """Puts the rows of `all_reduce.py` in the place of those of its links and cards."""
    links, cards = place.split("; ")
    same = [i for i, r in enumerate(kept["rows"]) if (r["links"], r["cards"]) == (links, cards)]
    at = same[0] if same else len(kept["rows"])
    kept["rows"] = [row for i, row in enumerate(kept["rows"]) if i not in same]
    kept["rows"][at:at] = [{"links": links, "cards": cards} | row for row in found["rows"]]
    kept["about"], kept["command"] = found["about"], command


def losses(kept: Any, found: Any, command: str, place: str) -> None:
    """Puts rows of `training.py` in the place of those of the same model, start and method."""
    for row in found["rows"]:
        s, (percent, error) = row["settings"], row["summary"]["validation"].values()
        names = ("model", "init", "topology", "method", "steps", "seeds", "learning_rate")
        own = {name: s[name] for name in names} | {"optimiser": "adamw"}
        own |= {"bits": round(row["bits_per_coord"], 2), "percent": percent, "error": error}
        own["device"] = found["invocations"][row["invocation"]]["device"]
        key = [own[name] for name in ("model", "init", "topology", "method", "optimiser")]
        kept["rows"] = [
            r for r in kept["rows"]
            if [r[n] for n in ("model", "init", "topology", "method", "optimiser")] != key
        ]  # fmt: skip
        if own["method"] != "exact":
            kept["rows"].append(own)


def whole(kept: Any, found: Any, command: str, place: str) -> None:
    """Takes the whole file."""
    kept.clear()
    kept.update(found | {"command": command})


def transports(kept: Any, found: Any, command: str, place: str) -> None:
    """Puts rows of ``bench all-reduce`` in the place of those over the same links."""
    run = next(run for run in kept["runs"] if run["links"] == place)
    names = ("method", "time_us", "p10_us", "p90_us", "size_bytes", "speedup", "wire_bytes")
    run["rows"] = [{name: row.get(name) for name in names} for row in found["rows"]]
    run["about"], run["command"] = found["about"], command


def merged(kept: Any, found: Any, command: str, place: str) -> None:
    """Takes the rows of methods that were measured, and leaves others."""
    new = {row["method"] for row in found["rows"]}
    kept["rows"] = [r for r in kept["rows"] if r["method"] not in new] + found["rows"]
    kept["about"], kept["command"] = found["about"], command


def scanned(kept: Any, found: Any, command: str, place: str) -> None:
    """Puts rows of `step_time.py` in the place of those of the same ways."""
    (new,) = found["runs"]
    names = ("method", "step_ms", "p10_ms", "p90_ms", "temporary_bytes", "trace_s", "compile_s")
    rows = [{name: row[name] for name in names if name in row} for row in new["rows"]]
    merged(kept, {"about": new["about"], "rows": rows}, command, place)


def long(kept: Any, found: Any, command: str, place: str) -> None:
    """Takes rows of `training.py` as one run: they are compared with each other alone."""
    rows = []
    for row in found["rows"]:
        s, windows = row["settings"], row["training_loss"][0]
        means = [sum(windows[i : i + 2]) / 2 for i in range(0, len(windows) - 1, 2)]
        own = {"method": s["method"].replace("bf16-psum", "bf16"), "against": "bf16"}
        own |= {"steps_each": 50, "tokens_each": 50 * s["global_batch"] * 1024}
        rows.append(own | {"training": means, "validation": row["validation_loss"]})
    (device,) = {invocation["device"] for invocation in found["invocations"]}
    kept |= {"device": device, "text": "the example's", "command": command, "rows": rows}


class Job(NamedTuple):
    """A command of a table, and what becomes of its JSON."""

    file: str
    """In ``results``."""
    needs: str
    command: str
    take: Callable[[Any, Any, str, str], None] = whole
    place: str = ""
    """Links and cards, or links."""
    resumes: bool = False
    """Whether the command goes on with the rows that the kept file has."""


def step_time(place: str, ahead: str, options: str, needs: str, model: str = "1b") -> Job:
    """A job of `step_time.py`."""
    script = f"python benchmarks/step_time.py --json {{json}} --model {model} --attention cudnn"
    return Job("steps.json", needs, f"{ahead}{script} {options}", steps, place)


ALL = "none,bf16-psum,bf16-zero,bf16-fsdp,dp:mxfp8,dp:mxfp4"
OURS = "dp:5,dp:4,zero:5/2.5,zero-pipeline:5/2.5,zero-dear:5/2.5,zero-pipeline:4d/2.5,fsdp-keep:5/8"
CHECKPOINTED = "fsdp:5/8,fsdp-checkpoint:5/8,fsdp-keep-checkpoint:5/8"
SCANNED = (
    "none,bf16-psum,auto:5,explicit:5,dp:5,zero:5/2.5,zero-explicit:5/2.5,zero-pipeline:5/2.5,"
    "zero-dear:5/2.5,zero-dear:few/few,fsdp-keep:5/8"
)
LARGE = "bf16-zero,zero:5/2.5,zero-pipeline:5/2.5,zero-dear:5/2.5,fsdp-keep:5/8"
FIRST = (
    "bf16-zero,dp:5,zero:5/2.5,zero-pipeline:5/2.5,zero-dear:5/2.5,xla-fsdp,fsdp:5/8,fsdp-keep:5/8"
)
LARGEST = (
    "bf16-psum,bf16-zero,auto:5,dp:5,zero:5/2.5,zero-pipeline:5/2.5,zero-dear:5/2.5,xla-fsdp,"
    "fsdp:5/8,fsdp-keep:5/8"
)
SCANNED, LARGE, FIRST, LARGEST = (
    ",".join(re.sub(":|$", r"-checkpoint-scanned\g<0>", way, count=1) for way in ways.split(","))
    for ways in (SCANNED, LARGE, FIRST, LARGEST)
)
TWO, ROOTED = "2 GPUs", "root and 2 GPUs"
HOSTS = "python benchmarks/hosts.py --hosts 2 --rate {rate} --gpus 1 -- "
TABLES: dict[str, list[Job]] = {
    "steps": [
        step_time("25 Gb/s; 2 × H200", HOSTS.replace("{rate}", "25gbit"),
                  f"--samples 5 --steps 3 --ways {ALL},auto:5,explicit:5,{OURS},"
                  "zero-explicit:5/2.5,zero-dear:4d/2.5,zero-dear:few/few,zero-dear:mxfp4/2.5",
                  ROOTED),
        step_time("25 Gb/s; 2 hosts × 2 H200",
                  HOSTS.replace("{rate}", "25gbit").replace("--gpus 1", "--gpus 2"),
                  "--samples 5 --steps 3 --nodes 2 --topology hierarchical --ways none,bf16-psum,"
                  "dp:5,zero-dear:5/2.5,zero-dear:4d/2.5,fsdp-keep:5/8", "root and 4 GPUs"),
        step_time("25 Gb/s, shared; 2 × H200",
                  HOSTS.replace("{rate}", "25gbit").replace(" -- ", " --tenant 50% -- "),
                  "--samples 3 --steps 3 --ways bf16-psum,dp:mxfp8,zero-dear:5/2.5", ROOTED),
        step_time("10 Gb/s; 2 × H200", HOSTS.replace("{rate}", "10gbit"),
                  "--samples 3 --steps 3 --ways bf16-psum,zero:5/2.5,zero-dear:5/2.5,"
                  "zero-dear:4d/2.5", ROOTED),
        step_time("host memory; 2 × H200", "NCCL_P2P_DISABLE=1 ",
                  f"--samples 5 --ways {ALL},auto:5,explicit:5,{OURS},zero-explicit:5/2.5,"
                  f"{CHECKPOINTED}", TWO),
        step_time("NVLink; 2 × H200", "", f"--samples 5 --ways {ALL},psum:5,auto:5,explicit:5,"
                  f"{OURS},zero-explicit:5/2.5,{CHECKPOINTED}", TWO),
        step_time("NVLink; 4 × H200", "", f"--samples 5 --ways {ALL},psum:5,auto:5,explicit:5,"
                  f"{OURS},zero-explicit:5/2.5", "4 GPUs"),
    ],
    "scanned": [
        step_time("", HOSTS.replace("{rate}", "25gbit"), f"--samples 3 --steps 3 --ways {SCANNED}",
                  ROOTED)._replace(file="scanned.json", take=scanned),
        step_time("", HOSTS.replace("{rate}", "25gbit"), f"--samples 1 --steps 3 --ways {LARGE}",
                  ROOTED, "7b")._replace(file="scanned_7b.json", take=scanned),
        Job("largest.json", TWO, "python benchmarks/evidence/largest.py --json {json}"
            f" --ways {LARGEST}", whole),
        # A process for each: later ways would find parts of earlier ones traced, and kernels tuned.
        *[Job(f"first_step_{layers}.json", TWO, "python benchmarks/step_time.py --json {json}"
              f" --model 1b --layers {layers} --attention cudnn --compile-only --ways {way}",
              scanned) for layers in (16, 32) for way in FIRST.split(",")],
    ],
    "all-reduce": [
        Job("all_reduce.json", TWO, "CUDA_VISIBLE_DEVICES=0,1 python benchmarks/all_reduce.py"
            " --json {json}", all_reduces, "NVLink, one process; 2 × H200"),
        Job("all_reduce.json", "4 GPUs", "python benchmarks/all_reduce.py --json {json}",
            all_reduces, "NVLink, one process; 4 × H200"),
        Job("all_reduce.json", "4 GPUs", "NCCL_P2P_DISABLE=1 python benchmarks/all_reduce.py"
            " --sizes 256MiB --repeats 5 --json {json}", all_reduces, "host memory; 4 × H200"),
    ],
    "loss": [
        Job("losses.json", "a GPU", f"{TRAINING} --models tiny --seeds 32 --methods {METHODS_1}",
            losses),
        Job("losses.json", "a GPU", f"{TRAINING} --models mid --inits unit --seeds 8 --methods"
            f" {METHODS_1}", losses),
    ],
    "packets": [
        Job("losses.json", "2 CPU cores", f"{TRAINING} --models tiny --inits unit --steps 200"
            " --seeds 2 --methods f32-packet-loss,packet-loss:5,dynamiq:5", losses),
    ],
    "methods": [
        Job("training_125m.json", "a GPU", f"{TRAINING} --models 125m --inits unit --steps 200"
            f" --seeds 3 --methods {METHODS_125M}", resumes=True),
        Job("sharded_125m.json", "a GPU", f"{TRAINING} --models 125m --inits unit --steps 200"
            " --seeds 3 --methods dynamiq:5/dynamiq-dither:2.5,dynamiq:5/dynamiq:8/whole,"
            "dynamiq-dither:4/dynamiq-dither:2.5", resumes=True),
        Job("time_to_accuracy_losses.json", "a GPU", f"{TRAINING} --models mid --inits unit"
            f" --steps 800 --seeds 8 --methods {METHODS_TIMED.partition(',powersgd')[0]}",
            resumes=True),
        Job("errors.json", "2 CPU cores", "dynamiq-jax error --topology direct --methods"
            f" {METHODS_TIMED} --json {{json}}", merged),
        Job("transports.json", TWO, f"dynamiq-jax bench all-reduce --methods {METHODS_TIMED}"
            " --sizes 256MiB --json {json}", transports, "NVLink"),
        Job("transports.json", TWO, "NCCL_P2P_DISABLE=1 dynamiq-jax bench all-reduce --methods"
            f" {METHODS_TIMED} --sizes 256MiB --json {{json}}", transports, "host memory"),
    ],
    "workers": [
        Job("workers.json", "a GPU or hours of a CPU", f"{TRAINING} --workers {n} --global-batch 64"
            " --models mid --inits unit --topologies direct,butterfly,ring --methods"
            " bf16-psum,dynamiq:5,dynamiq:4 --seeds 2", resumes=True)
        for n in (8, 16, 64)
    ] + [
        Job("workers.json", "a GPU", f"{TRAINING} --workers 64 --global-batch 64 --models mid"
            " --inits unit --topologies direct,butterfly --seeds 2"
            f" --methods mxfp4,{FEW_BITS}", resumes=True),
    ],
    "accuracy": [
        Job("top1.json", "2 CPU cores", f"{TRAINING} --models micro --inits unit --steps 100"
            f" --seeds 8 --methods {EACH},thc", resumes=True),
        Job("top1.json", "a GPU", f"{TRAINING} --models 125m --inits unit --steps 200 --seeds 3"
            f" --methods {EACH}", resumes=True),
        Job("finetuned.json", "2 CPU cores", "python benchmarks/evidence/finetuned.py --model micro"
            " --seeds 8 --json {json}"),
        Job("classifier.json", "scikit-learn", "python benchmarks/evidence/classifier.py --seeds 8"
            " --json {json}"),
    ],
    "long": [
        Job("long.json", "a GPU for hours", f"{TRAINING} --models 125m --inits unit --steps 2300"
            " --seeds 1 --global-batch 64 --methods"
            f" {EACH},dynamiq:5/dynamiq:8/whole", long),
    ],
    "clock": [
        Job("against_the_clock.json", TWO, "NCCL_P2P_DISABLE=1 python"
            " benchmarks/evidence/against_the_clock.py --attention cudnn --links 'host memory'"
            " --json {json}", resumes=True),
        Job("against_the_clock.json", ROOTED, HOSTS.replace("{rate}", "25gbit") + "python"
            " benchmarks/evidence/against_the_clock.py --attention cudnn --links '25 Gb/s'"
            " --json {json}", resumes=True),
    ],
    "simulated": [
        Job("simulated.json", "minutes of a CPU", "dynamiq-jax simulate --workers 8,64,512,8192"
            " --topology ring,butterfly,direct --methods dynamiq:5,dynamiq-mse:5 --super-groups 256"
            " --json {json}"),
    ],
    "error": [
        Job("error.json", "2 CPU cores", "dynamiq-jax error --topology ring,butterfly,direct"
            " --methods dynamiq-paper:5,dynamiq:4,dynamiq:5,dynamiq-mse:5,dynamiq-dither:3.5,mxfp8,"
            "mxfp6,mxfp4,thc,omnireduce --json {json}"),
    ],
}  # fmt: skip
"""The commands of each table, by its name."""


def run(job: Job) -> bool:
    """Runs a command and keeps what it found; says whether it did."""
    file = RESULTS / job.file
    kept = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        if job.resumes and file.exists():
            found.write_text(file.read_text())
        words = shlex.split(job.command.replace("{json}", str(found)))
        env = os.environ.copy()
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        python = [sys.executable, "-m", "dynamiq_jax"]
        words = [w for word in words for w in (python if word == "dynamiq-jax" else [word])]
        words = [sys.executable if word == "python" else word for word in words]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
        if subprocess.run(words, cwd=ROOT, env=env).returncode or not found.exists():
            return False
        job.take(kept, json.loads(found.read_text()), shown(job), job.place)
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return True


def shown(job: Job) -> str:
    """The command as a user types it."""
    return job.command.replace(" --json {json}", "").replace(" --resume", "")


def main() -> None:
    """Reads the options, measures, and draws the pages."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", required=True, help=f"some of {', '.join(TABLES)}, by commas")
    parser.add_argument("--needs", default="", help="only jobs whose needs contain these words")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    args = parser.parse_args()
    if unknown := {*args.only.split(",")} - {*TABLES}:
        parser.error(f"no table {', '.join(sorted(unknown))}: pass some of {', '.join(TABLES)}")
    jobs = [job for name in args.only.split(",") for job in TABLES[name] if args.needs in job.needs]
    failed = []
    for job in jobs:
        print(f"# needs {job.needs}\n{shown(job)}", flush=True)
        if not args.list and not run(job):
            failed.append(shown(job))
    if not args.list:
        import pages

        pages.draw()
    sys.exit("\n".join(["these commands failed; their rows are as they were:", *failed])
             if failed else 0)  # fmt: skip


if __name__ == "__main__":
    main()
