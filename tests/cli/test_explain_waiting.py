"""Why a pod waits and what would let it start: every change that is named is applied to the cluster, which is then read
again and asked again, by the extender's own state."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.commands import COMMAND_LINE
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.extender.values import Reservation
from gpushare_agent.kubectl.cluster_reading import ReadCluster
from gpushare_agent.kubectl.decisions.changes import MAX_PLANS, Change, Kind, Waiting, waiting
from tests.cli.support_cli import agent_answers, busy_node, raw_list
from tests.cli.support_cluster_view import (
    BLOCKS,
    CORES,
    MODEL,
    Cluster,
    cards_of,
    extender,
    held_of,
    node,
    pod,
    ran,
    set_held,
)
from tests.fakes.api_server import json_server

WAITING = PodUid("w")
Explain = Callable[..., Awaitable[str]]


def ask(read: ReadCluster) -> Waiting:
    return waiting(read.view, read.view.pods[WAITING].pod)


async def asked(cluster: Cluster) -> Waiting:
    return ask(await cluster.read())


def kinds(found: Waiting) -> list[Kind]:
    return [change.kind for change in found.changes]


def change_of(found: Waiting, kind: Kind) -> Change:
    return next(change for change in found.changes if change.kind is kind)


def applied(cluster: Cluster, change: Change) -> Cluster:
    """The cluster once somebody has done what the change says."""
    after = copy.deepcopy(cluster)
    waits = next(one for one in after.pods if one["metadata"]["uid"] == WAITING)
    where = next(one for one in after.nodes if one["metadata"]["name"] == change.node)
    match change.kind:
        case Kind.CORES | Kind.MEMORY | Kind.CORES_AND_MEMORY:
            assert change.request is not None
            container = next(one for one in waits["spec"]["containers"] if one["name"] == change.container)
            for amounts in container["resources"].values():
                amounts |= {CORES: str(change.request.cores), BLOCKS: str(change.request.blocks)}
        case Kind.NODES:
            selector = waits["spec"]["nodeSelector"]
            for key, value in change.labels.items():
                selector.pop(key)
                if value is not None:
                    selector[key] = value
        case Kind.UNCORDON if change.uncordoned:
            cards = cards_of(where)
            for index in change.uncordoned:
                del cards[index]["cordoned"]
                cards[index]["is_healthy"] = True
            text = json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": cards})
            where["metadata"]["annotations"]["gpushare-agent/gpus"] = text
        case Kind.UNCORDON:
            where["spec"] = {}
        case Kind.QUOTA:
            assert change.quota is not None
            new = {"vcore": change.quota.vcore, "pool": list(change.quota.pools)}
            if change.quota.gpus is not None:
                new["quota"] = {model: count / 100 for model, count in change.quota.gpus.items()}
            after.quota = {"ns": {key: value for key, value in new.items() if value not in (None, [])}}
        case Kind.END:
            after.pods = [one for one in after.pods if one["metadata"]["uid"] not in change.ending]
            set_held(where, {uid: gpus for uid, gpus in held_of(where).items() if uid not in change.ending})
    return after


# --- random clusters ---


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Up to four small nodes, some cordoned, tainted or of another model, with pods as the extender has placed them; one
    pod waits."""
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        gpus = draw(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3))
        spec: dict[str, Any] = {}
        if draw(st.integers(0, 4)) == 0:
            spec = {
                "unschedulable": True,
                "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
            }
        elif draw(st.integers(0, 5)) == 0:
            spec = {"taints": [{"key": "of", "value": "others", "effect": "NoSchedule"}]}
        nodes.append(
            node(
                f"n{number}",
                gpus,
                cordoned=[0] if draw(st.integers(0, 4)) == 0 else [],
                sick=sorted(draw(st.sets(st.integers(0, 5), max_size=1))),
                labels={MODEL: draw(st.sampled_from(["A100", "T4"]))},
                cpu=draw(st.sampled_from(["2", "4", "64"])),
                **spec,
            )
        )
    sizes = st.sampled_from([(10, 2), (30, 4), (50, 8), (60, 3), (20, 12), (99, 8), (100, 0), (100, 16), (200, 0)])
    wanted = draw(st.lists(sizes, min_size=1, max_size=2))
    selector = {MODEL: "A100"} if draw(st.booleans()) else {}
    cluster = Cluster(nodes, [pod("w", *wanted, nodeSelector=selector)])
    for number, (cores, blocks) in enumerate(draw(st.lists(sizes, max_size=10))):
        _place(cluster, pod(f"p{number}", (cores, blocks)))
    if draw(st.booleans()):
        cluster.quota = {"ns": draw(st.sampled_from([{"vcore": 100}, {"quota": {"A100": 1}}, {"quota": {"T4": 2}}]))}
    return cluster


