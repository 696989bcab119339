"""The recorded trace of a real kubelet, played again on the embedded one and compared call by call.

What is random in both (the order of a container's resources, of IDs, of listed pods) is compared as sets.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler

from gpushare_agent.core.kit.grpc_server import GrpcServer
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.wire import v1, v1beta1
from gpushare_agent.sandbox.pod_manifest import containers_of
from tests.kit.support_grpc import called, served_at
from tests.sandbox.support_sandbox import (
    CORE,
    HELD_ADMISSIONS,
    MEMORY,
    NodeUnderTest,
    by_container,
    container,
    device_of,
    open_test_node,
    pod,
)

DATA = Path(__file__).parent.parent / "data" / "kubelet"
CALLS = ("GetPreferredAllocation", "Allocate")


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / "trace-1.36.jsonl").read_text().splitlines()]


def captured_pods() -> dict[str, dict[str, Any]]:
    found = {}
    for item in json.loads((DATA / "pods-1.36.json").read_text())["items"]:
        del item["status"], item["spec"]["nodeName"]
        found[item["metadata"]["name"]] = item
    for name in ("b1", "b2", "b3"):
        found[name] = pod(name, container("main", cores=10, blocks=4))
    return found


@dataclass
class Step:
    """One call, real or embedded, in comparable form."""

    method: str
    resource: str
    ids: frozenset[str]
    must: frozenset[str] = frozenset()
    size: int = 0
    answer: frozenset[str] = frozenset()
    request_bytes: int = 0
    listed: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    listed_bytes: int = 0
    deadline_s: float | None = None


def step_of(method: str, resource: str, request: bytes, response: bytes) -> Step:
    step = Step(method=method, resource=resource, ids=frozenset(), request_bytes=len(request))
    if method == "GetPreferredAllocation":
        asked = v1beta1.PreferredAllocationRequest.parse(request).container_requests[0]
        step.ids, step.size = frozenset(asked.available_device_ids), asked.allocation_size
        step.must = frozenset(asked.must_include_device_ids)
        step.answer = frozenset(v1beta1.PreferredAllocationResponse.parse(response).container_responses[0].device_ids)
    elif method == "Allocate":
        step.ids = frozenset(v1beta1.AllocateRequest.parse(request).container_requests[0].device_ids)
    elif method == "PreStartContainer":
        step.ids = frozenset(v1beta1.PreStartContainerRequest.parse(request).device_ids)
    return step


def recorded_steps() -> list[Step]:
    steps, listed = [], b""
    for line in lines():
        if line.get("call") == "PodResources.List":
            listed = base64.b64decode(line["response"])
        elif line.get("call") in (*CALLS, "PreStartContainer"):
            raw = [base64.b64decode(line[key]) for key in ("request", "response")]
            step = step_of(line["call"], line["resource"], *raw)
            step.deadline_s = line["deadline_s"]
            if step.method in CALLS:
                step.listed, step.listed_bytes = by_container(v1.ListPodResourcesResponse.parse(listed)), len(listed)
            steps.append(step)
    return steps


class RecordingPlugin:
    """The recorder of the trace, written again: prefers the first IDs, and calls List inside its handlers."""

    def __init__(self, node: NodeUnderTest, resource: str, steps: list[Step]) -> None:
        self.resource = resource
        trace = [line for line in lines() if line.get("resource") == resource]
        self.answers = {
            line["call"]: base64.b64decode(line["response"]) for line in reversed(trace) if "response" in line
        }
        registered = json.loads((DATA / "checkpoint-1.36.json").read_text())["Data"]["RegisteredDevices"][resource]
        self.order = sorted(registered, key=lambda i: (not i.startswith("GPU-4404041a"), int(i.rpartition("::")[2])))
        self.deadlines: dict[str, float | None] = {}
        self._node = node
        self._steps = steps
        self._stop = asyncio.Event()

    def __mapping__(self) -> dict[str, Handler]:
        unary = ("GetDevicePluginOptions", "GetPreferredAllocation", "Allocate", "PreStartContainer")
        mapping = {f"/v1beta1.DevicePlugin/{name}": self._unary(name) for name in unary}
        stream = Handler(self._list_and_watch, Cardinality.UNARY_STREAM, bytes, bytes)
        return {**mapping, "/v1beta1.DevicePlugin/ListAndWatch": stream}

    def _unary(self, method: str) -> Handler:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self.deadlines[method] = stream.deadline.time_remaining() if stream.deadline else None
            listed = await self._list() if method in CALLS else b""
            response = self._preferred(request) if method == "GetPreferredAllocation" else self.answers[method]
            step = step_of(method, self.resource, request, response)
            step.deadline_s = self.deadlines[method]
            step.listed, step.listed_bytes = by_container(v1.ListPodResourcesResponse.parse(listed)), len(listed)
            if method != "GetDevicePluginOptions":
                self._steps.append(step)
            await stream.send_message(response)

        return Handler(handle, Cardinality.UNARY_UNARY, bytes, bytes)

    def _preferred(self, request: bytes) -> bytes:
        asked = v1beta1.PreferredAllocationRequest.parse(request).container_requests[0]
        available = set(asked.available_device_ids)
        chosen = [i for i in self.order if i in available][: asked.allocation_size]
        answer = v1beta1.ContainerPreferredAllocationResponse(device_ids=chosen)
        return bytes(v1beta1.PreferredAllocationResponse(container_responses=[answer]))

    async def _list(self) -> bytes:
        """Again when the rate limit refuses, as the recorder did."""
        while True:
            try:
                return await called(self._node.paths.pod_resources_socket, "/v1.PodResourcesLister/List")
            except GRPCError as error:
                assert error.status is Status.RESOURCE_EXHAUSTED
                await asyncio.sleep(0.02)

    async def _list_and_watch(self, stream: Any) -> None:
        await stream.recv_message()
        devices = [device_of(name, "Healthy", 0 if name.startswith("GPU-4404041a") else 1) for name in self.order]
        await stream.send_message(bytes(v1beta1.ListAndWatchResponse(devices=devices)))
        await self._stop.wait()


@asynccontextmanager
async def recorders(node: NodeUnderTest, steps: list[Step]) -> AsyncIterator[dict[str, RecordingPlugin]]:
    plugins = {name: RecordingPlugin(node, name, steps) for name in (CORE, MEMORY)}
    servers = {name: GrpcServer([plugin]) for name, plugin in plugins.items()}
    try:
        for name, plugin in plugins.items():
            socket_name = f"{name.rpartition('/')[2]}.sock"
            await servers[name].serve(bind_unix_socket(node.paths.device_plugin_path / socket_name, mode=0o600))
            await node.register(plugin, socket_name)  # type: ignore[arg-type]
            await node.wait_allocatable(name, len(plugin.order))
        yield plugins
    finally:
        for server in servers.values():
            await server.stop()


class Played(NamedTuple):
    """What came: the steps, the checkpoint of the captured moment, how long a plugin's options had, and the pods' names."""

    steps: list[Step]
    checkpoint: dict[str, Any]
    options_s: float | None
    names: dict[str, str]


@pytest.fixture(scope="module")
def played() -> Played:
    return asyncio.run(play())


async def play() -> Played:
    """The trace's notes, in order, on a node with held admissions: both plugins are registered before."""
    steps: list[Step] = []
    pods = captured_pods()
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        async with recorders(node, steps) as plugins:
            node.kubelet.begin_admissions()
            for name in ADMITTED[:5]:
                await node.start_pods(pods[name])
            checkpoint = json.loads((node.paths.device_plugin_path / "kubelet_internal_checkpoint").read_text())
            await node.kubelet.stop()
            await node.kubelet.start()
            async with recorders(node, steps):
                node.kubelet.begin_admissions()
                await node.wait_until(lambda: len(node.kubelet.listed_pods()) == 5, "the pods taken up again")
                await node.remove_pod("two")
                await node.start_pods(*(pods[name] for name in ADMITTED[5:]))
        options_s = plugins[CORE].deadlines["GetDevicePluginOptions"]
        return Played(steps, checkpoint, options_s, {call.pod_uid: call.pod_name for call in node.calls.calls})


