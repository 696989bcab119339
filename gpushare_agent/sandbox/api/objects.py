"""The objects of the embedded API server, in process. HTTP handlers, embedded kubelets and schedulers, and tests use it
for pods, nodes and events.

State owned: the object store. Objects returned are the stored ones: read, never change them.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpushare_agent.core.model.errors import Conflict
from gpushare_agent.sandbox.api.kinds import KINDS
from gpushare_agent.sandbox.api.patch import STRATEGIC, apply_patch, patched
from gpushare_agent.sandbox.api.pod_subresources import AGENT_NAMESPACE, AgentServer, PodSubresources, agent_pod
from gpushare_agent.sandbox.api.store import ObjectKey, ObjectStore, key_of
from gpushare_agent.sandbox.api.validation import completed, updated
from gpushare_agent.sandbox.behaviour import behaviour_of
from gpushare_agent.sandbox.pod_manifest import RawObject, is_mirror, is_terminal, timestamp

MAX_EVENTS = 5000
LASTING_NAMESPACES = ("default", "kube-system")
"""There from the start, and not to be deleted, as in a cluster."""


def _merged_status(raw: RawObject, new: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level fields replace those of the object, conditions those of their type."""
    old = raw.get("status") or {}
    # As by strategic merge: whoever sets one condition leaves those of others.
    by_type = {c["type"]: c for c in (*old.get("conditions", ()), *new.get("conditions", ()))}
    conditions = {"conditions": [by_type[kind] for kind in sorted(by_type)]} if "conditions" in new else {}
    return {**old, **new, **conditions}


def _check_precondition(metadata: Mapping[str, Any], uid: str, version: str) -> None:
    for name, field, given in (("UID", "uid", uid), ("ResourceVersion", "resourceVersion", version)):
        if given and given != metadata[field]:
            raise Conflict(
                f"Precondition failed: {name} in precondition: {given}, {name} in object meta: {metadata[field]}"
            )


