"""The web endpoints over a real socket: metrics in both names, health, readiness with reasons, version."""

from __future__ import annotations

import asyncio
import gzip
import resource
import socket
from typing import Any

import pytest
from aiohttp import ClientSession, web

from gpushare_agent import __version__
from gpushare_agent.agent.observability.http.server import WebServer
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.metrics.node import ContainerSeries, node_series
from gpushare_agent.agent.observability.metrics.text import NodePage, Series
from gpushare_agent.core.kit.http_answers import MOST_OF_PEER, RequestQueue
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.errors import StartupError
from tests.kit.support_http import Peer, serving
from tests.observability.support_debug import sources
from tests.observability.support_usage import allocation, facts, key_of, snapshot
from tests.observability.support_web import served


async def _get(url: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


def _metrics(*allocated: Allocation) -> AgentMetrics:
    metrics = AgentMetrics()
    shown = snapshot(*map(facts, allocated))
    metrics.show_node(NodePage(lambda is_all: node_series(shown, ContainerSeries(is_all=is_all)), max_age_s=60.0))
    return metrics


async def test_metrics_are_served_under_both_names() -> None:
    """gpu-manager's path is the singular, and has its series; what is counted and what is are one text."""
    metrics = _metrics(allocation(key_of(1), cores=30, blocks=4, pod="a"))
    former = (
        'container_request_gpu_utilization{container_name="main",namespace="default",node="n1",pod_name="a",'
        'req_of_gpu="total"} 0.3\n'
    )
    for all_series in (False, True):
        async with served(metrics=metrics, all_series=all_series) as url:
            answers = [await _get(f"{url}/{path}") for path in ("metrics", "metric")]
        assert [status for status, _ in answers] == [200, 200]
        assert [former in text for _, text in answers] == [all_series, True]
        assert all("gpushare_pod_lists_total 0.0\n" in text for _, text in answers)


async def test_a_page_is_prepared_before_it_is_written() -> None:
    """So that a full node's does not hold the loop; for the path that is asked."""
    metrics, done = AgentMetrics(), list[object]()

    def series(is_all: bool) -> list[Series]:
        done.append(("written", is_all))
        return []

    metrics.show_node(NodePage(series, 0.0, lambda is_all: (done.append(is_all) for _ in range(2))))
    async with served(metrics=metrics) as url:
        for path in ("metrics", "metric"):
            await _get(f"{url}/{path}")
    assert done == [False, False, ("written", False), True, True, ("written", True)]


async def test_the_format_is_the_one_that_the_reader_asks_for() -> None:
    """Prometheus' text unless OpenMetrics is accepted, each with its content type."""
    accepted = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3"
    async with served(metrics=_metrics(allocation(key_of(1)))) as url, ClientSession() as session:
        for accept, content_type in (
            (accepted, "application/openmetrics-text; version=1.0.0"),
            ("*/*", "text/plain; version=0.0.4"),
        ):
            async with session.get(f"{url}/metrics", headers={"Accept": accept}) as response:
                assert response.headers["Content-Type"].startswith(content_type)
                assert (await response.text()).count("# EOF\n") == (accept == accepted)


async def test_a_large_answer_is_compressed_for_those_who_ask() -> None:
    """And is the same text."""
    allocated = [allocation(key_of(number), cores=1, blocks=1, pod=f"pod-{number}") for number in range(60)]
    async with served(metrics=_metrics(*allocated)) as url, ClientSession(auto_decompress=False) as session:
        async with session.get(f"{url}/metrics", headers={"Accept-Encoding": "gzip"}) as response:
            packed = await response.read()
            assert response.headers["Content-Encoding"] == "gzip"
        async with session.get(f"{url}/metrics", headers={"Accept-Encoding": "identity"}) as response:
            plain = await response.text()
            assert "Content-Encoding" not in response.headers
    unpacked = gzip.decompress(packed).decode()
    assert len(packed) < len(plain) / 5
    assert _node_rows(unpacked) == _node_rows(plain)


def _node_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if 'node="n1"' in line]


