"""Why a pod that wants a MIG instance waits, from an API server with the node's slices and everybody's claims."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from gpushare_agent.kubectl.decisions.instances import ClaimCluster, ClaimJson, wanted_of
from tests.cli.support_cli import raw_list
from tests.cli.support_cluster_view import Cluster, Object, node, pod
from tests.cli.test_explain_waiting import explained

GPU = "GPU-1"
SIZES = {"1g.10gb": (1, range(7)), "3g.40gb": (4, (0, 4))}
RESOURCE = "nvidia.com/mig-3g.40gb"
Told = Callable[..., Awaitable[list[str]]]


def device(profile: str, start: int, *, taint: tuple[str, str] | None = None) -> Object:
    counters = {f"memory-slice-{slot}": {"value": "1"} for slot in range(start, start + SIZES[profile][0])}
    return {
        "name": f"gpu-1-mig-{profile.replace('.', '')}-{start}",
        "allowMultipleAllocations": True,
        "capacity": {"cores": {"value": "100", "requestPolicy": {"default": "100"}}},
        "attributes": {"type": {"string": "mig"}, "profile": {"string": profile}, "parentUUID": {"string": GPU}},
        "consumesCounters": [{"counterSet": "gpu-1", "counters": counters}],
        **({"taints": [{"key": taint[0], "value": taint[1], "effect": "NoSchedule"}]} if taint else {}),
    }


def slices(devices: Sequence[Object], *, generation: int = 3, name: str = "n") -> list[Object]:
    """The counters are in a slice of their own."""
    slots = {f"memory-slice-{slot}": {"value": "1"} for slot in range(8)}
    pool = {"name": name, "generation": generation, "resourceSliceCount": 2}
    common = {"driver": "gpushare-agent", "nodeName": name, "pool": pool}
    return [
        {
            "metadata": {"name": f"{name}-{generation}-c"},
            "spec": {**common, "sharedCounters": [{"name": "gpu-1", "counters": slots}]},
        },
        {"metadata": {"name": f"{name}-{generation}-d"}, "spec": {**common, "devices": list(devices)}},
    ]


def every_place(**taints: tuple[str, str]) -> list[Object]:
    return [
        device(profile, start, taint=taints.get(f"at{start}"))
        for profile, (_, starts) in SIZES.items()
        for start in starts
    ]


def selector(profile: str) -> list[Object]:
    return [{"cel": {"expression": f'device.attributes["gpushare-agent"].profile == "{profile}"'}}]


def claim(name: str, request: Mapping[str, Any], *, device: str = "", user: str = "") -> Object:
    results = [{"request": "r", "driver": "gpushare-agent", "pool": "n", "device": device}] if device else []
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"devices": {"requests": [{"name": "r", **request}]}},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": user, "uid": user}] if user else [],
        },
    }


def has(place: str, user: str) -> Object:
    return claim(f"of-{user}", {}, device=place, user=user)


@pytest.fixture
def told(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """The lines of `explain` for a pod with a claim, for a 3g.40gb unless `wants` is another request, or with limits.
    `answers` may have the claim's `constraints` and what the `scheduler` said."""

    async def told(
        *,
        pools: Sequence[Object] = (),
        claims: Sequence[Object] = (),
        classes: Sequence[Object] = (),
        wants: Mapping[str, Any] | None = None,
        nodes: Sequence[Object] = (),
        **answers: Any,
    ) -> list[str]:
        waits = pod("w", (0, 0))
        wants = wants or {"exactly": {"deviceClassName": "mig", "selectors": selector("3g.40gb")}}
        own = claim("mine", wants)
        own["spec"]["devices"]["constraints"] = answers.pop("constraints", [])
        if said := answers.pop("scheduler", ""):
            waits["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": said}]
        if "limits" not in wants:
            waits["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "mine"}]
        else:
            waits["spec"]["containers"][0]["resources"] = dict(wants)
        api = "/apis/resource.k8s.io/v1"
        lists = {
            f"{api}/resourceslices": raw_list(list(pools)),
            f"{api}/resourceclaims": raw_list([own, *claims]),
            f"{api}/deviceclasses": raw_list(list(classes)),
        }
        await explained(Cluster(list(nodes), [waits]), short_dir, **{**lists, **answers})
        return "".join(capsys.readouterr()).splitlines()

    return told


async def test_a_place_that_is_free_is_named(told: Told) -> None:
    """A claim of a slice of the first half leaves the other; a claim of another driver's device takes nothing."""
    held = [has("gpu-1-mig-1g10gb-2", "small"), has("gpu-1-mig-3g40gb-4", "others")]
    held[1]["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.nvidia.com"
    lines = await told(pools=slices(every_place()), claims=held)
    assert "  request   claim gpu" in lines
    assert f"  fits      now on GPU {GPU} of n: the scheduler has not tried again yet, or has another reason" in lines


async def test_who_has_the_slices_is_named_and_the_fewest_who_have_to_end(told: Told) -> None:
    """Of slices 0 to 3 pods have two, of 4 to 7 one pod has one: the end of that one is enough. ResourceSlices that were
    replaced do not count."""
    held = [
        has("gpu-1-mig-1g10gb-0", "a"),
        has("gpu-1-mig-1g10gb-1", "b"),
        has("gpu-1-mig-1g10gb-1", "bb"),
        has("gpu-1-mig-1g10gb-6", "c"),
    ]
    old = slices([{**device("3g.40gb", 0), "name": "gone", "consumesCounters": []}], generation=2)
    lines = await told(pools=[*old, *slices(every_place())], claims=held)
    users = "pod ns/a, pod ns/b, pod ns/bb, pod ns/c"
    at = lines.index(f"  GPUs      1 node: every place for an instance 3g.40gb is taken or blocked: {users}")
    assert lines[at + 1 : at + 4] == [
        "  to start now, one of:",
        "    - ask for 1g.10gb: there is room on n",
        f"    - the end of pod ns/c on GPU {GPU} of n",
    ]


async def test_an_instance_of_others_in_the_place_is_named(told: Told) -> None:
    """And a cordoned GPU by what puts it back."""
    conflict = ("gpushare-agent/mig-conflict", "an-instance-made-by-others-lies-there")
    cordoned = ("gpushare-agent/cordoned", "fan")
    lines = await told(pools=slices([device("3g.40gb", 0, taint=conflict)]))
    assert (
        f"  GPUs      1 node: every place for an instance 3g.40gb is taken or blocked: {conflict[0]} ({conflict[1]})"
        in lines
    )
    assert "  to start  no single change was found that would let it start now" in lines
    both = device("3g.40gb", 0, taint=cordoned)
    both["taints"].append({"key": conflict[0], "value": "out-of-service-fan", "effect": "NoSchedule"})
    lines = await told(pools=slices([both]))
    assert f"    - uncordon GPU {GPU} of n" in lines


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        (slices([device("1g.10gb", 0)]), "no MIG instance 3g.40gb, and no place for one: there are 1g.10gb"),
        (slices([]), "no MIG instance 3g.40gb, and no place for one: no GPU in MIG mode is for claims"),
        ([], "no node has ResourceSlices of this driver: are dra.gpus or mig.on_demand set?"),
    ],
)  # fmt: skip
async def test_a_node_without_the_profile_says_what_it_has(told: Told, pools: list[Object], said: str) -> None:
    assert any(line.startswith(f"  GPUs      1 node: {said}") for line in await told(pools=pools))


