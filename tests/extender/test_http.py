"""The extender's HTTP server against hostile clients: idle connections, half handshakes, slow bodies, costly JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.core.kit.http_server import HttpLimits
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import GpuReport
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.settings.sections import ExtenderSettings
from gpushare_agent.extender.app import GC_THRESHOLDS
from gpushare_agent.extender.claims_webhook import ClaimsWebhook
from gpushare_agent.extender.cluster_state import ClusterPolicy, ClusterState, Filtered
from gpushare_agent.extender.debug import MOST_NODES, StatePages
from gpushare_agent.extender.decisions.claims import convert_pod
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.http import (
    BODY_S,
    IDLE_S,
    LONG_AT_ONCE,
    LONG_REVIEWS_AT_ONCE,
    MAX_BODY_BYTES,
    MAX_REVIEW_BYTES,
    SHORT_BYTES,
    ExtenderWeb,
    reload_certificate,
    tls_context,
)
from gpushare_agent.extender.messages import MAX_POD_BYTES, NodesArgs
from gpushare_agent.extender.metrics import ExtenderMetrics
from gpushare_agent.extender.values import PodPlan, Reservation, Stage
from gpushare_agent.extender.verbs import Extender
from tests.cluster.support_kube import running
from tests.extender.support_extender import cluster_node
from tests.kit.support_http import Peer, loop_time_s
from tests.support_core import GPU_MEM_NAMES, NAMES
from tests.support_deadline import DEADLINE_S, poll_until
from tests.support_json import undecoded

DATA = Path(__file__).parent.parent / "data"
CA, KEY = DATA / "kube-ca.pem", DATA / "kube-server.key"
QUICK = 0.05
MIB = 1 << 20
BAD_FILTER = b'gpushare_extender_requests_total{outcome="bad",verb="filter"} 1.0'
FILTER = json.dumps({"Pod": {"metadata": {"name": "a", "namespace": "b", "uid": "c"}}, "NodeNames": ["n"]}).encode()
LONG_FILTER = FILTER.ljust(SHORT_BYTES + 1)
Connect = Callable[..., Awaitable[Peer]]

NOTHING: Any = None
"""Nobody asks it."""


class EverythingFits(Extender, kw_only=True):
    """The verbs' answers, without a cluster."""

    async def nodes_for(self, args: NodesArgs) -> Filtered:
        return Filtered(fitting=list(args.names))


class Nodes:
    """`going` has gone by the time that it is shown."""

    def __init__(self, count: int) -> None:
        gpus = tuple(GpuReport(index=index, uuid=GpuUuid(f"GPU-{index}"), memory_mib=1024) for index in range(2))
        names = (f"n{number:04}" for number in range(count))
        self.known = {name: NodeLedger(replace(cluster_node(name), gpus=gpus), NAMES) for name in names}
        self.going = ""

    def node_names(self) -> list[str]:
        return sorted(self.known)

    def node_ledger(self, name: str) -> NodeLedger | None:
        return self.known.get(name) if name != self.going else None


@contextlib.asynccontextmanager
async def served(
    nodes: Nodes | None = None,
    *,
    metrics: ExtenderMetrics | None = None,
    limits: HttpLimits | None = None,
    webhook: ClaimsWebhook | None = None,
    body_s: float = BODY_S,
    **settings: Any,
) -> AsyncIterator[int]:
    """The port of an extender that decides."""
    web = ExtenderWeb(
        settings=ExtenderSettings(port=0, **settings),
        bind_s=0.1,
        body_s=body_s,
        limits=limits or HttpLimits(idle_s=IDLE_S),
        verbs=EverythingFits(
            state=ClusterState(policy=ClusterPolicy(names=NAMES)),
            **dict.fromkeys(("binder", "metrics", "waiters", "preemption"), NOTHING),
        ),
        metrics=metrics or ExtenderMetrics(),
        ready=list,
        warm=list,
        pages=StatePages(head=lambda: {"is_leading": True}, nodes=nodes or Nodes(0)),
        webhook=webhook,
        is_webhook_open=True,
    )
    async with asyncio.timeout(DEADLINE_S), running(web.run):
        yield await web.wait_listening()


def post(peer: Peer, body: bytes, *, length: int | None = None) -> None:
    """A filter request, of whose body `length` bytes are announced."""
    peer.send(post_bytes(body, length=length))


