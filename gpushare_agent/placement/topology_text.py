"""Reads the text that `nvidia-smi topo -m` prints.

Source of the format: the tool's output, driver generations 375 to 580. Accepted besides: gpu-manager's older word SOC
for SYS, tabs or spaces, Windows line ends, the underline escapes of the header, and anything before the header or after
the matrix. NIC rows and columns, CPU affinity and the GPU's own NUMA ID are ignored. A text that does not say how every
pair of GPUs is connected is refused with the line at fault: a guessed topology would place pods wrongly for ever.
"""

from __future__ import annotations

import re

from msgspec import Struct

from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.topology import Link, LinkKind

MAX_GPUS = 64

_ESCAPES = re.compile(r"\x1b?\[[0-9;]*m")
_HEADER_WORDS = re.compile(r"GPU NUMA ID|CPU Affinity|NUMA Affinity|\S+")
_GPU = re.compile(r"GPU\d+")
_NVLINK = re.compile(r"NV([1-9]\d{0,2})")
_KINDS = {
    "PIX": LinkKind.PIX,
    "PXB": LinkKind.PXB,
    "PHB": LinkKind.PHB,
    "NODE": LinkKind.NODE,
    "SYS": LinkKind.SYS,
    "SOC": LinkKind.SYS,
}
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
        if name != f"GPU{index}":
            raise header.line.error(f"column {index + 1} of the GPUs is {name}, not GPU{index}: every GPU is needed")
    if list(header.columns[: len(gpus)]) != gpus:
        raise header.line.error("another column stands between those of the GPUs")


def _find_rows(header: _Header, lines: list[_Line]) -> dict[str, _Line]:
    rows: dict[str, _Line] = {}
    last = header.line
    for line in lines:
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
