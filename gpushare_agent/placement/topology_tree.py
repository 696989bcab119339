"""Builds the topology tree from a matrix of links, and prints it.

A branch exists where its GPUs reach each other more cheaply than GPUs outside it. NVLink cuts across the PCIe tree on
most machines, so it makes a level only where "has NVLink" is an equivalence relation inside the finest PCIe groups
(bridged pairs). The links themselves stay in the matrix, which is what whole-GPU placement counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpushare_agent.model.topology import Branch, Link, LinkKind, Topology

_PCIE_LEVELS = (LinkKind.SYS, LinkKind.NODE, LinkKind.PHB, LinkKind.PXB, LinkKind.PIX)

KindMatrix = Sequence[Sequence[LinkKind]]


def build_topology(
    links: Sequence[Sequence[Link]], numa: Sequence[int | None], *, pcie: KindMatrix | None = None
) -> Topology:
    """The tree over a symmetric matrix of links.

    `numa` has one entry per GPU. `pcie` gives the PCIe kind of each pair where it is known besides NVLink (NVML reports
    both); without it the PCIe level of NVLink pairs is inferred (`infer_pcie_kinds`).
    """
    kinds = pcie if pcie is not None else infer_pcie_kinds(links, numa)
    gpus = tuple(range(len(links)))
    root = _branch(gpus, _levels(links, kinds, gpus))
    return Topology(links=tuple(tuple(row) for row in links), root=root)


def kind_by_numa(first: int | None, second: int | None) -> LinkKind:
    """The PCIe kind that NUMA nodes alone suggest."""
    return LinkKind.SYS if first is not None and second is not None and first != second else LinkKind.NODE


def infer_pcie_kinds(links: Sequence[Sequence[Link]], numa: Sequence[int | None]) -> list[list[LinkKind]]:
    """The PCIe kind of every pair, also of those whose matrix entry shows NVLink and so hides it.

    A hidden pair is at most as far apart as the worst link of any path over known pairs; the best such path is taken.
    GPUs of one NUMA node are also at most NODE apart, GPUs of two are SYS apart.
    """
    reach = _cheapest_worst_links(links)
    size = range(len(links))
    return [[_pcie_kind(links[a][b].kind, reach[a][b], numa[a], numa[b]) for b in size] for a in size]


def _pcie_kind(shown: LinkKind, reached: LinkKind | None, numa_a: int | None, numa_b: int | None) -> LinkKind:
    if shown is not LinkKind.NVLINK:
        return shown
    by_numa = kind_by_numa(numa_a, numa_b)
    if reached is None:
        return by_numa
    is_same_node = numa_a is not None and numa_a == numa_b
    return min(reached, by_numa) if is_same_node else reached


def _cheapest_worst_links(links: Sequence[Sequence[Link]]) -> list[list[LinkKind | None]]:
    """For each pair, the worst link of the best path over pairs whose PCIe kind is known; None where there is none."""
    size = range(len(links))
    reach: list[list[LinkKind | None]] = [
        [None if link.kind is LinkKind.NVLINK else link.kind for link in row] for row in links
    ]
    for via in size:
        for a in size:
            first = reach[a][via]
            if first is None:
                continue
            for b in size:
                second, known = reach[via][b], reach[a][b]
                if second is not None and (known is None or max(first, second) < known):
                    reach[a][b] = max(first, second)
    return reach


_Level = tuple[LinkKind, Callable[[int, int], bool]]


def _levels(links: Sequence[Sequence[Link]], kinds: KindMatrix, gpus: tuple[int, ...]) -> list[_Level]:
    """Coarse to fine: each level's kind, and whether two GPUs are together on it."""

    def within(limit: LinkKind) -> Callable[[int, int], bool]:
        return lambda a, b: kinds[a][b] <= limit

    def has_nvlink(a: int, b: int) -> bool:
        return links[a][b].kind is LinkKind.NVLINK

    levels: list[_Level] = [(kind, within(kind)) for kind in _PCIE_LEVELS]
    if _is_nvlink_a_level(has_nvlink, _finest_groups(gpus, levels)):
        levels.append((LinkKind.NVLINK, has_nvlink))
    return levels


