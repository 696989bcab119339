"""`gpushare-agent simulate`: replays a workload on a simulated cluster, and compares policies (docs/how-to/simulate.md).

Results go to standard output and are the same for the same input and seed; progress goes to standard error. The JSON
document is simulation/results.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Invocation, add_output, arg, number, whole_number
from gpushare_agent.core.cli.render_text import grid, print_as, progress
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.settings.resource_names import resource_names
from gpushare_agent.core.settings.settings import SettingsError
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.simulation.results import PolicyResult, Rules, compare, document
from gpushare_agent.simulation.schedulers import NoNode, Policy, nodes_per_try
from gpushare_agent.simulation.traces import read_cluster, read_workload
from gpushare_agent.simulation.workload import Cluster, Size, Workload, at_load

_NO_NODE_TEXTS = {
    NoNode.FULL: "no node had enough in sum",
    NoNode.FRAGMENTED: "a node had enough in sum, but none on its GPUs",
    NoNode.NEVER: "no node could serve it, were it empty",
}

SHOWN_GANGS = 20


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
        *_gangs(results),
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


def _gangs(results: Sequence[PolicyResult]) -> list[RenderableType]:
    """Those that never start, and of the others the first."""
    gangs = [(name, result.policy.value, gang) for result in results for name, gang in result.tally.gangs.items()]
    if not gangs:
        return []
    gangs.sort(key=lambda row: row[2].started_at is not None)
    columns = ("GANG", "POLICY", "PODS", "WITH GPUS", "NODES", "STARTED", "WAITED")
    rows = []
    for name, policy, gang in gangs[:SHOWN_GANGS]:
        at = gang.started_at
        times = ("never", "") if at is None else (f"at {span(at)}", span(at - gang.complete_at))
        rows.append((name, policy, str(gang.pods), str(len(gang.nodes)), str(len(set(gang.nodes))), *times))
    more = len(gangs) - len(rows)
    return [Text(""), grid(columns, rows, right=columns[2:]), *([Text(f"{more} more: -o json")] if more else [])]


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nodes = "a CSV file of nodes: name,gpus,memory_mib,model, or a trace's"
    pods = "a CSV file of pods: name,arrival_s,duration_s,cores,memory_mib[,models][,gang], or a trace's"
    load = "bring the arrivals closer or apart, until pods request X of all cores on average (as the file says)"
    per_try = "nodes per try, kube-scheduler's percentageOfNodesToScore (its own rule: fewer in larger clusters)"
    one_by_one = "start the pods of a gang one by one: each keeps its GPUs until the last has its own"
    policies = f"what to compare, separated by commas: {', '.join(Policy)} (%(default)s)"
    for argument in (
        arg("--nodes FILE", nodes, type=Path, required=True),
        arg("--pods FILE", pods, type=Path, required=True),
        arg("--load X", load, type=number(0.01, 100)),
        arg("--policy NAMES", policies, type=_policies, default="binpack,agent-only"),
        arg("--seed N", "of all random numbers: the same gives the same result (%(default)s)", type=int, default=1),
        arg("--score-percent N", per_try, type=whole_number(1, 100), default=0),
        arg("--no-gang-scheduler", one_by_one),
        add_output,
        arg("-q --quiet", "no progress on standard error"),
    ):
        argument(parser)


def run(call: Invocation) -> int:
    """Raises SettingsError for a file that cannot be read."""
    options, settings = call.options, call.settings()
    names = resource_names(settings)
    try:
        cluster = read_cluster(options.nodes)
        workload = read_workload(options.pods, block_mib=names.memory_block_mib)
    except AgentError as error:  # a mistake in what the command line names
        raise SettingsError([str(error)]) from error
    # A trace's own times are its point. They change only if a load is asked for.
    if options.load:
        workload = at_load(workload, cluster, options.load)
    # kube-scheduler looks at fewer nodes in larger clusters, which changes what it finds.
    per_try = nodes_per_try(len(cluster.nodes), options.score_percent)
    rules = Rules(
        agents=ClusterPolicy(names=names, share_policy=settings.placement.share_policy),
        seed=options.seed,
        per_try=per_try,
        has_gang_scheduler=not options.no_gang_scheduler,
    )
    pods = len(workload.arrivals)
    with progress("pods have arrived") as report:

        def arrived(policy: Policy, count: int) -> None:
            if not options.quiet:
                report(policy.value, count, pods)

        results = list(compare(cluster, workload, options.policy, rules, on_progress=arrived))
    result = document(results, cluster=cluster, workload=workload, seed=options.seed, nodes_per_try=per_try)
    print_as(options.output, result, lambda width: tables(results, cluster, workload))
    return 0


def _policies(text: str) -> tuple[Policy, ...]:
    """In their order, each once."""
    try:
        return tuple(dict.fromkeys(Policy(name.strip()) for name in text.split(",")))
    except ValueError:
        names = f"name some of {', '.join(Policy)}, separated by commas"
        raise argparse.ArgumentTypeError(f"{text!r}: {names}") from None
