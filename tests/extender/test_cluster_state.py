"""The extender's books: nothing is given twice, whatever happens in which order, and everything comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.model.pods import HostRequest, Pod, PodPhase, Rank
from gpushare_agent.core.placement.fragmentation import KindCosts
from gpushare_agent.extender.cluster_state import ClusterState
from gpushare_agent.extender.decisions.pod_plan import kind_of, signature_of
from gpushare_agent.extender.decisions.quota import QuotaState
from gpushare_agent.extender.steps import at_once
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, Reservation, Stage
from tests.extender.support_extender import BLOCKS, state_document
from tests.extender.support_extender import cluster_node as node
from tests.support_core import NAMES, container, pod


class Quotas(QuotaState):
    """That decide as the test says."""

    def __init__(self, decide: Callable[..., Refused | None]) -> None:
        super().__init__(NAMES)
        self._decide = decide

    def __call__(self, pod: Pod, *, model: str, pool: str) -> Refused | None:
        return self._decide(pod, model=model, pool=pool)


def share(name: str, cores: int, blocks: int = 10) -> Pod:
    return pod(name, container(cores=cores, blocks=blocks), node_name="")


def on(owner: Pod, name: str) -> Pod:
    return replace(owner, node_name=name)


def state(*nodes: ClusterNode, **settings: str) -> ClusterState:
    made = ClusterState(policy=ClusterPolicy(names=NAMES, **settings))  # type: ignore[arg-type]
    for one in nodes:
        made.put_node(one, 0.0)
    return made


def reserve(cluster: ClusterState, owner: Pod, name: str = "a") -> Reservation:
    made = cluster.reserve(owner, name, 1.0)
    assert isinstance(made, Reservation), made
    return made


def gpus_of(reservation: Reservation | None) -> dict[int, int]:
    assert reservation is not None
    return {index: charge.cores for index, charge in reservation.plan.charges.items()}


def test_half_free_on_two_gpus_is_no_whole_gpu() -> None:
    """The hole that kube-scheduler leaves open: it adds up."""
    cluster = state(node("a"), node("b"))
    for number, place in enumerate(("a", "b")):
        for half in range(2):
            first = reserve(cluster, share(f"half-{number}-{half}", 60), place)
            assert len(first.plan.charges) == 1
    whole = pod("whole", container(cores=100), node_name="")
    answer = cluster.filter(whole, ["a", "b"])
    assert answer.fitting == []
    assert answer.failed == dict.fromkeys(["a", "b"], "only 0 of 2 GPUs are entirely free, 1 wanted")
    cluster.remove_pod(PodUid("uid-half-1-0"))
    assert cluster.filter(whole, ["a", "b"]).fitting == ["b"]


def test_a_gpu_that_the_pods_annotations_leave_out_is_not_chosen() -> None:
    """By filter, bind and preemption; a pod of the same size without them may be there."""
    cluster, found = state(node(gpus=2), node("b", gpus=1)), share("p", 30)
    urgent = replace(share("urgent", 99), annotations={"nvidia.com/use-gpuuuid": "GPU-a-1"}, rank=Rank(9))
    for one in (share("x", 90), share("y", 90), share("z", 90)):
        where = reserve(cluster, one, "b" if one.name == "z" else "a").node
        cluster.put_pod(on(one, where), 1.0)
    assert at_once(cluster.victims_steps(urgent, {"a": [], "b": []})) == {"a": ["uid-y"]}
    for name in "xyz":
        cluster.remove_pod(PodUid(f"uid-{name}"))
    chosen = replace(found, annotations={"nvidia.com/use-gpuuuid": "GPU-a-1"})
    assert cluster.filter(found, None).fitting == ["a", "b"]
    answer = cluster.filter(chosen, None)
    assert answer.fitting == ["a"]
    assert answer.unresolvable == {"b": "the pod's annotations leave out all healthy GPUs of the node"}
    (planned,) = reserve(cluster, chosen).plan.containers
    assert planned.gpus == (1,)
    assert reserve(cluster, replace(chosen, uid=PodUid("q"), name="q")).plan.containers[0].gpus == (1,)
    assert cluster.filter(found, None).fitting == ["a", "b"]


def test_the_same_bind_again_is_the_same_reservation() -> None:
    """A scheduler that lost the answer asks once more."""
    cluster = state(node(), node("b"))
    first = reserve(cluster, share("p", 60))
    assert reserve(cluster, share("p", 60)) is first
    elsewhere = cluster.reserve(share("p", 60), "b", 1.0)
    assert isinstance(elsewhere, Refused) and "is assumed on node a" in elsewhere.detail


def test_the_agents_word_counts_whatever_was_planned() -> None:
    """It put the pod on another GPU: that one is taken."""
    cluster = state(node())
    planned = reserve(cluster, share("p", 60))
    assert gpus_of(planned) == {0: 60}
    cluster.put_pod(on(share("p", 60), "a"), 2.0)
    held = {PodUid("uid-p"): {1: Charge(cores=60, blocks=10)}}
    cluster.put_node(node(allocated=held), 3.0)
    confirmed = cluster.reservation(PodUid("uid-p"))
    assert confirmed is not None and confirmed.stage is Stage.CONFIRMED and gpus_of(confirmed) == {1: 60}
    assert [c.gpus for c in confirmed.plan.containers] == [(0,)], "what was planned can still be compared"


@pytest.mark.parametrize("allocated", [{}, None], ids=["the agent does not name it", "the agent names nobody yet"])
def test_a_pod_that_nobody_tells_about_may_be_on_every_gpu(allocated: dict[PodUid, dict[int, Charge]] | None) -> None:
    """A leader died between its bind and our start. Nothing may be given twice, until the agent reports."""
    cluster = state(node(allocated=allocated))
    cluster.put_pod(on(share("unknown", 60), "a"), 1.0)
    found = cluster.reservation(PodUid("uid-unknown"))
    assert found is not None and found.stage is Stage.UNPLACED and gpus_of(found) == {0: 60, 1: 60}
    assert cluster.filter(share("p", 60), None).fitting == []
    assert cluster.filter(share("p", 40), None).fitting == ["a"]
    cluster.put_node(node(allocated={PodUid("uid-unknown"): {0: Charge(cores=60, blocks=10)}}), 2.0)
    assert cluster.filter(share("p", 60), None).fitting == ["a"]
    assert gpus_of(reserve(cluster, share("p", 60))) == {1: 60}


def test_the_pod_may_be_known_before_its_node() -> None:
    """Informers promise no order."""
    cluster = state()
    cluster.put_pod(on(share("p", 60), "a"), 1.0)
    assert cluster.reservation(PodUid("uid-p")) is None
    cluster.put_node(node(allocated={PodUid("uid-p"): {1: Charge(cores=60, blocks=10)}}), 2.0)
    assert gpus_of(cluster.reservation(PodUid("uid-p"))) == {1: 60}
    cluster.remove_node("a")
    assert cluster.filter(share("q", 10), ["a"]).failed["a"].startswith("the extender knows no GPUs")
    cluster.put_node(node(), 3.0)
    assert gpus_of(cluster.reservation(PodUid("uid-p"))) == {0: 60, 1: 60}


def test_a_bind_under_way_survives_its_node_going_and_coming() -> None:
    """A node's object may be deleted and made again within a bind; its GPUs must not be given twice."""
    cluster = state(node(gpus=1))
    reserve(cluster, share("p", 60))
    cluster.remove_node("a")
    kept = cluster.reservation(PodUid("uid-p"))
    assert kept is not None and kept.stage is Stage.ASSUMED and cluster.reservations() == [kept]
    cluster.put_node(node(gpus=1), 2.0)
    assert cluster.filter(share("q", 60), None).fitting == []
    cluster.remove_node("a")
    cluster.bound(PodUid("uid-p"))
    cluster.put_node(node(gpus=1), 3.0)
    bound = cluster.reservation(PodUid("uid-p"))
    assert bound is not None and bound.stage is Stage.BOUND
    cluster.remove_node("a")
    cluster.undo(PodUid("uid-p"))
    cluster.put_node(node(gpus=1), 4.0)
    assert cluster.filter(share("q", 60), None).fitting == ["a"], "what was bound is not known to be on the node yet"
    reserve(cluster, share("p", 60))
    cluster.remove_node("a")
    cluster.undo(PodUid("uid-p"))
    assert cluster.reservation(PodUid("uid-p")) is None
    cluster.put_node(node(gpus=1), 5.0)
    assert cluster.filter(share("q", 60), None).fitting == ["a"], "a bind that failed meanwhile leaves nothing"


