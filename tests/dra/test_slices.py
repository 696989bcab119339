"""The slice: its devices, and when it is written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.dra import slices
from gpushare_agent.agent.dra.slices import SlicePublisher, slice_name
from gpushare_agent.core.claims.devices import DevicePolicy, is_device_name, link_groups, quantity, slice_devices
from gpushare_agent.core.kube.claims import Device, ResourceSlice, SliceContent
from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.gpus import GpuInventory, Health
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import running
from tests.dra.support_claims import DRIVER, NODE
from tests.extender.support_extender import eventually
from tests.gpus.support_gpus import read_topology
from tests.support_core import inventory
from tests.support_deadline import DEADLINE_S
from tests.support_json import undecoded

POLICY = DevicePolicy(block_mib=256, order="binpack", taint_effect="NoSchedule", isolation="vcuda")


def devices(
    found: GpuInventory,
    used: Mapping[str, int] | None = None,
    cordoned: Mapping[str, str] | None = None,
    **changes: object,
) -> list[Device]:
    return slice_devices(
        found.gpus,
        found,
        {GpuUuid(uuid): Charge(cores=cores) for uuid, cores in (used or {}).items()},
        {GpuUuid(uuid): why for uuid, why in (cordoned or {}).items()},
        replace(POLICY, **changes),  # type: ignore[arg-type]
    )


def shown(made: list[Device]) -> list[dict[str, Any]]:
    """As they are written."""
    found: list[dict[str, Any]] = msgspec.to_builtins(made)
    return found


def test_a_device_has_both_capacities_with_a_default_of_all_of_them() -> None:
    """The default must be a multiple of the step: memory is rounded down to whole blocks."""
    device = shown(devices(inventory(1, memory_mib=24 * 1024 + 100)))[0]
    assert device["name"] == "gpu-0" and device["allowMultipleAllocations"] is True
    assert device["capacity"] == {
        "cores": {
            "value": "100",
            "requestPolicy": {"default": "100", "validRange": {"min": "0", "max": "100", "step": "1"}},
        },
        "memory": {
            "value": "24Gi",
            "requestPolicy": {"default": "24Gi", "validRange": {"min": "256Mi", "max": "24Gi", "step": "256Mi"}},
        },
    }
    assert device["attributes"]["uuid"] == {"string": "GPU-0"} and device["attributes"]["index"] == {"int": 0}


def capacity(device: dict[str, Any]) -> dict[str, tuple[str, str, str, str]]:
    """Value, default, least and step of each."""
    found = {}
    for name, one in device["capacity"].items():
        policy = one["requestPolicy"]
        assert policy["validRange"]["max"] == one["value"]
        found[name] = (one["value"], policy["default"], policy["validRange"]["min"], policy["validRange"]["step"])
    return found


def test_by_nvidias_names_a_claim_that_names_nothing_takes_no_cores() -> None:
    """What its claims select by is there under its domain, of the request's default nothing: it is for selectors."""
    found = inventory(1)
    gpus = (replace(found.gpus[0], compute_capability=(9, 0), brand="Nvidia", numa_node=1, pcie_root="pci0000:80"),)
    known = replace(found, gpus=gpus, driver_version="580.65.06", cuda_version="13.0")
    device = shown(devices(known, nvidia_names=True))[0]
    assert capacity(device) == {
        "cores": ("100", "0", "0", "1"),
        "gpu.nvidia.com/memory": ("24Gi", "0", "0", "256Mi"),
        "memory": ("24Gi", "24Gi", "256Mi", "256Mi"),
    }
    ours = shown(devices(known))[0]["attributes"]
    names = "architecture cudaComputeCapability cudaDriverVersion driverVersion index productName type uuid"
    added = {name: value for name, value in device["attributes"].items() if name not in ours}
    assert added.pop("gpu.nvidia.com/brand") == {"string": "Nvidia"}
    assert added == {f"gpu.nvidia.com/{name}": ours[name] for name in names.split()}
    assert ours["resource.kubernetes.io/numaNode"] == {"int": 1} and not any("nvidia.com" in name for name in ours)


def test_shares_without_limits_take_no_memory_and_numbered_ones_are_counted() -> None:
    one, four = (shown(devices(inventory(1), nvidia_names=True, shares=shares))[0] for shares in ("unlimited", "4"))
    assert capacity(one)["memory"] == capacity(four)["memory"] == ("24Gi", "0", "0", "256Mi")
    assert "shares" not in one["capacity"] and capacity(four)["shares"] == ("4", "1", "1", "1")


