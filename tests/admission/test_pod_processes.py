"""Whether a pod still has processes, by its cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.names import PodUid

UID = PodUid("0e7a3f2c-1111-2222-3333-444455556666")
SYSTEMD = f"kubepods-burstable-pod{UID.replace('-', '_')}.slice"

SHAPES = [
    f"kubepods/pod{UID}/abc",
    f"kubepods/burstable/pod{UID}/abc",
    f"cpu/kubepods/besteffort/pod{UID}/abc",
    f"kubepods.slice/kubepods-burstable.slice/{SYSTEMD}/cri-containerd-abc.scope",
    f"kubepods.slice/kubepods-burstable.slice/{SYSTEMD}/crio-abc.scope/container",
    f"docker/0123/kubelet/kubepods/pod{UID}/abc",
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_processes_are_found_below_any_hierarchy(tmp_path: Path, shape: str) -> None:
    """cgroupfs and systemd, v1 and v2, nested."""
    directory = tmp_path / shape
    directory.mkdir(parents=True)
    procs = directory / "cgroup.procs"
    procs.write_text("")
    processes = Cgroups(tmp_path)
    assert await processes.has_processes_in_thread(UID) is False
    procs.write_text("4711\n")
    assert await processes.has_processes_in_thread(UID) is True
    assert await processes.has_processes_in_thread(PodUid(UID.replace("0e7a", "ffff"))) is False


async def test_what_cannot_be_known_is_none(tmp_path: Path) -> None:
    """No hierarchy at all, or a UID that is none: never a path."""
    assert await Cgroups(tmp_path / "none").has_processes_in_thread(UID) is None
    assert await Cgroups(tmp_path).has_processes_in_thread(PodUid("../../etc")) is None
    assert await Cgroups(tmp_path).has_processes_in_thread(PodUid("")) is None


async def test_links_are_not_followed(tmp_path: Path) -> None:
    """A planted link leads nowhere."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "cgroup.procs").write_text("1\n")
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / f"pod{UID}").symlink_to(target)
    assert await Cgroups(root).has_processes_in_thread(UID) is False


async def test_a_stalled_file_system_is_unavailable(tmp_path: Path) -> None:
    """A pipe in the place of cgroup.procs stands for it: not known now is not the same as no process."""
    directory = tmp_path / f"kubepods/pod{UID}"
    directory.mkdir(parents=True)
    os.mkfifo(directory / "cgroup.procs")
    processes = Cgroups(tmp_path)
    for reason in ("got no answer within 2 s", "an earlier call still hangs"):
        with pytest.raises(Unavailable, match=reason):
            await processes.has_processes_in_thread(UID)
    os.close(os.open(directory / "cgroup.procs", os.O_WRONLY))