def test_what_the_agent_holds_for_a_pod_that_is_gone_stays_taken() -> None:
    """Deleted by force, its processes run on."""
    held = {PodUid("uid-p"): {0: Charge(cores=60, blocks=10)}}
    cluster = state(node(gpus=1, allocated=held))
    assert cluster.filter(share("q", 60), None).fitting == []
    cluster.put_pod(on(share("p", 60), "a"), 1.0)
    cluster.remove_pod(PodUid("uid-p"))
    assert cluster.filter(share("q", 60), None).fitting == []
    cluster.put_node(node(gpus=1), 2.0)
    assert cluster.filter(share("q", 60), None).fitting == ["a"]


def test_an_agent_that_never_tells_does_not_make_its_node_useless() -> None:
    """Its pods are planned as it is likely to have placed them."""
    cluster = state(node(allocated=None, is_exact=False))
    for name in ("p", "q"):
        cluster.put_pod(on(share(name, 60), "a"), 1.0)
    assert gpus_of(cluster.reservation(PodUid("uid-p"))) == {0: 60}
    assert gpus_of(cluster.reservation(PodUid("uid-q"))) == {1: 60}


def test_a_pod_that_was_bound_elsewhere_gives_its_reservation_back() -> None:
    """Somebody bound it by hand."""
    cluster = state(node(gpus=1), node("b", gpus=1))
    reserve(cluster, share("p", 60))
    cluster.put_pod(on(share("p", 60), "b"), 2.0)
    assert cluster.filter(share("q", 60), ["a", "b"]).fitting == ["a"]


