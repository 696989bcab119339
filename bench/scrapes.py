"""What programs count about themselves at /metrics: one scrape, differences of two, histograms as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from bench.results import Row

Labels = tuple[tuple[str, str], ...]
Counts = Mapping[tuple[str, Labels], float]
"""The samples of one scrape, by name and labels."""
NOTE = (
    "the mean instead of the median, and the upper bound of the histogram's bucket with the p99; by the program's own "
    "clock"
)


def read_counts(text: str) -> Counts:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def difference(before: Counts, after: Counts) -> Counts:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def histogram_row(
    what: str,
    name: str,
    labels: Labels,
    scrapes: Sequence[Counts],
    *,
    target_median: float | None = None,
    target_p99: float | None = None,
) -> list[Row]:
    """Of all scrapes together; empty where nothing was counted. `name` is in seconds."""

    def total(suffix: str, wanted: Labels) -> float:
        return sum(counts.get((name + suffix, wanted), 0.0) for counts in scrapes)

    calls = int(total("_count", labels))
    if not calls:
        return []
    keys = {key[1] for counts in scrapes for key in counts if key[0] == f"{name}_bucket" and set(labels) <= set(key[1])}
    bounds = sorted((float(dict(key)["le"]), total("_bucket", key)) for key in keys)
    p99_ms = next(bound for bound, count in bounds if count >= 0.99 * calls) * 1000
    return [
        Row(
            name=what,
            unit="ms",
            runs=calls,
            median=total("_sum", labels) * 1000 / calls,
            p99=p99_ms,
            target_median=target_median,
            target_p99=target_p99,
            note=NOTE,
        )
    ]
