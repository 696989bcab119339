"""GET /debug/state of the extender: nodes and what is allocated on them, a page of nodes at a time; and GPUShare's answer
about the same, GET /gpushare-scheduler/inspect, which has no pages.

A cluster's state is megabytes and takes a second to encode: a page has a bounded number of nodes, is encoded in slices
between which verbs are answered, and one page is encoded at a time. A node is shown as it is at one moment; two nodes of a
page may be of different ones. State owned: the queue of requests.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.kit.http_answers import (
    BadQueryError,
    JsonBody,
    Number,
    RequestQueue,
    Word,
    bad_query,
    encode,
    join_in_slices,
    json_answer,
    read_query,
)
from gpushare_agent.model.names import PodUid
from gpushare_agent.observability.node_snapshot import ReportedGpuDocument, reported_gpu_document
from gpushare_agent.placement.fragmentation import TypicalPods

if TYPE_CHECKING:
    from aiohttp import web

MOST_NODES = 200
_NAME_CHARACTERS = 253
_QUERY: Mapping[str, Number | Word] = {
    "node": Word(most_characters=_NAME_CHARACTERS),
    "after": Word(most_characters=_NAME_CHARACTERS),
    "limit": Number(default=MOST_NODES, least=1, most=MOST_NODES),
}


class KnownNodes(Protocol):
    """What is shown, of ClusterState."""

    def node_names(self) -> Sequence[str]: ...

    def node_ledger(self, name: str) -> NodeLedger | None: ...


class StatePages:
    """`head` is what is shown besides the nodes; it is short."""

    def __init__(self, *, head: Callable[[], Mapping[str, object]], nodes: KnownNodes) -> None:
        self._head = head
        self._nodes = nodes
        # One at a time: each page takes a share of the loop that the scheduler's verbs need.
        queue = RequestQueue()
        self.show = queue.one_at_a_time(self._show)
        self.inspect = queue.one_at_a_time(self._inspect)

    async def _show(self, request: web.Request) -> web.Response:
        try:
            asked = read_query(request.query, _QUERY)
        except BadQueryError as e:
            return bad_query(request, e)
        names = self._nodes.node_names()
        if asked["node"]:
            if self._nodes.node_ledger(asked["node"]) is None:
                return json_answer(request, {"error": f"no node {asked['node']} is known"}, status=404)
            shown, rest = [asked["node"]], 0
        else:
            # By name, not by number: nodes come and go between two pages, and none is shown twice or left out for it.
            begin = bisect.bisect_right(names, asked["after"]) if asked["after"] else 0
            shown = list(names[begin : begin + asked["limit"]])
            rest = len(names) - begin - len(shown)
        head = {**self._head(), "known_nodes": len(names), "next_after": shown[-1] if rest else None}
        body = JsonBody(await join_in_slices(self._pieces(head, shown)))
        return await body.answer(request)

    def _pieces(self, head: Mapping[str, object], names: Sequence[str]) -> Iterator[bytes]:
        # The head's object stays open: the nodes follow in it, one slice after the other.
        yield encode(head)[:-1] + b',"nodes":['
        comma = b""
        for name in names:
            ledger = self._nodes.node_ledger(name)
            if ledger is not None:  # else it went away between two slices
                yield comma + encode(node_document(ledger))
                comma = b","
        yield b"]}"

    async def _inspect(self, request: web.Request) -> web.Response:
        """Of one node where the path names it, else of all."""
        name = request.match_info.get("node", "")
        if name and self._nodes.node_ledger(name) is None:
            return json_answer(
                request, {"nodes": [], "error": f"no node {name[:_NAME_CHARACTERS]} is known"}, status=404
            )
        names = [name] if name else self._nodes.node_names()
        ledgers = (ledger for one in names if (ledger := self._nodes.node_ledger(one)) is not None)
        pieces = (b"," * bool(number) + encode(gpushare_document(ledger)) for number, ledger in enumerate(ledgers))
        body = JsonBody(b'{"nodes":[' + await join_in_slices(pieces) + b"]}")
        return await body.answer(request)


class TypicalPodDocument(Struct, kw_only=True):
    """A kind of pods by which policy fgd chooses nodes. `parts` are hundredths of a GPU, by cores; `gpu_memory_mib` of each
    GPU, 0 where the parts say all; no `models`: any."""

    percent: float
    gpus: int
    parts: int
    gpu_memory_mib: int
    cpu_milli: int
    memory_mib: int
    models: Sequence[str]


def typical_documents(typical: TypicalPods | None) -> list[TypicalPodDocument]:
    """The most frequent first; none where nodes are chosen by fullness."""
    return [
        TypicalPodDocument(
            percent=round(100 * frequency, 2),
            gpus=kind.gpus,
            parts=kind.parts,
            gpu_memory_mib=kind.gpu_memory_mib,
            cpu_milli=kind.cpu_milli,
            memory_mib=kind.memory_mib,
            models=kind.models,
        )
        for kind, frequency in (typical.kinds if typical is not None else ())
    ]


class ReservationDocument(Struct, kw_only=True):
    """`containers` are the GPUs by container, `charges` cores, blocks, units and whole GPUs by GPU index."""

    pod: str
    pod_uid: str
    stage: str
    containers: Mapping[str, Sequence[int]]
    charges: Mapping[str, Sequence[int]]


class NodeLedgerDocument(Struct, kw_only=True):
    name: str
    model: str
    pool: str
    is_exact: bool
    is_cordoned: bool
    is_ready: bool
    gpus: Sequence[ReportedGpuDocument]
    reservations: Sequence[ReservationDocument]
    unattributed: Sequence[PodUid]


def node_document(ledger: NodeLedger) -> NodeLedgerDocument:
    """One node for a person: its GPUs, and the pods that have some of them. Sorted."""
    node = ledger.node
    return NodeLedgerDocument(
        name=node.name,
        model=node.model,
        pool=node.pool,
        is_exact=node.is_exact,
        is_cordoned=node.is_cordoned,
        is_ready=node.is_ready,
        gpus=[reported_gpu_document(reported, gpu) for gpu, reported in zip(ledger.gpus, node.gpus, strict=True)],
        reservations=[
            ReservationDocument(
                pod=f"{one.namespace}/{one.pod}",
                pod_uid=one.pod_uid,
                stage=one.stage.value,
                containers={c.name: c.gpus for c in one.plan.containers if c.gpus},
                charges={
                    str(index): (charge.cores, charge.blocks, charge.units, charge.wholes)
                    for index, charge in one.plan.charges.items()
                },
            )
            for _, one in sorted(ledger.reservations.items())
        ],
        unattributed=sorted(ledger.unattributed),
    )


# --- GPUShare's form (pkg/scheduler/gpushare-inspect.go of gpushare-scheduler-extender) ---


class GpusharePod(Struct, kw_only=True):
    name: str
    namespace: str
    used_gpu: int = field(name="usedGPU")


class GpushareDevice(Struct, kw_only=True):
    id: int
    total_gpu: int = field(name="totalGPU")
    used_gpu: int = field(name="usedGPU")
    pods: Sequence[GpusharePod]


class GpushareNode(Struct, kw_only=True):
    name: str
    total_gpu: int = field(name="totalGPU")
    used_gpu: int = field(name="usedGPU")
    devs: Sequence[GpushareDevice]


def gpushare_document(ledger: NodeLedger) -> GpushareNode:
    """Memory in GPUShare's units. What pods have by other resources counts as used, in whole units; the pods are those of
    gpu-mem, each with what it has of that GPU."""
    pods: dict[int, list[GpusharePod]] = {}
    for _, one in sorted(ledger.reservations.items()):
        for index, charge in one.plan.charges.items():
            if charge.units:
                pods.setdefault(index, []).append(
                    GpusharePod(name=one.pod, namespace=one.namespace, used_gpu=charge.units)
                )
    devs = [
        GpushareDevice(
            id=gpu.index,
            total_gpu=gpu.total_units,
            # Rounded up: a unit that is taken in part is nobody else's.
            used_gpu=min(gpu.total_units, -(-gpu.allocated_mib // gpu.unit_mib)),
            pods=pods.get(gpu.index, ()),
        )
        for gpu in ledger.gpus
    ]
    return GpushareNode(
        name=ledger.node.name,
        total_gpu=sum(one.total_gpu for one in devs),
        used_gpu=sum(one.used_gpu for one in devs),
        devs=devs,
    )