def test_a_pod_that_has_ended_holds_nothing() -> None:
    """Succeeded and Failed pods stay in the API server for long; one being deleted still holds."""
    cluster = state(node(gpus=1))
    owner = share("p", 60)
    reserve(cluster, owner)
    cluster.put_pod(replace(on(owner, "a"), is_deleting=True), 2.0)
    assert cluster.filter(share("q", 60), None).fitting == []
    cluster.put_pod(replace(on(owner, "a"), phase=PodPhase.SUCCEEDED), 3.0)
    assert cluster.filter(share("q", 60), None).fitting == ["a"]


def test_what_more_room_would_not_cure_is_unresolvable() -> None:
    """No eviction makes a GPU larger, or a node have more of them."""
    cluster = state(node("a"), node("b", gpus=1))
    reserve(cluster, share("x", 60), "a")
    pair = pod("pair", container(cores=200), node_name="")
    answer = cluster.filter(pair, ["a", "b"])
    assert (set(answer.failed), set(answer.unresolvable)) == ({"a"}, {"b"})
    huge = cluster.filter(share("huge", 10, BLOCKS + 1), ["a", "b"])
    assert set(huge.unresolvable) == {"a", "b"} and not huge.failed
    invalid = cluster.filter(pod("odd", container(cores=150), node_name=""), ["a"])
    assert "neither a share of one GPU nor whole GPUs" in invalid.unresolvable["a"]


def test_pods_that_ask_for_nothing_of_ours_pass() -> None:
    """Also through nodes that nobody knows."""
    cluster, plain = state(), pod("plain", container())
    assert cluster.filter(plain, ["x", "y"]).fitting == ["x", "y"]
    assert cluster.prioritize(plain, ["x"]) == [("x", 0)]
    assert at_once(cluster.victims_steps(plain, {"x": [PodUid("u")]})) == {"x": ["u"]}


