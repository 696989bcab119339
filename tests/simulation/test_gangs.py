"""Gangs in a replay: pods that compute together, with a scheduler that starts all of them or none, and without one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.commands import main
from gpushare_agent.core.model.errors import RefusalReason
from gpushare_agent.simulation.command import SHOWN_GANGS
from gpushare_agent.simulation.schedulers import NoNode, Policy
from gpushare_agent.simulation.workload import Arrival
from tests.simulation.support_simulation import arrival, cluster_of, replay, waited, workload_of

KNOWING_GPUS = [Policy.BINPACK, Policy.FGD, Policy.SPREAD, Policy.DRA]
PAGE = Path(__file__).parents[2] / "docs/how-to/simulate.md"


def gang(name: str, pods: int, cores: int, *, at_s: float = 0.0, duration_s: float = 100.0) -> list[Arrival]:
    """Pods that come a second apart: of two gangs from the same moment on, by turns."""
    return [
        arrival(at_s + number, cores, duration_s, name=f"{name}-{number}")._replace(gang=name) for number in range(pods)
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_a_gang_of_four_pods_starts_on_two_nodes_when_the_last_has_come(policy: Policy) -> None:
    """Each needs four GPUs, so a node takes two of them."""
    result = replay(cluster_of(8, 8), workload_of(*gang("a", 4, 400)), policy)
    found = result.tally.gangs["a"]
    assert (found.pods, found.complete_at, found.started_at) == (4, 3, 3)
    assert sorted(found.nodes) == ["node-0", "node-0", "node-1", "node-1"]
    assert waited(result) == [0, 1, 2, 3]
    assert result.took_s == 103
    assert not result.tally.no_node


@pytest.mark.parametrize("policy", list(Policy))
def test_two_half_started_gangs_wait_for_each_other_for_ever_and_with_a_gang_scheduler_one_after_the_other(
    policy: Policy,
) -> None:
    """Pods come by turns: without a gang scheduler each gang gets two of its four, and all 16 GPUs idle."""
    cluster, workload = cluster_of(8, 8), workload_of(*gang("a", 4, 400), *gang("b", 4, 400, at_s=0.5))
    together = replay(cluster, workload, policy)
    assert {name: one.started_at for name, one in together.tally.gangs.items()} == {"a": 3, "b": 103}
    assert together.ran == 8
    assert together.tally.no_node == {NoNode.FULL: 4}
    apart = replay(cluster, workload, policy, has_gang_scheduler=False)
    assert [(one.started_at, len(one.nodes)) for one in apart.tally.gangs.values()] == [(None, 2), (None, 2)]
    assert apart.ran == 0
    assert apart.measured.samples[-1].cores == 1


def test_without_a_gang_scheduler_a_gang_computes_from_the_moment_at_which_its_last_pod_has_gpus() -> None:
    """The first holds its GPU from 0 on, the second gets one when the pod that runs has ended."""
    single = arrival(0, 100, 50, name="single")
    workload = workload_of(single, *gang("a", 2, 100, at_s=1.0, duration_s=10.0))
    result = replay(cluster_of(2), workload, Policy.BINPACK, has_gang_scheduler=False)
    assert result.tally.gangs["a"].started_at == 50
    assert waited(result) == [0, 48, 49]
    assert result.took_s == 60


@pytest.mark.parametrize("policy", KNOWING_GPUS)
def test_a_gang_that_no_empty_cluster_holds_never_starts_and_holds_nobody_up(policy: Policy) -> None:
    """Each of its pods would fit; five do not."""
    result = replay(cluster_of(8, 8), workload_of(*gang("a", 5, 400), arrival(9, 800, 10)), policy)
    assert result.tally.no_node == {NoNode.NEVER: 5}
    assert result.tally.gangs["a"].started_at is None
    assert result.tally.gangs["a"].nodes == []
    assert waited(result) == [0]


def test_a_gang_of_which_an_agent_refuses_a_pod_comes_again_as_a_whole() -> None:
    """Without the extender half of each GPU is in use, and the node's sums suffice until the halves have ended."""
    halves = [arrival(0, 50, 100, name="x"), arrival(0, 50, 100, name="y")]
    pods = [one._replace(gang="a") for one in (arrival(1, 50, 10, name="s"), arrival(1, 50, 10, blocks=60, name="t"))]
    workload = workload_of(*halves, *pods)
    refused = replay(cluster_of(2), workload, Policy.AGENT_ONLY, share_policy="spread")
    assert refused.tally.refusals.keys() & {RefusalReason.FRAGMENTED, RefusalReason.NOT_ENOUGH_MEMORY}
    assert refused.tally.gangs["a"].started_at is not None
    assert len(refused.tally.gangs["a"].nodes) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([20, 50, 100, 200]), st.sampled_from(["", "a", "b"])), max_size=20
    ),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    st.sampled_from(KNOWING_GPUS),
)
def test_of_a_gang_all_pods_start_at_once_or_none(
    pods: list[tuple[int, int, str]], gpus: list[int], policy: Policy
) -> None:
    """Everything is accounted for, nothing is used beyond what there is, and a try that failed keeps nothing."""
    arrivals = [
        arrival(float(at), cores, 10.0, name=f"p{number}")._replace(gang=name)
        for number, (at, cores, name) in enumerate(pods)
    ]
    result = replay(cluster_of(*gpus), workload_of(*arrivals), policy)
    assert result.ran + result.tally.no_node[NoNode.NEVER] == len(arrivals)
    for one in result.tally.gangs.values():
        assert len(one.nodes) == (0 if one.started_at is None else one.pods)
    assert all(0 <= sample.cores <= 1 for sample in result.measured.samples)