EVENTS: list[tuple[Any, ...]] = [
    (lambda of: of.admission("r", "refused", "Fragmented"),
     'admissions_total{outcome="refused",reason="Fragmented",resource="r"} 1.0'),
    (lambda of: of.rpc_finished("r", "Allocate", "OK", 0.003),
     'rpcs_total{code="OK",method="Allocate",resource="r"} 1.0',
     'rpc_duration_seconds_bucket{le="0.005",method="Allocate",resource="r"} 1.0',
     'rpc_duration_seconds_bucket{le="0.0025",method="Allocate",resource="r"} 0.0'),
    (lambda of: of.registered("r"), 'registrations_total{resource="r"} 1.0'),
    (lambda of: of.pod_resources_listed("admission"), 'pod_resources_lists_total{purpose="admission"} 1.0'),
    (lambda of: of.taken_ids_offered("r", count=3), 'taken_ids_offered_total{resource="r"} 3.0'),
    (lambda of: of.reconcile_corrected("freed"), 'reconcile_corrections_total{kind="freed"} 1.0'),
    (lambda of: of.listed("pods", 0.1), "pod_lists_total 1.0"),
    (lambda of: of.watch_ended("pods", "ended"), 'pod_watches_ended_total{outcome="ended"} 1.0'),
    (lambda of: of.unreadable("pods"), "pods_unreadable_total 1.0"),
    (lambda of: of.pod_annotated("patched"), 'pod_annotations_total{outcome="patched"} 1.0'),
    (lambda of: of.pod_event("sent"), 'pod_events_total{outcome="sent"} 1.0'),
    (lambda of: of.rejected_pod_deleted(), "rejected_pods_deleted_total 1.0"),
    (lambda of: of.show_pod_event_age(lambda: 1.5), "pod_event_age_seconds 1.5"),
    (lambda of: of.identified("fetched"), 'identifications_total{method="fetched"} 1.0'),
    (lambda of: of.gpu_event("xid", 79, False, "GPU-1"),
     'gpu_events_total{ignored="false",kind="xid",uuid="GPU-1",xid="79"} 1.0'),
    (lambda of: of.gpu_health_changed("GPU-1", False), 'gpu_health_changes_total{to="unhealthy",uuid="GPU-1"} 1.0'),
    (lambda of: of.driver_error("gpu_is_lost"), 'driver_errors_total{error="gpu_is_lost"} 1.0'),
    (lambda of: of.sampled(0.002), 'sampling_duration_seconds_bucket{le="0.0025"} 1.0'),
    (lambda of: of.sampling_failed(), "sampling_failures_total 1.0"),
    (lambda of: of.sampling_overran(), "sampling_overruns_total 1.0"),
    (lambda of: of.show_isolations(lambda: {"mps": False}), 'isolation_available{isolation="mps"} 0.0'),
]  # fmt: skip
"""What happens, and its series."""


async def test_every_event_method_shows_in_the_metrics() -> None:
    """Each thing that is counted has its series with its labels."""
    metrics = AgentMetrics()
    for happen, *_ in EVENTS:
        happen(metrics)
    async with served(metrics=metrics) as url:
        lines = (await _get(f"{url}/metrics"))[1].splitlines()
    assert [line for _, *shown in EVENTS for line in shown if f"gpushare_{line}" not in lines] == []
    for name in ("process_resident_memory_bytes ", "gpushare_build_info{"):
        assert any(line.startswith(name) for line in lines)


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
        assert await _get(f"{url}/version") == (200, f'{{"version":"{__version__}"}}\n')
        assert await _get(f"{url}/extra") == (200, "more")
        index = (await _get(f"{url}/"))[1]
        assert all(path in index for path in ("/metrics", "/readyz", "/extra"))
        assert (await _get(f"{url}/absent"))[0] == 404


async def test_a_taken_port_ends_the_start_with_the_cure() -> None:
    """The error names address and port and the cure."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = WebServer("127.0.0.1", port, metrics=AgentMetrics(), ready=list)
        with pytest.raises(StartupError, match=rf"127.0.0.1:{port} failed: .* another web.port"):
            await server.run()


@pytest.mark.parametrize("addr", ["256.1.1.1.invalid", "192.0.2.1"])
async def test_an_address_that_is_not_ours_ends_the_start(addr: str) -> None:
    """An unknown name and another machine's address are named with the setting."""
    with pytest.raises(StartupError, match=r"check web\.addr"):
        await WebServer(addr, 0, metrics=AgentMetrics(), ready=list).run()


