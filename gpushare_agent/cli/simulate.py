"""`gpushare-agent simulate`: replays a workload on a simulated cluster, and compares policies (docs/how-to/simulate.md).

Results go to standard output and are the same for the same input and seed; progress goes to standard error. The JSON
document is simulation/results.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.command_line import Invocation, add_output, arg, number, one_of, whole_number
from gpushare_agent.cli.render_text import grid, print_as, progress
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings.settings import Settings, SettingsError
from gpushare_agent.simulation import plot
from gpushare_agent.simulation.generator import generate_cluster, generate_workload
from gpushare_agent.simulation.inflation import (
    MARKS,
    CpuPods,
    CpuRule,
    Inflated,
    InflationPolicy,
    inflate,
    inflation_document,
)
from gpushare_agent.simulation.results import PolicyResult, Rules, compare, document
from gpushare_agent.simulation.schedulers import NoNode, Policy, nodes_per_try
from gpushare_agent.simulation.traces import read_cluster, read_hosts, read_kinds, read_workload
from gpushare_agent.simulation.workload import Cluster, Size, Workload, at_load

_NO_NODE_TEXTS = {
    NoNode.FULL: "no node had enough in sum",
    NoNode.FRAGMENTED: "a node had enough in sum, but none on its GPUs",
    NoNode.NEVER: "no node could serve it, were it empty",
}


def tables(results: Sequence[PolicyResult], cluster: Cluster, workload: Workload) -> list[RenderableType]:
    # What a trace's pods ask for and we do not offer is counted, not dropped in silence.
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
    cells: dict[str, Callable[[PolicyResult], str]] = {
        "POLICY": lambda one: one.policy.value,
        "CORES": lambda one: _percent(one.measured.cores_part),
        "MEMORY": lambda one: _percent(one.measured.memory_part),
        "HIGHEST": lambda one: _percent(one.measured.highest_cores_part),
        "UNUSABLE": lambda one: _percent(one.measured.fragmentation),
        "RAN": lambda one: str(one.ran),
        "MEAN WAIT": lambda one: span(one.waits().mean_s),
        "REFUSED": lambda one: str(one.tally.refused_pods),
        "GIVEN UP": lambda one: str(one.tally.gave_up),
        "ALL OVER": lambda one: span(one.took_s),
    }
    rows = [[cell(one) for cell in cells.values()] for one in results]
    return grid([*cells], rows, right=[*cells][1:])


def _waits(results: Sequence[PolicyResult]) -> RenderableType:
    columns = ("WAITS OF", "POLICY", "RAN", "WAITED", "MEAN", "P50", "P95", "LONGEST")
    rows = []
    for size in Size:
        for result in results:
            waits = result.waits(size)
            spans = map(span, (waits.mean_s, waits.p50_s, waits.p95_s, waits.longest_s))
            rows.append((size.value, result.policy.value, str(waits.ran), str(waits.waited), *spans))
    return grid(columns, rows, right=columns[2:])


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


_P = TypeVar("_P", bound=StrEnum)
MAX_NODES, MAX_PODS = 100_000, 1_000_000
_USUAL_NODES, _USUAL_PODS = 100, 10_000
_USUAL_LOAD = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nodes = (
        "a number of generated nodes, or a CSV file of nodes: name,cards,memory_mib,model, or a trace's (%(default)s)"
    )
    pods = (
        "a CSV file of pods: name,arrival_s,duration_s,cores,memory_mib[,models], or a trace's; instead of --generate"
    )
    load = (
        "bring the arrivals closer or apart, until pods request X of all cores on average "
        f"({_USUAL_LOAD:g} for generated pods; those of a file arrive at its times)"
    )
    policy = (
        f"what to compare, separated by commas: {', '.join(Policy)} (binpack,agent-only); with --protocol inflation "
        f"{', '.join(InflationPolicy)} (fgd,binpack)"
    )
    protocol = (
        "inflation: the FGD paper's experiment on a trace's files, how much can be allocated while more and more is "
        "asked for; pods do not end, CPU and main memory count (%(default)s)"
    )
    cpu_pods = (
        "with --protocol inflation, where pods without GPUs go: as kube-scheduler's LeastAllocated or MostAllocated "
        "sends them, as the former with the taint of facts.taint_above, or to nodes with few free GPUs (%(default)s)"
    )
    per_try = "nodes per try, kube-scheduler's percentageOfNodesToScore (its own rule: fewer in larger clusters)"
    for argument in (
        arg("--nodes N|FILE", nodes, type=_nodes, default=_USUAL_NODES),
        one_of(
            arg("--pods FILE", pods, type=Path),
            arg("--generate N", f"a number of generated pods ({_USUAL_PODS})", type=whole_number(1, MAX_PODS)),
        ),
        arg("--load X", load, type=number(0.01, 100)),
        arg("--policy NAMES", policy, type=_names),
        arg("--protocol", protocol, choices=("replay", "inflation"), default="replay"),
        arg("--cpu-pods", cpu_pods, choices=tuple(CpuPods), default=CpuPods.GPU_AWARE),
        arg(
            "--taint-above PART",
            "with --cpu-pods taint, facts.taint_above (%(default)s)",
            type=number(0, 1),
            default=0.5,
        ),
        arg("--seed N", "of all random numbers: the same gives the same result (%(default)s)", type=int, default=1),
        arg("--score-percent N", per_try, type=whole_number(1, 100), default=0),
        arg("--plot FILE", "also draw a chart there, as PNG", type=Path),
        add_output,
        arg("-q --quiet", "no progress on standard error"),
    ):
        argument(parser)


def run(call: Invocation) -> int:
    """Raises AgentError for a file that cannot be written, SettingsError for one that cannot be read."""
    options, settings = call.options, call.settings()
    if options.plot is not None:
        # Before minutes of work: the library is optional and may be missing.
        plot.need_matplotlib()
        _check_plot_path(options.plot)
    if options.protocol == "inflation":
        return _inflate(options, settings)
    names = resource_names(settings)
    policies = _policies(options.policy, Policy, (Policy.BINPACK, Policy.AGENT_ONLY))
    try:
        cluster = _cluster(options)
        workload = _workload(options, cluster, names.memory_block_mib)
    except AgentError as error:  # a mistake in what the command line names
        raise SettingsError([str(error)]) from error
    # kube-scheduler looks at fewer nodes in larger clusters, which changes what it finds.
    per_try = nodes_per_try(len(cluster.nodes), options.score_percent)
    rules = Rules(
        agents=ClusterPolicy(names=names, share_policy=settings.placement.share_policy),
        seed=options.seed,
        per_try=per_try,
    )
    pods = len(workload.arrivals)
    with progress("pods have arrived") as report:

        def arrived(policy: Policy, count: int) -> None:
            if not options.quiet:
                report(policy.value, count, pods)

        results = list(compare(cluster, workload, policies, rules, on_progress=arrived))
    result = document(results, cluster=cluster, workload=workload, seed=options.seed, nodes_per_try=per_try)
    print_as(options.output, result, lambda width: tables(results, cluster, workload))
    if options.plot is not None:
        title = f"{len(workload.arrivals)} pods ({workload.source}) on {len(cluster.nodes)} nodes ({cluster.source})"
        plot.draw(results, options.plot, title=title, arrivals_s=workload.window_s)
    return 0


def _inflate(options: argparse.Namespace, settings: Settings) -> int:
    policies = _policies(options.policy, InflationPolicy, (InflationPolicy.FGD, InflationPolicy.BINPACK))
    # The published results are of these files: a generated cluster has nothing to be compared with.
    if isinstance(options.nodes, int) or options.pods is None:
        raise SettingsError(["--protocol inflation takes a trace: name its files by --nodes and --pods"])
    if options.load:
        raise SettingsError(["--protocol inflation has no times, so no --load"])
    try:
        hosts, pods = read_hosts(options.nodes), read_kinds(options.pods)
    except AgentError as error:
        raise SettingsError([str(error)]) from error
    rules = ClusterPolicy(names=resource_names(settings), share_policy=settings.placement.share_policy)
    results = []
    with progress("percent have been asked for") as report:
        for policy in policies:

            def reached(percent: int, name: str = policy.value) -> None:
                if not options.quiet:
                    report(name, percent, MARKS[-1])

            results.append(
                inflate(
                    hosts,
                    pods,
                    policy,
                    seed=options.seed,
                    cpu_pods=CpuRule(CpuPods(options.cpu_pods), options.taint_above),
                    rules=rules,
                    on_progress=reached,
                )
            )
    print_as(options.output, inflation_document(results), lambda width: [_inflation_table(results)])
    if options.plot is not None:
        gpus = sum(host.gpus for host in hosts)
        plot.draw_inflation(results, options.plot, title=f"{options.pods.name} on {len(hosts)} nodes with {gpus} GPUs")
    return 0


def _inflation_table(results: Sequence[Inflated]) -> RenderableType:
    columns = ("POLICY", *(f"AT {mark}%" for mark in MARKS))
    rows = [(one.policy.value, *(f"{one.allocated_percent[mark]:.2f}%" for mark in MARKS)) for one in results]
    return grid(columns, rows, right=columns[1:])


def _check_plot_path(path: Path) -> None:
    """Before minutes of work, not after. Raises SettingsError."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise SettingsError([f"--plot {path}: no file can be written there; name a file in a directory that is yours"])


