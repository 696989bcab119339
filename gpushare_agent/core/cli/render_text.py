"""The common parts of the commands' output: JSON, YAML, tables, sizes, text that a terminal can take, and progress.

Names of pods, GPUs and reasons come from elsewhere: control characters in them never reach the terminal.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypedDict, TypeVar

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.kit.logs import is_printable, printable
from gpushare_agent.core.model.names import GIB
from gpushare_agent.core.node_report.documents import Cores, GpuState, Memory, ReportedGpu
from gpushare_agent.core.node_report.reported import NO_REASON


class ShownContainer(TypedDict):
    """What every document states about a container."""

    namespace: str


C = TypeVar("C", bound=ShownContainer)
CORES_COLUMN, MEMORY_COLUMN = "GPU CORES", "MEMORY GiB"
PHASE_STYLES = {
    "Running": "green",
    **dict.fromkeys(("Succeeded", "Completed"), "cyan"),
    **dict.fromkeys(("Pending", "Init", "ContainerCreating", "PodInitializing"), "yellow"),
    "Failed": "red",
    "Terminating": "magenta",
    "Unknown": "",
}
PIPE_WIDTH = 10_000
"""The width where no terminal sets one: wider than any row, whose texts end at MAX_TEXT_CHARS, so each is one line."""
GAP = 2
MIN_TEXT_WIDTH = 12
MAX_TEXT_CHARS = 4000
_EMPTY_REASONS = ("cordoned", NO_REASON)
"""Placeholders for a cordon's reason where none was entered: in a node's annotation, and in an agent's document."""


def print_as(form: Form, document: Mapping[str, object], tables: Callable[[int], Sequence[RenderableType]]) -> None:
    """The document, or the tables that `tables` makes for a width."""
    if form in ("json", "yaml"):
        print_report(form, document, "")
    else:
        _print_tables(tables)


def print_report(form: Form, document: Mapping[str, object], text: str) -> None:
    """The document, or the text of a command whose report is lines. A file's name that is no UTF-8 is shown with `?`."""
    if form in ("json", "yaml"):
        text = as_json(document)
    if form == "yaml":
        import yaml

        class Dumper(yaml.SafeDumper):
            def represent_str(self, data: str) -> yaml.ScalarNode:
                # In double quotes alone YAML has escapes.
                style = None if is_printable(data) else '"'
                return self.represent_scalar("tag:yaml.org,2002:str", data, style)

        Dumper.add_representer(str, Dumper.represent_str)
        # Through JSON, so that both forms have the same types: a Path or an enumeration is a text in each.
        text = yaml.dump(json.loads(text), Dumper=Dumper, sort_keys=False, allow_unicode=_prints_unicode()).rstrip("\n")
        text = printable(text, lambda letter: f"\\U{ord(letter):08x}")
    print(text)


def as_json(value: object, *, indent: int | None = 2) -> str:
    """The value as JSON; letters beyond ASCII are escaped where standard output may lack them, and in any case those that
    a terminal obeys."""
    return printable(json.dumps(value, indent=indent, ensure_ascii=not _prints_unicode()))


def _prints_unicode() -> bool:
    # By the codec's own name: UTF8, utf-8 and cp65001 are one.
    return codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"  # a stream of texts alone has none


def in_namespace(containers: Sequence[C], namespace: str) -> list[C]:
    """The containers of one namespace, all where it is empty."""
    return [one for one in containers if namespace in ("", one["namespace"])]


