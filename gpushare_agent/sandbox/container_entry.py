"""A process from outside enters a container of the embedded node, as `kubectl exec` has one run there.

The calling process itself is moved into the container's cgroup and then becomes the command, so that terminal, signals and
exit code need no proxy. Not for the command: cli/sandbox_exec.py. No state.
"""

from __future__ import annotations

from msgspec import Struct

from gpushare_agent.model.errors import NotFound, Rejected
from gpushare_agent.model.pods import ContainerKind
from gpushare_agent.sandbox.api.pod_subresources import INSTEAD_OF_EXEC
from gpushare_agent.sandbox.node import EmbeddedNode
from gpushare_agent.sandbox.pod_manifest import RawObject, containers_of, is_mirror, is_terminal
from gpushare_agent.sandbox.report.document import reason_and_message
from gpushare_agent.sandbox.runtime.containers import Container


class Entry(Struct, frozen=True, kw_only=True):
    """The container's environment variables, and what the person should know about the choice of the container."""

    environment: dict[str, str]
    notes: list[str]


def enter_container(node: EmbeddedNode, namespace: str, pod: str, container: str | None, pid: int) -> Entry:
    """Moves process `pid`, and with it its later children, into a running container; None: the pod's first main one.

    Raises:
        NotFound: no such pod, no such container in it, it does not run, or the process has gone.
        Rejected: the process cannot be seen from here.
        Unavailable: the kernel refuses.
    """
    raw = node.api.pod(namespace, pod)
    name, notes = _chosen(raw, container)
    if is_mirror(raw):
        raise NotFound(f"pod {pod} is an agent of the sandbox, which is in no container: {INSTEAD_OF_EXEC}")
    if is_terminal(raw):
        raise NotFound(f"cannot exec into a container in a completed pod; current phase is {raw['status']['phase']}")
    found = node.kubelet.runtime.find(raw["metadata"]["uid"], name)
    if found is None or not found.is_running:
        raise NotFound(_why_not_running(raw, name, found))
    if pid <= 0:
        raise Rejected(
            f"the sandbox cannot see the process that asks to run in container {name} of pod {namespace}/{pod}: it is in "
            "another PID namespace; ask from the namespace in which the sandbox was started"
        )
    node.kubelet.runtime.join(found, pid)
    return Entry(environment=dict(sorted(found.env.items())), notes=notes)


def _chosen(raw: RawObject, container: str | None) -> tuple[str, list[str]]:
    """The container that is meant, and a note, in kubectl's words, where it was chosen among several."""
    pod = raw["metadata"]["name"]
    kinds = {spec.name: spec.kind for spec in containers_of(raw)}
    if container is not None:
        if container not in kinds:
            raise NotFound(f"container {container} not found in pod {pod}; it has {_listed(kinds)}")
        return container, []
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
