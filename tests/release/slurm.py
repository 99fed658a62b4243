"""A real SLURM on hosts of `benchmarks/hosts.py`: munged, slurmctld and a slurmd on every host."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from hosts import sh

DAEMONS = "munged", "slurmctld", "slurmd", "srun", "sbatch"
MISSING = [name for name in DAEMONS if not shutil.which(name)]
CONF = """
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
SlurmdTimeout={timeout}
KillWait=5
NodeName=host[0-{last}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30 \
OverSubscribe=NO State=UP
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP
"""
CGROUP = "CgroupAutomount=yes\nCgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"
DAEMON = "mkdir -p {shm} && mount --bind {shm} /dev/shm && {cgroup} exec {command}"


class Slurm:
    """SLURM on the hosts of ``made``; no daemon outlives these.

    Args:
      made: hosts, of which host 0 has the controller.
      folder: for configuration, logs and state.
      timeout: seconds after which a silent slurmd counts as down (300 by default).
      expire: seconds of a credential; a job that is queued again waits as long (120 by default).
    """

    def __init__(self, made, folder, timeout=10, expire=5):
        self.made, self.folder = made, Path(folder)
        self.shm = Path("/dev/shm") / made.names[0]
        for name in ("state", *(f"spool-host{i}" for i in range(made.n))):
            (self.folder / name).mkdir(parents=True)
        values = {"folder": folder, "last": made.n - 1, "timeout": timeout, "expire": expire}
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(CONF.format(**values))
        (self.folder / "cgroup.conf").write_text(CGROUP)
        self.env = {
            name: text for name, text in os.environ.items()
            if not name.startswith(("COORDINATOR", "NUM_HOSTS", "HOST_ID", "XLA_FLAGS"))
        } | {"SLURM_CONF": str(self.conf)}  # fmt: skip

    def __enter__(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{name}={self.folder}/munge.{end}" for name, end in names.items()]
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", *files]
        self.munged = subprocess.Popen(munge, stderr=subprocess.DEVNULL)
        self.until(lambda: (self.folder / "munge.socket").exists())
        self.controller = self.daemon(0, "slurmctld -i")
        self.slurmds = [self.start(i) for i in range(self.made.n)]
        self.until(lambda: len(self.nodes("idle")) == self.made.n, 60)
        return self

    def __exit__(self, *_):
        for i in range(self.made.n):
            self.made.kill(i)
        self.munged.kill()
        self.munged.wait()
        shutil.rmtree(self.shm, ignore_errors=True)

    def daemon(self, i, command):
        """Starts a daemon on host i, which has its own /dev/shm as a machine has."""
        words = {"shm": self.shm / f"host{i}", "cgroup": "", "command": f"{command} -D"}
        log = self.folder / f"{command.split()[0]}{i}.log"
        return self.made.start(
            i, ["sh", "-c", DAEMON.format(**words)], env={"SLURM_CONF": str(self.conf)}, log=log
        )

    def start(self, i):
        """Starts the slurmd of host i."""
        return self.daemon(i, f"slurmd -N host{i}")

    def kill_slurmd(self, i):
        """Kills the slurmd of host i, and neither jobs nor their shepherds."""
        os.kill(int((self.folder / f"slurmd-host{i}.pid").read_text()), signal.SIGKILL)

    def __call__(self, *words, check=True):
        """What a command of SLURM says, on host 0."""
        enter = ["ip", "netns", "exec", self.made.names[0], *map(str, words)]
        done = subprocess.run(enter, env=self.env, capture_output=True, text=True, check=False)
        assert not (check and done.returncode), done.stderr
        return done.stdout.strip()

    def nodes(self, *states):
        """The names of nodes in these states."""
        chosen = ["--states", ",".join(states)] if states else []
        return {*self("sinfo", "-h", "-N", "-o", "%N", *chosen, check=False).split()}

    def submit(self, *words):
        """The number of a job that `sbatch` has queued."""
        return int(re.search(r"\d+", self("sbatch", "--parsable", *words)).group())

    def state(self, job):
        """The state of a job; the reason if it waits."""
        return self("squeue", "-h", "-j", job, "-o", "%T %r", check=False)

    def tasks(self, i, word):
        """The processes of host i whose command has a word, the newest last."""
        found = []
        for pid in sh("ip", "netns", "pids", self.made.names[i]).stdout.split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(part.endswith(word.encode()) for part in command[1:3]):
                found.append(int(pid))
        return sorted(found)

    def until(self, true, seconds=30.0, said=None):
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                logs = [*self.folder.glob("*.log"), *([said] if said else [])]
                raise AssertionError(
                    "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
                )
            time.sleep(0.1)
