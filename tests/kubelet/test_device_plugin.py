"""kubelet/device_plugin.py over a real unix socket, with grpclib's client and with grpcio's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel

from gpushare_agent.agent.kubelet.device_plugin import FAST_DECODERS, DevicePlugin
from gpushare_agent.agent.kubelet.device_table import DeviceRow, DeviceTable
from gpushare_agent.core.model.allocations import ContainerEdits, ContainerMount, DeviceNode
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.wire import v1beta1
from tests.kubelet.support_plugin import DEADLINE_S, FakeAdmission, RpcLog, serving

RESOURCE = "example.com/cores"
IDS = ["a-0", "a-1", "b-0"]
DEVICES = ["GPU-a::0", "GPU-a::1", "GPU-b::0"]
"""What the handler is asked about."""
EDITS = ContainerEdits(
    env=(("B", "2"), ("A", "1")),
    mounts=(ContainerMount(host_path="/h", container_path="/c", read_only=False),),
    devices=(DeviceNode(host_path="/dev/nvidia0", container_path="/dev/nvidia0", permissions="rw"),),
    annotations=(("k", "v"),),
    cdi_devices=("vendor/class=id",),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    plugin: DevicePlugin
    table: DeviceTable
    admission: FakeAdmission
    rpcs: RpcLog
    stub: v1beta1.DevicePluginStub
    path: Path


@asynccontextmanager
async def bench(*, pre_start_required: bool = True, call_timeout_s: float = DEADLINE_S) -> AsyncIterator[Bench]:
    table = DeviceTable([DeviceRow(id=i, healthy=True, numa=0) for i in IDS])
    admission, rpcs = FakeAdmission(), RpcLog()
    plugin = DevicePlugin(
        RESOURCE,
        table,
        admission,
        rpcs.rpc_finished,
        DeviceIds([GpuUuid("GPU-a"), GpuUuid("GPU-b")]),
        has_pre_start=pre_start_required,
        call_timeout_s=call_timeout_s,
    )
    async with serving(plugin, decoders=FAST_DECODERS) as path, Channel(path=str(path)) as channel:
        stub = v1beta1.DevicePluginStub(channel, timeout=DEADLINE_S)
        yield Bench(plugin=plugin, table=table, admission=admission, rpcs=rpcs, stub=stub, path=path)


@pytest.fixture
async def b() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


def allocate_request(*containers: list[str]) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest([v1beta1.ContainerAllocateRequest(ids) for ids in containers])


def preferred_request(*sizes: int) -> v1beta1.PreferredAllocationRequest:
    return v1beta1.PreferredAllocationRequest(
        [v1beta1.ContainerPreferredAllocationRequest(IDS, [IDS[0]], size) for size in sizes]
    )


async def error_of(call: Any) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("required", [True, False])
async def test_the_options_name_the_calls_that_the_plugin_needs(required: bool) -> None:
    """GetPreferredAllocation always, PreStartContainer where required."""
    async with bench(pre_start_required=required) as b:
        assert await b.stub.get_device_plugin_options() == v1beta1.DevicePluginOptions(
            pre_start_required=required, get_preferred_allocation_available=True
        )


async def test_list_and_watch_sends_all_devices_then_one_message_per_change_and_ends_on_request(b: Bench) -> None:
    """Health and NUMA node 0 arrive; the stream ends with status OK."""
    stream = b.stub.list_and_watch()
    first = await anext(stream)
    assert [(d.id, d.health, d.topology) for d in first.devices] == [
        (i, "Healthy", v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=0)])) for i in IDS
    ]
    assert b.plugin.open_streams == 1
    b.table.set_devices([DeviceRow(id=i, healthy=i != IDS[1]) for i in IDS])
    second = await anext(stream)
    assert [d.health for d in second.devices] == ["Healthy", "Unhealthy", "Healthy"]
    b.plugin.end_streams()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert b.plugin.open_streams == 0


async def test_a_stream_that_the_kubelet_leaves_is_forgotten_and_reported(b: Bench) -> None:
    """The registration is woken by the end at once."""
    reported = asyncio.Event()
    async with Channel(path=str(b.path)) as channel:
        await anext(v1beta1.DevicePluginStub(channel).list_and_watch())
        assert b.plugin.open_streams == 1
        b.plugin.on_streams_changed = reported.set
    await reported.wait()
    assert b.plugin.open_streams == 0


async def test_the_handlers_advice_is_the_preferred_allocation(b: Bench) -> None:
    """Each container request is asked and answered in order."""
    answer = await b.stub.get_preferred_allocation(preferred_request(2, 1))
    assert [c.device_ids for c in answer.container_responses] == [IDS[:2], IDS[:1]]
    assert b.admission.calls.events == [
        ("preferred", RESOURCE, DEVICES, DEVICES[:1], 2),
        ("preferred", RESOURCE, DEVICES, DEVICES[:1], 1),
    ]
    assert b.rpcs.finished == [(RESOURCE, "GetPreferredAllocation", "OK")]


async def test_a_failing_or_slow_handler_gives_no_advice_but_no_error() -> None:
    """An error would reject the pod; an empty answer leaves the error text to Allocate."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("a bug")

    async with bench(call_timeout_s=0.02) as b:
        b.admission.preferred_answer = fail
        answer = await b.stub.get_preferred_allocation(preferred_request(2))
        assert [c.device_ids for c in answer.container_responses] == [[]]
        b.admission.hangs = True
        answer = await b.stub.get_preferred_allocation(preferred_request(2))
        assert [c.device_ids for c in answer.container_responses] == [[]]
        assert [code for _, _, code in b.rpcs.finished] == ["INTERNAL", "DEADLINE_EXCEEDED"]


