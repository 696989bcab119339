"""What counts against the quotas of namespaces, and whether a pod may use a node under them.

State owned: the quota in force (which QuotaFeed in cluster_feed.py reads), what each namespace uses, and the pods and nodes
from which this is computed. docs/reference/quota.md has the rules; decisions/quota.py applies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gpushare_agent.extender.decisions.quota import NamespaceQuota, Quota, QuotaUse, check_quota, raised, use_of
from gpushare_agent.extender.values import ClusterNode, Reservation
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames


class Usage:
    """What each namespace uses, by pod, so that a pod put twice counts once. QuotaState owns it."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, tuple[str, str, QuotaUse]] = {}
        self._gpus: dict[tuple[str, str], int] = {}
        self._totals: dict[str, QuotaUse] = {}

    def put(self, uid: PodUid, namespace: str, model: str, use: QuotaUse) -> None:
        """The pod is on a node with GPUs of this model, or will be."""
        self.remove(uid)
        self._pods[uid] = namespace, model, use
        self._add(namespace, model, use, 1)

    def remove(self, uid: PodUid) -> bool:
        """The pod has ended, or is not bound after all. Whether it counted."""
        old = self._pods.pop(uid, None)
        if old is not None:
            self._add(*old, -1)
        return old is not None

    def of(self, namespace: str, model: str, *, without: PodUid | None = None) -> QuotaUse:
        """The namespace's GPUs of the model, and its totals over all models; as if `without` were not there."""
        total = self._totals.get(namespace, QuotaUse())
        gpus = self._gpus.get((namespace, model), 0)
        # A pod that is reserved already asks again for what it has.
        left_out = self._pods.get(without) if without is not None else None
        if left_out is None or left_out[0] != namespace:
            return QuotaUse(gpus, total.vcore, total.vmemory)
        _, its_model, use = left_out
        return QuotaUse(
            gpus - (use.gpus if its_model == model else 0), total.vcore - use.vcore, total.vmemory - use.vmemory
        )

    def _add(self, namespace: str, model: str, use: QuotaUse, sign: int) -> None:
        key = namespace, model
        gpus = self._gpus.get(key, 0) + sign * use.gpus
        self._gpus[key] = gpus
        # Groups without use go, or deleted namespaces would stay for ever.
        if not gpus:
            del self._gpus[key]
        total = self._totals.get(namespace, QuotaUse())
        total = total.plus(QuotaUse(sign * use.gpus, sign * use.vcore, sign * use.vmemory))
        self._totals[namespace] = total
        if total == QuotaUse():
            del self._totals[namespace]


