"""The embedded kubelet's side of device plugins: registration, dial-back, the device stream, the calls of an admission.

Errors are raised as PluginCallError with the text that grpc-go gives, because the kubelet passes it on to the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from msgspec import Struct

from gpushare_agent.core.kit.grpc_client import MessageTooLargeError, RpcFailed, UnixChannel
from gpushare_agent.core.kit.grpc_codec import decode_generated
from gpushare_agent.core.kit.protobuf import MalformedMessageError, bytes_field, integer_field, scan_fields, string_list
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.wire.v1beta1 import (
    DevicePluginOptions,
    PreferredAllocationResponse,
    RegisterRequest,
    TopologyInfo,
)

log = structlog.get_logger(__name__)

SUPPORTED_VERSION = "v1beta1"
_RESOURCE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
DIAL_TIMEOUT_S = 10.0
OPTIONS_TIMEOUT_S = 5.0
PRE_START_TIMEOUT_S = 30.0
MESSAGE_LIMIT = 4 * 2**20
"""grpc-go's default for messages received; the kubelet does not raise it."""
_SERVICE = "/v1beta1.DevicePlugin"
_BYTES = 2
"""The wire type of texts and messages."""


class PluginCallError(Unavailable):
    """A plugin failed a call, or could not be reached."""


class PluginDevice(Struct, frozen=True, kw_only=True):
    """A device as the plugin reports it. `frame` is its ID as a repeated string field 1, ready to send."""

    id: str
    is_healthy: bool
    numa_nodes: tuple[int, ...]
    frame: bytes


def go_error(status: Status, text: str) -> str:
    # Go has the names without underscores, and spells one of them otherwise.
    name = "Canceled" if status is Status.CANCELLED else status.name.title().replace("_", "")
    return f"rpc error: code = {name} desc = {text}"


def _error_text(error: RpcFailed | MalformedMessageError) -> str:
    if isinstance(error, RpcFailed):
        return go_error(error.status, error.text)
    # grpc-go has its own status for it, and prefixes its texts.
    if isinstance(error, MessageTooLargeError):
        return go_error(Status.RESOURCE_EXHAUSTED, f"grpc: {error}")
    return go_error(Status.INTERNAL, f"grpc: error unmarshalling request: {error}")


@contextmanager
def _plugin_errors() -> Iterator[None]:
    try:
        yield
    except (RpcFailed, MalformedMessageError) as error:
        raise PluginCallError(_error_text(error)) from error


def parse_devices(message: bytes) -> Mapping[str, PluginDevice]:
    """A ListAndWatchResponse, by ID in the plugin's order. Raises MalformedMessageError."""
    return {device.id: device for device in (_device(content) for number, content in _fields(message) if number == 1)}