def _place(cluster: Cluster, raw: dict[str, Any]) -> None:
    """On the first node that takes it, as its agent reports it then."""
    cluster.pods.append(raw)
    read = asyncio.run(cluster.read())
    one = read.view.pods[PodUid(raw["metadata"]["uid"])].pod
    for where in cluster.nodes:
        reserved = read.state.reserve(one, where["metadata"]["name"], 0.0)
        if isinstance(reserved, Reservation):
            raw["spec"]["nodeName"] = where["metadata"]["name"]
            raw["status"]["phase"] = "Running"
            counts = {index: list(charge)[:4] for index, charge in reserved.plan.charges.items()}
            set_held(where, {**held_of(where), one.uid: counts})
            return
    cluster.pods.remove(raw)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(clusters())
def test_every_change_lets_the_pod_start(cluster: Cluster) -> None:
    """Where it says, on the GPUs that it says: applied, the node takes the pod for all that is checked, and the extender's
    state reserves those GPUs. Of each kind there is one at most, the cheapest rank first."""
    found = asyncio.run(asked(cluster))
    assert len(set(kinds(found))) == len(found.changes)
    assert [change.rank for change in found.changes] == sorted(change.rank for change in found.changes)
    if found.fitting:
        assert not found.changes
    for change in found.changes:
        after = asyncio.run(applied(cluster, change).read())
        assert change.node in ask(after).fitting, change
        reserved = after.state.reserve(after.view.pods[WAITING].pod, change.node, 0.0)
        assert isinstance(reserved, Reservation), change
        assert {gpu for one in reserved.plan.containers for gpu in one.gpus} == set(change.gpus)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(clusters())
def test_no_smaller_change_would_do(cluster: Cluster) -> None:
    """Of a pod with one container: not one core or block more, and no fewer pods that end, tried one by one."""
    if len(cluster.pods[0]["spec"]["containers"]) > 1:
        return
    found = asyncio.run(asked(cluster))
    for change in found.changes:
        if change.kind in (Kind.CORES, Kind.MEMORY) and change.request is not None:
            step = 100 if change.request.cores >= 100 else 1
            cores, blocks = (step, 0) if change.kind is Kind.CORES else (0, 1)
            more = copy.deepcopy(cluster)
            amounts = {CORES: str(change.request.cores + cores), BLOCKS: str(change.request.blocks + blocks)}
            for limits in more.pods[0]["spec"]["containers"][0]["resources"].values():
                limits |= amounts
            assert not asyncio.run(asked(more)).fitting, change
        if change.kind is Kind.END:
            others = [PodUid(one["metadata"]["uid"]) for one in cluster.pods[1:]]
            for count in range(1, len(change.ending)):
                for uids in combinations(others, count):
                    for where in cluster.nodes:
                        name = where["metadata"]["name"]
                        fewer = Change(kind=Kind.END, text="", node=name, gpus=(), cost=0, ending=uids)
                        assert name not in asyncio.run(asked(applied(cluster, fewer))).fitting, (change, uids)


