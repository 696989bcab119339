"""The objects of the embedded API server, in process: what HTTP handlers, embedded kubelets and schedulers, and tests
do with pods, nodes and events.

State owned: the object store. Objects returned are the stored ones: read, never change them.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpushare_agent.model.errors import Conflict, Rejected
from gpushare_agent.sandbox.api.patch import STRATEGIC, apply_patch, patched
from gpushare_agent.sandbox.api.pod_subresources import AGENT_NAMESPACE, AgentPods, AgentServer, ContainerLogs
from gpushare_agent.sandbox.api.store import (
    CLAIM_KINDS,
    CLUSTER_WIDE,
    KINDS,
    WITH_STATUS,
    ObjectKey,
    ObjectStore,
    PodsByNode,
    group_version,
    key_of,
)
from gpushare_agent.sandbox.api.validation import completed_workload, updated, without_nulls
from gpushare_agent.sandbox.behaviour import behaviour_of
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.pod_manifest import (
    RawObject,
    check_metadata,
    completed_manifest,
    is_mirror,
    is_terminal,
    timestamp,
)

MAX_EVENTS = 5000


def _merged_status(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level fields replace the old ones, conditions those of their type."""
    merged = {**old, **new}
    if "conditions" in new:
        # As by strategic merge: whoever sets one condition leaves those of others.
        by_type = {c["type"]: c for c in (*old.get("conditions", ()), *new["conditions"])}
        merged["conditions"] = [by_type[kind] for kind in sorted(by_type)]
    return merged


def _named(raw: RawObject, resource: str, namespace: str) -> RawObject:
    """Raises Rejected."""
    given = raw.get("metadata") or {}
    check_metadata(given)
    name = given.get("name") or (f"{given['generateName']}{uuid.uuid4().hex[:5]}" if given.get("generateName") else "")
    if not name:
        raise Rejected("metadata.name: Required value: name or generateName is required")
    identity: dict[str, Any] = {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
    if resource in WITH_STATUS:
        identity["generation"] = 1
    if resource not in CLUSTER_WIDE:
        identity["namespace"] = namespace
    kind = {"apiVersion": group_version(resource), "kind": KINDS[resource]}
    return {**kind, **raw, "metadata": {**given, **identity}}


def _active(namespace: RawObject) -> RawObject:
    """What the server sets of each namespace."""
    metadata = namespace["metadata"]
    labels = {**(metadata.get("labels") or {}), "kubernetes.io/metadata.name": metadata["name"]}
    return {
        **namespace, "metadata": {**metadata, "labels": labels},
        "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"},
    }  # fmt: skip


LASTING_NAMESPACES = ("default", "kube-system")
"""There from the start, and not to be deleted, as in a cluster."""