def post_bytes(body: bytes, path: str = "/scheduler/filter", *, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + body


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Opens connections, which are closed at the end."""
    opened: list[Peer] = []

    async def open_peer(port: int, **settings: Any) -> Peer:
        opened.append(await Peer.open(port, **settings))
        return opened[-1]

    yield open_peer
    for peer in opened:
        peer.close()
    await asyncio.sleep(0)


def client() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(CA))
    context.check_hostname = False
    return context


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_has_a_time(connect: Connect, sent: bytes) -> None:
    """Nothing, half a greeting and something else are given up; one that does not end stops no other."""
    limits = HttpLimits(handshake_s=1.0)  # enough for the fresh one's own
    async with served(limits=limits, tls_cert=CA, tls_key=KEY) as port:
        dull = await connect(port)
        dull.send(sent)
        while not await dull.ended():  # an alert may come first
            pass
        fresh = await connect(port, tls=client())
        assert (await fresh.get("/healthz"))[0] == 200


async def test_the_end_during_a_handshake_leaves_nothing() -> None:
    """Sockets of connections that had not sent a byte are closed with the server."""
    opened = []
    async with served(tls_cert=CA, tls_key=KEY) as port:
        for _ in range(3):
            sock = socket.socket()
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            opened.append(sock)
    for sock in opened:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        sock.close()
    gc.collect()


@pytest.mark.parametrize("length", [100, SHORT_BYTES + 1])
async def test_a_body_that_does_not_come_is_given_up(connect: Connect, length: int) -> None:
    """408, and the connection ends, however long the body would have been."""
    async with served(body_s=QUICK) as port:
        post(peer := await connect(port), b"{", length=length)
        status, text = await peer.answer()
        assert (status, b"no whole request within" in text) == (408, True)
        assert await peer.ended()


async def test_so_many_long_bodies_are_read_at_once(connect: Connect) -> None:
    """A further one is answered 503, a short one is read; when one has ended there is a place again."""
    async with served() as port:
        slow = [await connect(port) for _ in range(LONG_AT_ONCE)]
        for peer in slow:
            post(peer, b"{", length=SHORT_BYTES + 1)

        async def status(body: bytes) -> int:
            post(one := await connect(port), body)
            return (await one.answer())[0]

        while (answered := await status(LONG_FILTER)) != 503:  # until all of them have begun
            assert answered == 200
        assert await status(FILTER) == 200
        slow[0].close()
        while (answered := await status(LONG_FILTER)) == 503:
            pass
        assert answered == 200


@pytest.mark.parametrize("length", [100, SHORT_BYTES + 1])
async def test_a_client_that_goes_away_in_a_body_leaves_no_traceback(
    connect: Connect, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    """It is counted as a bad request; the log stays empty."""
    metrics = ExtenderMetrics()
    with caplog.at_level(logging.WARNING):
        async with served(metrics=metrics) as port:
            post(peer := await connect(port), b"{", length=length)
            await peer.drain()
            peer.send(b" ")
            await asyncio.sleep(0.05)
            peer.close()
            while BAD_FILTER not in metrics.exposition("")[1]:
                await asyncio.sleep(0.005)
    assert caplog.records == []


def _pod_of_many_containers() -> bytes:
    containers = [{"name": f"c{n}", "resources": {"limits": {"tencent.com/vcuda-core": "1"}}} for n in range(12_000)]
    pod = {"metadata": {"name": "a", "namespace": "b", "uid": "c"}, "spec": {"containers": containers}}
    return json.dumps({"Pod": pod, "NodeNames": ["n"]}).encode()


def _hostile() -> dict[str, bytes]:
    """A MiB of the JSON that takes longest to decode, most of it refused by its number of values before."""
    return {
        "empty lists": b"[" + b"[]," * (MIB // 3),
        "nested lists": b"[" + (b"[" * 500 + b"]" * 500 + b",") * (MIB // 1001) + b"0]",
        "objects": b"[" + b'{"a":{}},' * (MIB // 9),
        "objects, few enough": b"[" + b'{"a":{}}                ,' * (MIB // 25) + b"0]",
        "lists, few enough": b"[" + b"[[]]            ," * (MIB // 17) + b"0]",
        "floats": b"[" + b"1.234567e8," * (MIB // 11) + b"0]",
        "long numbers": b"[" + (b"9" * 4200 + b",") * (MIB // 4201) + b"0]",
        "keys": b"{" + b",".join(b'"%011x":0' % number for number in range(MIB // 16)) + b"}",
        "short keys": b"{" + b",".join(b'"%x":0' % number for number in range(MIB // 10)) + b"}",
        "containers": _pod_of_many_containers(),
        "escapes": b'"' + b"\\u0041" * (MIB // 6) + b'"',
        "deep": b"[" * MIB,
    }


@pytest.fixture
def collector_of_the_extender() -> Iterator[None]:
    """As in app.run: with Python's own thresholds a collection walks all that the tests have loaded."""
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.freeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def test_a_name_that_utf8_cannot_have_is_refused_as_any_other(connect: Connect) -> None:
    """JSON can escape half a surrogate pair."""
    body = json.dumps({"Pod": {}, "NodeNameToMetaVictims": {"\ud800": "x"}}).encode()
    async with served() as port:
        peer = await connect(port)
        peer.send(post_bytes(body, "/scheduler/preemption"))
        status, text = await peer.answer()
        assert status == 400 and b"surrogate" in text


def _big_pod() -> bytes:
    """As large as one value of a request may be, and its last container asks for something that is refused."""
    limits = [{"limits": {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"}} for _ in range(240)]
    del limits[-1]["limits"]["tencent.com/vcuda-memory"]
    env = [{"name": f"n{number}", "value": "x" * 40} for number in range(60)]
    containers = [{"name": f"c{n}", "env": env, "resources": limits[n]} for n in range(240)]
    assert isinstance(convert_pod(read_pod_json(undecoded({"spec": {"containers": containers}})), NAMES), Refused)
    content = json.dumps({"metadata": {}, "spec": {"containers": containers}}).encode()
    assert MAX_POD_BYTES * 0.9 < len(content) < MAX_POD_BYTES
    return content


async def test_reviews_take_no_place_of_the_schedulers_requests(connect: Connect) -> None:
    """The webhook may be open to whoever reaches it. A body longer than a pod can be is not read at all."""

    async def review(length: int, body: bytes = b"{") -> Peer:
        peer = await connect(port)
        peer.send(post_bytes(body, "/mutate-pods", length=length))
        return peer

    async with served(webhook=ClaimsWebhook(api=NOTHING, names=NAMES)) as port:
        assert (await (await review(MAX_REVIEW_BYTES + 1)).answer())[0] == 413
        for _ in range(LONG_REVIEWS_AT_ONCE):
            await review(SHORT_BYTES + 1)
        status = 0
        while status != 503:  # until all of them have begun
            status = (await (await review(SHORT_BYTES + 1, b" " * (SHORT_BYTES + 1))).answer())[0]
        post(own := await connect(port), LONG_FILTER)
        assert (await own.answer())[0] == 200


def _long() -> dict[str, bytes]:
    """As long as a request may be: what takes longest, what was found to, and what a scheduler sends."""
    nodes = [{"metadata": {"name": f"node-{n}", "labels": {f"l{m}": "v" * 50 for m in range(200)}}} for n in range(550)]
    pod = {"metadata": {"name": "a", "namespace": "b", "uid": "c"}, "spec": {"containers": []}}
    found = {
        "keys": b"{" + b",".join(b'"%014x":0' % number for number in range(7 * MIB // 20)) + b"}",
        "victims": b'{"NodeNameToVictims":{' + b",".join(b'"%019x":null' % n for n in range(7 * MIB // 27)) + b"}}",
        "whole nodes": json.dumps({"Pod": pod, "Nodes": {"items": nodes}}).encode(),
    }
    assert all(6 * MIB < len(body) < 8 * MIB for body in found.values())
    return found


def _review(raw_object: bytes) -> bytes:
    head = {"uid": "u", "namespace": "n", "operation": "CREATE", "resource": {"resource": "pods"}}
    request = json.dumps(head)[:-1].encode() + b',"object":' + raw_object + b"}"
    return b'{"apiVersion":"admission.k8s.io/v1","request":' + request + b"}"


COSTLY = {
    **{f"filter, {name}": ("/scheduler/filter", body) for name, body in _hostile().items()},
    **{f"review, {name}": ("/mutate-pods", _review(body)) for name, body in _hostile().items()},
    "review, big pod": ("/mutate-pods", _review(_big_pod())),
    **{
        f"long {verb}, {name}": (f"/scheduler/{verb}", body)
        for verb in ("filter", "bind", "preemption")
        for name, body in _long().items()
    },
}


@pytest.mark.usefixtures("collector_of_the_extender")
@pytest.mark.parametrize(("path", "body"), COSTLY.values(), ids=COSTLY)
async def test_no_request_keeps_the_loop_for_long(path: str, body: bytes) -> None:
    """Whatever is in it and however long it is, also at the webhook, which every client may call: binds and probes go on.
    What no schema names is skipped."""
    async with served(webhook=ClaimsWebhook(api=NOTHING, names=NAMES)) as port:
        longest_s, _ = await loop_time_s(port, post_bytes(body, path))
        assert longest_s < 0.05


async def test_a_body_longer_than_any_request_is_refused_before_it_is_read(connect: Connect) -> None:
    """By its header; a packed one too (tests/kit/test_http_server.py)."""
    async with served() as port:
        post(long := await connect(port), b"{", length=MAX_BODY_BYTES + 1)
        assert (await long.answer())[0] == 413


async def test_the_state_is_shown_a_page_at_a_time(connect: Connect) -> None:
    """Each page names where the next begins; together they have every node once."""
    nodes = Nodes(MOST_NODES + 50)
    async with served(nodes) as port:
        peer = await connect(port)
        found: list[str] = []
        path = "/debug/state"
        while path:
            status, text = await peer.get(path)
            page = json.loads(text)
            assert (status, page["is_leading"], page["known_nodes"]) == (200, True, len(nodes.known))
            assert len(page["nodes"]) <= MOST_NODES
            found += [node["name"] for node in page["nodes"]]
            path = f"/debug/state?after={page['next_after']}" if page["next_after"] else ""
        assert found == nodes.node_names()


async def test_one_node_can_be_asked_for(connect: Connect) -> None:
    """By its name; one that is not known is 404, and a parameter that is not known 400. One that goes while a page is made
    is left out of it."""
    async with served(nodes := Nodes(3)) as port:
        peer = await connect(port)
        status, text = await peer.get("/debug/state?node=n0001")
        assert (status, [node["name"] for node in json.loads(text)["nodes"]]) == (200, ["n0001"])
        assert (await peer.get("/debug/state?node=zz"))[0] == 404
        assert (await peer.get("/debug/state?nodes=n0001"))[0] == 400
        assert (await peer.get(f"/debug/state?limit={MOST_NODES + 1}"))[0] == 400
        nodes.going = "n0000"
        page = json.loads((await peer.get("/debug/state"))[1])
        assert [node["name"] for node in page["nodes"]] == ["n0001", "n0002"]


async def test_gpushares_inspect_counts_in_its_units(connect: Connect) -> None:
    """What its inspect reads, of all nodes or of one: memory of other resources is used too, a unit in part is a unit, and
    the pods are those of gpu-mem."""
    nodes = Nodes(2)
    on_two = PodPlan(containers=(), charges={0: Charge(units=1), 1: Charge(units=1)})
    by_cores = PodPlan(containers=(), charges={1: Charge(cores=10, blocks=1)})
    names = replace(GPU_MEM_NAMES, gpu_mem_unit_mib=256)
    ledger = nodes.known["n0000"] = NodeLedger(nodes.known["n0000"].node, names)
    ledger.add(_reservation("two", on_two))
    ledger.add(_reservation("by-cores", by_cores))
    async with served(nodes) as port:
        peer = await connect(port)
        status, text = await peer.get("/gpushare-scheduler/inspect")
        assert (status, [node["name"] for node in json.loads(text)["nodes"]]) == (200, ["n0000", "n0001"])
        [node] = json.loads((await peer.get("/gpushare-scheduler/inspect/n0000"))[1])["nodes"]
        pods = [{"name": "two", "namespace": "default", "usedGPU": 1}]
        devices = [{"id": index, "totalGPU": 4, "usedGPU": used, "pods": pods} for index, used in ((0, 1), (1, 2))]
        assert node == {"name": "n0000", "totalGPU": 8, "usedGPU": 3, "devs": devices}
        status, text = await peer.get("/gpushare-scheduler/inspect/zz")
        assert (status, json.loads(text)) == (404, {"nodes": [], "error": "no node zz is known"})


def _reservation(name: str, plan: PodPlan) -> Reservation:
    uid, stage = PodUid(f"uid-{name}"), Stage.CONFIRMED
    return Reservation(pod_uid=uid, namespace="default", pod=name, node="n0000", plan=plan, stage=stage, at=0.0)


async def test_a_renewed_certificate_is_read_once_it_fits_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two files may be of two versions for a moment; the former one stays in use."""
    monkeypatch.setattr("gpushare_agent.extender.http.CERTIFICATE_PERIOD_S", 0.001)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(CA, cert)
    shutil.copy(KEY, key)
    context = tls_context(cert, key, None)

    def is_logged(event: str, content: bytes) -> bool:
        cert.write_bytes(content)  # again and again: the first time may be before the first look
        return event in [one["event"] for one in logs]

    with capture_logs() as logs:
        async with running(lambda: reload_certificate(context, cert, key)):
            await poll_until(lambda: is_logged("certificate_not_reloaded", b"none"), "a certificate that does not fit")
            await poll_until(lambda: is_logged("certificate_reloaded", CA.read_bytes()), "a renewed certificate")
