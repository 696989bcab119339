"""Many processes at once, from a tree of files of /proc's shape and from the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.cgroup_paths import NOBODY
from gpushare_agent.agent.runtime.cgroups import ProcessOwners

UID = "0f3c1e52-3c27-4b7e-9d0c-8b8f1d1f0a01"
OTHER = "0f3c1e52-3c27-4b7e-9d0c-8b8f1d1f0a02"


def put(proc: Path, pid: int, text: str) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "cgroup").write_text(text)


def path_of(uid: str, digit: str) -> str:
    return f"0::/kubepods/burstable/pod{uid}/{digit * 64}\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    return tmp_path


def test_each_process_is_reported_by_its_own_cgroup(proc: Path) -> None:
    """Pod and container, nobody for the node's own, and nobody for a PID that is not here."""
    put(proc, 10, path_of(UID, "a"))
    put(proc, 11, path_of(OTHER, "b"))
    put(proc, 12, "0::/system.slice/dbus.service\n")
    found = ProcessOwners(proc).read([10, 11, 12, 13])
    assert (found[10].pod_uid, found[10].container_id) == (UID, "a" * 64)
    assert (found[11].pod_uid, found[11].container_id) == (OTHER, "b" * 64)
    assert (found[12], found[13]) == (NOBODY, NOBODY)


def test_a_pid_that_another_process_has_now_is_that_ones(proc: Path) -> None:
    """Nothing that was read of a PID before counts once its process is another."""
    owners = ProcessOwners(proc)
    put(proc, 10, path_of(UID, "a"))
    assert owners.read([10])[10].pod_uid == UID
    put(proc, 10, path_of(OTHER, "b"))
    assert owners.read([10])[10].pod_uid == OTHER


async def test_an_ended_process_that_the_driver_still_lists_keeps_its_owner(proc: Path) -> None:
    """And is forgotten as soon as the driver does not list it any more."""
    owners = ProcessOwners(proc)
    put(proc, 10, path_of(UID, "a"))
    owners.read([10])
    (proc / "10" / "cgroup").unlink()
    assert owners.read([10])[10].pod_uid == UID
    await owners.identify([])
    assert owners.read([10])[10] == NOBODY


def test_a_text_that_is_too_long_names_nobody(proc: Path) -> None:
    """What cannot be read whole is not believed in part."""
    put(proc, 10, path_of(UID, "a") + "1:name=x:/" + "y" * 70_000 + "\n")
    assert ProcessOwners(proc).read([10])[10] == NOBODY


async def test_the_real_proc_is_read_in_a_thread() -> None:
    """This process is found, in whatever cgroup it is, and a PID that cannot exist is nobody."""
    found = await ProcessOwners().identify([os.getpid(), 2**22 + 1])
    assert set(found) == {os.getpid(), 2**22 + 1}
    assert found[2**22 + 1] == NOBODY
    assert await ProcessOwners().identify([]) == {}