@lru_cache(maxsize=MESSAGE_LIMIT // 32)  # all devices of the largest list
def _device(message: bytes) -> PluginDevice:
    """A plugin sends all its devices at each change of one."""
    parts = dict(_fields(message))
    name, health, topology = (parts.get(number, b"") for number in (1, 2, 3))
    identity, nodes = name.decode(errors="replace"), _numa_nodes(topology)
    frame = bytes_field(1, identity.encode())
    return PluginDevice(id=identity, is_healthy=health == b"Healthy", numa_nodes=nodes, frame=frame)


@lru_cache(maxsize=64)
def _numa_nodes(topology: bytes) -> tuple[int, ...]:
    """The node IDs of a TopologyInfo message, of which a node has a few: zero is an absent field."""
    return tuple(node.id for node in decode_generated(topology, TopologyInfo).nodes)


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Number and content of each text or message in it. The generated classes need tens of milliseconds for the thousands of
    devices of 8 GPUs, a kubelet less than one, which bounds a message's bytes alone: any number of fields may be in it."""
    fields = scan_fields(message, 0, len(message))
    return [(key >> 3, message[start:stop]) for key, _, start, stop in fields if key & 7 == _BYTES]


class PluginEndpoint:
    """A connection to one registered plugin. Opened by `dial`; `close` ends it."""

    def __init__(self, resource: str, channel: UnixChannel, options: DevicePluginOptions) -> None:
        self.resource = resource
        self.options = options
        self.is_stopped = False
        self._channel = channel

    @classmethod
    async def dial(cls, resource: str, path: Path) -> PluginEndpoint:
        """Connects and asks for the options, as inside Register. Raises PluginCallError."""
        # The limit of the largest message: that of ListAndWatch with all devices.
        channel = UnixChannel(path, max_answer_bytes=MESSAGE_LIMIT)
        try:
            with _plugin_errors():
                await channel.connect(timeout_s=DIAL_TIMEOUT_S)
                method = f"{_SERVICE}/GetDevicePluginOptions"
                answer = await channel.unary(method, b"", DevicePluginOptions, timeout_s=OPTIONS_TIMEOUT_S)
        # Register fails with it, and the plugin reads the text.
        except PluginCallError as error:
            channel.close()
            raise PluginCallError(f"failed to get device plugin options: {error}") from error
        except BaseException:
            channel.close()
            raise
        return cls(resource, channel, answer)

    async def follow_devices(self, receive: Callable[[Mapping[str, PluginDevice]], None]) -> str:
        """Hands over every list of the stream until it ends; returns why it ended."""
        try:
            # Closed with the block: an async generator that is left alone ends only with the garbage collector.
            async with aclosing(self._channel.unary_stream(f"{_SERVICE}/ListAndWatch", b"", bytes)) as messages:
                async for message in messages:
                    # A malformed list ends the stream, as an error of unmarshalling does in Go.
                    receive(parse_devices(message))
            return "EOF"
        except (RpcFailed, MalformedMessageError) as error:
            return _error_text(error)

    async def get_preferred_allocation(self, available: bytes, must_include: list[str], size: int) -> list[str]:
        """`available` is field 1 of the container request, ready to send. No deadline, as measured."""
        request = bytes_field(1, b"".join([available, string_list(2, must_include), integer_field(3, size)]))
        with _plugin_errors():
            method = f"{_SERVICE}/GetPreferredAllocation"
            answer = await self._channel.unary(method, request, PreferredAllocationResponse)
            # One container request was sent: further answers mean nothing.
            return [device for container in answer.container_responses[:1] for device in container.device_ids]

    async def allocate(self, ids: list[str]) -> bytes | None:
        """The first container response, None where there is none. No deadline, as measured."""
        request = bytes_field(1, string_list(1, ids))
        with _plugin_errors():
            answer = await self._channel.unary(f"{_SERVICE}/Allocate", request, bytes)
            responses = [content for number, content in _fields(answer) if number == 1]
        # A Go client takes an answer without containers; the caller rejects the pod for it.
        return responses[0] if responses else None

    async def pre_start_container(self, ids: list[str]) -> None:
        method = f"{_SERVICE}/PreStartContainer"
        with _plugin_errors():
            await self._channel.unary(method, string_list(1, ids), bytes, timeout_s=PRE_START_TIMEOUT_S)

    def close(self) -> None:
        self.is_stopped = True
        self._channel.close()


class RegistrationService:
    """Dials back while the plugin waits for the answer. Hands every connected endpoint to `accept`, which returns before
    the device stream is opened."""

    def __init__(self, directory: Path, accept: Callable[[PluginEndpoint], None]) -> None:
        self._directory = directory
        self._accept = accept

    def __mapping__(self) -> dict[str, Handler]:
        return {"/v1beta1.Registration/Register": Handler(self._register, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _register(self, stream: Any) -> None:
        request = RegisterRequest.parse(await stream.recv_message() or b"")
        endpoint = await self.dialled(request)
        log.info("plugin_registered", resource=request.resource_name, endpoint=request.endpoint)
        await stream.send_message(b"")
        # After the answer, so that the plugin knows of its registration before its stream is opened.
        self._accept(endpoint)

    async def dialled(self, request: RegisterRequest) -> PluginEndpoint:
        """The plugin, connected. Raises GRPCError, which is the answer to it."""
        if request.version != SUPPORTED_VERSION:
            raise GRPCError(
                Status.UNKNOWN,
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{SUPPORTED_VERSION}"]',
            )
        if not _RESOURCE_NAME.fullmatch(request.resource_name):
            raise GRPCError(Status.UNKNOWN, f'the ResourceName "{request.resource_name}" is invalid')
        try:
            # Inside Register: a plugin must serve before it registers, and must not wait for the answer on the same task.
            return await PluginEndpoint.dial(request.resource_name, self._directory / request.endpoint)
        except PluginCallError as error:
            raise GRPCError(Status.UNKNOWN, str(error)) from error
