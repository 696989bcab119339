"""Installs a driver volume and kills itself at a chosen step, for tests/isolation/test_driver_directory.py.

Run as a module: ROOT BASE CONTROL. Each line on stdin is a number; a forked child installs and sends itself SIGKILL right
before its operation of that number (audit events of files: open, link, rename, …). The answer is "killed" or "done".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpushare_agent.agent.delivery.host_libraries import DriverLibraries, read_control
from gpushare_agent.agent.delivery.volume_directory import DriverDirectory
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName, VolumePlan, plan_volume

EVENTS = ("open", "os.", "shutil.", "fcntl.", "tempfile.", "ctypes.")
LISTED = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so")


def install(root: Path, base: Path, control: Path, client: Path) -> None:
    volume = DriverVolume(name=VolumeName.SHARED, base=base, binaries=("nvidia-smi",), libraries=LISTED)
    plan = plan_volume(volume, DriverLibraries(root).find(volume), os.uname().machine, read_control(control, client))
    assert isinstance(plan, VolumePlan), plan
    directory = DriverDirectory(base)
    kill_at(int(sys.argv.pop()))
    directory.install(plan, lambda what, done, total: None)


def kill_at(step: int) -> None:
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(EVENTS):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def main() -> None:
    root, base, control, client = (Path(argument) for argument in sys.argv[1:5])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.argv.append(line.strip())
            install(root, base, control, client)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        sys.stdout.write("killed\n" if killed else "done\n" if status == 0 else f"failed {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
