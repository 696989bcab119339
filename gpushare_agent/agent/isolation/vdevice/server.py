"""RegisterVDevice for one container, on the vcuda.sock that is mounted in that container alone.

A ResourceClaim's is mounted in all containers that use it, and its key has the claim's names, as vcuda.config has.

The socket is the identity: its callers are processes of that container. The kernel's peer credentials confirm it, and
the message's claims must agree; nothing of a message becomes part of a path unless it is this container's own name. The
directory and the files are made by isolation/vdevice/files.py; cgroups and the runtime are read through `VirtualManager`.
State owned: the server, which containers are its own, what the runtime answered last, and which refusals
were logged.

A claim's lengths and alphabets are checked before anything else uses it (`read_claim`), so that it can be compared, logged
and passed to the runtime.

Every CUDA program of the container registers when it starts, and may end where it is refused: a burst is delayed, by what it
costs (kit/bounded_grpc.py), and not refused. What a call causes elsewhere is shared by all that wait: `refresh` and the
question to the runtime are each carried out at most ten times a second.
Source of the protocol: docs/reference/formats.md, section 5.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream
from msgspec import Struct, field

from gpushare_agent.agent.isolation.vdevice.files import BoundSocket
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.formats.vdevice import is_bus_id, split_container_name
from gpushare_agent.core.kit.bounded_grpc import BoundedGrpcServer, ServerLimits, SharedBudget
from gpushare_agent.core.kit.peer_credentials import peer_credentials
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.sockets import FileIdentity
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.directory_names import is_pod_uid
from gpushare_agent.core.model.errors import NotFound, Unavailable
from gpushare_agent.core.model.names import is_container_id
from gpushare_agent.core.wire.vcuda import VDeviceRequest, VDeviceResponse

if TYPE_CHECKING:
    from gpushare_agent.agent.isolation.vdevice.virtual_manager import VirtualManager

log = structlog.get_logger(__name__)

METHOD = "/vcuda.VCUDAService/RegisterVDevice"
HANDLING_COST_S = 0.0017
"""Charged for a registration and not for reading it. Measured: one takes 1.2 ms of processor on an idle machine, on a
connection of its own 2.4 ms; half as much again where the caller and others keep the processor busy."""
MAX_OWN = 256
"""Containers that are known to be the socket's own: of the previous instances, and those that share a claim."""


class VDeviceLimits(Struct, frozen=True, kw_only=True):
    """The limits of one container. `call_s` is the time for one whole call, its request's arrival included."""

    server: ServerLimits = field(default_factory=ServerLimits)
    call_s: float = 10.0
    question_interval_s: float = 0.1
    """Between two questions to the runtime; one that it could not answer is not repeated for ten times as long."""


