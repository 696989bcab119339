"""Resource fit as kube-scheduler has it, and the scheduler that knows besides it only claims (claims.py), and no GPU.

Free on a node is what is allocatable less what pods request. A scheduler that asks an extender is in extender_scheduler.py.
State owned: the requests of each living pod, read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, pod_requests, timestamp
from gpushare_agent.sandbox.scheduler.claims import PodClaims

UNSCHEDULABLE = "Unschedulable"
CORDONED = "node(s) were unschedulable"
"""kube-scheduler's words."""


class NodeFit:
    """The nodes are those of the API server."""

    def __init__(self, api: EmbeddedApiServer) -> None:
        self._api = api
        self._requests: dict[str, dict[str, int]] = {}

    def requests(self, pod: RawObject) -> dict[str, int]:
        uid = pod["metadata"]["uid"]
        found = self._requests.get(uid)
        if found is None:
            found = self._requests[uid] = pod_requests(pod)
        return found

    def free(self, assumed: Mapping[str, tuple[RawObject, str]]) -> dict[str, dict[str, int]]:
        """What is free by node and resource. `assumed` are pods that are being bound, by UID, each with its node."""
        pods = self._api.store.in_creation_order("pods")
        nodes = {raw["metadata"]["name"]: _extended(raw) for raw in self._api.store.all("nodes")}
        living: dict[str, None] = {}
        for pod in pods:
            uid = pod["metadata"]["uid"]
            living[uid] = None
            node_name = pod["spec"].get("nodeName") or (assumed[uid][1] if uid in assumed else "")
            if node_name in nodes and not is_terminal(pod):
                take(nodes[node_name], self.requests(pod))
        for uid in self._requests.keys() - living.keys():
            del self._requests[uid]
        return nodes

    def reasons_against(
        self, free: Mapping[str, Mapping[str, int]], requests: Mapping[str, int]
    ) -> dict[str, list[str]]:
        """Why the requests do not fit, by node; empty where they do. Cordoned nodes (`kubectl cordon`) take no pod."""
        nodes = self._api.store.all("nodes")
        cordoned = {raw["metadata"]["name"] for raw in nodes if (raw.get("spec") or {}).get("unschedulable")}
        return {
            name: [CORDONED] if name in cordoned else [f"Insufficient {one}" for one in lacking(free_on, requests)]
            for name, free_on in free.items()
        }


def _extended(node: RawObject) -> dict[str, int]:
    return {name: int(count) for name, count in node["status"].get("allocatable", {}).items() if "/" in name}


def take(free: dict[str, int], requests: Mapping[str, int]) -> None:
    for name, count in requests.items():
        free[name] = free.get(name, 0) - count


def lacking(free: Mapping[str, int], requests: Mapping[str, int]) -> list[str]:
    """The resources of which there is too little."""
    return [name for name, count in requests.items() if count > free.get(name, 0)]


def waiting_text(nodes: int, reasons: Iterable[str]) -> str:
    """`0/2 nodes are available: 1 Insufficient a/b, 1 too full.`: how many nodes give each reason."""
    counts = Counter(reason.rstrip(".") for reason in reasons)
    return f"0/{nodes} nodes are available: {', '.join(sorted(f'{n} {reason}' for reason, n in counts.items()))}."


def report_waiting(api: EmbeddedApiServer, pod: RawObject, message: str, reason: str = UNSCHEDULABLE) -> None:
    """Writes the message into the pod's status and an Event; once for the same message."""
    if any(condition.get("message") == message for condition in pod["status"].get("conditions", ())):
        return
    condition = {
        "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
        "lastTransitionTime": timestamp(),
    }  # fmt: skip
    metadata = pod["metadata"]
    api.set_pod_status(metadata["namespace"], metadata["name"], {"conditions": [condition]}, uid=metadata["uid"])
    api.record_event(pod, reason="FailedScheduling", message=message, source="default-scheduler")


class EmbeddedScheduler:
    """Binds pending pods in order of creation to the first node, by name, on which they and their claims fit; a pod that
    fits nowhere does not hold up the later ones."""

    def __init__(self, *, api: EmbeddedApiServer) -> None:
        self._api = api
        self._fit = NodeFit(api)
        self._claims = PodClaims(api)

    async def run(self) -> None:
        """Endless; one pass after every change."""
        while True:
            version = self._api.version
            self.schedule()
            await self._api.wait_change(version)

    def schedule(self) -> None:
        self._claims.reconcile()
        pods = self._api.store.in_creation_order("pods")
        waiting = [p for p in pods if not p["spec"].get("nodeName") and not is_terminal(p)]
        if not waiting:
            return
        free = self._fit.free({})
        if not free:
            return
        for pod in waiting:
            requests = self._fit.requests(pod)
            against = self._fit.reasons_against(free, requests)
            chosen, reasons = self._claims.place(pod, [name for name, found in against.items() if not found])
            if chosen is None:
                reasons += [reason for found in against.values() for reason in found]
                report_waiting(self._api, pod, waiting_text(len(free), reasons))
                continue
            take(free[chosen], requests)
            self._api.bind_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], chosen)
