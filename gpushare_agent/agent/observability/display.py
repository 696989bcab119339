"""gpu-manager's `display.GPUDisplay` on a unix socket, and the same messages as JSON for the web port.

The socket is for root alone (mode 0600, in effect what gpu-manager's is): the answers name all tenants' pods, users and
processes, and a call takes time of the loop that admits pods. A socket that another process serves is left to it.

The messages are made from the node's snapshot by pure functions: the graph, the usage, the version. A message has the
proto's own field names, and as JSON leaves out zero and empty fields, as gpu-manager's gateway does. `encode_usage` gives
the bytes of the one that is large: the generated classes need 100 ms for 200 containers, this 2 ms. Units are gpu-manager's:
gpu in percent of a GPU (`spec` in GPUs), memory in MiB. What the driver does not report is left out, because the messages
know no third state; /api/v1/node has it. Formats: protos/display.proto and docs/reference/display.md.

State owned: the server and the identity of its socket file.
"""

from __future__ import annotations

import asyncio
import importlib
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from grpclib import GRPCError, Status
from grpclib.const import Cardinality
from grpclib.const import Handler as RpcHandler
from grpclib.server import Stream
from msgspec import Struct, field
from msgspec.structs import astuple

from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, mig_gpus
from gpushare_agent.core.kit.bounded_grpc import BoundedGrpcServer, ServerLimits
from gpushare_agent.core.kit.grpc_server import ServedSocket
from gpushare_agent.core.kit.http_answers import at_once, json_answer
from gpushare_agent.core.kit.protobuf import bytes_field, varint
from gpushare_agent.core.kit.sockets import is_served
from gpushare_agent.core.kit.supervision import ReportOnce, in_pool
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpus import Branch, Gpu, LinkKind
from gpushare_agent.core.model.names import CORES_PER_GPU, MIB
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.node_report.reported import NO_REASON
from gpushare_agent.core.placement.place import link_cost
from gpushare_agent.core.placement.topology import parts_of

if TYPE_CHECKING:
    from aiohttp import web

    from gpushare_agent.core.kit.http_answers import Handler, Route

log = structlog.get_logger(__name__)

ReadSnapshot = Callable[[], NodeSnapshot]

SERVICE = "display.GPUDisplay"
RETRY_S = 30.0
_CALL_S = 5.0
_MESSAGES = "gpushare_agent.core.wire.display"
"""Loaded in a thread once the kubelet has its resources: defining the messages would delay the registration."""
_LIMITS = ServerLimits(max_connections=16)


class DisplayServer(Struct, eq=False):
    """Serves at `path`; while it cannot, it tries again every `retry_s`. `before_reading` is awaited before a snapshot is
    read."""

    path: Path
    snapshot: ReadSnapshot
    before_reading: Callable[[], Awaitable[None]] = at_once
    retry_s: float = RETRY_S
    _reported: ReportOnce = field(default_factory=ReportOnce)

    async def run(self) -> NoReturn:
        """Serve until cancelled."""
        await in_pool(partial(importlib.import_module, _MESSAGES), "display_unavailable")
        served = ServedSocket(self.path, lambda: BoundedGrpcServer([self], limits=_LIMITS, fields={"service": SERVICE}))
        try:
            while True:
                # Any root process may put another socket at the path, as gpu-manager does at its start: then no client
                # reaches this server.
                if not served.is_serving:
                    await self._serve(served)
                await asyncio.sleep(self.retry_s)
        finally:
            await served.stop()

    async def _serve(self, served: ServedSocket) -> None:
        # Before the look: the former server is no other process.
        await served.stop()
        problem = ""
        if is_served(self.path):
            problem = "was not tried: another process (gpu-manager?) serves this socket. End it"
        else:
            try:
                await served.serve()
            except Unavailable as e:
                problem = f"failed: {e}. Make its directory"
        if not problem:
            self._reported.is_over()
            log.info("display_serving", socket=str(self.path))
            return
        error = f"serving {SERVICE} at {self.path} {problem}, or choose another display.socket; empty switches this off"
        if self._reported.is_new(error):
            log.warning("display_unavailable", error=error, again_in_s=self.retry_s)

    def __mapping__(self) -> dict[str, RpcHandler]:
        """The three calls, each answered from one snapshot."""
        from gpushare_agent.core.wire.display import GraphResponse, UsageResponse, VersionResponse
        from gpushare_agent.core.wire.google.protobuf import Empty

        calls: list[tuple[str, Callable[[NodeSnapshot], object], type]] = [
            ("PrintGraph", lambda seen: GraphResponse(graph=graph_text(seen)), GraphResponse),
            ("PrintUsages", lambda seen: encode_usage(usage_document(seen)), UsageResponse),
            ("Version", lambda seen: VersionResponse(version=seen.agent.version), VersionResponse),
        ]
        return {
            f"/{SERVICE}/{name}": RpcHandler(self._answering(answer), Cardinality.UNARY_UNARY, Empty, kind)
            for name, answer, kind in calls
        }

    def _answering(self, answer: Callable[[NodeSnapshot], object]) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def serve(stream: Stream[Any, Any]) -> None:
            try:
                async with asyncio.timeout(_CALL_S):
                    await stream.recv_message()
                    await self.before_reading()
                    await stream.send_message(answer(self.snapshot()))
            except TimeoutError as e:
                text = f"the call was not over within {_CALL_S:g} s: the request or the reading of the answer is late"
                raise GRPCError(Status.DEADLINE_EXCEEDED, text) from e

        return serve


