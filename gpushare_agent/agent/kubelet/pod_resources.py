"""The kubelet's PodResources API v1 over its unix socket, the one gate through which every List of it goes, and the version
of the kubelet, on which it depends whether a List may be sent at all.

Only `PodResourcesGate` may call `list_entries`: a List while an Allocate is open makes the kubelet forget the device IDs in
flight and offer them to the next pod (measured on every version). `get_pod` is free of this; kubelets have it from 1.34 on.
On 1.29 and older a List inside GetPreferredAllocation can panic the kubelet (measured): such a kubelet is refused, and the
version must be known before the first List; until then admissions wait, within their bound (`KubeletFacts`).

A List answer has about 95 bytes per device ID and is read inside admissions, so it is kept as bytes and only what a
decision needs is decoded (`PodListing`). State owned: the connections; of the gate how many GetPreferredAllocations,
Allocates and Lists are open, whether a List runs outside, and when the last call ended; the version last read.
Format: protos/podresources.proto, read by kit/protobuf.py.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import structlog
from grpclib import Status
from msgspec import Struct, field

from gpushare_agent.agent.kubelet.records import ListedContainer, ListedPod
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.core.kit.protobuf import (
    MalformedMessageError,
    PodEntry,
    decode_pod_containers,
    scan_pod_entry,
    scan_pods,
    scan_single_pod,
    string_list,
    varint,
)
from gpushare_agent.core.kit.sockets import FileIdentity, file_identity
from gpushare_agent.core.kit.supervision import ChangeSignal, bounded, wait_for
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, Rejected, StartupError, Unavailable
from gpushare_agent.core.wire.v1 import GetPodResourcesRequest

if TYPE_CHECKING:
    from gpushare_agent.core.kube.client import KubeApi

log = structlog.get_logger(__name__)

T = TypeVar("T")

OLDEST = (1, 30)
"""Before it, a List during GetPreferredAllocation can panic the kubelet."""
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,4})")


def parsed_version(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version, None where it has none."""
    return (int(match[1]), int(match[2])) if (match := _VERSION.match(text)) else None


class KubeletFacts(Struct, kw_only=True, eq=False):
    """Await `wait_known` before a List inside an admission; run `run` once an API connection may come."""

    node_name: str
    kubelet_socket: Path
    has_pod_resources: bool = True
    backoff: Backoff = Backoff(base_s=0.5, cap_s=5.0)
    """After reads that fail, as that of the list of pods; an admission that comes ends the pause."""
    wall_clock: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    version: str | None = None
    """As in the Node object, None while unknown."""
    _socket: tuple[FileIdentity, float] | None = None
    """As last seen, and when it was made, by the monotonic clock."""
    _is_known: asyncio.Event = field(default_factory=asyncio.Event)
    _is_awaited: asyncio.Event = field(default_factory=asyncio.Event)
    _is_outdated: asyncio.Event = field(default_factory=asyncio.Event)
    _unavailable_reason: str = "it has not been read yet"

    def take_over(self, previous: KubeletFacts) -> None:
        """What was read before a reload: admissions need not wait until it is read again."""
        self._socket = previous._socket
        if previous.version is not None:
            self.version = previous.version
            self._is_known.set()

    def age_s(self) -> float | None:
        """Seconds since the kubelet created its socket, None where there is none."""
        identity = file_identity(self.kubelet_socket)
        if identity is None:
            return None
        if self._socket is None or self._socket[0] != identity:
            # Once: a file's times are of the wall clock, which may be set, also back behind them.
            self._socket = identity, self.clock() - max(0.0, self.wall_clock() - identity[2] / 1e9)
        return self.clock() - self._socket[1]

    def kubelet_restarted(self) -> None:
        """It may have another version now: the Node is read again. The last version counts until then."""
        self._is_outdated.set()

    async def wait_known(self, *, timeout_s: float) -> None:
        """From then on a List inside GetPreferredAllocation is safe. Raises Unavailable while the version is unknown."""
        self._is_awaited.set()
        if not await wait_for(self._is_known, timeout_s):
            raise Unavailable(
                f"the kubelet's version is not known yet, because node {self.node_name} could not be read: "
                f"{self._unavailable_reason}"
            )

    async def run(self, api: KubeApi) -> NoReturn:
        """Reads the Node at the start and after each restart of the kubelet, until cancelled. Raises StartupError on a
        kubelet that is too old."""
        failures = 0
        while True:
            try:
                node = read_node_json(await api.get_node(self.node_name))
            except AgentError as e:
                if self._unavailable_reason != str(e):
                    log.warning("kubelet_version_unknown", node=self.node_name, error=str(e))
                self._unavailable_reason = str(e)
                failures += 1
                # An admission waits two seconds, and may succeed before the pods are listed: its pod is asked for by name.
                if await wait_for(self._is_awaited, self.backoff.delay_s(failures)):
                    self._is_awaited.clear()
                    failures = 0
                continue
            failures = 0
            self._read_version(node.status.info.kubelet_version)
            await self._is_outdated.wait()
            self._is_outdated.clear()

    def _read_version(self, text: str) -> None:
        # One that cannot be read passes: refusing every pod for a spelling would be worse. The log shows it.
        if (version := parsed_version(text)) is not None and version < OLDEST:
            raise StartupError(
                f"kubelet {text} on node {self.node_name} is older than {OLDEST[0]}.{OLDEST[1]}: a PodResources List "
                "during an admission can crash it. Upgrade the kubelet."
            )
        # Read again after each restart of the kubelet; the log says only what is new.
        if text != self.version:
            log.info("kubelet_version", version=text[:64])
        self.version = text
        self._is_known.set()


