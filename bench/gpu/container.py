"""Becomes a program in a container of the sandbox: with the mounts and device nodes that the agent answered.

    unshare -m -p -f --kill-child python3 container.py SPEC -- COMMAND...

SPEC is a JSON file: `mounts` and `devices` as `gpushare-agent sandbox status -o json` shows them; `library_path` and
`path`, where the machine's driver and programs are, which stand behind what the container's environment names; `staging`, an
empty directory; `uid`; `has_namespaces`.

The container's file system is the machine's, with the mounts over it. Where a mount point is missing its directory is
covered by a tmpfs with the same entries, so that nothing is written to the machine's. Without namespaces nothing can be
mounted: then the host's paths take the places of the container's in the environment, and LD_PRELOAD that of
/etc/ld.so.preload; libgpushare, which reads no path from anybody, is preloaded as a copy that looks for its files in
the working directory, and the container's is that. Linux, as root; standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PRELOAD_PATH = "/etc/ld.so.preload"
_BIND, _REC, _MOVE, _PRIVATE, _REMOUNT, _READ_ONLY = 4096, 16384, 8192, 1 << 18, 32, 1
_GPU_NODE = re.compile(r"nvidia\d+")
_libc = ctypes.CDLL(None, use_errno=True)


def main(words: Sequence[str]) -> None:
    """Does not return. Raises OSError where something cannot be mounted, or the command not be run."""
    spec, command = json.loads(Path(words[0]).read_text()), list(words[2:])
    environment = dict(os.environ)
    if spec["has_namespaces"]:
        mount_all(spec["mounts"], spec["devices"], Path(spec["staging"]))
    else:
        environment = by_hand(environment, spec["mounts"])
        enter_by_hand(environment, spec["mounts"], Path(spec["staging"]))
    for name, more in (("LD_LIBRARY_PATH", spec["library_path"]), ("PATH", spec["path"])):
        environment[name] = ":".join(filter(None, (environment.get(name), more)))
    if not environment["LD_LIBRARY_PATH"]:
        del environment["LD_LIBRARY_PATH"]
    if spec["uid"]:
        os.setgroups([])
        os.setgid(spec["uid"])
        os.setuid(spec["uid"])
    os.execvpe(command[0], command, environment)  # noqa: S606 - its purpose


def mount_all(mounts: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]], staging: Path) -> None:
    """In the mount and PID namespaces of this process. Raises OSError."""
    _mount("none", "/", flags=_PRIVATE | _REC)
    _mount("proc", "/proc", "proc")
    answered = {Path(device["container_path"]).name for device in devices}
    if any(map(_GPU_NODE.fullmatch, answered)):  # else another program brings them, and all are there
        _cover(Path("/dev"), staging, lambda name: not _GPU_NODE.fullmatch(name) or name in answered)
    for mount in sorted(mounts, key=lambda mount: str(mount["container_path"])):
        target = Path(mount["container_path"])
        _make_mount_point(target, staging, is_directory=Path(mount["host_path"]).is_dir())
        _mount(mount["host_path"], str(target), flags=_BIND)
        if mount["read_only"]:
            _mount("none", str(target), flags=_BIND | _REMOUNT | _READ_ONLY)


def _make_mount_point(target: Path, staging: Path, *, is_directory: bool) -> None:
    if target.exists():
        return
    ancestor = next(parent for parent in target.parents if parent.exists())
    if not _is_cover(ancestor):
        _cover(ancestor, staging)
    if is_directory:
        target.mkdir(parents=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()


def _is_cover(directory: Path) -> bool:
    """Whether it lies in a tmpfs that this process made: the device number of one is no other's."""
    return directory.stat().st_dev in _covers


_covers: set[int] = set()


def _cover(directory: Path, staging: Path, keeps: Callable[[str], bool] = lambda _: True) -> None:
    """Puts a tmpfs with the same entries over a directory; entries can be added to it. Raises OSError."""
    directory = directory.resolve()
    if directory == Path("/"):
        raise OSError(f"{directory} cannot be covered: a mount point must lie in a directory below it")
    entries = [entry for entry in os.scandir(directory) if keeps(entry.name)]
    _mount("tmpfs", str(staging), "tmpfs", data=f"mode={stat.S_IMODE(directory.stat().st_mode):o}")
    _covers.add(staging.stat().st_dev)
    for entry in entries:
        place = staging / entry.name
        if entry.is_symlink():
            place.symlink_to(Path(entry.path).readlink())
            continue
        place.mkdir() if entry.is_dir() else place.touch()
        _mount(entry.path, str(place), flags=_BIND | _REC)
    _mount(str(staging), str(directory), flags=_MOVE)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError."""
    if _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {source} at {target}: {os.strerror(number)}")


def by_hand(environment: Mapping[str, str], mounts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The environment with the host's paths in it. Pure but for the preload file, which is read."""
    places = {mount["container_path"]: mount["host_path"] for mount in mounts}

    def on_host(path: str) -> str:
        for inside in sorted(places, key=len, reverse=True):
            if path == inside or path.startswith(f"{inside}/"):
                return str(places[inside]) + path[len(inside) :]
        return path

    changed = {name: ":".join(map(on_host, text.split(":"))) for name, text in environment.items() if "/" in text}
    if PRELOAD_PATH in places:
        changed["LD_PRELOAD"] = ":".join(map(on_host, Path(places[PRELOAD_PATH]).read_text().split()))
    return {**environment, **changed}


def enter_by_hand(environment: dict[str, str], mounts: Sequence[Mapping[str, Any]], staging: Path) -> None:
    """For libgpushare: changes LD_PRELOAD and the working directory, where the container has a directory of limits."""
    places = {mount["container_path"]: mount["host_path"] for mount in mounts}
    library = Path(environment.get("LD_PRELOAD", ""))
    if "/etc/vcuda" not in places or library.name != "libgpushare.so":
        return
    copy = staging / library.name
    copy.write_bytes(library.read_bytes().replace(b"/etc/vcuda/", b".".ljust(11, b"/")))  # of the same length
    environment["LD_PRELOAD"] = str(copy)
    os.chdir(places["/etc/vcuda"])


if __name__ == "__main__":
    main(sys.argv[1:])
