"""A running sandbox: the nodes, their agents, and the commands for them (apply, delete, exec, restart, fail, status).

For `exec` the calling process itself is moved into the container's cgroup and then becomes the command, so terminal,
signals and exit code need no proxy; sandbox/command.py has that command. State owned: only the running parts. The app
prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from msgspec import Struct

from gpushare_agent.core.kit.supervision import at_most
from gpushare_agent.core.model.errors import AgentError, NotFound, Rejected
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.kubectl.agent_client import open_agent_client, read_node
from gpushare_agent.sandbox.agent_process import AgentProcess
from gpushare_agent.sandbox.api.kinds import APPLIED_KINDS
from gpushare_agent.sandbox.api.pod_subresources import INSTEAD_OF_EXEC
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.control import Answer, Request
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import RawObject, containers_of, is_mirror, is_terminal
from gpushare_agent.sandbox.report import (
    ReportedNode,
    SandboxDocument,
    is_offered,
    reason_and_message,
    report,
)
from gpushare_agent.sandbox.runtime.containers import Container
from gpushare_agent.sandbox.scheduler.claim_objects import read_devices
from gpushare_agent.sandbox.scheduler.scheduler import EXTENDER_SCHEDULER_NAMES, SCHEDULER_NAMES, UNSCHEDULABLE

READY_TIMEOUT_S = 30.0
_AGENT_TIMEOUT_S = 2.0
"""It listens on this machine; the report waits for its answer."""
_Item = TypeVar("_Item")


class NodeController(ReportedNode, kw_only=True, eq=False):
    """One node of the sandbox."""

    agent: AgentProcess
    faults: GpuFaults

    @property
    def name(self) -> str:
        return self.node.name

    def is_registered(self) -> bool:
        """The Node object has the resources with devices, as the scheduler sees it (one of NVIDIA's is enough); or the node
        has all of its slices, and has deleted those from before its start."""
        api = self.node.api
        if self.by_claims:
            # A slice from before the kubelet's start is about to be deleted: it does not count. Nor do the first ones of a
            # pool, whose devices nobody gets yet.
            return self.node.kubelet.has_wiped_slices and bool(read_devices(api.store.all("resourceslices"), self.name))
        raw = api.store.find("nodes", ("", self.name)) or {}
        allocatable = raw.get("status", {}).get("allocatable", {})
        missing = [name for name in self.names.names if int(allocatable.get(name, 0)) == 0]
        # One of NVIDIA's names may have no devices, such as whole GPUs where all are split.
        return set(missing) < set(self.names.gpu) if self.names.gpu else not missing

    def fail_gpu(self, request: Request) -> str:
        """Makes a GPU fail: with an Xid error where one is given, else by a loss."""
        if request.xid is not None:
            self.faults.report_xid(request.gpu, request.xid)
            return f"GPU {request.gpu} has reported Xid {request.xid}"
        self.faults.lose(request.gpu, request.lost)
        return f"GPU {request.gpu} is lost" + (f": {request.lost}" if request.lost else "")

    async def heal_gpu(self, index: int) -> str:
        # What is offered decides: what the agent has taken back by itself needs no reset.
        await self.refresh()
        gpus = self.agent_document.get("gpus", ()) if is_offered(self) else ()
        is_healthy = any(gpu["index"] == index and gpu["is_healthy"] for gpu in gpus)
        return self.faults.heal(index, is_offered=is_healthy)

    async def refresh(self) -> None:
        """Reads what the agent shows of its node. An agent that does not answer has not started yet, or is restarting. Its
        last document stays."""
        with suppress(AgentError):
            async with open_agent_client(self.addresses["web"], timeout_s=_AGENT_TIMEOUT_S) as agent:
                self.agent_document.update(await read_node(agent))


class SandboxController(Struct, frozen=True, kw_only=True):
    """All nodes, which share one API server; the first of them speaks for it."""

    nodes: tuple[NodeController, ...]
    extender: AgentProcess | None = None

    @property
    def api(self) -> EmbeddedApiServer:
        return self.nodes[0].node.api

    async def document(self) -> SandboxDocument:
        """The report, with each agent's own document of this moment."""
        async with asyncio.TaskGroup() as group:
            for one in self.nodes:
                # At once: with 32 nodes each answer waits for its agent.
                group.create_task(one.refresh(), name=f"read the agent of {one.name}")
        return report(*self.nodes)

    async def wait_registered(self) -> bool:
        """Waits for all nodes; false after READY_TIMEOUT_S: pods are then created all the same, and stay Pending."""
        registered = self.api.signal.wait_until(lambda: all(one.is_registered() for one in self.nodes))
        return await at_most(READY_TIMEOUT_S, registered)

    def apply(self, manifests: Iterable[RawObject]) -> list[str]:
        """Returns, in order, `pod NAMESPACE/NAME created`, `configured` or `unchanged` for each. Raises AgentError."""
        done = []
        for raw in manifests:
            kind = APPLIED_KINDS[raw.get("kind", "Pod")]
            resource, metadata = kind.resource, raw["metadata"]
            namespace, name = metadata.get("namespace") or "default", metadata.get("name")
            key = namespace if kind.is_namespaced else "", name
            # Looked up before, because apply also creates: the outcome depends on what was there.
            before = self.api.store.find(resource, key) if name else None
            # Else it has a generateName.
            made = (
                self.api.apply(resource, raw, namespace, "sandbox")
                if name
                else self.api.create(resource, raw, namespace)
            )
            outcome = "created" if before is None else "unchanged" if made is before else "configured"
            where = "/".join(filter(None, (made["metadata"].get("namespace"), made["metadata"]["name"])))
            remedy = self.api.claims_remedy(resource, made)
            done.append(f"{made['kind'].lower()} {where} {outcome}{remedy and f'. {remedy}'}")
        return done

    def is_steady(self) -> bool:
        """Every pod runs, has ended, or waits because nothing fits; and what makes pods has made them."""
        store = self.api.store
        # A controller has not looked at it yet: its pods are to come.
        if any(not raw.get("status") for one in ("deployments", "statefulsets", "jobs") for raw in store.all(one)):
            return False
        # The pods of a StatefulSet come one after the other: the next one comes when this one runs.
        if any(raw["spec"]["replicas"] > raw["status"]["readyReplicas"] for raw in store.all("statefulsets")) and all(
            raw["status"]["phase"] == "Running" for raw in self.api.pods()
        ):
            return False
        for raw in self.api.pods():
            phase = raw["status"]["phase"]
            # Unschedulable pods, and those for another scheduler, may wait for ever. All others make progress.
            names = SCHEDULER_NAMES if self.extender is None else EXTENDER_SCHEDULER_NAMES
            may_stay = reason_and_message(raw)[0] == UNSCHEDULABLE or raw["spec"].get("schedulerName") not in names
            is_waiting = phase == "Pending" and not may_stay
            if is_waiting or phase not in ("Pending", "Running", "Succeeded", "Failed"):
                return False
        return True

    def has_waiting(self) -> bool:
        """Whether the scheduler found a pod unschedulable."""
        return any(reason_and_message(raw)[0] == UNSCHEDULABLE for raw in self.api.pods())

    def _delete(self, namespace: str, name: str) -> str:
        namespace, name = _split_name(namespace, name)
        self.api.delete_pod(namespace, name)
        return f"pod {namespace}/{name} deleted"

    def _node(self, request: Request) -> NodeController:
        """The requested one; it must be named where there are several. Raises Rejected."""
        by_name = {one.name: one for one in self.nodes}
        if request.node is None and len(by_name) == 1:
            return self.nodes[0]
        if request.node is None:
            raise Rejected(f"this sandbox has several nodes: name one with --node ({', '.join(by_name)})")
        if request.node not in by_name:
            raise Rejected(f"there is no node {request.node!r:.40}: there are {', '.join(by_name)}")
        return by_name[request.node]

    def _enter(self, request: Request, peer_pid: int) -> Answer:
        namespace, name = _split_name(request.namespace, request.pod)
        node_name = self.api.pod(namespace, name)["spec"].get("nodeName")
        # The pod's own node: only its runtime has the container.
        node = next((one for one in self.nodes if one.name == node_name), self.nodes[0])
        environment, notes = enter_container(node.node, namespace, name, request.container, peer_pid)
        return {**_done(), "notes": notes, "env": environment}

    async def handle(self, request: Request, peer_pid: int) -> Answer:
        """A request from another terminal. Raises AgentError."""
        match request.command:
            case "apply":
                if not all(isinstance(raw.get("metadata", {}), dict) for raw in request.pods):
                    raise Rejected(
                        'the request cannot be read: "pods" must hold manifests, each an object with metadata'
                    )
                return _each(lambda raw: self.apply([raw])[0], request.pods)
            case "delete":
                return _each(lambda name: self._delete(request.namespace, name), request.names)
            case "exec":
                return self._enter(request, peer_pid)
            case "restart-kubelet":
                await self._node(request).node.kubelet.restart()
                return _done("the kubelet has restarted; it lists and admits pods again in about a second")
            case "kill-agent":
                # Between an end and the next start there is no process.
                if not self._node(request).agent.kill():
                    raise AgentError("no agent runs at the moment; it is being started")
                return _done("the agent was killed; the sandbox starts it again")
            case "kill-extender":
                if self.extender is None or not self.extender.kill():
                    raise AgentError(
                        "no extender runs: the sandbox was started without --extender, or it is being started"
                    )
                return _done("the extender was killed; the sandbox starts it again")
            case "fail-gpu":
                return _done(self._node(request).fail_gpu(request))
            case "heal-gpu":
                return _done(await self._node(request).heal_gpu(request.gpu))
            case "status":
                return {**_done(), "document": await self.document()}
        raise Rejected(f"unknown command {request.command!r}")


def _split_name(namespace: str, name: str) -> tuple[str, str]:
    """A name may be written as status shows it, NAMESPACE/NAME; then that is its namespace."""
    head, slash, tail = name.partition("/")
    return (head, tail) if slash else (namespace, name)


def _done(*lines: str) -> Answer:
    return {"ok": True, "lines": list(lines), "errors": []}


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


def enter_container(
    node: EmbeddedNode, namespace: str, pod: str, container: str | None, pid: int
) -> tuple[dict[str, str], list[str]]:
    """Moves process `pid`, and with it its later children, into a running container; None: the pod's first main one.

    Returns the container's variables, and what the person should know about the choice of the container.

    Raises:
        NotFound: no such pod, no such container in it, it does not run, or the process has gone.
        Rejected: the process cannot be seen from here.
        Unavailable: the kernel refuses.
    """
    raw = node.api.pod(namespace, pod)
    name, notes = _chosen(raw, container)
    # An agent is a process of the sandbox itself, in no cgroup of a container.
    if is_mirror(raw):
        raise NotFound(f"pod {pod} is an agent of the sandbox, which is in no container: {INSTEAD_OF_EXEC}")
    if is_terminal(raw):
        raise NotFound(f"cannot exec into a container in a completed pod; current phase is {raw['status']['phase']}")
    found = node.kubelet.runtime.find(raw["metadata"]["uid"], name)
    if found is None or not found.is_running:
        raise NotFound(_why_not_running(raw, name, found))
    # The kernel gives 0 for a process of another PID namespace.
    if pid <= 0:
        raise Rejected(
            f"the sandbox cannot see the process that asks to run in container {name} of pod {namespace}/{pod}: it is in "
            "another PID namespace; ask from the namespace in which the sandbox was started"
        )
    node.kubelet.runtime.join(found, pid)
    return dict(sorted(found.env.items())), notes


def _chosen(raw: RawObject, container: str | None) -> tuple[str, list[str]]:
    """The container that is meant, and a note, in kubectl's words, where it was chosen among several."""
    pod = raw["metadata"]["name"]
    kinds = {spec.name: spec.kind for spec in containers_of(raw)}
    if container is not None:
        if container not in kinds:
            raise NotFound(f"container {container} not found in pod {pod}; it has {_listed(kinds)}")
        return container, []
    # As kubectl: the first main container, with a note where there are others.
    first = next(name for name, kind in kinds.items() if kind is ContainerKind.MAIN)
    return first, [f'Defaulted container "{first}" out of: {_listed(kinds)}'] if len(kinds) > 1 else []


def _listed(kinds: dict[str, ContainerKind]) -> str:
    main = [name for name, kind in kinds.items() if kind is ContainerKind.MAIN]
    return ", ".join([*main, *(f"{name} (init)" for name in kinds if name not in main)])


def _why_not_running(raw: RawObject, name: str, found: Container | None) -> str:
    metadata = raw["metadata"]
    reason = ": ".join(filter(None, reason_and_message(raw)))
    if found is not None:
        why = f"it ended with exit code {found.exit_code}"
    elif reason:
        why = f"the pod is {raw['status']['phase']}, {reason}"
    else:
        why = f"the pod is {raw['status']['phase']} and it has not started yet"
    return f"container {name} of pod {metadata['namespace']}/{metadata['name']} is not running: {why}"
