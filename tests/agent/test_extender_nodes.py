"""Agents and extender together on embedded nodes: nothing is turned away by a node, and both mean the same GPUs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from gpushare_agent.extender.values import Stage
from gpushare_agent.sandbox.behaviour import KubeletTimes
from tests.agent.support_agent import InnerAgent
from tests.extender.support_extender_nodes import ClusterUnderTest, open_cluster, open_extender
from tests.kit.support_http import free_port
from tests.sandbox.support_sandbox import container, pod

CALM_TIMES = KubeletTimes(
    admission_delay_s=0.05, status_interval_s=1.0, first_status_s=0.01, container_start_s=0.0, start_retry_s=0.1
)


def held(cluster: ClusterUnderTest, node: str) -> Mapping[str, Mapping[str, list[int]]]:
    """What the node's object says of who holds what."""
    text = cluster.api.node(node)["metadata"].get("annotations", {}).get("gpushare-agent/allocations", "{}")
    found: dict[str, dict[str, list[int]]] = json.loads(text).get("allocations", {})
    return found


def indexes(agent: InnerAgent, uuids: set[str]) -> list[int]:
    return sorted(gpu.index for gpu in agent.parts.node.inventory.current.gpus if gpu.uuid in uuids)


# --- the annotation of the whole agent ---


async def test_the_node_says_who_holds_what_from_admission_to_end_and_an_agent_that_comes_back_leaves_it() -> None:
    """By pod and GPU: cores, blocks, units, whole. What the kubelet has on record never seems to be free."""
    async with open_cluster("a") as cluster:
        async with cluster.open_agents(("--simulated.gpus=2",)):
            cluster.api.create_pod(
                pod("share", container("main", cores=30, blocks=4), container("other", cores=20, blocks=2))
            )
            cluster.api.create_pod(pod("whole", container("main", cores=100)))
            uids = {name: cluster.api.pod("default", name)["metadata"]["uid"] for name in ("share", "whole")}
            await cluster.wait_until(lambda: held(cluster, "a").keys() == set(uids.values()), "both pods")
        before = held(cluster, "a")
        assert before == {uids["share"]: {"0": [50, 6]}, uids["whole"]: {"1": [100, 0, 0, 1]}}
        version = cluster.api.version
        async with cluster.open_agents(("--simulated.gpus=2",)):
            cluster.api.create_pod(pod("next", container("main", cores=10, blocks=4)))
            await cluster.wait_until(lambda: len(held(cluster, "a")) == 3, "the next pod")
            nodes = [
                c.after
                for c in cluster.api.store.changes_since(version)
                if c.resource == "nodes" and c.after is not None
            ]
            reported = [
                json.loads(raw["metadata"]["annotations"]["gpushare-agent/allocations"])["allocations"] for raw in nodes
            ]
            assert all(before.items() <= one.items() for one in reported)
            cluster.api.delete_pod("default", "share", grace_period_s=0)
            await cluster.wait_until(lambda: uids["share"] not in held(cluster, "a"), "the end of the share")
            assert uids["whole"] in held(cluster, "a")


# --- with the extender ---


async def test_a_pod_that_finds_cores_on_two_gpus_but_no_whole_gpu_waits_and_runs_once_one_is_free() -> None:
    """kube-scheduler alone adds 50 and 50 up to a GPU: the node would reject the pod for good."""
    port = free_port()
    async with (
        open_cluster("a", extender_url=f"http://127.0.0.1:{port}/scheduler") as cluster,
        cluster.open_agents(("--simulated.gpus=2", "--placement.share-policy=spread")),
        open_extender(cluster, port, "--placement.share-policy=spread"),
    ):
        for name in ("left", "right"):
            cluster.api.create_pod(pod(name, container("main", cores=50, blocks=8)))
            await cluster.nodes[0].wait_phase(name, "Running")
        assert cluster.nodes[0].gpus_of("left") != cluster.nodes[0].gpus_of("right")
        cluster.api.create_pod(pod("whole", container("main", cores=100)))
        await cluster.wait_until(lambda: cluster.condition_of("whole").get("status") == "False", "the refusal")
        reported = cluster.condition_of("whole")
        assert reported["reason"] == "Unschedulable" and "0/1 nodes are available" in reported["message"]
        assert "Insufficient" not in reported["message"]  # by count it fits: it is the extender that knows
        assert cluster.api.pod("default", "whole")["status"]["phase"] == "Pending"
        freed = cluster.nodes[0].gpus_of("left")
        # Not by force: of a pod that is gone from the API server processes may still run.
        cluster.api.delete_pod("default", "left", grace_period_s=1)
        await cluster.nodes[0].wait_phase("whole", "Running", "Failed")
        assert cluster.api.pod("default", "whole")["status"]["phase"] == "Running"
        assert cluster.nodes[0].gpus_of("whole") == freed


async def test_a_node_with_room_on_one_gpu_is_taken_before_one_that_has_it_in_pieces() -> None:
    """The pod goes where it can run, and the extender's plan is what the agent does."""
    port = free_port()
    async with (
        open_cluster("a", "b", extender_url=f"http://127.0.0.1:{port}/scheduler") as cluster,
        cluster.open_agents(("--simulated.gpus=2",), ("--simulated.gpus=1",)),
        open_extender(cluster, port) as extender,
    ):
        cluster.api.create_pod(pod("small", container("main", cores=60, blocks=8), nodeSelector={}))
        first = await cluster.wait_bound("small")
        await cluster.nodes[0].wait_phase("small", "Running")
        for name in ("one", "two"):
            cluster.api.create_pod(pod(name, container("main", cores=100)))
            await cluster.nodes[0].wait_phase(name, "Running")
        assert {cluster.node_of(name) for name in ("one", "two")} == ({"a"} if first == "b" else {"a", "b"})
        await wait_confirmed(cluster, extender, 3)


