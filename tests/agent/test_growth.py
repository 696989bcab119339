"""What a pod's life takes must not depend on the other shares of its node."""

from __future__ import annotations

import hashlib
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.composition import NodeAgent
from gpushare_agent.agent.isolation.gpushare.part import GpusharePart
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import RESIZE_ANNOTATION
from gpushare_agent.core.model.pods import Pod
from tests.agent.support_growth import CrowdedNode, grown
from tests.support_steps import Steps, counted

FEW, MANY = 100, 1500
LISTED = 13
"""Steps for each pod of a List answer, which the kubelet makes of all pods, in another order each time: finding where it
begins, and how many IDs it had."""


async def _admission(shares: int, directory: Path) -> dict[str, Steps]:
    node = await CrowdedNode.open(shares, directory)
    for name in ("first", "second"):
        admitted = node.pod(name)
        seen = node.take(lambda: node.agent.node.pods.upsert(admitted))  # noqa: B023 - called at once
        # The first pod meets caches that are empty.
        found = {"seen by the watch": seen, **await node.admit(admitted)}
    return found


async def test_an_admission_takes_as_many_steps_next_to_1500_shares_as_next_to_100(tmp_path: Path) -> None:
    few, many = await _admission(FEW, tmp_path / "few"), await _admission(MANY, tmp_path / "many")
    listed = {step: LISTED * (MANY - FEW) for step in many if step.startswith("GetPreferred")}
    assert not grown(few, many, listed), grown(few, many, listed)


class _Inline:
    """A thread whose calls are carried out, and so counted, by the caller."""

    async def call(self, blocking: Callable[[], object], what: str, timeout_s: float) -> object:
        return blocking()


class _Cgroups:
    """As a runtime makes them, with one process in each container."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "cgroup"
        self._root.mkdir(parents=True, exist_ok=True)
        (self._root / "cgroup.controllers").touch()

    def put(self, uid: str) -> str:
        container_id = hashlib.sha256(uid.encode()).hexdigest()
        directory = self._root / "kubepods" / "burstable" / f"pod{uid}" / container_id
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").write_text("4711\n")
        return container_id

    def remove(self, uid: str) -> None:
        shutil.rmtree(self._root / "kubepods" / "burstable" / f"pod{uid}")


async def _compare(agent: NodeAgent) -> None:
    """What the agent's loops do after a change."""
    vdevices, cluster = agent.isolation.vdevices, agent.cluster
    if vdevices is not None:
        is_of_all, vdevices._has_changed = vdevices._has_changed, False
        vdevices._unsettled |= vdevices._prepared_at.keys()  # as after the pause
        await (vdevices.poll() if is_of_all else vdevices._poll_changed(is_of_all=False))
        await vdevices._processes.read_ids()
    for part in agent.isolation.parts.values():
        if isinstance(part, GpusharePart):
            part._shares()
    await agent.kubelet.resizing.reconcile()
    await agent.kubelet.garbage.release_deleted()
    for writer in cluster.node_fields.values():
        writer.desired()
    while cluster.annotations._queue:
        uid, _ = cluster.annotations._queue.popitem()
        if (pod := agent.node.pods.get(uid)) is not None:
            cluster.annotations.desired(pod)


async def _rest_of_life(shares: int, directory: Path, isolation: str) -> dict[str, Steps]:
    node = await CrowdedNode.open(shares, directory, f"--isolation={isolation}")
    agent, cgroups, found = node.agent, _Cgroups(directory), {}
    for owner, name in (
        (agent.isolation.vdevices, "_thread"),
        *((part._preparation, "_thread") for part in agent.isolation.parts.values() if isinstance(part, GpusharePart)),
    ):
        setattr(owner, name, _Inline())
    for cgroups_of in (agent.isolation.host.cgroups, agent.kubelet.garbage.cgroups):
        cgroups_of.threads = dict.fromkeys(cgroups_of.threads, _Inline())
    for one in agent.node.pods.pods():
        ids = {"main": cgroups.put(one.uid)}
        agent.node.pods.upsert(replace(one, container_ids=ids, resource_version="2"))
    await agent.isolation.start()
    vdevices = agent.isolation.vdevices
    try:
        for _ in range(2):  # the IDs are known after the first
            if vdevices is not None:
                vdevices.changed()
            await _compare(agent)
        for name in ("first", "second"):
            admitted = node.pod(name)
            agent.node.pods.upsert(admitted)
            await node.admit(admitted)
            with counted() as found["PreStartContainer"]:
                assert await agent.isolation.prepare([ContainerKey(admitted.uid, "main")]) is None
            with counted() as found["after it"]:
                await _compare(agent)
            ids = {"main": cgroups.put(admitted.uid)}
            with counted() as found["status Running"]:
                agent.node.pods.upsert(replace(node.start(admitted), container_ids=ids))
                await _compare(agent)
                await _compare(agent)
            cgroups.remove(admitted.uid)
            with counted() as found["deletion"]:
                agent.node.pods.remove(admitted.uid)
                await _compare(agent)
                await _compare(agent)
            assert not agent.node.cache.of_pod(admitted.uid)
        assert vdevices is None or vdevices._processes.unknown() == frozenset()
    finally:
        if vdevices is not None:
            await vdevices._close(1.0)
    return found


@pytest.mark.parametrize("isolation", ["vcuda", "gpushare"])
@pytest.mark.parametrize("shares", [300, pytest.param(MANY, marks=pytest.mark.slow)])
async def test_what_follows_an_admission_takes_as_many_steps_next_to_many_shares_as_next_to_100(
    short_dir: Path, isolation: str, shares: int
) -> None:
    """With the files and cgroups that threads read; a poll of all containers is rare and not counted here. Many are as many
    as may have a socket where a process may open fewer files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = await _rest_of_life(FEW, short_dir / "f", isolation)
    many = await _rest_of_life(min(shares, files - 350), short_dir / "m", isolation)
    assert not grown(few, many, {}), grown(few, many, {})


async def test_a_pods_status_wakes_nothing_that_does_not_follow_from_it(tmp_path: Path) -> None:
    """The node's taint, the sizes of shares and the pod's annotations, where it changes nothing but its status."""
    node = await CrowdedNode.open(1, tmp_path)
    agent, admitted = node.agent, node.pod("new")
    agent.node.pods.upsert(admitted)
    await node.admit(admitted)
    taint, sizes = agent.cluster.node_fields["taint"]._is_changed, agent.kubelet.resizing._reconciler._is_requested

    async def woken(changed: Pod) -> list[bool]:
        await _compare(agent)
        taint.clear()
        sizes.clear()
        agent.node.pods.upsert(changed)
        return [taint.is_set(), sizes.is_set(), changed.uid in agent.cluster.annotations._queue]

    running = node.start(admitted)
    assert await woken(running) == [False, False, False]
    asked = replace(running, annotations={RESIZE_ANNOTATION: "cores=2"}, resource_version="3")
    assert await woken(asked) == [False, True, True]
    assert await woken(replace(asked, annotations={}, resource_version="4")) == [False, True, True]
