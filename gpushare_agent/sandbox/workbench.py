"""A running sandbox: the node, its agent, and what people do with them (apply, delete, exec, restart, look).

State owned: none but the running parts. The printing is the app's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpushare_agent.model.errors import AgentError, Rejected
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.container_entry import enter_container
from gpushare_agent.sandbox.control import Answer, Request
from gpushare_agent.sandbox.manifests import Manifest
from gpushare_agent.sandbox.node_report import ReportedNode, reason_and_message, report

READY_TIMEOUT_S = 30.0
_UNSCHEDULABLE = "Unschedulable"
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    shown: ReportedNode
    agent: AgentProcess

    def document(self) -> dict[str, Any]:
        return report(self.shown)

    def is_registered(self) -> bool:
        """Both resources are in the Node object with devices, as the scheduler sees it."""
        node = self.shown.node
        raw = node.api.object_of("nodes", ("", node.name)) or {}
        allocatable = raw.get("status", {}).get("allocatable", {})
        return all(int(allocatable.get(name, 0)) > 0 for name in (self.shown.vcore, self.shown.vmemory))

    async def wait_registered(self) -> bool:
        """False after READY_TIMEOUT_S: pods are then created all the same, and stay Pending."""
        try:
            return await self.shown.node.signal.wait_until(self.is_registered, READY_TIMEOUT_S)
        except TimeoutError:
            return False

    def create(self, manifests: Iterable[Manifest]) -> list[str]:
        """In order; returns their names with namespace. Raises Conflict for a name in use."""
        created = []
        for manifest in manifests:
            metadata = self.shown.node.api.create_pod(manifest.raw)["metadata"]
            created.append(f"{metadata['namespace']}/{metadata['name']}")
        return created

    def is_settled(self) -> bool:
        """Every pod runs, has ended, or waits because nothing fits."""
        for raw in self.shown.node.api.pods():
            phase = raw["status"]["phase"]
            is_waiting = phase == "Pending" and reason_and_message(raw)[0] != _UNSCHEDULABLE
            if is_waiting or phase not in ("Pending", "Running", "Succeeded", "Failed"):
                return False
        return True

    def _delete(self, namespace: str, name: str) -> str:
        namespace, name = _split_name(namespace, name)
        self.shown.node.api.delete_pod(namespace, name)
        return f"pod {namespace}/{name} deleted"

    async def handle(self, request: Request, asker_pid: int) -> Answer:
        """A request from another terminal. Raises AgentError."""
        command = request.get("command")
        if command == "apply":
            return _each(lambda m: f"pod {self.create([m])[0]} created", _manifests(request))
        if command == "delete":
            namespace = str(request.get("namespace"))
            return _each(lambda name: self._delete(namespace, name), _names(request))
        if command == "exec":
            pod = _split_name(str(request.get("namespace")), str(request.get("pod")))
            container = request.get("container")
            entered = enter_container(self.shown.node, *pod, None if container is None else str(container), asker_pid)
            return {**_done([]), "notes": entered.notes, "env": entered.environment}
        if command == "restart-kubelet":
            await self.shown.node.kubelet.restart()
            return _done(["the kubelet has restarted; it lists and admits pods again in about a second"])
        if command == "kill-agent":
            if not self.agent.kill():
                raise AgentError("no agent runs at the moment; it is being started")
            return _done(["the agent was killed; the sandbox starts it again"])
        if command == "status":
            return {**_done([]), "document": self.document()}
        raise Rejected(f"unknown command {command!r}")


def _split_name(namespace: str, name: str) -> tuple[str, str]:
    """A name may be written as status shows it, NAMESPACE/NAME; then that is its namespace."""
    head, slash, tail = name.partition("/")
    return (head, tail) if slash else (namespace, name)


def _done(lines: list[str]) -> Answer:
    return {"ok": True, "lines": lines, "errors": []}


def _each(act: Callable[[_Item], str], items: Iterable[_Item]) -> Answer:
    """Goes on after a failure: one name in use does not keep the other pods away."""
    lines: list[str] = []
    errors: list[str] = []
    for item in items:
        try:
            lines.append(act(item))
        except AgentError as error:
            errors.append(str(error))
    return {"ok": not errors, "lines": lines, "errors": errors}


def _manifests(request: Request) -> list[Manifest]:
    """Raises Rejected; nothing is created then."""
    pods = _list(request, "pods")
    if not all(isinstance(raw, dict) and isinstance(raw.get("metadata", {}), dict) for raw in pods):
        raise Rejected('the request cannot be read: "pods" must hold Pod manifests, each an object with metadata')
    return [Manifest(raw=raw, origin=str(raw.get("metadata", {}).get("name"))) for raw in pods]


def _names(request: Request) -> list[str]:
    names = _list(request, "names")
    if not all(isinstance(name, str) for name in names):
        raise Rejected('the request cannot be read: "names" must hold texts')
    return names


def _list(request: Request, field: str) -> list[Any]:
    given = request.get(field)
    if not isinstance(given, list):
        raise Rejected(f'the request cannot be read: "{field}" must be a list, not {type(given).__name__}')
    return given
