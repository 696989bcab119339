"""The result of `simulate` as tables. Pure: results in, tables out; the JSON document is simulation/results.py."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.render_text import grid
from gpushare_agent.simulation.results import PolicyResult, Waits
from gpushare_agent.simulation.schedulers import NoNode
from gpushare_agent.simulation.workload import Cluster, Size, Workload

_NO_NODE_TEXTS = {
    NoNode.FULL: "no node had enough in sum",
    NoNode.FRAGMENTED: "a node had enough in sum, but none on its GPUs",
    NoNode.NEVER: "no node could serve it, were it empty",
}


def tables(results: Sequence[PolicyResult], cluster: Cluster, workload: Workload) -> list[RenderableType]:
    skipped = "".join(f"; {count} left out: {why}" for why, count in sorted(workload.skipped.items()))
    return [
        Text(
            f"{len(cluster.nodes)} nodes with {cluster.number_of_gpus} GPUs ({cluster.source}), "
            f"{len(workload.arrivals)} pods within {span(workload.window_s)} ({workload.source}){skipped}"
        ),
        Text(""),
        _summary(results),
        Text(""),
        _waits(results),
        *_reasons(results),
    ]


def _summary(results: Sequence[PolicyResult]) -> RenderableType:
    columns = (
        "POLICY",
        "CORES",
        "MEMORY",
        "HIGHEST",
        "UNUSABLE",
        "RAN",
        "MEAN WAIT",
        "REFUSED",
        "GIVEN UP",
        "ALL OVER",
    )
    rows = []
    for result in results:
        measured, tally = result.measured, result.tally
        rows.append(
            (
                result.policy.value,
                _percent(measured.cores_part),
                _percent(measured.memory_part),
                _percent(measured.highest_cores_part),
                _percent(measured.fragmentation),
                str(result.ran),
                span(result.waits().mean_s),
                str(tally.refused_pods),
                str(tally.gave_up),
                span(result.took_s),
            )
        )
    return grid(columns, rows, right=columns[1:])


def _waits(results: Sequence[PolicyResult]) -> RenderableType:
    columns = ("WAITS OF", "POLICY", "RAN", "WAITED", "MEAN", "P50", "P95", "LONGEST")
    rows = [(size.value, result.policy.value, *_waits_cells(result.waits(size))) for size in Size for result in results]
    return grid(columns, rows, right=columns[2:])


def _waits_cells(waits: Waits) -> tuple[str, ...]:
    return (
        str(waits.ran),
        str(waits.waited),
        span(waits.mean_s),
        span(waits.p50_s),
        span(waits.p95_s),
        span(waits.longest_s),
    )


def _reasons(results: Sequence[PolicyResult]) -> list[RenderableType]:
    """Nothing where every pod started at once."""
    rows = []
    for result in results:
        policy, tally = result.policy.value, result.tally
        rows += [
            (policy, "no node at first", reason.value, str(tally.no_node[reason]), _NO_NODE_TEXTS[reason])
            for reason in NoNode
            if tally.no_node[reason]
        ]
        rows += [
            (policy, "refused by an agent", reason.value, str(count), "UnexpectedAdmissionError, the pod has failed")
            for reason, count in sorted(tally.refusals.items())
        ]
    if not rows:
        return []
    return [Text(""), grid(("POLICY", "WHAT", "REASON", "TIMES", "MEANS"), rows, right=("TIMES",))]


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def span(seconds: float) -> str:
    """`0s`, `45s`, `12m05s`, `3h20m`, `2d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"