def test_the_pages_example_does_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two files and its command, as they stand there."""
    page = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for file, text in re.findall(r"^cat > (\S+) <<EOF\n(.*?)^EOF$", page, flags=re.M | re.S):
        Path(file).write_text(text)
    (command,) = re.findall(r"^gpushare-agent (simulate .*gang.*)$", page, flags=re.M)
    assert main([*command.split(), "-q"], {}) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if re.match(r"[ab] +binpack", line)] == [
        ["a", "binpack", "4", "2", "2", "never"],
        ["b", "binpack", "4", "2", "2", "never"],
    ]
    words = command.replace("--no-gang-scheduler", "").split()
    assert main([*words, "-q", "-o", "json"], {}) == 0
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    assert [(one["name"], one["pods"], len(set(one["nodes"])), one["waited_s"]) for one in policy["gangs"]] == [
        ("a", 4, 2, 0),
        ("b", 4, 2, 3599),
    ]


def test_of_many_gangs_those_that_never_start_are_shown_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has an end, and says how many it leaves out."""
    (tmp_path / "nodes.csv").write_text("name,gpus,memory_mib,model\nn,4,16384,X\n")
    rows = [f"p{n},{n},1,100,0,g{n}\n" for n in range(SHOWN_GANGS + 2)]
    rows += [f"q{n},0,1,400,0,large\n" for n in range(2)]
    header = "name,arrival_s,duration_s,cores,memory_mib,gang\n"
    (tmp_path / "pods.csv").write_text(header + "".join(rows))
    words = ["simulate", "--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv"), "-q"]
    assert main([*words, "--policy", "binpack"], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("GANG"))
    assert lines[begin + 1].split()[:2] == ["large", "binpack"]
    assert "3 more: -o json" in lines


@pytest.mark.parametrize("policy", list(Policy))
def test_what_a_gang_leaves_is_for_the_first_that_came_and_not_for_those_that_fit_a_part_of_it(policy: Policy) -> None:
    """Both pods of `a` end at once, and `b`, which needs both GPUs, came before the single pod."""
    workload = workload_of(*gang("a", 2, 100), *gang("b", 2, 100, at_s=1.5), arrival(50, 100, 500, name="single"))
    result = replay(cluster_of(2), workload, policy)
    assert result.tally.gangs["b"].started_at == 101
    assert result.took_s == 701


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("gpus", "cores"), [((2, 1), (100, 200)), ((1, 1), (50, 50, 100)), ((4, 3), (300, 200, 200))])
def test_chance_does_not_decide_whether_a_gang_ever_starts(
    policy: Policy, gpus: tuple[int, ...], cores: tuple[int, ...]
) -> None:
    """The smaller pods come first, and nodes that look alike are drawn: the largest pod may find its only node taken."""
    pods = [arrival(0, one, 10, name=f"p{number}")._replace(gang="a") for number, one in enumerate(cores)]
    for seed in range(8):
        result = replay(cluster_of(*gpus), workload_of(*pods), policy, share_policy="spread", seed=seed)
        assert result.tally.gangs["a"].started_at == 0, seed
        assert result.tally.no_node == {}
