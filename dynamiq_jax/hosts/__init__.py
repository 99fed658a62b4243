"""Training that survives the loss of a host: a supervisor, and copies of the state in memory.

`dynamiq-jax run` starts processes and starts them again (`supervisor.py`). A process keeps copies
in the memory of its supervisor and of the next host's (`Copies`), and compiled programs
(`load_or_compile`). Training does not need this.
"""

from dynamiq_jax.hosts.copies import Copies, Copy
from dynamiq_jax.hosts.pace import Slow, slow_hosts
from dynamiq_jax.hosts.programs import load_or_compile

__all__ = ["Copies", "Copy", "Slow", "load_or_compile", "slow_hosts"]
