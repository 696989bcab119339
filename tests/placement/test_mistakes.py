"""What is wrong with a pod's requests, and what to write instead: one sentence for every face of the product."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.kube.pods import MAX_COMPARED, read_pod_json
from gpushare_agent.core.placement.mistakes import NO_OFFER, Offer, mistakes
from tests.support_core import GPU_MEM_NAMES as NAMES
from tests.support_json import undecoded

CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
OFFER = Offer(frozenset({CORES, MEMORY, "nvidia.com/gpu"}), 4, 24576)


def said(limits: dict[str, Any], offer: Offer = OFFER, place: str = "containers", **spec: Any) -> str:
    asking = {"name": "c", "resources": {"limits": limits}}
    raw = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main"}], place: [asking], **spec}}
    return mistakes(read_pod_json(undecoded(raw)), NAMES, offer)


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        # bytes, MiB and parts for blocks
        ({CORES: 30, MEMORY: "4Gi"}, f"Write {MEMORY}: 16 for 4 GiB."),
        ({CORES: 30, MEMORY: "1Mi"}, f"Write {MEMORY}: 1 for 256 MiB."),
        ({CORES: 30, MEMORY: "4G"}, f"Write {MEMORY}: 15 for 3.75 GiB."),
        ({CORES: 30, MEMORY: "999999999"}, f"Write {MEMORY}: 4 for 1 GiB."),
        ({CORES: 30, MEMORY: "4096"}, f"Write {MEMORY}: 96 (24 GiB) or less, or 16 for 4 GiB."),
        ({CORES: 30, MEMORY: "97"}, f"Write {MEMORY}: 96 (24 GiB) or less."),
        ({CORES: 200, MEMORY: "1000"}, f"more than 2 GPUs have. Write {MEMORY}: 192 (48 GiB) or less"),
        ({CORES: 30, MEMORY: "0.5"}, f"Write {MEMORY}: 2 for 512 MiB."),
        ({CORES: 30, MEMORY: "2500m"}, f"Write {MEMORY}: 10 for 2.5 GiB."),
        ({CORES: 30, MEMORY: "30%"}, f"Write {MEMORY} in units of 256 MiB."),
        # parts of a GPU, and too many of them
        ({CORES: "0.5", MEMORY: 16}, f"Write {CORES}: 50, in 1/100 of a GPU's compute."),
        ({CORES: "30%", MEMORY: 16}, f"Write {CORES}: 30, in 1/100"),
        ({CORES: "300m", MEMORY: 16}, f"Write {CORES}: 30, in 1/100"),
        ({CORES: "1.5", MEMORY: 16}, f"Write {CORES}: 200, in 1/100"),
        ({CORES: "-1", MEMORY: 16}, f"Write {CORES}, in 1/100"),
        ({CORES: "1e999", MEMORY: 16}, f"Write {CORES}, in 1/100"),
        ({CORES: "1600", MEMORY: 16}, f"1600 cores are 16 GPUs, and no node has more than 4. Write {CORES}: 400 or less."),
        ({CORES: "150", MEMORY: 16}, "the next valid numbers of cores are 100 and 200."),
        ({CORES: 30}, f"without memory: add {MEMORY}, in blocks of 256 MiB."),
        ({MEMORY: 16}, f"memory without cores: add {CORES}."),
        # other names
        ({"tencent.com/vcuda-cores": 30, MEMORY: 16}, f"no tencent.com/vcuda-cores. Write {CORES}: 30, in"),
        ({"tencent.com/vcuda_core": "0.3", MEMORY: 16}, f"Write {CORES}: 30, in"),
        ({"nvidia.com/vcuda-core": 30, MEMORY: 16}, f"Write {CORES}: 30, in"),
        ({"vcuda-core": 30, MEMORY: 16}, f"Write {CORES}: 30, in"),
        ({CORES: 30, "tencent.com/vcuda-mem": "4Gi"}, f"Write {MEMORY}: 16 for 4 GiB."),
        ({CORES: 30, "nvidia.com/vcuda-memory": 16}, f"Write {MEMORY}: 16 for 4 GiB."),
        # other programs
        (
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30},
            f"no nvidia.com/gpumem and no nvidia.com/gpucores of HAMi. Write {CORES}: 30 and {MEMORY}: 12.",
        ),
        ({"nvidia.com/gpumem": "4Gi"}, f"Write {CORES}: 1 to 99 and {MEMORY}: 16."),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30}, f"Write {CORES}, in 1/100 of a GPU's compute, and {MEMORY}"),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": "half"}, f"of HAMi. Write {CORES}: 100."),
        ({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": 100}, f"of vgpu-manager. Write {CORES}: 100."),
        ({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}, f"of Volcano. Write {CORES}: 1 to 99 and"),
        ({"aliyun.com/gpu-mem": 4}, f"of GPUShare. Write {CORES}: 1 to 99 and {MEMORY}: 16."),
    ],
)  # fmt: skip
def test_each_mistake_says_what_to_write(limits: dict[str, Any], remedy: str) -> None:
    """In whatever container it stands."""
    assert remedy in said(limits), said(limits)
    assert said(limits).startswith("container c: ")
    assert said(limits, place="initContainers") == f"init {said(limits)}"


@pytest.mark.parametrize(
    "limits",
    [
        {CORES: 30, MEMORY: 16},
        {CORES: "0.4k", MEMORY: "0.384k"},
        {CORES: 400},
        {"nvidia.com/gpu": 1},
        {"amd.com/gpu": 1, "nvidia.com/mig-1g.5gb": 1, "example.com/memory": "4Gi", "cpu": "500m", "memory": "4Gi"},
        {},
    ],
)
def test_a_right_request_and_other_devices_are_no_mistake(limits: dict[str, Any]) -> None:
    """Nor what another program's scheduler reads, or any node offers."""
    assert said(limits) == ""
    assert said({"nvidia.com/gpumem": 3000}, schedulerName="hami-scheduler") == ""
    names = frozenset({"aliyun.com/gpu-mem", "nvidia.com/vgpu-number", "tencent.com/vcuda-cores"})
    for name in names:
        assert said({name: 1}, Offer(names, 4, 24576)) == ""
    whole_family = {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": 30, "nvidia.com/vgpu-memory": 1024}
    assert said(whole_family, Offer(names, 4, 24576)) == "", "its scheduler alone reads the others"
    assert said({CORES: 1600, MEMORY: 4096}, NO_OFFER) == "", "the size of the nodes is not known"


def test_requests_beside_limits_and_those_of_the_pod() -> None:
    """Where Kubernetes takes none: the field, and the right place."""
    asking = {"name": "c", "resources": {"limits": {CORES: 30, MEMORY: 16}, "requests": {CORES: 20}}}
    raw = {"spec": {"containers": [asking]}}
    assert mistakes(read_pod_json(undecoded(raw)), NAMES) == (
        f"container c: {CORES} is 20 in requests and 30 in limits. Write it in limits alone."
    )
    asking["resources"] = {"requests": {CORES: 20}}
    assert f"{CORES} is 20 in requests and not in limits." in mistakes(read_pod_json(undecoded(raw)), NAMES)
    of_pod = said({}, resources={"limits": {"tencent.com/vcuda_core": 30}})
    assert of_pod == f"spec.resources of the pod: write {CORES} in resources.limits of the container that computes."


@given(
    st.dictionaries(
        st.text(max_size=30) | st.sampled_from([CORES, MEMORY]),
        st.text(max_size=20) | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_whatever_a_tenant_writes(limits: dict[str, Any]) -> None:  # fmt: skip
    """A text of bounded length, and no exception."""
    assert len(said(limits)) < 3000


def test_so_many_names_are_compared() -> None:
    """A pod of a thousand containers holds the loop for milliseconds."""
    many = {f"tencent.com/vcuda-{n:04}-core": 1 for n in range(MAX_COMPARED + 1)}
    raw = {"spec": {"containers": [{"name": f"c{n}", "resources": {"limits": many}} for n in range(1000)]}}
    assert mistakes(read_pod_json(undecoded(raw)), NAMES).count("Write") == 3
