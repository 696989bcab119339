"""What the containers of a claim get: per request, per container, per isolation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim, prepare_claim
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.claims.claim import ClaimPolicy, read_claim
from gpushare_agent.core.claims.devices import device_name
from gpushare_agent.core.model.directory_names import is_container_name
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.pods import ContainerKind, Pod
from tests.dra.support_claims import (
    NODE,
    admin,
    edit_policy,
    gpu_config,
    raw_claim,
    result,
    share_config,
    uid_of,
    using,
    whole,
)
from tests.support_core import inventory, pod
from tests.support_json import undecoded, written

REQUESTS = st.one_of(
    st.sampled_from(["a", "a-0", "a-0-2", "a/b", "a/c", "x" * 63, "x" * 57 + "-y", "x" * 57 + "-z", "x" * 61]),
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True),
)


def prepare(raw: dict[str, Any], *pods: Pod, policy: EditPolicy | None = None) -> PreparedClaim | Refused:
    gpus = {device_name(gpu.uuid): gpu for gpu in inventory(4).gpus}
    read = read_claim(undecoded(raw), pool=NODE, policy=ClaimPolicy(nvidia_names=True))
    return prepare_claim(read, gpus, pods, policy or edit_policy(), 256)


def prepared(raw: dict[str, Any], *pods: Pod, policy: EditPolicy | None = None) -> PreparedClaim:
    made = prepare(raw, *pods, policy=policy)
    assert isinstance(made, PreparedClaim), made
    return made


def env_of(made: PreparedClaim, position: int = 0) -> dict[str, str]:
    """Of the CDI device of one result."""
    by_name = {device["name"]: device["containerEdits"] for device in written(made.spec)["devices"]}
    edits = by_name[made.results[position].cdi_devices[0].partition("=")[2]]
    return dict(pair.split("=", 1) for pair in edits["env"])


def user(name: str, *requests: str) -> Pod:
    """A pod with one container for each of the requests, '' for the claim as a whole."""
    containers = [using(f"c{n}", ("g", request)) for n, request in enumerate(requests)]
    return pod(name, *containers, claims={"g": "claim-1"})


def limits(env: dict[str, str]) -> dict[str, str]:
    """Those of memory of each GPU, and of compute."""
    names = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    return {name: env[name] for name in names if name in env}


def limited(memory: str, percent: int) -> dict[str, str]:
    return {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": memory, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}


def test_a_share_has_the_edits_of_its_isolation_and_its_gpu() -> None:
    made = prepared(raw_claim(result(index=1)), user("p", ""))
    assert made.results[0].cdi_devices == (f"gpushare-agent/claim=gpu-1.gpu.{uid_of(1)}",)
    env = env_of(made)
    assert limits(env) == limited("0=16384M", 40) and env["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    edits = written(made.spec)["devices"][0]["containerEdits"]
    nodes = ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert [node["path"] for node in edits["deviceNodes"]] == nodes
    assert "/pipe" in [mount["hostPath"] for mount in edits["mounts"]]


def test_two_requests_in_one_container_are_limited_each_in_the_order_of_the_gpus() -> None:
    """The container sees the GPUs by index, whatever the claim's order."""
    made = prepared(
        raw_claim(result("a", 2, cores=50, memory="8Gi"), result("b", 0, cores=20, memory="4Gi")), user("p", "")
    )
    assert limits(env_of(made, 0)) == limits(env_of(made, 1)) == limited("0=4096M,1=8192M", 20)
    assert env_of(made, 0)["NVIDIA_VISIBLE_DEVICES"] == "GPU-0,GPU-2"


def test_containers_that_name_a_request_each_get_that_one_alone() -> None:
    made = prepared(raw_claim(result("a", 2, cores=50, memory="8Gi"), result("b", 0, cores=20)), user("p", "a", "b"))
    assert limits(env_of(made, 0)) == limited("0=8192M", 50)
    assert limits(env_of(made, 1)) == limited("0=16384M", 20)


def kinds(*names: ContainerKind) -> Pod:
    """Containers of these kinds, which use the claim as a whole."""
    containers = [replace(using(f"c{n}", ("g", "")), kind=kind) for n, kind in enumerate(names)]
    return pod("p", *containers, claims={"g": "claim-1"})


