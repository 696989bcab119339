"""The device-plugin service of one resource: the kubelet's five methods, mapped to an admission handler.

The handler decides; kubelet/registration.py has the socket and registers it. Requests are
decoded by kit/protobuf.py and large answers are encoded by hand, because every admission of the node waits here.

State owned: the open ListAndWatch streams.
Format: protos/deviceplugin.proto.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from operator import attrgetter
from typing import Any, Protocol

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream
from msgspec import Struct, field

from gpushare_agent.agent.kubelet.device_table import DeviceTable
from gpushare_agent.core.kit.grpc_codec import Decoder
from gpushare_agent.core.kit.grpc_server import send_answer
from gpushare_agent.core.kit.protobuf import (
    PreferredContainer,
    bytes_field,
    decode_allocate,
    decode_pre_start,
    decode_preferred_allocation,
    integer_field,
    string_list,
)
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.device_ids import DeviceIds, OfferedIds
from gpushare_agent.core.model.errors import TRANSIENT_REASONS, RefusalReason, Refused
from gpushare_agent.core.model.names import DeviceId, named_gpus
from gpushare_agent.core.wire import v1beta1

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 5.0
"""The kubelet sets no deadline for GetPreferredAllocation and Allocate, and the whole node waits for them."""
PRE_START_TIMEOUT_S = 20.0
"""The kubelet gives PreStartContainer 30 s; what is left is for an answer that names what was slow."""
_MAX_DETAIL_CHARS = 2000
"""Of a refusal. The text ends up in the pod's status, and HTTP/2 peers limit their headers."""

FAST_DECODERS: Mapping[type, Decoder] = {
    v1beta1.PreferredAllocationRequest: decode_preferred_allocation,
    v1beta1.AllocateRequest: decode_allocate,
    v1beta1.PreStartContainerRequest: decode_pre_start,
}
"""The handlers of a DevicePlugin expect requests decoded like this."""


class AdmissionHandler(Protocol):
    """Decides on the kubelet's admission calls. A refusal is a value; an exception is a bug or an outage."""

    async def preferred(
        self, resource: str, available: Collection[DeviceId], must_include: Sequence[DeviceId], size: int
    ) -> Sequence[str]: ...

    async def allocate(self, resource: str, ids: Sequence[DeviceId]) -> ContainerEdits | Refused: ...

    async def pre_start(self, resource: str, ids: Sequence[DeviceId]) -> Refused | None:
        """Why the container may not start, None where it may."""


RpcFinished = Callable[[str, str, str, float], None]
"""Called after each call with resource, method, gRPC status name ("OK" for an answer), and seconds; must not block."""


