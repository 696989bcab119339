"""A node's topology: read from the text of `nvidia-smi topo -m`, and built as a tree from a matrix of links.

Source of the text's format: the tool's output, driver generations 375 to 580. Also accepted: gpu-manager's older word
SOC for SYS, tabs or spaces, Windows line ends, the underline escapes of the header, and anything before the header or after
the matrix. NIC rows and columns, CPU affinity and the GPU's own NUMA ID are ignored. A text that does not say how every
pair of GPUs is connected is refused with the line at fault: a guessed topology would place pods wrongly for ever.

A branch exists where its GPUs reach each other more cheaply than GPUs outside it. NVLink cuts across the PCIe tree on
most machines, so it makes a level only where "has NVLink" is an equivalence relation inside the finest PCIe groups
(bridged pairs). The links themselves stay in the matrix, which is what whole-GPU placement counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.gpus import Branch, Link, LinkKind, Topology

MAX_GPUS = 64

_ESCAPES = re.compile(r"\x1b?\[[0-9;]*m")
_HEADER_WORDS = re.compile(r"GPU NUMA ID|CPU Affinity|NUMA Affinity|\S+")
_GPU = re.compile(r"GPU\d+")
_NVLINK = re.compile(r"NV([1-9]\d{0,2})")
_PCIE_LEVELS = (LinkKind.SYS, LinkKind.NODE, LinkKind.PHB, LinkKind.PXB, LinkKind.PIX)
_KINDS = {**{kind.name: kind for kind in reversed(_PCIE_LEVELS)}, "SOC": LinkKind.SYS}
_CURE = "Copy the whole output of `nvidia-smi topo -m` again."


class ParsedTopology(Struct, frozen=True, kw_only=True):
    """`links[a][b]` for every two GPUs, and each GPU's NUMA node where the text names one."""

    links: tuple[tuple[Link, ...], ...]
    numa: tuple[int | None, ...]


class _Line(Struct, frozen=True, kw_only=True):
    number: int
    text: str

    @property
    def first_word(self) -> str:
        return self.text.split(maxsplit=1)[0] if self.text.strip() else ""

    def error(self, what: str) -> Corrupt:
        return Corrupt(f"topology text, line {self.number}: {what}. {_CURE}")


class _Header(Struct, frozen=True, kw_only=True):
    """The column names; a row's cell for `columns[i]` is its cell i + 1, after the row's own name."""

    line: _Line
    columns: tuple[str, ...]

    @property
    def gpus(self) -> list[str]:
        return [name for name in self.columns if _GPU.fullmatch(name)]


def parse_topology(text: str) -> ParsedTopology:
    """The links and NUMA nodes that a `nvidia-smi topo -m` text states.

    Raises:
        Corrupt: naming the line and what is wrong with it.
    """
    lines = [_Line(number=n, text=_ESCAPES.sub("", raw)) for n, raw in enumerate(text.splitlines(), start=1)]
    header = _find_header(lines)
    rows = _find_rows(header, lines)
    links = tuple(_read_links(header, rows[name], name) for name in header.gpus)
    _check_symmetric(header, rows, links)
    return ParsedTopology(links=links, numa=tuple(_read_numa(header, rows[name]) for name in header.gpus))


def _find_header(lines: list[_Line]) -> _Header:
    for line in lines:
        columns = tuple(_HEADER_WORDS.findall(line.text))
        # The header begins with a GPU's name as rows do; its second word is another GPU, a row's is a link.
        if columns and _GPU.fullmatch(columns[0]):
            if len(columns) > 1 and link_of_word(columns[1]) is not None:
                raise line.error(f"the row of {columns[0]} comes before the header that names the columns")
            header = _Header(line=line, columns=columns)
            _check_header(header)
            return header
    raise Corrupt(f"topology text: no line names a GPU. {_CURE}")


