"""The sandbox's allocator of claims, compared with what a real kube-scheduler has allocated, and its CEL selectors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.placement.first_fit import Capacity, Device, allocate
from gpushare_agent.sandbox.scheduler.cel import SelectorFailed, parse_selector
from gpushare_agent.sandbox.scheduler.claim_objects import allocation_of, read_devices, read_requests, used_of

ROOT = Path(__file__).parents[2]
RECORDED: dict[str, Any] = json.loads((ROOT / "tests/data/dra/allocations.json").read_text())
CLASSES = {RECORDED["class"]["metadata"]["name"]: RECORDED["class"]}
NODE = RECORDED["slice"]["spec"]["nodeName"]


def slice_at(step: dict[str, Any]) -> dict[str, Any]:
    """The recorded slice in the order, and with the taints, of this step."""
    raw = copy.deepcopy(RECORDED["slice"])
    devices = {device["name"]: device for device in raw["spec"]["devices"]}
    for name, taints in step["taints"].items():
        devices[name]["taints"] = taints
    raw["spec"]["devices"] = [devices[name] for name in step["order"]]
    return dict(raw)


def allocated(step: dict[str, Any], claims: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
    """The results for the step's claim, or why there are none; `claims` are those allocated before."""
    claim = {"metadata": {"name": step["name"]}, "spec": step["spec"]}
    devices = read_devices([slice_at(step)], NODE)
    try:
        shares = allocate([read_requests(step["spec"], CLASSES)], devices, used_of(claims))
    except Rejected as error:
        return str(error)
    if shares is None:
        return "cannot allocate all claims"
    claim["status"] = {"allocation": allocation_of(claim, shares[0], NODE, CLASSES)}
    claims.append(claim)
    results: list[dict[str, Any]] = copy.deepcopy(claim["status"]["allocation"]["devices"]["results"])
    assert all(one.pop("shareID") for one in results)
    return results


def test_claims_get_the_devices_and_amounts_that_kube_scheduler_gave_them() -> None:
    """All kinds of claims of docs/explanation/dra.md in one cluster that fills up, also those that found no place."""
    claims: list[dict[str, Any]] = []
    for step in RECORDED["steps"]:
        found = allocated(step, claims)
        if "results" in step:
            assert found == step["results"], step["name"]
        else:
            assert isinstance(found, str) and found in step["message"], step["name"]
    assert len(claims) > 10
    made, real = (one["status"]["allocation"] for one in (claims[0], RECORDED["claim"]))
    assert made.keys() == real.keys() and made["nodeSelector"] == real["nodeSelector"]
    assert made["devices"]["results"][0].keys() == real["devices"]["results"][0].keys()


def test_a_class_configures_its_requests_before_the_claim() -> None:
    """FromClass names the request that the class served, FromClaim is the claim's own."""
    step = RECORDED["steps"][0]
    device_class = copy.deepcopy(RECORDED["class"])
    device_class["spec"]["config"] = [{"opaque": {"driver": "gpushare-agent", "parameters": {"a": 1}}}]
    spec = copy.deepcopy(step["spec"])
    spec["devices"]["config"] = [{"opaque": {"driver": "gpushare-agent", "parameters": {"a": 2}}}]
    classes = {device_class["metadata"]["name"]: device_class}
    shares = allocate([read_requests(spec, classes)], read_devices([slice_at(step)], NODE), {})
    assert shares is not None
    config = allocation_of({"spec": spec}, shares[0], NODE, classes)["devices"]["config"]
    sources = [(one["source"], one.get("requests"), one["opaque"]["parameters"]["a"]) for one in config]
    assert sources == [("FromClass", ["gpu"], 1), ("FromClaim", None, 2)]


@pytest.mark.parametrize(
    ("sample", "shipped"),
    [
        ("claim_samples/00-class", ["dra/classes"]),
        ("claim_samples/01-nvidia-class", ["dra-nvidia-names/class"]),
        ("mig_samples/00-classes", ["dra/classes", "dra-mig-profiles/classes"]),
    ],
)
def test_the_sandbox_has_the_classes_of_the_manifests(sample: str, shipped: list[str]) -> None:
    path = ROOT / f"gpushare_agent/sandbox/{sample}.yaml"
    files = [ROOT / f"manifests/components/{one}.yaml" for one in shipped]
    of_manifests = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    assert all(one in of_manifests for one in yaml.safe_load_all(path.read_text()))


def test_the_class_of_nvidias_driver_selects_devices_that_have_its_attributes() -> None:
    """Also where a device has none of them: an error would stop the scheduler for all nodes."""
    document = yaml.safe_load((ROOT / "manifests/components/dra-nvidia-names/class.yaml").read_text())
    selects = parse_selector(document["spec"]["selectors"][0]["cel"]["expression"])
    for driver, attributes, expected in (
        ("gpushare-agent", {"gpu.nvidia.com/type": "gpu"}, True),
        ("gpu.nvidia.com", {"gpu.nvidia.com/type": "gpu"}, True),
        ("gpu.nvidia.com", {"gpu.nvidia.com/type": "mig"}, False),
        ("gpushare-agent", {"gpushare-agent/type": "gpu"}, False),
        ("another", {"gpu.nvidia.com/type": "gpu"}, False),
    ):
        assert selects(Device(key=(driver, "node", "gpu-0"), attributes=attributes)) is expected


DEVICE = Device(
    key=("d", "node", "gpu-0"),
    attributes={
        "d/type": "gpu",
        "d/name": "NVIDIA A100-SXM4-80GB",
        "d/index": 3,
        "d/ok": True,
        "d/driverVersion": (535, 0, 0),
    },
    capacity={"d/memory": Capacity(value=40 << 30, default=0)},
)


