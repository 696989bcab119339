"""Finds the containers of IDs, and their IDs: from the container runtime, else from the pods' statuses.

The runtime knows an ID about a second earlier, but access to its socket means root on the node, so the agent works without:
the kubelet writes every ID into the pod's status. Both are read in this order each time; an unreachable runtime only
costs that second. State owned: whether its absence was logged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from gpushare_agent.agent.runtime.cri import RuntimeClient
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.errors import AgentError, NotFound, Unavailable
from gpushare_agent.core.model.names import PodUid

if TYPE_CHECKING:
    from gpushare_agent.agent.cluster.pod_store import PodStore
    from gpushare_agent.core.model.pods import Pod

log = structlog.get_logger(__name__)

ASKED_PODS = 4


class ContainerIds:
    """`running` and `owner_of`, bounded by the runtime client's own time limit for each of ASKED_PODS calls at most."""

    def __init__(self, runtime: RuntimeClient, pods: PodStore) -> None:
        self._runtime = runtime
        self._pods = pods
        self._unavailable = ReportOnce()

    async def running(self, uids: Collection[PodUid] | None = None) -> Mapping[ContainerKey, str]:
        """The IDs of the containers that run, at least of these pods."""
        running: dict[ContainerKey, str] = {}
        if uids is not None and not uids:
            return running
        try:
            # One by one while they are few: a list of all grows with the node.
            for uid in uids if uids is not None and len(uids) <= ASKED_PODS else (None,):
                running |= await self._runtime.running(uid)
        except AgentError as e:
            # Not an error: access to the socket is root on the node, and is often not given.
            self._note(e)
            pods = self._pods.pods() if uids is None else filter(None, map(self._pods.get, uids))
            return {key: container_id for container_id, key in in_statuses(pods).items()}
        self._note(None)
        return running

    async def owner_of(self, container_id: str) -> ContainerKey | None:
        """The container with this ID; None if the runtime knows none.

        Raises:
            Unavailable: the runtime does not answer and no pod's status names the ID yet.
        """
        try:
            found = await self._runtime.owner_of(container_id)
        # The runtime is asked about an ID that a container sent: that there is none is an answer, no failure.
        except NotFound:
            return None
        except AgentError as e:
            self._note(e)
            if (named := in_statuses(self._pods.pods()).get(container_id)) is not None:
                return named
            raise Unavailable(
                f"container {container_id} is not known yet: the runtime does not answer, and no pod's status names it;"
                " it takes a second or two after the start. Try again"
            ) from e
        self._note(None)
        return found

    def _note(self, error: AgentError | None) -> None:
        if error is None:
            if self._unavailable.is_over():
                log.info("runtime_available")
        elif self._unavailable.is_new("unavailable"):
            log.info("runtime_unavailable", why=str(error), then="container IDs come from the pods' statuses")


def in_statuses(pods: Iterable[Pod]) -> dict[str, ContainerKey]:
    """The containers by the IDs that the pods' statuses have."""
    return {found: ContainerKey(pod.uid, name) for pod in pods for name, found in pod.container_ids.items()}