async def wait_confirmed(cluster: ClusterUnderTest, extender: Any, count: int) -> None:
    def are_confirmed() -> bool:
        found = extender.state.reservations()
        return len(found) == count and all(one.stage is Stage.CONFIRMED for one in found)

    await cluster.wait_until(are_confirmed, f"{count} confirmed reservations")


# --- many ---

NODES = [
    ("--simulated.gpus=8", "--simulated.gpu-memory-mib=24576"),
    ("--simulated.gpus=4", "--simulated.gpu-memory-mib=16384"),
    ("--simulated.gpus=2", "--simulated.gpu-memory-mib=81920"),
    ("--simulated.gpus=4", "--simulated.gpu-memory-mib=24576,24576,16384,16384"),
]
COUNT = 20
PODS = 500
AT_ONCE = 110
WITH_INIT = 0.15
"""Part of the pods with init containers or sidecars."""


def mixed_pod(number: int, rng: random.Random) -> dict[str, Any]:
    """Shares, whole GPUs, several containers, init containers and sidecars."""
    name = f"p{number:03}"
    if rng.random() < WITH_INIT:
        is_sidecar = rng.random() < 0.3
        first = {**share("first", rng), **({"restartPolicy": "Always"} if is_sidecar else {})}
        return pod(name, share("main", rng), init=(first,))
    kind = rng.random()
    if kind < 0.15:
        return pod(name, container("main", cores=100))
    if kind < 0.22:
        return pod(name, container("main", cores=200))
    if kind < 0.4:
        return pod(name, *(share(f"c{n}", rng) for n in range(rng.randint(2, 3))))
    return pod(name, share("main", rng))


def share(name: str, rng: random.Random) -> dict[str, Any]:
    return container(name, cores=rng.choice([5, 10, 25, 30, 40, 60, 75]), blocks=rng.choice([1, 4, 8, 16, 40, 60]))


@pytest.mark.slow
async def test_five_hundred_pods_on_twenty_nodes_of_mixed_gpus_are_never_rejected_and_land_where_planned() -> None:
    """They come and go in a full cluster; the agent's GPU is the extender's for every container."""
    port = free_port()
    names = [f"n{number:02}" for number in range(COUNT)]
    rng = random.Random(7)
    async with (
        open_cluster(*names, extender_url=f"http://127.0.0.1:{port}/scheduler", times=CALM_TIMES) as cluster,
        cluster.open_agents(*(NODES[number % len(NODES)] for number in range(COUNT))) as agents,
        open_extender(cluster, port) as extender,
    ):
        crowd = Crowd(cluster, dict(zip(names, agents, strict=True)), extender)
        for number in range(PODS):
            await crowd.make_room(AT_ONCE - 1, rng)
            cluster.api.create_pod(mixed_pod(number, rng))
        await crowd.make_room(0, rng)
        assert crowd.compared == PODS
        assert crowd.differing == []
        rejected = [e["message"] for e in cluster.api.events() if e["reason"] == "UnexpectedAdmissionError"]
        assert rejected == []


class Crowd:
    """Pods that come and go. Before one goes it is compared: its plan as the extender has it, its GPUs as the agent has."""

    def __init__(self, cluster: ClusterUnderTest, agents: dict[str, InnerAgent], extender: Any) -> None:
        self._cluster = cluster
        self._agents = agents
        self._extender = extender
        self.compared = 0
        self.differing: list[str] = []

    def _pods(self) -> list[dict[str, Any]]:
        """Those that are not being deleted."""
        pods = self._cluster.api.store.in_creation_order("pods")
        return [raw for raw in pods if "deletionTimestamp" not in raw["metadata"]]

    def _settled(self) -> list[dict[str, Any]]:
        return [raw for raw in self._pods() if raw["status"]["phase"] != "Pending"]

    async def make_room(self, most: int, rng: random.Random) -> None:
        """Until there are at most so many pods: some that run are compared and deleted."""
        while len(pods := self._pods()) > most:
            settled = await self._cluster.wait_until(self._settled, "running pods")
            for raw in rng.sample(settled, min(len(settled), 12, len(pods) - most)):
                self._compare(raw)
                self._cluster.api.delete_pod(raw["metadata"]["namespace"], raw["metadata"]["name"])

    def _compare(self, raw: dict[str, Any]) -> None:
        uid, name = raw["metadata"]["uid"], raw["metadata"]["name"]
        self.compared += 1
        if raw["status"]["phase"] != "Running":
            self.differing.append(f"{name} is {raw['status']['phase']}: {raw['status'].get('message')}")
            return
        agent = self._agents[raw["spec"]["nodeName"]]
        reservation = self._extender.state.reservation(uid)
        planned = {c.name: list(c.gpus) for c in reservation.plan.containers if c.gpus} if reservation else {}
        got = {one.key.container: indexes(agent, set(map(str, one.gpus))) for one in agent.parts.node.cache.of_pod(uid)}
        if not got or any(planned.get(container) != gpus for container, gpus in got.items()):
            self.differing.append(f"{name} on {raw['spec']['nodeName']}: planned {planned}, got {got}")
