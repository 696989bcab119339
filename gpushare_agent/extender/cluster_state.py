"""The extender's one state: what it knows of the cluster, and the decisions that change it. Synchronous, event loop only.

The informers' handlers call `put_…` and `remove_…`, the verbs the rest. `filter_steps`, `prioritize_steps` and
`victims_steps` change nothing, so that preemption and autoscalers may ask what would be; `reserve` decides and commits in
one step, so that no share is allocated twice.

State owned: the nodes (a NodeLedger each, decisions/ledger.py), a reservation for every pod that has something of ours or
may have it, nominated pods, and the CPU and main memory that every other pod requests; answers already worked out, by
signature of the pod; under policy fgd costs by kind of pod; the pods that usually come (learnt_pods.py), and since when each
node is known without a report. decisions/quota.py learns what counts against quotas. Times are monotonic seconds.

Sources of what a pod has, best first: the report of the node's agent; our own plan; without both, all that it may have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import HostRequest, Pod
from gpushare_agent.core.model.resources import NOTHING, request_of
from gpushare_agent.core.placement import GpuAccount, validate_request
from gpushare_agent.core.placement.fragmentation import KindCosts, PodKind, TypicalPods
from gpushare_agent.core.placement.gpu_account import Capacity, capacity_of, describe_request
from gpushare_agent.core.placement.gpu_choice import GpuChoice, accepting, choice_of
from gpushare_agent.core.placement.mistakes import Offer
from gpushare_agent.core.placement.place import SharePolicy
from gpushare_agent.extender.decisions.ledger import NOTHING_HOSTED, Hosted, NodeLedger
from gpushare_agent.extender.decisions.pod_plan import (
    Signature,
    charges_anywhere,
    fullness_cost,
    kind_of,
    lack_together,
    plan_pod,
    scores_of,
    signature_of,
)
from gpushare_agent.extender.decisions.preemption import Victim, by_importance, charged, choose_victims, cost_of
from gpushare_agent.extender.decisions.quota import QuotaState
from gpushare_agent.extender.learnt_pods import LearntPods
from gpushare_agent.extender.steps import Steps, at_once
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, NodeKind, PodPlan, Reservation, Stage

K = TypeVar("K")
V = TypeVar("V")

MAX_ASKING = 16
"""Containers of one pod that ask for GPUs. Each is planned on every node: without a limit a pod with a thousand of them
stops the scheduling of the whole cluster (measured: 16 s on 600 nodes)."""
WORK_OF_A_STEP = 400
COST_OF_A_PLAN = 6
"""Planning a container costs about six times as much as comparing it with a node's summary, 10 µs."""
MAX_SIGNATURES = 32
"""Each takes about a mebibyte with 5,000 nodes; so does each kind of pod whose costs are kept."""
MAX_ALIKE = 4096
"""Verdicts by capacity: nodes are alike, most of all the free and the full ones."""
REPORT_WAIT_S = 2.0
"""The wait from the first sight of a node without its agent's report. The agent registers with the kubelet first, and
connects to the API server only then: pods are scheduled there meanwhile (measured: the report follows 0.3 to 1 s
later)."""
NO_PLAN = PodPlan(containers=(), charges={})
_KEPT = "the GPUs where it fits are kept for pods of its priority or a higher one that are nominated for the node"
_UNKNOWN = "the extender knows no GPUs of this node: does the agent run there?"


class Filtered(Struct, kw_only=True):
    """The nodes that were asked about: those where the pod fits, in their order; for the others why not. A node where the
    end of other pods changes nothing is in `unresolvable`. `error` is why the request could not be answered."""

    fitting: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)
    error: str = ""
    over_quota: set[NodeKind] = field(default_factory=set)
    """The kinds of nodes that a quota refused."""


class _Verdict(NamedTuple):
    """About one node. `text` is empty where the pod fits; `cost`, by fullness, counts only then."""

    text: str
    is_final: bool = False
    cost: float = 0.0


_Verdicts = dict[str, _Verdict]
"""For the pods of one signature that accept the same GPUs, by node. A node that changes is taken out: between two requests a
few do, of thousands."""