# --- one kind after the other ---


async def test_the_request_is_named_first_then_the_operators_part_then_other_pods() -> None:
    """A full node, a node of another model, a cordoned GPU: one line each, in this order."""
    cluster = Cluster(
        [
            node("busy", [16], held={"p": {0: [70, 4]}}, labels={MODEL: "A100"}),
            node("other", [16], labels={MODEL: "T4"}),
            node("out", [16], cordoned=[0], labels={MODEL: "A100"}),
        ],
        [pod("w", (60, 8), nodeSelector={MODEL: "A100"}), pod("p", (70, 4), on="busy")],
    )
    found = await asked(cluster)
    assert [change.text for change in found.changes] == [
        "ask for 30 cores (30 fewer): GPU 0 of busy",
        "let its selector or affinity allow nodes with gaia.tencent.com/gpu-model=T4: GPU 0 of other",
        "uncordon GPU 0 of out (`gpushare-agent uncordon` there)",
        "the end of pod ns/p on GPU 0 of busy",
    ]


async def test_a_whole_gpu_that_nobody_has_free_may_be_a_share() -> None:
    """Cores and memory together, as much as a GPU has of both."""
    cluster = Cluster([node("n", [16], held={"p": {0: [30, 6]}})], [pod("w", (100, 0)), pod("p", (30, 6), on="n")])
    change = change_of(await asked(cluster), Kind.CORES_AND_MEMORY)
    assert change.text == "ask for 70 cores (30 fewer) and 10 memory blocks (2.5 GiB): GPU 0 of n"


async def test_a_quota_is_raised_by_what_is_missing() -> None:
    """Its numbers and the namespace."""
    cluster = Cluster([node("n", [16], labels={MODEL: "A100"})], [pod("w", (60, 8))], {"ns": {"quota": {"A100": 0.5}}})
    found = await asked(cluster)
    assert change_of(found, Kind.QUOTA).text == "the quota of namespace ns: A100 GPUs from 0.5 to 0.6: GPU 0 of n"
    assert change_of(found, Kind.CORES).request is not None
    assert kinds(found) == [Kind.CORES, Kind.QUOTA]


@pytest.mark.parametrize(
    ("shown_by", "is_enforced"),
    [
        ([], False),
        ([extender(is_ready=False)], False),
        ([extender()], True),
        # That of a sandbox has no pod.
        ([pod("refused", (1, 1), said="1 the pod asks for 1 vcore; namespace ns has used 0 of its quota of 0")], True),
        ([pod("refused", (1, 1), said="1 the quota of namespace ns allows no GPUs at all.")], True),
        (
            [pod("of-a-queue", (1, 1), said="queue resource quota insufficient: insufficient tencent.com/vcuda-core")],
            False,
        ),
    ],
)
async def test_a_quota_that_no_extender_keeps_holds_up_no_pod(
    shown_by: list[dict[str, Any]], is_enforced: bool, explain: Explain
) -> None:
    quota = raw_list([{"data": {"gpu_quota": json.dumps({"ns": {"vcore": 0}})}}])
    cluster = Cluster([node("n", [16])], [pod("w", (60, 8)), *shown_by])
    text = await explain(cluster, **{"/api/v1/namespaces/kube-system/configmaps": quota})
    assert ("the quota (no extender enforces it here: none is Ready)" not in text) is is_enforced
    assert ("  fits      now on GPU 0 of n: the scheduler has not tried again yet" not in text) is is_enforced


async def test_a_node_refused_for_other_reasons_is_promised_to_nobody() -> None:
    """CPU, a taint, and a label: the reasons are counted, and no change of GPUs is named that would not help."""
    cluster = Cluster(
        [
            node("tainted", [16], taints=[{"key": "a", "value": "b", "effect": "NoExecute"}]),
            node("busy", [16], cpu="1500m"),
        ],
        [pod("w", (60, 8), cpu="2"), pod("p", on="busy", cpu="0")],
    )
    found = await asked(cluster)
    assert (found.fitting, found.changes) == ((), ())
    assert found.others == {"the taint a=b:NoExecute is not tolerated": 1, "too little cpu is left": 1}
    cluster.pods[0]["spec"]["tolerations"] = [{"key": "a", "operator": "Exists"}]
    assert (await asked(cluster)).fitting == ("tainted",)


