"""Policy fgd: a pod goes to the node and the GPU where the fewest free GPUs become useless to the pods that usually come.

After "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX ATC'23): the
expected fragmentation of a node is the mean, over typical pods by their frequency, of its free GPUs that such a pod could
not use. A pod costs what it adds to that. Two things are added to the paper's measure, each worth it on its public trace
(docs/reference/measurements.md): fuller nodes are preferred where the fragmentation is about the same, and GPUs of a model
that others name are left to them.

Shares of a GPU are counted in `parts`, hundredths of it: of cores or of memory, whichever is more. Pure; nothing depends on
the order of nodes or GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WHOLE = 100
"""Parts of a GPU."""
MOST_KINDS = 60
"""The most frequent kinds of pods stand for all."""
_FIT_GPU, _FIT_CPU = 0.00625, 0.00039
_FIT_GPU_OF_SHARES, _FIT_CPU_OF_SHARES = 0.00375, 0.000086
_SCARCITY = 0.5
"""Of a GPU whose model is asked for by name as much as GPUs are asked for at all."""


class PodKind(NamedTuple):
    """Pods that are alike to a node: CPU in milli-CPUs and main memory in MiB, the number of GPUs and the parts of each.
    `models` are those that they may run on, sorted; none: any."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    parts: int
    models: tuple[str, ...] = ()

    @property
    def is_share(self) -> bool:
        return self.gpus == 1 and self.parts < WHOLE


class FreeNode(NamedTuple):
    """What a node has left; `gpus` are the free parts of each GPU, in ascending order."""

    cpu_milli: int
    memory_mib: int
    gpus: tuple[int, ...]
    model: str = ""

    def fits(self, kind: PodKind) -> bool:
        if self.cpu_milli < kind.cpu_milli or self.memory_mib < kind.memory_mib:
            return False
        if not kind.gpus:
            return True
        if kind.models and self.model not in kind.models:
            return False
        return self.gpus[-kind.gpus] >= kind.parts if kind.gpus <= len(self.gpus) else False

    def choices(self, kind: PodKind) -> list[FreeNode]:
        """What would be left of it, for each GPU that makes a difference; whole GPUs are alike. For a kind that fits."""
        cpu_milli, memory_mib = self.cpu_milli - kind.cpu_milli, self.memory_mib - kind.memory_mib
        if not kind.is_share:
            first = len(self.gpus) - kind.gpus
            gpus = tuple(sorted(free - kind.parts if at >= first else free for at, free in enumerate(self.gpus)))
            return [FreeNode(cpu_milli, memory_mib, gpus, self.model)]
        left = []
        # GPUs that have as much free give the same node: one of them is enough.
        for free in sorted({free for free in self.gpus if free >= kind.parts}):
            others = list(self.gpus)
            others.remove(free)
            left.append(FreeNode(cpu_milli, memory_mib, tuple(sorted([*others, free - kind.parts])), self.model))
        return left


class Cost(NamedTuple):
    """The least is best; `left` is the node with the pod on its best GPU."""

    cost: float
    left: FreeNode


class TypicalPods:
    """`counts` has how many pods of each kind there are, or were of late; `supply` the number of GPUs of each model.

    Without a pod that asks for GPUs nothing is fragmented: then full nodes are preferred. State owned: fragmentations of
    nodes already worked out, for nodes in one state are many.
    """

    def __init__(self, counts: Mapping[PodKind, float], supply: Mapping[str, int]) -> None:
        kinds = sorted(
            ((kind, count) for kind, count in counts.items() if kind.gpus), key=lambda one: (-one[1], one[0])
        )
        total = sum(count for _, count in kinds[:MOST_KINDS])
        self._groups: dict[tuple[int, int, tuple[str, ...]], list[tuple[int, int, float]]] = {}
        for kind, count in kinds[:MOST_KINDS]:
            group = self._groups.setdefault((kind.gpus, kind.parts, kind.models), [])
            group.append((kind.cpu_milli, kind.memory_mib, count / total))
        self._scarcity = _scarcity(kinds, supply)
        self._known: dict[FreeNode, float] = {}

    def fragmentation(self, node: FreeNode) -> float:
        """Parts of GPUs that are free and that a typical pod cannot use, expected."""
        # Of thousands of nodes most are in a few hundred states: worked out once each.
        known = self._known.get(node)
        if known is None:
            free, known = sum(node.gpus), 0.0
            for (gpus, parts, models), kinds in self._groups.items():
                useless = sum(one for one in node.gpus if one < parts)
                fits = not models or node.model in models
                fits = fits and gpus <= len(node.gpus) and node.gpus[-gpus] >= parts
                for cpu_milli, memory_mib, frequency in kinds:
                    has_room = fits and node.cpu_milli >= cpu_milli and node.memory_mib >= memory_mib
                    # A pod that does not fit the node makes all that is free there useless to it; else only the GPUs
                    # that are too full.
                    known += frequency * (useless if has_room else free)
            self._known[node] = known
        return known

    def cost(self, node: FreeNode, kind: PodKind) -> Cost:
        """The cost of placing such a pod on the node, which it fits; of equals the GPU that is fullest."""
        before = self.fragmentation(node)
        fit_gpu, fit_cpu = (_FIT_GPU_OF_SHARES, _FIT_CPU_OF_SHARES) if kind.is_share else (_FIT_GPU, _FIT_CPU)
        # The same for every choice of this node, but it decides between nodes.
        scarce = _SCARCITY * self._scarcity.get(node.model, 0.0) * kind.gpus * kind.parts
        costs = []
        for left in node.choices(kind):
            added = self.fragmentation(left) - before + scarce
            fit = fit_gpu * sum(left.gpus) / WHOLE + fit_cpu * left.cpu_milli / 1000
            # Rounded, for sums of the same numbers in another order differ in the last digits.
            costs.append(Cost(round(added / WHOLE + fit, 9), left))
        return min(costs, key=lambda one: one.cost)


def _scarcity(kinds: list[tuple[PodKind, float]], supply: Mapping[str, int]) -> dict[str, float]:
    """How much each model is asked for by name, for what there is of it; 1 where that is as much as GPUs are asked for at
    all. Pods that may run on several models ask each for its part of them."""
    asked = dict.fromkeys(supply, 0.0)
    for kind, count in kinds:
        named = sum(supply.get(model, 0) for model in kind.models)
        for model in kind.models:
            if named and model in supply:
                asked[model] += count * kind.gpus * kind.parts * supply[model] / named
    all_asked = sum(count * kind.gpus * kind.parts for kind, count in kinds)
    all_supply = sum(supply.values())
    if not all_asked:
        return {}
    return {model: asked[model] / all_asked * all_supply / count for model, count in supply.items() if count}
