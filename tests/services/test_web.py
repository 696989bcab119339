"""The web endpoints over a real socket: metrics in both names, health, readiness with reasons, version."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web

from gpushare_agent import __version__
from gpushare_agent.model.errors import StartupError
from gpushare_agent.services.metrics import AgentMetrics, CardView, ContainerView
from gpushare_agent.services.web import WebServer
from tests.support_kube import DEADLINE_S, running


@asynccontextmanager
async def served(metrics: AgentMetrics | None = None, **others: Any) -> AsyncIterator[str]:
    """A running web server's address."""
    defaults: dict[str, Any] = {"ready": list, "metrics": metrics or AgentMetrics()}
    server = WebServer("127.0.0.1", 0, **(defaults | others))
    async with running(server.run):
        async with asyncio.timeout(DEADLINE_S):
            port = await server.wait_listening()
        yield f"http://127.0.0.1:{port}"


async def _get(url: str) -> tuple[int, str]:
    async with asyncio.timeout(DEADLINE_S), ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def _container(name: str, cores: int, memory_mib: int) -> ContainerView:
    return ContainerView(
        namespace="default", pod=name, container="main", node="n1", cores=cores, memory_mib=memory_mib, cards=(0,)
    )


async def test_requests_of_containers_are_shown_as_gpu_manager_does() -> None:
    """Cards and MiB per container, labelled and sorted, on both paths; usage series are not made up."""
    metrics = AgentMetrics()
    metrics.show_containers(lambda: [_container("b", 200, 49152), _container("a", 30, 1024)])
    async with served(metrics) as url:
        answers = [await _get(f"{url}/{path}") for path in ("metrics", "metric")]
    assert [status for status, _ in answers] == [200, 200]
    rows, rows_of_metric = (
        [line for line in text.splitlines() if line.startswith("container_")] for _, text in answers
    )
    assert rows == rows_of_metric
    labels = 'container_name="main",namespace="default",node="n1",pod_name="{}",req_of_gpu{}="total"'
    assert rows == [
        f"container_request_gpu_utilization{{{labels.format('a', '')}}} 0.3",
        f"container_request_gpu_utilization{{{labels.format('b', '')}}} 2.0",
        f"container_request_gpu_memory{{{labels.format('a', '_memory')}}} 1024.0",
        f"container_request_gpu_memory{{{labels.format('b', '_memory')}}} 49152.0",
    ]


async def test_a_vanished_container_leaves_no_series() -> None:
    """What the snapshot no longer holds is gone from the next answer."""
    held = [_container("a", 30, 1024)]
    metrics = AgentMetrics()
    metrics.show_containers(lambda: held)
    async with served(metrics) as url:
        assert 'pod_name="a"' in (await _get(f"{url}/metrics"))[1]
        held.clear()
        assert 'pod_name="a"' not in (await _get(f"{url}/metrics"))[1]