SERVICE = "/v1.PodResourcesLister"
RATE_LIMIT_PAUSE_S = 0.015
"""The kubelet allows 100 calls a second: a refused one is tried again a little later than the next free slot."""


def decode_pod_entry(body: bytes, ids: DeviceIds) -> ListedPod:
    """One pod of an answer (`PodEntry.body`), without other plugins' devices. Raises MalformedMessageError."""
    entry = scan_pod_entry(body)
    return ListedPod(
        namespace=entry.namespace,
        name=entry.name,
        containers=tuple(
            ListedContainer(
                name=name, devices={resource: ids.read_held(resource, texts) for resource, texts in devices.items()}
            )
            for name, devices in decode_pod_containers(body)
        ),
    )


class PodListing:
    """One pod of a List answer, decoded as far as it is asked about. Raises Corrupt where the bytes are no message."""

    __slots__ = ("_ids", "body", "name", "namespace")

    def __init__(self, entry: PodEntry, ids: DeviceIds) -> None:
        self.namespace = entry.namespace
        self.name = entry.name
        self.body = entry.body
        self._ids = ids

    def count_ids(self, resource: str) -> int:
        """The number of ContainerDevices entries of the resource: measured kubelets make one for each ID."""
        # Searched and not decoded: a full node's answer has half a megabyte.
        return self.body.count(_resource_field(resource))

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        # The pod under admission has none of the resource yet: its other devices need not be decoded to know that.
        if not self.count_ids(resource):
            return {}
        return {c.name: len(ids) for c in self.decoded().containers if (ids := c.devices.get(resource))}

    def decoded(self) -> ListedPod:
        try:
            return decode_pod_entry(self.body, self._ids)
        except MalformedMessageError as e:
            raise Corrupt(f"PodResources answer, pod {self.namespace}/{self.name}: {e}") from e


def pod_key(namespace: str, name: str) -> bytes:
    """The first two fields of the pod in an answer."""
    return string_list(1, (name,)) + string_list(2, (namespace,))


def _resource_field(resource: str) -> bytes:
    """Field 1 of each device."""
    return b"\n" + varint(len(resource)) + resource.encode()