class ApiObjects:
    def __init__(self, *, version: str, history_limit: int, seed: int) -> None:
        """Raises StartupError for a Kubernetes version whose behaviour is not known."""
        self.release = behaviour_of(version).release
        self.store = ObjectStore(history_limit=history_limit)
        self.agents = AgentPods()
        self.logs = ContainerLogs(self.agents)
        self._applied: dict[tuple[str, str], dict[str, RawObject]] = {}
        """By resource and manager: what it applied last to the object of a UID."""
        self._rng = random.Random(seed)
        self._event_ns = 0
        # kube-system and default exist before anything is created.
        for name in LASTING_NAMESPACES:
            self._make_namespace(name)

    @property
    def signal(self) -> ChangeSignal:
        """Wakes up after every change."""
        return self.store.signal

    @property
    def pods_by_node(self) -> PodsByNode:
        return self.store.pods_by_node

    @property
    def version(self) -> int:
        """Version of the newest change."""
        return self.store.version

    async def wait_change(self, version: int) -> None:
        """Waits until there is a newer version."""
        while self.store.version == version:
            await self.signal.wait(self.signal.count)

    def claims_remedy(self, resource: str, raw: RawObject) -> str:
        """What lets a claim, its class or a pod with claims have GPUs, as a sentence; empty where an agent offers some."""
        is_claim = resource in CLAIM_KINDS.values() or (
            resource == "pods" and (raw.get("spec") or {}).get("resourceClaims")
        )
        if not is_claim or self.store.all("resourceslices"):
            return ""
        return "No agent offers GPUs by claims (no ResourceSlice is there): `gpushare-agent sandbox --dra` starts one."

    def create_pod(self, raw: RawObject, namespace: str = "default") -> RawObject:
        """Raises Rejected for a manifest that is not valid, AlreadyExists for a name in use."""
        # Letters and digits that form no words, as Kubernetes chooses them.
        suffix = "".join(self._rng.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        pod = completed_manifest(raw, namespace=namespace, uid=str(uuid.uuid4()), suffix=suffix)
        # Only after the manifest was checked: a mistake leaves no namespace behind.
        self._make_namespace(pod["metadata"]["namespace"])
        return self.store.add("pods", pod)

    def add_agent(self, node_name: str, server: AgentServer) -> RawObject:
        """A mirror pod: who deletes it gets another."""
        self._make_namespace(AGENT_NAMESPACE)
        return self.store.add("pods", self.agents.pod(node_name, server))

    def create(self, resource: str, raw: RawObject, namespace: str = "default") -> RawObject:
        """Raises Rejected for one without a name, or not valid, AlreadyExists for a name in use."""
        raw = without_nulls(raw)
        if resource == "pods":
            return self.create_pod(raw, namespace)
        if resource not in CLUSTER_WIDE:
            self._make_namespace(namespace)
        named = _named(raw, resource, namespace)
        return self.store.add(
            resource, _active(named) if resource == "namespaces" else completed_workload(resource, named)
        )

    def apply(self, resource: str, raw: RawObject, namespace: str, manager: str) -> RawObject:
        """Does server-side apply: creates the object, or changes what the manager applies and takes away what it no longer
        does. No field has an owner: managers never conflict. Raises Rejected."""
        key = ("" if resource in CLUSTER_WIDE else namespace, raw["metadata"]["name"])
        old, applied = self.store.find(resource, key), self._applied.setdefault((resource, manager), {})
        # Nothing to merge with, and nothing that the manager could have dropped.
        if old is None:
            made = self.create(resource, raw, namespace)
        else:
            patch = apply_patch(applied.get(old["metadata"]["uid"]), {k: v for k, v in raw.items() if k != "status"})
            made = self.store.replace(resource, updated(resource, old, patched(old, patch, STRATEGIC)))
        # What was applied to objects that have gone would be kept for ever.
        living = {one["metadata"]["uid"] for one in self.store.all(resource)}
        applied[made["metadata"]["uid"]] = raw
        self._applied[resource, manager] = {uid: one for uid, one in applied.items() if uid in living}
        return made

    def _make_namespace(self, name: str) -> None:
        """A namespace is there as soon as something is in it: nobody has to create it first."""
        if self.store.find("namespaces", ("", name)) is None:
            self.create("namespaces", {"metadata": {"name": name}})

    def delete(self, resource: str, key: ObjectKey) -> RawObject:
        """A claim in use goes when its last pod has ended, a namespace takes with it what is in it. Raises NotFound."""
        # A pod goes when its kubelet has stopped it.
        if resource == "pods":
            return self.delete_pod(*key)
        raw = self.store.get(resource, key)
        if resource == "namespaces":
            for inside in [name for name in KINDS if name not in CLUSTER_WIDE]:
                # A list, for each deletion changes the store.
                for one in [one for one in self.store.all(inside) if one["metadata"]["namespace"] == key[1]]:
                    self.delete(inside, key_of(one))
        # The finalizer of DRA in a real cluster: a claim in use goes with its last pod.
        if resource == "resourceclaims" and (raw.get("status") or {}).get("reservedFor"):
            marked = {**raw["metadata"], "deletionTimestamp": raw["metadata"].get("deletionTimestamp") or timestamp()}
            return self.store.replace(resource, {**raw, "metadata": marked})
        return self.store.remove(resource, key)

    def pods(self) -> list[RawObject]:
        return self.store.all("pods")

    def pod(self, namespace: str, name: str) -> RawObject:
        """Raises NotFound."""
        return self.store.get("pods", (namespace, name))

    def find_pod(self, namespace: str, name: str) -> RawObject | None:
        return self.store.find("pods", (namespace, name))

    def bind_pod(
        self,
        namespace: str,
        name: str,
        node_name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> RawObject:
        """The pod gets the annotations, too. Raises NotFound, and Conflict for a pod that is on a node, is being deleted,
        or has another UID or version than the given ones."""
        pod = self.pod(namespace, name)
        metadata, spec = pod["metadata"], pod["spec"]
        operation = f'Operation cannot be fulfilled on pods/binding "{name}"'
        for given, field in ((uid, "uid"), (resource_version, "resourceVersion")):
            if given and given != metadata[field]:
                raise Conflict(f"{operation}: Precondition failed: {field} is {metadata[field]}, not {given}")
        if metadata.get("deletionTimestamp"):
            raise Conflict(f"{operation}: pod {name} is being deleted, cannot be assigned to a host")
        if spec.get("nodeName"):
            raise Conflict(f"{operation}: pod {name} is already assigned to node {spec['nodeName']!r}")
        # Those of the Binding go to the pod, as in a real API server: an extender writes its decision so.
        if annotations:
            metadata = {**metadata, "annotations": {**(metadata.get("annotations") or {}), **annotations}}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
        bound = {
            **pod, "metadata": metadata, "spec": {**spec, "nodeName": node_name},
            "status": _merged_status(pod.get("status") or {}, {"conditions": [scheduled]}),
        }  # fmt: skip
        return self.store.replace("pods", bound)

    def set_pod_status(self, namespace: str, name: str, status: dict[str, Any], *, uid: str = "") -> RawObject:
        """Merges top-level fields of `status`, and conditions by type.

        Raises NotFound, and Conflict where `uid` is given and the pod of that name has another.
        """
        pod = self.pod(namespace, name)
        if uid and pod["metadata"]["uid"] != uid:
            raise Conflict(f'pods "{name}": the UID is now {pod["metadata"]["uid"]}, not {uid}')
        return self.store.replace("pods", {**pod, "status": _merged_status(pod.get("status") or {}, status)})

    def delete_pod(
        self, namespace: str, name: str, *, grace_period_s: int | None = None, uid: str = "", resource_version: str = ""
    ) -> RawObject:
        """Marks a running pod as being deleted and leaves its removal to the kubelet; grace 0, unscheduled and ended
        pods go at once. Raises NotFound, and Conflict where a precondition fails.
        """
        pod = self.pod(namespace, name)
        metadata = pod["metadata"]
        for given, actual, field in (
            (uid, metadata["uid"], "UID"),
            (resource_version, metadata["resourceVersion"], "ResourceVersion"),
        ):
            if given and given != actual:
                raise Conflict(
                    f"Precondition failed: {field} in precondition: {given}, {field} in object meta: {actual}"
                )
        # A kubelet makes the mirror of what still runs again at once; the sandbox does it here.
        if is_mirror(pod):
            self.store.remove("pods", (namespace, name))
            self.add_agent(pod["spec"]["nodeName"], self.agents.servers[name])
            return pod
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_period_s is None else grace_period_s
        # No kubelet has anything to stop: the object goes at once.
        if grace <= 0 or not pod["spec"].get("nodeName") or is_terminal(pod):
            return self.store.remove("pods", (namespace, name))
        # A second deletion may shorten the grace period, and never lengthens it.
        grace = min(grace, metadata.get("deletionGracePeriodSeconds", grace))
        marks = {
            "deletionTimestamp": metadata.get("deletionTimestamp") or timestamp(),
            "deletionGracePeriodSeconds": grace,
        }
        return self.store.replace("pods", {**pod, "metadata": {**metadata, **marks}})

    def node(self, name: str) -> RawObject:
        """Raises NotFound."""
        return self.store.get("nodes", ("", name))

    def apply_node(self, raw: RawObject) -> RawObject:
        """Creates the node, or replaces its status and labels."""
        known = self.store.find("nodes", ("", raw["metadata"]["name"]))
        if known is None:
            identity = {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
            return self.store.add("nodes", {**raw, "metadata": {**raw["metadata"], **identity}})
        # Merged: others have written labels to the node, which a kubelet's status update leaves alone.
        labels = {**known["metadata"].get("labels", {}), **raw["metadata"].get("labels", {})}
        return self.store.replace(
            "nodes", {**known, "metadata": {**known["metadata"], "labels": labels}, "status": raw["status"]}
        )

    def record_event(
        self, raw: RawObject, *, reason: str, message: str, source: str, kind: str = "Warning", container: str = ""
    ) -> RawObject:
        """About a pod, or a container of it, or another object of a namespace."""
        metadata = raw["metadata"]
        about = {
            "apiVersion": raw.get("apiVersion", "v1"), "kind": raw.get("kind", "Pod"), "namespace": metadata["namespace"],
            "name": metadata["name"], "uid": metadata["uid"],
            **({"fieldPath": f"spec.containers{{{container}}}"} if container else {}),
        }  # fmt: skip
        now = timestamp()
        # The name is the time, as client-go makes it: kubectl shows those of one second in the order of their names.
        # A real API server forgets them after an hour.
        self.store.remove_oldest("events", MAX_EVENTS - 1)
        self._event_ns = max(self._event_ns + 1, time.time_ns())
        return self.store.add("events", {
            "apiVersion": "v1", "kind": "Event", "involvedObject": about, "reason": reason, "message": message, "type": kind,
            "source": {"component": source}, "count": 1, "firstTimestamp": now, "lastTimestamp": now,
            "metadata": {
                "name": f"{metadata['name']}.{self._event_ns:016x}", "namespace": metadata["namespace"],
                "uid": str(uuid.uuid4()), "creationTimestamp": now,
            },
        })  # fmt: skip

    def events(self) -> list[RawObject]:
        """The Events, oldest first."""
        return self.store.in_creation_order("events")

    def object_of(self, resource: str, key: ObjectKey) -> RawObject | None:
        return self.store.find(resource, key)