def routes(snapshot: ReadSnapshot) -> list[Route]:
    """`/graph` and `/usage` for the web port, which has the version itself."""

    def answering(document: Callable[[NodeSnapshot], object]) -> Handler:
        async def show(request: web.Request) -> web.Response:
            return json_answer(request, document(snapshot()))

        return show

    return [
        ("/graph", answering(lambda seen: {"graph": graph_text(seen)})),
        ("/usage", answering(usage_document)),
    ]


# --- the messages ---

CLUSTER_ANNOTATION = "clusterName"
USER_VARIABLE = "SUBMITTER"
_DIGITS = 3
"""Digits of a float: 7.000000000000001 percent helps nobody."""
_FIXED_32 = 5
"""The wire type of a float."""


_GRAPH_WORDS = {LinkKind.NODE: "CPU", LinkKind.NVLINK: "NV"}
"""gpu-manager's word for a kind of branch if it is not nvidia-smi's; it knows no NVLink."""


def graph_text(snapshot: NodeSnapshot) -> str:
    """The topology tree in the form of gpu-manager's PrintGraph: the use of each branch and GPU by processes, the number of
    free GPUs of a branch, and what can still be allocated of a GPU. After its bracket a branch has the cost of its most
    expensive pair."""
    root = snapshot.inventory.tree
    gpus = {gpu.index: gpu for gpu in snapshot.inventory.gpus}
    lines = _graph_lines(root, 0, gpus, snapshot) if root.gpus else ()
    # No branch has those that MIG divides. Nothing is left of them for whoever adds up all lines.
    divided = (
        f"|---GPU{gpu['index']} ({_graph_numbers((), (0, 0), snapshot)}) {'; '.join(gpu['texts'])}"
        for gpu in mig_gpus(snapshot)
    )
    return "".join(f"{line}\n" for line in (f"ROOT:{_free(root, gpus, snapshot)}", *lines, *divided))


def _graph_lines(branch: Branch, depth: int, gpus: Mapping[int, Gpu], snapshot: NodeSnapshot) -> Iterator[str]:
    # The topology can have rows of GPUs that are listed no more.
    known = [gpus[index] for index in branch.gpus if index in gpus]
    margin = "|   " * depth + "|---"
    if branch.kind is LinkKind.SELF:
        label = known[0].label if known else branch.gpus[0]
        numbers = _graph_numbers(known, _left(known[0], snapshot) if known else (0, 0), snapshot)
        yield f"{margin}GPU{label} ({numbers}){''.join(_trouble(gpu, snapshot) for gpu in known)}"
        return
    word = _GRAPH_WORDS.get(branch.kind, branch.kind.name)
    links = snapshot.inventory.topology.links
    cost = max(link_cost(links[a][b]) for a in branch.gpus for b in branch.gpus)
    # What is left is shown only at the GPUs, because programs add up all lines; the cost is ours, so after the bracket.
    numbers = f"aval: {_free(branch, gpus, snapshot)}, {_graph_numbers(known, (0, 0), snapshot)}"
    yield f"{margin}{word} ({numbers}) cost: {cost}"
    for part in parts_of(branch):
        yield from _graph_lines(part, depth + 1, gpus, snapshot)


