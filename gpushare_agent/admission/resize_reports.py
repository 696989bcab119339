"""What becomes of the annotation `gpushare-agent/resize`, in Events of the pods and in the annotation with the status.

State owned: which refusals and sizes were reported, when each pod had its last Event, and what each pod's claims have of its
status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from gpushare_agent.admission.allocation_cache import AllocationCache
from gpushare_agent.admission.decisions.resize import (
    ResizePolicy,
    ResizeReason,
    ResizeRefused,
    bounded_status,
    describe,
    shown_name,
    status_text,
)
from gpushare_agent.cluster.events import PodEvents
from gpushare_agent.cluster.pod_annotations import PodAnnotations
from gpushare_agent.kit.report_once import ReportOnce
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.names import RESIZE_ANNOTATION, RESIZE_STATUS_ANNOTATION, PodUid
from gpushare_agent.model.pods import Pod

EVENT_PAUSE_S = 5.0
"""Between two Events of one pod: who may write an annotation may write it often."""
MAX_REPORTED = 1024
RESIZED = "ShareResized"
RESIZE_REFUSED = "ShareResizeRefused"


class FindsPods(Protocol):
    def get(self, uid: PodUid) -> Pod | None: ...


class Observer(Protocol):
    def resized(self, pod: Pod, detail: str) -> None: ...
    def resize_refused(self, pod: Pod, detail: str) -> None: ...
    def resize_status(self, pod: Pod, status: str | None) -> None: ...


class ResizeReporter(Struct, eq=False):
    """To the pod's Events and annotations; of a claim, which comes as a pod, to those of the pods that use it. State owned:
    of each pod its own status and its claims'."""

    annotations: PodAnnotations
    events: PodEvents
    using: Callable[[PodUid], Sequence[Pod]]
    _parts: dict[PodUid, dict[PodUid, str]] = field(default_factory=dict)

    def resized(self, pod: Pod, detail: str) -> None:
        for user in self.using(pod.uid):
            self.events.noted(user, RESIZED, detail)

    def resize_refused(self, pod: Pod, detail: str) -> None:
        for user in self.using(pod.uid):
            self.events.warned(user, RESIZE_REFUSED, detail)

    def resize_status(self, pod: Pod, status: str | None) -> None:
        for uid in [uid for uid in self._parts if not self.using(uid)]:
            del self._parts[uid]
        for user in self.using(pod.uid):
            parts = self._parts.setdefault(user.uid, {})
            parts.pop(pod.uid, None)
            if status is not None:
                parts[pod.uid] = status
            entries = [entry for uid in sorted(parts) for entry in parts[uid].split(";")]
            self.annotations.resize_status(user, bounded_status(entries))


class ResizeRound(Struct):
    """What one round found: why shares keep their sizes, which are not enforced yet, and containers that annotations name
    and their pods do not have."""

    refused: dict[ContainerKey, ResizeRefused] = field(default_factory=dict)
    unknown: dict[PodUid, str] = field(default_factory=dict)
    unenforced: dict[ContainerKey, str] = field(default_factory=dict)


class ResizeReports(Struct, kw_only=True, eq=False):
    """`report` after each round, while the pods are known."""

    cache: AllocationCache
    pods: FindsPods
    policy: ResizePolicy
    observer: Observer
    clock: Callable[[], float] = time.monotonic
    _reported_refusals: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_REPORTED))
    _reported_sizes: ReportOnce = field(default_factory=lambda: ReportOnce(MAX_REPORTED))
    _reported_at: dict[PodUid, float] = field(default_factory=dict)

    def report(self, found: ResizeRound) -> None:
        uids = {key.pod_uid for key in (*self.cache.resized, *found.refused)} | found.unknown.keys()
        for uid in [uid for uid in self._reported_at if self.pods.get(uid) is None]:
            del self._reported_at[uid]
        reasons = {key: one.reason for key, one in found.refused.items()}
        for uid in sorted(uids):
            if (pod := self.pods.get(uid)) is not None:
                self._report_pod(pod, found, reasons)
        self._remove_status(uids)

    def _report_pod(self, pod: Pod, found: ResizeRound, reasons: Mapping[ContainerKey, ResizeReason]) -> None:
        """The status always; an Event for each refusal and each size, once, and not too often."""
        names = self.policy.names
        text = pod.annotations.get(RESIZE_ANNOTATION, "")
        allocations = self.cache.of_pod(pod.uid)
        status = status_text(allocations, self.cache.resized, reasons, found.unenforced)
        if pod.annotations.get(RESIZE_STATUS_ANNOTATION) != status:
            self.observer.resize_status(pod, status)
        if self.clock() - self._reported_at.get(pod.uid, float("-inf")) < EVENT_PAUSE_S:
            return
        if (unknown := found.unknown.get(pod.uid)) is not None:
            detail = f"{RESIZE_ANNOTATION} names a container {unknown}, which the pod does not have."
            self._event_once(self._reported_refusals, f"{pod.uid}/", text, pod, detail, is_refusal=True)
        for allocation in allocations:
            key, subject = allocation.key, f"{pod.uid}/{allocation.key.container}"
            share = self.cache.resized.get(key)
            name = f"{'Container' if allocation.claim is None else 'Claim'} {shown_name(allocation, allocations)}"
            if (refused := found.refused.get(key)) is not None:
                detail = f"{name} keeps its share: {refused.detail}"
                self._event_once(
                    self._reported_refusals, subject, f"{text} {refused.reason}", pod, detail, is_refusal=True
                )
            elif key not in found.unenforced and share is not None:
                self._reported_refusals.is_over(subject)
                detail = f"{name} has {describe(allocation.size, share.kind, names)} now; allocated were"
                detail = f"{detail} {describe(allocation.allocated_size, share.kind, names)}."
                self._event_once(self._reported_sizes, subject, detail, pod, detail, is_refusal=False)

    def _event_once(
        self, reported: ReportOnce, subject: str, what: str, pod: Pod, detail: str, *, is_refusal: bool
    ) -> None:
        if not reported.is_new(what, subject):
            return
        self._reported_at[pod.uid] = self.clock()
        (self.observer.resize_refused if is_refusal else self.observer.resized)(pod, detail)

    def _remove_status(self, present: set[PodUid]) -> None:
        for allocation in self.cache:
            uid = allocation.key.pod_uid
            pod = self.pods.get(uid) if uid not in present else None
            if pod is not None and RESIZE_STATUS_ANNOTATION in pod.annotations:
                self.observer.resize_status(pod, None)
