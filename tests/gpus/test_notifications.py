"""Every change of a card's health is told once: in the log, as a metric, and on the Node."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from gpushare_agent.cluster.node_events import NodeEvents
from gpushare_agent.gpus.inventory import GpuInventoryState
from gpushare_agent.gpus.notifications import CardNews
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.model.node_events import NodeEventReason
from gpushare_agent.sandbox.api_server import EmbeddedApiServer
from tests.support_core import inventory
from tests.support_health import DEADLINE_S, IMMEDIATE, sick, xid
from tests.support_kube import FAST, NODE, answers, fake_api, opened, running

FIRST, SECOND = GpuUuid("GPU-0"), GpuUuid("GPU-1")


class Told:
    """Records what is noted and counted."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, str]] = []
        self.changes: list[tuple[str, bool]] = []

    def note(self, reason: NodeEventReason, uuid: str, message: str) -> None:
        self.notes.append((reason.value, uuid, message))

    def card_health_changed(self, uuid: str, healthy: bool) -> None:
        self.changes.append((uuid, healthy))


def _watched() -> tuple[GpuInventoryState, Told]:
    state, told = GpuInventoryState(IMMEDIATE), Told()
    CardNews(state, told, told)
    state.read(inventory())
    return state, told


def test_a_card_that_is_well_from_the_start_is_no_news_and_one_that_is_not_is() -> None:
    """A node that starts with a lost card says so."""
    _, told = _watched()
    assert not told.notes and not told.changes
    ill = GpuInventoryState(IMMEDIATE)
    CardNews(ill, told, told)
    ill.read(sick(inventory(), 1))
    assert told.changes == [("GPU-1", False)] and told.notes[0][:2] == ("CardUnhealthy", "GPU-1")


def test_an_illness_and_a_recovery_are_told_once_each_with_the_card_and_the_reason() -> None:
    """A reason that changes meanwhile is not told again."""
    state, told = _watched()
    with capture_logs() as logs:
        for found in (sick(inventory(), 1), sick(inventory(), 1, "still away"), inventory()):
            state.read(found)
    assert [(reason, uuid) for reason, uuid, _ in told.notes] == [
        ("CardUnhealthy", "GPU-1"),
        ("CardRecovered", "GPU-1"),
    ]
    assert told.notes[0][2].startswith("GPU 1 (GPU-1): fell off the bus; ")
    assert told.changes == [("GPU-1", False), ("GPU-1", True)]
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("card_unhealthy", "error"),
        ("card_recovered", "info"),
    ]


def test_a_cordon_is_told_as_one_and_not_as_an_illness() -> None:
    """And what still keeps the card away when it is lifted is told with it."""
    state, told = _watched()
    state.cordon(FIRST, "fan")
    state.note_events([xid(79, 0)])
    state.uncordon(FIRST)
    assert [(reason, message) for reason, _, message in told.notes] == [
        ("CardCordoned", "GPU 0 (GPU-0): taken out of service by an operator: fan"),
        (
            "CardUncordoned",
            "GPU 0 (GPU-0): put back in service by an operator, and Unhealthy still: after Xid 79 (GPU has fallen off the "
            "bus): comes back after 1 look that find it well, 0 s apart",
        ),
    ]
    assert told.changes == [("GPU-0", False)]


async def test_the_event_is_on_the_node_where_kubectl_describe_looks_for_it() -> None:
    """Namespace default, the node's name as its UID, as the kubelet's own; the same again within ten minutes is not sent."""
    now = [0.0]
    async with fake_api(others=[answers(201, {})]) as server, opened(server.url) as api:
        events = NodeEvents(node_name=NODE, api=api, backoff=FAST, interval_s=0.001, clock=lambda: now[0])
        for at in (0.0, 1.0, 600.0):
            now[0] = at
            events.note(NodeEventReason.CARD_UNHEALTHY, SECOND, "GPU 1: lost")
        events.note(NodeEventReason.CARD_RECOVERED, SECOND, "GPU 1: back")
        async with running(events.run):
            await server.wait_for(lambda requests: len(requests) == 3)
    bodies = [request.body for request in server.requests]
    assert [(body["reason"], body["type"]) for body in bodies] == [
        ("CardUnhealthy", "Warning"),
        ("CardUnhealthy", "Warning"),
        ("CardRecovered", "Normal"),
    ]
    assert server.requests[0].path == "/api/v1/namespaces/default/events"
    assert bodies[0]["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    assert bodies[0]["message"] == "GPU 1: lost"


async def test_the_embedded_api_server_takes_the_nodes_event() -> None:
    """It is one that an API server accepts."""
    async with EmbeddedApiServer() as server, opened(server.url, user={"token": server.token}) as api:
        events = NodeEvents(node_name=NODE, api=api, backoff=FAST)
        async with running(events.run), asyncio.timeout(DEADLINE_S):
            events.note(NodeEventReason.CARD_CORDONED, FIRST, "GPU 0: fan")
            while not server.events():
                await server.wait_change(server.version)
        assert [event["reason"] for event in server.events()] == ["CardCordoned"]