async def test_the_end_of_a_pod_gives_its_cpu_too() -> None:
    """Its GPU has room, and its node no CPU: the pod that has both is named."""
    cluster = Cluster(
        [node("n", [16, 16], cpu="4", held={"p": {0: [10, 2]}})],
        [pod("w", (60, 8), cpu="2"), pod("p", (10, 2), on="n", cpu="3")],
    )
    found = await asked(cluster)
    assert [change.ending for change in found.changes] == [("p",)]


async def test_a_gpu_that_is_unhealthy_too_is_not_named_for_an_uncordon() -> None:
    """Nor one whose agent is away."""
    cluster = Cluster(
        [node("n", [16, 16], cordoned=[0], sick=[0], held={"p": {1: [100, 0, 0, 1]}})], [pod("w", (60, 8))]
    )
    assert Kind.UNCORDON not in kinds(await asked(cluster))
    away = node("away", [16, 16], cordoned=[0])
    away["status"]["allocatable"] = {CORES: "0", BLOCKS: "0"}
    assert Kind.UNCORDON not in kinds(await asked(Cluster([away], [pod("w", (60, 8))])))


async def test_plans_for_pods_of_several_containers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared is said."""
    monkeypatch.setattr("gpushare_agent.kubectl.decisions.changes.MAX_PLANS", 5)
    held = {"p": {0: [80, 4]}}
    nodes = [
        node(f"n{number}", [16], held={f"{uid}{number}": had for uid, had in held.items()}) for number in range(20)
    ]
    cluster = Cluster(nodes, [pod("w", (15, 8), (15, 8))])
    assert (await asked(cluster)).tried < 20 <= MAX_PLANS


# --- what the command prints ---


async def explained(cluster: Cluster, short_dir: Path, *words: str, is_agent: bool = False, **answers: Any) -> int:
    """By the plugin or an agent's own program, from an API server."""
    words = ("explain", "w", "-n", "ns", *words)
    answers = {"/api/v1/namespaces/ns/pods/w": cluster.pods[0]} | answers
    if not is_agent:
        return await ran(cluster, short_dir, *words, **answers)
    async with json_server(agent_answers(busy_node())) as agent:
        return await ran(cluster, short_dir, *words, f"--server={agent.url}", line=COMMAND_LINE, **answers)


