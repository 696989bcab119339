"""The real containerd and runc: containers, their cgroups, processes and identities as the agent sees them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import NotFound, Unavailable
from tests.agent.support_containerd import CGROUP_ROOT, Containerd, running_container, running_containerd, why_not
from tests.runtime.support_cgroups import find_cgroup
from tests.runtime.support_cri import open_runtime, reported_pid
from tests.support_deadline import DEADLINE_S

pytestmark = pytest.mark.containers

TIMEOUT_S = DEADLINE_S
FORKS = ("/bin/sh", "-c", "sleep 86400 & sleep 86400 & wait")


@pytest.fixture(scope="module")
def containerd() -> Iterator[Containerd]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no real container can run here: {reason}")
    with running_containerd() as started:
        yield started


async def test_a_running_container_is_listed_with_its_pod_and_pid(containerd: Containerd) -> None:
    """The labels of the kubelet come back; the PID is the host's."""
    async with (
        running_container(containerd, FORKS) as made,
        open_runtime(str(containerd.socket), timeout_s=TIMEOUT_S) as client,
    ):
        await made.wait_processes(3)  # runc's start returns before the program is in the process
        assert (await client.version()).name == "containerd"
        key = ContainerKey(made.pod_uid, made.container_name)
        assert (await client.running())[key] == made.id
        assert await client.owner_of(made.id) == key
        pid = await reported_pid(containerd.socket, made.id)
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/sh\0-c\0")
        with pytest.raises(NotFound):
            await client.owner_of("0" * 64)


async def test_every_process_of_a_container_is_found_and_known(containerd: Containerd) -> None:
    """Forked children, what is executed in it later, and what moves to a cgroup below; nobody else is taken for it."""
    cgroups = Cgroups()
    async with running_container(containerd, FORKS) as made, running_container(containerd, FORKS) as other:
        await made.wait_processes(3)
        first = await reported_pid(containerd.socket, made.id)
        found = find_cgroup(cgroups, made.id, made.pod_uid)
        assert found is not None
        assert first is not None
        pids = cgroups.processes(found).pids
        assert first in pids
        assert len(pids) == 3
        expected = PeerIdentity(pod_uid=made.pod_uid, container_id=made.id)
        assert [cgroups.identify(pid) for pid in pids] == [expected] * 3

        await made.execute("/bin/sh", "-c", "sleep 86400 >/dev/null 2>&1 &")
        later = cgroups.processes(found).pids
        assert len(later) == 4
        assert set(pids) < set(later)

        below = found.path / "below"
        below.mkdir()
        (below / "cgroup.procs").write_text(str(pids[-1]))
        assert cgroups.processes(found).pids == later
        assert cgroups.identify(pids[-1]) == expected

        assert find_cgroup(cgroups, made.id, other.pod_uid) is None
        assert set(cgroups.processes_round(cgroups.find_many([(made.id, None), (other.id, None)]).values())) == {
            made.id,
            other.id,
        }
        assert cgroups.check_driver("cgroupfs") is None
        assert cgroups.identify(os.getpid()) != expected
        assert await Cgroups(CGROUP_ROOT).has_processes_in_thread(made.pod_uid) is True


async def test_a_container_that_ends_has_no_processes_any_more(containerd: Containerd) -> None:
    """Its cgroup goes, its state is exited, and its PID is not reported."""
    cgroups = Cgroups()
    async with (
        running_container(containerd, FORKS) as made,
        open_runtime(str(containerd.socket), timeout_s=TIMEOUT_S) as client,
    ):
        found = find_cgroup(cgroups, made.id, made.pod_uid)
        assert found is not None
        await made.stop()
        assert made.id not in (await client.running()).values()
        assert await reported_pid(containerd.socket, made.id) is None
        with pytest.raises(NotFound):
            cgroups.processes(found)
        assert find_cgroup(cgroups, made.id, made.pod_uid) is None


async def test_containers_outlive_the_runtime_and_are_found_after_it(containerd: Containerd) -> None:
    """While containerd is away calls are Unavailable and cgroups are read; then the same container is listed again."""
    cgroups = Cgroups()
    async with open_runtime(str(containerd.socket), timeout_s=TIMEOUT_S) as client:
        async with running_container(containerd, FORKS) as made:
            pid, key = await reported_pid(containerd.socket, made.id), await client.owner_of(made.id)
            containerd.stop()
            try:
                with pytest.raises(Unavailable):
                    await client.running()
                found = find_cgroup(cgroups, made.id, made.pod_uid)
                assert found is not None
                assert pid in cgroups.processes(found).pids
            finally:
                containerd.start()
                await made.cri.wait_ready()
            assert await client.owner_of(made.id) == key
        assert made.id not in (await client.running()).values()