class VDeviceServer:
    """`start` and `stop` by one caller, in order. Each refusal is logged once for each peer."""

    def __init__(
        self,
        key: ContainerKey,
        host: VirtualManager,
        *,
        is_claims: bool = False,
        limits: VDeviceLimits | None = None,
        shared: SharedBudget | None = None,
    ) -> None:
        self.key = key
        self._host = host
        self._is_claims = is_claims
        self._limits = limits or VDeviceLimits()
        self._shared = shared
        self._clock = asyncio.get_running_loop().time
        self._asking = asyncio.Lock()
        self._answer: _Answer | None = None
        self._own: dict[str, ContainerKey] = {}
        self._reported = ReportOnce()
        self._log = log.bind(pod_uid=key.pod_uid, container=key.container)
        self._server: BoundedGrpcServer | None = None
        self.identity: FileIdentity | None = None
        """Of the socket that it listens on; None while it does not."""

    @property
    def connections(self) -> int:
        return 0 if self._server is None else self._server.connections

    async def start(self, bound: BoundSocket) -> None:
        """Serves on the container's socket, which is the server's from here on, in place of one that it has.

        Raises:
            Unavailable: the socket cannot be served.
        """
        sock, identity = bound
        try:
            # The listener of a socket that was removed or replaced is of no use.
            await self.stop()
            fields = {"pod_uid": self.key.pod_uid, "container": self.key.container}
            server = BoundedGrpcServer(
                [self], limits=self._limits.server, fields=fields, shared=self._shared, owner=self.key.pod_uid
            )
            await server.serve(sock)
        # Cancellation too. The file stays: the next start replaces a socket without a listener.
        except BaseException as e:
            sock.close()
            if isinstance(e, OSError):
                where = f"container {self.key.container} of pod {self.key.pod_uid}"
                raise Unavailable(f"serving {where} failed: {e.strerror}") from e
            raise
        self._server, self.identity = server, identity

    async def close(self) -> None:
        """Closes the listener and the connections, and leaves the socket's file: half a second, whatever the disk does."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def stop(self) -> None:
        """Closes the connections and removes the socket if it still is this server's: half a second, and the disk's time.

        Raises:
            Unavailable: the connections are closed, the socket could not be removed.
        """
        # Taken before the await: whoever looks meanwhile sees no socket.
        identity, self.identity = self.identity, None
        try:
            await self.close()
        finally:
            if identity is not None:
                remove = partial(self._host.files.remove_socket, self.key, identity)
                await self._host.in_thread(remove, f"removing the socket of {self.key.container}")

    def __mapping__(self) -> dict[str, Handler]:
        return {METHOD: Handler(self._serve, Cardinality.UNARY_UNARY, VDeviceRequest, VDeviceResponse)}

    async def _serve(self, stream: Stream[VDeviceRequest, VDeviceResponse]) -> None:
        code = Status.INTERNAL
        try:
            async with asyncio.timeout(self._limits.call_s):
                await self._register(stream)
            code = Status.OK
        except tuple(_ANSWERS) as e:
            code = next(status for kind, status in _ANSWERS.items() if isinstance(e, kind))
            raise GRPCError(code, str(e)) from e
        except TimeoutError as e:
            code = Status.DEADLINE_EXCEEDED
            within = f"within {self._limits.call_s:g} s"
            text = f"the registration did not end {within}, its request's arrival included; try again"
            raise GRPCError(code, text) from e
        except GRPCError as e:
            code = e.status
            raise
        except asyncio.CancelledError:  # the peer went away, or the server stops
            code = Status.CANCELLED
            raise
        finally:
            # In any case, because the metric must show also what was cut off.
            self._host.registered(code.name)

    async def _register(self, stream: Stream[VDeviceRequest, VDeviceResponse]) -> None:
        request = await stream.recv_message()
        if request is None:  # cannot be: kit/grpc_server.py answers a call without a message
            return
        if self._server is not None:
            # Charged, not refused: a program whose registration is refused ends, and each program of a burst registers.
            self._server.charge(0, HANDLING_COST_S)
        claim = read_claim(request)
        pid = _peer_pid(stream)
        peer = await self._peer(pid)
        try:
            await self._check(claim, peer)
        except _Mismatch as e:
            self._warn_once("vdevice_registration_refused", pid, detail=str(e))
            whole = "ResourceClaim" if self._is_claims else "pod"
            raise _Mismatch(
                f"{e}, but this socket belongs to container {self.key.container} of {whole} {self.key.pod_uid}: "
                f"nothing is registered; use the socket that is mounted in your own container, and your own names"
            ) from e
        # It holds a connection on a socket that only this container has: that is enough to list the process, for which the
        # library would else not count what it uses.
        if pid > 0 and (peer is None or peer.container_id is None):
            await self._host.note_process(self.key, pid)
        await self._host.refresh(self.key, claim.container_id, peer)
        await stream.send_message(VDeviceResponse())

    async def _peer(self, pid: int) -> PeerIdentity | None:
        # PID 0: the process is in a namespace that is not below the agent's, and the kernel has no number of it here.
        peer = await self._host.identify(pid) if pid > 0 else None
        if peer is None:
            self._warn_once("vdevice_peer_unknown", 0, consequence="the socket alone identifies the container")
        return peer

    async def _check(self, claim: Claim, peer: PeerIdentity | None) -> None:
        """
        Raises:
            _Mismatch: peer, message and socket do not name one container.
        """
        if peer is not None:
            await self._check_peer(peer, is_own_needed=claim.container_id is not None)
        user = self._own.get(peer.container_id or "") if peer is not None else None
        # A container that uses a claim may name the claim, as vcuda.config does, or itself.
        names = {self.key, user or self.key}
        if others := claim.pod_uids - {one.pod_uid for one in names}:
            raise _Mismatch(f"the message names pod {min(others)}")
        if claim.container is not None and claim.container not in {one.container for one in names}:
            raise _Mismatch(f"the message names container {claim.container!r}")
        if claim.container_id is None:
            return
        if peer is not None and peer.container_id is not None:
            # The kernel's word is known: an ID of another container of the same pod is refused too.
            if peer.container_id != claim.container_id:
                raise _Mismatch(f"the message names container {claim.container_id}, the caller is another one")
        elif not await self._is_own(claim.container_id):
            raise _Mismatch(f"the message names container {claim.container_id}, which is not this socket's")

    async def _check_peer(self, peer: PeerIdentity, *, is_own_needed: bool) -> None:
        """Checks the caller by what the kernel says of it.

        For the first second or two after a container's start nobody knows its ID: then the caller's pod is enough for a
        registration by name, which only brings this container's own files up to date. Of a claim the ID must be known: by
        it alone the process comes into the list."""
        if peer.pod_uid is None and peer.container_id is None:
            raise _Mismatch("the calling process is in no container")
        if not self._is_claims and peer.pod_uid is not None and peer.pod_uid != self.key.pod_uid:
            raise _Mismatch(f"the calling process is in pod {peer.pod_uid}")
        if peer.container_id is None:
            if self._is_claims:
                raise _Mismatch(f"the calling process is in no container of pod {peer.pod_uid}")
            return
        try:
            is_own = await self._is_own(peer.container_id)
        except Unavailable:
            # A claim's socket is in several containers, and an ID that the message names becomes a directory: both need the
            # answer.
            if is_own_needed or peer.pod_uid is None or self._is_claims:
                raise
            return
        if not is_own:
            raise _Mismatch(f"the calling process is in container {peer.container_id}")

    async def _is_own(self, container_id: str) -> bool:
        """Whether the container of this ID is this socket's. Raises Unavailable: it is not known yet."""
        if container_id in self._own:
            return True
        # One question for all that wait: the runtime's socket must not be asked at a rate that a tenant chooses.
        async with self._asking:
            # Another caller may have asked while this one waited.
            if container_id in self._own:
                return True
            answer = self._answer
            if answer is None or not answer.holds(container_id, self._clock()):
                if answer is not None:
                    await asyncio.sleep(max(0.0, answer.at + self._limits.question_interval_s - self._clock()))
                answer = self._answer = await self._ask(container_id)
        if answer.problem is not None:
            raise Unavailable(answer.problem)
        return answer.is_own

    async def _ask(self, container_id: str) -> _Answer:
        problem, is_own = None, False
        try:
            owner = await self._host.owner_of(container_id)
            is_own = owner is not None and (
                self._host.is_sharer(self.key, owner) if self._is_claims else owner == self.key
            )
            if is_own and owner is not None:
                self._own[container_id] = owner
                if len(self._own) > MAX_OWN:
                    # The oldest: of a container that starts again and again each ID is new.
                    del self._own[next(iter(self._own))]
        except Unavailable as e:
            problem = str(e)
        at = self._clock()
        # A negative answer is not kept: the container may be known a moment later; a failure counts for a second, for a
        # runtime that is down stays down.
        until = at + 10 * self._limits.question_interval_s if problem is not None else at
        return _Answer(container_id=container_id, is_own=is_own, problem=problem, at=at, until=until)

    def _warn_once(self, event: str, pid: int, **fields: Any) -> None:
        if self._reported.is_new(event, f"{event} {pid}"):
            self._log.warning(event, **({"pid": pid} if pid else {}), **fields)