def test_an_unhealthy_gpu_takes_nothing() -> None:
    """The node says so when nothing is left."""
    sick = replace(node(gpus=1), gpus=(replace(node().gpus[0], is_healthy=False),))
    cluster = state(sick)
    assert cluster.filter(share("p", 10), None).unresolvable == {"a": "the node has no healthy GPU"}
    cluster.put_node(node(gpus=1), 1.0)
    assert cluster.filter(share("p", 10), None).fitting == ["a"]


@pytest.mark.parametrize(("policy", "best"), [("binpack", "used"), ("spread", "empty")])
def test_nodes_are_scored_by_the_policy(policy: str, best: str) -> None:
    """binpack keeps free nodes free."""
    cluster = state(node("used"), node("empty"), node_policy=policy)
    reserve(cluster, share("x", 40), "used")
    scores = dict(cluster.prioritize(share("p", 30), ["used", "empty", "nobody"]))
    assert scores["nobody"] == 0
    assert max(scores, key=lambda name: scores[name]) == best
    assert all(0 <= score <= 10 for score in scores.values())


def usual(cluster: ClusterState, cores: int, count: int = 20) -> None:
    """So many pods of one kind were bound, to a node that is not known: they take nothing of the others."""
    for number in range(count):
        cluster.put_pod(on(share(f"usual-{number}", cores, 96 * cores // 100), "elsewhere"), 1.0)


def test_fgd_leaves_to_the_usual_pods_what_they_can_use() -> None:
    """A share of thirty goes to the GPU with thirty left, where pods of fifty are what comes, though others are fuller."""
    cluster = state(node("rest", gpus=1), node("half", gpus=8), node_policy="fgd")
    reserve(cluster, share("x", 70, 66), "rest")
    reserve(cluster, pod("y", container(cores=700), node_name=""), "half")
    reserve(cluster, share("z", 50, 48), "half")
    asking = share("p", 30, 26)
    assert dict(cluster.prioritize(asking, ["rest", "half"])) == {"rest": 3, "half": 10}
    usual(cluster, 50)
    assert dict(cluster.prioritize(asking, ["rest", "half"])) == {"rest": 10, "half": 3}


def test_fgd_leaves_cpus_and_memory_to_the_usual_pods() -> None:
    """Also those that pods without GPUs take, until they end: the free GPU of such a node is of no use to them."""
    size = {"cpu_milli": 8000, "memory_mib": 8192}
    cluster = state(node("a", gpus=1, **size), node("b", gpus=2, **size), node_policy="fgd")
    asking = pod("p", container(cores=100), node_name="", host_request=HostRequest(1000, 1024))
    for number in range(20):
        usual_pod = pod("p", container(cores=100), uid=f"usual-{number}", host_request=HostRequest(4096, 4096))
        cluster.put_pod(on(usual_pod, "elsewhere"), 1.0)
    assert max(cluster.prioritize(asking, ["a", "b"]), key=lambda one: one[1])[0] == "a"
    cluster.put_other_pod(PodUid("other"), "b", HostRequest(7000, 0))
    assert max(cluster.prioritize(asking, ["a", "b"]), key=lambda one: one[1])[0] == "b"
    cluster.remove_pod(PodUid("other"))
    assert max(cluster.prioritize(asking, ["a", "b"]), key=lambda one: one[1])[0] == "a"


cores_in_use = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), min_size=2, max_size=5)


@given(used=cores_in_use, cores=st.integers(1, 100))
def test_fgd_is_binpack_until_pods_were_seen(used: list[list[int]], cores: int) -> None:
    """Node by node, and GPU by GPU whatever was seen."""
    scores = {}
    for policy in ("binpack", "fgd"):
        cluster = state(*(node(f"n{at}", gpus=len(gpus)) for at, gpus in enumerate(used)), node_policy=policy)
        for at, gpus in enumerate(used):
            for number, taken in enumerate(gpus):
                if taken:
                    reserve(cluster, share(f"x-{at}-{number}", taken, 1), f"n{at}")
        asking = share("p", cores, 1) if cores < 100 else pod("p", container(cores=100), node_name="")
        scores[policy] = cluster.prioritize(asking, [f"n{at}" for at in range(len(used))])
    assert scores["fgd"] == scores["binpack"]


@given(used=cores_in_use, cores=st.integers(1, 100), host=st.sampled_from([(0, 0), (1024, 64), (4096, 512)]))
def test_what_a_node_has_left_is_what_fgd_has_reckoned_with(
    used: list[list[int]], cores: int, host: tuple[int, int]
) -> None:
    """The cost is that of the GPU that placement, extender's and agent's alike, takes."""
    (gpus, *_) = used
    # A hundred blocks, so that memory is in whole hundredths of a GPU as cores are.
    reported = tuple(replace(gpu, memory_mib=100 * 256) for gpu in node(gpus=len(gpus)).gpus)
    made = replace(node(gpus=len(gpus)), gpus=reported, cpu_milli=8192, memory_mib=1024)
    cluster = state(made, node_policy="fgd")
    usual(cluster, 50)
    for number, taken in enumerate(gpus):
        if taken:
            reserve(cluster, share(f"x-{number}", taken, taken))
    asking = pod("p", container(cores=cores, blocks=cores if cores < 100 else 0), node_name="")
    asking = replace(asking, host_request=HostRequest(*host))
    ledger, typical = cluster.node_ledger("a"), cluster.renew_typical()
    if not cluster.filter(asking, ["a"]).fitting:
        return
    assert ledger is not None and typical is not None
    before, kind = ledger.free, kind_of(signature_of(asking, NAMES), asking.host_request, NAMES)
    assert cluster.costs(asking, ["a"]) == [KindCosts(typical, kind).of(before)]
    reserve(cluster, asking)
    assert ledger.free == before.left(kind)


requests = st.builds(HostRequest, st.integers(0, 9), st.integers(0, 9))
changes = st.lists(
    st.tuples(st.sampled_from(["put", "end", "node", "no node"]), st.integers(0, 5), st.sampled_from("ab"), requests)
)


@given(changes)
def test_what_pods_request_of_a_node_is_counted_once_and_comes_back(
    events: list[tuple[str, int, str, HostRequest]],
) -> None:
    """Whatever comes first, pods or nodes, and whatever is said twice."""
    cluster, known, present = state(node_policy="fgd"), dict[int, tuple[str, HostRequest]](), set[str]()
    for what, number, name, request in events:
        if what == "put":
            cluster.put_other_pod(PodUid(str(number)), name, request)
            known[number] = name, request
        elif what == "end":
            cluster.remove_pod(PodUid(str(number)))
            known.pop(number, None)
        elif what == "node":
            cluster.put_node(node(name, cpu_milli=100, memory_mib=100), 1.0)
            present.add(name)
        else:
            cluster.remove_node(name)
            present.discard(name)
        for one in present:
            ledger = cluster.node_ledger(one)
            assert ledger is not None
            here = [asked for on_node, asked in known.values() if on_node == one]
            assert ledger.free.cpu_milli == 100 - sum(asked.cpu_milli for asked in here)
            assert ledger.free.memory_mib == 100 - sum(asked.memory_mib for asked in here)


def test_a_quota_is_asked_once_for_each_kind_of_node() -> None:
    """And its words reach the pod's owner."""
    asked: list[tuple[str, str]] = []

    def quota(owner: Pod, *, model: str, pool: str) -> Refused | None:
        asked.append((model, pool))
        return Refused(reason=RefusalReason.NOT_ENOUGH_CORES, detail="over the quota") if model == "P40" else None

    cluster = ClusterState(policy=ClusterPolicy(names=NAMES), quota=Quotas(quota))
    for name, model in (("a", "P40"), ("b", "P40"), ("c", "T4")):
        cluster.put_node(node(name, model=model), 0.0)
    answer = cluster.filter(share("p", 10), ["a", "b", "c"])
    assert answer.fitting == ["c"] and answer.unresolvable == dict.fromkeys("ab", "over the quota")
    assert asked == [("P40", ""), ("T4", "")]
    assert isinstance(cluster.reserve(share("p", 10), "a", 1.0), Refused)
    cluster.put_pod(on(share("x", 60), "a"), 1.0)
    assert at_once(cluster.victims_steps(share("p", 60), {"a": [PodUid("uid-x")]})) == {}, "nobody is evicted for it"


def test_a_filter_lets_others_in_between() -> None:
    """Pods with several containers cost a plan on every node."""
    cluster = state(*(node(f"n{number:03}") for number in range(300)))
    reserve(cluster, share("x", 90), "n000")
    three = pod("three", *(container(f"c{i}", 60, 5, position=i) for i in range(2)), node_name="")
    assert sum(1 for _ in cluster.filter_steps(three, None)) >= 5
    assert list(cluster.filter(three, None).failed) == ["n000"]


def test_a_pod_with_very_many_containers_is_not_planned_at_all() -> None:
    """One tenant's pod must not stop everybody's scheduling."""
    cluster = state(node())
    odd = pod("odd", *(container(f"c{i}", 1, 1, position=i) for i in range(17)), node_name="")
    answer = cluster.filter(odd, None)
    assert answer.unresolvable["a"].startswith("more than 16 containers of the pod ask for GPUs")
    assert isinstance(cluster.reserve(odd, "a", 1.0), Refused)
    fine = pod("fine", *(container(f"c{i}", 1, 1, position=i) for i in range(16)), node_name="")
    assert cluster.filter(fine, None).fitting == ["a"]


def test_what_is_too_much_together_is_said_so() -> None:
    """Each container alone would fit."""
    cluster = state(node())
    four = pod("four", *(container(f"c{i}", 60, 5, position=i) for i in range(4)), node_name="")
    reported = cluster.filter(four, None).failed["a"]
    assert reported.startswith(
        "the pod's containers ask for 240 cores with 20 memory blocks (5 GiB) together, the node has 200 cores"
    )
    whole = pod("whole", container("a", 200, 60), container("b", 10, 5, position=1), node_name="")
    assert (
        cluster.filter(whole, None)
        .failed["a"]
        .startswith("the pod's containers ask for 210 cores with 65 memory blocks (16.25 GiB) together")
    )


def test_a_node_that_names_a_pod_whose_bind_is_under_way_does_not_hold_it() -> None:
    """Else a node could keep a failed bind from being undone."""
    cluster = state(node())
    reserve(cluster, share("p", 60))
    cluster.put_node(node(allocated={PodUid("uid-p"): {1: Charge(cores=60, blocks=10)}}), 2.0)
    assumed = cluster.reservation(PodUid("uid-p"))
    assert assumed is not None and assumed.stage is Stage.ASSUMED
    cluster.bound(PodUid("uid-p"))
    confirmed = cluster.reservation(PodUid("uid-p"))
    assert confirmed is not None and confirmed.stage is Stage.CONFIRMED and gpus_of(confirmed) == {1: 60}


class Machine(RuleBasedStateMachine):
    """Two nodes and eight pods; binds succeed, fail, or are heard of late; agents confirm what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cluster = state(node("a"), node("b", gpus=3))
        self.pods = {
            PodUid(f"uid-{name}"): pod(name, container(cores=cores, blocks=blocks), node_name="")
            for name, cores, blocks in (
                ("s1", 30, 10), ("s2", 60, 40), ("s3", 60, 90), ("s4", 90, 5), ("w1", 100, 0), ("w2", 200, 0),
                ("s5", 10, 60), ("s6", 45, 45),
            )
        }  # fmt: skip
        self.truth: dict[PodUid, tuple[str, tuple[Charge, ...]]] = {}
        """What binds that went through have really taken: as the agent places it where it was planned."""
        self.assumed: dict[PodUid, tuple[str, tuple[Charge, ...]]] = {}
        self.unheard: set[PodUid] = set()

    uids = st.sampled_from(["s1", "s2", "s3", "s4", "w1", "w2", "s5", "s6"]).map(lambda name: PodUid(f"uid-{name}"))

    @rule(uid=uids, place=st.sampled_from(["a", "b"]))
    def reserve(self, uid: PodUid, place: str) -> None:
        if uid in self.truth or uid in self.assumed:
            return
        self.now += 1
        fits = place in self.cluster.filter(self.pods[uid], [place]).fitting
        made = self.cluster.reserve(self.pods[uid], place, self.now)
        assert isinstance(made, Reservation) == fits
        if isinstance(made, Reservation):
            self.assumed[uid] = place, made.plan.charges

    @rule(uid=uids)
    def bind_fails(self, uid: PodUid) -> None:
        """One that the API server has taken stays, whoever says undo."""
        if self.assumed.pop(uid, None) is not None or uid not in self.unheard:
            self.cluster.undo(uid)

    @rule(uid=uids, is_heard=st.booleans())
    def bind_succeeds(self, uid: PodUid, is_heard: bool) -> None:
        if uid in self.assumed:
            self.truth[uid] = self.assumed.pop(uid)
            if is_heard:
                self.cluster.bound(uid)
            else:
                self.unheard.add(uid)

    @rule(uid=uids)
    def the_informer_tells_of_the_pod(self, uid: PodUid) -> None:
        if uid in self.truth:
            self.unheard.discard(uid)
            self.cluster.put_pod(on(self.pods[uid], self.truth[uid][0]), self.now)
        else:
            self.cluster.put_pod(self.pods[uid], self.now)

    @rule(place=st.sampled_from(["a", "b"]), some=st.sets(uids))
    def the_agent_tells(self, place: str, some: set[PodUid]) -> None:
        held = {uid: charges for uid, (where, charges) in self.truth.items() if where == place and uid in some}
        self.cluster.put_node(node(place, gpus=2 if place == "a" else 3, allocated=held), self.now)

    @rule(uid=uids)
    def the_pod_ends(self, uid: PodUid) -> None:
        if uid in self.truth:
            place, _ = self.truth.pop(uid)
            self.unheard.discard(uid)
            self.cluster.remove_pod(uid)
            self.the_agent_tells(place, set(self.pods))

    @precondition(lambda self: not self.assumed and not self.unheard)
    @rule()
    def a_new_leader_lists_everything(self) -> None:
        self.cluster = state(node("a"), node("b", gpus=3))
        for uid, (place, _) in sorted(self.truth.items()):
            self.cluster.put_pod(on(self.pods[uid], place), self.now)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        """By what is really taken, not by what the ledger says."""
        taken: dict[tuple[str, int], list[int]] = {}
        for place, charges in [*self.truth.values(), *self.assumed.values()]:
            for index, charge in charges.items():
                used = taken.setdefault((place, index), [0, 0])
                used[0] += charge.cores
                used[1] += BLOCKS if charge.is_whole else charge.blocks
        for used in taken.values():
            assert used[0] <= CORES_PER_GPU and used[1] <= BLOCKS

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every pod that has something is on the ledger, and once all have ended nobody is."""
        booked = {reservation.pod_uid for reservation in self.cluster.reservations()}
        assert booked == set(self.truth) | set(self.assumed)
        if not booked:
            gpus = [gpu for one in state_document(self.cluster) for gpu in one["gpus"]]
            assert all(gpu["cores"]["allocated"] == gpu["memory"]["allocated_bytes"] == 0 for gpu in gpus)


TestInterleavings = Machine.TestCase
TestInterleavings.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


QUESTIONS = [
    *(
        pod("ask", container(cores=cores, blocks=blocks), node_name="")
        for cores, blocks in ((30, 10), (100, 0), (400, 0))
    ),
    pod("ask", container("one", cores=60, blocks=10), container("two", cores=60, blocks=90), node_name=""),
]
"""Of one container, of whole GPUs, of more than any node has, and of two containers, which are planned."""


def no_pool_of_two(asking: Pod, *, model: str, pool: str) -> Refused | None:
    return Refused(reason=RefusalReason.QUOTA_EXCEEDED, detail=f"no {model}") if pool == "two" else None


class Answers(RuleBasedStateMachine):
    """What is kept of former answers is no answer of its own: a state that was asked after every step says the same as one
    that went through the same and is asked for the first time."""

    NODES = ("a", "b", "c")
    node_policy = "binpack"

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.fresh = (
            ClusterState(
                policy=ClusterPolicy(names=NAMES, node_policy=self.node_policy),  # type: ignore[arg-type]
                quota=Quotas(no_pool_of_two),
            )
            for _ in range(2)
        )
        self.number = 0

    @rule(
        name=st.sampled_from(NODES), gpus=st.integers(1, 2), pool=st.sampled_from(["one", "two"]), healthy=st.booleans()
    )
    def put_node(self, name: str, gpus: int, pool: str, healthy: bool) -> None:
        made = node(name, gpus, pool=pool, cpu_milli=1000 * gpus, memory_mib=4096)
        for one in (self.asked, self.fresh):
            one.put_node(replace(made, gpus=tuple(replace(gpu, is_healthy=healthy) for gpu in made.gpus)), 0.0)

    @rule(name=st.sampled_from(NODES))
    def remove_node(self, name: str) -> None:
        for one in (self.asked, self.fresh):
            one.remove_node(name)

    @rule(name=st.sampled_from(NODES), cores=st.sampled_from([30, 60, 100]), is_bound=st.booleans())
    def reserve(self, name: str, cores: int, is_bound: bool) -> None:
        self.number += 1
        owner = share(f"p{self.number}", cores, 0 if cores == 100 else 10)
        for one in (self.asked, self.fresh):
            if isinstance(one.reserve(owner, name, 1.0), Reservation) and is_bound:
                one.bound(owner.uid)
                one.put_pod(on(owner, name), 1.0)

    @rule(name=st.sampled_from(NODES), cpu_milli=st.sampled_from([100, 600, 2000]))
    def put_other(self, name: str, cpu_milli: int) -> None:
        self.number += 1
        for one in (self.asked, self.fresh):
            one.put_other_pod(PodUid(f"other-{self.number}"), name, HostRequest(cpu_milli=cpu_milli, memory_mib=64))

    @rule(number=st.integers(1, 12))
    def remove_pod(self, number: int) -> None:
        for one in (self.asked, self.fresh):
            one.remove_pod(PodUid(f"uid-p{number}"))
            one.remove_pod(PodUid(f"other-{number}"))

    @rule(question=st.sampled_from(QUESTIONS), names=st.lists(st.sampled_from([*NODES, "nobody"]), unique=True))
    def ask(self, question: Pod, names: list[str]) -> None:
        """Also about a part of the nodes: what is said of the others stays as it was."""
        self.asked.filter(question, names)
        self.asked.costs(question, names)

    def teardown(self) -> None:
        names = ["nobody", *reversed(self.NODES)]
        for question in QUESTIONS:
            answer = self.asked.filter(question, names)
            assert answer == self.fresh.filter(question, names)
            assert sorted([*answer.fitting, *answer.failed, *answer.unresolvable]) == sorted(names)
            assert self.asked.costs(question, names) == self.fresh.costs(question, names)


class FgdAnswers(Answers):
    node_policy = "fgd"

    def __init__(self) -> None:
        """Both have learnt the same pods; the steps that follow are too few to look at them again."""
        super().__init__()
        for one in (self.asked, self.fresh):
            for number in range(24):
                cores = (30, 60, 100)[number % 3]
                owner = share(f"usual-{number}", cores, 0 if cores == 100 else 10)
                one.put_pod(replace(on(owner, "away"), host_request=HostRequest(cpu_milli=500, memory_mib=64)), 0.0)
            assert one.renew_typical() is not None


def test_cpus_that_another_pod_takes_change_the_cost() -> None:
    """A pod without GPUs changes no answer of filter, and what its node costs all the same."""
    machine = FgdAnswers()
    machine.put_node("a", 2, "one", True)
    machine.ask(QUESTIONS[0], ["a"])
    before = machine.asked.costs(QUESTIONS[0], ["a"])
    machine.put_other("a", 2000)
    machine.teardown()
    assert machine.asked.costs(QUESTIONS[0], ["a"]) != before


TestAnswers = Answers.TestCase
TestFgdAnswers = FgdAnswers.TestCase
TestAnswers.settings = TestFgdAnswers.settings = settings(
    max_examples=150, stateful_step_count=14, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
