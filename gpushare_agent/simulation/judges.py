"""Which nodes a pod fits, and which of them are best: by the extender, or by kube-scheduler's sums alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.model.pods import Pod
from gpushare_agent.simulation.sums import NodeSums
from gpushare_agent.simulation.workload import Shape

_SHAPES_KEPT = 64


class Choice(NamedTuple):
    """Those nodes to which the scheduler would bind the pod, in their order, and of them those with the best score."""

    fitting: Sequence[str]
    best: Sequence[str]


class ExtenderJudge:
    """Asks the extender's filter and prioritize, and once more only where the node has changed since: neither depends on
    anything else. State owned: the scores of fitting nodes, by shape."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._scores: OrderedDict[Shape, dict[str, int]] = OrderedDict()

    def choose(self, pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        known = self._scores_of(shape)
        scores = list(map(known.get, names))
        if None in scores:
            unknown = [position for position, score in enumerate(scores) if score is None]
            asked = [names[position] for position in unknown]
            known.update(self._state.prioritize(pod, self._state.filter(pod, asked).fitting))
            for position in unknown:
                scores[position] = known.get(names[position])
        if None not in scores:
            return Choice(names, _highest(names, scores))
        fitting = [name for name, score in zip(names, scores, strict=True) if score is not None]
        return Choice(fitting, _highest(fitting, [score for score in scores if score is not None]))

    def changed(self, name: str) -> None:
        """Something was bound to the node, or ended there."""
        for scores in self._scores.values():
            scores.pop(name, None)

    def _scores_of(self, shape: Shape) -> dict[str, int]:
        scores = self._scores.get(shape)
        if scores is None:
            scores = self._scores[shape] = {}
            if len(self._scores) > _SHAPES_KEPT:
                self._scores.popitem(last=False)
        self._scores.move_to_end(shape)
        return scores


class SumsJudge:
    """kube-scheduler's defaults. What it scores is CPU and main memory, which are not simulated; they grow with the number
    of pods, as the sums of our resources do, so those stand for them."""

    def __init__(self, sums: NodeSums) -> None:
        self._sums = sums

    def choose(self, pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        return self.best_of(self._sums.fitting(names, shape))

    def best_of(self, fitting: Sequence[str]) -> Choice:
        return Choice(fitting, _highest(fitting, self._sums.free_parts(fitting)))

    def changed(self, name: str) -> None:
        """Nothing is kept here."""


def _highest(names: Sequence[str], scores: Sequence[float | None]) -> list[str]:
    """No score is None."""
    top = max(scores, default=None)  # type: ignore[type-var]  # see above
    if top is not None and scores.count(top) == 1:  # quicker, and the usual case of sums
        return [names[scores.index(top)]]
    return [name for name, score in zip(names, scores, strict=True) if score == top]