def test_vcuda_limits_one_container_where_the_driver_lists_no_other_processes() -> None:
    """NVIDIA's open kernel modules from 515; until then, and with the proprietary one, it lists all of the host."""
    vcuda = edit_policy("vcuda")
    for version, is_open, can_share in (
        ("510.47.03", True, True),
        ("580.65.06", False, True),
        ("580.65.06", True, False),
    ):
        policy = replace(vcuda, kernel_module=KernelModule(version=version, is_open=is_open))
        made = prepare(raw_claim(result()), user("p", "", ""), policy=policy)
        assert isinstance(made, Refused) is not can_share, made
        prepared(raw_claim(result()), user("p", ""), policy=policy)


@pytest.mark.parametrize(
    ("isolation", "changes", "why"),
    [
        ("gpushare", {"mounts": ("/etc",)}, "container c1 mounts a volume at /etc"),
        ("gpushare", {"env": {"LD_PRELOAD": "/lib/libcuda.so.1"}}, "container c1 sets LD_PRELOAD (libcuda.so)"),
        ("gpushare", {"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}, ""),
        ("vcuda", {"mounts": ("/etc/vcuda",)}, "container c1 mounts a volume at /etc/vcuda"),
    ],
)
def test_a_spec_that_would_lift_a_limit_is_refused(isolation: str, changes: dict[str, Any], why: str) -> None:
    """By the name of its container. A variable that the edits set replaces the spec's, so it lifts nothing; nor does what
    another container has, or one with a whole GPU."""
    one = raw_claim(result("a"), result("b", 1))
    main, side = using("c0", ("g", "b")), replace(using("c1", ("g", "a")), **changes)
    made = prepare(one, pod("p", main, side, claims={"g": "claim-1"}), policy=edit_policy(isolation))
    assert made.detail.startswith(why) if isinstance(made, Refused) else not why, made
    prepared(raw_claim(whole("a")), pod("p", side, claims={"g": "claim-1"}), policy=edit_policy(isolation))
    other = pod("p", main, replace(side, claims=()), claims={"g": "claim-1"})
    prepared(raw_claim(result("b")), other, policy=edit_policy(isolation))


def test_containers_whose_requests_overlap_are_refused() -> None:
    """One has both GPUs, the other the second alone: no set of variables fits both."""
    made = prepare(raw_claim(result("a", 0), result("b", 1)), user("p", "", "b"), policy=edit_policy("mps"))
    assert isinstance(made, Refused) and "p/c0 and p/c1" in made.detail


def test_whole_gpus_are_not_limited() -> None:
    made = prepared(raw_claim(whole("a", 0), whole("b", 1)), user("p", ""))
    assert [one.is_whole for one in made.results] == [True, True]
    assert env_of(made) == {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"}


@given(st.lists(st.tuples(REQUESTS, st.integers(0, 3)), min_size=1, max_size=32, unique=True))
def test_no_two_results_of_a_claim_have_one_key(results: list[tuple[str, int]]) -> None:
    """Each key is a container's name for the paths, sockets and annotations that have it."""
    made = prepared(raw_claim(*(result(name, index, cores=1, memory="256Mi") for name, index in results)))
    names = [one.key.container for one in made.results]
    assert len(set(names)) == len(results) and all(map(is_container_name, names))
    assert {one.view for one in made.results} <= set(names)


def test_a_result_has_the_name_that_it_had_unless_another_has_it() -> None:
    """Files of shares that run are under it."""
    made = prepared(raw_claim(result("a", 0), result("a", 1), result("a-0", 2)), user("p", "a", "a-0"))
    assert [one.key.container for one in made.results] == ["a-0", "a-1", "a-0-2"]
    assert [one.view for one in made.results] == ["a-0", "a-0", "a-0-2"]


@pytest.mark.parametrize("name", ISOLATIONS)
def test_admin_access_is_not_limited_by_any_isolation(name: str) -> None:
    """Also for several containers and pods at once, which no share may have under some of them."""
    made = prepared(
        raw_claim(admin("a", 1), users=["p", "q"]), user("p", "", ""), user("q", ""), policy=edit_policy(name)
    )
    whole_gpu = prepared(raw_claim(whole("a", 1)), user("p", ""), policy=edit_policy(name))
    assert env_of(made) == env_of(whole_gpu) and env_of(made)["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    edits = [written(one.spec)["devices"][0]["containerEdits"] for one in (made, whole_gpu)]
    assert edits[0]["deviceNodes"] == edits[1]["deviceNodes"]


def test_admin_access_beside_a_share_in_one_container_limits_the_share_alone() -> None:
    """The share's isolation is the container's, whichever the admin access asks for; of one GPU by both it has all."""
    beside = prepared(
        raw_claim(admin("a", 0), result("b", 1), config=[share_config(requests=["a"], isolation="none")]), user("p", "")
    )
    assert limits(env_of(beside)) == limited("0=24576M,1=16384M", 40)
    assert [(one.view, one.isolation) for one in beside.results] == [("b", "mps")] * 2
    same = prepared(raw_claim(result("b", 1), admin("a", 1)), user("p", ""))
    assert env_of(same) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}


def test_a_claim_of_an_extended_resource_is_named_by_no_container() -> None:
    """Each request is one container's: their edits are not mixed."""
    made = prepared(
        raw_claim(whole("container-0-request-0", 0), whole("container-1-request-0", 1)), pod("p", using("c"))
    )
    assert [env_of(made, n)["NVIDIA_VISIBLE_DEVICES"] for n in (0, 1)] == ["GPU-0", "GPU-1"]


def test_a_claim_chooses_among_the_isolations_that_the_node_allows() -> None:
    policy = edit_policy("gpushare", "mps")
    chosen = prepared(raw_claim(result(), config=[share_config(isolation="mps")]), policy=policy)
    assert chosen.results[0].isolation == "mps" and "CUDA_MPS_PIPE_DIRECTORY" in env_of(chosen)
    refused = prepare(raw_claim(result(), config=[share_config(isolation="none")]), policy=policy)
    assert isinstance(refused, Refused) and "allows gpushare, mps" in refused.detail


def test_all_of_the_memory_and_no_cores_is_the_whole_gpu() -> None:
    """By NVIDIA's names a claim asks for neither; who has all the memory has the GPU. Some of the cores are a share."""
    made = prepared(raw_claim(result("a", 0, cores=0, memory="24Gi"), result("b", 1, cores=30, memory="24Gi")))
    assert [(one.is_whole, one.cores) for one in made.results] == [(True, 100), (False, 30)]
    assert limits(env_of(prepared(raw_claim(result(cores=0, memory="24Gi")), user("p", "")))) == {}


MPS_50 = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}


def test_the_isolation_is_that_of_the_containers_that_use_a_request() -> None:
    """NVIDIA's example gpu-test5: time slicing for two containers, MPS for two others, of one claim."""
    config = [gpu_config("TimeSlicing", requests=["ts"]), gpu_config("MPS", requests=["mps"], mpsConfig=MPS_50)]
    raw = raw_claim(whole("ts", 0), whole("mps", 1), config=config)
    made = prepared(raw, user("p", "ts", "ts", "mps", "mps"), policy=edit_policy("gpushare", "mps"))
    assert [(one.isolation, one.is_whole) for one in made.results] == [("none", True), ("mps", True)]
    assert env_of(made, 0) == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"}
    env = env_of(made, 1)
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"
    together = prepared(raw, user("p", ""), policy=edit_policy("gpushare", "mps"))
    assert {one.isolation for one in together.results} == {"mps"}, "a container with both has one daemon"
    assert env_of(together)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=24576M,1=10240M"


def test_limits_of_mps_are_by_place_in_the_order_of_uuids_or_by_uuid() -> None:
    """Of the GPUs of one configuration: another one's are counted from the start."""
    per_device = {"0": "4Gi", "GPU-3": "2Gi"}
    config = [
        gpu_config("MPS", requests=["a"], mpsConfig={"defaultPerDevicePinnedMemoryLimit": per_device}),
        gpu_config("MPS", requests=["b"], mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"0": "1Gi"}}),
    ]
    raw = raw_claim(whole("a", 3), whole("a", 2), whole("b", 0), config=config)
    made = prepared(raw, user("p", "a", "b"), policy=edit_policy("mps"))
    assert env_of(made, 0)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M,1=2048M"
    assert env_of(made, 2)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
    wrong = gpu_config("MPS", mpsConfig={"defaultPerDevicePinnedMemoryLimit": {"7": "1Gi"}})
    refused = prepare(raw_claim(whole(), config=[wrong]), policy=edit_policy("mps"))
    assert isinstance(refused, Refused) and "has '7', which is neither UUID nor place" in refused.detail