class DevicePlugin(Struct, eq=False):
    """Serves one resource, by a GrpcServer with `decoders`. Without `has_pre_start` the kubelet does not call
    PreStartContainer. `on_streams_changed` is called whenever a ListAndWatch stream opens or ends."""

    resource: str
    table: DeviceTable
    handler: AdmissionHandler
    rpc_finished: RpcFinished
    ids: DeviceIds
    has_pre_start: bool = False
    call_timeout_s: float = CALL_TIMEOUT_S
    on_streams_changed: Callable[[], None] = lambda: None
    _waits: dict[Stream[Any, Any], asyncio.Timeout] = field(default_factory=dict)

    @property
    def options(self) -> v1beta1.DevicePluginOptions:
        return v1beta1.DevicePluginOptions(
            pre_start_required=self.has_pre_start, get_preferred_allocation_available=True
        )

    @property
    def open_streams(self) -> int:
        """The number of ListAndWatch streams; the kubelet uses the plugin only while it has one."""
        return len(self._waits)

    @property
    def decoders(self) -> Mapping[type, Decoder]:
        """FAST_DECODERS with the IDs that are expected, which are thousands in each offer."""
        return {
            **FAST_DECODERS,
            v1beta1.PreferredAllocationRequest: lambda data: decode_preferred_allocation(data, self._read_offer),
        }

    def continue_as(self, other: DevicePlugin) -> None:
        """Serves what `other` was made for, of the same resource and options: the streams stay, and send its devices."""
        table, self.table = self.table, other.table
        self.table.take_over(table)
        self.handler, self.has_pre_start = other.handler, other.has_pre_start
        self.rpc_finished, self.ids = other.rpc_finished, other.ids
        # Only now: a stream that wakes compares its table with the plugin's, and goes on with the new one.
        table.changes.notify()

    def end_streams(self) -> None:
        """Ends every open ListAndWatch stream with status OK. Later streams are not affected."""
        now = asyncio.get_running_loop().time()
        for wait in self._waits.values():
            # Rescheduling a timeout that has expired raises, and that stream ends already.
            if not wait.expired():
                wait.reschedule(now)

    def __mapping__(self) -> dict[str, Handler]:
        unary, to_stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        calls = {
            "GetDevicePluginOptions": (self._serve_options, unary, v1beta1.Empty, v1beta1.DevicePluginOptions),
            "ListAndWatch": (self._serve_list, to_stream, v1beta1.Empty, v1beta1.ListAndWatchResponse),
            "GetPreferredAllocation": (
                self._serve_preferred, unary, v1beta1.PreferredAllocationRequest, v1beta1.PreferredAllocationResponse,
            ),
            "Allocate": (self._serve_allocate, unary, v1beta1.AllocateRequest, v1beta1.AllocateResponse),
            "PreStartContainer": (
                self._serve_pre_start, unary, v1beta1.PreStartContainerRequest, v1beta1.PreStartContainerResponse,
            ),
        }  # fmt: skip
        return {f"/v1beta1.DevicePlugin/{name}": Handler(*call) for name, call in calls.items()}

    def _read_offer(self, fields: list[bytes]) -> OfferedIds | None:
        return self.table.offer.read(self.ids, fields)

    async def _serve_options(self, stream: Stream[Any, Any]) -> None:
        await _request(stream)
        await stream.send_message(self.options)

    async def _serve_list(self, stream: Stream[Any, Any]) -> None:
        await _request(stream)
        try:
            # The streams have no end of their own: `end_streams` moves this timeout to now, which ends them with status
            # OK.
            async with asyncio.timeout(None) as wait:
                self._waits[stream] = wait
                self.on_streams_changed()
                while True:
                    await self._send_lists(stream, self.table)
        except TimeoutError:
            return  # end_streams(): grpclib ends the stream with status OK
        finally:
            self._waits.pop(stream, None)
            self.on_streams_changed()

    async def _send_lists(self, stream: Stream[Any, Any], table: DeviceTable) -> None:
        """Sends the table's lists until another table is in its place."""
        # A reload puts another table in its place; the stream, and with it the kubelet's registration, stays.
        while table is self.table:
            seen = table.changes.count
            await stream.send_message(table.encode())
            log.debug("device_list_sent", resource=self.resource, version=seen)
            await table.changes.wait(seen)

    async def _serve_preferred(self, stream: Stream[Any, Any]) -> None:
        containers: list[PreferredContainer] = await _request(stream)
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.call_timeout_s
        answers = []
        code = Status.OK.name
        # Kubelets put one container into a call (measured, 385 of 385); the API allows several.
        for container in containers:
            ids, code = await self._prefer(container, deadline)
            answers.append(bytes_field(1, string_list(1, ids)))
        # Before the metric, as below before the log line: the kubelet admits no other pod until it has the status.
        await send_answer(stream, b"".join(answers))
        self.rpc_finished(self.resource, "GetPreferredAllocation", code, time.perf_counter() - started)

    async def _prefer(self, container: PreferredContainer, deadline: float) -> tuple[Sequence[str], str]:
        """The handler's advice; empty where it fails, because an error here rejects the pod with a worse message."""
        offered = container.known or OfferedIds(self.ids.read(container.available))
        fields = {"resource": self.resource, "offered": len(offered), "asked": container.size}
        try:
            async with asyncio.timeout_at(deadline):
                must_include = self.ids.read(container.must_include)
                devices = await self.handler.preferred(self.resource, offered, must_include, container.size)
        except TimeoutError:
            log.warning("preferred_allocation_timed_out", timeout_s=self.call_timeout_s, **fields)
            return (), Status.DEADLINE_EXCEEDED.name
        except Exception:  # a servicer's edge: Allocate can explain better, and the traceback is in the log
            log.exception("preferred_allocation_failed", **fields)
            return (), Status.INTERNAL.name
        return self.ids.write_all(devices), Status.OK.name

    async def _serve_allocate(self, stream: Stream[Any, Any]) -> None:
        texts: list[list[str]] = await _request(stream)
        # The whole agent names devices by the GPU's UUID: texts are translated at this edge alone.
        containers = [self.ids.read(ids) for ids in texts]
        async with self._answering("Allocate", containers, self.call_timeout_s):
            answers = [await self._allocate(ids) for ids in containers]
            await send_answer(stream, b"".join(answers))

    async def _allocate(self, ids: Sequence[DeviceId]) -> bytes:
        """The answer for one container, as it is in the AllocateResponse."""
        outcome = await self.handler.allocate(self.resource, ids)
        if isinstance(outcome, Refused):
            raise _error_of(outcome)
        return bytes_field(1, _encoded(outcome))

    async def _serve_pre_start(self, stream: Stream[Any, Any]) -> None:
        texts: list[str] = await _request(stream)
        ids = self.ids.read(texts)
        async with self._answering("PreStartContainer", [ids], PRE_START_TIMEOUT_S):
            if (refused := await self.handler.pre_start(self.resource, ids)) is not None:
                raise _error_of(refused)
            await send_answer(stream, v1beta1.PreStartContainerResponse())

    @asynccontextmanager
    async def _answering(
        self, method: str, containers: Sequence[Sequence[DeviceId]], timeout_s: float
    ) -> AsyncIterator[None]:
        """Bounds one call, writes its log line and metric, and renames its faults for the pod's owner."""
        started = time.perf_counter()
        # What stands if neither an answer nor an error is reached: the kubelet restarted, and its call is cancelled.
        code, detail = Status.CANCELLED, "the caller went away"
        try:
            with _renamed_faults(method, self.resource, timeout_s):
                async with asyncio.timeout(timeout_s):
                    yield
            code, detail = Status.OK, ""
        except GRPCError as e:
            code, detail = e.status, e.message or ""
            raise
        finally:
            took_s = time.perf_counter() - started
            log.info(
                "allocate" if method == "Allocate" else "pre_start_container",
                resource=self.resource,
                units=sum(map(len, containers)),
                gpus=sorted({gpu for ids in containers for gpu in named_gpus(ids)}),
                code=code.name,
                duration_ms=round(took_s * 1000, 2),
                **({"detail": detail} if detail else {}),
            )
            self.rpc_finished(self.resource, method, code.name, took_s)


