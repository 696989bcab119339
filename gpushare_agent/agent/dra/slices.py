"""Publishes the node's devices as one pool of ResourceSlices, and keeps it as it should be.

Level, not edge: the slices are watched, and what is there is compared with what should be. The kubelet deletes the slices of
all drivers when it starts and does not make them again, so a missing one is written at once. The scheduler takes no device
of a pool that lacks a slice of its generation. So a slice is changed in place where no device comes from another one and the
counters stay. Else all are written with the next generation; then what is left of others is deleted. The slice of a pool
that has no other is one object, never seen half written, and each write of it has the next generation. A change of the order
alone waits `ORDER_PERIOD_S`, so that a burst of claims does not make a burst of writes; so does the end of a conflict.

State owned: the slices as last seen, and what was written last.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NoReturn

import structlog
from msgspec import Raw, Struct, field, json
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.claims.mig_devices import CONFLICT_TAINT
from gpushare_agent.core.kit.json_schema import NULL, decoded, decoded_or
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce, wait_for
from gpushare_agent.core.kube.claims import Device, Pool, ResourceSlice, SliceContent, SliceMeta, SliceSpec
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
    """The handler of an informer of the node's own slices; `run` once it has listed. `desired` are the slices, None while
    they are not known: nothing is published then, and nothing taken back."""

    def __init__(self, *, node_name: str, desired: Callable[[], list[SliceContent] | None]) -> None:
        self.name = slice_name(node_name)
        self._node_name = node_name
        self._desired = desired
        self._seen: dict[str, _Seen] = {}
        self._is_listed = False
        self._generation = 0
        self._written: dict[str, _Written] = {}
        self._reconciler = Reconciler()
        self._due_s = PERIOD_S
        self._failure = ReportOnce()
        self.published = asyncio.Event()
        """Set once the slices were found or written as desired, also if there is nothing to publish: a node
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
        self._generation = max(self._generation, one.generation)
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
        """Publishes the slices when something has changed, until cancelled."""
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
        """Compares once and writes what is needed; returns the seconds until the next is due. None if a slice differs from
        what was seen: the watch has, or will have, the present one, and wakes this."""
        contents = self._desired()
        if contents is None:
            return PERIOD_S
        desired = {slice_name(self._node_name, number): content for number, content in enumerate(contents)}
        due_s = await self._write_wrong(api, desired)
        # Of an older agent, or of a larger pool. Without any device the scheduler has none to try here.
        for name in sorted(self._seen.keys() - desired.keys()) if due_s is not None else ():
            await self._delete(api, name)
        return due_s

    async def _write_wrong(self, api: KubeApi, desired: Mapping[str, SliceContent]) -> float | None:
        """As `_reconcile`."""
        pool = Pool(name=self._node_name, generation=self._generation, resource_slice_count=len(desired))
        found = {name: self._found(name, pool) for name in desired}
        left_s = {
            name: self._left_s(name, found[name], content)
            for name, content in desired.items()
            if found[name] != content
        }
        due = [name for name, left in left_s.items() if left <= 0]
        if due and not self._is_in_place(desired, found):
            due, left_s = [*desired], {}
            self._generation += 1
            pool = replace(pool, generation=self._generation)
        # Read at each creation: a slice that names a former node of this name would be collected at once.
        owner = await self._owner(api) if due and not self._seen.keys() >= {*due} else NULL
        for name in due:
            if not await self._write(api, name, desired[name], pool, owner):
                return None
        return min((left for name, left in left_s.items() if name not in due), default=PERIOD_S)

    def _found(self, name: str, pool: Pool) -> SliceContent | None:
        """What a slice of this pool has, as it is desired; None where there is no such slice."""
        seen, written = self._seen.get(name), self._written.get(name)
        spec = seen.spec if seen is not None else None
        if spec is None or (spec.pool, spec.node_name) != (pool, self._node_name):
            return None
        # The API server may write a value in another form, so what it answered to a write counts as written.
        if written is not None and written.spec == spec:
            return written.content
        return SliceContent(devices=spec.devices, shared_counters=spec.shared_counters)

    def _left_s(self, name: str, found: SliceContent | None, content: SliceContent) -> float:
        """How long the slice may stay as it is."""
        written = self._written.get(name)
        # Only while the slice is as it was written: one that somebody changed is put right at once.
        if written is None or found is not written.content or not _may_wait(found, content):
            return 0.0
        return written.at + ORDER_PERIOD_S - time.monotonic()

    @staticmethod
    def _is_in_place(desired: Mapping[str, SliceContent], found: Mapping[str, SliceContent | None]) -> bool:
        """Each of the slices can be changed, or made again, next to the others as they are."""
        present = {name: content for name, content in found.items() if content is not None}
        places = {device.name: name for name, content in desired.items() for device in content.devices}
        return (
            len(desired) > 1
            and bool(present)
            and all(
                content.shared_counters == desired[name].shared_counters
                and all(places.get(device.name, name) == name for device in content.devices)
                for name, content in present.items()
            )
        )

    async def _write(self, api: KubeApi, name: str, content: SliceContent, pool: Pool, owner: Raw) -> bool:
        seen = self._seen.get(name)
        # A replace writes the whole object, so the owners are written again as they are.
        owner, version = (seen.meta.raw_owners, seen.meta.version) if seen is not None else (owner, "")
        spec = SliceSpec(
            driver=DRIVER, node_name=self._node_name, pool=pool, devices=content.devices,
            shared_counters=content.shared_counters,
        )  # fmt: skip
        metadata = SliceMeta(name=name, resource_version=version, owner_references=owner)
        made = ResourceSlice(metadata=metadata, spec=spec)
        try:
            answer = await (api.create_slice(made) if seen is None else api.replace_slice(name, made))
        except (Conflict, NotFound) as e:
            if seen is None:  # of another driver, or for another node: no watch of ours shows it
                raise Conflict(f"{e}; if this stays, delete the ResourceSlice {name}, which is not this agent's") from e
            log.debug("slice_changed_meanwhile", error=str(e))
            return False
        written = decoded(_SLICE, answer, "a ResourceSlice")
        self._written[name] = _Written(content, written.spec, time.monotonic())
        self._see(written)
        log.info("slice_published", slice=name, devices=len(content.devices), generation=pool.generation)
        return True

    async def _delete(self, api: KubeApi, name: str) -> None:
        try:
            await api.delete_slice(name)
        except NotFound:
            pass
        self._seen.pop(name, None)
        self._written.pop(name, None)
        log.info("slice_deleted", slice=name)

    async def _owner(self, api: KubeApi) -> Raw:
        uid = object_meta(await api.get_node(self._node_name), "node").uid
        owner = OwnerReference(api_version="v1", kind="Node", name=self._node_name, uid=uid, controller=True)
        return Raw(json.encode([owner]))


