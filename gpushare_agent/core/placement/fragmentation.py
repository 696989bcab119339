"""Policy fgd: a pod goes to the node where the fewest free GPUs become useless to the pods that usually come.

After "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX ATC'23): the
expected fragmentation of a node is the mean, over typical pods by their frequency, of its free GPUs that such a pod could
not use. A pod costs what it adds to that. Two things are added to the paper's measure, each worth it on its public trace
(docs/reference/measurements.md): fuller nodes are preferred where the fragmentation is about the same, and GPUs of a model
that others name are left to them. One is left out: within a node a share goes to the fullest GPU that fits, as placement
decides by itself, because choosing the GPU by its cost gives nothing (at most 0.1 points of all GPUs either way).

Shares of a GPU are counted in `parts`, hundredths of it: of cores or of memory, whichever is more. Pure; nothing depends on
the order of nodes or GPUs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WHOLE = 100
"""Parts that make one GPU."""
MOST_KINDS = 60
"""So many of the most frequent kinds of pods stand for all."""
_FIT_GPU, _FIT_CPU = 0.00625, 0.00039
_FIT_GPU_OF_SHARES, _FIT_CPU_OF_SHARES = 0.00375, 0.000086
_MOST_STATES = 32_768
"""So many states of nodes are kept with their fragmentation: some eight mebibytes."""
_SCARCITY = 0.5
"""The cost of a GPU whose model is asked for by name as much as GPUs are asked for at all."""


class PodKind(NamedTuple):
    """Pods that are alike to a node: CPU in milli-CPUs and main memory in MiB, the number of GPUs, the parts of each, and
    the memory of each in MiB where that may be more of a small GPU. `models` are those that they may run on, sorted; none:
    any."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    parts: int
    models: tuple[str, ...] = ()
    gpu_memory_mib: int = 0

    def parts_of(self, gpu_mib: int) -> int:
        """The parts of a GPU with so much memory; more than all where it is too small."""
        return max(self.parts, -(-WHOLE * self.gpu_memory_mib // gpu_mib)) if gpu_mib else self.parts

    @property
    def is_share(self) -> bool:
        return self.gpus == 1 and self.parts < WHOLE


class FreeNode(NamedTuple):
    """The rest of a node; `gpus` are the free parts of each GPU, in ascending order. `gpu_mib` is the memory of the
    smallest; 0: parts say all."""

    cpu_milli: int
    memory_mib: int
    gpus: tuple[int, ...]
    model: str = ""
    gpu_mib: int = 0

    def left(self, kind: PodKind) -> FreeNode:
        """What the node would have left with a share on the fullest GPU that fits."""
        if kind.is_share:
            # Cores and memory may each fit on some GPU and both on none: the emptiest GPU is nearest.
            return self.left_on(kind, min(bisect_left(self.gpus, kind.parts_of(self.gpu_mib)), len(self.gpus) - 1))
        kept = len(self.gpus) - kind.gpus
        return self._replace(
            cpu_milli=self.cpu_milli - kind.cpu_milli,
            memory_mib=self.memory_mib - kind.memory_mib,
            gpus=(0,) * kind.gpus + self.gpus[:kept] if kind.gpus else self.gpus,
        )

    def left_on(self, kind: PodKind, at: int) -> FreeNode:
        """The same with the share on GPU `at`."""
        gpus = self.gpus
        free = max(0, gpus[at] - kind.parts_of(self.gpu_mib))
        to = bisect_left(gpus, free)
        return FreeNode(
            self.cpu_milli - kind.cpu_milli,
            self.memory_mib - kind.memory_mib,
            (*gpus[:to], free, *gpus[to:at], *gpus[at + 1 :]),
            self.model,
            self.gpu_mib,
        )


class TypicalPods:
    """`counts` has how many pods of each kind there are, or were of late; `supply` the number of GPUs of each model.

    Without a pod that asks for GPUs nothing is fragmented: then full nodes are preferred. State owned: fragmentations of
    nodes already worked out, because many nodes are in one state.
    """

    def __init__(self, counts: Mapping[PodKind, float], supply: Mapping[str, int]) -> None:
        kinds = sorted(
            ((kind, count) for kind, count in counts.items() if kind.gpus), key=lambda one: (-one[1], one[0])
        )
        total = sum(count for _, count in kinds[:MOST_KINDS])
        self.kinds: Sequence[tuple[PodKind, float]] = tuple((kind, count / total) for kind, count in kinds[:MOST_KINDS])
        """The kinds that count and their frequencies, the most frequent first."""
        self._scarcity = _scarcity(kinds, supply)
        self._masks: dict[int, Masks] = {}
        self._known: dict[tuple[int, tuple[int, ...], int], float] = {}

    def masks(self, gpu_mib: int) -> Masks:
        """For nodes with GPUs of such memory."""
        masks = self._masks.get(gpu_mib)
        if masks is None:
            masks = self._masks[gpu_mib] = Masks(self.kinds, gpu_mib)
        return masks

    def fragmentation_of(self, masks: Masks, roomy: int, gpus: tuple[int, ...]) -> float:
        """Parts of GPUs that are free and that a typical pod cannot use, expected. `roomy` as the masks give it."""
        # CPU and memory differ between all nodes, but few differ in the kinds of pods that they let in: most of thousands of
        # nodes are in a few hundred states.
        key = roomy, gpus, masks.gpu_mib
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_STATES:
                self._known.clear()
            known = self._known[key] = masks.fragmentation(roomy, gpus)
        return known

    def scarcity(self, model: str) -> float:
        """How much the model is asked for by name, in relation to how many GPUs of it there are."""
        return self._scarcity.get(model, 0.0)


class KindCosts:
    """The costs of one kind of pod on many nodes. State owned: what was worked out for nodes in the same state, without
    bounds: each question makes a new one."""

    def __init__(self, typical: TypicalPods, kind: PodKind) -> None:
        self._typical = typical
        self._kind = kind
        self._fit_gpu, self._fit_cpu = (
            (_FIT_GPU_OF_SHARES, _FIT_CPU_OF_SHARES) if kind.is_share else (_FIT_GPU, _FIT_CPU)
        )
        self._known: dict[tuple[int, int, tuple[int, ...], int, str], float] = {}

    def of(self, node: FreeNode) -> float:
        """The cost of placing such a pod on the node, which it fits; the least is best."""
        kind, masks = self._kind, self._typical.masks(node.gpu_mib)
        left_milli = node.cpu_milli - kind.cpu_milli
        before = masks.roomy(node.model, node.cpu_milli, node.memory_mib)
        after = masks.roomy(node.model, left_milli, node.memory_mib - kind.memory_mib)
        key = before, after, node.gpus, node.gpu_mib, node.model
        known = self._known.get(key)
        if known is None:
            left, typical = node.left(kind).gpus, self._typical
            added = typical.fragmentation_of(masks, after, left) - typical.fragmentation_of(masks, before, node.gpus)
            added += _SCARCITY * typical.scarcity(node.model) * kind.gpus * kind.parts
            known = self._known[key] = (added + self._fit_gpu * sum(left)) / WHOLE
        # Rounded, because sums of the same numbers in another order differ in the last digits.
        return round(known + self._fit_cpu * left_milli / 1000, 9)


class Masks:
    """Sets of kinds as the bits of integers: one node is compared with sixty kinds in a few microseconds, and a scheduler
    waits for thousands of nodes. State owned: sums of frequencies already worked out."""

    def __init__(self, kinds: Sequence[tuple[PodKind, float]], gpu_mib: int) -> None:
        self.gpu_mib = gpu_mib
        self._all = 1 if kinds else 0
        self._frequencies = [frequency for _, frequency in kinds]
        self._kinds = [kind for kind, _ in kinds]
        self._cpus = _at_most([kind.cpu_milli for kind in self._kinds])
        self._memories = _at_most([kind.memory_mib for kind in self._kinds])
        parts = [kind.parts_of(gpu_mib) for kind in self._kinds]
        self._of_parts = [_mask(one <= free for one in parts) for free in range(WHOLE + 1)]
        counts = sorted({kind.gpus for kind in self._kinds})
        self._of_counts = [(count, _mask(kind.gpus == count for kind in self._kinds)) for count in counts]
        self._of_models: dict[str, int] = {}
        self._sums: dict[int, float] = {}

    def roomy(self, model: str, cpu_milli: int, memory_mib: int) -> int:
        """The kinds for which a node with so much left has the model, the CPU and the main memory."""
        of_model = self._of_models.get(model)
        if of_model is None:
            of_model = _mask(not kind.models or model in kind.models for kind in self._kinds)
            self._of_models[model] = of_model
        (cpus, of_cpus), (memories, of_memories) = self._cpus, self._memories
        return of_model & of_cpus[bisect_right(cpus, cpu_milli)] & of_memories[bisect_right(memories, memory_mib)]

    def fragmentation(self, roomy: int, gpus: tuple[int, ...]) -> float:
        able, of_parts = 0, self._of_parts
        for count, of_count in self._of_counts:
            if count <= len(gpus):
                able |= of_count & of_parts[gpus[-count]]
        able &= roomy
        # A pod that does not fit the node makes all that is free there useless to it; else only the GPUs that are too full.
        return sum(free * (self._all - self._sum(able & of_parts[free])) for free in gpus)

    def _sum(self, mask: int) -> float:
        known = self._sums.get(mask)
        if known is None:
            known = sum(one for at, one in enumerate(self._frequencies) if mask >> at & 1)
            self._sums[mask] = known
        return known


def _mask(members: Iterable[bool]) -> int:
    return sum(1 << at for at, is_member in enumerate(members) if is_member)


def _at_most(asked: Sequence[int]) -> tuple[list[int], list[int]]:
    """Amounts in ascending order, and the members that ask for less than the first, at most the first, and so on."""
    amounts = sorted(set(asked))
    return amounts, [0, *(_mask(one <= amount for one in asked) for amount in amounts)]


def _scarcity(kinds: list[tuple[PodKind, float]], supply: Mapping[str, int]) -> dict[str, float]:
    """How much each model is asked for by name, in relation to how many GPUs of it there are; 1 where that is as much as
    GPUs are asked for at all. Pods that may run on several models ask each for its part of them."""
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
