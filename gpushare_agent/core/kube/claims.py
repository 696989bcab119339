"""Schemas of Dynamic Resource Allocation's objects: ResourceClaim, ResourceSlice.

Objects that are read have only the fields in use; objects that are written have all, in the form in which the API server
returns them. Format: resource.k8s.io/v1. No state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Raw, Struct, field

from gpushare_agent.core.kit.json_schema import NULL
from gpushare_agent.core.kube.objects import KubeObject, Quantity
from gpushare_agent.core.model.taints import Taint

API_VERSION = "resource.k8s.io/v1"
MAX_RESULTS = 32
"""Devices of one claim, as MAX_USERS the limit of resource.k8s.io itself."""
MAX_USERS = 256
"""Of status.reservedFor."""


# --- a claim, as it is read ---


class DeviceResult(Struct, rename="camel"):
    """One allocated device."""

    request: str
    driver: str
    pool: str
    device: str
    share_id: str | None = field(name="shareID", default=None)
    admin_access: bool | None = None
    consumed_capacity: Mapping[str, Quantity] | None = None


def main_request(name: str) -> str:
    """A result of a request with alternatives is of `request/alternative`; a pod names the request alone."""
    return name.partition("/")[0]


class OpaqueConfig(Struct):
    """`parameters` are of the driver's own schema."""

    driver: str
    parameters: Raw = NULL


class DeviceConfig(Struct):
    """`source` is FromClass or FromClaim; no requests are all."""

    source: str = ""
    requests: Sequence[str] | None = None
    opaque: OpaqueConfig | None = None


class AllocatedDevices(Struct):
    results: Annotated[Sequence[DeviceResult], Meta(max_length=MAX_RESULTS)] | None = None
    config: Annotated[Sequence[DeviceConfig], Meta(max_length=64)] | None = None
    """32 of the claim, 32 of its class."""


class Allocation(Struct):
    devices: AllocatedDevices = field(default_factory=AllocatedDevices)


class Consumer(Struct, rename="camel"):
    """Who a claim is reserved for."""

    resource: str
    name: str
    uid: str
    api_group: str | None = None


class ClaimStatus(Struct, rename="camel"):
    allocation: Allocation | None = None
    reserved_for: Annotated[Sequence[Consumer], Meta(max_length=MAX_USERS)] | None = None


class ClaimJson(KubeObject):
    """A ResourceClaim."""

    status: ClaimStatus | None = None


# --- a slice ---


class ValidRange(Struct):
    min: str
    max: str
    step: str


class RequestPolicy(Struct, rename="camel", omit_defaults=True):
    """One of range and values."""

    default: str
    valid_range: ValidRange | None = None
    valid_values: Sequence[str] = ()


class DeviceCapacity(Struct, rename="camel", omit_defaults=True):
    value: str
    request_policy: RequestPolicy | None = None


class Attribute(Struct, omit_defaults=True, kw_only=True):
    """One of the three."""

    text: str | None = field(name="string", default=None)
    version: str | None = None
    number: int | None = field(name="int", default=None)


class Counter(Struct):
    value: str


class CounterSet(Struct):
    name: str
    counters: Mapping[str, Counter]


class CounterConsumption(Struct, rename="camel"):
    """What the first allocation of a device takes of a set; shares of it that follow take nothing more."""

    counter_set: str
    counters: Mapping[str, Counter]


class Device(Struct, rename="camel", omit_defaults=True, kw_only=True):
    name: str
    allow_multiple_allocations: bool
    attributes: Mapping[str, Attribute]
    capacity: Mapping[str, DeviceCapacity]
    consumes_counters: Sequence[CounterConsumption] = ()
    taints: Sequence[Taint] = ()


class Pool(Struct, rename="camel"):
    name: str
    generation: int
    resource_slice_count: int


class SliceContent(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """Devices or counter sets: the API server admits no slice with both."""

    devices: Sequence[Device] = ()
    shared_counters: Sequence[CounterSet] = ()


class SliceSpec(SliceContent, rename="camel", omit_defaults=True, kw_only=True):
    driver: str
    node_name: str
    pool: Pool


class SliceMeta(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """`owner_references` as they were read, or a new one."""

    name: str
    resource_version: str = ""
    owner_references: Raw


class ResourceSlice(Struct, rename="camel", kw_only=True):
    api_version: str = API_VERSION
    kind: str = "ResourceSlice"
    metadata: SliceMeta
    spec: SliceSpec
