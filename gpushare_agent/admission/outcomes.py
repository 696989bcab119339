"""Reports the outcome of each admission call: metrics, decision log and the pod's Events. The pod's annotations follow from
the ledger (cluster/pod_annotations.py).

The observer of admission/admission.py and admission/container_starts.py. Never blocks, decides nothing, has no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.admission.decision_log import DecisionLog
from gpushare_agent.admission.decisions.decide import in_short, with_gpus
from gpushare_agent.admission.decisions.identity import Target
from gpushare_agent.admission.decisions.plan import Decision
from gpushare_agent.cluster.events import MAX_MESSAGE_CHARS, PodEvents
from gpushare_agent.model.allocations import Allocation
from gpushare_agent.model.decision_records import DecisionRecord, Outcome
from gpushare_agent.model.errors import Refused
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import GpuUuid
from gpushare_agent.node import Metrics

_GPU_BY_GPU = " GPU by GPU: "


class OutcomeReporter(Struct, kw_only=True, eq=False):
    """Every outcome is counted and, unless it only follows an earlier one of its container, recorded. A refusal becomes an
    Event of its pod."""

    metrics: Metrics
    events: PodEvents
    inventory: Callable[[], GpuInventory]
    decisions: DecisionLog
    wall_clock_ns: Callable[[], int] = time.time_ns

    def allocated(self, decision: Decision, allocation: Allocation) -> None:
        """By a decision without a place nothing was decided now: an init container's IDs are passed on, or a further
        resource of a container is added to those that it has."""
        self.metrics.admission(decision.resource, "allocated", "")
        if decision.placed is not None:
            self._record(with_gpus(decision, allocation.gpus), gpus=allocation.gpus)

    def refused(self, decision: Decision, refused: Refused) -> None:
        self.metrics.admission(decision.resource, "refused", refused.reason.value)
        decision = with_gpus(decision, ())
        self._record(decision, refused)
        if decision.target is not None:
            self.events.refused(decision.target.pod, _with_verdicts(refused, decision))

    def start_refused(self, target: Target | None, resource: str, refused: Refused) -> None:
        self._record(Decision(target=target, resource=resource), refused)
        if target is not None:
            self.events.refused(target.pod, refused)

    def _record(self, decision: Decision, refused: Refused | None = None, gpus: tuple[GpuUuid, ...] = ()) -> None:
        chosen = sorted((gpu for gpu in self.inventory().gpus if gpu.uuid in gpus), key=lambda gpu: gpu.index)
        target = decision.target
        self.decisions.add(
            DecisionRecord(
                number=0,
                at=self.wall_clock_ns() / 1e9,
                namespace=target.pod.namespace if target is not None else "",
                pod=target.pod.name if target is not None else "",
                pod_uid=target.pod.uid if target is not None else "",
                container=target.container.name if target is not None else "",
                resource=decision.resource,
                outcome=Outcome.ALLOCATED if refused is None else Outcome.REFUSED,
                reason=refused.reason.value if refused is not None else "",
                explanation=refused.detail if refused is not None else decision.why,
                policy=decision.policy if refused is None else "",
                gpus=tuple(gpu.index for gpu in chosen),
                labels=tuple(gpu.label for gpu in chosen),
                asked=decision.asked,
                candidates=decision.candidates,
            )
        )

    def taken_ids_offered(self, resource: str, count: int) -> None:
        self.metrics.taken_ids_offered(resource, count)


def _with_verdicts(refused: Refused, decision: Decision) -> Refused:
    """The Event also names what each GPU lacks, as far as its length allows."""
    left = MAX_MESSAGE_CHARS - len(refused.detail) - len(_GPU_BY_GPU) - 8
    verdicts = in_short(decision.candidates, left) if left > 0 else ""
    return replace(refused, detail=f"{refused.detail}{_GPU_BY_GPU}{verdicts}.") if verdicts else refused