def _cluster(options: argparse.Namespace) -> Cluster:
    if isinstance(options.nodes, int):
        return generate_cluster(options.nodes, options.seed)
    return read_cluster(options.nodes)


def _workload(options: argparse.Namespace, cluster: Cluster, block_mib: int) -> Workload:
    if options.pods is not None:
        read = read_workload(options.pods, block_mib=block_mib)
        # A trace's own times are its point; only who asks for a load gets others.
        return at_load(read, cluster, options.load) if options.load else read
    generated = generate_workload(options.generate or _USUAL_PODS, options.seed, block_mib=block_mib)
    return at_load(generated, cluster, options.load or _USUAL_LOAD)


def _nodes(text: str) -> int | Path:
    # A file may have a name of digits only with a directory before it.
    return whole_number(1, MAX_NODES)(text) if text.isascii() and text.isdigit() else Path(text)


def _names(text: str) -> tuple[str, ...]:
    """In their order, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _policies(names: Sequence[str] | None, kind: type[_P], usual: tuple[_P, ...]) -> tuple[_P, ...]:
    try:
        # Checked here and not by argparse: which names there are depends on --protocol.
        return tuple(kind(name) for name in names) if names is not None else usual
    except ValueError:
        text = ",".join(names or ())
        raise SettingsError([f"--policy {text!r}: name some of {', '.join(kind)}, separated by commas"]) from None