class ApiObjects:
    def __init__(self, *, version: str, history_limit: int) -> None:
        """Raises StartupError for a Kubernetes version with unknown behaviour."""
        self.behaviour = behaviour_of(version)
        self.store = ObjectStore(history_limit=history_limit)
        self.signal, self.pods_by_node = self.store.signal, self.store.pods_by_node
        """Wake up after every change, and after those of a node's pods."""
        self.subresources = PodSubresources()
        self._applied: dict[tuple[str, str], dict[str, RawObject]] = {}
        """By resource and manager: what it applied last to the object of a UID."""
        self._rng = random.Random(0)
        self._event_ns = 0
        # kube-system and default exist before anything is created.
        for name in LASTING_NAMESPACES:
            self._make_namespace(name)

    # --- reading ---

    @property
    def version(self) -> int:
        """Version of the newest change."""
        return self.store.version

    async def wait_change(self, version: int) -> None:
        """Waits until there is a newer version."""
        await self.signal.wait_until(lambda: self.store.version != version)

    def pods(self) -> list[RawObject]:
        return self.store.all("pods")

    def pod(self, namespace: str, name: str) -> RawObject:
        """Raises NotFound."""
        return self.store.get("pods", (namespace, name))

    def find_pod(self, namespace: str, name: str) -> RawObject | None:
        return self.store.find("pods", (namespace, name))

    def node(self, name: str) -> RawObject:
        """Raises NotFound."""
        return self.store.get("nodes", ("", name))

    def events(self) -> list[RawObject]:
        """The Events, oldest first."""
        return self.store.in_creation_order("events")

    def claims_remedy(self, resource: str, raw: RawObject) -> str:
        """A sentence on how a claim, its class or a pod with claims can get GPUs; empty if an agent offers some."""
        has_claims = resource == "pods" and (raw.get("spec") or {}).get("resourceClaims")
        if self.store.all("resourceslices") or not ("claim" in KINDS[resource].marks or has_claims):
            return ""
        return "No agent offers GPUs by claims (no ResourceSlice is there): `gpushare-agent sandbox --dra` starts one."

    # --- objects of any kind ---

    def create(self, resource: str, raw: RawObject, namespace: str = "default") -> RawObject:
        """Raises Rejected for one without a name, or not valid, AlreadyExists for a name in use."""
        # Letters and digits that form no words, as Kubernetes chooses them.
        suffix = "".join(self._rng.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        made = completed(KINDS[resource], raw, namespace, suffix)
        # Only after the manifest was checked: a mistake leaves no namespace behind.
        if KINDS[resource].is_namespaced:
            self._make_namespace(made["metadata"]["namespace"])
        return self.store.add(resource, made)

    def create_pod(self, raw: RawObject, namespace: str = "default") -> RawObject:
        return self.create("pods", raw, namespace)

    def apply(self, resource: str, raw: RawObject, namespace: str, manager: str) -> RawObject:
        """Does server-side apply: creates the object, or changes what the manager applies and takes away what it no longer
        does. No field has an owner: managers never conflict. Raises Rejected."""
        key = (namespace if KINDS[resource].is_namespaced else "", raw["metadata"]["name"])
        old, applied = self.store.find(resource, key), self._applied.setdefault((resource, manager), {})
        # Nothing to merge with, and nothing that the manager could have dropped.
        if old is None:
            made = self.create(resource, raw, namespace)
        else:
            patch = apply_patch(applied.get(old["metadata"]["uid"]), {k: v for k, v in raw.items() if k != "status"})
            made = self.store.replace(resource, updated(resource, old, patched(old, patch, STRATEGIC)))
        # Otherwise the entries of deleted objects would be kept for ever.
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
            for inside in [name for name, kind in KINDS.items() if kind.is_namespaced]:
                # A list, because each deletion changes the store.
                for one in [one for one in self.store.all(inside) if one["metadata"]["namespace"] == key[1]]:
                    self.delete(inside, key_of(one))
        # The finalizer of DRA in a real cluster: a claim in use goes with its last pod.
        if resource == "resourceclaims" and (raw.get("status") or {}).get("reservedFor"):
            marked = {**raw["metadata"], "deletionTimestamp": raw["metadata"].get("deletionTimestamp") or timestamp()}
            return self.store.replace(resource, {**raw, "metadata": marked})
        return self.store.remove(resource, key)

    # --- pods ---

    def add_agent(self, node_name: str, server: AgentServer) -> RawObject:
        """A mirror pod: who deletes it gets another."""
        self._make_namespace(AGENT_NAMESPACE)
        pod = agent_pod(node_name, server)
        self.subresources.servers[pod["metadata"]["name"]] = server
        return self.store.add("pods", pod)

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
        try:
            _check_precondition(metadata, uid, resource_version)
            if metadata.get("deletionTimestamp"):
                raise Conflict(f"pod {name} is being deleted, cannot be assigned to a host")
            if spec.get("nodeName"):
                raise Conflict(f"pod {name} is already assigned to node {spec['nodeName']!r}")
        except Conflict as error:
            raise Conflict(f'Operation cannot be fulfilled on pods/binding "{name}": {error}') from error
        # Those of the Binding go to the pod, as in a real API server: an extender writes its decision so.
        if annotations:
            metadata = {**metadata, "annotations": {**(metadata.get("annotations") or {}), **annotations}}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
        status = _merged_status(pod, {"conditions": [scheduled]})
        bound = {**pod, "metadata": metadata, "spec": {**spec, "nodeName": node_name}, "status": status}
        return self.store.replace("pods", bound)

    def set_pod_status(self, namespace: str, name: str, status: dict[str, Any], *, uid: str = "") -> RawObject:
        """Merges top-level fields of `status`, and conditions by type.

        Raises NotFound, and Conflict where `uid` is given and the pod of that name has another.
        """
        pod = self.pod(namespace, name)
        _check_precondition(pod["metadata"], uid, "")
        return self.store.replace("pods", {**pod, "status": _merged_status(pod, status)})

    def delete_pod(
        self, namespace: str, name: str, *, grace_period_s: int | None = None, uid: str = "", resource_version: str = ""
    ) -> RawObject:
        """Marks a running pod as being deleted and leaves its removal to the kubelet; grace 0, unscheduled and ended
        pods go at once. Raises NotFound, and Conflict where a precondition fails.
        """
        pod = self.pod(namespace, name)
        metadata = pod["metadata"]
        _check_precondition(metadata, uid, resource_version)
        # A kubelet makes the mirror of what still runs again at once; the sandbox does it here.
        if is_mirror(pod):
            self.store.remove("pods", (namespace, name))
            self.add_agent(pod["spec"]["nodeName"], self.subresources.servers[name])
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

    # --- nodes and events ---

    def apply_node(self, raw: RawObject) -> RawObject:
        """Creates the node, or replaces its status and labels."""
        known = self.store.find("nodes", ("", raw["metadata"]["name"]))
        if known is None:
            identity = {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
            return self.store.add("nodes", {**raw, "metadata": {**raw["metadata"], **identity}})
        # Merged: others have written labels to the node. A kubelet's status update leaves them alone.
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
