"""A cluster at one moment, for advice: what the extender knows of it, and what kube-scheduler checks as well. Pure.

Read with a person's own rights (kubectl/cluster_reading.py). changes.py and defragment.py decide on it; where a pod's
GPUs are is decided by extender/decisions/pod_plan.py alone, as in the extender.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpushare_agent.core.kube.scheduling import NodeOffer, PodNeeds, lacking_labels, refusing_taints, shortages
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.placement.gpu_account import Capacity
from gpushare_agent.extender.decisions.ledger import NodeLedger
from gpushare_agent.extender.decisions.pod_plan import signature_of
from gpushare_agent.extender.decisions.quota import QuotaState
from gpushare_agent.extender.values import ClusterPolicy


class NodeView(Struct, frozen=True, kw_only=True):
    """`used` is what the node's pods ask for of other resources than GPUs. `uncordonable` are the cordoned GPUs that are
    healthy, by index."""

    ledger: NodeLedger
    offer: NodeOffer
    used: Mapping[str, int]
    uncordonable: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return self.ledger.node.name


class PodView(Struct, frozen=True, kw_only=True):
    """A pod that asks for GPUs. `owner` is the kind of its controller, empty without one; `labels` are all of its own."""

    pod: Pod
    needs: PodNeeds
    labels: Mapping[str, str]
    owner: str = ""


class ClusterView(Struct, frozen=True, kw_only=True):
    """`nodes` by name; `pods` has those that wait too. `quotas` limit nobody where the quota could not be read."""

    policy: ClusterPolicy
    nodes: tuple[NodeView, ...]
    pods: Mapping[PodUid, PodView]
    quotas: QuotaState


class Hindrance(Struct, frozen=True, kw_only=True):
    """Why kube-scheduler refuses the node for other reasons than GPUs: the cordon, labels, and the rest in words. `words`
    has all of them."""

    is_cordoned: bool
    labels: tuple[str, ...]
    others: tuple[str, ...]
    words: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.words)


def hindrance(needs: PodNeeds, offer: NodeOffer, used: Mapping[str, int]) -> Hindrance:
    taints = tuple(f"the taint {taint} is not tolerated" for taint in refusing_taints(needs, offer))
    short = tuple(f"too little {name} is left" for name in shortages(needs, offer, used))
    others, labels = (*taints, *short), lacking_labels(needs, offer)
    unmet = [
        f"nodeSelector {key}={needs.selector[key]}" if key in needs.selector else f"node affinity on {key}"
        for key in labels
    ]
    cordon = ["the node is cordoned"] if offer.is_cordoned else []
    words = (*cordon, *(f"the node does not match the pod's {one}" for one in unmet), *others)
    return Hindrance(is_cordoned=offer.is_cordoned, labels=labels, others=others, words=words)


def may_fit(pod: Pod, capacity: Capacity, policy: ClusterPolicy) -> bool:
    """False where one of the containers alone fits no GPU: what the summary says in microseconds."""
    return all(capacity.lack(request) is None for _, request in signature_of(pod, policy.names))


def over_quota(view: ClusterView, pod: Pod, node: NodeView) -> bool:
    """Whether the namespace's quota refuses the node."""
    where = node.ledger.node
    return view.quotas(pod, model=where.model, pool=where.pool) is not None