class PodResourcesClient:
    """A connection for each method, so that a stalled Get cuts off no List of an admission; opened again after a fault."""

    def __init__(self, socket_path: Path | None, ids: DeviceIds) -> None:
        """Without a path nothing is to be asked."""
        self._path = socket_path or Path()
        self._ids = ids
        self._channels: dict[str, UnixChannel] = {}
        self.has_get: bool | None = None
        """Whether the kubelet answers Get; None until it was tried."""

    async def list_entries(
        self, resource: str = "", settled: Mapping[bytes, int] = MappingProxyType({}), *, timeout_s: float
    ) -> Sequence[PodListing]:
        """Every pod that the kubelet knows devices or containers of, undecoded. Those of `settled`, by `pod_key`, are left
        out while they have as many IDs of the resource as it says.

        Retries the kubelet's rate limit within the time. Raises Unavailable (socket absent, stalled, still limited),
        Corrupt (no PodResources message).
        """
        return await self._call("List", b"", timeout_s, partial(self._listings, resource, settled))

    async def get_pod(self, namespace: str, name: str, *, timeout_s: float) -> PodListing:
        """One pod. Raises NotFound, Rejected (this kubelet has no Get), Unavailable, Corrupt."""
        request = bytes(GetPodResourcesRequest(pod_name=name, pod_namespace=namespace))
        try:
            entry = await self._call("Get", request, timeout_s, scan_single_pod)
        except Rejected:
            # Only the answer that says so: a stalled or missing socket says nothing about what the kubelet can do.
            self.has_get = False
            raise
        self.has_get = True
        if entry is None:
            raise NotFound(f"pod {namespace}/{name} is not known to the kubelet")
        return PodListing(entry, self._ids)

    def forget(self) -> None:
        """The kubelet restarted: the next call connects again and detects whether Get exists."""
        self.has_get = None
        self.close()

    def close(self) -> None:
        for method in list(self._channels):
            self._drop(method)

    def _listings(self, resource: str, settled: Mapping[bytes, int], data: bytes) -> list[PodListing]:
        # The kubelet's order is another each time, of the pods and of each pod's devices: the bytes of a pod say nothing.
        places, expected = scan_pods(data, settled)
        found = [PodListing(scan_pod_entry(data[start:stop]), self._ids) for start, stop in places]
        # Of all at once: a settled pod gets no more IDs, so where the sum is right none has lost any.
        expected += sum(one.count_ids(resource) for one in found if settled)
        if settled and expected != data.count(_resource_field(resource)):
            return self._listings(resource, {}, data)
        return found

    def _drop(self, method: str) -> None:
        channel = self._channels.pop(method, None)
        if channel is not None:
            channel.close()

    async def _call(self, method: str, request: bytes, timeout_s: float, read: Callable[[bytes], T]) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return read(await self._unary(method, request))
                    except RpcFailed as e:
                        # A connection that failed is not used again; an error status leaves it usable.
                        if not e.is_answer:
                            self._drop(method)
                        if not e.is_answer or e.status is not Status.RESOURCE_EXHAUSTED:
                            raise _renamed(e, method, self._path) from e
                    # The time that the caller allows bounds the loop.
                    await asyncio.sleep(RATE_LIMIT_PAUSE_S)
        except TimeoutError as e:
            self._drop(method)
            raise Unavailable(f"PodResources {method} at {self._path} did not answer within {timeout_s:.3g} s") from e
        except MalformedMessageError as e:
            raise Corrupt(f"PodResources {method} at {self._path} answered no valid message: {e}") from e

    async def _unary(self, method: str, request: bytes) -> bytes:
        channel = self._channels.get(method)
        if channel is None:
            channel = self._channels[method] = UnixChannel(self._path)
        try:
            return await channel.unary(f"{SERVICE}/{method}", request, bytes)
        finally:
            if channel is not self._channels.get(method):  # dropped meanwhile, possibly before it was connected
                channel.close()


def _renamed(error: RpcFailed, method: str, path: Path) -> Exception:
    text = error.text or error.status.name
    if not error.is_answer:
        return Unavailable(f"PodResources {method} at {path} failed: {text}")
    # Below 1.34 Get is behind a feature gate that is off: the kubelet answers UNKNOWN, which says nothing, with the text
    # "PodResources API Get method disabled". One that does not know the method at all answers UNIMPLEMENTED.
    if method == "Get" and (error.status is Status.UNIMPLEMENTED or "disabled" in text):
        return Rejected(f"this kubelet has no PodResources Get: {text}")
    if error.status is Status.NOT_FOUND or "not found" in text:
        return NotFound(text)
    return Unavailable(f"PodResources {method} at {path} answered {error.status.name}: {text}")