def _finest_groups(gpus: tuple[int, ...], levels: Sequence[_Level]) -> list[tuple[int, ...]]:
    """The groups of several GPUs that no PCIe level divides into smaller groups of several GPUs."""
    groups: list[tuple[int, ...]] = [gpus] if gpus else []
    for _, is_together in levels:
        finer: list[tuple[int, ...]] = []
        for group in groups:
            parts = _components(group, is_together)
            finer.extend([group] if all(len(part) == 1 for part in parts) else parts)
        groups = finer
    return groups


def _is_nvlink_a_level(has_nvlink: Callable[[int, int], bool], groups: Sequence[tuple[int, ...]]) -> bool:
    group_of = {gpu: number for number, group in enumerate(groups) for gpu in group}
    for a, group_a in group_of.items():
        for b, group_b in group_of.items():
            if a != b and has_nvlink(a, b) and group_a != group_b:
                return False
    return all(
        all(has_nvlink(a, b) for a in part for b in part if a != b)
        for group in groups
        for part in _components(group, has_nvlink)
    )


def _branch(gpus: tuple[int, ...], levels: Sequence[_Level]) -> Branch:
    """The branch over `gpus`; levels that do not divide it are skipped, the last of them names its kind."""
    if len(gpus) == 1:
        return Branch(kind=LinkKind.SELF, gpus=gpus)
    kind = LinkKind.SYS
    for number, (level, is_together) in enumerate(levels):
        parts = _components(gpus, is_together)
        if len(parts) <= 1:
            kind = level
        elif any(len(part) > 1 for part in parts):
            children = tuple(_branch(part, levels[number:]) for part in parts)
            return Branch(kind=kind, gpus=gpus, children=children)
        # parts of one GPU each: no pair is together from here on, unless NVLink joins some of them again
    return Branch(kind=kind, gpus=gpus)


def _components(gpus: Sequence[int], is_together: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
    """Groups of GPUs joined directly or through others, each sorted, ordered by their lowest GPU."""
    left = list(gpus)
    groups = []
    while left:
        group, todo = [], [left.pop(0)]
        while todo:
            gpu = todo.pop()
            group.append(gpu)
            joined = [other for other in left if is_together(gpu, other)]
            left = [other for other in left if other not in joined]
            todo.extend(joined)
        groups.append(tuple(sorted(group)))
    return sorted(groups)


def render_tree(
    topology: Topology, notes: Mapping[int, str] | None = None, labels: Mapping[int, str] | None = None
) -> str:
    """The tree as text, one line per branch (`PIX:3` is three GPUs behind one switch) and GPU.

    `notes` adds a remark to a GPU's line, by index; `labels` are GPUs' names for people where these are not their indexes.
    """
    root = topology.root
    lines = [f"ROOT:{len(root.gpus)}"]
    if root.gpus:
        lines += _render(root, 1, notes or {}, labels or {})
    return "\n".join(lines)


def _render(branch: Branch, depth: int, notes: Mapping[int, str], labels: Mapping[int, str]) -> list[str]:
    margin = "|  " * (depth - 1) + "|--"
    if branch.kind is LinkKind.SELF:
        gpu = branch.gpus[0]
        return [f"{margin}GPU{labels.get(gpu, gpu)}{' ' + notes[gpu] if gpu in notes else ''}"]
    name = "NV" if branch.kind is LinkKind.NVLINK else branch.kind.name
    children = branch.children or tuple(Branch(kind=LinkKind.SELF, gpus=(gpu,)) for gpu in branch.gpus)
    return [f"{margin}{name}:{len(branch.gpus)}"] + [
        line for child in children for line in _render(child, depth + 1, notes, labels)
    ]
