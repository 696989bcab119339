"""The replay of a real kubelet's calls (tests/data/kubelet) against the agent's device plugins, over real sockets."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream
from msgspec.structs import replace

from gpushare_agent.agent.auto_isolation import NodeSettings
from gpushare_agent.agent.composition import NodeAgent, build
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.decision_records import Outcome
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.pods import Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.core.wire import v1beta1
from tests.kit.support_grpc import served_at
from tests.support_core import NAMES, container, inventory, pod
from tests.support_json import undecoded

DATA = Path(__file__).parent.parent / "data" / "kubelet"

ADMITTED = [
    *(("share-a", "main"), ("two", "a"), ("two", "b"), ("chain", "i"), ("chain", "s"), ("chain", "m")),
    *(("whole", "main"), ("b3", "main"), ("b1", "main"), ("b2", "main")),
]
"""Pod and container, in the order in which the recorded kubelet admitted them."""
EXPECTED_CALLS = [
    (name, inner, resource)
    for name, inner in ADMITTED
    for resource in NAMES.names
    if not (name == "whole" and resource == NAMES.vmemory)
]
MESSAGES: dict[str, tuple[Any, Any]] = {
    "GetPreferredAllocation": (v1beta1.PreferredAllocationRequest, v1beta1.PreferredAllocationResponse),
    "Allocate": (v1beta1.AllocateRequest, v1beta1.AllocateResponse),
    "PreStartContainer": (v1beta1.PreStartContainerRequest, v1beta1.PreStartContainerResponse),
}
"""The request and the answer of each method."""
RESOURCES = {ResourceKind.VCORE: NAMES.vcore, ResourceKind.VMEMORY: NAMES.vmemory}


class RecordedLists:
    """A PodResources server that answers each List with the one recorded inside the same GetPreferredAllocation."""

    def __init__(self) -> None:
        self.next_answer: bytes | None = None
        self.unexpected = 0

    def __mapping__(self) -> dict[str, Handler]:
        async def serve(stream: Stream[Any, Any]) -> None:
            await stream.recv_message()
            answer, self.next_answer = self.next_answer, None
            if answer is None:
                self.unexpected += 1
                raise GRPCError(Status.INTERNAL, "a List outside GetPreferredAllocation")
            await stream.send_message(answer)

        return {"/v1.PodResourcesLister/List": Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)}


@dataclass
class ReplayedAgent:
    """An agent of which no loop runs: its plugins answer, and the test is the kubelet."""

    parts: NodeAgent
    lists: RecordedLists
    channels: dict[str, Channel]
    allocated: list[tuple[str, str, str]]
    """Pod, container and resource, of each answer that gave something."""

    def note(self, old: Allocation | None, new: Allocation | None) -> None:
        for kind in new.ids.keys() - (old.ids if old is not None else {}).keys() if new is not None else ():
            self.allocated.append((new.pod_name, new.key.container, RESOURCES[kind]))

    def refused(self) -> list[tuple[str, str, str]]:
        """Pod, container and reason."""
        records = reversed(self.parts.node.decisions.newest(100))
        return [(one.pod, one.container, one.reason) for one in records if one.outcome is Outcome.REFUSED]

    async def call(self, resource: str, method: str, content: bytes) -> Any:
        request, answer = MESSAGES[method]
        path = f"/v1beta1.DevicePlugin/{method}"
        async with self.channels[resource].request(path, Cardinality.UNARY_UNARY, request, answer) as stream:
            await stream.send_message(request.parse(content), end=True)
            return await stream.recv_message()


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "trace-1.36.jsonl").read_text().splitlines()]


def recorded_inventory() -> GpuInventory:
    """The two GPUs whose IDs the trace offers, 320 blocks each."""
    request = v1beta1.PreferredAllocationRequest.parse(
        next(base64.b64decode(e["request"]) for e in recorded() if e.get("call") == "GetPreferredAllocation")
    )
    uuids = sorted({i.split("::")[0] for i in request.container_requests[0].available_device_ids})
    base = inventory(len(uuids), memory_mib=320 * 256)
    return replace(base, gpus=tuple(replace(c, uuid=GpuUuid(u)) for c, u in zip(base.gpus, uuids, strict=True)))


def recorded_pods() -> dict[str, Pod]:
    """The pods as the API server gave them; b1 to b3 came after that dump and are made from their note."""
    raw_pods = json.loads((DATA / "pods-1.36.json").read_text())["items"]
    pods = {p.name: p for p in (parse_pod(read_pod_json(undecoded(raw)), NAMES.names) for raw in raw_pods)}
    pods |= {name: pod(name, container(cores=10, blocks=4)) for name in ("b1", "b2", "b3")}
    return {
        name: replace(p, phase=PodPhase.PENDING, has_started=False, running=frozenset()) for name, p in pods.items()
    }


@asynccontextmanager
async def open_replayed(directory: Path) -> AsyncIterator[ReplayedAgent]:
    sockets, lists = directory / "plugins", RecordedLists()
    sockets.mkdir()
    async with AsyncExitStack() as stack:
        lister = await stack.enter_async_context(served_at(directory / "pr.sock", lists))
        flags = [
            "--driver=simulated", "--simulated.device-nodes=true", "--isolation=none", "--node-name=rig",
            f"--root={directory}", f"--device-plugin-path={sockets}", f"--kubelet.pod-resources-socket={lister}",
        ]  # fmt: skip
        parts = build(NodeSettings(settings=load_settings(flags, {}).settings))
        await parts.gpus.offer(recorded_inventory())
        parts.kubelet.facts._read_version("v1.36.2")
        parts.kubelet.calls.open(parts.kubelet.admission)
        parts.node.pods.replace_all([])
        agent = ReplayedAgent(parts, lists, {}, [])
        parts.node.cache.subscribe(agent.note)
        for resource in parts.kubelet.registrar._resources:
            await resource.endpoint.serve()
            stack.push_async_callback(resource.endpoint.stop)
            channel = Channel(path=str(resource.endpoint.path))
            stack.callback(channel.close)
            agent.channels[resource.endpoint.resource] = channel
        stack.callback(parts.kubelet.pod_resources.close)
        yield agent


def names_in(note: str) -> list[str]:
    """The pods of "create pods b1 b2: why" and the like."""
    words = note.partition(":")[0].partition(" at once")[0].split()
    return words[2:] if words[0] in ("create", "delete") else []


async def replay(agent: ReplayedAgent, translate: Callable[[dict[str, Any], bytes], bytes]) -> list[tuple[str, Any]]:
    """Send every recorded request in order; returns (method, answer or GRPCError) of each."""
    pods, outcomes = recorded_pods(), []
    events = recorded()
    for number, event in enumerate(events):
        if "note" in event:
            for name in names_in(event["note"]):
                if event["note"].startswith("create"):
                    agent.parts.node.pods.upsert(pods[name])
                else:
                    agent.parts.node.pods.remove(pods[name].uid)
                    agent.parts.node.cache.release_pod(pods[name].uid)
        elif (method := event["call"]) in MESSAGES:
            request = translate(event, base64.b64decode(event["request"]))
            if method == "GetPreferredAllocation":
                assert events[number - 1]["call"] == "PodResources.List"
                agent.lists.next_answer = base64.b64decode(events[number - 1]["response"])
            try:
                outcome = await agent.call(event["resource"], method, request)
            except GRPCError as error:
                outcome = error
            if method == "GetPreferredAllocation":
                check_preference(request, outcome)
            outcomes.append((method, outcome))
    return outcomes


def check_preference(request: bytes, answer: Any) -> None:
    """A valid answer has the asked number of distinct IDs, all of them offered, those to include among them."""
    asked = v1beta1.PreferredAllocationRequest.parse(request).container_requests[0]
    ids = answer.container_responses[0].device_ids
    assert len(ids) == len(set(ids)) == asked.allocation_size
    assert set(ids) <= set(asked.available_device_ids)
    assert set(asked.must_include_device_ids) <= set(ids)


async def test_every_call_is_resolved_to_the_pod_and_container_of_its_note(short_dir: Path) -> None:
    """The recorded requests as they are. The recorder spread the whole GPU over two: that one Allocate is refused."""
    async with open_replayed(short_dir) as agent:
        outcomes = await replay(agent, lambda event, request: request)
        refused = [("whole", "main")]
        expected = [(n, c, k) for n, c, k in EXPECTED_CALLS if (n, c) not in refused]
        assert agent.allocated == expected
        # The second is the PreStartContainer of that GPU, which the real kubelet then never sends.
        assert agent.refused() == [("whole", "main", "WrongGPUs"), ("", "", "NotReady")]
        errors = [(method, o) for method, o in outcomes if isinstance(o, GRPCError)]
        assert [method for method, _ in errors] == ["Allocate", "PreStartContainer"]
        assert errors[0][1].status is Status.INVALID_ARGUMENT and "default/whole" in errors[0][1].message
        assert agent.lists.unexpected == 0


async def test_a_kubelet_that_follows_our_preference_gets_every_pod_running(short_dir: Path) -> None:
    """The whole GPU's Allocate carries the IDs that we preferred; then no call at all is refused."""
    preferred: list[str] = []
    async with open_replayed(short_dir) as agent:

        def follow(event: dict[str, Any], content: bytes) -> bytes:
            """The whole GPU is the one that is offered whole: its cores are allocated and started as we preferred them."""
            request, _ = MESSAGES[event["call"]]
            asked = request.parse(content)
            if event["call"] == "PreStartContainer":
                ids = asked.device_ids
            else:
                (asked_container,) = asked.container_requests
                if event["call"] == "GetPreferredAllocation":
                    if asked_container.allocation_size == 100:
                        offered = Counter(i.split("::")[0] for i in asked_container.available_device_ids)
                        gpu = next(c.uuid for c in recorded_inventory().gpus if offered[c.uuid] == 100)
                        preferred[:] = [f"{gpu}::{n}" for n in range(100)]
                    return content
                ids = asked_container.device_ids
            if len(ids) == 100:
                ids[:] = preferred
            return bytes(asked)

        outcomes = await replay(agent, follow)
        assert [o for _, o in outcomes if isinstance(o, GRPCError)] == []
        assert agent.allocated == EXPECTED_CALLS
        for method, answer in outcomes:
            if method == "Allocate":
                assert len(answer.container_responses) == 1
        cores = [o for m, o in outcomes if m == "Allocate" and o.container_responses[0].envs]
        assert len(cores) == sum(1 for _, _, resource in EXPECTED_CALLS if resource == NAMES.vcore)
        for answer in cores:
            response = answer.container_responses[0]
            assert response.envs["NVIDIA_VISIBLE_DEVICES"] in {c.uuid for c in recorded_inventory().gpus}
            assert {d.host_path for d in response.devices} >= {"/dev/nvidiactl", "/dev/nvidia-uvm"}
        allocated = {(a.pod_name, a.key.container): (a.cores, a.memory_blocks) for a in agent.parts.node.cache}
        assert allocated == {
            ("share-a", "main"): (30, 10), ("whole", "main"): (100, 0),
            ("chain", "i"): (5, 2), ("chain", "s"): (5, 2), ("chain", "m"): (10, 4),
            ("b1", "main"): (10, 4), ("b2", "main"): (10, 4), ("b3", "main"): (10, 4),
        }  # fmt: skip
        assert agent.lists.unexpected == 0
