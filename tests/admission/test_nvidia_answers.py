"""The answers of NVIDIA's plugin and ours for the same requests, side by side: tests/data/nvidia.README.md says where theirs
come from, `DIFFERENCES` each way in which ours differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, edits_for
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.isolation import DeviceListStrategy, Sharing
from gpushare_agent.core.model.mig import MigPlace
from gpushare_agent.core.model.names import NVIDIA_GPU_RESOURCE, GpuUuid
from gpushare_agent.core.model.resources import NvidiaNames, ReplicaLayout, ResourceNames, ServedUnits, units_of
from tests.admission.test_golden_edits import CONFIG, GPUS, UID
from tests.support_core import container, pod, raw_edits

THEIRS: Mapping[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "nvidia" / "answers.json").read_text(encoding="utf-8")
)
WHOLE, QUARTER, BY_MPS = ReplicaLayout(1), ReplicaLayout(4), ReplicaLayout(4, Sharing.MPS)
CASES: Mapping[str, tuple[ReplicaLayout, list[tuple[int, int]]]] = {
    "whole GPU": (WHOLE, [(0, 0)]),
    "two whole GPUs": (WHOLE, [(0, 0), (1, 0)]),
    "one of 4 replicas, time-slicing": (QUARTER, [(0, 1)]),
    "two of 4 replicas of one GPU, time-slicing": (QUARTER, [(0, 0), (0, 2)]),
    "one of 4 replicas, mps": (BY_MPS, [(0, 1)]),
    "MIG instance, single or mixed": (WHOLE, [(2, 0)]),
}
"""Terms, and GPU and number of each unit. Of MIG's strategies only the resource's name differs."""
INSTANCE = replace(
    GPUS[0],
    index=2,
    uuid=GpuUuid("MIG-2222aaaa-0000-4000-8000-000000000002"),
    memory_mib=9856,
    mig=MigPlace(profile="1g.10gb", number=1, parent=GPUS[0].uuid, parent_index=0, gi=7, ci=0, gi_cap=12, ci_cap=13),
)
DEVICES = (*GPUS, INSTANCE)

DIFFERENCES: Mapping[str, str] = {
    "the vendor of CDI names is the setting cdi.kind, and a GPU's CDI name is its UUID: nvidia-ctk's specs have both": "cdi",
    "by CDI alone NVIDIA_VISIBLE_DEVICES is void: CUDA images set all, which NVIDIA's runtime would follow": "void",
    "device nodes may be made with mknod too (rwm), as gpu-manager's; uvm-tools and modeset are not needed": "nodes",
    "the mounts of /dev/null are read-only": "null",
    "MPS: the limits are the container's own variables, as one daemon serves shares too; its directories are ours": "mps",
}


def ours(case: str, strategies: str, ids: str) -> dict[str, Any]:
    terms, numbers = CASES[case]
    served = ServedUnits(NVIDIA_GPU_RESOURCE, terms)
    devices = [served.ids(DEVICES[gpu].uuid)[number] for gpu, number in numbers]
    spec = replace(container("cuda"), requests={NVIDIA_GPU_RESOURCE: len(devices)})
    policy = EditPolicy(
        names=ResourceNames(gpu=(NVIDIA_GPU_RESOURCE,), nvidia=NvidiaNames(sharing=terms.sharing)),
        config=CONFIG,
        isolation="none",
        strategies=tuple(map(DeviceListStrategy, strategies.split("+"))),
        is_named_by_index=ids == "index",
    )
    gpus = [gpu for index, gpu in enumerate(DEVICES) if index in {gpu for gpu, _ in numbers}]
    edits = edits_for(pod("p", spec, uid=UID), spec, gpus, policy, units_of(devices))
    assert isinstance(edits, ContainerEdits), edits
    return raw_edits(edits)


def as_ours(theirs: Mapping[str, Any], case: str, strategies: str) -> tuple[dict[str, Any], set[str]]:
    """Their answer with the listed differences made, and which of them it took."""
    answer, made = json.loads(json.dumps(theirs)), set()
    uuids = [f"nvidia.com/gpu={DEVICES[index].uuid}" for index in sorted({gpu for gpu, _ in CASES[case][1]})]
    if "cdi" in strategies:
        made |= {"cdi", "void"}
        answer["env"]["NVIDIA_VISIBLE_DEVICES"] = "void"
        answer["cdi_devices"] = uuids if answer["cdi_devices"] else []
        if answer["annotations"]:
            answer["annotations"] = {f"cdi.k8s.io/gpushare_{UID}_4d1b1f2a": ",".join(uuids)}
    if "device-nodes" in strategies:
        made.add("nodes")
        gpus = [d for d in answer["devices"] if d[len("/dev/nvidia")].isdigit() or d.startswith("/dev/nvidia-caps/")]
        control = ["/dev/nvidiactl -> /dev/nvidiactl (rw)", "/dev/nvidia-uvm -> /dev/nvidia-uvm (rw)"]
        answer["devices"] = [device.replace("(rw)", "(rwm)") for device in gpus + control]
    if "volume-mounts" in strategies:
        made.add("null")
        answer["mounts"] = [m.replace("(rw)", "(ro)") if m.startswith("/dev/null") else m for m in answer["mounts"]]
    if "mps" in case:
        made.add("mps")
        answer["env"] |= {
            "CUDA_MPS_PIPE_DIRECTORY": "/run/gpushare-mps/pipe",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M",
            "CUDA_VISIBLE_DEVICES": GPUS[0].uuid,
        }
        mounts = ["/run/gpushare-mps/pipe -> /run/gpushare-mps/pipe (rw)", "/dev/shm -> /dev/shm (rw)"]
        answer["mounts"] = [m for m in answer["mounts"] if m.startswith("/dev/null")] + mounts
    return answer, made


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    """Without GPUShare's variables, which shares by MPS have under any name, and with the annotation's hash left out."""
    found["env"] = {name: value for name, value in found["env"].items() if not name.startswith("ALIYUN_COM_")}
    found["annotations"] = {name.rpartition("_")[0]: value for name, value in found["annotations"].items()}
    return found | {"mounts": sorted(found["mounts"])}


@pytest.mark.parametrize("question", sorted(THEIRS))
def test_our_answer_is_theirs_but_for_the_listed_differences(question: str) -> None:
    case, strategies, ids = question.split("; ")
    expected, _ = as_ours(THEIRS[question], case, strategies)
    assert _compared(ours(case, strategies, ids)) == _compared(expected)


def test_every_listed_difference_is_one() -> None:
    made = {one for question in THEIRS for one in as_ours(THEIRS[question], *question.split("; ")[:2])[1]}
    assert made == set(DIFFERENCES.values())


def test_replicas_that_are_shares_are_limited_to_their_part() -> None:
    """Under mps: two of four replicas of GPU 0 are a half, one of GPU 1 a quarter."""
    terms = ReplicaLayout(4, Sharing.SHARES)
    served = ServedUnits(NVIDIA_GPU_RESOURCE, terms)
    devices = [*served.ids(GPUS[0].uuid)[:2], served.ids(GPUS[1].uuid)[3]]
    spec = replace(container("cuda"), requests={NVIDIA_GPU_RESOURCE: 3})
    names = ResourceNames(gpu=(NVIDIA_GPU_RESOURCE,), nvidia=NvidiaNames(sharing=Sharing.SHARES))
    policy = EditPolicy(names=names, config=CONFIG, isolation="mps")
    edits = edits_for(pod("p", spec, uid=UID), spec, GPUS, policy, units_of(devices))
    assert isinstance(edits, ContainerEdits)
    env = dict(edits.env)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=12288M,1=6144M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
