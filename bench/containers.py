"""The containers of the benchmark's node: cgroups of plain files, of the kernel's shape."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path


class Containers:
    """The cgroups of containers below `root`, as a runtime names them, with their processes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(exist_ok=True)
        (root / "cgroup.controllers").touch()  # by which runtime/cgroups.py knows a hierarchy

    def id_of(self, uid: str) -> str:
        return hashlib.sha256(uid.encode()).hexdigest()

    def text_of(self, uid: str) -> str:
        """What /proc says of a process in it."""
        return f"0::/kubepods/burstable/pod{uid}/{self.id_of(uid)}\n"

    def put(self, uid: str, pids: Iterable[int]) -> None:
        directory = self._root / "kubepods" / "burstable" / f"pod{uid}" / self.id_of(uid)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

    def remove(self, uid: str) -> None:
        shutil.rmtree(self._root / "kubepods" / "burstable" / f"pod{uid}")
