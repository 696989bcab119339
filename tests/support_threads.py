"""The end of a test's directory: a cancelled call goes on in its thread (core/kit/daemon_thread.py), and what it writes or
removes there would meet the removal."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from gpushare_agent.core.kit.daemon_thread import DaemonThread

HANGS_S = 2.0
_hanging: set[threading.Thread] = set()
"""Those that a test made hang: they are waited for once."""


def remove_directory(path: Path) -> None:
    """Removes it once the calls that were begun are over. One that hangs is left to itself."""
    for thread in threading.enumerate():
        worker = getattr(getattr(thread, "_target", None), "__self__", None)
        if not isinstance(worker, DaemonThread) or thread in _hanging:
            continue
        ended = threading.Event()
        worker._jobs.put(ended.set)
        waited_s = 0.0
        # A thread that has just ended takes no more jobs.
        while thread.is_alive() and waited_s < HANGS_S and not ended.wait(0.05):
            waited_s += 0.05
        if thread.is_alive() and not ended.is_set():
            _hanging.add(thread)
    shutil.rmtree(path)
