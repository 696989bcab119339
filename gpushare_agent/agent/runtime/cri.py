"""The container runtime, asked over its Kubernetes interface (CRI v1): which containers of pods run, and whose an ID is.

Changes nothing. The cgroups themselves are found by container ID in runtime/cgroups.py. The runtime
may be away for minutes: each call then raises Unavailable in time and the next one connects again.

State owned: one connection, and which of the known endpoints answered first. It is kept for the client's life: while
containerd restarts, an idle CRI-O next to it would answer that no container is left.
Format: protos/cri.proto; the labels are the kubelet's (k8s.io/kubernetes pkg/kubelet/types/labels.go).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import betterproto2
import structlog
from grpclib import Status
from msgspec import Struct

from gpushare_agent.agent.runtime.node_probes import RUNTIME_SOCKETS
from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.supervision import bounded
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, StartupError, Unavailable, os_errors_as
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.core.wire.runtime import v1  # 3 ms of the start; the runtime is asked after the registration

log = structlog.get_logger(__name__)

SERVICE = "/runtime.v1.RuntimeService"
MAX_CONTAINERS = 10_000

LABEL_POD_UID = "io.kubernetes.pod.uid"
LABEL_CONTAINER_NAME = "io.kubernetes.container.name"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_NO_SUCH = re.compile(r"no such container", re.IGNORECASE)
"""cri-dockerd passes docker's message on without the status."""

Message = TypeVar("Message", bound=betterproto2.Message)


class RuntimeVersion(Struct, frozen=True, kw_only=True):
    """`endpoint` is the socket that answered."""

    name: str
    version: str
    endpoint: str