def test_a_device_has_at_most_as_many_attributes_as_kubernetes_allows() -> None:
    """32 attributes and capacities together; that of a GPU of which everything is known, in groups of both kinds."""
    found = inventory(1)
    gpu = replace(
        found.gpus[0],
        compute_capability=(9, 0),
        brand="Nvidia",
        numa_node=0,
        minor=0,
        pcie_root="pci0000:00",
        bus_id="00000000:0A:00.0",
    )
    known = replace(found, gpus=(gpu,), driver_version="580.65.06", cuda_version="13.0")
    limited = {"memory_by": "gpushare", "compute_by": "gpushare", "nvidia_names": True, "shares": "4"}
    device = shown(devices(known, **limited))[0]
    groups = len(link_groups(known.topology))
    assert len(device["attributes"]) + groups + len(device["capacity"]) <= 32


def test_versions_are_semantic_and_unknown_attributes_absent() -> None:
    found = inventory(1)
    gpus = (replace(found.gpus[0], compute_capability=(8, 9), bus_id="00000000:0A:00.0"),)
    attributes = shown(devices(replace(found, gpus=gpus, driver_version="580.159.04", cuda_version="13.1")))[0][
        "attributes"
    ]
    assert attributes["driverVersion"] == {"version": "580.159.4"}
    assert attributes["cudaDriverVersion"] == {"version": "13.1.0"}
    assert attributes["cudaComputeCapability"] == {"version": "8.9.0"}
    assert attributes["architecture"] == {"string": "Ada Lovelace"}
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0000:0a:00.0"}
    assert not {"numaNode", "nvlinkGroup"} & shown(devices(inventory(1)))[0]["attributes"].keys()


@pytest.mark.parametrize(("order", "names"), [("binpack", [1, 2, 0]), ("spread", [0, 2, 1])])
def test_the_order_is_the_schedulers_choice(order: str, names: list[int]) -> None:
    """It takes the first device that fits."""
    used = {"GPU-1": 60, "GPU-2": 10}
    assert [one.name for one in devices(inventory(3), used, order=order)] == [f"gpu-{index}" for index in names]


@pytest.mark.parametrize(("order", "names"), [("binpack", [1, 0]), ("spread", [0, 1])])
def test_shares_of_memory_alone_count_for_the_order(order: str, names: list[int]) -> None:
    """`cores: "0"`: else all of them would be on the first GPU under spread."""
    found = inventory(2)
    used = {GpuUuid("GPU-1"): Charge(blocks=8)}
    made = slice_devices(found.gpus, found, used, {}, replace(POLICY, order=order))
    assert [one.name for one in made] == [f"gpu-{index}" for index in names]


def test_a_device_is_named_by_its_gpu_and_shows_the_drivers_index() -> None:
    """A name is a DNS label and means one GPU for good, wherever the driver counts it."""
    [one] = inventory(1).gpus
    names = {}
    plain = "GPU-8f3e2b1c-0000-4000-8000-000000000001"
    alike = (plain.replace("f", "F"), plain.removeprefix("GPU-"))
    for uuid in (plain, *alike, "GPU-a_b", "GPU-" + "0" * 80, "MIG-GPU-1/0", "GPU-\udc80"):
        for index in (0, 5):
            gpu = replace(one, uuid=GpuUuid(uuid), index=index, driver_index=3)
            device = shown(devices(replace(inventory(1), gpus=(gpu,))))[0]
            assert device["attributes"]["index"] == {"int": 3} and is_device_name(device["name"])
            assert names.setdefault(uuid, device["name"]) == device["name"]
    assert names[plain] == "gpu-8f3e2b1c-0000-4000-8000-000000000001"
    assert len({*names.values()}) == len(names)


def test_the_slice_of_a_node_with_a_long_name_has_a_name_of_its_own() -> None:
    """A DNS name, wherever the node's is cut."""
    long = ".".join(["a" * 60, "b" * 60, "c" * 60, "d" * 36])
    # Cut before, at and after the dots and dashes between short labels, and alike in all but the last character.
    alike = [
        f"{long}{'x' * size}{end}{last}" for size in range(1, 4) for end in (".e-f" * 7, "--g.h" * 6) for last in "01"
    ]
    nodes = ["n", "n" * 63, *alike]
    names = [slice_name(node) for node in nodes]
    assert len({*names}) == len(nodes) and names[0] == f"n-{DRIVER}" and max(map(len, nodes)) <= 253
    assert sum(len(node) + len(DRIVER) + 1 > 253 for node in nodes) == len(alike)
    for name in names:
        assert len(name) <= 253
        assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", label) for label in name.split("."))