async def test_an_allocate_answer_holds_everything_that_the_edits_say(b: Bench) -> None:
    """Environment, mounts, device nodes, annotations and CDI names of each container, in order of request."""
    b.admission.allocate_answer = lambda ids: EDITS if ids == DEVICES[:1] else ContainerEdits()
    answer = await b.stub.allocate(allocate_request(IDS[:1], IDS[1:]))
    full, empty = answer.container_responses
    assert full == v1beta1.ContainerAllocateResponse(
        envs={"A": "1", "B": "2"},
        mounts=[v1beta1.Mount(container_path="/c", host_path="/h", read_only=False)],
        devices=[v1beta1.DeviceSpec(container_path="/dev/nvidia0", host_path="/dev/nvidia0", permissions="rw")],
        annotations={"k": "v"},
        cdi_devices=[v1beta1.CdiDevice(name="vendor/class=id")],
    )
    assert empty == v1beta1.ContainerAllocateResponse()
    assert b.admission.calls.events == [("allocate", RESOURCE, DEVICES[:1]), ("allocate", RESOURCE, DEVICES[1:])]
    assert b.rpcs.finished == [(RESOURCE, "Allocate", "OK")]


CODES = {
    RefusalReason.INVALID_REQUEST: Status.INVALID_ARGUMENT,
    RefusalReason.UNKNOWN_DEVICE: Status.INVALID_ARGUMENT,
    RefusalReason.WRONG_GPUS: Status.INVALID_ARGUMENT,
    RefusalReason.SHARING_DISABLED: Status.FAILED_PRECONDITION,
    RefusalReason.POD_UNKNOWN: Status.UNAVAILABLE,
    RefusalReason.POD_AMBIGUOUS: Status.UNAVAILABLE,
    RefusalReason.NOT_READY: Status.UNAVAILABLE,
    RefusalReason.DEVICE_IN_USE: Status.UNAVAILABLE,
    RefusalReason.NO_HEALTHY_GPU: Status.RESOURCE_EXHAUSTED,
    RefusalReason.QUOTA_EXCEEDED: Status.RESOURCE_EXHAUSTED,
    RefusalReason.WRONG_POOL: Status.RESOURCE_EXHAUSTED,
    RefusalReason.NOT_ENOUGH_CORES: Status.RESOURCE_EXHAUSTED,
    RefusalReason.NOT_ENOUGH_MEMORY: Status.RESOURCE_EXHAUSTED,
    RefusalReason.FRAGMENTED: Status.RESOURCE_EXHAUSTED,
}


@pytest.mark.parametrize("reason", RefusalReason)
async def test_a_refusal_arrives_as_its_code_with_reason_and_detail(reason: RefusalReason, b: Bench) -> None:
    """Allocate and PreStartContainer alike."""
    refused = Refused(reason=reason, detail="asked 50 %, free 20 %; ask for less")
    b.admission.allocate_answer = lambda ids: refused
    b.admission.pre_start_answer = refused
    for call in (
        b.stub.allocate(allocate_request(IDS)),
        b.stub.pre_start_container(v1beta1.PreStartContainerRequest(IDS)),
    ):
        error = await error_of(call)
        assert (error.status, error.message) == (CODES[reason], f"{reason}: asked 50 %, free 20 %; ask for less")
    assert [(method, code) for _, method, code in b.rpcs.finished] == [
        ("Allocate", CODES[reason].name),
        ("PreStartContainer", CODES[reason].name),
    ]