@pytest.fixture
def explain(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    """What is printed on both outputs, with the arguments of `explained`."""

    async def explain(cluster: Cluster, *words: str, code: int = 0, **more: Any) -> str:
        assert await explained(cluster, short_dir, *words, **more) == code
        return "".join(capsys.readouterr())

    return explain


def full_node() -> Cluster:
    refused = {"type": "PodScheduled", "message": "0/1 nodes are available: 1 \x1b[31mno GPU."}
    waits = pod("w", (60, 8), schedulerName="gpushare-scheduler")
    waits["status"]["conditions"] = [refused]
    return Cluster([node("n", [16], held={"p": {0: [70, 4]}})], [waits, pod("p", (70, 4), on="n")])


async def test_a_waiting_pod_is_explained(explain: Explain) -> None:
    """Request, the scheduler's words without their control characters, the extender's reasons, the changes, and what was
    not checked; as JSON, the same in fields."""
    assert (await explain(full_node())).splitlines() == [
        "ns/w waits for a node",
        "  request   60 cores with 8 memory blocks (2 GiB)",
        "  scheduler 0/1 nodes are available: 1 \ufffd[31mno GPU.",
        "  GPUs      1 node: no GPU has more than 30 cores free",
        "  to start now, one of:",
        "    - ask for 30 cores (30 fewer): GPU 0 of n",
        "    - the end of pod ns/p on GPU 0 of n",
        "  unchecked whether the scheduler gpushare-scheduler runs",
    ]
    document = json.loads(await explain(full_node(), "-o", "json"))
    assert (document["schema"], document["pod"], document["decisions"]) == (2, "w", [])
    found = document["waiting"]
    assert (found["namespace"], found["nodes"], found["fitting"]) == ("ns", 1, {"nodes": [], "gpus": []})
    assert found["reasons"] == {"no GPU has more than 30 cores free": 1}
    less, end = found["changes"]
    assert (less["kind"], less["container"], less["cores"], less["memory_bytes"]) == ("cores", "c0", 30, 2 << 30)
    assert (end["kind"], end["node"], end["gpus"], end["pods"]) == ("end", "n", [0], [{"namespace": "ns", "pod": "p"}])


async def test_a_node_whose_gpus_are_all_for_claims_says_so(explain: Explain) -> None:
    """To the device plugins they are Unhealthy, and nothing is wrong with them."""
    for_claims = node("n", [16, 16], sick=[0, 1])
    annotations = for_claims["metadata"]["annotations"]
    text = annotations["gpushare-agent/gpus"]
    annotations["gpushare-agent/gpus"] = text.replace(
        '"is_healthy": false', '"is_healthy": false, "reason": "for claims"'
    )
    told = await explain(Cluster([for_claims], [pod("w", (60, 8))]))
    assert "  GPUs      1 node: the node has no healthy GPU; 1 node: for claims" in told.splitlines()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("spec", "annotations", "said"),
    [
        # Kubernetes' own never looks at it.
        ({"schedulerName": "volcano"}, {},
         "nothing so far; the pod's schedulerName is volcano: that scheduler alone may place it"),
        # Before it costs an admission.
        ({}, {"gpushare-agent/isolaton": "mps"}, "annotation gpushare-agent/isolaton is unknown and has no effect: did you "
         "mean tencent.com/gpu-isolation?"),
    ],
)  # fmt: skip
async def test_what_the_pod_itself_says_is_named_also_where_nothing_of_the_cluster_may_be_read(
    explain: Explain, spec: dict[str, str], annotations: dict[str, str], said: str, is_known: bool
) -> None:
    waits = pod("w", (60, 8), **spec)
    waits["metadata"]["annotations"] = annotations
    denied = {} if is_known else {"/api/v1/nodes": (403, {"kind": "Status", "message": "forbidden"})}
    told = await explain(Cluster([node("n", [16])], [waits]), code=0 if is_known else 1, **denied)
    assert said in " ".join(told.split())


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        ({CORES: "30", BLOCKS: "4Gi"}, f"Write {BLOCKS}: 16 for 4 GiB."),
        ({CORES: "30", BLOCKS: "999999999"}, f"Write {BLOCKS}: 4 for 1 GiB."),
        ({"tencent.com/vcuda-cores": "30", BLOCKS: "16"}, f"Write {CORES}: 30, in 1/100 of a GPU's compute."),
        ({CORES: "30", "tencent.com/vcuda-mem": "16"}, f"Write {BLOCKS}: 16 for 4 GiB."),
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}, f"Write {CORES}: 1 to 99 and {BLOCKS}: 12."),
        ({CORES: "150", BLOCKS: "16"}, "the next valid numbers of cores are 100 and 200."),
        ({"aliyun.com/gpu-mem": "2"}, f"of GPUShare. Write {CORES}: 1 to 99 and {BLOCKS}: 8."),
    ],
)
@pytest.mark.parametrize("is_agent", [False, True])
async def test_a_wrong_request_is_answered_with_what_to_write(
    explain: Explain, limits: dict[str, str], remedy: str, *, is_agent: bool
) -> None:
    """The same by both programs: no other size and no other node would help."""
    mistaken = pod("w", (30, 8))
    mistaken["spec"]["containers"][0]["resources"] = {"limits": limits}
    cluster = Cluster([node("n", [16, 16])], [mistaken])
    told = await explain(cluster, is_agent=is_agent)
    asked = ", ".join(f"{name}: {count}" for name, count in sorted(limits.items()))
    assert f"  request   {asked}" in told
    assert "  mistake   container c0: " in told and remedy in told
    assert "to start" not in told and "GPUs  " not in told
    # An extender gives it for each node: it is said once.
    [mistake] = [line.removeprefix("  mistake   ") for line in told.splitlines() if line.startswith("  mistake")]
    said = f"0/9 nodes are available: 2 too few, 7 {mistake}. preemption: none"
    mistaken["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": said}]
    told = await explain(cluster, is_agent=is_agent)
    assert "  scheduler 0/9 nodes are available: 2 too few, 7 for the mistake below. preemption: none\n" in told


