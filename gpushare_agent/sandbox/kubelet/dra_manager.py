"""The embedded kubelet's side of DRA drivers: registration, prepare, unprepare, and the slices that it deletes.

As measured on 1.36 (docs/reference/sandbox.md): a driver's registration socket is found in the registry, asked for the
driver's endpoint, and gets the outcome; the driver that connected last is called. All claims of a pod go into one call
before its first container starts, and again into one when the last of their pods has ended; a failed unprepare is tried
again. The node's slices are deleted shortly after a start, those of a driver when it has been away for a while.

State owned: the connected drivers; the prepared claims are `ClaimRecords`, which outlive a restart as the real
kubelet's file dra_manager_state does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog
from grpclib import Status
from msgspec import Struct, field

from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.core.kit.protobuf import MalformedMessageError
from gpushare_agent.core.kit.sockets import file_identity
from gpushare_agent.core.kube.claims import main_request
from gpushare_agent.core.model.errors import NotFound, Rejected
from gpushare_agent.core.wire import pluginregistration
from gpushare_agent.core.wire.k8s.io.kubelet.pkg.apis.dra import v1 as dra_v1
from gpushare_agent.sandbox.kubelet.calls import NodeParts
from gpushare_agent.sandbox.kubelet.plugin_endpoint import go_error
from gpushare_agent.sandbox.pod_manifest import RawObject, claim_names, container_claims
from gpushare_agent.sandbox.scheduler.claim_objects import results_of

log = structlog.get_logger(__name__)

PLUGIN_TYPE = "DRAPlugin"
SERVICE = "v1.DRAPlugin"
GET_INFO_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 45.0
_REGISTRATION = "/pluginregistration.Registration"
_DRIVER = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"


class PrepareFailed(Rejected):
    """A claim could not be prepared. The text is that of the pod's Event FailedPrepareDynamicResources."""


class ClaimRecord(Struct, kw_only=True):
    """A claim that was prepared, or should be. `cdi` holds for each driver the request names and CDI IDs of each device;
    `pods` are those that use the claim."""

    namespace: str
    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    cdi: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]] = field(default_factory=dict)
    prepared_for: int = -1
    """The start of the kubelet that has prepared it: kept in memory alone by a real one."""


ClaimRecords = dict[str, ClaimRecord]
"""By claim UID."""


class _Driver(Struct, kw_only=True):
    socket: Path
    identity: object
    name: str
    endpoint: Path
    channel: UnixChannel