class _Answer(Struct, frozen=True, kw_only=True):
    """What the runtime answered about a container ID, and until when that is not asked again."""

    container_id: str
    is_own: bool
    problem: str | None
    at: float
    until: float

    def holds(self, container_id: str, now: float) -> bool:
        return container_id == self.container_id and now < self.until


class _Mismatch(Exception):  # noqa: N818 - a finding about the peer, answered PERMISSION_DENIED
    """The caller, or its claim, is not the container of this socket."""


def _peer_pid(stream: Stream[Any, Any]) -> int:
    """0 where the process is in a PID namespace that is not below the agent's."""
    credentials = peer_credentials(stream.peer._transport)  # grpclib's Peer has the address only
    return credentials.pid if credentials is not None else 0


_SHOWN_CHARS = 60


class InvalidClaim(Exception):  # noqa: N818 - a fault of the peer, answered INVALID_ARGUMENT
    """A field is invalid; the text names it and the valid form."""


_ANSWERS = {
    InvalidClaim: Status.INVALID_ARGUMENT,
    MalformedMessageError: Status.INVALID_ARGUMENT,
    _Mismatch: Status.PERMISSION_DENIED,
    NotFound: Status.NOT_FOUND,
    Unavailable: Status.UNAVAILABLE,
}


class Claim(Struct, frozen=True, kw_only=True):
    """`pod_uids`: the field's, and the one inside a dockershim name. At least one of the two names is there."""

    pod_uids: frozenset[str]
    container: str | None
    container_id: str | None


def read_claim(request: VDeviceRequest) -> Claim:
    """The message's fields, once they are valid names; nothing is compared with the caller yet.

    Raises:
        InvalidClaim: a field has the wrong length or alphabet, or the container is not named.
    """
    if not is_pod_uid(request.pod_uid):
        raise InvalidClaim(f"pod_uid {_shown(request.pod_uid)} is no pod UID: send the UID of your own pod")
    if not is_bus_id(request.bus_id):
        raise InvalidClaim(f"bus_id {_shown(request.bus_id)} is no PCI bus ID of at most 15 characters: leave it empty")
    if request.container_id and not is_container_id(request.container_id):
        raise InvalidClaim(f"container_id {_shown(request.container_id)} is not 64 hexadecimal digits in lower case")
    if not request.container_name and not request.container_id:
        raise InvalidClaim("neither container_name nor container_id is set: send one of them")
    container, named_uid = _read_name(request.container_name)
    return Claim(
        pod_uids=frozenset({request.pod_uid, named_uid} - {None}),  # type: ignore[arg-type]  # None is taken out here
        container=container,
        container_id=request.container_id or None,
    )


def _read_name(text: str) -> tuple[str | None, str | None]:
    if not text:
        return None, None
    split = split_container_name(text)
    if split is None:
        raise InvalidClaim(
            f"container_name {_shown(text)} is neither a container's name (letters a to z, digits and dashes, at most 63) "
            f"nor of the form /k8s_<container>_<pod>_<namespace>_<pod UID>_<attempt>"
        )
    return split


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…") + f" ({len(text)} characters)"
