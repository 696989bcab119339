"""The agent's own CDI spec against the published schema, and who names a GPU."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from gpushare_agent.agent.delivery.own_spec import (
    SpecNodes,
    build_spec,
    encode_spec,
    gpus_to_name,
    naming,
    spec_version,
)
from gpushare_agent.core.model import isolation
from gpushare_agent.core.model.errors import Rejected
from gpushare_agent.core.model.isolation import DEVICE_NAME, SpecFile
from gpushare_agent.sandbox.runtime.cdi_resolver import resolve_cdi
from tests.isolation.support_cdi import DATA, NVIDIA_CTK, schema
from tests.support_core import inventory, mig_instance

GPUS = tuple(replace(gpu, minor=gpu.index + 4) for gpu in inventory().gpus)
KIND = "nvidia.com/gpu"
DRIVER = Path("/etc/gpu-manager/vdriver/origin")
FULL = build_spec(GPUS, KIND, SpecNodes(driver_directory=DRIVER))


def file(path: str, *devices: str) -> SpecFile:
    return SpecFile(path=path, directory=path.rpartition("/")[0], kind=KIND, devices=devices)


@pytest.mark.parametrize(
    "nodes",
    [
        SpecNodes(),
        SpecNodes(driver_directory=DRIVER),
        SpecNodes(control=()),
        SpecNodes(has_gpu_nodes=False),
        SpecNodes(has_gpu_nodes=False, driver_directory=DRIVER),
    ],
)
def test_every_spec_satisfies_the_published_schema_and_resolves(nodes: SpecNodes, tmp_path: Path) -> None:
    """With and without nodes and driver directory; a runtime finds both GPUs in it, and edits for each."""
    content = encode_spec(build_spec(GPUS, KIND, nodes))
    schema().validate(json.loads(content))
    (tmp_path / "ours.json").write_bytes(content)
    for gpu in GPUS:
        edits = resolve_cdi([tmp_path], [f"{KIND}={gpu.uuid}"])
        own = (f"/dev/nvidia{gpu.minor}",) if nodes.has_gpu_nodes else ()
        assert set(edits.device_nodes) == {*own, *(nodes.control if nodes.has_gpu_nodes else ())}
        path = {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64"} if nodes.driver_directory else {}
        assert dict(edits.env) == {"NVIDIA_VISIBLE_DEVICES": "void"} | path
        assert dict(edits.mounts) == ({str(DRIVER): "/usr/local/nvidia"} if nodes.driver_directory else {})


def test_the_spec_is_this() -> None:
    """The whole of it, for a person to review."""
    spec = build_spec(GPUS[:1], KIND, SpecNodes(control=("/dev/nvidiactl",), driver_directory=DRIVER))
    assert encode_spec(spec) == (DATA / "own.json").read_bytes()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda spec: spec.update(comment="x"), "an unknown field"),
        (lambda spec: spec["devices"][0].update(containerEdits={}), "a device without edits"),
        (lambda spec: spec["devices"].append(spec["devices"][0]), "a device twice"),
    ],
)
def test_the_runtime_passes_over_what_only_the_library_refuses(
    spoil: Callable[[dict[str, Any]], Any], why: str, tmp_path: Path
) -> None:
    """The schema takes these, so the resolver must see them."""
    spec = copy.deepcopy(FULL)
    spoil(spec)
    assert schema().is_valid(spec), why
    (tmp_path / "a.json").write_text(json.dumps(spec))
    with pytest.raises(Rejected, match=r"unresolvable CDI devices nvidia\.com/gpu=GPU-0"):
        resolve_cdi([tmp_path], ["nvidia.com/gpu=GPU-0"])


def test_the_example_of_nvidia_ctk_satisfies_the_schema() -> None:
    """It stands for the files of others in these tests; the schema does refuse something."""
    spec = yaml.safe_load(NVIDIA_CTK)
    schema().validate(spec)
    for mistake in (
        {"kind": [KIND]},
        {"devices": [{"name": "0", "containerEdits": {"deviceNodes": ["/dev/nvidia0"]}}]},
    ):
        assert not schema().is_valid(spec | mistake)


@pytest.mark.parametrize(
    ("kind", "name", "version"),
    [
        (KIND, "GPU-0", "0.3.0"),
        ("sub.example.com/gpu", "GPU-0", "0.3.0"),
        (KIND, "0", "0.5.0"),
        ("nvidia.com/gpu.shared", "0", "0.6.0"),
    ],
)
def test_the_version_is_the_lowest_that_has_what_the_spec_uses(kind: str, name: str, version: str) -> None:
    """Older runtimes refuse a newer version, and every runtime refuses a version that is too low for what is used."""
    assert spec_version(kind, ["GPU-9", name]) == version


def test_the_later_directory_counts_and_one_directory_may_not_say_it_twice() -> None:
    """As runtimes resolve names; a name that is ambiguous anywhere is gone, and ours would not cure it."""
    a, b, c = file("/etc/cdi/a.json", "GPU-0"), file("/run/cdi/b.json", "GPU-0"), file("/run/cdi/c.json", "GPU-0")
    assert naming([a, b], KIND, ["GPU-0"]).named == {"GPU-0": "/run/cdi/b.json"}
    twice = naming([a, b, c], KIND, ["GPU-0", "GPU-1"])
    assert twice.named == {} and twice.ambiguous == {"GPU-0": ("/run/cdi/b.json", "/run/cdi/c.json")}
    assert [gpu.uuid for gpu in gpus_to_name(GPUS, twice, SpecNodes())] == ["GPU-1"]


def test_a_gpu_whose_minor_number_is_unknown_is_not_named() -> None:
    """/dev/nvidia-1 does not exist; where GPUs have no nodes it does not matter."""
    lost = (GPUS[0], replace(GPUS[1], minor=-1))
    nobody = naming([], KIND, [])
    assert gpus_to_name(lost, nobody, SpecNodes()) == lost[:1]
    assert gpus_to_name(lost, nobody, SpecNodes(has_gpu_nodes=False)) == lost


def test_what_is_a_kind_and_a_device_name() -> None:
    """Letters begin a vendor and a class; a device may begin with a digit."""
    for good in (KIND, "a/b", "vendor.com/gpu.shared", "v_1-x.org/g-1"):
        assert isolation.KIND.fullmatch(good), good
    for bad in (
        "nvidia.com",
        "/gpu",
        "nvidia.com/",
        "1v.com/gpu",
        "nvidia.com/1",
        "a/b/c",
        "a./b",
        "a/b=c",
        "ä/b",
        "a/b\n",
    ):
        assert not isolation.KIND.fullmatch(bad), bad
    for good in ("0", "GPU-0f9f", "0:1", "MIG-1.2"):
        assert DEVICE_NAME.fullmatch(good), good
    for bad in ("", "-a", "a-", "a/b", "a b", "a\n"):
        assert not DEVICE_NAME.fullmatch(bad), bad


def test_a_mig_instance_has_nvidias_two_names() -> None:
    """UUID and `0:1`, with the GPU's node and both capability nodes; the second not where another spec has it. Nodes of a
    new instance are not on the host before somebody makes them: the spec says what they are where it is known."""
    gpu = mig_instance(2, 0, 1)
    assert gpu.mig is not None
    for major, numbers in ((511, [{"type": "c", "major": 511, "minor": cap} for cap in (21, 22)]), (0, [{}, {}])):
        spec = build_spec([replace(gpu, mig=replace(gpu.mig, caps_major=major))], KIND, SpecNodes(control=()))
        caps = [{"path": f"/dev/nvidia-caps/nvidia-cap{21 + n}"} | one for n, one in enumerate(numbers)]
        edits = {"deviceNodes": [{"path": "/dev/nvidia0"}, *caps]}
        assert spec["devices"] == [{"name": name, "containerEdits": edits} for name in ("MIG-2", "0:1")]
        assert spec["cdiVersion"] == "0.5.0"
        schema().validate(json.loads(encode_spec(spec)))
    alone = build_spec([mig_instance(2, 0, 1)], KIND, SpecNodes(), names_of_others={"0:1"})
    assert [device["name"] for device in alone["devices"]] == ["MIG-2"]
