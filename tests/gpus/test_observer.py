"""Every change of a GPU's health is reported once: in the log, as a metric, and on the Node."""

from __future__ import annotations

from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.inventory import GpuHealthObserver, GpuInventoryState
from gpushare_agent.core.kube.events import NodeEvents
from gpushare_agent.core.model.errors import NodeEventReason
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.mig import MigLayout
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import FAST, NODE, opened, running
from tests.fakes.api_server import answers, fake_api
from tests.gpus.support_health import IMMEDIATE, unhealthy, xid
from tests.support_core import inventory, mig_instance
from tests.support_node import node_of

FIRST, SECOND = GpuUuid("GPU-0"), GpuUuid("GPU-1")


class Reported:
    """Records what is noted and counted."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, str]] = []
        self.changes: list[tuple[str, bool]] = []

    @property
    def events(self) -> list[tuple[str, str]]:
        """Reason and GPU of each."""
        return [(reason, uuid) for reason, uuid, _ in self.notes]

    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None:
        self.notes.append((reason.value, uuid, message))

    def gpu_health_changed(self, uuid: str, healthy: bool) -> None:
        self.changes.append((uuid, healthy))


def _watched() -> tuple[GpuInventoryState, Reported]:
    state, reported = GpuInventoryState(IMMEDIATE), Reported()
    state.subscribe(GpuHealthObserver(node_of(inventory=state, metrics=reported), reported).inventory_changed)
    state.read(inventory())
    return state, reported


def test_a_gpu_that_is_healthy_from_the_start_is_not_reported_and_an_unhealthy_one_is() -> None:
    """A node that starts with a lost GPU reports it."""
    _, reported = _watched()
    assert not reported.notes and not reported.changes
    failed = GpuInventoryState(IMMEDIATE)
    failed.subscribe(GpuHealthObserver(node_of(inventory=failed, metrics=reported), reported).inventory_changed)
    failed.read(unhealthy(inventory(), 1))
    assert reported.changes == [("GPU-1", False)] and reported.notes[0][:2] == ("GPUUnhealthy", "GPU-1")


def test_a_failure_and_a_recovery_are_reported_once_each_with_the_gpu_and_the_reason() -> None:
    """A reason that changes meanwhile is not reported again."""
    state, reported = _watched()
    with capture_logs() as logs:
        for found in (unhealthy(inventory(), 1), unhealthy(inventory(), 1, "still away"), inventory()):
            state.read(found)
    assert reported.events == [("GPUUnhealthy", "GPU-1"), ("GPURecovered", "GPU-1")]
    assert reported.notes[0][2].startswith("GPU 1 (GPU-1): fell off the bus; ")
    assert reported.changes == [("GPU-1", False), ("GPU-1", True)]
    said = [(line["event"], line["log_level"]) for line in logs]
    assert said == [("gpu_unhealthy", "error"), ("gpu_recovered", "info")]


def test_a_gpu_of_instances_on_demand_is_reported_before_it_has_any() -> None:
    """No instance of it can be: nothing else would tell."""
    state, reported = _watched()
    gpus = inventory().gpus

    def found(second: Gpu) -> GpuInventory:
        layouts = (MigLayout(parent=second.uuid),)
        return replace(inventory(), gpus=gpus[:1], mig_partitioned=(second,), mig_layouts=layouts)

    state.read(found(gpus[1]))
    assert not reported.notes
    state.read(found(unhealthy(inventory(), 1).gpus[1]))
    state.cordon(SECOND, "fan")
    assert reported.events == [("GPUUnhealthy", "GPU-1"), ("GPUCordoned", "GPU-1")]


def test_an_event_of_an_instance_has_its_profile() -> None:
    """Its UUID alone says nothing to a person once it is gone."""
    state, reported = _watched()
    instance = replace(inventory().gpus[0], index=2, uuid=GpuUuid("MIG-1"), mig=mig_instance(0, 1, 0).mig)
    assert instance.mig is not None
    state.read(replace(inventory(), gpus=(*inventory().gpus, instance)))
    state.cordon(instance.uuid, "fan")
    said = f"GPU {instance.label} ({instance.mig.profile}, MIG-1): taken out of service by an operator: fan"
    assert [message for _, _, message in reported.notes] == [said]


def test_a_cordon_is_reported_as_one_and_not_as_a_failure() -> None:
    """And what still keeps the GPU away when it is lifted is reported with it."""
    state, reported = _watched()
    state.cordon(FIRST, "fan")
    state.note_events([xid(79, 0)])
    state.uncordon(FIRST)
    assert [(reason, message) for reason, _, message in reported.notes] == [
        ("GPUCordoned", "GPU 0 (GPU-0): taken out of service by an operator: fan"),
        (
            "GPUUncordoned",
            "GPU 0 (GPU-0): put back in service by an operator, and still Unhealthy: after Xid 79 (GPU has fallen off the "
            "bus): recovers after 1 poll that finds it usable, 0 s apart",
        ),
    ]
    assert reported.changes == [("GPU-0", False)]


async def test_the_event_is_on_the_node_where_kubectl_describe_finds_it() -> None:
    """Namespace default, the node's name as its UID, as the kubelet's own; the same again within ten minutes is not sent."""
    now = [0.0]
    async with fake_api(others=[answers(201, {})]) as server, opened(server.url) as api:
        events = NodeEvents(NODE, backoff=FAST, interval_s=0.001, clock=lambda: now[0])
        for at in (0.0, 1.0, 600.0):
            now[0] = at
            events.note(NodeEventReason.GPU_UNHEALTHY, SECOND, "GPU 1: lost")
        events.note(NodeEventReason.GPU_RECOVERED, SECOND, "GPU 1: back")
        async with running(lambda: events.run(api)):
            await server.wait_for(lambda requests: len(requests) == 3)
    bodies = [request.body for request in server.seen]
    assert [(body["reason"], body["type"]) for body in bodies] == [
        ("GPUUnhealthy", "Warning"),
        ("GPUUnhealthy", "Warning"),
        ("GPURecovered", "Normal"),
    ]
    assert server.seen[0].path == "/api/v1/namespaces/default/events"
    assert bodies[0]["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    assert bodies[0]["message"] == "GPU 1: lost"


def test_a_divided_gpu_is_reported_while_it_has_no_instances() -> None:
    """Instances speak for their GPU; where there are none, it does itself."""
    state, reported = _watched()
    found = inventory()
    for shown in (found, unhealthy(found, 1), found):
        state.read(replace(shown, gpus=shown.gpus[:1], mig_partitioned=shown.gpus[1:]))
    assert reported.changes == [("GPU-1", False), ("GPU-1", True)]
    assert reported.events == [("GPUUnhealthy", "GPU-1"), ("GPURecovered", "GPU-1")]


def test_what_happens_to_a_gpu_is_recorded_cause_first() -> None:
    """The Xid before what it makes of the GPU; one of a GPU that nobody knows, or of none, belongs nowhere."""
    state, reported, recorded = GpuInventoryState(IMMEDIATE), Reported(), list[tuple[str, str]]()
    observer = GpuHealthObserver(
        node_of(inventory=state, metrics=reported),
        reported,
        lambda uuid, what, reason: recorded.append((uuid, what.value)),
    )
    state.subscribe(observer.inventory_changed)
    state.on_event = lambda event, count: recorded.append((event.uuid or "", f"{count} of Xid {event.xid}"))
    state.read(inventory())
    state.note_events([xid(79, gpu) for gpu in (1, 1, 99, None)])
    state.cordon(GpuUuid("GPU-0"), "fan")
    state.uncordon(GpuUuid("GPU-0"))
    assert recorded == [
        ("GPU-1", "2 of Xid 79"),
        ("GPU-1", "GPUUnhealthy"),
        ("GPU-0", "GPUCordoned"),
        ("GPU-0", "GPUUncordoned"),
    ]
