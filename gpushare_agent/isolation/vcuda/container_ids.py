"""Which container has which ID: as the runtime tells, else as the pods' statuses do.

The runtime knows an ID about a second sooner, but whoever may use its socket is root on the node, so the agent works
without: the kubelet writes every ID into the pod's status. Both are asked in this order each time; a runtime that is away
or not reachable only costs that second. State owned: whether its absence is in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import structlog

from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, NotFound, Unavailable
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.runtime.cri import RuntimeContainer, RuntimeContainerStatus, RuntimeState

log = structlog.get_logger(__name__)


class Runtime(Protocol):
    async def containers(self, *, only_running: bool) -> list[RuntimeContainer]: ...
    async def status(self, container_id: str) -> RuntimeContainerStatus: ...


class Pods(Protocol):
    def pods(self) -> Iterable[Pod]: ...


class ContainerIds:
    """`running` and `owner_of`, each bounded by the runtime client's own time limit."""

    def __init__(self, runtime: Runtime, pods: Pods) -> None:
        self._runtime = runtime
        self._pods = pods
        self._is_runtime_away = False

    async def running(self) -> Mapping[ContainerKey, str]:
        """The IDs of the containers that run."""
        try:
            reported = await self._runtime.containers(only_running=True)
        except AgentError as e:
            self._note_away(e)
            return self._in_statuses()
        self._note_back()
        return {ContainerKey(c.pod_uid, c.container_name): c.id for c in reported if c.state is RuntimeState.RUNNING}

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        """Whose container this is; None where the runtime knows none of this ID.

        Raises:
            Unavailable: the runtime is away and no pod's status names the ID yet.
        """
        try:
            found = (await self._runtime.status(container_id)).container
        except NotFound:
            return None
        except AgentError as e:
            self._note_away(e)
        else:
            self._note_back()
            return ContainerKey(found.pod_uid, found.container_name)
        owner = next((key for key, known in self._in_statuses().items() if known == container_id), None)
        if owner is None:
            raise Unavailable(
                f"container {container_id} is not known yet: the runtime cannot be asked, and no pod's status names it;"
                " it takes a second or two after the start. Try again"
            )
        return owner

    def _note_away(self, error: AgentError) -> None:
        if not self._is_runtime_away:
            log.info("runtime_not_asked", why=str(error), then="container IDs come from the pods' statuses")
        self._is_runtime_away = True

    def _note_back(self) -> None:
        if self._is_runtime_away:
            log.info("runtime_asked_again")
        self._is_runtime_away = False

    def _in_statuses(self) -> dict[ContainerKey, str]:
        return {
            ContainerKey(PodUid(pod.uid), name): container_id
            for pod in self._pods.pods()
            for name, container_id in pod.container_ids.items()
        }