ADMITTED = ("share-a", "two", "chain", "plain", "whole", "b3", "b1", "b2")


def in_containers(steps: list[Step]) -> list[tuple[str, ContainerSpec, list[Step]]]:
    """The admission calls by container (pod name, container), in order."""
    rest = [s for s in steps if s.method in CALLS]
    groups, pods = [], captured_pods()
    for name in ADMITTED:
        for spec in containers_of(pods[name]):
            group: list[Step] = []
            while rest and sum(s.method == "Allocate" for s in group) < len(spec.requests):
                group.append(rest.pop(0))
            groups.append((name, spec, group))
    assert not rest
    return groups


def expected_lists(steps: list[Step]) -> list[dict[str, dict[str, set[str]]]]:
    """What List must show inside each admission call: this pod with what it has so far, earlier pods complete, later pods
    not at all, ordinary init containers never.
    """
    pods, shown, expected = captured_pods(), dict[str, dict[str, set[str]]](), []
    for name, spec, group in in_containers(steps):
        if name == "b3":
            shown = {key: devices for key, devices in shown.items() if not key.startswith("two/")}
        for other in containers_of(pods[name]):
            if other.kind is not ContainerKind.INIT:
                shown.setdefault(f"{name}/{other.name}", {})
        for step in group:
            expected.append({key: dict(devices) for key, devices in shown.items()})
            if step.method == "Allocate" and spec.kind is not ContainerKind.INIT:
                shown[f"{name}/{spec.name}"][step.resource] = set(step.ids)
    return expected