class QuotaState:
    """Decides whether a pod may use nodes of a model and pool.

    Pods and nodes are put here before they are put into ClusterState, whose `on_change` is `reservation_changed`.
    """

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self._usage = Usage()
        self._pods: dict[PodUid, Pod] = {}
        self._nodes: dict[str, tuple[str, int]] = {}
        """Model, and memory of the largest GPU in MiB."""
        self._node_of: dict[PodUid, str] = {}
        """The node on which the pod counts."""
        self._pods_of: dict[str, dict[PodUid, None]] = {}
        """The reverse, for a node whose model changes."""
        self._memories: dict[str, Counter[int]] = {}
        """The GPU memory sizes, by model, that nodes have now, and how many nodes have each."""
        self._quota: Quota | None = Quota()
        self.on_gain: Callable[[], None] = lambda: None
        """Called where a quota may allow more than before: it was read again, or a pod counts no more."""

    @property
    def quota(self) -> Quota | None:
        """The quota in force now; None: the ConfigMap was never readable."""
        return self._quota

    @quota.setter
    def quota(self, quota: Quota | None) -> None:
        self._quota = quota
        self.on_gain()

    def __call__(self, pod: Pod, *, model: str, pool: str) -> Refused | None:
        if self.quota is None:
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail="the quota's ConfigMap cannot be read, and there was no good one before: the quota is unknown. "
                "Correct it (the extender's log and an Event on it name the mistake), or delete it to have no quota.",
            )
        # Most namespaces have none: nothing is added up for them.
        if pod.namespace not in self.quota.namespaces:
            return None
        used = self.used(pod.namespace, model, without=pod.uid)
        return check_quota(self.quota, pod.namespace, self._asked(pod, model), used, model=model, pool=pool)

    def raised(self, pod: Pod, *, model: str, pool: str) -> tuple[NamespaceQuota, tuple[str, ...]] | None:
        """The least quota of the pod's namespace that allows it on such nodes, and the changes in words. None where no quota
        limits it, and where none can name the nodes, for they lack the label."""
        limits = self.quota.namespaces.get(pod.namespace) if self.quota is not None else None
        if limits is None or (limits.pools and not pool) or (limits.gpus is not None and not model):
            return None
        used = self.used(pod.namespace, model, without=pod.uid)
        return raised(limits, self._asked(pod, model), used, model=model, pool=pool)

    def _asked(self, pod: Pod, model: str) -> QuotaUse:
        # No node is chosen yet: the largest memory among the model's GPUs stands for all of them.
        return use_of(pod, self._names, gpu_memory_mib=max(self._memories.get(model, ()), default=0))

    def used(self, namespace: str, model: str, *, without: PodUid | None = None) -> QuotaUse:
        """The namespace's GPUs of the model, and its totals over all models; as if `without` were not there."""
        return self._usage.of(namespace, model, without=without)

    def put_pod(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod

    def remove_pod(self, uid: PodUid) -> None:
        self._pods.pop(uid, None)
        self._uncount(uid)

    def put_node(self, node: ClusterNode) -> None:
        memory_mib = max((gpu.memory_mib for gpu in node.gpus), default=0)
        # A node is delivered with every report of its agent; only model and memory matter here.
        if self._nodes.get(node.name) == (node.model, memory_mib):
            return
        self.remove_node(node.name)
        self._nodes[node.name] = node.model, memory_mib
        self._memories.setdefault(node.model, Counter())[memory_mib] += 1
        # Whoever counts on this node counts by its new model and memory from now on.
        for uid in self._pods_of.get(node.name, ()):
            self._count(uid, node.name)

    def remove_node(self, name: str) -> None:
        """Its pods count no more (ClusterState drops their reservations), except those whose bind is under way."""
        known = self._nodes.pop(name, None)
        if known is None:
            return
        model, memory_mib = known
        sizes = self._memories[model]
        sizes[memory_mib] -= 1
        if not sizes[memory_mib]:
            del sizes[memory_mib]
        if not sizes:
            del self._memories[model]

    def reservation_changed(self, old: Reservation | None, new: Reservation | None) -> None:
        """ClusterState's: a reservation came, changed or went."""
        # The pod has ended, or its bind was undone.
        if old is not None and new is None:
            self._uncount(old.pod_uid)
        # A change of stage on the same node changes nothing here: what a pod counts is what it asks for.
        if new is not None and self._node_of.get(new.pod_uid) != new.node:
            self._uncount(new.pod_uid)
            self._node_of[new.pod_uid] = new.node
            self._pods_of.setdefault(new.node, {})[new.pod_uid] = None
            self._count(new.pod_uid, new.node)

    def _count(self, uid: PodUid, node: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        # A node that is away has no model: its pods count for the totals alone.
        model, memory_mib = self._nodes.get(node, ("", 0))
        self._usage.put(uid, pod.namespace, model, use_of(pod, self._names, gpu_memory_mib=memory_mib))

    def _uncount(self, uid: PodUid) -> None:
        node = self._node_of.pop(uid, "")
        on_node = self._pods_of.get(node)
        if on_node is not None:
            on_node.pop(uid, None)
            if not on_node:
                del self._pods_of[node]
        # Only what counted leaves something to others.
        if self._usage.remove(uid):
            self.on_gain()