def _print_tables(tables: Callable[[int], Sequence[RenderableType]]) -> None:
    if sys.stdout.isatty():
        console = Console(highlight=False)
        # What is wider than the terminal runs on in the next line, as kubectl's tables do.
        console.print(*tables(console.width), sep="\n", crop=False)
        return
    # rich takes 80 columns for a pipe and would break names that a script reads.
    console = Console(width=PIPE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(*tables(PIPE_WIDTH), sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip())  # the last column is filled up with blanks


def plain(value: object) -> str:
    """One line without control characters."""
    # A reason may hold the whole output of a program.
    text = " ".join(str(value).split())[:MAX_TEXT_CHARS]
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, right: Sequence[str] = ()) -> Table:
    """A table without lines, as kubectl's: a header and a row each. `right` are the columns with numbers, which stay in one
    line. A terminal's width breaks texts, but no column below MIN_TEXT_WIDTH."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        is_number = name in right
        least = min(MIN_TEXT_WIDTH, width_of([name, *(str(row[place]) for row in rows)]))
        table.add_column(
            name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number, min_width=least
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(plain_cell(cell)) for cell in row))
    return table


def plain_cell(text: str) -> str:
    """The text as `plain` has it, with the leading blanks, which indent."""
    return text[: len(text) - len(text.lstrip(" "))] + plain(text)


def width_of(cells: Sequence[str]) -> int:
    return max((cell_len(cell) for cell in cells), default=0)


def gib(size_bytes: float | None) -> str:
    """The size in GiB with at most three digits, as on the dashboard: `80`, `22.4`, `0.25`."""
    if size_bytes is None:
        return "-"
    size = size_bytes / GIB
    digits = 0 if size >= 100 else (1 if size >= 10 else 2)
    # Not `g` alone: a request for bytes in blocks is 1073741824 GiB, not 1.07374e+09.
    return f"{round(size, digits):.15g}"


def of_cores(cores: int, ceiling: int | None) -> str:
    """`30`, elastic `30–60`, in hundredths of a GPU."""
    return f"{cores}–{ceiling}" if ceiling and ceiling > cores else str(cores)


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.0f}"


def load_style(ratio: float) -> str:
    """Colours of a load, at nvitop's bounds."""
    return "green" if ratio < 0.1 else ("yellow" if ratio < 0.75 else "red")


def bar(ratio: float | None, width: int) -> Text:
    """The part in use, in eighths of a cell; dots are the rest, also without colours."""
    if ratio is None:
        return Text(" " * width)
    # The driver's own rounding may give a little more than 1.
    eighths = round(min(1.0, max(0.0, ratio)) * width * 8)
    full = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
    return Text.assemble((full, load_style(ratio)), ("·" * (width - len(full)), "dim"))


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def part_of(part: float, whole: float, shown: Callable[[float], str] = "{:.0f}".format) -> str:
    """`180/800 (22 %)`."""
    return f"{shown(part)}/{shown(whole)}{_share_of(part, whole)}"


def sums(gpus: Sequence[ReportedGpu]) -> tuple[Cores, Memory]:
    """Cores and memory of several GPUs together."""
    cores, memory = [gpu["cores"] for gpu in gpus], [gpu["memory"] for gpu in gpus]
    return (
        {"allocated": sum(one["allocated"] for one in cores), "capacity": sum(one["capacity"] for one in cores)},
        {
            "allocated_bytes": sum(one["allocated_bytes"] for one in memory),
            "capacity_bytes": sum(one["capacity_bytes"] for one in memory),
        },
    )


def allocated_line(cores: Cores, memory: Memory) -> str:
    used, size = memory["allocated_bytes"], memory["capacity_bytes"]
    of_cores = f"{cores['allocated']}/{cores['capacity']} GPU cores{_share_of(cores['allocated'], cores['capacity'])}"
    return f"allocated {of_cores}, memory {gib(used)}/{gib(size)} GiB{_share_of(used, size)}"


def _share_of(part: float, whole: float) -> str:
    return f" ({percent(part / whole)} %)" if whole else ""


def gpu_label(gpu: ReportedGpu) -> str:
    """The index, of a MIG instance NVIDIA's `0:1`."""
    return plain(gpu["mig"]["label"] if "mig" in gpu else gpu["index"])


