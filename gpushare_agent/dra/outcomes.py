"""Reports the outcome of each claim: metrics and the decision log. The pod's Event is the kubelet's own.

Never blocks, decides nothing, has no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from gpushare_agent.admission.outcomes import DecisionLog
from gpushare_agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.model.allocations import ClaimRef
from gpushare_agent.model.decision_records import CLAIMS_RESOURCE, Asked, DecisionRecord, Outcome
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import MIB, GpuUuid
from gpushare_agent.model.pods import Pod
from gpushare_agent.node import Metrics


class ClaimOutcomes(Struct, kw_only=True, eq=False):
    """`pods` are those of the node; the one that uses the claim is named in the record."""

    metrics: Metrics
    decisions: DecisionLog
    inventory: Callable[[], GpuInventory]
    pods: Callable[[], Iterable[Pod]]

    def prepared(self, claim: PreparedClaim) -> None:
        self.metrics.admission(CLAIMS_RESOURCE, "allocated", "")
        by_uuid = self.inventory().by_uuid()
        gpus = sorted({gpu.index for one in claim.results if (gpu := by_uuid.get(GpuUuid(one.gpu))) is not None})
        asked = Asked(
            cores=sum(one.cores for one in claim.results),
            memory_bytes=sum(one.memory_mib for one in claim.results) * MIB,
        )
        why = f"the scheduler chose {', '.join(one.device for one in claim.results)} for claim {claim.ref.name}"
        self._record(claim.ref, claim.pod, gpus=tuple(gpus), asked=asked, why=why)

    def refused(self, ref: ClaimRef, refused: Refused) -> None:
        self.metrics.admission(CLAIMS_RESOURCE, "refused", refused.reason.value)
        self._record(ref, "", reason=refused.reason.value, why=refused.detail)

    def _record(
        self,
        ref: ClaimRef,
        pod_name: str,
        *,
        why: str,
        reason: str = "",
        gpus: tuple[int, ...] = (),
        asked: Asked | None = None,
    ) -> None:
        pod, shown_as = next(
            (
                (pod, name)
                for pod in self.pods()
                if pod.namespace == ref.namespace
                for name, claim in pod.claims.items()
                if claim == ref.name
            ),
            (None, ref.name),
        )
        self.decisions.add(
            DecisionRecord(
                number=0,
                at=time.time(),
                namespace=ref.namespace,
                pod=pod.name if pod is not None else pod_name,
                pod_uid=pod.uid if pod is not None else "",
                container=f"claim:{shown_as}",
                resource=CLAIMS_RESOURCE,
                outcome=Outcome.REFUSED if reason else Outcome.ALLOCATED,
                reason=reason,
                explanation=why,
                policy="" if reason else "scheduler",
                gpus=gpus,
                labels=tuple(map(str, gpus)),  # never a MIG instance
                asked=asked,
                candidates=(),
            )
        )