async def test_one_refused_container_refuses_the_call(b: Bench) -> None:
    """The containers after it are not asked any more. An endless text is cut to what a header can carry."""
    b.admission.allocate_answer = lambda ids: Refused(reason=RefusalReason.FRAGMENTED, detail="x" * 100_000)
    error = await error_of(b.stub.allocate(allocate_request(IDS[:1], IDS[1:])))
    assert b.admission.calls.events == [("allocate", RESOURCE, DEVICES[:1])]
    assert error.message is not None and len(error.message) == 2000


async def test_a_slow_allocate_is_refused_in_time() -> None:
    """DEADLINE_EXCEEDED, with what to do."""
    async with bench(call_timeout_s=0.02) as b:
        b.admission.hangs = True
        error = await error_of(b.stub.allocate(allocate_request(IDS)))
        assert error.status is Status.DEADLINE_EXCEEDED
        assert error.message is not None
        assert error.message.startswith(f"Allocate of {RESOURCE} was not decided within 0.02 s")


async def test_a_bug_in_the_handler_is_internal_and_names_the_log(b: Bench) -> None:
    """The text does not leak the exception, and points to the log event."""

    def fail(_: Any) -> Any:
        raise KeyError("secret")

    b.admission.allocate_answer = fail
    error = await error_of(b.stub.allocate(allocate_request(IDS)))
    assert error.status is Status.INTERNAL
    assert "event device_plugin_call_failed" in (error.message or "")
    assert "secret" not in (error.message or "")


async def test_an_abandoned_allocate_cancels_the_handler(b: Bench) -> None:
    """A caller that goes away does not leave a decision running."""
    b.admission.hangs = True
    async with asyncio.TaskGroup() as tasks:
        abandoned = tasks.create_task(b.stub.allocate(allocate_request(IDS)))
        await b.admission.calls.wait_for(("allocate", RESOURCE, DEVICES))
        abandoned.cancel()
    b.admission.hangs = False
    await b.stub.allocate(allocate_request(IDS))
    assert [code for _, _, code in b.rpcs.finished] == ["CANCELLED", "OK"]


async def test_a_container_that_may_start_gets_an_empty_answer(b: Bench) -> None:
    """PreStartContainer hands over the IDs."""
    answer = await b.stub.pre_start_container(v1beta1.PreStartContainerRequest(IDS))
    assert answer == v1beta1.PreStartContainerResponse()
    assert b.admission.calls.events == [("pre_start", RESOURCE, DEVICES)]


@pytest.mark.parametrize("method", ["GetPreferredAllocation", "Allocate", "PreStartContainer"])
async def test_grpcio_gets_the_same_answers(method: str) -> None:
    """A second client implementation reads answers, refusals, and malformed requests' texts."""
    grpc = pytest.importorskip("grpc")
    aio = pytest.importorskip("grpc.aio")
    requests: dict[str, Any] = {
        "GetPreferredAllocation": preferred_request(2),
        "Allocate": allocate_request(IDS),
        "PreStartContainer": v1beta1.PreStartContainerRequest(IDS),
    }
    answers: dict[str, Callable[[bytes], Any]] = {
        "GetPreferredAllocation": v1beta1.PreferredAllocationResponse.parse,
        "Allocate": v1beta1.AllocateResponse.parse,
        "PreStartContainer": v1beta1.PreStartContainerResponse.parse,
    }
    async with bench() as b, aio.insecure_channel(f"unix:{b.path}") as channel:
        b.admission.allocate_answer = lambda ids: EDITS
        call = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
        answer = answers[method](await call(bytes(requests[method]), timeout=DEADLINE_S))
        if method == "GetPreferredAllocation":
            assert answer.container_responses[0].device_ids == IDS[:2]
        elif method == "Allocate":
            assert answer.container_responses[0].envs == {"A": "1", "B": "2"}
        with pytest.raises(aio.AioRpcError) as caught:
            await call(b"\x0a\x05x", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("malformed ")


async def test_grpcio_follows_list_and_watch() -> None:
    """The streaming method too, to its end."""
    pytest.importorskip("grpc")
    aio = pytest.importorskip("grpc.aio")
    async with bench() as b, aio.insecure_channel(f"unix:{b.path}") as channel:
        call = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"")
        assert await call.read() == b.table.encode()
        b.table.set_devices([])
        assert await call.read() == b.table.encode()
        b.plugin.end_streams()
        assert await call.read() is aio.EOF
