"""Metrics of states: series made from the node's snapshot, written as text, kept until the text is old.

Thousands of rows for a full node, so they do not go through the metrics library: its objects and their texts cost ten
times as much (44 ms for 3,265 rows, against 3.3 ms; measured). The text is made at most once for each round of sampling
and each change, however often it is read. Not for counters: metrics/agent.py.

State owned: the texts of the node, and when they were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

from msgspec import Struct, field
from prometheus_client import Metric

MAX_LABEL = 253
"""Longest name of a pod. What is longer did not come through the API server, and is cut."""
MAX_REMEMBERED = 4096
_DIGITS = 6

Kind = Literal["gauge", "counter"]
Number = int | float
Labels = str
"""`a="1",b="2"`, escaped, by label name."""


class Series(Struct, frozen=True):
    """One metric. A counter's `name` is that of its samples, with `_total`. Of `lines` each has one or several samples."""

    name: str
    help: str
    kind: Kind = "gauge"
    lines: Sequence[str] = ()


class NodePage(Struct, eq=False):
    """`text` calls `series` when its text is older than `max_age_s` or was `expire`d, with whether all series of a container
    are wanted. `prepared` does what takes long of it before, a part at a time."""

    series: Callable[[bool], Iterable[Series]]
    max_age_s: float
    prepared: Callable[[bool], Iterable[object]] = lambda _: ()
    clock: Callable[[], float] = time.monotonic
    _texts: dict[tuple[bool, bool], tuple[float, bytes]] = field(default_factory=dict)

    def expire(self) -> None:
        """Something changed: the next reader gets a new text."""
        self._texts.clear()

    def text(self, *, is_openmetrics: bool, is_all: bool = False) -> bytes:
        """The page in one of the formats, without OpenMetrics' last line."""
        made_at, text = self._texts.get((is_openmetrics, is_all), (float("-inf"), b""))
        if self.clock() - made_at >= self.max_age_s:
            # Prometheus takes a family without rows, but each costs two lines a scrape.
            shown = [series for series in self.series(is_all) if any(series.lines)]
            parts = [_text(series, is_openmetrics=is_openmetrics) for series in shown]
            # A text for each format, because a counter's name differs; most nodes are only ever asked for one.
            text = "".join(parts).encode()
            self._texts[is_openmetrics, is_all] = self.clock(), text
        return text


@lru_cache(maxsize=MAX_REMEMBERED)
def labels_text(**values: str) -> Labels:
    """Remembered: a node's rows have the same labels from one text to the next, and making them is half of its cost."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(values.items()))


def line(name: str, labels: Labels, value: Number) -> str:
    """One sample, with the end of its line."""
    return f"{name}{{{labels}}} {value!r}\n"


def _escaped(value: str) -> str:
    # The backslash first: it would double those of the other escapes.
    return value[:MAX_LABEL].replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def rounded(value: Number) -> Number:
    """Sums of ratios without the noise of their addition."""
    # Bytes and counts stay whole: as a float they would lose digits from 2**53 on.
    return value if isinstance(value, int) else round(value, _DIGITS)


def families_text(families: Iterable[Metric], *, is_openmetrics: bool) -> bytes:
    """The library's families. Its own writer checks each letter of each name: four times the cost."""
    parts: list[str] = []
    for family in families:
        # Prometheus' text has _total in the family's name, OpenMetrics in the samples' alone.
        name = f"{family.name}_total" if family.type == "counter" and not is_openmetrics else family.name
        parts.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        parts += [
            f"{sample.name}{{{labels_text(**sample.labels)}}} {sample.value!r}\n"
            if sample.labels
            else f"{sample.name} {sample.value!r}\n"
            for sample in family.samples
        ]
    return "".join(parts).encode()


def _text(series: Series, *, is_openmetrics: bool) -> str:
    name = series.name
    family = name.removesuffix("_total") if is_openmetrics and series.kind == "counter" else name
    return f"# HELP {family} {series.help}\n# TYPE {family} {series.kind}\n{''.join(series.lines)}"