class RuntimeClient:
    """`endpoints` are tried in order until one answers; that one is then kept. Nothing is connected before the
    first call: the runtime may come later. `close` ends the connection."""

    def __init__(self, endpoints: Sequence[Path], *, timeout_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._chosen = self._endpoints[0] if len(self._endpoints) == 1 else None
        self._channel: UnixChannel | None = None
        # Two calls must not choose at once: each would drop the connection that the other one tries.
        self._choosing = asyncio.Lock()

    async def version(self) -> RuntimeVersion:
        """Raises Unavailable, Rejected (no CRI v1 there), Corrupt."""
        _load_messages()
        from gpushare_agent.core.wire.runtime import v1

        endpoint, answer = await self._call("Version", v1.VersionRequest(version="v1"), v1.VersionResponse)
        return RuntimeVersion(name=answer.runtime_name, version=answer.runtime_version, endpoint=str(endpoint))

    async def running(self, of_pod: PodUid | None = None) -> dict[ContainerKey, str]:
        """The IDs of the containers of pods that run, or of those of one pod; those of no pod are left out.

        Raises:
            Unavailable: the runtime is away or does not answer in time.
            Rejected: no CRI v1 there.
            Corrupt: the answer is no such message, too large, or names what cannot be an ID.
        """
        _load_messages()
        from gpushare_agent.core.wire.runtime import v1

        state = v1.ContainerState.CONTAINER_RUNNING
        selector: dict[str, str] = {LABEL_POD_UID: of_pod} if of_pod is not None else {}
        wanted = v1.ContainerFilter(state=v1.ContainerStateValue(state=state), label_selector=selector)
        request = v1.ListContainersRequest(filter=wanted)
        endpoint, answer = await self._call("ListContainers", request, v1.ListContainersResponse)
        # Each is looked at while the event loop waits; no node has as many.
        if len(answer.containers) > MAX_CONTAINERS:
            raise Corrupt(f"the runtime at {endpoint} lists {len(answer.containers)} containers, over {MAX_CONTAINERS}")
        # Containers without the kubelet's label are of no pod: crictl makes such, too.
        of_pods = [raw for raw in answer.containers if LABEL_POD_UID in raw.labels]
        # Of two with one name the one that was started later counts.
        of_pods.sort(key=lambda raw: raw.metadata.attempt if raw.metadata is not None else 0)
        return {_owner(raw, endpoint): raw.id for raw in of_pods if raw.state == state}

    async def owner_of(self, container_id: str) -> ContainerKey:
        """The container of a pod that has this ID. Raises NotFound, and what `running` raises."""
        _load_messages()
        from gpushare_agent.core.wire.runtime import v1

        request = v1.ContainerStatusRequest(container_id=container_id)
        endpoint, answer = await self._call("ContainerStatus", request, v1.ContainerStatusResponse)
        # A container that crictl has made, not the kubelet.
        if answer.status is None or LABEL_POD_UID not in answer.status.labels:
            raise NotFound(f"container {container_id[:80]!r} of the runtime at {endpoint} is of no pod")
        return _owner(answer.status, endpoint)

    def close(self) -> None:
        if self._channel is not None:
            self._drop(self._channel)

    async def _call(
        self, method: str, request: betterproto2.Message, answer_type: type[Message]
    ) -> tuple[Path, Message]:
        """One call and its answer, within the time limit, the choice of an endpoint included."""
        late = f"the runtime did not answer {method} within {self._timeout_s:g} s; asked again later"
        async with bounded(self._timeout_s, late):
            endpoint = self._chosen or await self._choose()
            return endpoint, await self._ask(endpoint, method, request, answer_type)

    async def _choose(self) -> Path:
        """The first endpoint that answers. Of those that are there, none gets the time of all."""
        from gpushare_agent.core.wire.runtime import v1

        async with self._choosing:
            if self._chosen is not None:
                return self._chosen
            # A host may have several runtimes installed; what has no socket does not run.
            present = [path for path in self._endpoints if path.is_socket()]
            faults = []
            for path in present:
                try:
                    # A runtime that hangs must leave time for the next; one part stays for the call itself.
                    async with bounded(self._timeout_s / (len(present) + 1), f"{path}: no answer"):
                        await self._ask(path, "Version", v1.VersionRequest(version="v1"), v1.VersionResponse)
                # Also a socket that answers, but has no CRI v1.
                except (Unavailable, Rejected, Corrupt, NotFound) as e:
                    faults.append(str(e))
                    self.close()  # a connection that works is still to the wrong one
                else:
                    log.info("runtime_found", endpoint=str(path))
                    self._chosen = path
                    return path
        names = ", ".join(map(str, self._endpoints))
        reason = "; ".join(faults) or "no socket there"
        raise Unavailable(f"no container runtime answers at {names}: {reason}. Set container-runtime-endpoint")

    async def _ask(self, path: Path, method: str, request: betterproto2.Message, answer_type: type[Message]) -> Message:
        channel = self._channel
        if channel is None:
            channel = self._channel = UnixChannel(path)
        what = f"{method} of the container runtime at {path}"
        is_sound = False
        try:
            answer = await channel.unary(f"{SERVICE}/{method}", request, answer_type)
            is_sound = True
        except RpcFailed as e:
            renamed = _renamed(e, what)
            # An answer, be it an error, shows a connection that works; without one it may be half-open, and the next call
            # connects again.
            is_sound = not isinstance(renamed, Unavailable)
            raise renamed from e
        except MalformedMessageError as e:
            raise Corrupt(f"{what} answered no valid message: {e}") from e
        finally:
            if not is_sound:
                self._drop(channel)
        return answer

    def _drop(self, channel: UnixChannel) -> None:
        """Closes the connection; another call may have opened a new one meanwhile, which stays."""
        if self._channel is channel:
            self._channel = None
        channel.close()


def _load_messages() -> None:
    """Imports them once. Raises Unavailable: their file cannot be opened now, as where the node has its most open files."""
    what = "the messages for the container runtime cannot be loaded"
    with os_errors_as(Unavailable, what, otherwise="asked again later"):
        import_module("gpushare_agent.core.wire.runtime.v1")


def _renamed(error: RpcFailed, what: str) -> Exception:
    text = f"{what} {'answered' if error.is_answer else 'failed:'} {error}"
    if error.status is Status.NOT_FOUND or _NO_SUCH.search(error.text):
        return NotFound(text)
    # Not tried again: containerd without its cri plugin answers so for ever.
    if error.status is Status.UNIMPLEMENTED:
        return Rejected(f"{text}. It has no CRI v1: containerd needs its cri plugin enabled and version 1.6 or later")
    return Unavailable(f"{text}; it is asked again later")


def _owner(raw: v1.Container | v1.ContainerStatus, endpoint: Path) -> ContainerKey:
    uid = raw.labels.get(LABEL_POD_UID, "")
    # Both become parts of paths, and of names that others read.
    if not _ID.fullmatch(raw.id) or not _UID.fullmatch(uid):
        raise Corrupt(
            f"the runtime at {endpoint} names a container {raw.id[:80]!r} of a pod {uid[:80]!r}: no such IDs exist"
        )
    return ContainerKey(PodUid(uid), raw.labels.get(LABEL_CONTAINER_NAME, raw.metadata.name if raw.metadata else ""))


def runtime_endpoints(endpoint: str, known: Collection[Path]) -> tuple[Path, ...]:
    """The sockets to try, in order: the one that is set, else the `known`. Raises Rejected for what is no path."""
    if not endpoint:
        return tuple(known)
    # The kubelet's flag has the scheme, a person often leaves it out.
    path = endpoint.removeprefix("unix://")
    if not path.startswith("/"):
        raise Rejected(
            f"container-runtime-endpoint {endpoint!r} is no socket:"
            " give unix:///run/containerd/containerd.sock or the path alone"
        )
    return (Path(path),)


def runtime_client(settings: Settings) -> RuntimeClient:
    try:
        endpoints = runtime_endpoints(settings.runtime.endpoint, RUNTIME_SOCKETS)
    except Rejected as e:
        raise StartupError(str(e)) from e
    return RuntimeClient(endpoints, timeout_s=settings.runtime.request_timeout_s)