@contextmanager
def _renamed_faults(method: str, resource: str, timeout_s: float) -> Iterator[None]:
    """Every fault as the gRPC error whose text the kubelet shows in the pod's status."""
    try:
        yield
    except GRPCError:
        raise
    except TimeoutError as e:
        text = (
            f"{method} of {resource} was not decided within {timeout_s:g} s, so the container is refused; "
            f"create the pod again, and look into the log of the node's GPU agent if this repeats"
        )
        raise GRPCError(Status.DEADLINE_EXCEEDED, text) from e
    except Exception as e:  # a servicer's edge: the pod's owner gets an answer, the log the traceback
        log.exception("device_plugin_call_failed", method=method, resource=resource)
        text = (
            f"{method} of {resource} failed by a fault of the GPU agent; "
            f"its log on this node has the traceback (event device_plugin_call_failed)"
        )
        raise GRPCError(Status.INTERNAL, text) from e


async def _request(stream: Stream[Any, Any]) -> Any:
    """The request as FAST_DECODERS left it; a call without one never gets here (kit/grpc_server.py)."""
    return await stream.recv_message()


def _error_of(refused: Refused) -> GRPCError:
    """A refusal for the kubelet: the code says whether to try again, the text goes into the pod's status."""
    text = f"{refused.reason}: {refused.detail}"[:_MAX_DETAIL_CHARS]
    return GRPCError(_status_of(refused.reason), text.removesuffix("."))  # the kubelet adds ", which is unexpected"


def _status_of(reason: RefusalReason) -> Status:
    # The kubelet itself never tries an Allocate again: the code is for people and for the controllers that read the
    # Event.
    if reason in TRANSIENT_REASONS:
        return Status.UNAVAILABLE
    match reason:
        case RefusalReason.INVALID_REQUEST | RefusalReason.UNKNOWN_DEVICE | RefusalReason.WRONG_GPUS:
            return Status.INVALID_ARGUMENT
        # Not the pod's fault and not the load's: the node's settings would have to change first.
        case RefusalReason.SHARING_DISABLED:
            return Status.FAILED_PRECONDITION
        case _:
            return Status.RESOURCE_EXHAUSTED


def _encoded(edits: ContainerEdits) -> bytes:
    """A ContainerAllocateResponse; the generated classes need four times as long."""
    by_path = attrgetter("container_path")
    mounts = [(m.container_path, m.host_path, m.read_only) for m in sorted(edits.mounts, key=by_path)]
    devices = [(d.container_path, d.host_path, d.permissions) for d in sorted(edits.devices, key=by_path)]
    return b"".join([
        *[bytes_field(1, _strings(pair)) for pair in sorted(edits.env)],
        *[bytes_field(2, _strings(paths) + integer_field(3, read_only)) for *paths, read_only in mounts],
        *[bytes_field(3, _strings(device)) for device in devices],
        *[bytes_field(4, _strings(pair)) for pair in sorted(edits.annotations)],
        *[bytes_field(5, _strings((name,))) for name in sorted(edits.cdi_devices)],
    ])  # fmt: skip


def _strings(texts: Sequence[str]) -> bytes:
    """Fields 1, 2 and so on of a message."""
    return b"".join([bytes_field(number, text.encode()) for number, text in enumerate(texts, 1)])