async def test_more_gpus_than_any_node_has_is_a_mistake_and_has_changes(explain: Explain) -> None:
    """The most that can be written, and what would start now."""
    cluster = Cluster([node("n", [16, 16], held={"p": {0: [10, 2]}})], [pod("w", (1600, 0)), pod("p", (10, 2), on="n")])
    told = await explain(cluster)
    assert (
        f"  mistake   container c0: 1600 cores are 16 GPUs, and no node has more than 2. Write {CORES}: 200 or less."
        in told
    )
    assert "    - ask for 100 cores (1500 fewer): GPU 1 of n" in told


@pytest.mark.parametrize(
    ("of_node", "spec", "said"),
    [
        ({"labels": {"pool": "a"}}, {"nodeSelector": {"pool": "b"}},
         "the node does not match the pod's nodeSelector pool=b"),
        ({}, {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}}}},
         "the node does not match the pod's node affinity on zone"),
        ({"unschedulable": True}, {}, "the node is cordoned"),
    ],
)  # fmt: skip
async def test_a_node_with_room_that_is_refused_is_named(
    explain: Explain, of_node: dict[str, Any], spec: dict[str, Any], said: str
) -> None:
    """The nodes do offer shares of GPUs."""
    told = await explain(Cluster([node("n", [16], **of_node)], [pod("w", (30, 8), **spec)]))
    assert f"  also      nodes with room on their GPUs are refused: {said} (1 node)" in told
    assert "no node offers" not in told
    assert "  GPUs      no node offers shares of GPUs" in await explain(Cluster([], [pod("w", (30, 8), **spec)]))


async def test_a_pod_that_asks_by_claims_alone_asks_for_something(explain: Explain) -> None:
    """What would let it start is the scheduler's to say, because it places claims."""
    claiming = pod("w", (0, 0), resourceClaims=[{"name": "gpu", "resourceClaimName": "c"}])
    claiming["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    told = " ".join((await explain(Cluster([node("n", [16])], [claiming]), code=1)).split())
    assert "The pod asks for claim gpu; agents offer" in told and "in ResourceSlices what claims may ask for." in told


async def test_the_missing_right_is_named(explain: Explain) -> None:
    """Whoever may read his own namespace alone gets the scheduler's words and the right that is missing; without the right
    to read the quota the rest is worked out."""
    denied = (403, {"kind": "Status", "message": 'nodes is forbidden: User "jane" cannot list resource "nodes"'})
    said = await explain(full_node(), code=1, **{"/api/v1/nodes": denied})
    assert len(said.splitlines()) == 1
    assert "ns/w is on no node yet" in said
    assert 'User "jane" cannot list resource "nodes"' in said
    assert "docs/reference/cli.md" in said
    told = await explain(full_node(), **{"/api/v1/namespaces/kube-system/configmaps": denied})
    assert "unchecked whether the scheduler gpushare-scheduler runs; the quota (cannot list" in told
