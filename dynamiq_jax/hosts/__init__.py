"""Training that survives the loss of a host: a supervisor, and copies of the state in memory.

`dynamiq-jax run` starts processes and starts them again (`supervisor.py`). A process keeps copies
in the memory of its supervisor and of the next host's (`Copies`). Training does not need this.
"""

from dynamiq_jax.hosts.copies import Copies, Copy

__all__ = ["Copies", "Copy"]