def test_ill_and_cordoned_gpus_are_tainted_with_the_reason() -> None:
    found = inventory(3)
    ill = replace(found.gpus[1], health=Health.UNHEALTHY, unhealthy_reason="Xid 79: GPU has fallen off the bus!" * 3)
    made = devices(
        replace(found, gpus=(found.gpus[0], ill, found.gpus[2])), cordoned={"GPU-2": ""}, taint_effect="NoExecute"
    )
    by_name = {device["name"]: device.get("taints", []) for device in shown(made)}
    assert by_name["gpu-0"] == []
    (taint,) = by_name["gpu-1"]
    assert taint["key"] == "gpushare-agent/unhealthy" and taint["effect"] == "NoExecute"
    assert taint["value"].startswith("Xid-79-GPU-has-fallen") and len(taint["value"]) <= 63
    assert by_name["gpu-2"] == [{"key": "gpushare-agent/cordoned", "value": "unknown", "effect": "NoExecute"}]


def test_groups_are_of_gpus_that_are_joined() -> None:
    mesh = link_groups(read_topology("v100-x8-cube-mesh"))
    assert mesh["nvlinkGroup"] == dict.fromkeys(range(8), "nvlink-0")
    switches = link_groups(read_topology("p40-x7-two-switches"))
    assert not switches["nvlinkGroup"] and len(set(switches["pcieSwitchGroup"].values())) == 2
    assert link_groups(read_topology("single-card")) == {"nvlinkGroup": {}, "pcieSwitchGroup": {}}


@pytest.mark.parametrize(
    ("mib", "text"), [(256, "256Mi"), (1024, "1Gi"), (81920, "80Gi"), (1 << 20, "1Ti"), (1536, "1536Mi")]
)
def test_quantities_are_canonical(mib: int, text: str) -> None:
    """The API server would write them so: the slice would differ from what is wanted for ever."""
    assert quantity(mib) == text


class FakeSlices:
    """The API server's slices, reported to the publisher as its watch would."""

    def __init__(self) -> None:
        self.publisher: SlicePublisher | None = None
        self.slices: dict[str, dict[str, Any]] = {}
        self.writes = 0
        self.error: Exception | None = None

    async def get_node(self, name: str) -> Raw:
        return undecoded({"metadata": {"uid": "node-uid"}})

    async def create_slice(self, made: ResourceSlice) -> Raw:
        self._fail()
        raw = msgspec.json.decode(msgspec.json.encode(made))
        if raw["metadata"]["name"] in self.slices:
            raise Conflict("exists")
        return self._stored(raw)

    async def replace_slice(self, name: str, made: ResourceSlice) -> Raw:
        self._fail()
        raw = msgspec.json.decode(msgspec.json.encode(made))
        if raw["metadata"]["resourceVersion"] != self.slices[name]["metadata"]["resourceVersion"]:
            raise Conflict("another version")
        return self._stored(raw)

    async def delete_slice(self, name: str) -> None:
        self._fail()
        if name not in self.slices:
            raise NotFound("gone")
        self.delete(name)

    def delete(self, name: str) -> None:
        """As the kubelet does when it starts."""
        del self.slices[name]
        assert self.publisher is not None
        self.publisher.remove(name)

    def _fail(self) -> None:
        self.writes += 1
        if self.error is not None:
            raise self.error

    def _stored(self, raw: Mapping[str, Any]) -> Raw:
        stored = deepcopy(dict(raw))
        stored["metadata"]["resourceVersion"] = str(self.writes)
        self.slices[stored["metadata"]["name"]] = stored
        assert self.publisher is not None
        self.publisher.put(undecoded(stored))
        return undecoded(stored)


class Published:
    def __init__(self, wanted: list[Device] | None) -> None:
        self.wanted = wanted
        self.api = FakeSlices()
        self.publisher = SlicePublisher(node_name=NODE, desired=self.desired)
        self.registered = asyncio.Event()
        self.registered.set()
        self.api.publisher = self.publisher

    def desired(self) -> list[SliceContent] | None:
        return None if self.wanted is None else [SliceContent(devices=self.wanted)] if self.wanted else []

    @property
    def spec(self) -> dict[str, Any] | None:
        found = self.api.slices.get(f"{NODE}-{DRIVER}")
        return found["spec"] if found is not None else None

    @property
    def is_there(self) -> bool:
        return self.spec is not None

    @asynccontextmanager
    async def running(self) -> Any:
        """With the API server's slices listed."""
        async with running(lambda: self.publisher.run(self.api, self.registered)):
            self.publisher.list_ended(list(self.api.slices), [], "1")
            yield

    @asynccontextmanager
    async def written(self) -> Any:
        """Once what is wanted is there."""
        async with self.running():
            await eventually(lambda: self.is_there)
            yield


