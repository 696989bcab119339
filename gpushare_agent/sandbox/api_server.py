"""An API server for a few nodes: pods, nodes, events and config maps of core/v1, and leases, on a real TCP port.

The kubelet and the scheduler of the embedded node, and tests, use its methods in process; the agent speaks HTTP to it
(api_handlers) and needs the server's token (api_access). State owned: the object store, and the fault switches that tests
turn. Not for admission plugins, authorization of single verbs, other resources, label selectors or paged lists.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

from aiohttp import web

from gpushare_agent.model.errors import Conflict, StartupError
from gpushare_agent.sandbox.api_access import ApiAccess
from gpushare_agent.sandbox.api_handlers import ApiHandlers
from gpushare_agent.sandbox.api_store import KINDS, ObjectKey, ObjectStore, RawObject
from gpushare_agent.sandbox.change_signal import ChangeSignal
from gpushare_agent.sandbox.kubelet_behaviour import behaviour_of
from gpushare_agent.sandbox.pod_manifest import completed_manifest, is_terminal, timestamp
from gpushare_agent.sandbox.pods_by_node import PodsByNode

HOST = "127.0.0.1"


def _merged_status(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Top-level fields replace the old ones, conditions those of their type."""
    merged = {**old, **new}
    if "conditions" in new:
        by_type = {c["type"]: c for c in (*old.get("conditions", ()), *new["conditions"])}
        merged["conditions"] = [by_type[kind] for kind in sorted(by_type)]
    return merged


class EmbeddedApiServer:
    """`async with EmbeddedApiServer() as api:` listens on `api.url`; objects outlive `stop_listening`.

    Objects returned are the stored ones: read, never change them.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        version: str = "1.36",
        history_limit: int = 2000,
        bookmark_interval_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        self.release = behaviour_of(version).release
        self.signal = ChangeSignal()
        self.pods_by_node = PodsByNode()
        self.store = ObjectStore(signal=self.signal, history_limit=history_limit, on_change=self.pods_by_node.note)
        self.port = port
        self.access = ApiAccess()
        self.bookmark_interval_s = bookmark_interval_s
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request that was let in, in order of arrival."""
        self.watch_epoch = 0
        self.is_stopping = False
        self._rng = random.Random(seed)
        self._failures: list[int] = []
        self._running = asyncio.Event()
        self._running.set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What a client must send."""
        return self.access.headers

    @property
    def token(self) -> str:
        return self.access.token

    @property
    def version(self) -> int:
        """Version of the newest change."""
        return self.store.version

    async def wait_change(self, version: int) -> None:
        """Until there is a newer version."""
        while self.store.version == version:
            await self.signal.wait(self.signal.count)

    async def __aenter__(self) -> Self:
        await self.start_listening()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_listening()

    # --- pods, nodes, events, in process ---

    def create_pod(self, raw: RawObject, namespace: str = "default") -> RawObject:
        """Raises Rejected for a manifest that is not valid, AlreadyExists for a name in use."""
        suffix = "".join(self._rng.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
        return self.store.add(
            "pods", completed_manifest(raw, namespace=namespace, uid=str(uuid.uuid4()), suffix=suffix)
        )

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
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_period_s is None else grace_period_s
        if grace <= 0 or not pod["spec"].get("nodeName") or is_terminal(pod):
            return self.store.remove("pods", (namespace, name))
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
        labels = {**known["metadata"].get("labels", {}), **raw["metadata"].get("labels", {})}
        return self.store.replace(
            "nodes", {**known, "metadata": {**known["metadata"], "labels": labels}, "status": raw["status"]}
        )

    def record_event(
        self, pod: RawObject, *, reason: str, message: str, source: str, kind: str = "Warning"
    ) -> RawObject:
        metadata = pod["metadata"]
        about = {
            "apiVersion": "v1", "kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"],
            "uid": metadata["uid"],
        }  # fmt: skip
        now = timestamp()
        return self.store.add("events", {
            "apiVersion": "v1", "kind": "Event", "involvedObject": about, "reason": reason, "message": message, "type": kind,
            "source": {"component": source}, "count": 1, "firstTimestamp": now, "lastTimestamp": now,
            "metadata": {
                "name": f"{metadata['name']}.{self._rng.getrandbits(64):016x}", "namespace": metadata["namespace"],
                "uid": str(uuid.uuid4()), "creationTimestamp": now,
            },
        })  # fmt: skip

    def events(self) -> list[RawObject]:
        """Oldest first."""
        return self.store.in_creation_order("events")

    def object_of(self, resource: str, key: ObjectKey) -> RawObject | None:
        return self.store.find(resource, key)

    # --- faults ---

    async def start_listening(self) -> None:
        """On the port of the first start. Raises StartupError where the port is taken."""
        self.is_stopping = False
        app = web.Application(client_max_size=3 * 2**20, middlewares=[self._with_access, self._with_faults])
        ApiHandlers(self).add_routes(app, tuple(KINDS))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, self.port, reuse_address=True).start()
        except OSError as error:
            await runner.cleanup()
            raise StartupError(
                f"the embedded API server cannot listen on {HOST}:{self.port}: {error}; choose another port"
            ) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop_listening(self) -> None:
        """Closes the port and every connection; objects and versions stay."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self.is_stopping = True
        self._wake()
        for connection in runner.server.connections if runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    def fail_next(self, count: int, status: int) -> None:
        """The next `count` requests are answered with this HTTP status."""
        self._failures.extend([status] * count)

    def stall(self) -> None:
        """From now on requests are accepted and not answered, and open watches fall silent."""
        self._running.clear()

    def unstall(self) -> None:
        """What was held up is answered now."""
        self._running.set()
        self._wake()

    def _wake(self) -> None:
        """Every watch looks again."""
        for signal in (*self.store.signals.values(), self.signal):
            signal.notify()

    async def wait_running(self) -> None:
        await self._running.wait()

    def compact(self) -> None:
        """Forgets the history: a watch from an older version is answered with 410 Gone."""
        self.store.compact()

    def expire_watches(self) -> None:
        """Ends every open watch with a 410 Gone event."""
        self.watch_epoch += 1
        self._wake()

    @web.middleware
    async def _with_access(self, request: web.Request, handler: Any) -> web.StreamResponse:
        refusal = self.access.refusal(request, self.port)
        if refusal is not None:
            return refusal
        response: web.StreamResponse = await handler(request)
        return response

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        await self.wait_running()
        if self._failures:
            status = self._failures.pop(0)
            return ApiHandlers.status_response(status, "InternalError", "the server has been told to fail this request")
        response: web.StreamResponse = await handler(request)
        return response
