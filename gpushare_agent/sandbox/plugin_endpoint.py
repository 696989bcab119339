"""The embedded kubelet's side of one device plugin: dial-back, the device stream, the three calls of an admission.

Errors come out as PluginCallError with the text that grpc-go gives, for the kubelet passes it on to the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from gpushare_agent.kit.wire_build import bytes_field, integer_field, string_list
from gpushare_agent.model.errors import Corrupt, Unavailable
from gpushare_agent.sandbox import wire_frames
from gpushare_agent.sandbox.grpc_bytes import open_channel
from gpushare_agent.wire.v1beta1 import DevicePluginOptions

DIAL_TIMEOUT_S = 10.0
OPTIONS_TIMEOUT_S = 5.0
PRE_START_TIMEOUT_S = 30.0
_SERVICE = "/v1beta1.DevicePlugin"
_CODE_NAMES = {
    Status.CANCELLED: "Canceled", Status.UNKNOWN: "Unknown", Status.INVALID_ARGUMENT: "InvalidArgument",
    Status.DEADLINE_EXCEEDED: "DeadlineExceeded", Status.NOT_FOUND: "NotFound", Status.ALREADY_EXISTS: "AlreadyExists",
    Status.PERMISSION_DENIED: "PermissionDenied", Status.RESOURCE_EXHAUSTED: "ResourceExhausted",
    Status.FAILED_PRECONDITION: "FailedPrecondition", Status.ABORTED: "Aborted", Status.OUT_OF_RANGE: "OutOfRange",
    Status.UNIMPLEMENTED: "Unimplemented", Status.INTERNAL: "Internal", Status.UNAVAILABLE: "Unavailable",
    Status.DATA_LOSS: "DataLoss", Status.UNAUTHENTICATED: "Unauthenticated",
}  # fmt: skip


class PluginCallError(Unavailable):
    """A plugin failed a call, or could not be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDevice:
    """A device as the plugin reports it. `frame` is its ID as a repeated string field 1, ready to send."""

    id: str
    is_healthy: bool
    numa_nodes: tuple[int, ...]
    frame: bytes


def go_error(status: Status, text: str | None) -> str:
    return f"rpc error: code = {_CODE_NAMES.get(status, 'Unknown')} desc = {text or ''}"


async def _call(rpc: Callable[[], Awaitable[Any]]) -> Any:
    """Renames what grpclib raises."""
    try:
        return await rpc()
    except GRPCError as error:
        raise PluginCallError(go_error(error.status, error.message)) from error
    except TimeoutError as error:
        raise PluginCallError(go_error(Status.DEADLINE_EXCEEDED, "context deadline exceeded")) from error
    except StreamTerminatedError as error:
        raise PluginCallError(go_error(Status.UNAVAILABLE, "error reading from server: EOF")) from error
    except (OSError, ProtocolError) as error:
        raise PluginCallError(go_error(Status.UNAVAILABLE, f"connection error: desc = {str(error)!r}")) from error


def parse_devices(message: bytes) -> Mapping[str, PluginDevice]:
    """A ListAndWatchResponse, by ID in the plugin's order. Raises Corrupt."""
    devices = {}
    for device in wire_frames.submessages(message, 1):
        name, health, nodes = "", "", ()
        for number, value in wire_frames.fields(device):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                name = value.decode(errors="replace")
            elif number == 2:
                health = value.decode(errors="replace")
            elif number == 3:
                nodes = wire_frames.numa_nodes(value)  # type: ignore[assignment]  # a tuple of any length
        frame = bytes_field(1, name.encode())
        devices[name] = PluginDevice(id=name, is_healthy=health == "Healthy", numa_nodes=nodes, frame=frame)
    return devices


class PluginEndpoint:
    """A connection to one registered plugin. Made by `dial`; `close` ends it."""

    def __init__(self, resource: str, channel: Channel, options: DevicePluginOptions) -> None:
        self.resource = resource
        self.options = options
        self.is_stopped = False
        self._channel = channel
        self._preferred = UnaryUnaryMethod(channel, f"{_SERVICE}/GetPreferredAllocation", bytes, bytes)
        self._allocate = UnaryUnaryMethod(channel, f"{_SERVICE}/Allocate", bytes, bytes)
        self._pre_start = UnaryUnaryMethod(channel, f"{_SERVICE}/PreStartContainer", bytes, bytes)

    @classmethod
    async def dial(cls, resource: str, path: Path) -> PluginEndpoint:
        """Connects and asks for the options, as inside Register. Raises PluginCallError."""
        channel = open_channel(path)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await _call(channel.__connect__)
            get_options = UnaryUnaryMethod(channel, f"{_SERVICE}/GetDevicePluginOptions", bytes, bytes)
            answer = await _call(lambda: get_options(b"", timeout=OPTIONS_TIMEOUT_S))
            return cls(resource, channel, DevicePluginOptions.parse(answer))
        except PluginCallError as error:
            channel.close()
            raise PluginCallError(f"failed to get device plugin options: {error}") from error
        except BaseException:
            channel.close()
            raise

    async def follow_devices(self, receive: Callable[[Mapping[str, PluginDevice]], None]) -> str:
        """Hands over every list of the stream until it ends; returns why it ended."""
        method = UnaryStreamMethod(self._channel, f"{_SERVICE}/ListAndWatch", bytes, bytes)
        try:
            async with method.open() as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    receive(parse_devices(message))
            return "EOF"
        except GRPCError as error:
            return go_error(error.status, error.message)
        except (OSError, StreamTerminatedError, ProtocolError, Corrupt) as error:
            return f"error reading from server: {error or 'EOF'}"

    async def get_preferred_allocation(self, available: bytes, must_include: list[str], size: int) -> list[str]:
        """`available` is field 1 of the container request, ready to send. No deadline, as measured."""
        parts = [available, string_list(2, must_include), integer_field(3, size)]
        request = bytes_field(1, b"".join(parts))
        answer = await _call(lambda: self._preferred(request))
        return _parsed(lambda: [i for c in wire_frames.submessages(answer, 1)[:1] for i in wire_frames.texts(c, 1)])

    async def allocate(self, ids: list[str]) -> bytes | None:
        """The first container response, None where there is none. No deadline, as measured."""
        request = bytes_field(1, string_list(1, ids))
        answer = await _call(lambda: self._allocate(request))
        responses = _parsed(lambda: wire_frames.submessages(answer, 1))
        return responses[0] if responses else None

    async def pre_start_container(self, ids: list[str]) -> None:
        request = string_list(1, ids)
        await _call(lambda: self._pre_start(request, timeout=PRE_START_TIMEOUT_S))

    def close(self) -> None:
        self.is_stopped = True
        self._channel.close()


def _parsed(parse: Callable[[], list[Any]]) -> list[Any]:
    try:
        return parse()
    except Corrupt as error:
        text = f"grpc: error unmarshalling request: {error}"
        raise PluginCallError(go_error(Status.INTERNAL, text)) from error
