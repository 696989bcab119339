"""The configuration of NVIDIA's DRA driver in a claim: GpuConfig, MigDeviceConfig, and which kinds are refused. Pure.

    apiVersion: resource.nvidia.com/v1beta1
    kind: GpuConfig                                # or MigDeviceConfig, of MIG instances
    sharing:
      strategy: MPS                                # or TimeSlicing, with timeSlicingConfig.interval
      mpsConfig:
        defaultActiveThreadPercentage: 50
        defaultPinnedDeviceMemoryLimit: 10Gi       # of every GPU that the configuration is for
        defaultPerDevicePinnedMemoryLimit: {"0": 8Gi}   # by UUID, or by place among them in order of UUID

Source: api/nvidia.com/resource/v1beta1 of the driver. Every field is used or refused: an ignored field would
be a lost limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import decoded
from gpushare_agent.core.kube.objects import Quantity, shown, whole_number
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import MIB

API_VERSION = "resource.nvidia.com/v1beta1"
_KINDS = {
    "VfioDeviceConfig": "GPUs are not passed through to virtual machines",
    "ComputeDomainChannelConfig": "compute domains are NVIDIA's driver's",
    "ComputeDomainDaemonConfig": "compute domains are NVIDIA's driver's",
}
MAX_DEVICES = 128
"""The longest list of limits; a claim has 32 devices."""


class MpsLimits(Struct, frozen=True, kw_only=True):
    """The limits of each process under MPS. `thread_percentage` is of each GPU. `memory_mib` is of each too, None without a
    limit, but for those of `memory_mib_of`, by UUID or by place among the configuration's GPUs in order of UUID."""

    thread_percentage: int = 100
    memory_mib: int | None = None
    memory_mib_of: tuple[tuple[str, int], ...] = ()

    def memory_of(self, uuid: str, uuids: Sequence[str]) -> int | None:
        """MiB of one of the configuration's GPUs `uuids`. Raises Corrupt: a limit names none of them."""
        places = {str(place): one for place, one in enumerate(sorted(uuids))}
        found = self.memory_mib
        for name, mib in self.memory_mib_of:
            named = places.get(name, name)
            if named not in uuids:
                raise Corrupt(
                    f"mpsConfig.defaultPerDevicePinnedMemoryLimit has {name[:80]!r}, which is neither UUID nor place of a"
                    " GPU of the configuration's requests"
                )
            found = mib if named == uuid else found
        return found


class ShareConfig(Struct, frozen=True, kw_only=True):
    """The request of a claim or its class beyond numbers; empty and 0 stand for the node's settings. `mps` are the limits of
    whole GPUs by NVIDIA's GpuConfig."""

    isolation: str = ""
    core_limit: int = 0
    mps: MpsLimits | None = None


class _Base(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    pass


class _TimeSlicing(_Base):
    interval: Literal["Default", "Short", "Medium", "Long"] = "Default"


class _Mps(_Base):
    default_active_thread_percentage: Annotated[int, Meta(ge=1, le=100)] | None = None
    default_pinned_device_memory_limit: Quantity | None = None
    default_per_device_pinned_memory_limit: Annotated[Mapping[str, Quantity], Meta(max_length=MAX_DEVICES)] | None = (
        None
    )
    multi_user: bool | None = None


class _Sharing(_Base):
    strategy: Literal["TimeSlicing", "MPS"]
    time_slicing_config: _TimeSlicing | None = None
    mps_config: _Mps | None = None


class _Json(_Base):
    api_version: object = None
    kind: object = None
    sharing: _Sharing | None = None


class Typed(Struct, rename="camel"):
    """The kind and version that an opaque configuration states."""

    api_version: object = ""
    kind: object = ""

    def __str__(self) -> str:
        return f"the opaque parameters have apiVersion {shown(self.api_version)} and kind {shown(self.kind)}"


TYPED, _JSON = Decoder(Typed), Decoder(_Json)


def read_gpu_config(raw: Raw) -> tuple[ShareConfig, bool]:
    """The configuration, as without one where it has no strategy, and whether it is for MIG instances, else for GPUs. Raises
    Corrupt with what cannot be done."""
    typed = decoded(TYPED, raw, "the opaque parameters")
    if typed.api_version != API_VERSION or typed.kind not in ("GpuConfig", "MigDeviceConfig"):
        why = _KINDS.get(typed.kind) if isinstance(typed.kind, str) else None
        raise Corrupt(
            f"{typed}, and of NVIDIA's this driver reads {API_VERSION} GpuConfig and MigDeviceConfig"
            + (f": {why}" if why else "")
        )
    try:
        sharing = decoded(_JSON, raw, str(typed.kind)).sharing
    except Corrupt as e:
        raise Corrupt(str(e)[:400]) from e
    return _shared(sharing, str(typed.kind)), typed.kind == "MigDeviceConfig"


def _shared(sharing: _Sharing | None, kind: str) -> ShareConfig:
    if sharing is None:
        return ShareConfig()
    if sharing.strategy == "TimeSlicing":
        if sharing.mps_config is not None:
            raise Corrupt(f"{kind} has the strategy TimeSlicing and an mpsConfig. Remove one of the two")
        return ShareConfig(isolation="none")
    if sharing.time_slicing_config is not None:
        raise Corrupt(f"{kind} has the strategy MPS and a timeSlicingConfig. Remove one of the two")
    return ShareConfig(isolation="mps", mps=_limits(sharing.mps_config or _Mps()))


def _limits(found: _Mps) -> MpsLimits:
    # The daemon is the node's, one for all users or none: a claim cannot start it in another way.
    if found.multi_user:
        raise Corrupt("mpsConfig.multiUser is true, and the node decides that by its setting mps.multi_user. Remove it")
    each, of_some = found.default_pinned_device_memory_limit, found.default_per_device_pinned_memory_limit or {}
    return MpsLimits(
        thread_percentage=found.default_active_thread_percentage or 100,
        memory_mib=None if each is None else _mib(each),
        memory_mib_of=tuple((name, _mib(amount)) for name, amount in of_some.items()),
    )


def _mib(amount: Quantity) -> int:
    mib = whole_number(amount, "the pinned memory limit of mpsConfig") // MIB
    if mib < 1:
        raise Corrupt("the pinned memory limit of mpsConfig is below 1Mi, which MPS would take for no limit")
    return mib
