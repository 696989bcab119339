"""Isolation gpushare on a node: the library, each container's files, and what is written into those of running ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from gpushare_agent.agent.isolation.choice import Standing
from gpushare_agent.agent.isolation.gpushare.edits import live_limits
from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.agent.isolation.gpushare.library import SETTING, library_of
from gpushare_agent.agent.isolation.gpushare.observed import TIMEOUT_S, ObservedContainers
from gpushare_agent.agent.isolation.gpushare.preparation import FILES_TIMEOUT_S, Preparation
from gpushare_agent.agent.isolation.gpushare.probing import ProbedLibrary, Remembered, open_probe, recall
from gpushare_agent.agent.isolation.gpushare.unlimited import UnlimitedContainers
from gpushare_agent.agent.isolation.kept import ProbeResult
from gpushare_agent.agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import NodeEventReason, Refused, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import MIB, GpuUuid, PodUid
from gpushare_agent.core.model.usage import UsageRound
from gpushare_agent.core.settings.settings import Settings

_ADVICE = f"Check the disk of the setting {SETTING}."
_Limits = tuple[GpuLimits, ...]


class GpusharePart(IsolationPart):
    def __init__(self, host: IsolationHost) -> None:
        self._host, self._node = host, host.node
        settings = self._node.settings
        self._files = GpushareFiles(library_of(settings), settings.virtual_manager.path, self._limits, self._is_claims)
        self._preparation = Preparation(self._files, self._node.claim_pods.shares)
        self._seen = ObservedContainers(
            files=self._files,
            shares=self._shares,
            driver=host.driver,
            share_of=host.share_of,
            request_usage=self._request_usage,
        )
        self._thread = DaemonThread("gpushare-limits", advice=_ADVICE)
        self._unlimited = UnlimitedContainers(
            files=self._files, host=host, shares=self._shares, request_usage=self._request_usage, thread=self._thread
        )
        self._limits_of: dict[ContainerKey, _Limits] = {}
        self._made_of: tuple[GpuInventory | None, ProbeResult | None] = (None, None)
        self._keys: dict[PodUid, list[ContainerKey]] = {}
        self._changed: set[PodUid] = set()
        self._probe = self._probed_library() if _is_proven(settings) else None
        self.services = {"gpushare files": self._preparation, "gpushare observed": self._seen}
        if settings.driver == "nvml":  # processes on simulated GPUs load no library
            self.services["gpushare unlimited"] = self._unlimited
        if self._probe is not None:
            self.services["gpushare probe"] = self._probe
            self._node.metrics.show_isolation_probe("gpushare", self._probe.is_failed)

    def _request_usage(self) -> None:
        self.request_usage()  # it is set when the agent's parts are joined

    async def check(self) -> None:
        await self._preparation.check()
        if self._probe is not None:
            await self._probe.require_passed()

    async def look(self) -> None:
        await self._preparation.look()
        if self._probe is not None:
            await self._probe.require_passed()

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        return await self._preparation.prepare(keys)

    def prepare_ahead(self, key: ContainerKey) -> None:
        self._preparation.ahead.add(key)

    def changed(self, uid: PodUid | None) -> None:
        if uid is not None:
            self._changed.add(uid)
        self._seen.changed()
        if self._probe is not None:
            self._probe.changed()

    def usage_sampled(self, usage: UsageRound | None) -> None:
        self._seen.usage_sampled(usage)
        self._unlimited.usage_sampled(usage)
        if self._probe is not None:
            self._probe.usage_sampled(usage)

    def paid(self, key: ContainerKey, uuid: GpuUuid) -> float | None:
        return self._seen.paid(key, uuid)

    def problem(self, key: ContainerKey) -> str:
        return self._unlimited.problem(key)

    def probed(self) -> ProbeResult | None:
        return self._probe.result if self._probe is not None else None

    async def enforce(self, allocation: Allocation) -> str:
        key = self._host.share_of(allocation.key)
        if (desired := self._limits(key)) is None:
            return "a GPU's memory is not known, or not all of the share is allocated yet"

        def write() -> int:
            self._files.write_limits(key, desired)
            held = self._files.held_bytes(key)
            return sum(max(0, held[one.uuid] - one.memory_bytes) for one in desired if one.memory_bytes is not None)

        above = await self._thread.call(write, f"writing the limits of {key.container}", TIMEOUT_S)
        return f"its processes still have {-(-above // MIB)} MiB more" if above > 0 else ""

    def _limits(self, key: ContainerKey) -> _Limits | None:
        parts, pod = self._node.claim_pods.parts(key), self._node.pods.get(key.pod_uid)
        gpus, probe = self._node.gpus().by_uuid(), self._probe
        found = live_limits(parts, pod, gpus, self._node.names)
        if found is None or probe is None:
            return found
        return tuple(replace(one, context_bytes=probe.context_bytes(gpus[GpuUuid(one.uuid)])) for one in found)

    def _is_claims(self, key: ContainerKey) -> bool:
        allocation = self._node.cache.get(key)
        return allocation is not None and allocation.claim is not None

    def _shares(self) -> Mapping[ContainerKey, _Limits]:
        """Called up to four times a second, so made again only when an allocation, a pod, a GPU or the probe has changed."""
        made_of, pods = (self._node.gpus(), self.probed()), self._node.claim_pods
        if made_of[0] is not self._made_of[0] or made_of[1] != self._made_of[1]:
            self._made_of, self._limits_of, self._keys = made_of, {}, {}
            self._changed = {key.pod_uid for key in pods.shares()}
        if not self._changed:
            return self._limits_of
        found = dict(self._limits_of)
        for key in [key for uid in self._changed for key in self._keys.pop(uid, ())]:
            found.pop(key, None)
        for key, allocation in [one for uid in self._changed for one in pods.shares_of(uid).items()]:
            # By the pod's annotation of now: its files are made under any isolation, its limits are kept under this one
            # alone.
            if not allocation.is_limited or not self._host.uses(allocation, "gpushare"):
                continue
            if (desired := self._limits(key)) is not None:
                found[key] = desired
                self._keys.setdefault(key.pod_uid, []).append(key)
        # The same mapping where nothing differs, by which its readers know that they may rest: pods change often.
        self._limits_of, self._changed = self._limits_of if found == self._limits_of else found, set()
        return self._limits_of

    def _probed_library(self) -> ProbedLibrary:
        library = self._files.library

        def failed(found: Remembered) -> None:
            self._host.note(NodeEventReason.ISOLATION_PROBE_FAILED, "gpushare", found.failure)
            self._host.choose_again("libgpushare does not limit programs under this driver")

        return ProbedLibrary(
            library=library,
            probe=open_probe(library, library.directory, self._host.driver),
            inventory=self._node.gpus,
            allocations=self._node.cache.view,
            failed=failed,
            request_usage=self._request_usage,
        )


build = GpusharePart


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    library = library_of(settings)
    thread = DaemonThread("isolation-files", advice=_ADVICE)

    async def check() -> None:
        await thread.call(library.check, "reading libgpushare", FILES_TIMEOUT_S)
        if _is_proven(settings):
            # What an earlier probe found for this library under this version of the driver.
            _, saved = await recall(thread, library, (await driver.read()).driver_version)
            if saved is not None and saved.failure:
                raise Unavailable(saved.failure)

    return NodeProbe(
        check=check,
        standing=Standing(place=10, because="libgpushare is there for this machine"),
        pods=GpushareFiles(library, settings.virtual_manager.path).list_pods,
        is_for_sandbox=True,
        note=library.missing_note,
    )


def _is_proven(settings: Settings) -> bool:
    return settings.driver == "nvml" and settings.libgpushare.probe
