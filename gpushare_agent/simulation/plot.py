"""The chart of a comparison, as PNG. matplotlib is an extra of its own (`gpushare-agent[plot]`) and loaded here alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpushare_agent.model.errors import Rejected, StartupError
from gpushare_agent.simulation.inflation import MARKS, Inflated
from gpushare_agent.simulation.replay import Sample
from gpushare_agent.simulation.results import PolicyResult
from gpushare_agent.simulation.schedulers import Policy
from gpushare_agent.simulation.workload import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    Policy.FGD: "#cc79a7",
    Policy.BINPACK: "#0072b2",
    Policy.SPREAD: "#d55e00",
    Policy.AGENT_ONLY: "#555555",
    Policy.DRA: "#009e73",
}
"""Distinguishable by people who are colour-blind, too (Okabe and Ito)."""
DASHES = {
    Policy.FGD: (0, (5, 1)),
    Policy.BINPACK: "solid",
    Policy.SPREAD: "dashed",
    Policy.AGENT_ONLY: "dotted",
    Policy.DRA: "dashdot",
}
_INCHES = (12.0, 8.0)
_DOTS_PER_INCH = 110
_HOUR_S, _MINUTE_S = 3600.0, 60.0
_BARS_WIDTH = 0.8


def need_matplotlib() -> None:
    """Raises StartupError where it is missing: to be asked before the work is done."""
    try:
        import matplotlib  # noqa: F401 - whether it is there
    except ImportError as error:
        raise StartupError(
            f"no chart without matplotlib ({error}); install it with `pip install 'gpushare-agent[plot]'`, "
            "or leave out --plot"
        ) from error


def draw(results: Sequence[PolicyResult], path: Path, *, title: str, arrivals_s: float) -> None:
    """Writes the chart. Raises Rejected where the file cannot be written."""
    _save(figure_of(results, title=title, arrivals_s=arrivals_s), path)


def draw_inflation(results: Sequence[Inflated], path: Path, *, title: str) -> None:
    """Writes what is allocated over what is asked for. Raises as `draw`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots()
    for one in results:
        axes.plot(list(one.allocated_percent), list(one.allocated_percent.values()), label=one.policy.value)
    axes.set_xlim(MARKS[0], MARKS[-1])
    axes.set_ylim(MARKS[0], 100)
    axes.set_xlabel("GPUs asked for, % of all")
    axes.set_title("GPUs allocated, % of all", fontsize="medium")
    axes.legend(frameon=False)
    _clean(axes)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})
    except OSError as error:
        reason = error.strerror or error
        raise Rejected(f"the chart could not be written to {path}: {reason}; name another file") from error


def figure_of(results: Sequence[PolicyResult], *, title: str, arrivals_s: float) -> Figure:
    """Three curves over the time of the whole replay, and the waits as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots(2, 2)
    figure.suptitle(title)
    curves: tuple[tuple[Axes, str, Callable[[Sample], float]], ...] = (
        (axes[0][0], "cores in use, %", lambda sample: 100 * sample.cores_part),
        (axes[0][1], "free cores that a typical pod cannot use, % of all", lambda sample: 100 * sample.fragmentation),
        (axes[1][0], "waiting pods", lambda sample: sample.waiting),
    )
    for place, name, value in curves:
        _draw_over_time(place, results, name, value, arrivals_s)
    _draw_waits(axes[1][1], results)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _draw_over_time(
    axes: Axes, results: Sequence[PolicyResult], name: str, value: Callable[[Sample], float], arrivals_s: float
) -> None:
    for result in results:
        samples = result.measured.samples
        axes.plot(
            [(sample.at_s - result.window_begin_s) / _HOUR_S for sample in samples],
            [value(sample) for sample in samples],
            color=COLORS[result.policy],
            linestyle=DASHES[result.policy],
            label=_label(result),
        )
    if arrivals_s:
        axes.axvline(arrivals_s / _HOUR_S, color="#bbbbbb", linewidth=1, label="last arrival")
    axes.set_xlim(0, max(result.took_s for result in results) / _HOUR_S or 1.0)  # until all is over, as in the table
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hours")
    axes.set_title(name, fontsize="medium")
    _clean(axes)


def _label(result: PolicyResult) -> str:
    tally = result.tally
    if not tally.refused_pods:
        return result.policy.value
    return f"{result.policy} ({tally.refused_pods} pods refused by agents, {tally.gave_up} given up)"


def _draw_waits(axes: Axes, results: Sequence[PolicyResult]) -> None:
    width = _BARS_WIDTH / max(1, len(results))
    for number, result in enumerate(results):
        shift = (number - (len(results) - 1) / 2) * width
        # Side by side around the size's place.
        bars = axes.bar(
            [position + shift for position in range(len(Size))],
            [result.waits(size).p95_s / _MINUTE_S for size in Size],
            width,
            color=COLORS[result.policy],
        )
        axes.bar_label(bars, fmt="%.3g", fontsize="small")
    axes.set_xticks(range(len(Size)), [size.value for size in Size])
    axes.set_title("waiting time that 95 % of the pods do not exceed, minutes", fontsize="medium")
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