async def test_plain_limits_are_read_by_their_class(told: Told) -> None:
    """The scheduler makes the claim only when it places the pod. Those of all containers count."""
    of_class = {"extendedResourceName": RESOURCE, "selectors": selector("3g.40gb")}
    asked = {"pools": slices(every_place()), "classes": [{"metadata": {"name": "m"}, "spec": of_class}]}
    held = [has("gpu-1-mig-3g40gb-0", "a"), has("gpu-1-mig-3g40gb-4", "b")]
    lines = await told(claims=held, wants={"limits": {RESOURCE: "1"}}, **asked)
    assert f"  request   {RESOURCE}: 1" in lines
    assert "  GPUs      1 node: every place for an instance 3g.40gb is taken or blocked: pod ns/a, pod ns/b" in lines
    lines = await told(wants={"limits": {RESOURCE: "2"}}, **asked)
    assert any(line.startswith("  fits ") for line in lines)
    lines = await told(wants={"limits": {RESOURCE: "3"}}, **asked)
    assert any("there is room for 2 of 3 instances" in line for line in lines)


async def test_a_claim_of_any_profile_is_read_by_its_class(told: Told) -> None:
    """Its class's alone, where the claim names none."""
    expression = "device.driver == 'gpushare-agent' && device.attributes['gpushare-agent'].type == 'mig'"
    of_any = {"metadata": {"name": "any"}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
    mine = {"exactly": {"deviceClassName": "any"}}
    asked = {"pools": slices([device("3g.40gb", 0)]), "classes": [of_any], "wants": mine}
    lines = await told(claims=[has("gpu-1-mig-3g40gb-0", "a")], **asked)
    assert "  GPUs      1 node: every place for an instance is taken or blocked: pod ns/a" in lines
    lines = await told(**asked)
    assert any(line.startswith("  fits ") for line in lines)


async def test_a_plain_limit_that_nobody_serves_says_who_would(told: Told) -> None:
    """With why a GPU in MIG mode is not offered."""
    divided = node("n", [16, 16], sick=[1])
    annotations = divided["metadata"]["annotations"]
    annotations["gpushare-agent/gpus"] = annotations["gpushare-agent/gpus"].replace(
        '"is_healthy": false', '"is_healthy": false, "reason": "MIG mode is enabled and the GPU has no instances"'
    )
    lines = await told(wants={"limits": {RESOURCE: "1"}}, nodes=[divided])
    [line] = [one for one in lines if one.startswith("  GPUs  ")]
    assert f"1 node: no node offers {RESOURCE}: a device plugin does by nvidia.mig_strategy mixed" in line
    assert "1 node: MIG mode is enabled and the GPU has no instances" in line


async def test_a_cluster_without_claims_has_device_plugins(told: Told) -> None:
    kinds = ("resourceslices", "resourceclaims", "deviceclasses")
    missing = {f"/apis/resource.k8s.io/v1/{kind}": (404, {"kind": "Status", "message": "not found"}) for kind in kinds}
    lines = await told(wants={"limits": {RESOURCE: "1"}}, nodes=[node("n", [16])], **missing)
    assert any(f"no node offers {RESOURCE}" in line for line in lines)


async def test_without_the_right_to_list_the_schedulers_words_remain(told: Told) -> None:
    denied = {"/apis/resource.k8s.io/v1/resourceslices": (403, {"kind": "Status", "message": "forbidden"})}
    text = " ".join(await told(**denied))
    assert "The scheduler: nothing so far. The pod asks for claim gpu" in text and "resourceslices" in text


async def test_a_claim_of_another_kind_is_not_explained(told: Told) -> None:
    lines = await told(wants={"limits": {"example.com/fpga": "1"}})
    assert "The pod asks for example.com/fpga: 1" in " ".join(lines)


@pytest.mark.parametrize(
    ("more", "said", "changes"),
    [
        ({"count": 2}, "there is room for 1 of 2 instances; for the next, every place for an instance 3g.40gb is taken or "
         "blocked: pod ns/a, the pod's other instances",
         ["ask for 1: there is room on n", "the end of pod ns/a on GPU 7 of n"]),
        ({"count": 40}, "there is room for 1 of 40 instances; for the next", ["ask for 1: there is room on n"]),
        ({"capacity": {"requests": {"cores": "200"}}},
         "every place for an instance 3g.40gb is too small, taken or blocked: it has cores 100, and 200 is asked", []),
        ({"capacity": {"requests": {"vram": "1Gi"}}},
         "every place for an instance 3g.40gb is too small, taken or blocked: it has no capacity vram", []),
    ],
)  # fmt: skip
async def test_the_count_and_the_share_of_a_claim_count(
    told: Told, more: Object, said: str, changes: list[str]
) -> None:
    """One instance has room, and that is not what the pod asks for. A GPU is named by its index, as in other views."""
    places = every_place()
    for one in places:
        one["attributes"]["index"] = {"int": 7}
    wants = {"exactly": {"deviceClassName": "mig", "selectors": selector("3g.40gb"), **more}}
    lines = await told(pools=slices(places), claims=[has("gpu-1-mig-3g40gb-0", "a")], wants=wants)
    assert any(line.startswith(f"  GPUs      1 node: {said}") for line in lines)
    assert [line.removeprefix("    - ") for line in lines if line.startswith("    - ")] == changes


async def test_instances_of_one_gpu_are_looked_for_on_one(told: Told) -> None:
    """Each of two GPUs has one place; next to them is a whole GPU."""
    places = [device("3g.40gb", 0), {**device("3g.40gb", 4), "name": "other", "consumesCounters": []}]
    places[1]["attributes"] = {**places[1]["attributes"], "parentUUID": {"string": "GPU-2"}}
    whole = {
        "name": "whole",
        "allowMultipleAllocations": True,
        "capacity": {},
        "attributes": {"type": {"string": "gpu"}},
    }
    wants = {"exactly": {"deviceClassName": "mig", "count": 2, "selectors": selector("3g.40gb")}}
    pools = slices([*places, whole])
    lines = await told(pools=pools, wants=wants)
    assert any(line.startswith("  fits      now on GPUs GPU-1, GPU-2 of n") for line in lines)
    same = [{"matchAttribute": "gpushare-agent/parentUUID"}]
    lines = await told(pools=pools, wants=wants, constraints=same)
    assert any("there is room for 1 of 2 instances" in line for line in lines)


async def test_a_selector_that_cannot_be_evaluated_is_said(told: Told) -> None:
    """The place is free, and that helps nobody. What could be asked instead is named."""
    said = "0/1 nodes are available: 1 selector #0: CEL runtime error: no such key: migProfile."
    lines = await told(pools=slices(every_place()), scheduler=said)
    assert not any(line.startswith("  fits ") for line in lines)
    assert any("those of MIG instances are parentUUID, profile, type" in line for line in lines)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("3g.40gb", "GPUs have this profile: the component dra-mig-profiles (Helm: dra.migProfiles) makes its class"),
        ("3g.41gb", "claims give nvidia.com/mig-1g.10gb"),
    ],
)
async def test_a_resource_without_a_class_says_what_there_is(told: Told, profile: str, said: str) -> None:
    small = {"extendedResourceName": "nvidia.com/mig-1g.10gb", "selectors": selector("1g.10gb")}
    asked = {"pools": slices(every_place()), "classes": [{"metadata": {"name": "s"}, "spec": small}]}
    lines = await told(wants={"limits": {f"nvidia.com/mig-{profile}": "1"}}, nodes=[node("n", [16])], **asked)
    [line] = [one for one in lines if one.startswith("  GPUs  ")]
    assert line.endswith(said)