def test_gpu_config_lifts_no_limit_that_the_node_keeps() -> None:
    """Time slicing of a share is no isolation, which a node must allow; MPS has limits of whole GPUs."""
    share = raw_claim(result(), config=[gpu_config("TimeSlicing")])
    refused = prepare(share, user("p", ""))
    assert isinstance(refused, Refused) and "its isolation is 'none', and this node allows mps" in refused.detail
    made = prepared(share, user("p", ""), policy=edit_policy("mps", "none"))
    assert env_of(made) == {"NVIDIA_VISIBLE_DEVICES": "GPU-0"} and not made.results[0].is_whole
    for raw, words in (
        (raw_claim(result(), config=[gpu_config("MPS")]), "request gpu has a share"),
        (raw_claim(whole(), config=[gpu_config("MPS")]), "this node allows gpushare"),
    ):
        refused = prepare(raw, user("p", ""), policy=edit_policy("gpushare"))
        assert isinstance(refused, Refused) and words in refused.detail


def test_under_vcuda_the_containers_of_a_view_have_one_directory() -> None:
    policy = edit_policy("vcuda")
    raw = raw_claim(result("a", 0, cores=20, memory="4Gi"), result("b", 0, cores=30, memory="8Gi"))
    made = prepared(raw, user("p", "", ""), policy=policy)
    for device in written(made.spec)["devices"]:
        (mount,) = device["containerEdits"]["mounts"]
        assert (mount["hostPath"], mount["containerPath"]) == (f"/vm/{uid_of(1)}/a", "/etc/vcuda")
    assert [one.view for one in made.results] == ["a", "a"]
    refused = prepare(raw_claim(result("a", 0), result("b", 1)), user("p", ""), policy=policy)
    assert isinstance(refused, Refused) and "shares of several GPUs" in refused.detail
    each = prepared(raw_claim(result("a", 0), result("b", 1)), user("p", "a", "b"), policy=policy)
    assert [one.view for one in each.results] == ["a", "b"]