def is_given_whole(gpu: ReportedGpu) -> bool:
    """Whether it is a MIG instance that takes no shares: it has no cores to offer, and is given by NVIDIA's name alone."""
    return "mig" in gpu and not gpu["cores"]["capacity"]


def is_cordoned(gpu: GpuState) -> bool:
    return gpu["cordoned"] is not None


def is_unhealthy(gpu: GpuState) -> bool:
    """Whether something is wrong with the GPU itself: a cordoned one is not offered, and may be healthy."""
    # A cordoned GPU is offered as Unhealthy too; only a reason says that something else is wrong with it.
    return bool(gpu["health_reason"]) or not (gpu["is_healthy"] or is_cordoned(gpu))


def health_word(gpu: GpuState) -> str:
    """The state of a GPU in the node's document: Healthy, Cordoned, Unhealthy, or the last two together."""
    return ", ".join(word for word, _ in _words_with_reasons(gpu)) or "Healthy"


def health_reasons(gpu: GpuState) -> list[str]:
    """Why, where a reason is known: the operator's words and what is wrong with the GPU itself. Where a GPU is both, each
    begins with its word."""
    reported = {word: reason for word, reason in _words_with_reasons(gpu) if reason}
    # Two reasons next to each other would not say which is the operator's.
    if is_cordoned(gpu) and is_unhealthy(gpu):
        return [f"{word}: {reason}" for word, reason in reported.items()]
    return list(reported.values())


def _words_with_reasons(gpu: GpuState) -> list[tuple[str, str]]:
    reported = (("Cordoned", is_cordoned(gpu), gpu["cordoned"]), ("Unhealthy", is_unhealthy(gpu), gpu["health_reason"]))
    return [
        (word, plain(reason) if reason and reason not in _EMPTY_REASONS else "")
        for word, is_so, reason in reported
        if is_so
    ]


def health_style(word: str) -> str:
    return "green" if word == "Healthy" else ("yellow" if word == "Cordoned" else "red")


def gpus_in_words(nodes: Sequence[tuple[Sequence[ReportedGpu], Sequence[GpuState]]]) -> tuple[str, str]:
    """`8 GPUs`, and `, 3 MIG instances, 1 unhealthy, 2 cordoned`. Of each node what is offered, and the GPUs on which
    instances are made; a GPU that MIG divides is one, whatever instances it has."""
    labels = [
        (number, gpu["mig"]["label"] if "mig" in gpu else str(gpu["index"]))
        for number, (gpus, _) in enumerate(nodes)
        for gpu in gpus
    ]
    labels += [(number, str(gpu["index"])) for number, (_, divided) in enumerate(nodes) for gpu in divided]
    whole = {(number, label.partition(":")[0]) for number, label in labels}
    instances = sum(":" in label for _, label in labels)
    states: list[GpuState] = [gpu for gpus, divided in nodes for gpu in (*gpus, *divided)]
    counts = ((sum(map(is_unhealthy, states)), "unhealthy"), (sum(map(is_cordoned, states)), "cordoned"))
    of_mig = f", {counted(instances, 'MIG instance')}" if instances else ""
    return counted(len(whole), "GPU"), of_mig + "".join(f", {number} {word}" for number, word in counts if number)


Report = Callable[[str, int, int], None]
"""A step, how much of it is done, and how much it is in all."""
LINE_PERIOD_S = 5.0


@contextlib.contextmanager
def progress(unit: str) -> Iterator[Report]:
    """Progress that is counted in `unit`. The bars disappear with the block."""
    # Not standard output, which is often a file while the person watches.
    if not sys.stderr.isatty():
        yield _lines(unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            # Steps are known only as they come: a workload's policies, a volume's files.
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


def _lines(unit: str) -> Report:
    printed_at = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal printed_at
        # A log of a CI job or an init container should not grow by thousands of lines.
        if time.monotonic() - printed_at >= LINE_PERIOD_S:
            printed_at = time.monotonic()
            print(f"{what}: {done} of {total} {unit}", file=sys.stderr, flush=True)

    return report