async def test_hostile_slices_and_claims_end_nothing(told: Told) -> None:
    """An amount that is no number, a device that is none, and no objects at all."""
    broken = device("3g.40gb", 0)
    broken["consumesCounters"][0]["counters"]["memory-slice-0"]["value"] = "many"
    odd: list[Object] = [{"metadata": {"name": "x"}, "spec": 7}, {"spec": None}]
    claims = [{"metadata": {"name": "c"}, "spec": [], "status": 1}]
    lines = await told(pools=[*slices([broken]), *odd], claims=claims)
    assert "The scheduler: nothing so far" in lines[0] and "memory-slice-0" in lines[0]
    lines = await told(pools=[*slices([{"name": 3}]), *odd], claims=claims)
    assert any("no MIG instance 3g.40gb, and no place for one" in line for line in lines)


class _Walked(list[ClaimJson]):
    walks = 0

    def __iter__(self) -> Iterator[ClaimJson]:
        self.walks += 1
        return super().__iter__()


def test_claims_are_walked_once_for_all_pods() -> None:
    """The page of all nodes asks it of every pod that waits, and a cluster has thousands of both."""
    wants = {"exactly": {"deviceClassName": "mig", "selectors": selector("3g.40gb")}}
    of_class = {"metadata": {"name": "c"}, "spec": {"extendedResourceName": "x/y", "selectors": selector("1g.10gb")}}
    claims, classes = (
        _Walked(json.decode(json.encode(one), type=ClaimJson) for one in found)
        for found in ([claim(f"c{number}", wants) for number in range(3)], [of_class])
    )
    cluster = ClaimCluster(slices=(), claims=claims, classes=classes)
    for number in range(3):
        (by_claim, by_class) = wanted_of(cluster, "ns", [f"c{number}", f"c{number}"], {"x/y": 2})[::-1]
        assert (by_claim.profiles, by_claim.count) == ({"3g.40gb"}, 1)
        assert (by_class.profiles, by_class.count) == ({"1g.10gb"}, 2)
    assert not wanted_of(cluster, "other", ["c0"], {})
    assert (claims.walks, classes.walks) == (1, 1)
