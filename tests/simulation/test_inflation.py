"""`gpushare-agent simulate --protocol inflation`: the FGD paper's experiment, from its files to the figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.cli.main import main
from gpushare_agent.extender.values import ClusterPolicy
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement.first_fit import Capacity, ClaimRequests, Device, Option, allocate
from gpushare_agent.placement.fragmentation import WHOLE, FreeNode, PodKind
from gpushare_agent.simulation.inflation import MARKS, CpuPods, CpuRule, Host, InflationPolicy, inflate

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


@pytest.fixture
def trace(tmp_path: Path) -> list[str]:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(PODS)
    files = ["--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv")]
    return ["simulate", "--protocol", "inflation", "--quiet", *files]


def inflated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main([*words, "-o", "json"], {}) == 0
    policies: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["policies"]
    return policies


@pytest.mark.parametrize("cpu_pods", ["least", "most", "taint", "gpu-aware"])
def test_every_policy_allocates_what_is_asked_for_until_it_is_full(
    trace: list[str], capsys: pytest.CaptureFixture[str], cpu_pods: str
) -> None:
    """Never more than was asked for or than there is, and what is allocated never goes down; half of it fits everywhere."""
    names = ",".join(InflationPolicy)
    for one in inflated(capsys, *trace, "--policy", names, "--cpu-pods", cpu_pods):
        allocated = [one["allocated_percent"][str(mark)] for mark in MARKS]
        assert allocated == sorted(allocated)
        assert allocated[0] >= 40
        assert all(part <= min(100, mark + 12.5) for part, mark in zip(allocated, MARKS, strict=True)), one


def test_with_the_taint_pods_without_gpus_leave_free_gpus_their_cpu() -> None:
    """Half of the CPU is for pods with GPUs. kube-scheduler's default fills nodes without them first, whose GPUs nobody can
    use then; a threshold of 1 is no taint."""
    hosts = [Host(f"node-{number}", 64_000, 65536, 4, "T4") for number in range(16)]
    pods = [PodKind(8_000, 1024, 1, WHOLE)] * 8 + [PodKind(32_000, 1024, 0, 0)] * 2

    def allocated(rule: CpuRule) -> Mapping[int, float]:
        run = inflate(hosts, pods, InflationPolicy.FGD_OF_TRACE, seed=1, cpu_pods=rule, rules=RULES)
        return run.allocated_percent

    least = allocated(CpuRule(CpuPods.LEAST))
    assert allocated(CpuRule(CpuPods.TAINT, 0.5))[100] > least[100] + 5
    assert allocated(CpuRule(CpuPods.TAINT, 1.0)) == least


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
    assert node.fits(kind) == (found is not None)
    if found is not None:
        left = list(free)
        for share in found[0]:
            left[int(share.device.key[2])] -= share.consumed["gpu/cores"]
        assert node.left(kind).gpus == tuple(sorted(left))


def device(index: int) -> Device:
    capacity = {"gpu/cores": Capacity(value=WHOLE, default=WHOLE, steps=(0, WHOLE, 1))}
    return Device(key=("gpu", "node", str(index)), capacity=capacity)


def test_the_same_seed_gives_the_same_figures(trace: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also of the random policy; another seed gives others."""
    first = inflated(capsys, *trace, "--policy", "random,fgd", "--seed", "3")
    assert inflated(capsys, *trace, "--policy", "random,fgd", "--seed", "3") == first
    assert [one["seed"] for one in first] == [3, 3]
    others = [inflated(capsys, *trace, "--policy", "random", "--seed", str(seed)) for seed in range(4, 8)]
    assert any(other[0]["allocated_percent"] != first[0]["allocated_percent"] for other in others)


def test_the_table_has_a_column_for_each_mark(trace: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*trace, "--policy", "best-fit"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["POLICY", *(word for mark in MARKS for word in ("AT", f"{mark}%"))]
    assert lines[1].startswith("best-fit")


def test_a_chart_is_drawn(trace: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([*trace, "--plot", str(tmp_path / "chart.png")], {}) == 0
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--policy", "agent-only"], "name some of fgd, fgd-of-trace, binpack"),
        (["--nodes", "4"], "name its files by --nodes and --pods"),
        (["--load", "1"], "no --load"),
        (["--nodes", "{pods}"], "must name the trace's columns sn, cpu_milli"),
    ],
)
def test_what_it_cannot_do_is_said(
    trace: list[str], capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main([*trace, *(word.format(pods=trace[-1]) for word in words)], {}) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(not OPENB.is_dir(), reason="the public trace is not beside the checkout (shared/data/openb)")
@pytest.mark.parametrize(
    ("policy", "name"),
    [("best-fit", "05-BestFit"), ("dot-product", "02-DotProd"), ("packing", "04-GpuPacking"), ("random", "01-Random")],
)
def test_baselines_meet_the_published_figures(capsys: pytest.CaptureFixture[str], policy: str, name: str) -> None:
    """Within half a point of the mean of the authors' ten runs, at every mark, by three here: that is what makes our
    own figures mean anything."""
    runs = [allocated_on_trace(capsys, policy, seed) for seed in (42, 43, 44)]
    with (OPENB / "published.csv").open(newline="") as file:
        (published,) = [one for one in csv.DictReader(file) if one["trace"] == "default" and one["policy"] == name]
    for mark in MARKS:
        mean = sum(one[str(mark)] for one in runs) / len(runs)
        # Runs of random are further apart than those of the others.
        assert abs(mean - float(published[f"allocated_at_{mark}"])) < (0.7 if policy == "random" else 0.5), mark


@pytest.mark.skipif(not OPENB.is_dir(), reason="the public trace is not beside the checkout (shared/data/openb)")
def test_fgd_allocates_more_than_binpack_on_the_public_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """The published mean of FGD is 95.23 % at 100 %, with a standard deviation of 0.10."""
    fgd, best_fit = (allocated_on_trace(capsys, policy)["100"] for policy in ("fgd", "best-fit"))
    assert fgd > 95.1
    assert fgd > best_fit + 2


def allocated_on_trace(capsys: pytest.CaptureFixture[str], policy: str, seed: int = 42) -> dict[str, float]:
    files = [
        "--nodes",
        str(OPENB / "openb_node_list_gpu_node.csv"),
        "--pods",
        str(OPENB / "openb_pod_list_default.csv"),
    ]
    words = ["simulate", "--protocol", "inflation", "--quiet", "--seed", str(seed), "--policy", policy, *files]
    (one,) = inflated(capsys, *words)
    allocated: dict[str, float] = one["allocated_percent"]
    return allocated
