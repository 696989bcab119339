"""Becomes a program in a container of the sandbox, with the root file system that a container runtime would give it.

    python enter_container.py SPEC PROGRAM...

SPEC is JSON (support_isolation.ContainerSpec): the sandbox asked for the container's cgroup and environment, the
mounts and devices that the agent answered, and the user. What a runtime does is done with the kernel's own means: a
mount and a PID namespace, in which the program is PID 1, a root of its own with the machine's /usr, /proc of the
namespace, /dev with the answered devices alone, and the answered mounts. Of the fake driver it has what a real one's
kernel module has: /proc/driver/nvidia, and the state that all containers share. The libraries are mounted as NVIDIA's
runtime does it, into the loader's cache, unless the answer mounts a driver volume.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpushare_agent.sandbox.control import ask

_NEW_NAMESPACES = 0x00020000 | 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DEATH_SIGNAL = 1
_STATE = "/var/lib/fake-gpu"  # where the fake driver looks without a variable
_RUNTIME_LIBRARIES = "/run/nvidia-driver"
_DRIVER_VOLUME = "/usr/local/nvidia"
_DEVICES = ("null", "zero", "full", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: Path, *, kind: str = "none", flags: int = 0) -> None:
    arguments = [text.encode() for text in (source, str(target), kind)]
    _check(libc.mount(*arguments, ctypes.c_ulong(flags), None), f"mount {source} {target}")


def _bind(source: str | Path, target: Path, *, read_only: bool = True) -> None:
    """A file or a directory; what it is mounted on is made."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():  # as in a directory that is mounted read-only
            target.touch()
    _mount(str(source), target, flags=_BIND | _RECURSIVE)
    if read_only:
        _mount("none", target, flags=_BIND | _REMOUNT | _READ_ONLY)


def _make_root(root: Path, spec: dict[str, Any]) -> None:
    _mount("none", Path("/"), flags=_PRIVATE | _RECURSIVE)
    _mount("tmpfs", root, kind="tmpfs")
    _bind("/usr", root / "usr")
    _mount("tmpfs", root / "usr/local", kind="tmpfs")  # an image has nothing of the machine's there
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for name in ("etc", "proc", "tmp", "root"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    _mount("proc", root / "proc", kind="proc")
    _bind(spec["proc_driver"], root / "proc/driver")
    _make_devices(root / "dev", spec["devices"])
    _bind(spec["state"], root / _STATE.lstrip("/"), read_only=False)
    _bind(spec["programs"], root / "opt/programs")
    if not any(mount["container_path"].rstrip("/") == _DRIVER_VOLUME for mount in spec["mounts"]):
        _bind(spec["libraries"], root / _RUNTIME_LIBRARIES.lstrip("/"))
        (root / "etc/ld.so.conf").write_text(f"{_RUNTIME_LIBRARIES}\n")
    subprocess.run(["/usr/sbin/ldconfig", "-r", str(root)], check=True, capture_output=True)
    for mount in spec["mounts"]:
        _bind(mount["host_path"], root / mount["container_path"].lstrip("/"), read_only=mount["read_only"])


def _make_devices(directory: Path, answered: list[dict[str, Any]]) -> None:
    """The answered nodes are the null device where this machine has none: the fake driver only looks whether they are
    there.
    """
    directory.mkdir()
    for name in _DEVICES:
        _bind(f"/dev/{name}", directory / name, read_only=False)
    (directory / "shm").mkdir(mode=0o1777)
    for device in answered:
        source = device["host_path"] if Path(device["host_path"]).exists() else "/dev/null"
        _bind(source, directory.parent / device["container_path"].lstrip("/"), read_only=False)


def _enter(spec: dict[str, Any]) -> dict[str, str]:
    """Into the container's cgroup; its environment."""
    request = {"command": "exec", "namespace": "default", "pod": spec["pod"], "container": spec["container"]}
    answer = asyncio.run(ask(Path(spec["control"]), request))
    if not answer["ok"]:
        raise SystemExit("; ".join(answer["errors"]))
    env: dict[str, str] = answer["env"]
    return env | spec["env"]


def _become(spec: dict[str, Any], env: dict[str, str], command: list[str]) -> None:
    """In the child, which is PID 1 of the new namespace."""
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    root = Path(spec["root"])
    _make_root(root, spec)
    os.chroot(root)
    os.chdir("/")
    if spec["uid"]:
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])
    os.execvpe(command[0], command, env)


def main() -> int:
    spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    env = _enter(spec)
    _check(libc.unshare(_NEW_NAMESPACES), "unshare")
    child = os.fork()
    if child == 0:
        try:
            _become(spec, env, command)
        finally:
            os._exit(126)
    # A signal for the container is one for its PID 1, which a runtime's shim would pass on.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