class DraManager(Struct, kw_only=True, eq=False):
    """One per start of the kubelet; `boot` numbers the starts."""

    parts: NodeParts
    records: ClaimRecords
    boot: int
    has_wiped_slices: bool = False
    _drivers: list[_Driver] = field(default_factory=list)
    _absent: dict[str, float] = field(default_factory=dict)
    """When a driver without a connection was last seen, by name."""
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    # --- drivers ---

    async def run(self) -> None:
        """Follows the registry, without an end: drivers come and go with their registration sockets."""
        loop = asyncio.get_running_loop()
        wipes_at = loop.time() + self.parts.times.slice_wipe_s
        while True:
            # A real kubelet deletes every driver's slices a second after its start and makes none again: a driver has to
            # notice.
            if not self.has_wiped_slices and loop.time() >= wipes_at:
                self.has_wiped_slices = True
                self._delete_slices()
            await self._poll()
            # 30 s (30.3 measured): an upgrade of a driver within it leaves the slices in place.
            for name in [
                name for name, at in self._absent.items() if loop.time() - at >= self.parts.times.driver_away_s
            ]:
                del self._absent[name]
                self._delete_slices(name)
            await asyncio.sleep(self.parts.times.registry_poll_s)

    def close(self) -> None:
        while self._drivers:
            self._drivers.pop().channel.close()

    def is_registered(self, name: str) -> bool:
        return any(driver.name == name for driver in self._drivers)

    async def _poll(self) -> None:
        # Names with a dot before them are left out, as the watcher of plugins does.
        there = {path: file_identity(path) for path in sorted(self.parts.paths.plugin_registry.glob("[!.]*.sock"))}
        # By identity: a new instance under the same name is another driver.
        for gone in [one for one in self._drivers if there.get(one.socket) != one.identity]:
            gone.channel.close()
            self._drivers.remove(gone)
            # With two instances the other one goes on: the slices stay, without a gap.
            if not self.is_registered(gone.name):
                self._absent[gone.name] = asyncio.get_running_loop().time()
        known = {driver.socket for driver in self._drivers}
        # Also one that did not answer before: it is asked again at each turn.
        for path in there.keys() - known:
            if (driver := await self._register(path)) is not None:
                self._drivers.append(driver)
                self._absent.pop(driver.name, None)
                self.parts.api.signal.notify()

    async def _register(self, path: Path) -> _Driver | None:
        """Registers a driver; None where it does not answer, or is no DRA driver; it is asked again then."""
        # Before the calls: a socket that is replaced meanwhile shows at the next turn.
        channel, identity = UnixChannel(path), file_identity(path)
        try:
            info = await channel.unary(
                f"{_REGISTRATION}/GetInfo", pluginregistration.InfoRequest(), pluginregistration.PluginInfo,
                timeout_s=GET_INFO_TIMEOUT_S,
            )  # fmt: skip
            self.parts.calls.dra_call("GetInfo")
            # The versions name gRPC services; another type of plugin may be in the same directory.
            is_known = info.type == PLUGIN_TYPE and SERVICE in info.supported_versions
            error = "" if is_known else f"type {info.type} with {info.supported_versions} is not known"
            await channel.unary(
                f"{_REGISTRATION}/NotifyRegistrationStatus",
                pluginregistration.RegistrationStatus(plugin_registered=is_known, error=error),
                pluginregistration.RegistrationStatusResponse, timeout_s=GET_INFO_TIMEOUT_S,
            )  # fmt: skip
            # After its answer: whoever waits for this call finds the driver registered.
            self.parts.calls.dra_call("NotifyRegistrationStatus")
        except (RpcFailed, MalformedMessageError) as failure:
            log.debug("dra_driver_not_registered", socket=str(path), error=str(failure))
            return None
        finally:
            channel.close()
        if not is_known:
            return None
        log.info("dra_driver_registered", driver=info.name, endpoint=info.endpoint)
        endpoint = Path(info.endpoint)
        return _Driver(socket=path, identity=identity, name=info.name, endpoint=endpoint, channel=UnixChannel(endpoint))

    def _delete_slices(self, driver: str = "") -> None:
        """Deletes the node's slices; of one driver, or of all."""
        for raw in self.parts.api.store.all("resourceslices"):
            if raw["spec"].get("nodeName") == self.parts.name and driver in ("", raw["spec"]["driver"]):
                self.parts.api.delete("resourceslices", ("", raw["metadata"]["name"]))

    async def _call(self, driver_name: str, method: str, claims: Sequence[ClaimRecord], answer: Any) -> Any:
        """Raises PrepareFailed."""
        # The one that connected last, as measured with two instances of an upgrade.
        driver = next((one for one in reversed(self._drivers) if one.name == driver_name), None)
        if driver is None:
            raise PrepareFailed(f"DRA driver {driver_name} is not registered")
        named = [dra_v1.Claim(namespace=one.namespace, uid=one.uid, name=one.name) for one in claims]
        request = dra_v1.NodePrepareResourcesRequest(claims=named)  # NodeUnprepareResourcesRequest has the same form
        self.parts.calls.dra_call(method, [one.name for one in claims])
        channel = driver.channel
        try:
            return await channel.unary(f"{_DRIVER}/{method}", request, answer, timeout_s=CALL_TIMEOUT_S)
        except RpcFailed as error:
            if error.status is Status.UNAVAILABLE and not error.is_answer and driver.channel is channel:
                driver.channel = UnixChannel(driver.endpoint)  # the next call connects again
            raise PrepareFailed(f"{method}: {go_error(error.status, error.text)}") from error
        except MalformedMessageError as error:
            raise PrepareFailed(f"{method}: {error}") from error
        finally:
            if driver not in self._drivers or driver.channel is not channel:  # it may have connected after its close
                channel.close()

    # --- claims ---

    async def prepare(self, pod: RawObject) -> None:
        """Prepares a pod's claims, before its first container starts. Raises PrepareFailed."""
        # Most pods have none: no call is made for them.
        if not claim_names(pod):
            return
        uid, by_driver = pod["metadata"]["uid"], dict[str, list[ClaimRecord]]()
        for name in sorted(set(claim_names(pod).values())):
            raw = self._claim(pod, name)
            # By UID: a claim that was recreated under the same name is another one.
            record = self.records.setdefault(
                raw["metadata"]["uid"],
                ClaimRecord(namespace=pod["metadata"]["namespace"], name=name, uid=raw["metadata"]["uid"]),
            )
            # Before the call, so that the claim is unprepared also where this prepare is cut off.
            record.pods.add(uid)
            # Once for each start of the kubelet, which has this in memory alone: after a restart a claim in use is
            # prepared again.
            if record.prepared_for != self.boot:
                for driver in dict.fromkeys(one.driver for one in results_of(raw)):
                    record.cdi.setdefault(driver, [])  # it is to unprepare the claim, whatever becomes of this call
                    by_driver.setdefault(driver, []).append(record)
        # One call for all claims of the pod that a driver has.
        for driver, claims in by_driver.items():
            await self._prepare(driver, claims)

    def _claim(self, pod: RawObject, name: str) -> RawObject:
        namespace = pod["metadata"]["namespace"]
        try:
            raw = self.parts.api.store.get("resourceclaims", (namespace, name))
        except NotFound as error:
            raise PrepareFailed(f"failed to fetch ResourceClaim {name}: {error}") from error
        # The scheduler reserves a claim for its pods: another pod may not use it, whatever its spec says.
        users = (raw.get("status") or {}).get("reservedFor") or ()
        if not any(user["uid"] == pod["metadata"]["uid"] for user in users):
            raise PrepareFailed(f"pod {pod['metadata']['name']} is not allowed to use ResourceClaim {name}")
        # The old claim's devices are still prepared under that name.
        same = [one for one in self.records.values() if (one.namespace, one.name) == (namespace, name)]
        if any(one.uid != raw["metadata"]["uid"] for one in same):
            raise PrepareFailed(f"old ResourceClaim with same name {name} and different UID still exists")
        return raw

    async def _prepare(self, driver: str, claims: Sequence[ClaimRecord]) -> None:
        answer = await self._call(driver, "NodePrepareResources", claims, dra_v1.NodePrepareResourcesResponse)
        # The errors of single claims come first: they say more than that one was skipped.
        missing = [claim for claim in claims if claim.uid not in answer.claims]
        for claim in claims:
            made = answer.claims.get(claim.uid)
            if made is not None and made.error:
                raise PrepareFailed(f"NodePrepareResources failed for ResourceClaim {claim.name}: {made.error}")
        if missing:
            raise PrepareFailed(f"NodePrepareResources skipped {len(missing)} ResourceClaims")
        for claim in claims:
            devices = answer.claims[claim.uid].devices
            claim.cdi[driver] = [(tuple(one.request_names), tuple(one.cdi_device_ids)) for one in devices]
            # Only once all of the call's claims are there: else all are prepared again.
            claim.prepared_for = self.boot

    def cdi_names(self, pod: RawObject, container: Mapping[str, Any]) -> list[str]:
        """The CDI devices of one container, in the order in which it names its claims."""
        names, namespace = claim_names(pod), pod["metadata"]["namespace"]
        found: list[str] = []
        for name, requested in container_claims(pod, container):
            named = names.get(name)
            records = [one for one in self.records.values() if (one.namespace, one.name) == (namespace, named)]
            for requests, ids in [pair for one in records for pairs in one.cdi.values() for pair in pairs]:
                if not requested or requested in {main_request(request) for request in requests}:
                    found += ids
        # A device that two entries of the container name is injected once.
        return list(dict.fromkeys(found))

    async def unprepare(self, pod_uid: str) -> None:
        """Unprepares a pod's claims, after its last container has ended; returns when its drivers have answered, however
        often it takes."""
        while True:
            if await self._try_unprepare(pod_uid):
                return
            await asyncio.sleep(self.parts.times.unprepare_retry_s)

    async def unprepare_others(self, active: Collection[str]) -> None:
        """Unprepares claims of pods that ended while the kubelet was away."""
        for uid in sorted({uid for record in self.records.values() for uid in record.pods} - set(active)):
            await self._try_unprepare(uid)

    async def _try_unprepare(self, pod_uid: str) -> bool:
        # A pod's end and the periodic search may come together: the driver gets one call.
        lock = self._locks.get(pod_uid) or asyncio.Lock()
        self._locks[pod_uid] = lock
        async with lock:
            mine = [record for record in self.records.values() if pod_uid in record.pods]
            last = [record for record in mine if record.pods == {pod_uid}]
            for record in mine:
                # Other pods use the claim, so it stays prepared.
                if record not in last:
                    record.pods.discard(pod_uid)
                elif not record.cdi:  # of no driver
                    self.records.pop(record.uid, None)
            by_driver: dict[str, list[ClaimRecord]] = {}
            for claim in last:
                for driver in claim.cdi:  # also for a claim that failed to prepare
                    by_driver.setdefault(driver, []).append(claim)
            ended = [await self._end(driver, claims, pod_uid) for driver, claims in by_driver.items()]
            return all(ended)

    async def _end(self, driver: str, claims: Sequence[ClaimRecord], pod_uid: str) -> bool:
        for claim in claims:
            claim.prepared_for = -1  # a call that fails may have ended it all the same
        try:
            answer = await self._call(driver, "NodeUnprepareResources", claims, dra_v1.NodeUnprepareResourcesResponse)
        # Text in the log alone, as of a real kubelet: the pod stays Terminating until its driver answers.
        except PrepareFailed as error:
            log.debug("unprepare_failed", driver=driver, error=str(error))
            return False
        for claim in claims:
            ended = answer.claims.get(claim.uid)
            # This claim is tried again; the others of the call have ended.
            if ended is None or ended.error:
                continue
            claim.pods.discard(pod_uid)
            if not claim.pods:  # another pod may have come meanwhile
                self.records.pop(claim.uid, None)
        return all(pod_uid not in claim.pods for claim in claims)