def _free(branch: Branch, gpus: Mapping[int, Gpu], snapshot: NodeSnapshot) -> int:
    return sum(_is_free(gpus[index], snapshot) for index in branch.gpus if index in gpus)


def _is_free(gpu: Gpu, snapshot: NodeSnapshot) -> bool:
    """True if a pod may still get the whole GPU."""
    cores, capacity = snapshot.cores(gpu)
    taken = cores or snapshot.memory_allocated_bytes.get(gpu.uuid, 0)
    # As GpuAccount.is_free: a MIG instance is no whole GPU.
    offered = capacity > 0 and gpu.mig is None
    return not taken and offered and gpu.uuid not in snapshot.unhealthy_reasons and gpu.uuid not in snapshot.cordoned


class DeviceUse(Struct, omit_defaults=True, kw_only=True):
    """DeviceInfo."""

    id: str = ""
    card_idx: str = ""
    gpu: float = 0
    mem: float = 0
    pids: list[int] = field(default_factory=list)
    device_mem: float = 0


class Devices(Struct, omit_defaults=True):
    dev: list[DeviceUse] = field(default_factory=list)


class Spec(Struct, omit_defaults=True):
    gpu: float = 0
    mem: float = 0


class PodStat(Struct, omit_defaults=True, kw_only=True):
    """ContainerStat: of one pod, by container."""

    stat: dict[str, Devices] = field(default_factory=dict)
    project: str = ""
    user: str = ""
    cluster: str = ""
    spec: dict[str, Spec] = field(default_factory=dict)


class Usage(Struct, omit_defaults=True):
    """UsageResponse: by pod UID."""

    usage: dict[str, PodStat] = field(default_factory=dict)


def usage_document(snapshot: NodeSnapshot) -> Usage:
    """What each container uses and has asked for, by pod UID and container name."""
    found: dict[str, PodStat] = {}
    for facts in sorted(snapshot.containers, key=lambda facts: facts.allocation.key):
        key = facts.allocation.key
        pod = found.setdefault(key.pod_uid, _pod_stat(facts.allocation.namespace, facts.pod))
        devices = [_device(gpu, key, snapshot) for gpu in snapshot.gpus_of(facts.allocation)]
        pod.stat[key.container] = Devices(devices)
        # The request: a live resize changes the limit alone, as in the metrics of the same meaning.
        requested_mib = facts.requested_mib(snapshot.names)
        pod.spec[key.container] = Spec(_number(facts.allocated_cores / CORES_PER_GPU), _number(requested_mib))
    return Usage(found)


_NUMBERS: Mapping[type[Struct], Sequence[int]] = {
    DeviceUse: (1, 2, 10, 11, 12, 13),
    Devices: (1,),
    Spec: (1, 2),
    PodStat: (1, 2, 3, 4, 5),
    Usage: (1,),
}
"""The proto's numbers of the fields, in their order."""


def encode_usage(message: Struct) -> bytes:
    """The bytes of UsageResponse, or of a message in it: all that these have are texts, floats, PIDs, messages and maps."""
    values = zip(_NUMBERS[type(message)], astuple(message), strict=True)
    # proto3 leaves out what is zero or empty.
    return b"".join(_encoded(number, value) for number, value in values if value)


