"""Publishes the node's GPUs in one ResourceSlice, and keeps it as it should be.

Level, not edge: the slice is watched, and what is there is compared with what should be. The kubelet deletes the slices of
all drivers when it starts and does not make them again, so a missing one is written at once. A slice is one object, so a
pool is never seen half written; each write has the next generation. A change of the order alone waits `ORDER_PERIOD_S`, so
that a burst of claims does not make a burst of writes.

State owned: the slice as last seen, and what was written last.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Raw, Struct, field, json
from msgspec.json import Decoder

from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.kit.json_schema import NULL, decoded, decoded_or
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce, wait_for
from gpushare_agent.core.kube.claims import Device, Pool, ResourceSlice, SliceMeta, SliceSpec
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.informer import Handler
from gpushare_agent.core.kube.objects import KubeObject, OwnerReference, object_meta, object_name
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound

log = structlog.get_logger(__name__)

ORDER_PERIOD_S = 5.0
RETRY_S = 1.0
PERIOD_S = 60.0
MAX_NAME_CHARS = 253
REGISTERED_S = 5.0
"""The kubelet finds a new socket within 1.2 s. Without its answer the slice is published anyway: the pods' Events then say
that the driver is not registered."""


class SlicePublisher(Handler):
    """The handler of an informer of the node's own slices; `run` once it has listed. `desired` are the devices, None while
    they are not known: nothing is published then, and nothing taken back."""

    def __init__(self, *, node_name: str, desired: Callable[[], list[Device] | None]) -> None:
        self.name = slice_name(node_name)
        self._node_name = node_name
        self._desired = desired
        self._seen: dict[str, _Seen] = {}
        self._is_listed = False
        self._generation = 0
        self._written: tuple[list[Device], SliceSpec | None] | None = None
        self._written_at = float("-inf")
        self._reconciler = Reconciler()
        self._due_s = PERIOD_S
        self._failure = ReportOnce()
        self.published = asyncio.Event()
        """Set once the slice was found or written as desired, also if there is nothing to publish: a node
        whose driver is not there yet must not stop a rollout."""

    def changed(self) -> None:
        """The GPUs, their health, or their use."""
        self._reconciler.request()

    def key(self, raw: Raw) -> str:
        return object_name(raw, "a ResourceSlice")

    def put(self, raw: Raw) -> bool:
        self._see(decoded(_SLICE, raw, "a ResourceSlice"))
        return True

    def _see(self, one: _Seen) -> None:
        self._seen[one.meta.name or ""] = one
        # Never lower than any that was seen, also of an older agent: the scheduler takes the slice with the highest.
        self._generation = max(self._generation, decoded_or(_POOLED, one.raw_spec, _Pooled).pool.generation)
        self._reconciler.request()

    def remove(self, key: str) -> None:
        self._seen.pop(key, None)
        self._reconciler.request()

    def list_ended(self, keys: Collection[str], missing: Collection[str], version: str) -> None:
        super().list_ended(keys, missing, version)
        for name in self._seen.keys() - set(keys):  # written here, and deleted before the informer knew it
            del self._seen[name]
        self._is_listed = True
        self._reconciler.request()

    async def run(self, api: KubeApi, registered: asyncio.Event) -> NoReturn:
        """Publishes the slice when something has changed, until cancelled."""
        # A pod that waits is placed at once, and fails where its kubelet does not know the driver yet.
        await wait_for(registered, REGISTERED_S)
        await self._reconciler.run(partial(self._try, api), lambda: self._due_s)

    async def _try(self, api: KubeApi) -> None:
        if not self._is_listed:
            return
        try:
            due_s = await self._reconcile(api)
        except AgentError as e:
            if self._failure.is_new(str(e)):
                log.error("slice_not_published", slice=self.name, error=str(e), retried_in_s=RETRY_S)
            self._due_s = RETRY_S
        else:
            self._failure.is_over()
            self._due_s = PERIOD_S if due_s is None else due_s
            if due_s is not None:
                self.published.set()

    async def _reconcile(self, api: KubeApi) -> float | None:
        """Compares once and writes what is needed; returns the seconds until the next is due. None if the slice differs from
        what was seen: the watch has, or will have, the present one, and wakes this."""
        # One slice has the whole pool: others of this driver and node are an older agent's, under another name.
        for name in sorted(self._seen.keys() - {self.name}):
            await self._delete(api, name)
        devices = self._desired()
        if devices is None:
            return PERIOD_S
        # No GPU for claims: without the slice the scheduler has no device here to try.
        if not devices:
            if self.name in self._seen:
                await self._delete(api, self.name)
            return PERIOD_S
        seen = self._seen.get(self.name)
        if seen is not None and self._is_as_desired(seen, devices):
            return PERIOD_S
        if seen is not None and self._written is not None and _is_same_but_order(self._written[0], devices):
            left_s = self._written_at + ORDER_PERIOD_S - time.monotonic()
            # Only while the slice is as it was written: one that somebody changed is put right at once.
            if left_s > 0 and seen.spec == self._written[1]:
                return left_s
        return PERIOD_S if await self._write(api, seen, devices) else None

    def _is_as_desired(self, seen: _Seen, devices: list[Device]) -> bool:
        """The API server may write a value in another form, so what it answered to a write counts as written."""
        if self._written is not None and self._written[0] == devices:
            return seen.spec == self._written[1]
        return seen.spec is not None and (seen.spec.devices, seen.spec.node_name) == (devices, self._node_name)

    async def _write(self, api: KubeApi, seen: _Seen | None, devices: list[Device]) -> bool:
        # A replace writes the whole object, so the owners are written again as they are.
        owner = seen.meta.raw_owners if seen is not None else await self._owner(api)
        version = seen.meta.version if seen is not None else ""
        made = self._made(SliceMeta(name=self.name, resource_version=version, owner_references=owner), devices)
        try:
            answer = await (api.create_slice(made) if seen is None else api.replace_slice(self.name, made))
        except (Conflict, NotFound) as e:
            log.debug("slice_changed_meanwhile", error=str(e))
            return False
        written = decoded(_SLICE, answer, "a ResourceSlice")
        self._written, self._written_at = (devices, written.spec), time.monotonic()
        self._see(written)
        log.info("slice_published", slice=self.name, devices=len(devices), generation=self._generation)
        return True

    async def _delete(self, api: KubeApi, name: str) -> None:
        try:
            await api.delete_slice(name)
        except NotFound:
            pass
        self._seen.pop(name, None)
        log.info("slice_deleted", slice=name)

    async def _owner(self, api: KubeApi) -> Raw:
        """Read at each creation: a slice that names a former node of this name would be collected at once."""
        uid = object_meta(await api.get_node(self._node_name), "node").uid
        owner = OwnerReference(api_version="v1", kind="Node", name=self._node_name, uid=uid, controller=True)
        return Raw(json.encode([owner]))

    def _made(self, metadata: SliceMeta, devices: list[Device]) -> ResourceSlice:
        self._generation += 1
        pool = Pool(name=self._node_name, generation=self._generation, resource_slice_count=1)
        spec = SliceSpec(driver=DRIVER, node_name=self._node_name, pool=pool, devices=devices)
        return ResourceSlice(metadata=metadata, spec=spec)


class _Seen(KubeObject):
    """A slice as the API server has it, which may be an earlier agent's."""

    raw_spec: Raw = field(name="spec", default=NULL)

    @property
    def spec(self) -> SliceSpec | None:
        """The spec, None if this agent does not write such specs."""
        return decoded_or(_SPEC, self.raw_spec, lambda: None)


class _PoolGeneration(Struct, frozen=True):
    generation: int = 0


class _Pooled(Struct, frozen=True):
    pool: _PoolGeneration = _PoolGeneration()


_SLICE, _POOLED, _SPEC = Decoder(_Seen), Decoder(_Pooled), Decoder(SliceSpec)


def slice_name(node_name: str) -> str:
    """The slice's name: a long node name is cut where a label ends well, with a hash, because another may begin alike."""
    if len(name := f"{node_name}-{DRIVER}") <= MAX_NAME_CHARS:
        return name
    end = f"-{hashlib.sha256(node_name.encode()).hexdigest()[:16]}-{DRIVER}"
    return f"{node_name[: MAX_NAME_CHARS - len(end)].rstrip('-.')}{end}"


def _is_same_but_order(one: list[Device], other: list[Device]) -> bool:
    return sorted(one, key=lambda device: device.name) == sorted(other, key=lambda device: device.name)
