"""Reports the outcome of each admission call: metrics, decision log and the pod's Events. The pod's annotations follow from
the ledger (cluster/pod_annotations.py).

The observer of admission/admission.py. Never blocks, decides nothing. State owned: the last decisions (`DecisionLog`), which
dra/claims.py writes too; readers copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.decide import Decision
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kube.events import MAX_MESSAGE_CHARS, PodEvents
from gpushare_agent.core.kube.pods import mistyped_annotations
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.decision_records import Candidate, DecisionRecord, Outcome
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.pods import Pod

_GPU_BY_GPU = " GPU by GPU: "


class OutcomeReporter(Struct, kw_only=True, eq=False):
    """Counts every outcome, and records it unless it only follows an earlier one of its container. A refusal becomes an
    Event of its pod."""

    node: Node
    events: PodEvents
    wall_clock_ns: Callable[[], int] = time.time_ns

    def allocated(self, decision: Decision, allocation: Allocation) -> None:
        """A decision without a place decided nothing now: a further resource of a container is added to those that it
        has."""
        self.node.metrics.admission(decision.resource, "allocated", "")
        if decision.placed is not None:
            self._record(with_gpus(decision, allocation.gpus), gpus=allocation.gpus)

    def refused(self, decision: Decision, refused: Refused) -> None:
        self.node.metrics.admission(decision.resource, "refused", refused.reason.value)
        decision = with_gpus(decision, ())
        self._record(decision, refused)
        if decision.target is not None:
            self.events.refused(decision.target.pod, _with_verdicts(refused, decision))

    def start_refused(self, target: Target | None, resource: str, refused: Refused) -> None:
        self._record(Decision(target=target, resource=resource), refused)
        if target is not None:
            self.events.refused(target.pod, refused)

    def _record(self, decision: Decision, refused: Refused | None = None, gpus: tuple[GpuUuid, ...] = ()) -> None:
        chosen = sorted([(gpu.index, gpu.label) for gpu in self.node.gpus().gpus if gpu.uuid in gpus])
        target = decision.target
        record = DecisionRecord(
            at=self.wall_clock_ns() / 1e9,
            container=target.container.name if target is not None else "",
            resource=decision.resource,
            outcome=Outcome.ALLOCATED if refused is None else Outcome.REFUSED,
            reason=refused.reason.value if refused is not None else "",
            explanation=refused.detail if refused is not None else decision.why,
            policy=decision.policy if refused is None else "",
            gpus=tuple([index for index, _ in chosen]),
            labels=tuple([label for _, label in chosen]),
            asked=decision.asked,
            candidates=decision.candidates,
        )
        self.node.decisions.add(record, target.pod if target is not None else None)


def _with_verdicts(refused: Refused, decision: Decision) -> Refused:
    """The Event also names what each GPU lacks, as far as its length allows."""
    left = MAX_MESSAGE_CHARS - len(refused.detail) - len(_GPU_BY_GPU) - 8
    verdicts = in_short(decision.candidates, left) if left > 0 else ""
    return replace(refused, detail=f"{refused.detail}{_GPU_BY_GPU}{verdicts}.") if verdicts else refused


def with_gpus(decision: Decision, gpus: Collection[GpuUuid]) -> Decision:
    """The same, corrected if the container got other GPUs than planned, which the kubelet's IDs name, or none after all."""
    if {c.uuid for c in decision.candidates if c.is_chosen} == set(gpus):
        return decision
    candidates = tuple(
        replace(
            candidate,
            is_chosen=candidate.uuid in gpus,
            verdict="chosen: the kubelet allocated its IDs"
            if candidate.uuid in gpus
            else ("planned, but the kubelet allocated other IDs" if gpus else "it was planned here")
            if candidate.is_chosen
            else candidate.verdict,
        )
        for candidate in decision.candidates
    )
    return replace(decision, candidates=candidates)


def in_short(candidates: Sequence[Candidate], most_chars: int) -> str:
    """`GPU 0: 20 cores short; GPU 1: …`, for an Event. Empty where not one GPU fits into `most_chars`."""
    text = ""
    for candidate in candidates:
        more = f"{'; ' if text else ''}GPU {candidate.label}: {candidate.verdict}"
        if len(text) + len(more) > most_chars:
            return f"{text}; …" if text else ""
        text += more
    return text


KEPT_DECISIONS = 500
"""In memory, for `explain` and the dashboard."""


class DecisionLog:
    """The last `limit` records, newest last. In memory only: those from before a restart are in the agent's log and the
    Events. After new settings (SIGHUP) the records and their numbers continue."""

    def __init__(self, limit: int) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=limit)
        self._number = 0

    def add(self, record: DecisionRecord, pod: Pod | None = None) -> None:
        """Numbers the record, names the pod in it if that is known, and adds it."""
        self._number += 1
        numbered = replace(record, number=self._number)
        if pod is not None:
            ignored = mistyped_annotations(pod.annotations)
            numbered = replace(numbered, namespace=pod.namespace, pod=pod.name, pod_uid=pod.uid, ignored=ignored)
        self._records.append(numbered)

    def take_over(self, previous: DecisionLog) -> None:
        """Continue the log of the agent before it read its settings again; call it before the first `add`."""
        self._number = previous._number
        self._records.extend(previous._records)

    def newest(self, limit: int, *, namespace: str = "", pod: str = "", after: int = 0) -> tuple[DecisionRecord, ...]:
        """The newest records, `limit` at most, newest first: of one pod if it is named, and only with numbers above
        `after`."""
        found = (
            record
            for record in reversed(self._records)
            if record.number > after
            and (not pod or record.pod == pod)
            and (not namespace or record.namespace == namespace)
        )
        return tuple(record for record, _ in zip(found, range(limit), strict=False))