class ClusterState:
    """`quota` is asked for each kind of node, and learns what counts; nobody has one where it is not given."""

    def __init__(self, *, policy: ClusterPolicy, quota: QuotaState | None = None) -> None:
        self.policy = policy
        self.quota = quota or QuotaState(policy.names)
        self._fullness: SharePolicy = "spread" if policy.node_policy == "spread" else "binpack"
        self._nodes: dict[str, NodeLedger] = {}
        self._pods: dict[PodUid, tuple[Pod, str]] = {}
        """The pods that are bound or reserved, and on which node."""
        self._pods_on: defaultdict[str, dict[PodUid, None]] = defaultdict(dict)
        """The same by node, also of nodes that are not known."""
        self._reservations: dict[PodUid, Reservation] = {}
        """Also of binds under way to a node that has gone meanwhile: it may come back before they end."""
        self._host_requests: dict[PodUid, tuple[str, HostRequest]] = {}
        self._hosted: dict[str, Hosted] = {}
        """Their sums by node, of nodes that are away or offer no GPUs, too."""
        self._unreported_since: dict[str, float] = {}
        self._answers: OrderedDict[tuple[Signature, GpuChoice], _Verdicts] = OrderedDict()
        self._costs: OrderedDict[PodKind, dict[str, float]] = OrderedDict()
        """By policy fgd alone."""
        self._alone = lru_cache(maxsize=MAX_ALIKE)(self._verdict_alone)
        self._kinds: list[NodeKind] | None = None
        """The kinds of the nodes, each once: a few, of thousands of nodes. None: to be worked out."""
        self._offer: Offer | None = None
        """None: to be worked out."""
        self._resources: set[str] = set()
        """All that any node has offered."""
        self._learnt = LearntPods()
        self._typical: TypicalPods | None = None

        self._nominated: defaultdict[str, dict[PodUid, Pod]] = defaultdict(dict)
        """By node the pods without a node that are nominated for it: the room is theirs."""
        self._evicted: dict[PodUid, float] = {}
        """The pods that `preempted` named, and when: they end, though the watch may not show it yet."""

    # --- from the informers ---

    # put_node, in the order of the code:
    #
    # node           pod                                             becomes
    # new            reserved, its bind under way                    as it was
    # new            bound, the agent reports it                     CONFIRMED with the reported charges
    # new            bound, reserved                                 BOUND with the plan's charges
    # new            bound, neither                                  UNPLACED (`_guess`)
    # unchanged      any                                             as it was
    # changed        reported again or otherwise, not ASSUMED        CONFIRMED with the reported charges
    # changed        reported, ASSUMED                               as it was: an agent cannot confirm a pod before its bind
    # changed        reported before and not now                     as it was, until the pod ends
    # new, changed   reported, without a reservation                 unattributed: charged, to no pod

    def put_node(self, node: ClusterNode, now: float) -> None:
        # Known with its report: nothing is waited for. Without one the first sight counts, however often the node
        # changes.
        if node.is_exact:
            self._unreported_since.pop(node.name, None)
        else:
            self._unreported_since.setdefault(node.name, now)
        ledger, reported = self._nodes.get(node.name), node.allocated or {}
        # The watch delivers a node with every update of its status.
        if ledger is not None and ledger.node == node:
            return
        if ledger is None or ledger.node.kind != node.kind:
            self._kinds = None
        if ledger is None or ledger.node.gpus != node.gpus:
            self._offer = None
        is_recounted = self.quota.put_node(node)
        if ledger is None:
            ledger = self._nodes[node.name] = NodeLedger(node, self.policy.names, self._node_changed)
            ledger.set_hosted(self._hosted.get(node.name, NOTHING_HOSTED))
            on_node = self._pods_on.get(node.name, ())
            for known in [self._reservations[uid] for uid in on_node if uid in self._reservations]:
                ledger.add(known)
            for pod in [self._pods[uid][0] for uid in on_node]:
                if pod.node_name:
                    self._resolve(ledger, pod, now)
        else:
            former = ledger.node.allocated or {}
            ledger.set_node(node)
            for uid, charges in reported.items():
                reserved = ledger.reservations.get(uid)
                # An ASSUMED pod is left alone: an agent that names it would otherwise keep its bind from being undone.
                if former.get(uid) != charges and reserved is not None and reserved.stage is not Stage.ASSUMED:
                    self._confirm(reserved, charges, now)
        if is_recounted:
            for uid in ledger.reservations:
                self.quota.count(*self._pods[uid])
        # Pods that were ended by force, or that our watch has not shown yet: their processes still have the GPU.
        ledger.set_unattributed({uid: charges for uid, charges in reported.items() if uid not in ledger.reservations})

    def remove_node(self, name: str) -> None:
        """Its reservations are dropped until it comes back, except those of binds that are under way."""
        self._unreported_since.pop(name, None)
        ledger = self._nodes.pop(name, None)
        if ledger is None:
            return
        self._kinds = self._offer = None
        self.quota.remove_node(name)
        for uid, reservation in ledger.reservations.items():
            if reservation.stage is not Stage.ASSUMED:
                self._drop_reservation(uid)
        self._node_changed(name, True)

    def put_resources(self, names: Set[str]) -> None:
        """The extended resources of a node, whether it is known otherwise or not."""
        if not names <= self._resources:
            self._resources |= names
            self._offer = None

    def put_pod(self, pod: Pod, now: float) -> None:
        """A pod that asks for something of ours. It counts from its bind to its end."""
        self._end_nomination(pod.uid)
        if pod.is_terminal:
            self.remove_pod(pod.uid)
        # A pod without a node has nothing yet, unless a bind of ours has reserved it.
        elif not pod.node_name:
            if pod.rank.nominated_node:
                self._nominated[pod.rank.nominated_node][pod.uid] = pod
        else:
            # Another scheduler bound it elsewhere: what was planned here will not happen.
            if (known := self._reservations.get(pod.uid)) is not None and known.node != pod.node_name:
                self._release(pod.uid)
            self._place(pod, pod.node_name)
            if (ledger := self._nodes.get(pod.node_name)) is not None:
                self._resolve(ledger, pod, now)
            if self.policy.node_policy == "fgd" and (signature := signature_of(pod, self.policy.names)):
                self._learnt.put(pod.uid, kind_of(signature, pod.host_request, self.policy.names))

    def put_other_pod(self, uid: PodUid, node: str, request: HostRequest) -> None:
        """A bound pod that asks for nothing of ours: only its CPU and main memory count."""
        # The watch delivers a pod with every change of its status.
        if self._host_requests.get(uid) != (node, request):
            self._drop_hosted(uid)
            self._host_requests[uid] = node, request
            self._add_hosted(node, request, 1)

    def remove_pod(self, uid: PodUid) -> None:
        """A pod of either kind ends."""
        self._learnt.end(uid)
        self._release(uid)

    # --- from the scheduler ---

    def filter(self, pod: Pod, names: Sequence[str] | None) -> Filtered:
        """Where the pod fits, among all known nodes where none are named. Changes nothing."""
        return at_once(self.filter_steps(pod, names))

    def filter_steps(self, pod: Pod, names: Sequence[str] | None) -> Steps[Filtered]:
        """`filter` in steps of a few milliseconds, between which the event loop may do other work. The state may change
        meanwhile: each verdict is about its node as it is at that moment."""
        signature = signature_of(pod, self.policy.names)
        asked = list(names) if names is not None else self.node_names()
        if not signature:
            return Filtered(fitting=asked)
        # For all nodes at once, before any of them: it is true for each, and planning would be in vain.
        invalid = self._invalid(pod)
        if invalid:
            # Unresolvable: kube-scheduler would otherwise look for pods to evict, which helps no invalid request.
            return Filtered(unresolvable=dict.fromkeys(asked, invalid))
        answer = Filtered()
        # The quota before the capacity: what no wait for GPUs would change is the reason to show. Unresolvable, because
        # evicting pods of other namespaces frees none of this one's quota.
        if over := self._over_quota(pod):
            kinds = {name: self._nodes[name].node.kind for name in asked if name in self._nodes}
            answer.unresolvable = {name: over[kind] for name, kind in kinds.items() if kind in over}
            answer.over_quota = over.keys() & kinds.values()
            asked = [name for name in asked if name not in answer.unresolvable]
        verdicts = yield from self._verdicts_steps(pod, signature, asked)
        kept = yield from self._kept_steps(pod, frozenset(asked) if self._nominated else ())
        for name, verdict in zip(asked, verdicts, strict=True):
            # `failed`, not unresolvable, where no GPUs are known: the node's agent may start at any moment.
            if verdict is None:
                answer.failed[name] = _UNKNOWN
            elif verdict.is_final:
                answer.unresolvable[name] = verdict.text
            elif verdict.text or name in kept:
                answer.failed[name] = verdict.text or _KEPT
            else:
                answer.fitting.append(name)
        return answer

    def somewhere_steps(self, pod: Pod) -> Steps[list[str]]:
        """All known nodes that would take the pod, by GPUs and quota, the fullest first, in steps."""
        signature = signature_of(pod, self.policy.names)
        if not signature or self._invalid(pod):
            return []
        over, names = self._over_quota(pod), self.node_names()
        found = zip((yield from self._verdicts_steps(pod, signature, names)), names, strict=True)
        costs = {name: verdict.cost for verdict, name in found if verdict is not None and not verdict.text}
        kept = yield from self._kept_steps(pod, costs)
        known = (name for name in costs if name in self._nodes and name not in kept)
        return sorted((name for name in known if self._nodes[name].node.kind not in over), key=lambda name: costs[name])

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score from 0 to 10 for each node, 0 where it does not fit: `scores_of` its cost among the costs of all."""
        return at_once(self.prioritize_steps(pod, names))

    def prioritize_steps(self, pod: Pod, names: Sequence[str]) -> Steps[list[tuple[str, int]]]:
        """`prioritize` in steps of a few milliseconds."""
        costs = yield from self.costs_steps(pod, names)
        return list(zip(names, scores_of(costs), strict=True))

    def costs(self, pod: Pod, names: Sequence[str]) -> list[float | None]:
        """The pod's cost on each node by the policy, the least is best; None where it does not fit."""
        return at_once(self.costs_steps(pod, names))

    def costs_steps(self, pod: Pod, names: Sequence[str]) -> Steps[list[float | None]]:
        """`costs` in steps."""
        signature = signature_of(pod, self.policy.names)
        if not signature or self._invalid(pod):
            return [None] * len(names)
        verdicts = yield from self._verdicts_steps(pod, signature, names)
        costs = [None if one is None or one.text else one.cost for one in verdicts]
        typical = self.renew_typical()
        if typical is None:
            return costs
        kind = kind_of(signature, pod.host_request, self.policy.names)
        of_kind, known = KindCosts(typical, kind), _cached(self._costs, kind)
        work = 0
        for number, name in enumerate(names):
            if costs[number] is None:
                continue
            if (cost := known.get(name)) is None and (ledger := self._nodes.get(name)) is not None:
                cost = known[name] = of_kind.of(ledger.free)
                work += 1
            costs[number] = cost
            if work >= WORK_OF_A_STEP:
                work = 0
                yield
        return costs

    def renew_typical(self) -> TypicalPods | None:
        """The pods that usually come, by the counts so far. None where the policy is not fgd, or too few pods were seen:
        then nodes are chosen by fullness, which is binpack."""
        typical = self._learnt.typical(self._supply)
        if typical is not self._typical:
            self._typical = typical
            self._costs.clear()
        return typical

    @property
    def typical(self) -> TypicalPods | None:
        """Those by which nodes were chosen last; reading them changes nothing."""
        return self._typical

    def _supply(self) -> Mapping[str, int]:
        supply: Counter[str] = Counter()
        for _, ledger in sorted(self._nodes.items()):
            supply[ledger.node.model] += len(ledger.node.gpus)
        return supply

    def awaits_report(self, node: str, now: float) -> bool:
        """The node has just begun: its agent may report the GPUs and their links in a moment."""
        since = self._unreported_since.get(node)
        return since is not None and now - since < REPORT_WAIT_S

    def reserve(self, pod: Pod, node: str, now: float) -> Reservation | Refused:
        """Plan the pod on the node and reserve its GPUs: decided and committed in this call.

        The same pod on the same node again gives the same reservation. Refused also while the outcome of an earlier bind of
        the pod to another node is unknown.
        """
        known = self._reservations.get(pod.uid)
        if known is not None:
            # The same answer twice: kube-scheduler repeats a bind when it did not get the answer.
            return known if known.node == node else _elsewhere(pod, known)
        ledger = self._nodes.get(node)
        if ledger is None:
            return Refused(reason=RefusalReason.NOT_READY, detail=f"node {node}: {_UNKNOWN}")
        # Checked again, though filter has: other pods of the namespace were reserved between the two.
        if (over := self.quota(pod, model=ledger.node.model, pool=ledger.node.pool)) is not None:
            return over
        # A client that binds without filtering gets past no rule.
        invalid = self._invalid(pod)
        if invalid:
            return Refused(reason=RefusalReason.INVALID_REQUEST, detail=invalid)
        # By the exact plan, whatever the summary said: what is reserved names GPUs.
        plan = plan_pod(pod, self._gpus_for(pod, ledger), ledger.node.topology, self.policy)
        if isinstance(plan, Refused):
            return Refused(reason=plan.reason, detail=f"node {node}: {plan.detail}")
        # CPU and memory with the GPUs, before the watch shows the pod: the next one may be decided in between.
        self._place(pod, node)
        return self._reserve(pod, node, plan, Stage.ASSUMED, now)

    def undo(self, uid: PodUid) -> None:
        """The bind did not happen. What is bound, or reported by the agent, stays."""
        known = self._reservations.get(uid)
        # A later stage is a fact of the API server or of the agent, which a failed request of ours does not undo.
        if known is not None and known.stage is Stage.ASSUMED:
            self._release(uid)

    def bound(self, uid: PodUid) -> None:
        """The API server has accepted the bind."""
        known = self._reservations.get(uid)
        # The watch may be quicker than the answer to the bind, and the agent than both.
        if known is None or known.stage is not Stage.ASSUMED:
            return
        bound, ledger = self._put(replace(known, stage=Stage.BOUND)), self._nodes.get(known.node)
        # Reported before we knew of the bind: `put_node` has left it alone, so it is confirmed now.
        if ledger is not None and (allocated := (ledger.node.allocated or {}).get(uid)) is not None:
            self._confirm(bound, allocated, known.at)

    def victims_steps(
        self, pod: Pod, candidates: Mapping[str, Sequence[PodUid]], protected: Set[PodUid] = frozenset()
    ) -> Steps[dict[str, list[PodUid]]]:
        """The nodes where the pod fits once these pods are gone, each with its victims as they were given, or others of
        lower priority where these do not suffice; the most important first. Budgets allow no end of `protected`. Where a
        quota is used up no pod is evicted."""
        if not signature_of(pod, self.policy.names):
            return {node: list(uids) for node, uids in candidates.items()}
        fitting: dict[str, list[PodUid]] = {}
        if self._invalid(pod):
            return fitting
        over = self._over_quota(pod)
        for node, uids in candidates.items():
            yield
            ledger = self._nodes.get(node)
            # Evictions would not help there.
            if ledger is None or ledger.node.kind in over:
                continue
            if victims := (yield from self._victims_steps(pod, ledger, uids, protected)):
                fitting[node] = victims
        return fitting

    def _victims_steps(
        self, pod: Pod, ledger: NodeLedger, given: Sequence[PodUid], protected: Set[PodUid]
    ) -> Steps[list[PodUid]]:
        gpus, topology = self._gpus_for(pod, ledger), ledger.node.topology
        lower = [one for one in self.victims(ledger.reservations, protected) if one.rank.priority < pod.rank.priority]
        # Also pods of other priorities that end already: what they leave costs nothing.
        left = charged(gpus, self._ending(ledger), -1)
        willing = [one for one in lower if not one.is_ending]
        chosen = yield from choose_victims(pod, willing, left, topology, self.policy)
        own = [*chosen, *(one for one in lower if one.is_ending)] if chosen is not None else []
        gone = [one.uid for one in by_importance(own)]
        held = {**ledger.unattributed, **{uid: one.plan.charges for uid, one in ledger.reservations.items()}}
        left = charged(gpus, (held[uid] for uid in given if uid in held), -1)
        is_lacking = self._lacks_host(pod, ledger, gone)
        # The scheduler may have chosen its own for other resources, too.
        is_enough = given and isinstance(plan_pod(pod, left, topology, self.policy), PodPlan)
        if is_enough and (not own or is_lacking or cost_of(self.victims(given, protected)) <= cost_of(own)):
            return list(given)
        return gone and gone + [uid for uid in given if uid not in gone and (is_lacking or uid not in held)]

    def _lacks_host(self, pod: Pod, ledger: NodeLedger, gone: Sequence[PodUid]) -> bool:
        """CPU or main memory is lacking once these pods are gone."""
        if not ledger.node.cpu_milli:
            return False
        amounts = [self._host_requests[uid][1] for uid in gone if uid in self._host_requests]
        cpu_milli = ledger.free.cpu_milli + sum(one.cpu_milli for one in amounts)
        memory_mib = ledger.free.memory_mib + sum(one.memory_mib for one in amounts)
        return pod.host_request.cpu_milli > cpu_milli or pod.host_request.memory_mib > memory_mib

    def preempted(self, pod: Pod, node: str, victims: Iterable[PodUid], now: float) -> None:
        """These are evicted for the pod. The watch shows both later; the next pod may be decided in between."""
        if pod.uid not in self._pods:
            self._end_nomination(pod.uid)
            self._nominated[node][pod.uid] = replace(pod, rank=pod.rank._replace(nominated_node=node))
        for uid in victims:
            self._evicted.setdefault(uid, now)

    def forget_evicted(self, before: float) -> None:
        """The watch has shown the end of those that were evicted until then, or they do not end."""
        self._evicted = {uid: at for uid, at in self._evicted.items() if at > before}

    def is_ending(self, pod: Pod) -> bool:
        return pod.is_deleting or pod.uid in self._evicted

    def victims(self, uids: Iterable[PodUid], protected: Set[PodUid] = frozenset()) -> list[Victim]:
        """Of these pods those that can be evicted: bound, and no mirror pod, whose end ends nothing."""
        found = ((uid, self.pod(uid), self._reservations.get(uid)) for uid in uids)
        return [
            Victim(uid, pod.rank, held.plan.charges, uid in protected, self.is_ending(pod))
            for uid, pod, held in found
            if pod and held and pod.node_name and not pod.is_static
        ]

    def _ending(self, ledger: NodeLedger) -> list[Mapping[int, Charge]]:
        """What the pods have that are being deleted."""
        return [one.plan.charges for uid, one in ledger.reservations.items() if self.is_ending(self._pods[uid][0])]

    def _gpus_for(self, pod: Pod, ledger: NodeLedger) -> Sequence[GpuAccount]:
        """The node's GPUs as the pod may use them: not what nominated pods of its priority or a higher one wait for."""
        nominated = self._nominated.get(ledger.node.name, {})
        # Of several of one priority that are nominated here the first is first.
        own = (-pod.rank.priority, pod.uid if pod.uid in nominated else "~")
        waiting = sorted((-one.rank.priority, uid) for uid, one in nominated.items() if uid not in self._reservations)
        if not waiting or waiting[0] >= own:
            return ledger.gpus
        # As they will be: what they wait for is in use until the evicted pods have ended.
        gpus, kept = charged(ledger.gpus, self._ending(ledger), -1), []
        for _, uid in waiting[: bisect_left(waiting, own)]:
            plan = plan_pod(nominated[uid], gpus, ledger.node.topology, self.policy)
            if isinstance(plan, PodPlan):
                kept.append(plan.charges)
                gpus = charged(gpus, [plan.charges], 1)
        return charged(ledger.gpus, kept, 1)

    def _kept_steps(self, pod: Pod, names: Container[str]) -> Steps[set[str]]:
        """Those of the nodes where the pod does not fit next to nominated ones."""
        kept = set()
        for name in [name for name in self._nominated if name in names]:
            yield
            if (ledger := self._nodes.get(name)) is None or (gpus := self._gpus_for(pod, ledger)) is ledger.gpus:
                continue
            if isinstance(plan_pod(pod, gpus, ledger.node.topology, self.policy), Refused):
                kept.add(name)
        return kept

    # --- for everybody ---

    def reservation(self, uid: PodUid) -> Reservation | None:
        return self._reservations.get(uid)

    def pod(self, uid: PodUid) -> Pod | None:
        """The pod, if it is bound or reserved."""
        return self._pods[uid][0] if uid in self._pods else None

    def least_priority(self) -> int:
        """Of all pods that are bound or reserved."""
        return min((pod.rank.priority for pod, _ in self._pods.values()), default=0)

    def reservations(self) -> list[Reservation]:
        """The reservations of all pods, by node and UID; then those of nodes that are away."""
        return sorted(self._reservations.values(), key=lambda one: (one.node not in self._nodes, one.node, one.pod_uid))

    @property
    def offer(self) -> Offer:
        """What a pod can ask for at all."""
        if self._offer is None:
            of_nodes = [[gpu for gpu in one.node.gpus if gpu.mig is None] for one in self._nodes.values()]
            most_mib = max((gpu.memory_mib for one in self._nodes.values() for gpu in one.node.gpus), default=0)
            self._offer = Offer(frozenset(self._resources), max(map(len, of_nodes), default=0), most_mib)
        return self._offer

    def gpus(self, name: str) -> Sequence[GpuAccount]:
        """The accounts of a node's GPUs, none of a node that is not known."""
        ledger = self._nodes.get(name)
        return ledger.gpus if ledger is not None else ()

    def is_avoided(self, name: str) -> bool:
        """kube-scheduler prefers other nodes to this one, by a taint."""
        ledger = self._nodes.get(name)
        return ledger is not None and ledger.node.is_avoided

    def known_names(self) -> Set[str]:
        """All known nodes."""
        return self._nodes.keys()

    def node_names(self) -> list[str]:
        """All known nodes, sorted."""
        return sorted(self._nodes)

    def node_ledger(self, name: str) -> NodeLedger | None:
        """The allocations on one node. Only read them."""
        return self._nodes.get(name)

    # --- pods and reservations ---

    def _place(self, pod: Pod, node: str) -> None:
        self.put_other_pod(pod.uid, node, pod.host_request)
        self._pods[pod.uid] = pod, node
        self._pods_on[node][pod.uid] = None

    def _release(self, uid: PodUid) -> None:
        """Forget the pod and what it has."""
        self._drop_hosted(uid)
        self._end_nomination(uid)
        if (known := self._pods.pop(uid, None)) is None:
            return
        node = known[1]
        del self._pods_on[node][uid]
        if not self._pods_on[node]:
            del self._pods_on[node]
        self._drop_reservation(uid)
        if (ledger := self._nodes.get(node)) is not None and ledger.remove(uid) is not None:
            allocated = ledger.node.allocated or {}
            if uid in allocated:  # its agent has not released it yet: its processes may run on
                ledger.set_unattributed({**ledger.unattributed, uid: allocated[uid]})

    def _resolve(self, ledger: NodeLedger, pod: Pod, now: float) -> None:
        """What a bound pod has: by the agent's report, or by our plan; without both, all that it may have."""
        allocated = (ledger.node.allocated or {}).get(pod.uid)
        known = ledger.reservations.get(pod.uid)
        if allocated is not None:
            # Bound before this process started: the report says what it has, and no plan is known.
            known = known or self._reserve(pod, pod.node_name, NO_PLAN, Stage.CONFIRMED, now)
            self._confirm(known, allocated, now)
        elif known is not None:
            self.bound(pod.uid)
        else:
            self._reserve(pod, pod.node_name, self._guess(ledger, pod), Stage.UNPLACED, now)

    def _guess(self, ledger: NodeLedger, pod: Pod) -> PodPlan:
        """Charges for a pod of unknown GPUs. Our agent reports them within a second, and nothing may be allocated twice
        meanwhile: all that it asks, on every GPU. Another agent never reports, and that would leave its node useless: there
        the pod is charged as it was probably placed."""
        # No annotation of ours at all: most likely gpu-manager's node.
        if ledger.node.allocated is None and not ledger.node.is_exact:
            planned = plan_pod(pod, ledger.gpus, ledger.node.topology, self.policy)
            if isinstance(planned, PodPlan):
                return replace(planned, containers=())  # charged, and never compared with a later report
        indexes = [gpu.index for gpu in ledger.node.gpus]
        return PodPlan(containers=(), charges=charges_anywhere(pod, indexes, self.policy.names))

    def _confirm(self, known: Reservation, charges: Mapping[int, Charge], now: float) -> None:
        """The agent's report replaces the charges; the plan stays to be compared with it."""
        ledger, uid = self._nodes[known.node], known.pod_uid
        if uid in ledger.unattributed:
            ledger.set_unattributed({other: had for other, had in ledger.unattributed.items() if other != uid})
        self._put(replace(known, plan=replace(known.plan, charges=charges), stage=Stage.CONFIRMED, at=now))

    def _reserve(self, pod: Pod, node: str, plan: PodPlan, stage: Stage, now: float) -> Reservation:
        reservation = Reservation(
            pod_uid=pod.uid, namespace=pod.namespace, pod=pod.name, node=node, plan=plan, stage=stage, at=now
        )
        self._put(reservation)
        self.quota.count(pod, node)
        return reservation

    def _put(self, reservation: Reservation) -> Reservation:
        self._reservations[reservation.pod_uid] = reservation
        if (ledger := self._nodes.get(reservation.node)) is not None:
            ledger.add(reservation)
        return reservation

    def _end_nomination(self, uid: PodUid) -> None:
        for node in [node for node, pods in self._nominated.items() if pods.pop(uid, None) is not None and not pods]:
            del self._nominated[node]

    def _drop_reservation(self, uid: PodUid) -> None:
        if self._reservations.pop(uid, None) is not None:
            self.quota.uncount(uid)

    def _drop_hosted(self, uid: PodUid) -> None:
        known = self._host_requests.pop(uid, None)
        if known is not None:
            self._add_hosted(*known, -1)

    def _add_hosted(self, node: str, request: HostRequest, sign: int) -> None:
        hosted = self._hosted.get(node, NOTHING_HOSTED).plus(request, sign)
        if hosted.pods:
            self._hosted[node] = hosted
        else:
            del self._hosted[node]
        if (ledger := self._nodes.get(node)) is not None:
            ledger.set_hosted(hosted)

    # --- answers ---

    def _node_changed(self, name: str, gpus: bool) -> None:
        """`gpus` False: its CPU and main memory alone, which change costs and no answers."""
        for known in (*self._costs.values(), *(self._answers.values() if gpus else ())):
            known.pop(name, None)

    def _verdicts_steps(self, pod: Pod, signature: Signature, names: Sequence[str]) -> Steps[list[_Verdict | None]]:
        """About each of these nodes, None where none of its GPUs are known."""
        # It depends on these and the node alone, so pods of a Deployment share it.
        choice = choice_of(pod.annotations)
        known = _cached(self._answers, (signature, choice))
        verdicts = list(map(known.get, names))
        # One container is decided by the summary alone; several have to be planned.
        is_alone = len(signature) == 1 and not choice
        cost = 1 if is_alone else COST_OF_A_PLAN * len(signature)
        work = 0
        for number in [number for number, verdict in enumerate(verdicts) if verdict is None]:
            if work >= WORK_OF_A_STEP:
                work = 0
                yield
            if (ledger := self._nodes.get(names[number])) is not None:
                work += cost + (COST_OF_A_PLAN if ledger.is_stale else 0)
                verdicts[number] = known[names[number]] = (
                    self._alone(ledger.capacity, signature)
                    if is_alone
                    else self._verdict(pod, signature, choice, ledger)
                )
        return verdicts

    def _verdict_alone(self, capacity: Capacity, signature: Signature) -> _Verdict:
        """About a pod of which one container asks for GPUs: for all nodes with the same capacity."""
        [(_, request)] = signature
        # The summary answers that in a few microseconds, and names what is lacking.
        if (lack := capacity.lack(request)) is not None:
            return _Verdict(lack.of_node(), lack.is_lasting)
        return _Verdict("", cost=fullness_cost(capacity, signature, self._fullness))

    def _verdict(self, pod: Pod, signature: Signature, choice: GpuChoice, ledger: NodeLedger) -> _Verdict:
        capacity = capacity_of(accepting(choice, ledger.gpus)) if choice else ledger.capacity
        names = self.policy.names
        if len(signature) == 1:
            return self._verdict_alone(capacity, signature)
        # Each container alone first.
        for one in signature:
            verdict = self._verdict_alone(capacity, (one,))
            if verdict.text:
                return verdict._replace(text=f"no GPU for {describe_request(one[1], names)}: {verdict.text}")
        # Cheaper than a plan, and a clearer reason than that of whichever container happens to come last.
        if text := lack_together(capacity, signature, names):
            return _Verdict(text)
        plan = plan_pod(pod, ledger.gpus, ledger.node.topology, self.policy)
        if isinstance(plan, Refused):
            # What is invalid on this node stays so, whoever ends.
            return _Verdict(plan.detail, plan.reason is RefusalReason.INVALID_REQUEST)
        return _Verdict("", cost=fullness_cost(capacity, signature, self._fullness))

    def _over_quota(self, pod: Pod) -> dict[NodeKind, str]:
        """The refusal by kind of node, where a quota refuses the pod."""
        if self._kinds is None:
            self._kinds = list(dict.fromkeys(ledger.node.kind for ledger in self._nodes.values()))
        refused = {kind: self.quota(pod, model=kind[0], pool=kind[1]) for kind in self._kinds}
        return {kind: one.detail for kind, one in refused.items() if one is not None}

    def _invalid(self, pod: Pod) -> str:
        """Why no node can serve the pod; empty where one may."""
        names, asking = self.policy.names, 0
        for container in pod.containers:
            request = request_of(container, names)
            if request == NOTHING:
                continue
            asking += 1
            if asking > MAX_ASKING:
                most = f"more than {MAX_ASKING} containers of the pod ask for GPUs"
                return f"{most}, the most that are planned. Use several pods."
            refused = validate_request(request, names, share_mode=True)
            if refused is not None:
                return f"container {container.name}: {refused.detail}"
        return ""


def _cached(kept: OrderedDict[K, dict[str, V]], key: K) -> dict[str, V]:
    """What is known by node of the key; above MAX_SIGNATURES the least recently used key is dropped."""
    if key not in kept:
        kept[key] = {}
        if len(kept) > MAX_SIGNATURES:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def _elsewhere(pod: Pod, known: Reservation) -> Refused:
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"pod {pod.namespace}/{pod.name} is {known.stage} on node {known.node}, and the outcome of its bind "
        "there is unknown. The scheduler tries again.",
    )