class _Written(Struct, frozen=True):
    """What was written, what the API server answered, and when."""

    content: SliceContent
    spec: SliceSpec | None
    at: float


class _Seen(KubeObject):
    """A slice as the API server has it, which may be an earlier agent's."""

    raw_spec: Raw = field(name="spec", default=NULL)

    @property
    def spec(self) -> SliceSpec | None:
        """The spec, None if this agent does not write such specs."""
        return decoded_or(_SPEC, self.raw_spec, lambda: None)

    @property
    def generation(self) -> int:
        return decoded_or(_POOLED, self.raw_spec, _Pooled).pool.generation


class _PoolGeneration(Struct, frozen=True):
    generation: int = 0


class _Pooled(Struct, frozen=True):
    pool: _PoolGeneration = _PoolGeneration()


_SLICE, _POOLED, _SPEC = Decoder(_Seen), Decoder(_Pooled), Decoder(SliceSpec)


def slice_name(node_name: str, number: int = 0) -> str:
    """The names of a pool's slices: the scheduler tries them in this order. A long node name is cut where a label ends well,
    with a hash, because another may begin alike."""
    end = f"-{DRIVER}" + (f"-{number:03}" if number else "")
    if len(name := f"{node_name}{end}") <= MAX_NAME_CHARS:
        return name
    end = f"-{hashlib.sha256(node_name.encode()).hexdigest()[:16]}{end}"
    return f"{node_name[: MAX_NAME_CHARS - len(end)].rstrip('-.')}{end}"


def _may_wait(before: SliceContent, after: SliceContent) -> bool:
    """They differ in their order alone, or in conflicts that are over."""

    def others(content: SliceContent) -> list[Device]:
        devices = sorted(content.devices, key=lambda device: device.name)
        return [replace(one, taints=[t for t in one.taints if t.key != CONFLICT_TAINT]) for one in devices]

    def conflicts(content: SliceContent) -> set[str]:
        return {one.name for one in content.devices for taint in one.taints if taint.key == CONFLICT_TAINT}

    return others(before) == others(after) and conflicts(before) >= conflicts(after)
