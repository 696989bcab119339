"""The extender's one state: what it knows of the cluster, and the decisions that change it. Synchronous, event loop only.

The informers' handlers call `put_…` and `remove_…`, the verbs the rest. `filter`, `prioritize` and `victims_steps` change
nothing, so that preemption and autoscalers may ask what would be; `reserve` decides and commits in one step, so that no
share is allocated twice.

State owned: the ledger (decisions/ledger.py), answers already worked out, by signature of the pod, under policy fgd costs
by kind of pod, the pods that usually come (learnt_pods.py), and since when each node is known without a report. Times are
monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

from msgspec import Struct, field

from gpushare_agent.extender.decisions.ledger import ClusterLedger, NodeLedger
from gpushare_agent.extender.decisions.pod_plan import (
    Signature,
    fullness_cost,
    kind_of,
    lack_together,
    plan_pod,
    scores_of,
    signature_of,
)
from gpushare_agent.extender.learnt_pods import LearntPods
from gpushare_agent.extender.quota_state import QuotaState
from gpushare_agent.extender.steps import Steps, at_once
from gpushare_agent.extender.values import ClusterNode, ClusterPolicy, Reservation, Stage
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import HostRequest, Pod
from gpushare_agent.model.resources import NOTHING, request_of
from gpushare_agent.placement import GpuAccount, validate_request
from gpushare_agent.placement.fragmentation import KindCosts, PodKind, TypicalPods
from gpushare_agent.placement.gpu_account import capacity_of, describe_request
from gpushare_agent.placement.gpu_choice import GpuChoice, accepting, choice_of
from gpushare_agent.placement.place import SharePolicy

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
REPORT_WAIT_S = 2.0
"""The wait from the first sight of a node without its agent's report. The agent registers with the kubelet first, and
connects to the API server only then: pods are scheduled there meanwhile (measured: the report follows 0.3 to 1 s
later)."""
_UNKNOWN = "the extender knows no GPUs of this node: does the agent run there?"


class Filtered(Struct, kw_only=True):
    """The nodes that were asked about: those where the pod fits, in their order; for the others why not. Where nothing
    changes by the end of other pods, it is `unresolvable`. `error` is why the request could not be answered."""

    fitting: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)
    error: str = ""
    over_quota: set[tuple[str, str]] = field(default_factory=set)
    """Models and pools of the nodes that a quota refused."""


class _Verdict(NamedTuple):
    """About one node. `text` is empty where the pod fits; `cost`, by fullness, counts only then."""

    text: str
    is_final: bool = False
    cost: float = 0.0


class _Answers(Struct, eq=False):
    """For the pods of one signature that accept the same GPUs, by node: the cost where they fit, else why they do not. What
    is known of the nodes in `outdated` does not hold any more: between two requests a few nodes change, of thousands."""

    outdated: set[str]
    fitting: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, verdict: _Verdict) -> None:
        self.forget(name)
        if not verdict.text:
            self.fitting[name] = verdict.cost
        elif verdict.is_final:
            self.unresolvable[name] = verdict.text
        else:
            self.failed[name] = verdict.text

    def forget(self, name: str) -> None:
        self.outdated.discard(name)
        for of_nodes in (self.fitting, self.failed, self.unresolvable):
            of_nodes.pop(name, None)


class _Costs(Struct, eq=False):
    """What a kind of pod costs on each node by policy fgd. `outdated` as of _Answers."""

    outdated: set[str]
    of_node: dict[str, float] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        self.outdated.discard(name)
        self.of_node.pop(name, None)


class ClusterState:
    """`quota`, where given, is asked for each kind of node. `on_change` is called for every reservation that came, changed
    or went."""

    def __init__(
        self,
        *,
        policy: ClusterPolicy,
        quota: QuotaState | None = None,
        on_change: Callable[[Reservation | None, Reservation | None], None] = lambda old, new: None,
    ) -> None:
        self._policy = policy
        self._quota = quota
        self._on_change = on_change
        self._ledger = ClusterLedger(policy, self._node_changed)
        self._answers: OrderedDict[tuple[Signature, GpuChoice], _Answers] = OrderedDict()
        self._costs: OrderedDict[PodKind, _Costs] = OrderedDict()
        self._quota_kinds: dict[str, tuple[str, str]] = {}
        """Model and pool by node: a quota tells nodes apart by these two alone."""
        self._distinct_kinds: list[tuple[str, str]] | None = None
        self._learnt = LearntPods()
        self._typical: TypicalPods | None = None
        self._unreported_since: dict[str, float] = {}

    # --- from the informers ---

    def put_node(self, node: ClusterNode, now: float) -> None:
        # Known with its report: nothing is waited for. Without one the first sight counts, however often the node
        # changes.
        if node.is_exact:
            self._unreported_since.pop(node.name, None)
        else:
            self._unreported_since.setdefault(node.name, now)
        self._set_quota_kind(node.name, (node.model, node.pool))
        for reservation in self._ledger.put_node(node, now):
            self._notify(None, reservation)

    def remove_node(self, name: str) -> None:
        """Its reservations are dropped until it comes back, except those of binds that are under way."""
        self._unreported_since.pop(name, None)
        for dropped in self._ledger.remove_node(name):
            self._notify(dropped, None)
        self._set_quota_kind(name, None)
        for answers in self._answers.values():
            answers.forget(name)
        for costs in self._costs.values():
            costs.forget(name)

    def put_pod(self, pod: Pod, now: float) -> None:
        """A pod that asks for something of ours. It counts from its bind to its end."""
        if pod.is_terminal:
            self.remove_pod(pod.uid)
        # A pod without a node has nothing yet, unless a bind of ours has reserved it.
        elif pod.node_name:
            old = self._ledger.reservation(pod.uid)
            self._ledger.put_bound(pod, now)
            if self._policy.node_policy == "fgd" and (signature := signature_of(pod, self._policy.names)):
                self._learnt.put(pod.uid, kind_of(signature, pod.host_request, self._policy.names))
            self._notify(old, self._ledger.reservation(pod.uid))

    def put_other_pod(self, uid: PodUid, node: str, request: HostRequest) -> None:
        """A bound pod that asks for nothing of ours: CPU and main memory are what counts of it."""
        self._ledger.put_hosted(uid, node, request)

    def remove_pod(self, uid: PodUid) -> None:
        """Of either kind."""
        self._learnt.end(uid)
        self._notify(self._ledger.release(uid), None)

    # --- from the scheduler ---

    def filter(self, pod: Pod, names: Sequence[str] | None) -> Filtered:
        """Where the pod fits, among all known nodes where none are named. Changes nothing."""
        return at_once(self.filter_steps(pod, names))

    def filter_steps(self, pod: Pod, names: Sequence[str] | None) -> Steps[Filtered]:
        """`filter` in steps of a few milliseconds, between which the event loop may do other work. The state may change
        meanwhile: each verdict is about its node as it is at that moment."""
        signature = signature_of(pod, self._policy.names)
        asked = list(names) if names is not None else [ledger.node.name for ledger in self._ledger.nodes()]
        if not signature:
            return Filtered(fitting=asked)
        # For all nodes at once, and before any of them: it is true of each, and planning it would be in vain.
        invalid = self._invalid(pod)
        if invalid:
            # Unresolvable: kube-scheduler would otherwise look for pods to evict, which helps no invalid request.
            return Filtered(unresolvable=dict.fromkeys(asked, invalid))
        answer = Filtered()
        # The quota before the capacity: what no wait for GPUs would change is the reason to show. Unresolvable, for to
        # evict pods of other namespaces frees none of this one's quota.
        if over := self._over_quota(pod, self._all_kinds()):
            kinds = self._quota_kinds
            answer.unresolvable = {name: over[kinds[name]] for name in asked if kinds.get(name) in over}
            answer.over_quota = {kinds[name] for name in answer.unresolvable}
            asked = [name for name in asked if name not in answer.unresolvable]
        answers = yield from self._answers_steps(pod, signature, asked)
        fitting, failed, unresolvable = answers.fitting, answers.failed, answers.unresolvable
        answer.fitting = [name for name in asked if name in fitting]
        if len(answer.fitting) == len(asked):
            return answer
        answer.unresolvable |= {name: unresolvable[name] for name in asked if name in unresolvable}
        # `failed`, not unresolvable, where no GPUs are known: the node's agent may start at any moment.
        others = (name for name in asked if name not in fitting and name not in unresolvable)
        answer.failed = {name: failed.get(name, _UNKNOWN) for name in others}
        return answer

    def fits_somewhere_steps(self, pod: Pod) -> Steps[bool]:
        """Whether any known node would take the pod, by GPUs and quota, in steps."""
        signature = signature_of(pod, self._policy.names)
        if not signature or self._invalid(pod):
            return False
        over = self._over_quota(pod, self._all_kinds())
        answers = yield from self._answers_steps(pod, signature, list(self._ledger.names()))
        return any(self._quota_kinds.get(name) not in over for name in answers.fitting)

    def prioritize(self, pod: Pod, names: Sequence[str]) -> list[tuple[str, int]]:
        """A score from 0 to 10 for each node, 0 where it does not fit: `scores_of` its cost among the costs of all."""
        return at_once(self.prioritize_steps(pod, names))

    def prioritize_steps(self, pod: Pod, names: Sequence[str]) -> Steps[list[tuple[str, int]]]:
        """`prioritize` in steps of a few milliseconds."""
        costs = yield from self.costs_steps(pod, names)
        return list(zip(names, scores_of(costs), strict=True))

    def costs(self, pod: Pod, names: Sequence[str]) -> list[float | None]:
        """What the pod costs on each node by the policy, the least is best; None where it does not fit."""
        return at_once(self.costs_steps(pod, names))

    def costs_steps(self, pod: Pod, names: Sequence[str]) -> Steps[list[float | None]]:
        """`costs` in steps."""
        signature = signature_of(pod, self._policy.names)
        if not signature or self._invalid(pod):
            return [None] * len(names)
        answers, typical = (yield from self._answers_steps(pod, signature, names)), self.renew_typical()
        fitting = answers.fitting
        if typical is None:
            return [fitting.get(name) for name in names]
        kind = kind_of(signature, pod.host_request, self._policy.names)
        known = _recent(self._costs, kind)
        if known is None:
            known = _kept(self._costs, kind, _Costs(set(self._ledger.names())))
        of_node, outdated, of_kind = known.of_node, known.outdated, KindCosts(typical, kind)
        work = 0
        for name in [name for name in names if name in outdated and name in fitting]:
            if work >= WORK_OF_A_STEP:
                work = 0
                yield
            work += 1
            if (ledger := self._ledger.node(name)) is not None:
                outdated.discard(name)
                of_node[name] = of_kind.of(ledger.free)
        return [of_node.get(name) if name in fitting else None for name in names]

    def renew_typical(self) -> TypicalPods | None:
        """The pods that usually come, as the counts have them by now. None where the policy is not fgd, or hardly a pod was
        seen: then nodes are chosen by fullness, which is binpack."""
        typical = self._learnt.typical(self._supply)
        if typical is not self._typical:
            self._typical = typical
            self._costs.clear()
        return typical

    @property
    def typical(self) -> TypicalPods | None:
        """Those by which nodes were chosen last; to read them changes nothing."""
        return self._typical

    def _supply(self) -> dict[str, int]:
        supply: dict[str, int] = {}
        for ledger in self._ledger.nodes():
            supply[ledger.node.model] = supply.get(ledger.node.model, 0) + len(ledger.node.gpus)
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
        known = self._ledger.reservation(pod.uid)
        if known is not None:
            # The same answer twice: kube-scheduler repeats a bind of which it did not get the answer.
            return known if known.node == node else _elsewhere(pod, known)
        ledger = self._ledger.node(node)
        if ledger is None:
            return Refused(reason=RefusalReason.NOT_READY, detail=f"node {node}: {_UNKNOWN}")
        # Checked again, though filter has: other pods of the namespace were reserved between the two.
        over = self._quota(pod, model=ledger.node.model, pool=ledger.node.pool) if self._quota is not None else None
        if over is not None:
            return over
        # A client that binds without filtering gets past no rule.
        invalid = self._invalid(pod)
        if invalid:
            return Refused(reason=RefusalReason.INVALID_REQUEST, detail=invalid)
        # By the exact plan, whatever the summary said: what is reserved names GPUs.
        plan = plan_pod(pod, ledger.gpus, ledger.node.topology, self._policy)
        if isinstance(plan, Refused):
            return Refused(reason=plan.reason, detail=f"node {node}: {plan.detail}")
        reservation = self._ledger.reserve(pod, node, plan, now)
        self._notify(None, reservation)
        return reservation

    def undo(self, uid: PodUid) -> None:
        """The bind did not happen. What is bound, or reported by the agent, stays."""
        known = self._ledger.reservation(uid)
        # A later stage is a fact of the API server or of the agent, which a failed request of ours does not undo.
        if known is not None and known.stage is Stage.ASSUMED:
            self._notify(self._ledger.release(uid), None)

    def bound(self, uid: PodUid) -> None:
        """The API server has accepted the bind."""
        self._ledger.mark_bound(uid)

    def victims_steps(self, pod: Pod, candidates: Mapping[str, Sequence[PodUid]]) -> Steps[dict[str, list[PodUid]]]:
        """The nodes where the pod fits once these pods are gone, each with its victims as they were given: the scheduler may
        evict them for other resources too. Where a quota is used up no pod is evicted."""
        if not signature_of(pod, self._policy.names):
            return {node: list(uids) for node, uids in candidates.items()}
        fitting: dict[str, list[PodUid]] = {}
        if self._invalid(pod):
            return fitting
        over, work = self._over_quota(pod, self._all_kinds()), 0
        for node, uids in candidates.items():
            if work >= WORK_OF_A_STEP:
                work = 0
                yield
            ledger = self._ledger.node(node)
            # Evictions would not help there.
            if ledger is None or self._quota_kinds[node] in over:
                continue
            # The node's ledger is built once more without the victims.
            work += COST_OF_A_PLAN + len(ledger.reservations)
            gpus = ledger.gpus_without(frozenset(uids))
            if not isinstance(plan_pod(pod, gpus, ledger.node.topology, self._policy), Refused):
                fitting[node] = list(uids)
        return fitting

    # --- for everybody ---

    def reservation(self, uid: PodUid) -> Reservation | None:
        return self._ledger.reservation(uid)

    def reservations(self) -> list[Reservation]:
        """The reservations of all pods, by node and UID; then those of nodes that are away."""
        known = [r for ledger in self._ledger.nodes() for _, r in sorted(ledger.reservations.items())]
        # Of nodes that are away only binds under way are left; their pods may still appear on the node.
        return known + self._ledger.pending()

    def gpus(self, name: str) -> Sequence[GpuAccount]:
        """The accounts of a node's GPUs, none of a node that is not known."""
        ledger = self._ledger.node(name)
        return ledger.gpus if ledger is not None else ()

    def known_names(self) -> Set[str]:
        """All known nodes."""
        return self._ledger.names()

    def node_names(self) -> list[str]:
        """All known nodes, sorted."""
        return [ledger.node.name for ledger in self._ledger.nodes()]

    def node_ledger(self, name: str) -> NodeLedger | None:
        """What is allocated on one node, to be read only."""
        return self._ledger.node(name)

    def _notify(self, old: Reservation | None, new: Reservation | None) -> None:
        # The informer delivers a pod with every change of its status; what it has changes seldom.
        if old != new:
            self._on_change(old, new)

    def _set_quota_kind(self, name: str, kind: tuple[str, str] | None) -> None:
        if self._quota_kinds.get(name) == kind:
            return
        if kind is None:
            del self._quota_kinds[name]
        else:
            self._quota_kinds[name] = kind
        self._distinct_kinds = None

    def _node_changed(self, name: str, gpus: bool) -> None:
        """`gpus` False: its CPU and main memory alone, which change costs and no answers."""
        for costs in self._costs.values():
            costs.outdated.add(name)
        if gpus:
            for answers in self._answers.values():
                answers.outdated.add(name)

    def _answers_steps(self, pod: Pod, signature: Signature, names: Sequence[str]) -> Steps[_Answers]:
        """What is known of these nodes, up to date."""
        # It depends on these and the node alone, so pods of a Deployment share it.
        key = signature, choice_of(pod.annotations)
        answers = _recent(self._answers, key)
        if answers is None:
            answers = _kept(self._answers, key, _Answers(set(self._ledger.names())))
        outdated = answers.outdated
        # One container is decided by the summary alone; several have to be planned.
        cost = 1 if len(signature) == 1 and not key[1] else COST_OF_A_PLAN * len(signature)
        work = 0
        for name in [name for name in names if name in outdated] if outdated else ():
            if work >= WORK_OF_A_STEP:
                work = 0
                yield
            # None: removed since the step before.
            if (ledger := self._ledger.node(name)) is not None:
                work += cost + (COST_OF_A_PLAN if ledger.is_stale else 0)
                answers.put(name, self._verdict(pod, *key, ledger))
        return answers

    def _verdict(self, pod: Pod, signature: Signature, choice: GpuChoice, ledger: NodeLedger) -> _Verdict:
        capacity = capacity_of(accepting(choice, ledger.gpus)) if choice else ledger.capacity
        names = self._policy.names
        for _, request in signature:
            # Each container alone first: the summary answers that in a few microseconds, and names what is lacking.
            if (lack := capacity.lack(request)) is not None:
                which = f"no GPU for {describe_request(request, names)}: " if len(signature) > 1 else ""
                return _Verdict(which + lack.of_node(), lack.is_lasting)
        if len(signature) > 1:
            # Cheaper than a plan, and a clearer reason than that of whichever container happens to come last.
            if text := lack_together(capacity, signature, names):
                return _Verdict(text)
            plan = plan_pod(pod, ledger.gpus, ledger.node.topology, self._policy)
            if isinstance(plan, Refused):
                # What is invalid on this node stays so, whoever ends.
                return _Verdict(plan.detail, plan.reason is RefusalReason.INVALID_REQUEST)
        policy: SharePolicy = "spread" if self._policy.node_policy == "spread" else "binpack"
        return _Verdict("", cost=fullness_cost(capacity, signature, policy))

    def _all_kinds(self) -> list[tuple[str, str]]:
        if self._distinct_kinds is None:
            # A few, of thousands of nodes, whose kinds seldom change.
            self._distinct_kinds = list(dict.fromkeys(self._quota_kinds.values()))
        return self._distinct_kinds

    def _over_quota(self, pod: Pod, kinds: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Why not, by model and pool: of those where a quota refuses the pod."""
        if self._quota is None:
            return {}
        refused = {kind: self._quota(pod, model=kind[0], pool=kind[1]) for kind in kinds}
        return {kind: one.detail for kind, one in refused.items() if one is not None}

    def _invalid(self, pod: Pod) -> str:
        """What no node can serve."""
        names, asking = self._policy.names, 0
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


def _recent(kept: OrderedDict[K, V], key: K) -> V | None:
    """What is kept for the key, which was asked for just now."""
    if key in kept:
        kept.move_to_end(key)
    return kept.get(key)


def _kept(kept: OrderedDict[K, V], key: K, value: V) -> V:
    """`value`, which is now kept: the one that was asked for least recently goes where there are MAX_SIGNATURES."""
    kept[key] = value
    if len(kept) > MAX_SIGNATURES:
        kept.popitem(last=False)
    return value


def _elsewhere(pod: Pod, known: Reservation) -> Refused:
    return Refused(
        reason=RefusalReason.NOT_READY,
        detail=f"pod {pod.namespace}/{pod.name} is {known.stage} on node {known.node}, and the outcome of its bind "
        "there is unknown. The scheduler tries again.",
    )
