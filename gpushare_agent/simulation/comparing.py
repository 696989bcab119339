"""Replays one workload under several policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.simulation.meter import Meter, typical_shapes
from gpushare_agent.simulation.replay import Replay
from gpushare_agent.simulation.results import PolicyResult
from gpushare_agent.simulation.schedulers import Policy, Scheduler
from gpushare_agent.simulation.workload import Cluster, PodMaker, Workload

SAMPLES = 240
"""Over the time that the workload would take if nobody had to wait."""


class Rules(Struct, frozen=True, kw_only=True):
    """How it is replayed. `agents` has the resources' names and the share policy of the nodes' agents."""

    agents: ClusterPolicy
    seed: int
    per_try: int


def compare(
    cluster: Cluster,
    workload: Workload,
    policies: Sequence[Policy],
    rules: Rules,
    *,
    on_progress: Callable[[Policy, int], None] = lambda policy, arrived: None,
) -> Iterator[PolicyResult]:
    """One result after the other, each from an empty cluster."""
    for policy in policies:
        yield _replay(cluster, workload, policy, rules, partial(on_progress, policy))


def _replay(
    cluster: Cluster, workload: Workload, policy: Policy, rules: Rules, on_progress: Callable[[int], None]
) -> PolicyResult:
    begin_s = workload.arrivals[0].at_s if workload.arrivals else 0.0
    scheduler = Scheduler(
        cluster,
        policy,
        replace(rules.agents, node_policy="spread" if policy is Policy.SPREAD else "binpack"),
        chance=Random(f"{rules.seed}/{policy}"),
        per_try=rules.per_try,
    )
    meter = Meter(
        cluster,
        typical_shapes(Counter(arrival.shape for arrival in workload.arrivals)),
        scheduler.gpus,
        window=(begin_s, begin_s + (workload.window_s or workload.span_s)),
        step_s=workload.span_s / SAMPLES or 1.0,
    )
    replay = Replay(workload, scheduler, meter, PodMaker(rules.agents.names), on_progress=on_progress)
    tally = replay.run()
    on_progress(len(workload.arrivals))
    return PolicyResult(policy=policy, measured=meter.measured(), tally=tally, window_begin_s=begin_s)
