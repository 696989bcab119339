"""Replays one workload under several policies. The result is a value for each, and all as one JSON document.

The document has nothing that depends on the machine or the moment: the same input and seed give the same text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from gpushare_agent.extender.values import ClusterPolicy, NodePolicy
from gpushare_agent.simulation.replay import Gang, Measured, Meter, Replay, Sample, Tally, typical_shapes
from gpushare_agent.simulation.schedulers import Policy, Scheduler
from gpushare_agent.simulation.workload import Cluster, PodMaker, Size, Workload

SCHEMA = 1
_DIGITS = 6


class Waits(Struct, frozen=True, kw_only=True):
    """The waits of the pods of one size that ran, seconds from arrival to start."""

    ran: int
    waited: int
    """Those that did not start at once."""
    p50_s: float
    p95_s: float
    longest_s: float
    mean_s: float


class PolicyResult(Struct, frozen=True, kw_only=True):
    policy: Policy
    measured: Measured
    tally: Tally
    window_begin_s: float

    @property
    def ran(self) -> int:
        return sum(len(waits) for waits in self.tally.waited_s.values())

    @property
    def took_s(self) -> float:
        """Seconds from the first arrival to the last end."""
        return self.tally.ended_at - self.window_begin_s

    def waits(self, size: Size | None = None) -> Waits:
        """The waits of the pods of one size, or of all."""
        chosen = [size] if size is not None else list(Size)
        ordered = sorted(waited for one in chosen for waited in self.tally.waited_s[one])
        return Waits(
            ran=len(ordered),
            waited=sum(waited > 0 for waited in ordered),
            p50_s=percentile(ordered, 0.5),
            p95_s=percentile(ordered, 0.95),
            longest_s=ordered[-1] if ordered else 0.0,
            mean_s=sum(ordered) / len(ordered) if ordered else 0.0,
        )


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of the sorted values that `part` of them do not exceed; 0 where there are none."""
    # Nearest rank: always a wait that happened, and 0 for nobody.
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def document(
    results: Sequence[PolicyResult], *, cluster: Cluster, workload: Workload, seed: int, nodes_per_try: int
) -> dict[str, Any]:
    """Everything, for programs."""
    models: dict[str, list[int]] = {}
    for node in cluster.nodes:
        counts = models.setdefault(node.model, [0, 0])
        counts[0] += 1
        counts[1] += len(node.gpus)
    sizes = [arrival.shape.size for arrival in workload.arrivals]
    return {
        "schema": SCHEMA,
        "seed": seed,
        "cluster": {
            "source": cluster.source,
            "nodes": len(cluster.nodes),
            "gpus": cluster.number_of_gpus,
            "models": {model: {"nodes": nodes, "gpus": gpus} for model, (nodes, gpus) in sorted(models.items())},
            "nodes_per_try": nodes_per_try,
        },
        "workload": {
            "source": workload.source,
            "pods": len(workload.arrivals),
            "sizes": {size.value: sizes.count(size) for size in Size},
            "arrivals_s": _rounded(workload.window_s),
            "skipped": dict(sorted(workload.skipped.items())),
        },
        "policies": [_policy_document(result) for result in results],
    }


def _policy_document(result: PolicyResult) -> dict[str, Any]:
    measured, tally = result.measured, result.tally
    return {
        "policy": result.policy.value,
        "pods": {
            "ran": result.ran,
            "refused_by_agents": tally.refused_pods,
            "given_up": tally.gave_up,
        },
        "utilisation": {
            "cores": _rounded(measured.cores_part),
            "memory": _rounded(measured.memory_part),
            "highest_cores": _rounded(measured.highest_cores_part),
        },
        "fragmentation": _rounded(measured.fragmentation),
        "waits": {
            "all": _waits_document(result.waits()),
            **{size.value: _waits_document(result.waits(size)) for size in Size},
        },
        "no_node": _counts(tally.no_node),
        "refusals_at_admission": _counts(tally.refusals),
        "gangs": [_gang_document(name, gang) for name, gang in tally.gangs.items()],
        "took_s": _rounded(result.took_s),
        "samples": {
            name: [_rounded(getattr(one, name)) for one in measured.samples] for name in Sample.__struct_fields__
        },
    }


def _gang_document(name: str, gang: Gang) -> dict[str, Any]:
    at = gang.started_at
    times = (None, None) if at is None else (_rounded(at), _rounded(at - gang.complete_at))
    return {"name": name, "pods": gang.pods, "nodes": gang.nodes, "started_s": times[0], "waited_s": times[1]}


def _waits_document(waits: Waits) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in asdict(waits).items()}


def _counts(counts: Mapping[Any, int]) -> dict[str, int]:
    return {key.value: counts[key] for key in sorted(counts, key=lambda key: key.value)}


def _rounded(value: float) -> float:
    return round(value, _DIGITS)


SAMPLES = 240
"""Over the time that the workload would take if nobody had to wait."""


class Rules(Struct, frozen=True, kw_only=True):
    """How it is replayed. `agents` has the resources' names and the share policy of the nodes' agents."""

    agents: ClusterPolicy
    seed: int
    per_try: int
    has_gang_scheduler: bool = True


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


_NODE_POLICIES: Mapping[Policy, NodePolicy] = {Policy.FGD: "fgd", Policy.SPREAD: "spread"}


def _replay(
    cluster: Cluster, workload: Workload, policy: Policy, rules: Rules, on_progress: Callable[[int], None]
) -> PolicyResult:
    begin_s = workload.arrivals[0].at_s if workload.arrivals else 0.0
    scheduler = Scheduler(
        cluster,
        policy,
        # The policy is that of nodes; the GPUs on a node are the agents' setting in all of them.
        replace(rules.agents, node_policy=_NODE_POLICIES.get(policy, "binpack")),
        # One for each policy: how often one of them draws must not change another's result.
        chance=Random(f"{rules.seed}/{policy}"),
        per_try=rules.per_try,
    )
    meter = Meter(
        cluster,
        typical_shapes(Counter(arrival.shape for arrival in workload.arrivals)),
        scheduler.gpus,
        # All arrive at once where the window is empty: then the time until all would have ended.
        window=(begin_s, begin_s + (workload.window_s or workload.span_s)),
        step_s=workload.span_s / SAMPLES or 1.0,
    )
    pods = PodMaker(rules.agents.names)
    replay = Replay(workload, scheduler, meter, pods, on_progress, has_gang_scheduler=rules.has_gang_scheduler)
    tally = replay.run()
    on_progress(len(workload.arrivals))
    return PolicyResult(policy=policy, measured=meter.measured(), tally=tally, window_begin_s=begin_s)
