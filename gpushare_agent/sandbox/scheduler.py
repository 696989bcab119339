"""A scheduler as naive as kube-scheduler is about extended resources: it counts, and knows no GPU.

It works on the API server's objects only. A scheduler that asks an extender is in extender_scheduler.
"""

from __future__ import annotations

from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.node_fit import NodeFit, lacking, take, tell_waiting, waiting_text
from gpushare_agent.sandbox.pod_manifest import is_terminal


class EmbeddedScheduler:
    """Binds pending pods in order of creation to the first node, by name, on which they fit; a pod that fits nowhere does
    not hold up the later ones."""

    def __init__(self, *, api: EmbeddedApiServer) -> None:
        self._api = api
        self._fit = NodeFit(api)

    async def run(self) -> None:
        """Endless; looks again after every change."""
        while True:
            version = self._api.version
            self.schedule()
            await self._api.wait_change(version)

    def schedule(self) -> None:
        pods = self._api.store.in_creation_order("pods")
        waiting = [p for p in pods if not p["spec"].get("nodeName") and not is_terminal(p)]
        if not waiting:
            return
        free = self._fit.free({})
        if not free:
            return
        for pod in waiting:
            requests = self._fit.requests(pod)
            lacks = {name: lacking(room, requests) for name, room in free.items()}
            chosen = next((name for name, lack in lacks.items() if not lack), None)
            if chosen is None:
                reasons = [f"Insufficient {resource}" for lack in lacks.values() for resource in lack]
                tell_waiting(self._api, pod, waiting_text(len(free), reasons))
                continue
            take(free[chosen], requests)
            self._api.bind_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], chosen)
