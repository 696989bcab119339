"""`python -m bench.plot RESULT.json CHART.png`: the chart of what `gpushare-agent simulate -o json` printed, as PNG.

Needs matplotlib (the dependency group `bench`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpushare_agent.simulation.schedulers import Policy
from gpushare_agent.simulation.workload import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    Policy.FGD: ("#cc79a7", (0, (5, 1))),
    Policy.BINPACK: ("#0072b2", "solid"),
    Policy.SPREAD: ("#d55e00", "dashed"),
    Policy.AGENT_ONLY: ("#555555", "dotted"),
    Policy.DRA: ("#009e73", "dashdot"),
}
"""Color and dashes: distinguishable by people who are colour-blind, too (Okabe and Ito)."""
_INCHES = (12.0, 8.0)
_DOTS_PER_INCH = 110
_HOUR_S, _MINUTE_S = 3600.0, 60.0
_BARS_WIDTH = 0.8


def draw(document: dict[str, Any], path: Path) -> None:
    # No metadata: the same result makes the same file.
    figure_of(document).savefig(path, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})


def figure_of(document: dict[str, Any]) -> Figure:
    """Three curves over the time of the whole replay, and the waits as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workload, cluster = document["workload"], document["cluster"]
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{workload['pods']} pods ({workload['source']}) on {cluster['nodes']} nodes ({cluster['source']})")
    curves: tuple[tuple[Axes, str, str, Callable[[float], float]], ...] = (
        (axes[0][0], "cores in use, %", "cores", lambda part: 100 * part),
        (axes[0][1], "free cores that a typical pod cannot use, % of all", "fragmentation", lambda part: 100 * part),
        (axes[1][0], "waiting pods", "waiting", lambda count: count),
    )
    policies = document["policies"]
    for place, title, name, value in curves:
        for one in policies:
            color, dashes = STYLES[Policy(one["policy"])]
            samples = one["samples"]
            place.plot(
                [at_s / _HOUR_S for at_s in samples["at_s"]],
                [value(sample) for sample in samples[name]],
                color=color,
                linestyle=dashes,
                label=_label(one),
            )
        if arrivals_s := workload["arrivals_s"]:
            place.axvline(arrivals_s / _HOUR_S, color="#bbbbbb", linewidth=1, label="last arrival")
        place.set_xlim(0, max(one["took_s"] for one in policies) / _HOUR_S or 1.0)  # until all is over, as in the table
        place.set_ylim(bottom=0)
        place.set_xlabel("hours")
        place.set_title(title, fontsize="medium")
        _clean(place)
    _draw_waits(axes[1][1], policies)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _label(policy: dict[str, Any]) -> str:
    pods = policy["pods"]
    if not pods["refused_by_agents"]:
        return str(policy["policy"])
    return f"{policy['policy']} ({pods['refused_by_agents']} pods refused by agents, {pods['given_up']} given up)"


def _draw_waits(axes: Axes, policies: Sequence[dict[str, Any]]) -> None:
    width = _BARS_WIDTH / max(1, len(policies))
    for number, one in enumerate(policies):
        shift = (number - (len(policies) - 1) / 2) * width
        # Side by side around the size's place.
        bars = axes.bar(
            [position + shift for position in range(len(Size))],
            [one["waits"][size]["p95_s"] / _MINUTE_S for size in Size],
            width,
            color=STYLES[Policy(one["policy"])][0],
        )
        axes.bar_label(bars, fmt="%.3g", fontsize="small")
    axes.set_xticks(range(len(Size)), [size.value for size in Size])
    axes.set_title("waiting time that 95 % of the pods do not exceed, minutes", fontsize="medium")
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)


if __name__ == "__main__":
    result, chart = map(Path, sys.argv[1:])
    draw(json.loads(result.read_text(encoding="utf-8")), chart)
