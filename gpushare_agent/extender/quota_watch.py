"""The quota in force, and what counts against it: the handler of the ConfigMap's informer, and the extender's quota check.

A ConfigMap that cannot be read leaves the last good one in force; where there never was one, pods that ask for GPUs are
refused until it is corrected, as gpu-admission means to. An absent ConfigMap is no quota. The mutable state is: the quota,
what is used, and what the pods that we know ask for. Format and table: docs/quota.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import structlog

from gpushare_agent.cluster.informer import Handler
from gpushare_agent.cluster.kube.pods import resource_version
from gpushare_agent.extender.quota import QUOTA_KEY, Quota, check_quota, parse_quota
from gpushare_agent.extender.quota_use import Usage, use_of
from gpushare_agent.extender.values import ClusterNode, Reservation
from gpushare_agent.model.errors import Corrupt, RefusalReason, Refused
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

log = structlog.get_logger(__name__)

MALFORMED = "QuotaMalformed"


class RecordsEvents(Protocol):
    """cluster/events.py."""

    def record(self, involved: Mapping[str, str], reason: str, message: str, *, key: tuple[str, ...]) -> bool: ...


class CountsQuota(Protocol):
    def quota_loaded(self, outcome: str) -> None: ...


class QuotaKeeper:
    """Says whether a pod may use nodes of a model and pool. Fed with pods and nodes before the state hears of them
    (`learn`, `know_node`), and with every reservation that comes or goes (`reserved`)."""

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self._usage = Usage()
        self._pods: dict[PodUid, Pod] = {}
        self._nodes: dict[str, tuple[str, int]] = {}
        self._place: dict[PodUid, str] = {}
        self._booked: dict[str, dict[PodUid, None]] = {}
        """Pods by the node on which they count, for a node whose model changes."""
        self._memories: dict[str, Counter[int]] = {}
        """By model, the sizes of GPUs that nodes have now, and how many nodes."""
        self.quota: Quota | None = Quota()
        """None: the ConfigMap was never readable."""

    @property
    def usage(self) -> Usage:
        return self._usage

    def __call__(self, pod: Pod, *, model: str, pool: str) -> Refused | None:
        if self.quota is None:
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail="the quota's ConfigMap cannot be read, and was not before: nobody knows what the namespace may use. "
                "Correct it (the extender's log and an Event on it name the mistake), or delete it to have no quota.",
            )
        if pod.namespace not in self.quota.namespaces:
            return None
        asked = use_of(pod, self._names, gpu_memory_mib=max(self._memories.get(model, ()), default=0))
        used = self._usage.of(pod.namespace, model, without=pod.uid)
        return check_quota(self.quota, pod.namespace, asked, used, model=model, pool=pool)

    def learn(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod

    def forget(self, uid: PodUid) -> None:
        self._pods.pop(uid, None)
        self._unbook(uid)

    def know_node(self, node: ClusterNode) -> None:
        memory_mib = max((gpu.memory_mib for gpu in node.gpus), default=0)
        if self._nodes.get(node.name) == (node.model, memory_mib):
            return
        self.forget_node(node.name)
        self._nodes[node.name] = node.model, memory_mib
        self._memories.setdefault(node.model, Counter())[memory_mib] += 1
        for uid in self._booked.get(node.name, ()):
            self._book(uid, node.name)

    def forget_node(self, name: str) -> None:
        """What its pods use is counted no more (`reserved` was told), but for binds that are under way."""
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

    def reserved(self, old: Reservation | None, new: Reservation | None) -> None:
        """A reservation came, changed or went."""
        if old is not None and new is None:
            self._unbook(old.pod_uid)
        if new is not None and self._place.get(new.pod_uid) != new.node:
            self._unbook(new.pod_uid)
            self._place[new.pod_uid] = new.node
            self._booked.setdefault(new.node, {})[new.pod_uid] = None
            self._book(new.pod_uid, new.node)

    def _book(self, uid: PodUid, node: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        model, memory_mib = self._nodes.get(node, ("", 0))
        self._usage.put(uid, pod.namespace, model, use_of(pod, self._names, gpu_memory_mib=memory_mib))

    def _unbook(self, uid: PodUid) -> None:
        node = self._place.pop(uid, "")
        on_node = self._booked.get(node)
        if on_node is not None:
            on_node.pop(uid, None)
            if not on_node:
                del self._booked[node]
        self._usage.remove(uid)


class QuotaFeed(Handler):
    """The handler of the informer of the one ConfigMap."""

    def __init__(self, *, keeper: QuotaKeeper, events: RecordsEvents, metrics: CountsQuota) -> None:
        self._keeper = keeper
        self._events = events
        self._metrics = metrics
        self._was_good = False

    def key(self, raw: dict[str, Any]) -> str:
        metadata = raw.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if not isinstance(name, str) or not name:
            raise Corrupt("ConfigMap: the name is missing")
        return name

    def put(self, raw: dict[str, Any]) -> bool:
        raw_data = raw.get("data") or {}
        try:
            if not isinstance(raw_data, dict):
                raise Corrupt("quota: the ConfigMap's data is no object")
            self._keeper.quota = parse_quota(raw_data)
        except Corrupt as e:
            self._complain(raw, str(e))
        else:
            self._was_good = True
            self._metrics.quota_loaded("good")
            log.info("quota_loaded", namespaces=len(self._keeper.quota.namespaces), version=resource_version(raw))
        return True

    def remove(self, key: str) -> None:
        self._keeper.quota = Quota()
        self._was_good = False
        self._metrics.quota_loaded("absent")
        log.warning("quota_gone", config_map=key, then="no namespace is limited")

    def _complain(self, raw: dict[str, Any], error: str) -> None:
        self._metrics.quota_loaded("malformed")
        then = "the last good one stays in force"
        if not self._was_good:
            self._keeper.quota = None
            then = "pods that ask for GPUs are refused, for there was no good one before"
        log.error("quota_malformed", error=error, then=then, cure=f"correct the key {QUOTA_KEY} of the ConfigMap")
        metadata = raw["metadata"]
        name, namespace = self.key(raw), str(metadata.get("namespace", "default"))
        involved = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "namespace": namespace,
            "name": name,
            "uid": str(metadata.get("uid", "")),
            "resourceVersion": resource_version(raw),
        }
        message = f"{error}. Meanwhile {then}."
        self._events.record(involved, MALFORMED, message, key=(MALFORMED, namespace, name, error))