def drivers(*, by_agent: bool, name: str = "driver") -> EditPolicy:
    return edit_policy(name, is_memory_limited_by_agent=by_agent)


def made_for(name: str, *results: dict[str, Any]) -> dict[str, Any]:
    """A claim that was made for a pod."""
    raw = raw_claim(*results, users=[name])
    raw["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": f"uid-{name}", "controller": True}
    ]
    return raw


@pytest.mark.parametrize("name", ["driver", "gpushare+driver", "mps+driver"])
@pytest.mark.parametrize("by_agent", [True, False])
def test_the_driver_limits_a_claim_that_one_pod_uses(name: str, by_agent: bool) -> None:
    made = prepared(made_for("p", result()), user("p", ""), policy=drivers(by_agent=by_agent, name=name))
    env = env_of(made)
    assert env["NVIDIA_GPU_MEMORY_LIMIT"] == env["NVIDIA_GPU_MEMORY_REQUEST"] == "16384"


def test_the_driver_does_not_limit_what_has_no_cgroup_of_its_own() -> None:
    """Several pods have none in common, nor have containers for NVIDIA's toolkit, which knows these alone."""

    def refused(raw: dict[str, Any], *pods: Pod, by_agent: bool = True) -> Refused:
        found = prepare(raw, *pods, policy=drivers(by_agent=by_agent))
        assert isinstance(found, Refused)
        return found

    assert "by a ResourceClaimTemplate" in refused(raw_claim(result()), user("p", "")).detail
    others = made_for("p", result())
    others["status"]["reservedFor"].append({"resource": "pods", "name": "q", "uid": "uid-q"})
    assert "by a ResourceClaimTemplate" in refused(others, user("p", "")).detail
    assert refused(made_for("p", result())).reason is RefusalReason.NOT_READY
    two, own = made_for("p", result()), made_for("p", result("a", 0), result("b", 1))
    assert "containers c0 and c1 share it" in refused(two, user("p", "", ""), by_agent=False).detail
    prepared(two, user("p", "", ""), policy=drivers(by_agent=True))
    prepared(own, user("p", "a", "b"), policy=drivers(by_agent=False))
    prepared(raw_claim(whole()), policy=drivers(by_agent=False))