async def test_every_event_method_shows_in_the_metrics() -> None:
    """Each thing that is counted has its series with its labels."""
    metrics = AgentMetrics()
    metrics.admission("r", "refused", "Fragmented")
    metrics.rpc_finished("r", "Allocate", "OK", 0.003)
    metrics.registered("r")
    metrics.pod_resources_listed("admission")
    metrics.taken_ids_offered("r", 3)
    metrics.reconcile_corrected("freed")
    metrics.pods_listed()
    metrics.pod_watch_ended("ended")
    metrics.pod_unreadable()
    metrics.pod_annotated("patched")
    metrics.pod_event("sent")
    metrics.rejected_pod_deleted()
    metrics.show_pod_event_age(lambda: 1.5)
    card = CardView(
        index=1, uuid="GPU-1", memory_mib=24576, cores_allocated=30, memory_mib_allocated=1024, is_healthy=True
    )
    metrics.show_cards(lambda: [card])
    async with served(metrics) as url:
        lines = (await _get(f"{url}/metrics"))[1].splitlines()
    assert {
        'gpushare_admissions_total{outcome="refused",reason="Fragmented",resource="r"} 1.0',
        'gpushare_rpcs_total{code="OK",method="Allocate",resource="r"} 1.0',
        'gpushare_rpc_duration_seconds_bucket{le="0.005",method="Allocate",resource="r"} 1.0',
        'gpushare_rpc_duration_seconds_bucket{le="0.0025",method="Allocate",resource="r"} 0.0',
        'gpushare_registrations_total{resource="r"} 1.0',
        'gpushare_pod_resources_lists_total{purpose="admission"} 1.0',
        'gpushare_taken_ids_offered_total{resource="r"} 3.0',
        'gpushare_reconcile_corrections_total{kind="freed"} 1.0',
        "gpushare_pod_lists_total 1.0",
        'gpushare_pod_watches_ended_total{outcome="ended"} 1.0',
        "gpushare_pods_unreadable_total 1.0",
        'gpushare_pod_annotations_total{outcome="patched"} 1.0',
        'gpushare_pod_events_total{outcome="sent"} 1.0',
        "gpushare_rejected_pods_deleted_total 1.0",
        "gpushare_pod_event_age_seconds 1.5",
        'gpushare_card_cores_allocated{card="1",uuid="GPU-1"} 30.0',
        'gpushare_card_memory_capacity_mib{card="1",uuid="GPU-1"} 24576.0',
        'gpushare_card_healthy{card="1",uuid="GPU-1"} 1.0',
    } <= set(lines)
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert any(line.startswith("gpushare_build_info{") for line in lines)


async def test_readiness_names_what_is_missing() -> None:
    """503 with a line per reason until there is none; health does not depend on it."""
    reasons = ["vcore is not registered", "pods are not listed"]
    async with served(ready=lambda: reasons) as url:
        assert await _get(f"{url}/readyz") == (503, "vcore is not registered\npods are not listed\n")
        assert await _get(f"{url}/healthz") == (200, "ok\n")
        reasons.clear()
        assert await _get(f"{url}/readyz") == (200, "ok\n")


async def test_version_and_index() -> None:
    """The version is JSON; the index lists every path, also added ones."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(text="more")

    async with served(routes=[("/extra", show)]) as url:
        assert await _get(f"{url}/version") == (200, f'{{"version": "{__version__}"}}\n')
        assert await _get(f"{url}/extra") == (200, "more")
        index = (await _get(f"{url}/"))[1]
        assert all(path in index for path in ("/metrics", "/readyz", "/extra"))
        assert (await _get(f"{url}/absent"))[0] == 404


async def test_an_added_route_replaces_one_of_the_same_path() -> None:
    """A dashboard may take the index's place."""

    async def show(_request: web.Request) -> web.Response:
        return web.Response(text="dashboard")

    async with served(routes=[("/", show)]) as url:
        assert await _get(f"{url}/") == (200, "dashboard")


async def test_a_taken_port_ends_the_start_with_the_cure() -> None:
    """The error names address and port and says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = WebServer("127.0.0.1", port, metrics=AgentMetrics(), ready=list)
        with pytest.raises(StartupError, match=rf"127.0.0.1:{port}: .* --query-port"):
            await server.run()


@pytest.mark.parametrize("addr", ["256.1.1.1.invalid", "192.0.2.1"])
async def test_an_address_that_is_not_ours_ends_the_start(addr: str) -> None:
    """An unknown name and another machine's address are named with the setting."""
    with pytest.raises(StartupError, match="check --query-addr"):
        await WebServer(addr, 0, metrics=AgentMetrics(), ready=list).run()


async def test_localhost_is_served_on_each_of_its_addresses() -> None:
    """A name with several addresses is reachable at all that this machine has, on one port."""
    server = WebServer("localhost", 0, metrics=AgentMetrics(), ready=list)
    async with running(server.run):
        async with asyncio.timeout(DEADLINE_S):
            port = await server.wait_listening()
        assert (await _get(f"http://localhost:{port}/healthz"))[0] == 200


async def test_the_port_is_free_after_the_end() -> None:
    """A cancelled server leaves no socket behind."""
    async with served() as url:
        port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        pass
