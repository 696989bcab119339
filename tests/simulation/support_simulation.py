"""Small clusters and workloads for the tests of the simulation, and a replay in one call."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.simulation.results import PolicyResult, Rules, compare
from gpushare_agent.simulation.schedulers import Policy, Scheduler
from gpushare_agent.simulation.workload import Arrival, Cluster, Machine, Shape, Workload

NAMES = ResourceNames()
GPU_BLOCKS = 64
GPU_MIB = GPU_BLOCKS * NAMES.memory_block_mib


def cluster_of(*gpus: int, model: str = "T4", memory_mib: int = GPU_MIB) -> Cluster:
    """A node for each number of GPUs."""
    machines = [Machine(model=model, gpus=count, memory_mib=memory_mib) for count in gpus]
    return Cluster(source="test", nodes=tuple(machine.node(f"node-{n}") for n, machine in enumerate(machines)))


def arrival(at_s: float, cores: int, duration_s: float, *, blocks: int = 0, name: str = "") -> Arrival:
    asked = blocks or (8 if cores < 100 else 0)
    return Arrival(at_s=at_s, name=name or f"pod-{at_s}-{cores}", shape=Shape(cores, asked), duration_s=duration_s)


def workload_of(*arrivals: Arrival) -> Workload:
    return Workload(source="test", arrivals=tuple(sorted(arrivals)))


def replay(
    cluster: Cluster,
    workload: Workload,
    policy: Policy,
    *,
    share_policy: str = "binpack",
    seed: int = 1,
    per_try: int = 500,
    has_gang_scheduler: bool = True,
) -> PolicyResult:
    agents = _agents(share_policy)
    rules = Rules(agents=agents, seed=seed, per_try=per_try, has_gang_scheduler=has_gang_scheduler)
    return next(compare(cluster, workload, [policy], rules))


def scheduler_of(cluster: Cluster, policy: Policy, *, per_try: int = 500) -> Scheduler:
    return Scheduler(cluster, policy, _agents("binpack"), chance=Random("test"), per_try=per_try)


def waited(result: PolicyResult) -> Sequence[float]:
    return sorted(one for waits in result.tally.waited_s.values() for one in waits)


def _agents(share_policy: str) -> ClusterPolicy:
    return ClusterPolicy(names=NAMES, share_policy="spread" if share_policy == "spread" else "binpack")
