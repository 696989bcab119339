"""bench/inflation.py: the FGD paper's experiment, from its files to the figures."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.inflation import MARKS, CpuPods, CpuRule, Host, InflationPolicy, fits, inflate, read_hosts, read_kinds
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.first_fit import Capacity, ClaimRequests, Device, Option, allocate
from gpushare_agent.core.placement.fragmentation import WHOLE, FreeNode, PodKind
from gpushare_agent.extender.values import ClusterPolicy

RULES = ClusterPolicy(names=ResourceNames())
OPENB = Path(__file__).parents[3] / "shared" / "data" / "openb"
NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(
    f"node-{number},{16000 * max(1, gpus)},65536,{gpus},{model}\n"
    for number, (gpus, model) in enumerate([(2, "A10"), (4, "T4"), (8, "V100"), (2, "T4"), (0, "")])
)
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n" + "".join(
    f"pod-{number},{cpu},1024,{gpus},{milli},{spec}\n"
    for number, (cpu, gpus, milli, spec) in enumerate(
        [(4000, 1, 500, ""), (2000, 1, 300, "T4"), (8000, 2, 1000, ""), (8000, 0, 0, ""), (1000, 1, 1000, "A10|V100")]
    )
)


Trace = tuple[Sequence[Host], Sequence[PodKind]]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    return read_hosts(tmp_path / "nodes.csv"), read_kinds(tmp_path / "pods.csv")


def allocated(
    trace: Trace, policy: InflationPolicy, *, seed: int = 42, cpu_pods: CpuPods = CpuPods.GPU_AWARE
) -> Mapping[int, float]:
    run = inflate(*trace, policy, seed=seed, cpu_pods=CpuRule(cpu_pods, 0.5), rules=RULES)
    return run.allocated_percent


@pytest.mark.parametrize("cpu_pods", CpuPods)
@pytest.mark.parametrize("policy", InflationPolicy)
def test_every_policy_allocates_what_is_asked_for_until_it_is_full(
    trace: Trace, policy: InflationPolicy, cpu_pods: CpuPods
) -> None:
    """Never more than was asked for or than there is, and what is allocated never goes down; half of it fits everywhere."""
    percents = allocated(trace, policy, seed=1, cpu_pods=cpu_pods)
    parts = [percents[mark] for mark in MARKS]
    assert parts == sorted(parts)
    assert parts[0] >= 40
    assert all(part <= min(100, mark + 12.5) for part, mark in zip(parts, MARKS, strict=True))


def test_with_the_taint_pods_without_gpus_leave_free_gpus_their_cpu() -> None:
    """Half of the CPU is for pods with GPUs. kube-scheduler's default fills nodes without them first, whose GPUs nobody can
    use then; a threshold of 1 is no taint."""
    hosts = [Host(f"node-{number}", 64_000, 65536, 4, "T4") for number in range(16)]
    pods = [PodKind(8_000, 1024, 1, WHOLE)] * 8 + [PodKind(32_000, 1024, 0, 0)] * 2

    def by_rule(rule: CpuRule) -> Mapping[int, float]:
        run = inflate(hosts, pods, InflationPolicy.FGD_OF_TRACE, seed=1, cpu_pods=rule, rules=RULES)
        return run.allocated_percent

    least = by_rule(CpuRule(CpuPods.LEAST))
    assert by_rule(CpuRule(CpuPods.TAINT, 0.5))[100] > least[100] + 5
    assert by_rule(CpuRule(CpuPods.TAINT, 1.0)) == least


@given(
    free=st.lists(st.integers(0, WHOLE), min_size=1, max_size=8), gpus=st.integers(1, 4), parts=st.integers(1, WHOLE)
)
def test_claims_get_the_gpus_that_the_sandboxs_allocator_takes(free: list[int], gpus: int, parts: int) -> None:
    """What is left of a node is the same as first fit leaves in a slice that has the fullest first."""
    kind = PodKind(0, 0, gpus, WHOLE if gpus > 1 else parts)
    node = FreeNode(0, 0, tuple(sorted(free)))
    devices = [device(index) for index in sorted(range(len(free)), key=lambda index: free[index])]
    used = {one.key: {"gpu/cores": WHOLE - free[int(one.key[2])]} for one in devices}
    option = Option(name="gpu", count=gpus, asked={"gpu/cores": kind.parts})
    found = allocate([ClaimRequests(requests=((option,),))], devices, used)
    assert fits(node, kind) == (found is not None)
    if found is not None:
        left = list(free)
        for share in found[0]:
            left[int(share.device.key[2])] -= share.consumed["gpu/cores"]
        assert node.left(kind).gpus == tuple(sorted(left))


def device(index: int) -> Device:
    capacity = {"gpu/cores": Capacity(value=WHOLE, default=WHOLE, steps=(0, WHOLE, 1))}
    return Device(key=("gpu", "node", str(index)), capacity=capacity)


def test_the_same_seed_gives_the_same_figures(trace: Trace) -> None:
    """Also of the random policy; another seed gives others."""
    for policy in (InflationPolicy.RANDOM, InflationPolicy.FGD):
        assert allocated(trace, policy, seed=3) == allocated(trace, policy, seed=3)
    runs = [allocated(trace, InflationPolicy.RANDOM, seed=seed) for seed in range(3, 8)]
    assert any(other != runs[0] for other in runs)


@pytest.mark.skipif(not OPENB.is_dir(), reason="the public trace is not next to the checkout (shared/data/openb)")
@pytest.mark.parametrize(
    ("policy", "name"),
    [("best-fit", "05-BestFit"), ("dot-product", "02-DotProd"), ("packing", "04-GpuPacking"), ("random", "01-Random")],
)
@pytest.mark.slow
def test_baselines_meet_the_published_figures(policy: str, name: str) -> None:
    """Within half a point of the mean of the authors' ten runs, at every mark, by three here: that is what makes our
    own figures mean anything."""
    runs = [allocated(public_trace(), InflationPolicy(policy), seed=seed) for seed in (42, 43, 44)]
    with (OPENB / "published.csv").open(newline="") as file:
        (published,) = [one for one in csv.DictReader(file) if one["trace"] == "default" and one["policy"] == name]
    for mark in MARKS:
        mean = sum(one[mark] for one in runs) / len(runs)
        # Runs of random are further apart than those of the others.
        assert abs(mean - float(published[f"allocated_at_{mark}"])) < (0.7 if policy == "random" else 0.5), mark


@pytest.mark.skipif(not OPENB.is_dir(), reason="the public trace is not next to the checkout (shared/data/openb)")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_fgd_allocates_more_than_binpack_on_the_public_trace(every: int) -> None:
    """Also on one of eight nodes. The published mean of FGD is 95.23 % at 100 %, with a standard deviation of 0.10."""
    hosts, kinds = public_trace()
    policies = (InflationPolicy.FGD, InflationPolicy.BEST_FIT)
    fgd, best_fit = (allocated((hosts[1::every] if every > 1 else hosts, kinds), policy)[100] for policy in policies)
    assert fgd > 95.1
    assert fgd > best_fit + 2


@cache
def public_trace() -> Trace:
    return read_hosts(OPENB / "openb_node_list_gpu_node.csv"), read_kinds(OPENB / "openb_pod_list_default.csv")