def _check_header(header: _Header) -> None:
    gpus = header.gpus
    if len(gpus) > MAX_GPUS:
        raise header.line.error(f"{len(gpus)} GPUs are named, at most {MAX_GPUS} are supported")
    for index, name in enumerate(gpus):
        # A text from a container has only the container's GPUs: its rows would be other GPUs than the node's indexes.
        if name != f"GPU{index}":
            raise header.line.error(f"column {index + 1} of the GPUs is {name}, not GPU{index}: every GPU is needed")
    if list(header.columns[: len(gpus)]) != gpus:
        raise header.line.error("another column stands between those of the GPUs")


def _find_rows(header: _Header, lines: list[_Line]) -> dict[str, _Line]:
    rows: dict[str, _Line] = {}
    last = header.line
    for line in lines:
        # NIC rows, legend and empty lines are ignored, as is all before the header.
        if line.number <= header.line.number or not _GPU.fullmatch(line.first_word):
            continue
        if line.first_word not in header.gpus:
            raise line.error(f"row {line.first_word} has no column of that name")
        if line.first_word in rows:
            raise line.error(f"row {line.first_word} appears again, first in line {rows[line.first_word].number}")
        rows[line.first_word] = last = line
    missing = [name for name in header.gpus if name not in rows]
    if missing:
        what = f"the header names {len(header.gpus)} GPUs but the row of {', '.join(missing)} is missing"
        raise last.error(f"{what}; this is the last row found")
    return rows


def _cells(header: _Header, line: _Line) -> list[str]:
    """The cells after the row's name. Tabs keep empty cells in place; spaces cannot, so they are the second choice."""
    by_tab = [cell.strip() for cell in line.text.strip("\r\n ").split("\t")][1:]
    return by_tab if len(by_tab) >= len(header.gpus) else line.text.split()[1:]


def _read_links(header: _Header, line: _Line, name: str) -> tuple[Link, ...]:
    cells = _cells(header, line)
    if len(cells) < len(header.gpus):
        raise line.error(f"row {name} has {len(cells)} cells, {len(header.gpus)} are needed")
    return tuple(_read_link(line, name, other, cell) for other, cell in zip(header.gpus, cells, strict=False))


def _read_link(line: _Line, name: str, other: str, cell: str) -> Link:
    if (cell == "X") != (name == other):
        raise line.error(f"the connection of {name} with {other} reads {cell!r}; X belongs on the diagonal, and only X")
    link = link_of_word(cell)
    if link is None:
        raise line.error(f"the connection of {name} with {other} reads {cell!r}; known are {', '.join(_KINDS)} and NV#")
    return link


def link_of_word(word: str) -> Link | None:
    """The link that a word of the matrix names, None where it is none."""
    if word == "X":
        return Link(kind=LinkKind.SELF)
    if match := _NVLINK.fullmatch(word):
        return Link(kind=LinkKind.NVLINK, nvlinks=int(match[1]))
    return Link(kind=_KINDS[word]) if word in _KINDS else None


def _check_symmetric(header: _Header, rows: dict[str, _Line], links: tuple[tuple[Link, ...], ...]) -> None:
    names = header.gpus
    # A link is one thing seen from two ends: where the ends disagree the text was edited or mixed.
    for a, row in enumerate(links):
        for b in range(a):
            if row[b] != links[b][a]:
                other_way = f"line {rows[names[b]].number} says of {names[b]} to {names[a]}"
                raise rows[names[a]].error(f"{names[a]} to {names[b]} is not what {other_way}")


def _read_numa(header: _Header, line: _Line) -> int | None:
    """The NUMA Affinity cell; None where it is absent, N/A, or names several nodes."""
    if "NUMA Affinity" not in header.columns:
        return None
    cells, column = _cells(header, line), header.columns.index("NUMA Affinity")
    cell = cells[column] if column < len(cells) else ""
    return int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 5 else None


KindMatrix = Sequence[Sequence[LinkKind]]


