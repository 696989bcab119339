"""The pods that usually come, as policy fgd needs them: learnt from those that the cluster has, and those that it had.

A pod counts from its bind to its end. Pods that ended still count, at most as many as there are pods: whenever they are
more, they are halved. So a tenant's present pods count in full, and pods that he starts and ends count for at most half of
all. Pods that wait do not count, because making them costs nothing. Nothing is persisted: after a restart those that are
there are counted again. State owned: the kinds of the pods, the counts, and the typical pods in use.

By numbers of pods, not by time: the same pods in the same order give the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.placement.fragmentation import PodKind, TypicalPods

LEAST_ENDED = 1024
"""So many ended pods count in any case: a cluster that is empty at night has not forgotten them in the morning."""
LEAST_CHANGES, PART_OF_CHANGES = 16, 16
"""The counts are looked at again after so many changes, or the sixteenth of the pods if that is more."""
LEAST_SHIFT = 0.05
"""Half the sum of the frequencies' differences: with other typical pods every cost has to be worked out again."""


class LearntPods:
    def __init__(self) -> None:
        self._kinds: dict[PodUid, PodKind] = {}
        self._present: Counter[PodKind] = Counter()
        self._ended: dict[PodKind, float] = {}
        self._number_ended = 0.0
        self._changes = 0
        self._frequencies: Mapping[PodKind, float] = {}
        self._typical: TypicalPods | None = None

    def put(self, uid: PodUid, kind: PodKind) -> None:
        """A pod is bound."""
        former = self._kinds.get(uid)
        if former != kind:  # a resize gives it another kind
            if former is not None:
                self._leave(former)
            self._kinds[uid] = kind
            self._present[kind] += 1
            self._changes += 1

    def end(self, uid: PodUid) -> None:
        kind = self._kinds.pop(uid, None)
        if kind is None:
            return
        self._leave(kind)
        self._ended[kind] = self._ended.get(kind, 0.0) + 1
        self._number_ended += 1
        self._changes += 1
        if self._number_ended > max(LEAST_ENDED, len(self._kinds)):
            # What is less than half a pod is forgotten, so the kinds are never more than twice the pods.
            self._ended = {kind: count / 2 for kind, count in self._ended.items() if count >= 1}
            self._number_ended = sum(self._ended.values())

    def typical(self, supply: Callable[[], Mapping[str, int]]) -> TypicalPods | None:
        """None where no pod was seen. `supply` gives the number of GPUs of each model."""
        total = len(self._kinds) + self._number_ended
        if self._changes >= max(LEAST_CHANGES, total / PART_OF_CHANGES):
            self._changes = 0
            counts = {kind: count + self._ended.get(kind, 0.0) for kind, count in self._present.items()}
            counts |= {kind: count for kind, count in self._ended.items() if kind not in counts}
            frequencies = {kind: count / total for kind, count in counts.items()}
            if _shift(self._frequencies, frequencies) >= LEAST_SHIFT:
                self._frequencies = frequencies
                self._typical = TypicalPods(frequencies, supply())
        return self._typical

    def _leave(self, kind: PodKind) -> None:
        self._present[kind] -= 1
        if not self._present[kind]:
            del self._present[kind]


def _shift(before: Mapping[PodKind, float], after: Mapping[PodKind, float]) -> float:
    """From 0 to 1, the part of the pods that are of other kinds than before."""
    return sum(max(0.0, frequency - before.get(kind, 0.0)) for kind, frequency in after.items())
