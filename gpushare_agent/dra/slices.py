"""Publishes the node's GPUs in one ResourceSlice, and keeps it as it should be.

Level, not edge: the slice is watched, and what is there is compared with what should be. The kubelet deletes the slices of
all drivers when it starts and does not make them again, so a missing one is written at once. A slice is one object, so a
pool is never seen half written; each write has the next generation. A change of the order alone waits `ORDER_PERIOD_S`, so
that a burst of claims does not make a burst of writes.

State owned: the slice as last seen, and what was written last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

import structlog

from gpushare_agent.cluster.informer import Handler
from gpushare_agent.kit.report_once import ReportOnce
from gpushare_agent.kit.supervision import Reconciler
from gpushare_agent.model.errors import AgentError, Conflict, Corrupt, NotFound

log = structlog.get_logger(__name__)

API_VERSION = "resource.k8s.io/v1"
ORDER_PERIOD_S = 5.0
RETRY_S = 1.0
PERIOD_S = 60.0
MAX_NODE_NAME = 253


class SliceApi(Protocol):
    async def get_node(self, name: str) -> dict[str, Any]: ...
    async def create_slice(self, raw: Mapping[str, Any]) -> dict[str, Any]: ...
    async def replace_slice(self, name: str, raw: Mapping[str, Any]) -> dict[str, Any]: ...
    async def delete_slice(self, name: str) -> None: ...


class SlicePublisher(Handler):
    """The handler of an informer of the node's own slices; `run` once it has listed. `wanted` are the devices, None while
    they are not known: nothing is published then, and nothing taken back."""

    def __init__(self, *, driver: str, node_name: str, wanted: Callable[[], list[dict[str, Any]] | None]) -> None:
        self.name = f"{node_name[: MAX_NODE_NAME - len(driver) - 1]}-{driver}"
        self._driver = driver
        self._node_name = node_name
        self._wanted = wanted
        self._seen: dict[str, dict[str, Any]] = {}
        self._is_listed = False
        self._generation = 0
        self._written: tuple[list[dict[str, Any]], Any] | None = None
        self._written_at = float("-inf")
        self._reconciler = Reconciler()
        self._due_s = PERIOD_S
        self._failure = ReportOnce()

    def changed(self) -> None:
        """The GPUs, their health, or their use."""
        self._reconciler.request()

    def key(self, raw: dict[str, Any]) -> str:
        name = raw.get("metadata", {}).get("name") if isinstance(raw.get("metadata"), dict) else None
        if not isinstance(name, str) or not name:
            raise Corrupt("a ResourceSlice has no name")
        return name

    def put(self, raw: dict[str, Any]) -> bool:
        self._seen[self.key(raw)] = raw
        self._generation = max(self._generation, _generation(raw))
        self._reconciler.request()
        return True

    def remove(self, key: str) -> None:
        self._seen.pop(key, None)
        self._reconciler.request()

    def list_ended(self, keys: Any, missing: Any, version: str) -> None:
        super().list_ended(keys, missing, version)
        for name in self._seen.keys() - set(keys):  # written here, and deleted before the informer knew it
            del self._seen[name]
        self._is_listed = True
        self._reconciler.request()

    async def run(self, api: SliceApi) -> NoReturn:
        """Until cancelled."""
        await self._reconciler.run(partial(self._try, api), lambda: self._due_s)

    async def _try(self, api: SliceApi) -> None:
        if not self._is_listed:
            return
        try:
            self._due_s = await self._reconcile(api)
        except AgentError as e:
            if self._failure.is_new(str(e)):
                log.error("slice_not_published", slice=self.name, error=str(e), retried_in_s=RETRY_S)
            self._due_s = RETRY_S
        else:
            self._failure.is_over()

    async def _reconcile(self, api: SliceApi) -> float:
        """One comparison, and what it takes; after how many seconds the next is due."""
        for name in sorted(self._seen.keys() - {self.name}):
            await self._delete(api, name)
        devices = self._wanted()
        if devices is None:
            return PERIOD_S
        if not devices:
            if self.name in self._seen:
                await self._delete(api, self.name)
            return PERIOD_S
        seen = self._seen.get(self.name)
        if seen is not None and self._is_as_wanted(seen, devices):
            return PERIOD_S
        if seen is not None and self._written is not None and _is_same_but_order(self._written[0], devices):
            left_s = self._written_at + ORDER_PERIOD_S - time.monotonic()
            if left_s > 0 and seen.get("spec") == self._written[1]:
                return left_s
        await self._write(api, seen, devices)
        return PERIOD_S

    def _is_as_wanted(self, seen: Mapping[str, Any], devices: list[dict[str, Any]]) -> bool:
        """The API server may write a value in another form, so what it answered to a write counts as written."""
        if self._written is not None and self._written[0] == devices:
            return bool(seen.get("spec") == self._written[1])
        spec = seen.get("spec")
        return isinstance(spec, dict) and spec.get("devices") == devices and spec.get("nodeName") == self._node_name

    async def _write(self, api: SliceApi, seen: Mapping[str, Any] | None, devices: list[dict[str, Any]]) -> None:
        if seen is None:
            metadata: dict[str, Any] = {"ownerReferences": [await self._owner(api)]}
        else:
            metadata = {name: seen.get("metadata", {}).get(name) for name in ("resourceVersion", "ownerReferences")}
        document = self._document(metadata, devices)
        try:
            written = await (api.create_slice(document) if seen is None else api.replace_slice(self.name, document))
        except (Conflict, NotFound) as e:  # the watch has, or will have, what is there: compare again then
            log.debug("slice_changed_meanwhile", error=str(e))
            return
        self._written, self._written_at = (devices, written.get("spec")), time.monotonic()
        self.put(written)
        log.info("slice_published", slice=self.name, devices=len(devices), generation=self._generation)

    async def _delete(self, api: SliceApi, name: str) -> None:
        try:
            await api.delete_slice(name)
        except NotFound:
            pass
        self._seen.pop(name, None)
        log.info("slice_deleted", slice=name)

    async def _owner(self, api: SliceApi) -> dict[str, Any]:
        """Read at each creation: a slice that names a former node of this name would be collected at once."""
        uid = str((await api.get_node(self._node_name)).get("metadata", {}).get("uid", ""))
        return {"apiVersion": "v1", "kind": "Node", "name": self._node_name, "uid": uid, "controller": True}

    def _document(self, metadata: Mapping[str, Any], devices: list[dict[str, Any]]) -> dict[str, Any]:
        self._generation += 1
        return {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": self.name, **metadata},
            "spec": {
                "driver": self._driver,
                "nodeName": self._node_name,
                "pool": {"name": self._node_name, "generation": self._generation, "resourceSliceCount": 1},
                "devices": devices,
            },
        }


def _generation(raw: Mapping[str, Any]) -> int:
    spec = raw.get("spec")
    pool = spec.get("pool") if isinstance(spec, dict) else None
    generation = pool.get("generation") if isinstance(pool, dict) else None
    return generation if isinstance(generation, int) else 0


def _is_same_but_order(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return sorted(one, key=lambda device: str(device["name"])) == sorted(other, key=lambda device: str(device["name"]))