def build_topology(
    links: Sequence[Sequence[Link]], numa: Sequence[int | None], *, pcie: KindMatrix | None = None
) -> Topology:
    """The tree over a symmetric matrix of links.

    `numa` has one entry per GPU. `pcie` gives the PCIe kind of each pair where it is known next to NVLink (NVML reports
    both); without it the PCIe level of NVLink pairs is inferred (`infer_pcie_kinds`).
    """
    kinds = pcie if pcie is not None else infer_pcie_kinds(links, numa)
    gpus = tuple(range(len(links)))
    # The tree is of PCIe kinds: NVLink hides them in the matrix, hence `pcie`, or the inference.
    root = _branch(gpus, _levels(links, kinds, gpus))
    return Topology(links=tuple(tuple(row) for row in links), root=root)


def kind_by_numa(first: int | None, second: int | None) -> LinkKind:
    """The PCIe kind that NUMA nodes alone suggest."""
    return LinkKind.SYS if first is not None and second is not None and first != second else LinkKind.NODE


def infer_pcie_kinds(links: Sequence[Sequence[Link]], numa: Sequence[int | None]) -> list[list[LinkKind]]:
    """The PCIe kind of every pair, also where the matrix entry shows NVLink and so hides it.

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
    # A shared NUMA node is a bound that no path can be worse than; two nodes are known to be SYS apart by their path.
    return min(reached, by_numa) if is_same_node else reached


def _cheapest_worst_links(links: Sequence[Sequence[Link]]) -> list[list[LinkKind | None]]:
    """The worst link of the best path between each pair, over pairs whose PCIe kind is known; None where there is none."""
    size = range(len(links))
    reach: list[list[LinkKind | None]] = [
        [None if link.kind is LinkKind.NVLINK else link.kind for link in row] for row in links
    ]
    # Floyd and Warshall's algorithm with the worst link instead of the sum: `via` must be the outer loop.
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
            parts = components(group, is_together)
            # A level that leaves only single GPUs says nothing of groups: NVLink pairs are looked for in the group
            # above it.
            finer.extend([group] if all(len(part) == 1 for part in parts) else parts)
        groups = finer
    return groups


def _is_nvlink_a_level(has_nvlink: Callable[[int, int], bool], groups: Sequence[tuple[int, ...]]) -> bool:
    group_of = {gpu: number for number, group in enumerate(groups) for gpu in group}
    for a, group_a in group_of.items():
        for b, group_b in group_of.items():
            if a != b and has_nvlink(a, b) and group_a != group_b:
                return False
    # Every part must be fully connected: a chain of NVLinks would put GPUs together that have no link.
    return all(
        all(has_nvlink(a, b) for a in part for b in part if a != b)
        for group in groups
        for part in components(group, has_nvlink)
    )


def _branch(gpus: tuple[int, ...], levels: Sequence[_Level]) -> Branch:
    """The branch over `gpus`; levels that do not divide it are skipped, the last of them names its kind."""
    if len(gpus) == 1:
        return Branch(kind=LinkKind.SELF, gpus=gpus)
    kind = LinkKind.SYS
    for number, (level, is_together) in enumerate(levels):
        parts = components(gpus, is_together)
        if len(parts) <= 1:
            kind = level
        elif any(len(part) > 1 for part in parts):
            children = tuple(_branch(part, levels[number:]) for part in parts)
            return Branch(kind=kind, gpus=gpus, children=children)
        # parts of one GPU each: no pair is together from here on, unless NVLink joins some of them again
    return Branch(kind=kind, gpus=gpus)


def components(gpus: Sequence[int], is_together: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
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


def parts_of(branch: Branch) -> tuple[Branch, ...]:
    """The level below it in the tree: its branches, or its GPUs as branches of one."""
    return branch.children or tuple(Branch(kind=LinkKind.SELF, gpus=(gpu,)) for gpu in branch.gpus)
