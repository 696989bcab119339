"""The lifecycle of an admitted pod on the embedded kubelet: start its containers, restart them, end it, report its status.

Device health per container (allocatedResourcesStatus) is not reported. State owned: each known pod's state. Admission is
the kubelet's (kubelet.py); devices are the device manager's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import structlog
from msgspec import Struct, field

from gpushare_agent.model.errors import AgentError, Conflict, NotFound
from gpushare_agent.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.sandbox import pod_manifest
from gpushare_agent.sandbox.kubelet.calls import KubeletParts
from gpushare_agent.sandbox.kubelet.container_config import container_config, container_of
from gpushare_agent.sandbox.kubelet.device_manager import AllocationFailed, DeviceManager, PodIdentity
from gpushare_agent.sandbox.kubelet.dra_manager import DraManager, PrepareFailed
from gpushare_agent.sandbox.pod_manifest import RawObject, timestamp
from gpushare_agent.sandbox.runtime.cdi_resolver import CdiResolver
from gpushare_agent.sandbox.runtime.containers import Container, ContainerRuntime

_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")


def _state(container: Container | None, waiting: str) -> dict[str, Any]:
    # A container that ended and waits for its next start shows why it waits; its end is in lastState.
    if container is None or (waiting and not container.is_running):
        reason, _, message = waiting.partition(": ")
        return {"waiting": {"reason": reason or "PodInitializing", **({"message": message} if message else {})}}
    if container.exit_code is None:
        return {"running": {"startedAt": container.started_at}}
    return _terminated(container)


def _terminated(container: Container) -> dict[str, Any]:
    return {
        "terminated": {
            "containerID": f"containerd://{container.id}", "exitCode": container.exit_code,
            "reason": "Completed" if container.exit_code == 0 else "Error",
            "startedAt": container.started_at, "finishedAt": container.finished_at,
        }
    }  # fmt: skip


log = structlog.get_logger(__name__)

PREPARE_FAILED = "FailedPrepareDynamicResources"
FORCED_GRACE_S = 2.0
"""A kubelet gives the processes of a force-deleted pod so long between TERM and KILL."""
LAST_DELAY_S = 300.0
STABLE_S = 600.0
"""A container that ran so long before it ended is restarted at once, as after its first end."""


class PodState(Enum):
    ADMITTING = auto()
    ADMITTED = auto()
    REJECTED = auto()
    STOPPING = auto()
    """Being deleted; its processes live and hold its devices."""
    ENDED = auto()
    """Succeeded, failed, or stopped for its deletion: holds nothing."""


ACTIVE_STATES = frozenset({PodState.ADMITTING, PodState.ADMITTED, PodState.STOPPING})


class _Delay(Struct, frozen=True, kw_only=True):
    """The time at which the run `container_id`, which has ended, may be followed by the next; `ends` counts the ends in a
    row."""

    container_id: str
    ends: int
    due_at: float


class KnownPod(Struct, kw_only=True):
    """A pod that the kubelet has taken up from the API server."""

    raw: RawObject
    identity: PodIdentity
    containers: tuple[ContainerSpec, ...]
    state: PodState = PodState.ADMITTING
    started_at: str = field(default_factory=pod_manifest.timestamp)
    restarts: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    delays: dict[str, _Delay] = field(default_factory=dict)
    worker: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, raw: RawObject) -> KnownPod:
        metadata, status = raw["metadata"], raw.get("status") or {}
        identity = PodIdentity(uid=metadata["uid"], namespace=metadata["namespace"], name=metadata["name"])
        known = cls(raw=raw, identity=identity, containers=pod_manifest.containers_of(raw))
        # A restart of the kubelet does not start the pod anew.
        known.started_at = status.get("startTime") or known.started_at
        # Restart counts go on over a restart of the kubelet.
        for entry in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            known.restarts[entry["name"]] = entry.get("restartCount", 0)
        return known

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES


def container_status(pod: KnownPod, spec: ContainerSpec, run: Container | None) -> dict[str, Any]:
    """`run` is the newest."""
    waiting, is_running = pod.waiting.get(spec.name, ""), run is not None and run.is_running
    # An init container that has ended well counts as ready.
    is_done = spec.kind is ContainerKind.INIT and run is not None and run.exit_code == 0
    return {
        "name": spec.name, "image": container_of(pod.raw, spec.name).get("image", ""), "imageID": "",
        "lastState": _terminated(run) if run is not None and waiting and not is_running else {},
        "restartCount": pod.restarts.get(spec.name, 0),
        "ready": is_running or is_done, "started": is_running, "state": _state(run, waiting),
        "allocatedResources": {name: str(count) for name, count in spec.requests.items()},
        **({"containerID": f"containerd://{run.id}"} if run is not None else {}),
    }  # fmt: skip


def pod_status(pod: KnownPod, runtime: ContainerRuntime, phase: str) -> dict[str, Any]:
    runs = [(spec, runtime.find(pod.identity.uid, spec.name)) for spec in pod.containers]
    statuses = [(spec.kind is ContainerKind.MAIN, container_status(pod, spec, run)) for spec, run in runs]
    init, main = ([one for is_main, one in statuses if is_main is kind] for kind in (False, True))
    is_ready = phase == "Running" and all(s["ready"] for s in main)
    # Initialized is true once init containers are done, the others only while all main ones run.
    values = {kind: is_ready or (kind == "Initialized" and phase != "Pending") for kind in _CONDITIONS}
    now = timestamp()
    return {
        "phase": phase, "startTime": pod.started_at, "hostIP": "127.0.0.1", "qosClass": "BestEffort",
        "conditions": [{"type": kind, "status": str(value), "lastTransitionTime": now} for kind, value in values.items()],
        **({"initContainerStatuses": init} if init else {}), "containerStatuses": main,
    }  # fmt: skip


class PodWorkers(Struct, frozen=True, kw_only=True, eq=False):
    """The bodies of the pods' tasks. The kubelet starts and cancels the tasks."""

    parts: KubeletParts
    devices: DeviceManager
    dra: DraManager

    async def run(self, pod: KnownPod) -> None:
        """Runs the pod until it has ended by itself. Containers that run already are left alone."""
        if not self.parts.runtime.living(pod.identity.uid):  # else they were prepared before a restart of the kubelet
            await self._prepare_claims(pod)
        # One after the other: init containers must end, a sidecar only start.
        for spec in pod.containers:
            await self._bring_up(pod, spec)
            # restartPolicy Never, and it failed: the main containers never start.
            if spec.kind is ContainerKind.INIT and not await self._complete(pod, spec):
                await self._end(pod)
                return
        self.report(pod, "Running")
        signal = self.parts.runtime.signal_of(pod.identity.uid)
        while pod.state is PodState.ADMITTED:
            # Before the look at what has ended: an end during it is seen at once.
            seen = signal.count
            due_s = await self._restart_ended(pod)
            if pod.state is PodState.ADMITTED:
                with suppress(TimeoutError):
                    async with asyncio.timeout(due_s):
                        await signal.wait(seen)

    async def terminate(self, pod: KnownPod, grace_s: float) -> None:
        """Stops the processes; the devices are free once they have gone. Then the API object may go."""
        await self.stop_and_unprepare(pod, grace_s)
        # Before the report: its devices count as free from here on.
        pod.state = PodState.ENDED
        self.report(pod, self._final_phase(pod))
        self.parts.api.signal.notify()
        self.parts.runtime.forget(pod.identity.uid)
        # Last, as the real one: the object goes only when nothing of the pod runs or is prepared.
        self.confirm_deletion(pod)

    async def stop_and_unprepare(self, pod: KnownPod, grace_s: float) -> None:
        """The claims after the processes, and before the pod is reported as ended."""
        await self.stop_processes(pod, grace_s)
        await self.dra.unprepare(pod.identity.uid)

    async def _prepare_claims(self, pod: KnownPod) -> None:
        """Prepares the claims until it has worked. A failure is tried again at the next full sync, or when something of
        the pod's object has changed that a kubelet looks at: not its status."""
        where, message = pod.identity, ""
        changes = self.parts.api.pods_by_node.signal_of(pod.raw["spec"]["nodeName"])
        while True:
            raw = self._newest(pod)
            try:
                await self.dra.prepare(raw)
                return
            except PrepareFailed as error:
                text = f"Failed to prepare dynamic resources: prepare dynamic resources: {error}"
                # An Event for each new text, not for each try.
                if text != message:
                    self.parts.api.record_event(raw, reason=PREPARE_FAILED, message=text, source="kubelet")
                message = text
            self.report(pod, "Pending")
            log.debug("prepare_failed", pod=where.name, error=message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.parts.rng.uniform(*self.parts.times.prepare_retry_s)):
                    # Any change of the object makes a kubelet sync at once, an annotation too: a driver can wake a pod by
                    # it (94 s became 26 for 100 pods, measured).
                    while _synced_part(self._newest(pod)) == _synced_part(raw):
                        await changes.wait(changes.count)

    def _newest(self, pod: KnownPod) -> RawObject:
        found = self.parts.api.find_pod(pod.identity.namespace, pod.identity.name)
        # Another pod of the same name is not this one.
        return found if found is not None and found["metadata"]["uid"] == pod.identity.uid else pod.raw

    async def stop_processes(self, pod: KnownPod, grace_s: float) -> None:
        uid = pod.identity.uid
        for container in self.parts.runtime.living(uid):
            self._record(pod, container.name, "Killing", f"Stopping container {container.name}")
            self.parts.runtime.stop(container, grace_s)
        signal = self.parts.runtime.signal_of(uid)
        while self.parts.runtime.living(uid):
            await signal.wait(signal.count)

    def confirm_deletion(self, pod: KnownPod) -> None:
        where = pod.identity
        with suppress(NotFound, Conflict):
            self.parts.api.delete_pod(where.namespace, where.name, grace_period_s=0, uid=where.uid)

    def reject(self, pod: KnownPod, reason: str, message: str) -> None:
        """The text goes into the pod's status, and into an Event."""
        pod.state = PodState.REJECTED
        text = f"Pod was rejected: {message}"
        self._write(pod, {"phase": "Failed", "reason": reason, "message": text, "startTime": pod.started_at})
        self.parts.api.record_event(pod.raw, reason=reason, message=message, source="kubelet")

    def report(self, pod: KnownPod, phase: str) -> None:
        self._write(pod, pod_status(pod, self.parts.runtime, phase))

    def _write(self, pod: KnownPod, status: dict[str, Any]) -> None:
        where = pod.identity
        # The pod's object may have been deleted, or replaced by another of the same name, meanwhile.
        with suppress(NotFound, Conflict):
            self.parts.api.set_pod_status(where.namespace, where.name, status, uid=where.uid)

    async def _bring_up(self, pod: KnownPod, spec: ContainerSpec) -> None:
        container = self.parts.runtime.find(pod.identity.uid, spec.name)
        if container is not None and container.is_running:
            return
        # Done before a restart of the kubelet: it is not run twice.
        if container is not None and spec.kind is ContainerKind.INIT and container.exit_code == 0:
            return
        if container is not None:
            pod.restarts[spec.name] = pod.restarts.get(spec.name, 0) + 1
        await self._start(pod, spec)

    async def _start(self, pod: KnownPod, spec: ContainerSpec) -> None:
        while True:
            try:
                # Before PreStartContainer, as a kubelet does: isolation `driver` limits the pod's cgroup there.
                self.parts.runtime.make_pod_cgroup(pod.identity.uid)
                await self.devices.prepare_start(pod.identity, spec)
                await asyncio.sleep(self.parts.times.container_start_s)
                records = self.devices.records.of_container(pod.identity.uid, spec.name)
                # By name: the order in which resources were allocated is random.
                answers = [records[name].response for name in sorted(records)]
                claimed = self.dra.cdi_names(self._newest(pod), container_of(pod.raw, spec.name))
                config = container_config(
                    pod.raw, spec, answers, CdiResolver([self.parts.runtime.cdi_directory]), claimed
                )
                self.parts.runtime.start(config)
                self._record_start(pod, config.name, config.note)
                break
            # PreStartContainer failed: the reason that a kubelet shows for it.
            except AllocationFailed as error:
                reason = f"CreateContainerConfigError: {error}"
            except AgentError as error:
                reason = f"CreateContainerError: {error}"
            # An Event for each new reason, not for each try.
            if pod.waiting.get(spec.name) != reason:
                message = f"Error: {reason.partition(': ')[2]}"
                self.parts.api.record_event(pod.raw, reason="Failed", message=message, source="kubelet")
            pod.waiting[spec.name] = reason
            self.report(pod, "Pending" if not self.parts.runtime.living(pod.identity.uid) else "Running")
            await asyncio.sleep(self.parts.times.start_retry_s)
        pod.waiting.pop(spec.name, None)

    def _record_start(self, pod: KnownPod, name: str, note: str) -> None:
        """The Events of a kubelet 1.36 (measured), and what the sandbox does instead of the command."""
        image = container_of(pod.raw, name).get("image", "")
        for reason, message in (
            ("Pulled", f'Container image "{image}" already present on machine and can be accessed by the pod'),
            ("Created", "Container created"),
            ("Started", "Container started"),
            ("CommandNotRun", note),
        ):
            if message:
                self._record(pod, name, reason, message)

    def _record(self, pod: KnownPod, container: str, reason: str, message: str) -> None:
        self.parts.api.record_event(
            pod.raw, reason=reason, message=message, source="kubelet", kind="Normal", container=container
        )

    async def _complete(self, pod: KnownPod, spec: ContainerSpec) -> bool:
        """Waits until an init container has ended well; whether it has. Until then it is started again and again."""
        uid = pod.identity.uid
        signal = self.parts.runtime.signal_of(uid)
        while (container := self.parts.runtime.find(uid, spec.name)) is not None:
            seen = signal.count
            if container.is_running:
                self.report(pod, "Pending")
                await signal.wait(seen)
            elif container.exit_code == 0:
                return True
            elif pod.raw["spec"].get("restartPolicy") == "Never":
                return False
            else:
                # Back-off, as for main containers.
                await asyncio.sleep(self._delay_s(pod, container))
                await self._bring_up(pod, spec)
        return False

    async def _restart_ended(self, pod: KnownPod) -> float | None:
        """Restarts what died and may be restarted; ends the pod when its main containers are done.

        Returns in how many seconds the next restart is due, None where none is waited for.
        """
        uid, policy = pod.identity.uid, pod.raw["spec"].get("restartPolicy", "Always")
        # A container that ends by the sandbox's annotation has done its work, whatever the policy says.
        is_timed = pod_manifest.annotation_number(pod.raw, pod_manifest.RUN_SECONDS_ANNOTATION) is not None
        main = [spec for spec in pod.containers if spec.kind is ContainerKind.MAIN]
        codes, dues = [], []
        for spec in pod.containers:
            container = self.parts.runtime.find(uid, spec.name)
            # Init containers are over, the others run.
            if spec.kind is ContainerKind.INIT or container is None or container.exit_code is None:
                continue
            is_over = policy == "Never" or (container.exit_code == 0 and (policy == "OnFailure" or is_timed))
            if spec.kind is ContainerKind.MAIN and is_over:
                codes.append(container.exit_code)
            elif (delay_s := self._delay_s(pod, container)) > 0:
                dues.append(delay_s)
            else:
                await self._bring_up(pod, spec)
                self.report(pod, "Running")
        # Sidecars do not keep a pod alive: they are stopped with its end.
        if len(codes) == len(main):
            await self._end(pod)
        return min(dues, default=None)

    def _delay_s(self, pod: KnownPod, container: Container) -> float:
        """How long the ended container has still to wait: not after its first end, then twice as long each time."""
        known = pod.delays.get(container.name)
        if known is None or known.container_id != container.id:
            # Ten minutes without an end, and the back-off begins anew.
            is_stable = container.ended_at - container.created_at >= STABLE_S
            ends = 0 if known is None or is_stable else known.ends + 1
            delay_s = min(self.parts.times.start_retry_s * 2 ** min(ends - 1, 16), LAST_DELAY_S) if ends else 0.0
            known = _Delay(container_id=container.id, ends=ends, due_at=time.monotonic() + delay_s)
            pod.delays[container.name] = known
            if delay_s:
                text = f"back-off {delay_s:g}s restarting failed container={container.name}"
                pod.waiting[container.name] = f"CrashLoopBackOff: {text}"
                self.report(pod, "Running")
        return max(0.0, known.due_at - time.monotonic())

    async def _end(self, pod: KnownPod) -> None:
        """The main containers are done, or an init container has failed."""
        await self.stop_and_unprepare(pod, pod_manifest.grace_s(pod.raw))
        pod.state = PodState.ENDED
        self.report(pod, self._final_phase(pod))
        self.parts.api.signal.notify()

    def _final_phase(self, pod: KnownPod) -> str:
        # By the main containers alone: a sidecar that is killed at the end does not fail the pod.
        runs = [
            self.parts.runtime.find(pod.identity.uid, s.name) for s in pod.containers if s.kind is ContainerKind.MAIN
        ]
        return "Succeeded" if all(run is not None and run.exit_code == 0 for run in runs) else "Failed"


def _synced_part(raw: RawObject) -> tuple[object, ...]:
    metadata = raw["metadata"]
    return raw["spec"], metadata.get("annotations"), metadata.get("labels"), metadata.get("deletionTimestamp")