# --- the gate ---


class PodResourcesGate(Struct, eq=False):
    """Counts the admission calls that the kubelet has open, and lets a List through where none can be harmed by it:

    1. inside a GetPreferredAllocation (`preferring`), when no Allocate is open: an admission has none open then, but a
       container that restarts meanwhile may;
    2. outside (`quiet_list`), when no admission call is open and none was for `quiet_s`; a GetPreferredAllocation that
       arrives meanwhile waits until that List has been answered.

    An Allocate cannot be delayed: the kubelet has opened it before it reaches us. One that meets a List is counted.
    """

    lister: PodResourcesClient
    clock: Callable[[], float] = time.monotonic
    quiet_s: float = 0.1
    list_timeout_s: float = 2.0
    on_list: Callable[[str], None] = lambda purpose: None
    _preferring: int = 0
    _allocating: int = 0
    _listing: int = 0
    _is_outside: bool = False
    _last_call_at: float = float("-inf")
    _changes: ChangeSignal = field(default_factory=ChangeSignal)

    @property
    def is_idle(self) -> bool:
        """No call of an admission is open."""
        return not self._preferring and not self._allocating

    @asynccontextmanager
    async def preferring(self) -> AsyncIterator[Callable[[str, Mapping[bytes, int]], Awaitable[Sequence[PodListing]]]]:
        """The time of one GetPreferredAllocation; gives the right to List inside it."""
        self._preferring += 1
        try:
            # Counted as preferring first: another outside List then finds the gate busy, and admissions come before it.
            await self._changes.wait_until(lambda: not self._is_outside)
            yield self._list_inside
        finally:
            self._preferring -= 1
            self._call_ended()

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """The time of one Allocate."""
        self._allocating += 1
        # Counted and not refused: the kubelet has already opened the Allocate. An ID that goes out twice is refused in
        # `check`.
        if self._listing:
            self.on_list("overlapped")
        try:
            yield
        finally:
            self._allocating -= 1
            self._call_ended()

    @asynccontextmanager
    async def quiet_list(self, purpose: str, *, wait_s: float) -> AsyncIterator[Sequence[PodListing]]:
        """A List between admissions. Until the block ends no GetPreferredAllocation goes on, so keep it short and free
        of awaits: what is read is then still true. Raises Unavailable (also where admissions do not pause within
        `wait_s`), Corrupt."""
        async with bounded(wait_s, f"admissions did not pause for {self.quiet_s:g} s within {wait_s:g} s"):
            await self.wait_quiet()
        # No await since `_is_quiet`: an admission that begins from now on waits at `preferring`.
        self._is_outside = True
        try:
            yield await self._list(purpose, self.list_timeout_s)
        finally:
            self._is_outside = False
            self._changes.notify()

    async def wait_quiet(self) -> None:
        """Waits for a moment between admissions."""
        while not self._is_quiet():
            await self._changes.wait_next(self.quiet_s)

    def _is_quiet(self) -> bool:
        return self.is_idle and not self._is_outside and self.clock() - self._last_call_at >= self.quiet_s

    async def _list_inside(self, resource: str, settled: Mapping[bytes, int]) -> Sequence[PodListing]:
        # Waiting for the Allocate counts too: the whole node's admissions stand still meanwhile.
        until = self.clock() + self.list_timeout_s
        why = "an Allocate of another container stays open, so the kubelet cannot be asked"
        async with bounded(self.list_timeout_s, why):
            await self._changes.wait_until(lambda: not self._allocating)
        return await self._list("admission", until - self.clock(), resource, settled)

    async def _list(
        self, purpose: str, timeout_s: float, resource: str = "", settled: Mapping[bytes, int] = MappingProxyType({})
    ) -> Sequence[PodListing]:
        self.on_list(purpose)
        self._listing += 1
        try:
            return await self.lister.list_entries(resource, settled, timeout_s=timeout_s)
        finally:
            self._listing -= 1

    def _call_ended(self) -> None:
        self._last_call_at = self.clock()
        self._changes.notify()
