"""The PodResources client over a real socket, against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from gpushare_agent.agent.kubelet.pod_resources import PodResourcesClient, pod_key
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.wire import v1
from tests.kit.support_grpc import RawCodec
from tests.support_deadline import DEADLINE_S

Answer = Callable[[], Awaitable[bytes]]


class Scripted:
    """A PodResources server whose answers are functions; counts the calls."""

    def __init__(self, *, list_: Answer | None = None, get: Answer | None = None) -> None:
        self._answers = {"List": list_, "Get": get}
        self.calls: list[str] = []

    def __mapping__(self) -> dict[str, Handler]:
        def handler(method: str, answer: Answer) -> Handler:
            async def serve(stream: Stream[Any, Any]) -> None:
                await stream.recv_message()
                self.calls.append(method)
                await stream.send_message(await answer())

            return Handler(serve, Cardinality.UNARY_UNARY, bytes, bytes)

        return {f"/v1.PodResourcesLister/{m}": handler(m, a) for m, a in self._answers.items() if a is not None}


@asynccontextmanager
async def serving(directory: Path, scripted: Scripted) -> AsyncIterator[PodResourcesClient]:
    server = Server([scripted], codec=RawCodec())
    path = directory / "pr.sock"
    await server.start(path=str(path))
    client = PodResourcesClient(path, DeviceIds())
    try:
        yield client
    finally:
        client.close()
        server.close()
        await server.wait_closed()


def pod_message(name: str, cores: int) -> v1.PodResources:
    """As measured kubelets do it: one entry for each ID."""
    devices = [v1.ContainerDevices(resource_name=VCORE_RESOURCE, device_ids=[f"GPU-0::{n}"]) for n in range(cores)]
    inner = v1.ContainerResources(name="main", devices=devices)
    return v1.PodResources(name=name, namespace="default", containers=[inner])


async def two_pods() -> bytes:
    return bytes(v1.ListPodResourcesResponse(pod_resources=[pod_message("a", 3), pod_message("b", 0)]))


async def test_a_list_names_pods_and_counts_their_ids(short_dir: Path) -> None:
    """Entries of one resource are merged when they are read."""
    async with serving(short_dir, Scripted(list_=two_pods)) as client:
        a, b = await client.list_entries(timeout_s=DEADLINE_S)
        assert (a.namespace, a.name, a.count_ids(VCORE_RESOURCE)) == ("default", "a", 3)
        assert a.count_by_container(VCORE_RESOURCE) == {"main": 3} and a.count_by_container(VMEMORY_RESOURCE) == {}
        assert (b.count_ids(VCORE_RESOURCE), b.count_by_container(VCORE_RESOURCE)) == (0, {})


async def test_a_settled_pod_is_left_out_in_whatever_order_it_is_listed_until_one_of_them_has_lost_an_id(
    short_dir: Path,
) -> None:
    """Also with one of the same name in another namespace, which begins with the same bytes; and with one without a name."""
    a, b, other = pod_message("a", 3), pod_message("b", 1), replace(pod_message("b", 2), namespace="other")
    mixed = replace(a, containers=[replace(a.containers[0], devices=a.containers[0].devices[::-1])])
    lists = [[a, b, other], [b, other, mixed], [pod_message("a", 2), b], [other, v1.PodResources()], []]
    settled = {pod_key("default", "a"): 3, pod_key("default", "b"): 1}

    async def answer() -> bytes:
        return bytes(v1.ListPodResourcesResponse(pod_resources=lists.pop(0)))

    async with serving(short_dir, Scripted(list_=answer)) as client:
        found = [await client.list_entries(VCORE_RESOURCE, settled, timeout_s=DEADLINE_S) for _ in range(5)]
    shown = [[(e.namespace, e.name, e.count_ids(VCORE_RESOURCE)) for e in entries] for entries in found]
    left = [("other", "b", 2)]
    assert shown == [left, left, [("default", "a", 2), ("default", "b", 1)], [*left, ("", "", 0)], []]


async def test_the_rate_limit_is_waited_out(short_dir: Path) -> None:
    """The kubelet refuses what comes too fast; a little later it answers."""
    left = [1, 2, 3]

    async def limited() -> bytes:
        if left:
            left.pop()
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        return await two_pods()

    scripted = Scripted(list_=limited)
    async with serving(short_dir, scripted) as client:
        assert len(await client.list_entries(timeout_s=DEADLINE_S)) == 2
        assert scripted.calls == ["List"] * 4


async def test_an_absent_or_stalling_server_is_unavailable(short_dir: Path) -> None:
    """Bounded, and the text names the socket."""
    client = PodResourcesClient(short_dir / "none.sock", DeviceIds())
    with pytest.raises(Unavailable, match=r"none\.sock"):
        await client.list_entries(timeout_s=DEADLINE_S)

    async def stall() -> bytes:
        await asyncio.Event().wait()
        return b""

    async with serving(short_dir, Scripted(list_=stall)) as stalled:
        with pytest.raises(Unavailable, match="did not answer within"):
            await stalled.list_entries(timeout_s=0.05)


async def test_garbage_is_corrupt(short_dir: Path) -> None:
    """Truncated in the frame of a pod: at once. Inside a container: when that pod is read."""

    async def cut() -> bytes:
        return (await two_pods())[:-3]

    async def bad_inside() -> bytes:
        return bytes(v1.ListPodResourcesResponse(pod_resources=[pod_message("a", 1)])).replace(
            b"GPU-0::0", b"GPU\xff0::0"
        )

    async with serving(short_dir, Scripted(list_=cut)) as client:
        with pytest.raises(Corrupt):
            await client.list_entries(timeout_s=DEADLINE_S)
    async with serving(short_dir, Scripted(list_=bad_inside)) as client:
        (entry,) = await client.list_entries(timeout_s=DEADLINE_S)
        with pytest.raises(Corrupt, match="default/a"):
            entry.count_by_container(VCORE_RESOURCE)


async def test_get_answers_one_pod(short_dir: Path) -> None:
    """And remembers that this kubelet has it."""

    async def answer() -> bytes:
        return bytes(v1.GetPodResourcesResponse(pod_resources=pod_message("a", 2)))

    async with serving(short_dir, Scripted(get=answer)) as client:
        assert client.has_get is None
        entry = await client.get_pod("default", "a", timeout_s=DEADLINE_S)
        assert entry.count_by_container(VCORE_RESOURCE) == {"main": 2} and client.has_get is True
        client.forget()
        assert client.has_get is None


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (Status.UNKNOWN, "pod a in namespace default not found", NotFound),
        (Status.UNKNOWN, "PodResources API Get method disabled", Rejected),
        (Status.UNIMPLEMENTED, "unknown method Get", Rejected),
        (Status.INTERNAL, "boom", Unavailable),
    ],
)
async def test_get_errors_are_reported_apart(
    short_dir: Path, status: Status, text: str, error: type[Exception]
) -> None:
    """An unknown pod, a kubelet without Get, a fault."""

    async def fail() -> bytes:
        raise GRPCError(status, text)

    async with serving(short_dir, Scripted(get=fail)) as client:
        with pytest.raises(error):
            await client.get_pod("default", "a", timeout_s=DEADLINE_S)
        assert client.has_get is (False if error is Rejected else None if error is Unavailable else client.has_get)