async def test_nothing_is_written_before_the_slices_are_listed_and_the_gpus_read() -> None:
    """What an earlier agent published stays meanwhile: claims refer to it."""
    published = Published(None)
    async with published.running():
        await asyncio.sleep(0)
        assert published.api.writes == 0
        published.wanted = devices(inventory(1))
        published.publisher.changed()
        await eventually(lambda: published.spec is not None)
    assert published.spec is not None and published.spec["pool"] == {
        "name": NODE,
        "generation": 1,
        "resourceSliceCount": 1,
    }


async def test_a_slice_that_somebody_else_has_is_not_published() -> None:
    """By another driver or for another node, its name is taken and the watch never shows it. One line says what to do."""
    published = Published(devices(inventory(1)))
    published.api.error = Conflict("already exists")
    with capture_logs() as logs:
        async with published.running():
            await eventually(lambda: published.api.writes > 0)
            published.publisher.changed()
            await eventually(lambda: published.api.writes > 1)
            assert not published.publisher.published.is_set()
    [error] = [one["error"] for one in logs if one["event"] == "slice_not_published"]
    assert error.startswith(f"already exists; if this stays, delete the ResourceSlice {NODE}-{DRIVER}")


async def test_a_slice_that_may_not_be_written_is_not_published_and_one_that_was_stays_so() -> None:
    published = Published(devices(inventory(1)))
    published.api.error = Rejected("may not create resourceslices")
    async with published.running():
        await eventually(lambda: published.api.writes > 0)
        assert not published.publisher.published.is_set()
        published.api.error = None
        published.publisher.changed()
        await eventually(published.publisher.published.is_set)
        published.api.error = Unavailable("down")
        published.api.delete(f"{NODE}-{DRIVER}")
        await eventually(lambda: published.api.writes > 2)
    assert published.spec is None and published.publisher.published.is_set()


async def test_the_slice_waits_until_the_kubelet_knows_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a pod that waits is placed at once; but not for ever, because its Event says what is wrong with the driver."""
    for at_most_s in (DEADLINE_S, 0.0):
        monkeypatch.setattr(slices, "REGISTERED_S", at_most_s)
        published = Published(devices(inventory(1)))
        published.registered.clear()
        async with published.running():
            for _ in range(10):
                await asyncio.sleep(0)
            if at_most_s:
                assert published.api.writes == 0
                published.registered.set()
            await eventually(lambda: published.spec is not None)  # noqa: B023 - of this round


async def test_an_order_alone_waits_and_a_taint_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Published(devices(inventory(2)))
    async with published.written():
        published.wanted = devices(inventory(2), {"GPU-1": 50})
        published.publisher.changed()
        for _ in range(20):
            await asyncio.sleep(0)
        assert published.api.writes == 1
        monkeypatch.setattr(slices, "ORDER_PERIOD_S", 0.0)
        published.publisher.changed()
        await eventually(lambda: published.api.writes == 2)
        monkeypatch.setattr(slices, "ORDER_PERIOD_S", 3600.0)
        published.wanted = devices(inventory(2), {"GPU-1": 50}, cordoned={"GPU-0": "fan"})
        published.publisher.changed()
        await eventually(lambda: published.api.writes == 3)
    assert published.spec is not None and [one["name"] for one in published.spec["devices"]] == ["gpu-1", "gpu-0"]
    assert published.spec["pool"]["generation"] == 3, "a pool of one slice has the next with each write"


async def test_slices_of_other_names_are_removed() -> None:
    """Of an agent whose names were others: the pool would be incomplete."""
    published = Published(devices(inventory(1)))
    other = {"metadata": {"name": "old"}, "spec": {"pool": {"generation": 41}}}
    published.api.slices["old"] = other
    published.publisher.put(undecoded(other))
    async with published.written():
        pass
    assert list(published.api.slices) == [f"{NODE}-{DRIVER}"]
    assert published.spec is not None and published.spec["pool"]["generation"] == 42