async def test_without_a_free_descriptor_the_cure_is_not_another_address() -> None:
    """As at a reload, which is tried until there is one."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        with pytest.raises(StartupError, match="raise LimitNOFILE"):
            await WebServer("127.0.0.1", 0, metrics=AgentMetrics(), ready=list).bind()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


async def test_the_port_is_free_after_the_end() -> None:
    """A cancelled server leaves no socket behind."""
    async with served() as url:
        port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_costly_answers_are_made_one_at_a_time_and_cheap_ones_between() -> None:
    """While one is made the probe is answered, and no second is begun."""
    running_now, may_answer, has_begun = [0], asyncio.Event(), asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        running_now[0] += 1
        assert running_now[0] == 1
        has_begun.set()
        await may_answer.wait()
        running_now[0] -= 1
        return web.Response(text="costly")

    async with served(routes=[("/costly", show)]) as url, asyncio.TaskGroup() as group:
        asked = [group.create_task(_get(f"{url}/costly")) for _ in range(MOST_OF_PEER)]
        await has_begun.wait()
        assert (await _get(f"{url}/healthz"))[0] == 200
        may_answer.set()
    assert [task.result() for task in asked] == [(200, "costly")] * MOST_OF_PEER


async def test_one_that_asks_too_much_at_once_is_answered_503_and_others_are_not() -> None:
    """An address of its own still finds a place; afterwards the first does too."""
    may_answer, has_begun = asyncio.Event(), asyncio.Event()

    async def show(_request: web.Request) -> web.Response:
        has_begun.set()
        await may_answer.wait()
        return web.Response(text="costly")

    queue = RequestQueue(most_waiting=4, most_of_peer=2)
    async with serving(web.get("/costly", queue.one_at_a_time(show))) as port:
        first, second, third = [await Peer.open(port) for _ in range(3)]
        other = await Peer.open(port, "127.0.0.2")
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(peer.status("/costly")) for peer in (first, second, third)]
            refused, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in refused] == [503]
            of_other = group.create_task(other.status("/costly"))
            await has_begun.wait()
            may_answer.set()
        assert [task.result() for task in (*waiting, of_other)] == [200] * 3
        assert await other.status("/costly") == 200
        for peer in (first, second, third, other):
            peer.close()


async def test_the_debug_pages_are_on_this_port() -> None:
    """gpu-manager has them there; the list of paths names them."""
    async with served(debug=sources()) as url:
        status, text = await _get(f"{url}/debug/pprof/goroutine?debug=1")
        assert status == 200 and "tasks at" in text
        assert "  /debug/\n" in (await _get(f"{url}/"))[1]
    async with served() as url:
        assert (await _get(f"{url}/debug/pprof/"))[0] == 404


async def test_an_address_a_nodes_name_and_a_services_are_served() -> None:
    """Prometheus, the kubelet, kubectl port-forward and the API server's proxy use these; an old client sends no name."""
    async with served(metrics=_metrics(allocation(key_of(1))), node_name="node-1.example.com") as url:
        for host in (
            "127.0.0.1", "10.1.2.3:5678", "[::1]:5678", "[fd00::7]", "localhost:5678", "Node-1.Example.com:5678",
            "node-1.example.com.", "gpu-1:5678", "gpushare-agent.kube-system.svc",
            "gpushare-agent.kube-system.svc.cluster.local:5678",
            "10-1-2-3.kube-system.pod.cluster.local", "page.localhost", None,
        ):  # fmt: skip
            found = {path: await status_by(url, path, host) for path in ("/metrics", "/", "/healthz")}
            assert set(found.values()) == {200}, (host, found)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:5678", "127.0.0.1.evil.example", "localhost.evil.example", "a.svc.evil.example",
        "svc.cluster.local.evil.example", "node-1.example.com.evil.example", "node-1.example.com@evil.example", "1.2.3",
        "[::1].evil.example", "evil.example#localhost", "a b", "",
    ],
)  # fmt: skip
async def test_no_name_that_a_web_page_may_have_is_served(host: str) -> None:
    """It may resolve to the node, and the browser of somebody in its network would show the page the answers as its own."""
    async with served(metrics=_metrics(allocation(key_of(1))), node_name="node-1.example.com") as url:
        for path in ("/metrics", "/metric", "/", "/dashboard/app.js"):
            assert await status_by(url, path, host) in (400, 404, 421)
        assert await status_by(url, "/metrics", host) != 200
        if host in ("evil.example", "a.svc.evil.example"):
            assert await status_by(url, "/readyz", host) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("X-Forwarded-Uri: /api/v1/namespaces/n/pods/http:p:5678/proxy/metrics\r\nAccept-Encoding: gzip\r\n", 200),
        ("Sec-Fetch-Site: same-origin\r\n", 200),
        ("Sec-Fetch-Site: none\r\nAccept-Encoding: gzip, deflate, br\r\n", 200),
        ("X-Forwarded-Uri: /x/proxy/\r\nAccept-Encoding: gzip, deflate\r\n", 421),
        ("X-Forwarded-Uri: /x/proxy/\r\nAccept-Encoding: gzip\r\nAccept-Encoding: Deflate\r\n", 421),
        ("Sec-Fetch-Site: cross-site\r\n", 421),
        ("Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n", 421),
        ("X-Forwarded-For: 10.0.0.1\r\nX-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\n", 421),
    ],
)
async def test_by_the_api_servers_name_a_proxy_and_a_browser_are_served(headers: str, status: int) -> None:
    """A browser that comes by TLS or from its own machine: no script can send what tells."""
    async with served(metrics=_metrics(allocation(key_of(1)))) as url:
        assert await status_by(url, "/metrics", "api.example.com", headers) == status


async def status_by(url: str, path: str, host: str | None, headers: str = "") -> int:
    line = headers + (f"Host: {host}\r\n" if host is not None else "")
    version = "1.1" if host is not None else "1.0"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"GET {path} HTTP/{version}\r\n{line}Connection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])
