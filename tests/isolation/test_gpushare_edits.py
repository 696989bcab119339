"""Isolation gpushare: what a container gets, what is refused, and the limits that are written for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation import GpuShare, IsolationRequest
from gpushare_agent.agent.isolation.gpushare.edits import ISOLATION, edit_gpushare, live_limits
from gpushare_agent.agent.isolation.gpushare.format import MOST_GPUS, GpuLimits
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation, ClaimRef, ClaimShare, ContainerEdits
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, MIB, GpuUuid, unit_id
from gpushare_agent.core.model.pods import ContainerSpec
from gpushare_agent.core.model.resources import ResourceKind
from tests.isolation.support_gpushare import LIMITS
from tests.isolation.support_requests import GPUS, UID, request
from tests.support_core import NAMES, allocation, container, ids, mig_instance, pod


def with_env(**env: str) -> IsolationRequest:
    return request(container=replace(container("cuda"), env=env))


def read_container(**raw: Any) -> ContainerSpec:
    """One with a share, as the API server has it."""
    own = raw | {"name": "cuda", "resources": {"limits": {"tencent.com/vcuda-core": "30"}}}
    document = {"metadata": {"uid": UID, "name": "web", "namespace": "default"}, "spec": {"containers": [own]}}
    return parse_pod(read_pod_json(json.dumps(document).encode()), NAMES.names).containers[0]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (with_env(NVIDIA_VISIBLE_DEVICES="all"), "sets NVIDIA_VISIBLE_DEVICES in its spec"),
        (request(cores=0), "which makes a limit of 0 under isolation gpushare. "),
        (request(memory_mib=0), "which makes a limit of 0 under isolation gpushare. "),
    ],
)
def test_a_share_that_could_not_be_kept_is_refused(wanted: IsolationRequest, text: str) -> None:
    refused = edit_gpushare(wanted)
    assert isinstance(refused, Refused) and text in refused.detail


@pytest.mark.parametrize(
    "value",
    [
        "libcuda.so.1",
        "libcuda.so",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
        "/usr/lib/libjemalloc.so.2:libcuda.so.1",
        "libjemalloc.so.2 /lib/$LIB/libcuda.so.1",
        "a.so:" * 500 + "libcuda.so.1",
    ],
)
def test_the_driver_s_library_may_not_be_preloaded_before_the_isolation_s(value: str) -> None:
    """Which would be first, for programs that are linked to it. One is named behind what is read of a variable."""
    refused = edit_gpushare(request(container=read_container(env=[{"name": "LD_PRELOAD", "value": value}])))
    assert isinstance(refused, Refused) and "sets LD_PRELOAD (" in refused.detail and len(refused.detail) < 600


PRELOADED = ("", "libjemalloc.so.2", "/opt/libcuda-tools.so", "/usr/local/libcuda.so.d/libtrace.so")
MOUNTED = ("/data", "/etc/ssl", "/usr/local/gpushare2", "/usr/local/vgpu")


@pytest.mark.parametrize(
    "wanted",
    [
        *(with_env(LD_PRELOAD=value) for value in PRELOADED),
        *(request(container=replace(container("cuda"), mounts=(path,))) for path in MOUNTED),
        with_env(NVIDIA_VISIBLE_DEVICES="void"),
    ],
)
def test_other_libraries_volumes_elsewhere_and_gpus_by_cdi_lift_no_limit(wanted: IsolationRequest) -> None:
    assert isinstance(edit_gpushare(wanted), ContainerEdits)


PRELOADS = ["/etc/ld.so.preload", "/etc/ld-nix.so.preload"]
PATHS = ["/etc/vcuda", "/etc/vcuda/vcuda.sock", *PRELOADS, "/usr/local/gpushare", "/usr/local", "/etc", "/"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [*((path, path) for path in PATHS), ("/etc/../etc/vcuda/", "/etc/vcuda"), ("//usr/local", "/usr/local")],
)
def test_a_volume_over_the_files_of_the_limit_is_refused(path: str, shown: str) -> None:
    """Above them too: whoever may write in the volume could lead their directory elsewhere."""
    own = read_container(volumeMounts=[{"name": "v", "mountPath": each} for each in ("/data", path)])
    refused = edit_gpushare(request(container=own))
    assert isinstance(refused, Refused) and f"mounts a volume at {shown}, by which" in refused.detail
    assert edit_gpushare(request(100, is_whole=True, container=own)) == ContainerEdits()


def test_a_share_of_a_mig_instance_is_limited_unless_the_driver_names_it_in_the_old_way() -> None:
    """Before driver 470: by GPU, GPU instance and compute instance, which gpushare.config has no room for."""
    instance = mig_instance(1, 0, 0)
    assert ISOLATION.edits(request(30, 1024, gpus=[instance])) == ISOLATION.edits(request())
    old = replace(instance, uuid=GpuUuid(f"MIG-GPU-{UID}/7/0"))
    refused = ISOLATION.edits(request(30, 1024, gpus=[old]))
    assert isinstance(refused, Refused) and "Update the driver" in refused.detail


@pytest.mark.parametrize(("ceiling", "expected"), [("60", 6000), ("30", None), ("0", None), ("10", None)])
def test_the_limits_are_those_of_the_share_and_its_elastic_ceiling(ceiling: str, expected: int | None) -> None:
    owner = pod("share", container("cuda", cores=30, blocks=8), uid=UID, annotations={CORE_LIMIT_ANNOTATION: ceiling})
    own = allocation(owner, "cuda", ids(0, range(30)), ids(0, range(8)))
    gpus = {gpu.uuid: gpu for gpu in GPUS}
    assert live_limits([own], owner, gpus, NAMES) == (replace(LIMITS, ceiling=expected),)
    assert live_limits([own], owner, {}, NAMES) is None


def test_shares_of_several_gpus_and_whole_ones_beside_them_get_the_library() -> None:
    whole = GpuShare(gpu=GPUS[1], cores=100, memory_mib=0, is_whole=True)
    mixed = request(shares=(*request().shares, whole))
    assert edit_gpushare(request(gpus=GPUS[:2])) == edit_gpushare(mixed) == edit_gpushare(request())
    refused = edit_gpushare(request(gpus=GPUS[:1] * (MOST_GPUS + 1)))
    assert isinstance(refused, Refused) and "shares on 17 GPUs" in refused.detail


def gpu_memory(memory_mib: int) -> dict[GpuUuid, Gpu]:
    return {gpu.uuid: replace(gpu, memory_mib=memory_mib) for gpu in GPUS}


def replicas(*units: tuple[int, str]) -> Allocation:
    """Of `(index, terms)`, such as (0, "4s"): one of four replicas of GPU 0."""
    owner = pod("replicas", container("cuda"), uid=UID)
    found = frozenset(unit_id(GPUS[index].uuid, number, terms) for number, (index, terms) in enumerate(units))
    gpus = tuple(dict.fromkeys(GPUS[index].uuid for index, _ in units))
    return replace(allocation(owner, "cuda", [], []), ids={ResourceKind.GPU: found}, gpus=gpus)


def test_replicas_of_several_gpus_have_the_limits_of_each() -> None:
    """Two of four of one and one of three of another; who has all of a GPU is not limited there."""
    found = live_limits([replicas((0, "4s"), (0, "4s"), (1, "3s"))], None, gpu_memory(9000), NAMES)
    assert found == (
        GpuLimits(uuid=GPUS[0].uuid, memory_bytes=4500 * MIB, cores=5000),
        GpuLimits(uuid=GPUS[1].uuid, memory_bytes=3000 * MIB, cores=3300),
    )
    found = live_limits([replicas((0, "2s"), (0, "2s"), (1, "3s"))], None, gpu_memory(9000), NAMES)
    assert found is not None and found[0] == GpuLimits(uuid=GPUS[0].uuid)


def claimed(index: int, cores: int, blocks: int, name: str) -> Allocation:
    owner = pod("claim", container(name), uid=UID)
    own = allocation(owner, name, ids(index, range(cores)), ids(index, range(blocks)))
    share = ClaimShare(
        ref=ClaimRef("default", "gpus", UID), shown_as="gpus", request=name, isolation="gpushare", view="a"
    )
    return replace(own, gpus=(GPUS[index].uuid,), claim=share, is_whole=cores >= 100)


def test_a_claims_results_have_a_limit_on_each_gpu_and_together_where_it_is_one() -> None:
    """Memory alone gets compute in proportion; a whole GPU next to shares is not limited."""
    parts = [claimed(0, 30, 8, "a"), claimed(0, 10, 4, "b"), claimed(1, 0, 16, "c"), claimed(2, 100, 32, "d")]
    gpus = gpu_memory(8192)
    assert live_limits(parts, None, gpus, NAMES) == (
        GpuLimits(uuid=GPUS[0].uuid, memory_bytes=3072 * MIB, cores=4000),
        GpuLimits(uuid=GPUS[1].uuid, memory_bytes=4096 * MIB, cores=5000),
        GpuLimits(uuid=GPUS[2].uuid),
    )
    assert live_limits(parts[3:], None, gpus, NAMES) is None
