"""The elastic limit of a share, and which PIDs pids.config holds: by the kernel module in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.vdevice.container_processes import reported_pids
from gpushare_agent.agent.runtime.cgroups import Cgroups, parse_namespace_pids
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.shares import core_limit, share_cores
from tests.support_core import NAMES, allocation, container, ids, inventory, pod


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("60", 60),
        ("40", 40),
        ("100", 100),
        ("150", 100),
        ("999999999", 100),
        ("+60", 60),
        ("0060", 60),
        ("0", 0),
        ("-0", 0),
    ],
)
def test_a_core_limit_is_read_as_gpu_manager_reads_it(text: str, percent: int) -> None:
    """What is above 100 is 100. 0 is the one number of these that differs: no ceiling."""
    found = core_limit({CORE_LIMIT_ANNOTATION: text}, 40)
    assert (found.percent, found.problem) == (percent, "")


@pytest.mark.parametrize("text", ["", "-1", "39", "60%", "6e1", " 60", "60.0", "\u0666\u0660", "1" * 10, "x" * 10_000])
def test_a_core_limit_that_would_stop_or_starve_programs_is_ignored_with_the_reason(text: str) -> None:
    """docs/how-to/migrate-from-gpu-manager.md lists them: gpu-manager ends the programs, or holds them below their cores."""
    found = core_limit({CORE_LIMIT_ANNOTATION: text}, 40)
    assert found.percent == 0
    assert CORE_LIMIT_ANNOTATION in found.problem
    assert len(found.problem) < 200


@pytest.mark.parametrize(
    ("version", "is_open", "pids"),
    [
        ("535.104.05", False, (4711,)),
        ("580.65.06", False, (4711,)),
        ("510.39.01", True, (4711,)),
        ("515.43.04", True, (4711, 7, 1)),
        ("565.57.01", True, (4711, 7, 1)),
        ("570.86.15", True, (7, 1)),
        ("615.71", True, (7, 1)),
    ],
)
def test_the_pids_are_those_that_the_kernel_module_reports(version: str, is_open: bool, pids: tuple[int, ...]) -> None:
    """The proprietary one the host's, the open one the namespaces': in lists from 515, in samples from 570."""
    assert reported_pids(4711, (7, 1), KernelModule(version=version, is_open=is_open)) == pids


def test_a_process_in_the_hosts_namespace_has_its_host_pid_under_every_module() -> None:
    """As in a pod with hostPID; and where no module is known."""
    assert reported_pids(4711, (), KernelModule(version="570.86.15", is_open=True)) == (4711,)
    assert reported_pids(4711, (7,), None) == (4711,)


@pytest.mark.parametrize(
    ("status", "pids"),
    [
        (b"Name:\tx\nPid:\t4711\nNSpid:\t4711\n", ()),
        (b"Name:\tx\nNSpid:\t4711\t7\t1\nNSpgid:\t1\n", (7, 1)),
        (b"Name:\ta\\nNSpid:\t1\t2\nNSpid:\t4711\t7\n", (7,)),
        (b"Name:\tx\nNSpid:\t4711\t-1\n", ()),
        (b"Name:\tx\n", ()),
        (b"", ()),
    ],
)
def test_the_status_of_a_process_is_read(status: bytes, pids: tuple[int, ...]) -> None:
    """A name with an escaped line end is no line of its own."""
    assert parse_namespace_pids(status) == pids


def test_of_real_processes_the_pids_below_this_namespace_are_found() -> None:
    """A process of ours has none; one in a namespace of its own is 1 there; one that is gone is left out."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    found = Cgroups().namespace_pids([os.getpid(), gone.pid])
    assert found == {os.getpid(): ()}
    command = ["sh", "-c", "exec unshare -p -f sh -c 'echo ready; read line'"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("no PID namespace can be made here")
        [first] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        assert Cgroups().namespace_pids([first]) == {first: (1,)}
        process.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(("memory_mib", "cores"), [(24 * 1024, 16), (0, 0)])
def test_memory_alone_gets_the_same_part_of_compute_where_the_gpus_memory_is_known(memory_mib: int, cores: int) -> None:
    """An unhealthy GPU of which the driver reports the UUID alone has 0 MiB."""
    gpus = inventory(memory_mib=memory_mib).by_uuid()
    share = allocation(pod("share", container()), "main", (), ())
    share = replace(share, ids={ResourceKind.GPU_MEM: frozenset(ids(0, range(4)))}, gpus=(next(iter(gpus)),))
    assert share_cores(share, gpus, NAMES) == cores
