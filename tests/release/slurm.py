"""A real SLURM on hosts of `benchmarks/hosts.py`: munged, slurmctld and a slurmd on every host."""

import os
import re
import shutil
import signal
import subprocess

from engines import Machines

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


class Slurm(Machines):
    """SLURM on the hosts of ``made``, of which host 0 has the controller; no daemon outlives these.

    Args:
      made: the hosts.
      folder: for configuration, logs and state.
      timeout: seconds after which a silent slurmd counts as down (300 by default).
      expire: seconds of a credential; a job that is queued again waits as long (120 by default).
    """

    def __init__(self, made, folder, timeout=10, expire=5):
        super().__init__(made, folder)
        for name in ("state", *(f"spool-host{i}" for i in range(made.n))):
            (self.folder / name).mkdir(parents=True)
        values = {"folder": folder, "last": made.n - 1, "timeout": timeout, "expire": expire}
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(CONF.format(**values))
        (self.folder / "cgroup.conf").write_text(CGROUP)
        self.env |= {"SLURM_CONF": str(self.conf)}

    def __enter__(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{name}={self.folder}/munge.{end}" for name, end in names.items()]
        munge = ["munged", "--foreground", "--force", f"--key-file={key}", *files]
        self.munged = subprocess.Popen(munge, stderr=subprocess.DEVNULL)
        try:
            self.until(lambda: (self.folder / "munge.socket").exists())
            self.start(0, "slurmctld", "-i", "-D", env=self.own, log="slurmctld")
            for i in range(self.made.n):
                self.join(i)
            self.until(lambda: len(self.nodes("idle")) == self.made.n, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        super().__exit__()
        self.munged.kill()
        self.munged.wait()

    @property
    def own(self):
        """The variable of the daemons."""
        return {"SLURM_CONF": str(self.conf)}

    def join(self, i):
        """Starts the slurmd of host i."""
        self.start(i, "slurmd", "-N", f"host{i}", "-D", env=self.own, log="slurmd")

    def kill_slurmd(self, i):
        """Kills the slurmd of host i, and neither jobs nor their shepherds."""
        os.kill(int((self.folder / f"slurmd-host{i}.pid").read_text()), signal.SIGKILL)

    def nodes(self, *states):
        """The names of nodes in these states."""
        chosen = ["--states", ",".join(states)] if states else []
        return {*self("sinfo", "-h", "-N", "-o", "%N", *chosen, check=False).split()}

    def submit(self, *words):
        """The number of a job that `sbatch` has queued."""
        return int(re.search(r"\d+", self("sbatch", "--parsable", *words)).group())

    def state(self, job):
        """The state of a job, and its reason; nothing after its end."""
        return self("squeue", "-h", "-j", job, "-o", "%T %r", check=False)
