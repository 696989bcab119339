"""Whether this process sees the PIDs of the whole machine. No state."""

from __future__ import annotations

import os

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode number of the PID namespace that the kernel starts with (PROC_PID_INIT_INO)."""


def is_host_pid_namespace() -> bool:
    """False also where it is not known, and on a node that is itself a container."""
    return pid_namespace_of("self") == _FIRST_PID_NAMESPACE


def pid_namespace_of(process: int | str) -> int | None:
    """A number that names the PID namespace of a process, None where it is gone or may not be read."""
    try:
        return os.stat(f"/proc/{process}/ns/pid").st_ino  # noqa: PTH116 - kit stays light: the in-container client uses it
    except OSError:
        return None