@pytest.mark.parametrize(
    ("expression", "is_selected"),
    [
        ("device.driver == 'd' && device.attributes['d'].type == 'gpu'", True),
        ("device.attributes['d'].type != \"gpu\"", False),
        ("device.attributes['d'].index in [1, 3]", True),
        ("!(device.attributes['d'].index < 3) && !device.attributes['d'].ok", False),
        ("device.capacity['d'].memory.compareTo(quantity('40Gi')) >= 0", True),
        ("device.attributes['d'].driverVersion.compareTo(semver('535.1.0')) == -1", True),
        ("device.attributes['d'].type.startsWith('gp')", True),
        ("device.attributes['d'].name.lowerAscii().matches('^.*a100-s.*$')", True),
        ("device.attributes['d'].name.matches('a100')", False),
        ("device.attributes['d'].name.matches('A1.+80G.$')", True),
        ("device.attributes['d'].none == 1 || device.driver == 'd'", True),
        ("device.attributes['d'].none == 1 && device.driver == 'e'", False),
    ],
)
def test_selectors(expression: str, is_selected: bool) -> None:
    assert parse_selector(expression)(DEVICE) is is_selected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "device",
        "device.attributes.all(a, true)",
        "1 + 1 == 2",
        "__import__('os')",
        "a ? b : c",
        "device.driver.matches('(d+)+e')",
        "device.driver.matches('[d]')",
        "device.driver.matches('.*.*.*')",
        f"'{'a' * 65}'.matches('a.*')",
        " && ".join(["device.driver.matches('a')"] * 17),
        "device.driver.matches(device.driver)",
        "device.driver.lowerAscii(1)",
        "device.driver # x",
        "x == 1",
        "(" * 10_000,
        "device.driver == 'd'.format(1)",
        "1 < 2 < 3",
        "device.driver is 'd'",
        "device.driver not in ['e']",
        "true and true",
        "b'x' == b'x'",
        "lambda: 1",
    ],
)
def test_what_a_selector_cannot_say_here_is_refused(expression: str) -> None:
    """With a sentence, never with a guess: when it is read or when it is asked of a device."""
    with pytest.raises(Rejected):
        parse_selector(expression)(DEVICE)


@pytest.mark.parametrize(
    "expression", ["device.attributes['d'].none == 1", "device.driver == 1", "device.attributes['d'].index"]
)
def test_a_selector_that_has_no_value_fails(expression: str) -> None:
    with pytest.raises(SelectorFailed):
        parse_selector(expression)(DEVICE)


def partitioned(count: int = 3, generation: int = 1, **over: Any) -> list[dict[str, Any]]:
    """A pool of three slices: the counters of a GPU, and two of its partitions in each of the others."""
    pool = {"name": NODE, "generation": generation, "resourceSliceCount": count}
    spec = {"driver": "gpushare-agent", "nodeName": NODE, "pool": pool}

    def device(name: str, *slices: int) -> dict[str, Any]:
        counters = {f"memory-slice-{number}": {"value": "1"} for number in slices}
        return {"name": name, "consumesCounters": [{"counterSet": "gpu-0", "counters": counters}], **over}

    counters = {f"memory-slice-{number}": {"value": "1"} for number in range(4)}
    parts: list[dict[str, Any]] = [
        {"devices": [device("half-0", 0, 1), device("half-2", 2, 3)]},
        {"devices": [device("whole", 0, 1, 2, 3), device("quarter-3", 3)]},
        {"sharedCounters": [{"name": "gpu-0", "counters": counters}]},
    ]
    return [{"metadata": {"name": f"s-{number}"}, "spec": {**spec, **part}} for number, part in enumerate(parts)]


def chosen(slices: list[dict[str, Any]], count: int, claims: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The results of a claim for `count` devices of any kind; `claims` gets it."""
    spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "any", "count": count}}]}}
    classes = {"any": {"metadata": {"name": "any"}, "spec": {}}}
    shares = allocate([read_requests(spec, classes)], read_devices(slices, NODE), used_of(claims))
    if shares is None:
        return None
    allocation = allocation_of({"spec": spec}, shares[0], NODE, classes)
    claims.append({"status": {"allocation": allocation}})
    return list(allocation["devices"]["results"])


def test_counters_stand_in_slices_of_their_own() -> None:
    """Partitions exclude each other over all slices of the pool; only a device that is shared has a share ID."""
    claims: list[dict[str, Any]] = []
    results = chosen(partitioned(), 2, claims)
    assert results is not None
    assert [one["device"] for one in results] == ["half-0", "half-2"]
    assert all(one.keys() == {"request", "driver", "pool", "device"} for one in results)
    assert chosen(partitioned(), 1, claims) is None
    results = chosen(partitioned(), 1, [])
    assert results is not None and [one["device"] for one in results] == ["half-0"]
    assert chosen(partitioned(), 3, []) is None
    claims = []
    for _ in range(2):
        results = chosen(partitioned(allowMultipleAllocations=True), 1, claims)
        assert results is not None and results[0]["shareID"] and results[0]["device"] == "half-0"


def test_a_pool_of_several_slices_is_whole_or_not_there() -> None:
    """Also where its counters are missing, where slices are of two generations, or two devices have one name."""
    assert len(read_devices(partitioned(), NODE)) == 4
    assert read_devices(partitioned()[:2], NODE) == read_devices(partitioned(count=4), NODE) == []
    assert read_devices(partitioned(), "other") == []
    newer = partitioned(generation=2)
    assert read_devices([*partitioned()[1:], newer[0]], NODE) == []
    assert len(read_devices([*partitioned()[:2], *[{**one, "metadata": {"name": "n"}} for one in newer]], NODE)) == 4
    twice = partitioned()
    twice[1]["spec"]["devices"][0]["name"] = "half-0"
    assert read_devices(twice, NODE) == []
