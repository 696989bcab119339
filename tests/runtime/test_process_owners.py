"""Many processes at once, from a tree of files of /proc's shape and from the real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.cgroup_paths import NOBODY
from gpushare_agent.agent.runtime.cgroups import Cgroups, ProcessOwners

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


TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def put_process(proc: Path, pid: int, *, name: bytes = b"python3", inner: str = "7", start: int = 1000) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "status").write_bytes(b"Name:\t%s\nUmask:\t0022\nNSpid:\t%d\t%s\n" % (name, pid, inner.encode()))
    fields = " ".join(["S", *["0"] * 18, str(start), "0"])
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {fields}\n")


def test_a_process_has_its_name_and_its_pid_in_the_container(proc: Path) -> None:
    """The innermost PID, none in the host's own namespace; control characters of a tenant's name go, and so does what is
    beyond the bound."""
    put_process(proc, 10)
    put_process(proc, 11, name=b"\x1b[31mred\xff\xe2\x80\xae", inner="")
    put_process(proc, 12, name=b"n" * 9000, inner="4 1")
    put_process(proc, 13, name=b"")
    found = ProcessOwners(proc).read_names([10, 11, 12, 13, 14], 60.0)
    assert {pid: (one.pid_in_container, one.command) for pid, one in found.items()} == {
        10: (7, "python3"),
        11: (None, "[31mred\ufffd"),
        12: (1, "n" * 64),
        13: (7, None),
    }


def test_no_number_of_groups_hides_a_process(proc: Path) -> None:
    """Root in a container may give itself as many as the kernel takes."""
    put_process(proc, 10)
    status = proc / "10" / "status"
    groups = b"Groups:\t%s\n" % (b"4294967294 " * 65_536)
    status.write_bytes(status.read_bytes().replace(b"NSpid:", groups + b"NSpid:") + b"VmSize:\t1 kB\n")
    assert ProcessOwners(proc).read_names([10], 60.0)[10].pid_in_container == 7
    assert Cgroups(proc=proc).namespace_pids([10]) == {10: (7,)}


def test_a_pid_that_another_process_has_since_the_round_names_nobody(proc: Path) -> None:
    """A start in the last tick before the round may be after it, too: the kernel rounds down."""
    for pid, start in ((10, 999), (11, 1000), (12, 1001)):
        put_process(proc, pid, start=start)
    assert ProcessOwners(proc).read_names([10, 11, 12], 1000 * TICK_S).keys() == {10}


async def test_this_process_is_described() -> None:
    """From the real /proc."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = await ProcessOwners().describe([os.getpid(), 2**22 + 1], now_s)
    assert found[os.getpid()].command == Path("/proc/self/comm").read_text().strip()
    assert await ProcessOwners().describe([os.getpid()], 0.0) == {}