def test_every_admission_call_of_the_trace_comes_again_with_the_same_ids(played: Played) -> None:
    """Same calls per container: availability, must-include, size, answers and allocated IDs, and messages as long."""
    expected, got = in_containers(recorded_steps()), in_containers(played.steps)
    for (_, _, real), (_, _, embedded) in zip(expected, got, strict=True):
        by_resource = attrgetter("resource")
        for a, b in zip(sorted(real, key=by_resource), sorted(embedded, key=by_resource), strict=True):
            assert (b.method, b.resource, b.size) == (a.method, a.resource, a.size)
            assert (b.ids, b.must, b.answer) == (a.ids, a.must, a.answer)
            assert b.request_bytes == a.request_bytes


def test_list_inside_the_handlers_shows_what_the_trace_shows(played: Played) -> None:
    """One rule gives what the real kubelet listed in every handler; the embedded one follows it, with messages as long."""
    steps = played.steps
    for source in (recorded_steps(), steps):
        assert [s.listed for s in source if s.method in CALLS] == expected_lists(source)
    real, embedded = ({str(_sorted(s.listed)): s.listed_bytes for s in source} for source in (recorded_steps(), steps))
    shared = real.keys() & embedded.keys()
    assert len(shared) >= 5
    assert {key: real[key] for key in shared} == {key: embedded[key] for key in shared}


def _sorted(listed: dict[str, dict[str, set[str]]]) -> Any:
    return sorted(
        (key, sorted((name, sorted(ids)) for name, ids in devices.items())) for key, devices in listed.items()
    )


def test_prestart_follows_the_admission_in_container_order(played: Played) -> None:
    """PreStartContainer of vcore: each container with its own IDs, init containers first, as in the trace."""
    sources = (recorded_steps(), played.steps)
    starts = [[s.ids for s in source if s.method == "PreStartContainer"] for source in sources]
    assert starts[1][:7] == starts[0][:7]
    assert set(starts[1][7:]) == set(starts[0][7:])


def test_deadlines_are_those_of_the_trace(played: Played) -> None:
    """Options 5 s, PreStartContainer 30 s, GetPreferredAllocation and Allocate none."""
    steps = played.steps
    recorded = {s.method: s.deadline_s for s in recorded_steps()}
    assert recorded == {"GetPreferredAllocation": None, "Allocate": None, "PreStartContainer": 30.0}
    assert {s.deadline_s for s in steps if s.method in CALLS} == {None}
    assert all(25 < (s.deadline_s or 0) <= 30 for s in steps if s.method == "PreStartContainer")
    assert 0 < (played.options_s or 0) <= 5


def test_the_checkpoint_has_the_entries_of_the_captured_one(played: Played) -> None:
    """Same entries, NUMA nodes, IDs and answers; the UIDs are this node's own."""
    captured = json.loads((DATA / "checkpoint-1.36.json").read_text())
    pods = json.loads((DATA / "pods-1.36.json").read_text())["items"]
    names = played.names | {raw["metadata"]["uid"]: raw["metadata"]["name"] for raw in pods}
    checkpoint = played.checkpoint
    assert checkpoint.keys() == captured.keys()
    assert _entries(checkpoint, names) == _entries(captured, names)
    registered = [{k: sorted(v) for k, v in c["Data"]["RegisteredDevices"].items()} for c in (checkpoint, captured)]
    assert registered[0] == registered[1]


def _entries(checkpoint: dict[str, Any], names: dict[str, str]) -> dict[tuple[str, str, str], Any]:
    return {
        (names[e["PodUID"]], e["ContainerName"], e["ResourceName"]): (
            {node: sorted(ids) for node, ids in e["DeviceIDs"].items()},
            e["AllocResp"],
        )
        for e in checkpoint["Data"]["PodDeviceEntries"]
    }


async def test_registration_asks_for_options_before_it_answers() -> None:
    """The kubelet dials back inside Register: its answer comes after GetDevicePluginOptions, as in the trace."""
    recorded = [line["call"] for line in lines()[:3]]
    assert recorded == ["GetDevicePluginOptions", "Register", "ListAndWatch"]
    request = v1beta1.RegisterRequest.parse(base64.b64decode(lines()[1]["request"]))
    assert request.options == v1beta1.DevicePluginOptions(
        pre_start_required=True, get_preferred_allocation_available=True
    )
    async with open_test_node(times=HELD_ADMISSIONS) as node:
        plugin = RecordingPlugin(node, CORE, [])
        async with served_at(node.paths.device_plugin_path / request.endpoint, plugin):
            await node.register(plugin, request.endpoint)  # type: ignore[arg-type]
            assert "GetDevicePluginOptions" in plugin.deadlines
