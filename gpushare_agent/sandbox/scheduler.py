"""A scheduler for one node, as naive as kube-scheduler is about extended resources: it counts, and knows no card.

It works on the API server's objects only and owns no state.
"""

from __future__ import annotations

from gpushare_agent.model.errors import NotFound
from gpushare_agent.sandbox.api_server import EmbeddedApiServer
from gpushare_agent.sandbox.api_store import RawObject
from gpushare_agent.sandbox.pod_manifest import is_terminal, pod_requests, timestamp

UNSCHEDULABLE = "Unschedulable"


class EmbeddedScheduler:
    """Binds pending pods in order of creation; a pod that does not fit does not hold up the later ones."""

    def __init__(self, *, api: EmbeddedApiServer, node_name: str) -> None:
        self._api = api
        self._node_name = node_name

    async def run(self) -> None:
        """Endless; looks again after every change."""
        while True:
            version = self._api.version
            self.schedule()
            await self._api.wait_change(version)

    def schedule(self) -> None:
        try:
            node = self._api.node(self._node_name)
        except NotFound:
            return
        pods = self._api.store.in_creation_order("pods")
        waiting = [p for p in pods if not p["spec"].get("nodeName") and not is_terminal(p)]
        if not waiting:
            return
        free = _free(node, pods)
        for pod in waiting:
            requests = pod_requests(pod)
            lacking = [name for name, count in requests.items() if count > free.get(name, 0)]
            if lacking:
                self._refuse(pod, lacking)
                continue
            for name, count in requests.items():
                free[name] -= count
            self._api.bind_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], self._node_name)

    def _refuse(self, pod: RawObject, lacking: list[str]) -> None:
        message = f"0/1 nodes are available: {', '.join(f'1 Insufficient {name}' for name in lacking)}."
        if any(c.get("message") == message for c in pod["status"].get("conditions", ())):
            return
        condition = {
            "type": "PodScheduled", "status": "False", "reason": UNSCHEDULABLE, "message": message,
            "lastTransitionTime": timestamp(),
        }  # fmt: skip
        metadata = pod["metadata"]
        self._api.set_pod_status(metadata["namespace"], metadata["name"], {"conditions": [condition]})
        self._api.record_event(pod, reason="FailedScheduling", message=message, source="default-scheduler")


def _free(node: RawObject, pods: list[RawObject]) -> dict[str, int]:
    """Extended resources of the node that no bound, unfinished pod has asked for."""
    free = {name: int(value) for name, value in node["status"].get("allocatable", {}).items() if "/" in name}
    for pod in pods:
        if pod["spec"].get("nodeName") == node["metadata"]["name"] and not is_terminal(pod):
            for name, count in pod_requests(pod).items():
                free[name] = free.get(name, 0) - count
    return free
