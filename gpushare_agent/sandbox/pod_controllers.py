"""The controllers of Deployments, ReplicaSets, StatefulSets and Jobs, and the deletion of objects without an owner, as far
as a sandbox needs them.

As in a cluster: a Deployment has a ReplicaSet for each template and replaces pods within its surge, or recreates them; a
ReplicaSet replaces pods that have ended; a StatefulSet has pods by number, one after the other, and replaces those of a
former template from the last on; a Job counts those that have ended. Missing: other kinds, progress deadlines,
history limits of old ReplicaSets, ControllerRevisions, partitions and volumes of StatefulSets, suspended, indexed and timed
Jobs. Services are objects that nothing serves. State owned: when an owner of failed pods may try again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpushare_agent.core.kit.supervision import at_most
from gpushare_agent.core.model.errors import Conflict, NotFound
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.api.store import key_of
from gpushare_agent.sandbox.pod_manifest import RawObject, is_terminal, owner_reference, timestamp

REVISION = "deployment.kubernetes.io/revision"
HASH_LABEL = "pod-template-hash"
POD_NAME_LABEL = "statefulset.kubernetes.io/pod-name"
REVISION_LABEL = "controller-revision-hash"
_OWNERS = {"Deployment": "deployments", "ReplicaSet": "replicasets", "StatefulSet": "statefulsets", "Job": "jobs"}
_RETRY_POLL_S = 0.5
_BURST = 50
"""Pods created in one pass, between which others of the loop run."""
_MOST_DOUBLED = 8
"""The longest wait is 256 s."""


class PodControllers:
    """One pass after every change, and while a failure waits for its retry."""

    def __init__(self, api: EmbeddedApiServer) -> None:
        self._api = api
        self._retries: dict[str, tuple[int, float]] = {}
        self._failed: dict[str, set[str]] = {}
        """The failed pods, by UID, that a StatefulSet has had: it deletes them, so they cannot be counted."""

    async def run(self) -> None:
        """Reconciles, without an end."""
        while True:
            version, now = self._api.version, time.monotonic()
            self.reconcile()
            await asyncio.sleep(0)  # its own changes start the next pass at once
            # Nothing changes while a back-off runs out: the pass after it needs the clock.
            is_due = any(due > now for _, due in self._retries.values())
            await at_most(_RETRY_POLL_S if is_due else None, self._api.wait_change(version))

    def reconcile(self) -> None:
        self._collect_garbage()
        # Deployments before their ReplicaSets before Jobs: one pass may do a whole rollout's step.
        for resource, step in (
            ("deployments", self._deployment), ("replicasets", self._replica_set),
            ("statefulsets", self._stateful_set), ("jobs", self._job),
        ):  # fmt: skip
            for raw in self._api.store.all(resource):
                # A step before it may have replaced or deleted it: the old object would overwrite the new.
                if self._api.store.find(resource, key_of(raw)) is raw:
                    with suppress(Conflict):  # somebody else's object has the name: tried again with the next change
                        step(raw)

    def _collect_garbage(self) -> None:
        """Deletes the objects of owners that have gone."""
        store = self._api.store
        living = {raw["metadata"]["uid"] for resource in _OWNERS.values() for raw in store.all(resource)}
        self._retries = {uid: retry for uid, retry in self._retries.items() if uid in living}
        self._failed = {uid: failed for uid, failed in self._failed.items() if uid in living}
        for resource in ("replicasets", "pods"):
            for raw in store.all(resource):
                owner = _owner(raw)
                # An owner of a kind that is not served here is nobody's to collect.
                if owner is not None and owner["kind"] in _OWNERS and owner["uid"] not in living:
                    self._delete(resource, raw)

    def _delete(self, resource: str, raw: RawObject) -> None:
        if not raw["metadata"].get("deletionTimestamp"):
            with suppress(NotFound):
                self._api.delete(resource, key_of(raw))

    def _delete_pod(self, owner: RawObject, pod: RawObject) -> None:
        self._delete("pods", pod)
        self._record(owner, "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")

    def _owned(self, resource: str, owner: RawObject) -> list[RawObject]:
        """The objects that it owns, oldest first."""
        uid = owner["metadata"]["uid"]
        return [raw for raw in self._api.store.in_creation_order(resource) if (_owner(raw) or {}).get("uid") == uid]

    def _active(self, owner: RawObject) -> list[RawObject]:
        return [pod for pod in self._owned("pods", owner) if _is_active(pod)]

    def _change(self, resource: str, raw: RawObject, **sections: Mapping[str, Any]) -> RawObject:
        """Writes fields of sections of the object as it is now."""
        current = self._api.store.get(resource, key_of(raw))
        changed = {name: {**(current.get(name) or {}), **fields} for name, fields in sections.items()}
        return self._api.store.replace(resource, {**current, **changed})

    def _set_status(self, resource: str, raw: RawObject, **status: Any) -> None:
        # Jobs have no observedGeneration in batch/v1.
        seen = {} if resource == "jobs" else {"observedGeneration": raw["metadata"]["generation"]}
        self._change(resource, raw, status={**status, **seen})

    def _set_counts(self, resource: str, raw: RawObject, **status: Any) -> None:
        # Read again: pods were made or deleted before.
        active = self._active(raw)
        ready = sum(map(_is_ready, active))
        self._set_status(resource, raw, replicas=len(active), readyReplicas=ready, availableReplicas=ready, **status)

    # --- pods ---

    def _may_create(self, owner: RawObject, failed: int) -> bool:
        """Whether pods may be created now: at once after the first failure, then after twice the wait each time."""
        uid = owner["metadata"]["uid"]
        count, due = self._retries.get(uid, (0, 0.0))
        # A failure that was not counted yet moves the time; the same one again does not.
        if failed > count:
            due = time.monotonic() + (2.0 ** min(failed - 2, _MOST_DOUBLED) if failed > 1 else 0.0)
            self._retries[uid] = (failed, due)
        return time.monotonic() >= due

    def _create_pods(self, owner: RawObject, count: int) -> None:
        for _ in range(min(count, _BURST)):
            self._create_pod(owner, generateName=f"{owner['metadata']['name']}-")

    def _create_pod(self, owner: RawObject, **metadata: Any) -> None:
        template = owner["spec"]["template"]
        pod = {
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {**template["metadata"], "ownerReferences": [owner_reference(owner)], **metadata},
        }  # fmt: skip
        made = self._api.create_pod(pod, owner["metadata"]["namespace"])
        self._record(owner, "SuccessfulCreate", f"Created pod: {made['metadata']['name']}")

    def _record(self, owner: RawObject, reason: str, message: str, kind: str = "Normal") -> None:
        source = f"{owner['kind'].lower()}-controller"
        self._api.record_event(owner, reason=reason, message=message, source=source, kind=kind)

    def _replica_set(self, raw: RawObject) -> None:
        active = self._active(raw)
        missing = raw["spec"]["replicas"] - len(active)
        if raw["metadata"].get("deletionTimestamp") is None and missing > 0:
            if self._may_create(raw, _in_phase(self._owned("pods", raw), "Failed")):
                self._create_pods(raw, missing)
        elif missing < 0:
            for pod in sorted(active, key=_is_ready)[:-missing]:  # those that are not ready go first
                self._delete_pod(raw, pod)
        self._set_counts("replicasets", raw)

    # --- deployments ---

    def _deployment(self, raw: RawObject) -> None:
        spec, desired = raw["spec"], raw["spec"]["replicas"]
        sets = self._owned("replicasets", raw)
        new = self._new_set(raw, sets)
        old = [one for one in sets if one["metadata"]["name"] != new["metadata"]["name"]]
        # All old pods must be gone before the first new one: they may need the same GPU.
        if spec["strategy"].get("type") == "Recreate":
            for one in old:
                self._scale(one, 0)
            pods = [pod for one in old for pod in self._owned("pods", one) if not is_terminal(pod)]
            if not pods:
                self._scale(new, desired)
        else:
            self._roll(new, old, desired, spec["strategy"].get("rollingUpdate") or {})
        self._report_deployment(raw, new["metadata"]["name"])

    def _new_set(self, raw: RawObject, sets: Sequence[RawObject]) -> RawObject:
        """The ReplicaSet of the current template. It has the newest revision."""
        template, metadata = raw["spec"]["template"], raw["metadata"]
        text = _template_hash(template)
        name = f"{metadata['name']}-{text}"
        newest = max(map(_revision, sets), default=0)
        # By the template's hash: going back to an earlier template finds its ReplicaSet again.
        found = next((one for one in sets if one["metadata"]["name"] == name), None)
        if found is None:
            labels = {**template["metadata"]["labels"], HASH_LABEL: text}
            body = {
                "metadata": {
                    "name": name, "labels": labels, "annotations": {REVISION: str(newest + 1)},
                    "ownerReferences": [owner_reference(raw)],
                },
                "spec": {
                    "replicas": 0, "selector": {"matchLabels": {**raw["spec"]["selector"]["matchLabels"], HASH_LABEL: text}},
                    "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
                },
            }  # fmt: skip
            found = self._api.create("replicasets", body, metadata["namespace"])
        elif _revision(found) < newest:  # rolled back to
            found = self._annotate("replicasets", found, str(newest + 1))
        self._annotate("deployments", raw, str(_revision(found)))
        return found

    def _annotate(self, resource: str, raw: RawObject, revision: str) -> RawObject:
        annotations = self._api.store.get(resource, key_of(raw))["metadata"].get("annotations") or {}
        return self._change(resource, raw, metadata={"annotations": {**annotations, REVISION: revision}})

    def _roll(self, new: RawObject, old: Sequence[RawObject], desired: int, limits: Mapping[str, Any]) -> None:
        """The new set grows while all together are within the surge; the old ones shrink while enough are available."""
        surge = _share(limits.get("maxSurge", "25%"), desired, math.ceil)
        unavailable = _share(limits.get("maxUnavailable", "25%"), desired, math.floor)
        if surge == 0 and unavailable == 0:  # both rounded to nothing: the rollout could never begin
            unavailable = 1
        # The surge bounds growth alone: a Deployment that was scaled down shrinks at once.
        size, rest = new["spec"]["replicas"], sum(one["spec"]["replicas"] for one in old)
        size = desired if size >= desired else max(size, min(desired, desired + surge - rest))
        self._scale(new, size)
        # An older generation's status says nothing of the size set now: none of it counts as available.
        is_seen = (new.get("status") or {}).get("observedGeneration") == new["metadata"]["generation"]
        missing = size - ((new.get("status") or {}).get("availableReplicas", 0) if is_seen else 0)
        spare = size + rest - (desired - unavailable) - missing
        for one in old:
            taken = max(0, min(one["spec"]["replicas"], spare))
            self._scale(one, one["spec"]["replicas"] - taken)
            spare -= taken

    def _scale(self, replica_set: RawObject, size: int) -> None:
        raw = self._api.store.get("replicasets", key_of(replica_set))
        if raw["spec"]["replicas"] != size:
            generation = {"generation": raw["metadata"]["generation"] + 1}
            self._change("replicasets", raw, metadata=generation, spec={"replicas": size})

    def _report_deployment(self, raw: RawObject, new_name: str) -> None:
        sets = self._owned("replicasets", raw)
        of = {one["metadata"]["name"]: one.get("status") or {} for one in sets}
        total = {name: sum(status.get(name, 0) for status in of.values()) for name in ("replicas", "readyReplicas")}
        # What the ReplicaSets say of themselves, as the real controller adds it up.
        ready, updated = total["readyReplicas"], of[new_name].get("replicas", 0)
        desired = raw["spec"]["replicas"]
        is_done = updated == desired == total["replicas"] == ready
        unavailable = _share(
            (raw["spec"]["strategy"].get("rollingUpdate") or {}).get("maxUnavailable", "25%"), desired, math.floor
        )
        known = {c["type"]: c for c in (raw.get("status") or {}).get("conditions", ())}
        is_available = ready >= desired - unavailable
        self._set_status(
            "deployments", raw, **total, updatedReplicas=updated, availableReplicas=ready,
            unavailableReplicas=max(0, max(desired, total["replicas"]) - ready),
            conditions=[
                _condition(known, "Available", is_available, f"MinimumReplicas{'A' if is_available else 'Una'}vailable"),
                _condition(known, "Progressing", True, "NewReplicaSetAvailable" if is_done else "ReplicaSetUpdated"),
            ],
        )  # fmt: skip

    # --- stateful sets ---

    def _stateful_set(self, raw: RawObject) -> None:
        """One step: at most one pod is made or deleted in it, unless podManagementPolicy is Parallel."""
        name, uid, spec = raw["metadata"]["name"], raw["metadata"]["uid"], raw["spec"]
        pods = {pod["metadata"]["name"]: pod for pod in self._owned("pods", raw)}
        wanted = [f"{name}-{number}" for number in range(spec["replicas"])]
        is_parallel, revision = spec["podManagementPolicy"] == "Parallel", _template_hash(spec["template"])
        failed = self._failed.setdefault(uid, set())
        failed |= {pod["metadata"]["uid"] for pod in pods.values() if pod["status"]["phase"] == "Failed"}
        may_create = self._may_create(raw, len(failed))
        for one in wanted:
            pod = pods.get(one)
            if pod is None and may_create:
                labels = {**spec["template"]["metadata"]["labels"], REVISION_LABEL: revision, POD_NAME_LABEL: one}
                self._create_pod(raw, name=one, labels=labels)
            # Its successor has its name, so it must go first.
            elif pod is not None and is_terminal(pod) and may_create:
                self._delete("pods", pod)
            if not is_parallel and (pod is None or not _is_ready(pod)):
                break
        else:
            self._shrink(raw, pods, wanted, revision, is_parallel=is_parallel)
        updated = sum(_revision_label(pod) == revision for pod in self._active(raw))
        self._set_counts(
            "statefulsets", raw, updatedReplicas=updated, currentReplicas=updated, currentRevision=revision,
            updateRevision=revision,
        )  # fmt: skip

    def _shrink(
        self, raw: RawObject, pods: Mapping[str, RawObject], wanted: Sequence[str], revision: str, *, is_parallel: bool
    ) -> None:
        """Those of the highest numbers go first; one of a former template once all are ready."""
        surplus = sorted(pods.keys() - set(wanted), key=lambda one: int(one.rpartition("-")[2]), reverse=True)
        former = [one for one in reversed(wanted) if one in pods and _revision_label(pods[one]) != revision]
        is_whole = all(one in pods and _is_ready(pods[one]) for one in wanted)
        for one in (surplus if is_parallel else surplus[:1]) or (former[:1] if is_whole else []):
            self._delete_pod(raw, pods[one])

    # --- jobs ---

    def _job(self, raw: RawObject) -> None:
        spec, known = raw["spec"], raw.get("status") or {}
        # A Job that is complete or failed stays so.
        if known.get("conditions"):
            return
        pods = self._owned("pods", raw)
        succeeded, failed = _in_phase(pods, "Succeeded"), _in_phase(pods, "Failed")
        status: dict[str, Any] = {"startTime": known.get("startTime") or timestamp()}
        # Before success is looked at: as in a cluster, the limit ends the Job.
        if failed > spec["backoffLimit"]:
            for pod in self._active(raw):
                self._delete("pods", pod)
            why = "Job has reached the specified backoff limit"
            status["conditions"] = [{**_condition({}, "Failed", True, "BackoffLimitExceeded"), "message": why}]
            self._record(raw, "BackoffLimitExceeded", why, "Warning")
        elif succeeded >= spec["completions"]:
            complete = _condition({}, "Complete", True, "CompletionsReached")
            status |= {"completionTime": timestamp(), "conditions": [complete]}
            self._record(raw, "Completed", "Job completed")
        else:
            # No more at once than are still needed.
            missing = min(spec["parallelism"], spec["completions"] - succeeded) - sum(map(_is_active, pods))
            if missing > 0 and self._may_create(raw, failed):
                self._create_pods(raw, missing)
        # A Job that has ended so has none, though they may need a moment to go.
        active = [] if failed > spec["backoffLimit"] else self._active(raw)
        counts = {"succeeded": succeeded, "failed": failed, "active": len(active), "ready": sum(map(_is_ready, active))}
        self._set_status("jobs", raw, **status, **counts)


def _owner(raw: RawObject) -> Mapping[str, Any] | None:
    return next((one for one in raw["metadata"].get("ownerReferences") or () if one.get("controller")), None)


def _revision(replica_set: RawObject) -> int:
    """0 where a client has taken the annotation away, or written something else into it."""
    text = (replica_set["metadata"].get("annotations") or {}).get(REVISION, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _template_hash(template: RawObject) -> str:
    """The hash uses sorted keys, so a template has the same hash in whatever order a client writes it."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _revision_label(pod: RawObject) -> str:
    return str((pod["metadata"].get("labels") or {}).get(REVISION_LABEL, ""))


def _is_active(pod: RawObject) -> bool:
    return not is_terminal(pod) and not pod["metadata"].get("deletionTimestamp")


def _in_phase(pods: Sequence[RawObject], phase: str) -> int:
    return sum(pod["status"]["phase"] == phase for pod in pods)


def _is_ready(pod: RawObject) -> bool:
    return any(c["type"] == "Ready" and c.get("status") == "True" for c in pod["status"].get("conditions", ()))


def _share(value: object, of: int, rounded: Any) -> int:
    """A number, or a part such as 25%."""
    text = str(value)
    return int(rounded(of * int(text[:-1]) / 100)) if text.endswith("%") else int(text)


def _condition(known: Mapping[str, Any], kind: str, is_true: bool, reason: str) -> RawObject:
    status, before = "True" if is_true else "False", known.get(kind, {})
    # The time of the change, not of the last look.
    since = before.get("lastTransitionTime") if before.get("status") == status else timestamp()
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": since}