def _encoded(number: int, value: Any) -> bytes:
    if isinstance(value, str):
        return bytes_field(number, value.encode())
    if isinstance(value, dict):
        entries = (
            bytes_field(1, key.encode()) + bytes_field(2, encode_usage(one)) for key, one in sorted(value.items())
        )
        return b"".join(bytes_field(number, entry) for entry in entries)
    if isinstance(value, list):
        # Packed, which is proto3's default for repeated numbers.
        if isinstance(value[0], int):
            return bytes_field(number, b"".join(map(varint, value)))
        return b"".join(bytes_field(number, encode_usage(one)) for one in value)
    return varint(number << 3 | _FIXED_32) + struct.pack("<f", value)


def _graph_numbers(gpus: Sequence[Gpu], left: tuple[int, int], snapshot: NodeSnapshot) -> str:
    """gpu-manager's words, in bytes, of one GPU or of a branch's together; `left` are the cores and the memory that can be
    allocated still."""
    samples = [snapshot.usage.gpus.get(gpu.uuid) for gpu in gpus] if snapshot.usage is not None else []
    used_bytes = sum(sample.memory_used_bytes or 0 for sample in samples if sample is not None)
    pids = [process.pid for sample in samples if sample is not None for process in sample.processes or ()]
    return (
        f"pids: [{' '.join(map(str, pids))}], usedMemory: {used_bytes}, "
        f"totalMemory: {sum(gpu.memory_mib for gpu in gpus) * MIB}, "
        f"allocatableCores: {left[0]}, allocatableMemory: {left[1]}"
    )


def _left(gpu: Gpu, snapshot: NodeSnapshot) -> tuple[int, int]:
    """The cores and bytes that a pod can get of it: nothing of a MIG instance that takes no shares, or of a GPU out of
    service."""
    cores, capacity = snapshot.cores(gpu)
    if not capacity or gpu.uuid in snapshot.unhealthy_reasons or gpu.uuid in snapshot.cordoned:
        return 0, 0
    memory = gpu.memory_mib * MIB - snapshot.memory_allocated_bytes.get(gpu.uuid, 0)
    return max(0, capacity - cores), max(0, memory)


def _trouble(gpu: Gpu, snapshot: NodeSnapshot) -> str:
    """What keeps the GPU from being used, empty if nothing does."""
    note = ""
    if (reason := snapshot.unhealthy_reasons.get(gpu.uuid)) is not None:
        note += f" Unhealthy: {_one_line(reason)}"
    if (reason := snapshot.cordoned.get(gpu.uuid)) is not None:
        note += f" Cordoned: {_one_line(reason) or NO_REASON}"
    return note


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _pod_stat(namespace: str, pod: Pod | None) -> PodStat:
    """If the informer has not seen the pod yet, only the namespace is known. A container without a request has an empty
    spec, as in gpu-manager."""
    if pod is None:
        return PodStat(project=namespace)
    return PodStat(
        project=namespace,
        user=_submitter(pod),
        cluster=pod.annotations.get(CLUSTER_ANNOTATION, ""),
        spec={c.name: Spec() for c in pod.containers if c.kind is ContainerKind.MAIN},
    )


def _submitter(pod: Pod) -> str:
    """From the first main container only, as in gpu-manager."""
    named = [c.env[USER_VARIABLE] for c in pod.containers if c.kind is ContainerKind.MAIN and USER_VARIABLE in c.env]
    return named[0] if named else ""


def _device(gpu: Gpu, key: ContainerKey, snapshot: NodeSnapshot) -> DeviceUse:
    found = DeviceUse(id=gpu.bus_id, card_idx=str(gpu.index), device_mem=gpu.memory_mib)
    use = snapshot.use_of(key, gpu.uuid)
    # If it is not known, all three stay zero and are left out.
    if use is not None:
        found.gpu = _number((use.sm_ratio or 0.0) * 100)
        found.mem = _number((use.memory_bytes or 0) / MIB)
        found.pids = list(use.pids)
    return found


def _number(value: float) -> float:
    """Whole ones without `.0`, as Go writes them."""
    rounded = round(float(value), _DIGITS)
    # gpu-manager's gateway is Go's encoder: 30, not 30.0.
    return int(rounded) if rounded.is_integer() else rounded
