"""The lifecycle of one pod on the embedded kubelet: start its containers, restart them, end it, report its status.

Device health per container (allocatedResourcesStatus) is not reported. State owned: the pod's state. Admission is
the kubelet's (kubelet.py); devices are the device manager's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import structlog
from msgspec import Struct

from gpushare_agent.core.kit.supervision import ChangeSignal
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.sandbox import pod_manifest
from gpushare_agent.sandbox.kubelet.calls import NodeParts
from gpushare_agent.sandbox.kubelet.container_config import container_config, container_of
from gpushare_agent.sandbox.kubelet.device_manager import AllocationFailed, DeviceManager, PodIdentity
from gpushare_agent.sandbox.kubelet.dra_manager import DraManager, PrepareFailed
from gpushare_agent.sandbox.pod_manifest import RawObject, timestamp
from gpushare_agent.sandbox.runtime.containers import Container

log = structlog.get_logger(__name__)

_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
PREPARE_FAILED = "FailedPrepareDynamicResources"
FORCED_GRACE_S = 2.0
"""A kubelet gives the processes of a force-deleted pod this time between TERM and KILL."""
LAST_DELAY_S = 300.0
STABLE_S = 600.0
"""A container that ran this long before it ended is restarted at once, as after its first end."""


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


class PodWorker:
    """A pod that the kubelet has taken up from the API server, and the bodies of its task, which the kubelet starts and
    cancels."""

    def __init__(self, raw: RawObject, parts: NodeParts, devices: DeviceManager, dra: DraManager) -> None:
        metadata, status = raw["metadata"], raw.get("status") or {}
        self.raw = raw
        self.identity = PodIdentity(uid=metadata["uid"], namespace=metadata["namespace"], name=metadata["name"])
        self.containers = pod_manifest.containers_of(raw)
        self.state = PodState.ADMITTING
        self.tasks: list[asyncio.Task[None]] = []
        # A restart of the kubelet does not start the pod again.
        self._started_at = status.get("startTime") or timestamp()
        # Restart counts go on over a restart of the kubelet.
        known = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        self._restarts: dict[str, int] = {entry["name"]: entry.get("restartCount", 0) for entry in known}
        self._waiting: dict[str, str] = {}
        self._delays: dict[str, _Delay] = {}
        self._parts, self._api, self._runtime = parts, parts.api, parts.runtime
        self._devices, self._dra = devices, dra
        self._policy = raw["spec"].get("restartPolicy", "Always")

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE_STATES

    @property
    def _changes(self) -> ChangeSignal:
        """The signal for changes of its containers."""
        return self._runtime.signal_of(self.identity.uid)

    def living(self) -> list[Container]:
        return self._runtime.living(self.identity.uid)

    def _find(self, spec: ContainerSpec) -> Container | None:
        """The newest run."""
        return self._runtime.find(self.identity.uid, spec.name)

    async def run(self) -> None:
        """Runs the pod until it has ended by itself. Containers that run already are left alone."""
        if not self.living():  # else they were prepared before a restart of the kubelet
            await self._prepare_claims()
        # One after the other: init containers must end, a sidecar only start.
        for spec in self.containers:
            await self._bring_up(spec)
            # restartPolicy Never, and it failed: the main containers never start.
            if spec.kind is ContainerKind.INIT and not await self._complete(spec):
                await self._end()
                return
        self.report("Running")
        signal = self._changes
        while self.state is PodState.ADMITTED:
            # Before the look at what has ended: an end during it is seen at once.
            seen = signal.count
            due_s = await self._restart_ended()
            if self.state is PodState.ADMITTED:
                await signal.wait(seen, due_s)

    async def terminate(self, grace_s: float) -> None:
        """Stops the processes; the devices are free once they have gone. Then the API object may go."""
        await self._end(grace_s)
        self._runtime.forget(self.identity.uid)
        # Last, as the real one: the object goes only when nothing of the pod runs or is prepared.
        self.confirm_deletion()

    async def stop_and_unprepare(self, grace_s: float) -> None:
        """The claims after the processes, and before the pod is reported as ended."""
        await self.stop_processes(grace_s)
        await self._dra.unprepare(self.identity.uid)

    async def _prepare_claims(self) -> None:
        """Prepares the claims until it has worked. A failure is tried again at the next full sync, or when something of
        the pod's object has changed that a kubelet looks at: not its status."""
        where, message = self.identity, ""
        changes = self._api.pods_by_node.signal_of(self.raw["spec"]["nodeName"])
        while True:
            raw = self._newest()
            try:
                await self._dra.prepare(raw)
                return
            except PrepareFailed as error:
                text = f"Failed to prepare dynamic resources: prepare dynamic resources: {error}"
                # An Event for each new text, not for each try.
                if text != message:
                    self._api.record_event(raw, reason=PREPARE_FAILED, message=text, source="kubelet")
                message = text
            self.report("Pending")
            log.debug("prepare_failed", pod=where.name, error=message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._parts.rng.uniform(*self._parts.times.prepare_retry_s)):
                    # Any change of the object makes a kubelet sync at once, an annotation too: a driver can wake a pod by
                    # it (94 s became 26 for 100 pods, measured).
                    while _synced_part(self._newest()) == _synced_part(raw):
                        await changes.wait(changes.count)

    def _newest(self) -> RawObject:
        found = self._api.find_pod(self.identity.namespace, self.identity.name)
        # Another pod of the same name is not this one.
        return found if found is not None and found["metadata"]["uid"] == self.identity.uid else self.raw

    async def stop_processes(self, grace_s: float) -> None:
        for container in self.living():
            self._record(container.name, "Killing", f"Stopping container {container.name}")
            self._runtime.stop(container, grace_s)
        await self._changes.wait_until(lambda: not self.living())

    def confirm_deletion(self) -> None:
        where = self.identity
        with suppress(NotFound, Conflict):
            self._api.delete_pod(where.namespace, where.name, grace_period_s=0, uid=where.uid)

    def reject(self, reason: str, message: str) -> None:
        """The text goes into the pod's status, and into an Event."""
        self.state = PodState.REJECTED
        text = f"Pod was rejected: {message}"
        self._write({"phase": "Failed", "reason": reason, "message": text, "startTime": self._started_at})
        self._api.record_event(self.raw, reason=reason, message=message, source="kubelet")

    def report(self, phase: str) -> None:
        statuses = [(spec.kind is ContainerKind.MAIN, self._status_of(spec)) for spec in self.containers]
        init, main = ([one for is_main, one in statuses if is_main is kind] for kind in (False, True))
        is_ready = phase == "Running" and all(one["ready"] for one in main)
        # Initialized is true once init containers are done, the others only while all main ones run.
        values = {kind: is_ready or (kind == "Initialized" and phase != "Pending") for kind in _CONDITIONS}
        now = timestamp()
        self._write({
            "phase": phase, "startTime": self._started_at, "hostIP": "127.0.0.1", "qosClass": "BestEffort",
            "conditions": [
                {"type": kind, "status": str(value), "lastTransitionTime": now} for kind, value in values.items()
            ],
            **({"initContainerStatuses": init} if init else {}), "containerStatuses": main,
        })  # fmt: skip

    def _status_of(self, spec: ContainerSpec) -> dict[str, Any]:
        run, waiting = self._find(spec), self._waiting.get(spec.name, "")
        is_running = run is not None and run.is_running
        # An init container that has ended well counts as ready.
        is_done = spec.kind is ContainerKind.INIT and run is not None and run.exit_code == 0
        return {
            "name": spec.name, "image": container_of(self.raw, spec.name).get("image", ""), "imageID": "",
            "lastState": _terminated(run) if run is not None and waiting and not is_running else {},
            "restartCount": self._restarts.get(spec.name, 0),
            "ready": is_running or is_done, "started": is_running, "state": _state(run, waiting),
            "allocatedResources": {name: str(count) for name, count in spec.requests.items()},
            **({"containerID": f"containerd://{run.id}"} if run is not None else {}),
        }  # fmt: skip

    def _write(self, status: dict[str, Any]) -> None:
        where = self.identity
        # The pod's object may have been deleted, or replaced by another of the same name, meanwhile.
        with suppress(NotFound, Conflict):
            self._api.set_pod_status(where.namespace, where.name, status, uid=where.uid)

    async def _bring_up(self, spec: ContainerSpec) -> None:
        container = self._find(spec)
        if container is not None and container.is_running:
            return
        # It was done before a restart of the kubelet, so it is not run again.
        if container is not None and spec.kind is ContainerKind.INIT and container.exit_code == 0:
            return
        if container is not None:
            self._restarts[spec.name] = self._restarts.get(spec.name, 0) + 1
        await self._start(spec)

    async def _start(self, spec: ContainerSpec) -> None:
        while True:
            try:
                # Before PreStartContainer, as a kubelet does: isolation `driver` limits the pod's cgroup there.
                self._runtime.make_pod_cgroup(self.identity.uid)
                await self._devices.prepare_start(self.identity, spec)
                await asyncio.sleep(self._parts.times.container_start_s)
                records = self._devices.records.of_container(self.identity.uid, spec.name)
                # By name: the order in which resources were allocated is random.
                answers = [records[name].response for name in sorted(records)]
                claimed = self._dra.cdi_names(self._newest(), container_of(self.raw, spec.name))
                config = container_config(self.raw, spec, answers, self._parts.paths.cdi, claimed)
                self._runtime.start(config)
                self._record_start(config.name, config.note)
                break
            # PreStartContainer failed: the reason that a kubelet shows for it.
            except AllocationFailed as error:
                reason = f"CreateContainerConfigError: {error}"
            except AgentError as error:
                reason = f"CreateContainerError: {error}"
            # An Event for each new reason, not for each try.
            if self._waiting.get(spec.name) != reason:
                message = f"Error: {reason.partition(': ')[2]}"
                self._api.record_event(self.raw, reason="Failed", message=message, source="kubelet")
            self._waiting[spec.name] = reason
            self.report("Pending" if not self.living() else "Running")
            await asyncio.sleep(self._parts.times.start_retry_s)
        self._waiting.pop(spec.name, None)

    def _record_start(self, name: str, note: str) -> None:
        """The Events of a kubelet 1.36 (measured), and what the sandbox does instead of the command."""
        image = container_of(self.raw, name).get("image", "")
        for reason, message in (
            ("Pulled", f'Container image "{image}" already present on machine and can be accessed by the pod'),
            ("Created", "Container created"),
            ("Started", "Container started"),
            ("CommandNotRun", note),
        ):
            if message:
                self._record(name, reason, message)

    def _record(self, container: str, reason: str, message: str) -> None:
        self._api.record_event(
            self.raw, reason=reason, message=message, source="kubelet", kind="Normal", container=container
        )

    async def _complete(self, spec: ContainerSpec) -> bool:
        """Waits until an init container has ended well; whether it has. Until then it is started again and again."""
        signal = self._changes
        while (container := self._find(spec)) is not None:
            seen = signal.count
            if container.is_running:
                self.report("Pending")
                await signal.wait(seen)
            elif container.exit_code == 0:
                return True
            elif self._policy == "Never":
                return False
            else:
                # Back-off, as for main containers.
                await asyncio.sleep(self._delay_s(container))
                await self._bring_up(spec)
        return False

    async def _restart_ended(self) -> float | None:
        """Restarts what died and may be restarted; ends the pod when its main containers are done.

        Returns in how many seconds the next restart is due, None where none is waited for.
        """
        # A container that ends by the sandbox's annotation has done its work, whatever the policy says.
        is_timed = pod_manifest.annotation_number(self.raw, pod_manifest.RUN_SECONDS_ANNOTATION) is not None
        main = [spec for spec in self.containers if spec.kind is ContainerKind.MAIN]
        codes, dues = [], []
        for spec in self.containers:
            container = self._find(spec)
            # Init containers are over, the others run.
            if spec.kind is ContainerKind.INIT or container is None or container.exit_code is None:
                continue
            has_done = container.exit_code == 0 and (self._policy == "OnFailure" or is_timed)
            is_over = self._policy == "Never" or has_done
            if spec.kind is ContainerKind.MAIN and is_over:
                codes.append(container.exit_code)
            elif (delay_s := self._delay_s(container)) > 0:
                dues.append(delay_s)
            else:
                await self._bring_up(spec)
                self.report("Running")
        # Sidecars do not keep a pod alive: they are stopped with its end.
        if len(codes) == len(main):
            await self._end()
        return min(dues, default=None)

    def _delay_s(self, container: Container) -> float:
        """How long the ended container has still to wait: not after its first end, then twice as long each time."""
        known = self._delays.get(container.name)
        if known is None or known.container_id != container.id:
            # Ten minutes without an end, and the back-off starts again.
            is_stable = container.ended_at - container.created_at >= STABLE_S
            ends = 0 if known is None or is_stable else known.ends + 1
            delay_s = min(self._parts.times.start_retry_s * 2 ** min(ends - 1, 16), LAST_DELAY_S) if ends else 0.0
            known = _Delay(container_id=container.id, ends=ends, due_at=time.monotonic() + delay_s)
            self._delays[container.name] = known
            if delay_s:
                text = f"back-off {delay_s:g}s restarting failed container={container.name}"
                self._waiting[container.name] = f"CrashLoopBackOff: {text}"
                self.report("Running")
        return max(0.0, known.due_at - time.monotonic())

    async def _end(self, grace_s: float | None = None) -> None:
        """The main containers are done, an init container has failed, or the pod is deleted."""
        await self.stop_and_unprepare(pod_manifest.grace_s(self.raw) if grace_s is None else grace_s)
        # Before the report: its devices count as free from here on.
        self.state = PodState.ENDED
        self.report(self._final_phase())
        self._api.signal.notify()

    def _final_phase(self) -> str:
        # By the main containers alone: a sidecar that is killed at the end does not fail the pod.
        runs = [self._find(spec) for spec in self.containers if spec.kind is ContainerKind.MAIN]
        return "Succeeded" if all(run is not None and run.exit_code == 0 for run in runs) else "Failed"


def _synced_part(raw: RawObject) -> tuple[object, ...]:
    metadata = raw["metadata"]
    return raw["spec"], metadata.get("annotations"), metadata.get("labels"), metadata.get("deletionTimestamp")


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
