"""GET /debug/state of the extender: nodes and what is allocated on them, a page of nodes at a time; and GPUShare's answer
about the same, GET /gpushare-scheduler/inspect, which has no pages.

A cluster's state is megabytes and takes a second to encode: a page has a bounded number of nodes, is encoded in slices
between which verbs are answered, and one page is encoded at a time. A node is shown as it is at one moment; two nodes of a
page may be of different ones. State owned: the queue of requests.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpushare_agent.core.kit.http_answers import (
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
from gpushare_agent.core.node_report.reported import reported_gpu
from gpushare_agent.core.placement.fragmentation import TypicalPods
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.ledger import NodeLedger

if TYPE_CHECKING:
    from aiohttp import web

MOST_NODES = 200
_NAME_CHARACTERS = 253
_QUERY: Mapping[str, Number | Word] = {
    "node": Word(most_characters=_NAME_CHARACTERS),
    "after": Word(most_characters=_NAME_CHARACTERS),
    "limit": Number(default=MOST_NODES, least=1, most=MOST_NODES),
}


class StatePages:
    """`head` is shown with the nodes; it is short."""

    def __init__(self, *, head: Callable[[], Mapping[str, object]], nodes: ClusterState) -> None:
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
            # By name, not by number: nodes come and go between two pages, and none must be shown twice or left out.
            begin = bisect.bisect_right(names, asked["after"]) if asked["after"] else 0
            shown = list(names[begin : begin + asked["limit"]])
            rest = len(names) - begin - len(shown)
        head = {**self._head(), "known_nodes": len(names), "next_after": shown[-1] if rest else None}
        # The head's object stays open: the nodes follow in it, one slice after the other.
        body = encode(head)[:-1] + b',"nodes":[' + await self._joined(shown, node_document) + b"]}"
        return await JsonBody(body).answer(request)

    async def _joined(self, names: Sequence[str], document: Callable[[NodeLedger], Mapping[str, object]]) -> bytes:
        # A node may go away between two slices.
        ledgers = (ledger for name in names if (ledger := self._nodes.node_ledger(name)) is not None)
        return await join_in_slices(b"," * bool(n) + encode(document(ledger)) for n, ledger in enumerate(ledgers))

    async def _inspect(self, request: web.Request) -> web.Response:
        """Answers about one node where the path names it, else about all."""
        name = request.match_info.get("node", "")
        if name and self._nodes.node_ledger(name) is None:
            return json_answer(
                request, {"nodes": [], "error": f"no node {name[:_NAME_CHARACTERS]} is known"}, status=404
            )
        names = [name] if name else self._nodes.node_names()
        body = JsonBody(b'{"nodes":[' + await self._joined(names, gpushare_document) + b"]}")
        return await body.answer(request)


def typical_documents(typical: TypicalPods | None) -> list[Mapping[str, object]]:
    """The kinds of pods by which policy fgd chooses nodes, the most frequent first; none where nodes are chosen by fullness.
    `parts` are hundredths of a GPU, by cores; `gpu_memory_mib` of each GPU, 0 where the parts say all; no `models`: any."""
    kinds = typical.kinds if typical is not None else ()
    return [{"percent": round(100 * frequency, 2), **kind._asdict()} for kind, frequency in kinds]


def node_document(ledger: NodeLedger) -> Mapping[str, object]:
    """One node for a person: its GPUs, and the pods that have some of them, sorted. `containers` of a reservation are the
    GPUs by container, `charges` cores, blocks, units and whole GPUs by GPU index."""
    node = ledger.node
    return {
        **{name: getattr(node, name) for name in ("name", "model", "pool", "is_exact", "is_cordoned", "is_ready")},
        "gpus": [reported_gpu(reported, gpu) for gpu, reported in zip(ledger.gpus, node.gpus, strict=True)],
        "reservations": [
            {
                "pod": f"{one.namespace}/{one.pod}",
                "pod_uid": one.pod_uid,
                "stage": one.stage.value,
                "containers": {c.name: c.gpus for c in one.plan.containers if c.gpus},
                "charges": {str(index): charge[:4] for index, charge in one.plan.charges.items()},
            }
            for _, one in sorted(ledger.reservations.items())
        ],
        "unattributed": sorted(ledger.unattributed),
    }


def gpushare_document(ledger: NodeLedger) -> Mapping[str, object]:
    """In GPUShare's form (pkg/scheduler/gpushare-inspect.go of gpushare-scheduler-extender), memory in its units. Other
    resources of pods count as used, in whole units; the pods are those of gpu-mem, each with its units of that GPU."""
    pods: dict[int, list[Mapping[str, object]]] = {}
    for _, one in sorted(ledger.reservations.items()):
        for index, charge in one.plan.charges.items():
            if charge.units:
                pod = {"name": one.pod, "namespace": one.namespace, "usedGPU": charge.units}
                pods.setdefault(index, []).append(pod)
    # Rounded up: a unit that is taken in part is nobody else's.
    used = {gpu.index: min(gpu.total_units, -(-gpu.allocated_mib // gpu.unit_mib)) for gpu in ledger.gpus}
    return {
        "name": ledger.node.name,
        "totalGPU": sum(gpu.total_units for gpu in ledger.gpus),
        "usedGPU": sum(used.values()),
        "devs": [
            {
                "id": gpu.index,
                "totalGPU": gpu.total_units,
                "usedGPU": used[gpu.index],
                "pods": pods.get(gpu.index, ()),
            }
            for gpu in ledger.gpus
        ],
    }
