"""ResourceClaims on a real scheduler and kubelet: what containers see, over kills and restarts. Needs resource.k8s.io/v1
with consumable capacity (Kubernetes 1.36)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Object, claim_template, manifest
from tests.e2e.installation import Installation, with_variables

pytestmark = pytest.mark.e2e
CLASS, DRIVER = "gpu.gpushare-agent", "gpushare-agent"
UNLIMITED = {"apiVersion": "gpushare-agent/v1alpha1", "kind": "ShareConfig", "isolation": "none"}
CLAIMED = 2
"""GPUs that are for claims; the others stay the device plugins'."""


def request(name: str = "gpu", **exactly: Any) -> Object:
    """A share where `cores` and `memory` are given, else a whole GPU."""
    capacity = {key: str(exactly.pop(key)) for key in ("cores", "memory") if key in exactly}
    more = {"capacity": {"requests": capacity}} if capacity else {}
    return {"name": name, "exactly": {"deviceClassName": CLASS, **more, **exactly}}


def template(name: str, *requests: Object, **devices: Any) -> Object:
    """Under isolation none, which every overlay can have: the limits are those of the other isolations' own tests."""
    opaque = {"opaque": {"driver": DRIVER, "parameters": UNLIMITED}}
    return claim_template(name, *requests, **{"config": [opaque], **devices})


def claiming(cluster: Cluster, name: str, claim: str, *uses: str, is_template: bool = True) -> Object:
    """A pod with one container for each of `uses`: the request that it names, empty for the claim as a whole."""
    containers = []
    for number, used in enumerate(uses or ("",)):
        container = cluster.container(name=f"c{number}")
        container["resources"] = {"claims": [{"name": "gpu", **({"request": used} if used else {})}]}
        containers.append(container)
    source = "resourceClaimTemplateName" if is_template else "resourceClaimName"
    return cluster.pod_of(name, *containers, resourceClaims=[{"name": "gpu", source: claim}])


@pytest.fixture(scope="module")
def claims(installation: Installation) -> Iterator[Installation]:
    """Two GPUs are for claims. Skips where the API server has no claims."""
    installation.cluster.needs_claims()
    installation.install(**kustomization(",".join(map(str, range(CLAIMED)))))
    yield installation


def kustomization(gpus: str) -> dict[str, Any]:
    """With these GPUs for claims."""
    variables = {
        "GPUSHARE_DRA__GPUS": gpus,
        "GPUSHARE_ISOLATIONS_ALLOWED": "none",
        "GPUSHARE_RESIZE__MODE": "within-request",
    }
    return {"components": ["components/dra", "components/dra-whole-gpus"], "patches": [with_variables(variables)]}


def published(cluster: Cluster) -> list[Object] | None:
    found = cluster.slices()
    return found[0]["spec"]["devices"] if len(found) == 1 else None


def visible(cluster: Cluster, namespace: str, pod: str, container: str = "c0") -> list[str]:
    """The GPUs' UUIDs that the container was given."""
    return sorted(cluster.environment(namespace, pod, container)["NVIDIA_VISIBLE_DEVICES"].split(","))


def device_names(claims: Installation) -> list[str]:
    """The name of each GPU in the slice, by index."""
    gpus = sorted(claims.view()["gpus"], key=lambda gpu: gpu["index"])
    return [gpu["uuid"].replace("GPU-", "gpu-") for gpu in gpus]


def booked(claims: Installation) -> dict[str, int]:
    """Cores by claim, by the agent's view."""
    found: dict[str, int] = {}
    for one in claims.view()["containers"]:
        if one["claim"] is not None:
            found[one["claim"]["name"]] = found.get(one["claim"]["name"], 0) + one["cores"]
    return found


def wait_ended(cluster: Cluster, claims: Installation) -> None:
    cluster.wait_for("no claim is booked", lambda: not booked(claims))


def test_shares_and_whole_gpus(cluster: Cluster, claims: Installation, namespace: str) -> None:
    """The device plugins offer the other GPUs alone; a claim's share is booked on the GPU that the scheduler chose."""
    gpus = {gpu["index"]: gpu for gpu in claims.view()["gpus"]}
    devices = cluster.wait_for("the slice is published", lambda: published(cluster))
    assert [one["name"] for one in devices] == device_names(claims)[:CLAIMED]
    cluster.wait_for("the plugins offer the rest", lambda: claims.gpus() == len(gpus) - CLAIMED)
    cluster.apply(template("share", request(cores=40, memory="1Gi")), template("whole", request()), namespace=namespace)
    cluster.start(namespace, claiming(cluster, "share", "share"), claiming(cluster, "whole", "whole"))
    seen = [visible(cluster, namespace, pod) for pod in ("share", "whole")]
    assert sorted(seen) == sorted([[gpus[0]["uuid"]], [gpus[1]["uuid"]]])
    assert sorted(booked(claims).values()) == [40, 100]
    size = len(json.dumps(cluster.read(f"/api/v1/namespaces/{namespace}/pods/share")))
    assert size < 10_000, f"{size} bytes: no device ID is in the pod's status"
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


def test_admin_access_beside_shares_and_a_whole_gpu(cluster: Cluster, claims: Installation, namespace: str) -> None:
    """A monitor sees every GPU of the slice and takes nothing of any. The scheduler gives it GPUs where the capacity that it
    asks for is free, though it counts none of it: the least fits beside a share, and nothing beside a whole GPU."""
    cluster.run("label", "namespace", namespace, "resource.kubernetes.io/admin-access=true")
    monitor = template("monitor", request(adminAccess=True, allocationMode="All"))
    least = template("least", request(adminAccess=True, allocationMode="All", cores=0, memory="256Mi"))
    share, whole = template("share", request(cores=60, memory="1Gi")), template("whole", request())
    cluster.apply(monitor, least, share, whole, namespace=namespace)
    for name, claim in (("before", "monitor"), ("share", "share"), ("beside", "least"), ("whole", "whole")):
        cluster.start(namespace, claiming(cluster, name, claim))
    uuids = sorted(gpu["uuid"] for gpu in claims.view()["gpus"] if gpu["index"] < CLAIMED)
    assert [visible(cluster, namespace, name) for name in ("before", "beside")] == [uuids, uuids]
    assert sorted(booked(claims).values()) == [60, 100]
    results = [
        one
        for claim in cluster.items("-n", namespace, "resourceclaims")
        for one in claim["status"]["allocation"]["devices"]["results"]
    ]
    assert sum(bool(one.get("adminAccess")) for one in results) == 2 * CLAIMED, results
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


def test_whole_gpus_by_an_extended_resource(cluster: Cluster, claims: Installation, namespace: str) -> None:
    """An ordinary pod without a claim: the scheduler makes it, by the class's name of the resource."""
    if cluster.node_object()["status"]["allocatable"].get("nvidia.com/gpu", "0") != "0":
        pytest.skip("another device plugin serves nvidia.com/gpu on this node")
    containers = [cluster.container(name=name) for name in ("c0", "c1")]
    for container in containers:
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    pod = cluster.pod_of("whole", *containers)
    pod["metadata"]["annotations"] = {}
    cluster.start(namespace, pod)
    seen = [visible(cluster, namespace, "whole", name) for name in ("c0", "c1")]
    uuids = sorted(gpu["uuid"] for gpu in claims.view()["gpus"] if gpu["index"] < CLAIMED)
    assert sorted(seen[0] + seen[1]) == uuids and sum(booked(claims).values()) == 200
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


def test_a_gpu_in_use_changes_sides_when_it_is_free(
    cluster: Cluster, installation: Installation, claims: Installation, namespace: str
) -> None:
    """Over the rollout that changes the setting: neither front end offers it until then, and its pod runs on."""
    gpus = len(claims.view()["gpus"])
    cluster.wait_for("the plugins offer the rest", lambda: claims.gpus() == gpus - CLAIMED)
    cluster.start(namespace, cluster.pod("by-plugin", 40, 4))
    (held,) = (indexes for _, _, indexes in claims.wait_ledger(namespace, 1).values())

    def offered() -> set[str]:
        return {one["name"] for one in published(cluster) or ()}

    every = device_names(claims)
    try:
        installation.start_change(**kustomization("all"))
        cluster.wait_for("all but the one in use are for claims", lambda: offered() == {*every} - {every[held[0]]})
        claims.wait_rolled_out()
        assert next(iter(claims.wait_ledger(namespace, 1).values()))[2] == held
        cluster.delete_pods(namespace)
        cluster.wait_for("and that one as well, when it is free", lambda: offered() == {*every})
        cluster.apply(template("share", request(cores=40, memory="1Gi")), namespace=namespace)
        cluster.start(namespace, claiming(cluster, "by-claim", "share"))
    finally:
        installation.change(**kustomization(",".join(map(str, range(CLAIMED)))))
    assert sum(booked(claims).values()) == 40, "it keeps its GPU"
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)
    cluster.wait_for("two are for claims", lambda: offered() == {*every[:CLAIMED]})
    cluster.wait_for("the plugins offer the rest", lambda: claims.gpus() == gpus - CLAIMED)


def test_two_shares_in_one_claim_and_one_claim_in_two_pods(
    cluster: Cluster, claims: Installation, namespace: str
) -> None:
    different = {"constraints": [{"distinctAttribute": f"{DRIVER}/uuid"}]}
    pair = template("pair", request("a", cores=30, memory="1Gi"), request("b", cores=20, memory="1Gi"), **different)
    shared = template("x", request(cores=10, memory="512Mi"))
    claim = {**shared, "kind": "ResourceClaim", "metadata": {"name": "shared"}, "spec": shared["spec"]["spec"]}
    cluster.apply(pair, claim, namespace=namespace)
    cluster.start(
        namespace,
        claiming(cluster, "both", "pair"),
        claiming(cluster, "split", "pair", "a", "b"),
        claiming(cluster, "one", "shared", "", "", is_template=False),
        claiming(cluster, "two", "shared", is_template=False),
    )
    uuids = sorted(gpu["uuid"] for gpu in claims.view()["gpus"] if gpu["index"] < CLAIMED)
    assert visible(cluster, namespace, "both") == uuids
    split = [visible(cluster, namespace, "split", name) for name in ("c0", "c1")]
    assert sorted(split[0] + split[1]) == uuids
    places = {
        (pod, name): visible(cluster, namespace, pod, name)
        for pod, name in (("one", "c0"), ("one", "c1"), ("two", "c0"))
    }
    assert len({tuple(gpus) for gpus in places.values()}) == 1 and booked(claims)["shared"] == 10
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


LISTED = """
import json, pathlib, re, sys
from gpushare_agent.core.formats.vdevice import decode_config, decode_pids
root = pathlib.Path("/etc/gpu-manager/vm", sys.argv[1])
folder = next(iter(root.iterdir())) if root.is_dir() else None
if folder is None:
    print("null")
else:
    config = decode_config((folder / "vcuda.config").read_bytes())
    lines = [pathlib.Path("/proc", str(pid), "cmdline") for pid in decode_pids((folder / "pids.config").read_bytes())]
    text = " ".join(line.read_text() for line in lines if line.exists())
    names = sorted(set(re.findall("runs-([a-z0-9-]+)", text)))
    print(json.dumps([config.utilization, config.memory_bytes >> 20, names]))
"""
"""Runs in the agent's container, which sees the host's PIDs: of a claim's directory the limits, and by their command lines
the containers of the processes in the list."""


def test_under_vcuda_the_containers_of_a_claim_are_one_share(
    cluster: Cluster, claims: Installation, namespace: str
) -> None:
    """One directory, whose list has the processes of every container that uses the claim, and of no other of their pods;
    after a kill of the agent too. It goes with the claim."""
    shared = template("x", request(cores=10, memory="512Mi"), config=[])
    claim = {**shared, "kind": "ResourceClaim", "metadata": {"name": "shared"}, "spec": shared["spec"]["spec"]}
    pods = [
        claiming(cluster, "one", "shared", "", "", is_template=False),
        claiming(cluster, "two", "shared", is_template=False),
    ]
    pods[0]["spec"]["containers"].append(cluster.container(name="other"))
    for pod in pods:
        for container in pod["spec"]["containers"]:
            marker = f": runs-{pod['metadata']['name']}-{container['name']};"
            container |= {"image": claims.image, "command": ["sh", "-c", f"{marker} {container['command'][2]}"]}
    cluster.apply(claim, namespace=namespace)
    cluster.start(namespace, *pods)
    uid = cluster.read(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/shared")["metadata"]["uid"]

    def listed() -> Any:
        return json.loads(claims.exec("/opt/gpushare-agent/bin/python", "-c", LISTED, uid))

    if listed() is None:
        pytest.skip("the isolation of the run's overlay is not vcuda")
    users = [("one", "c0"), ("one", "c1"), ("two", "c0")]
    share = [10, 512, sorted("-".join(user) for user in users)]
    cluster.wait_for("every container's processes in the list", lambda: listed() == share)
    for pod, container in users:
        text = cluster.run(
            "-n", namespace, "exec", pod, "-c", container, "--", "gpushare-agent", "vdevice", "-o", "json"
        )
        assert json.loads(text)["pod_uid"] == uid
    cluster.run("-n", namespace, "annotate", "pod", "one", "gpushare-agent/resize=gpu:cores=4,memory=1")
    cluster.wait_for("the share has shrunk", lambda: listed() == [4, 256, share[2]])

    def status() -> str:
        annotations = cluster.pods(namespace)["two"]["metadata"].get("annotations", {})
        return str(annotations.get("gpushare-agent/resize-status", ""))

    cluster.wait_for("the other pod says so", lambda: status().startswith("shared:cores=4,memory=1,"))
    claims.signal()
    cluster.run("-n", namespace, "delete", "pod", "two", "--wait")
    claims.wait_ready()
    share[2].remove("two-c0")
    cluster.wait_for("the list without the pod that ended", lambda: listed() == [4, 256, share[2]])
    cluster.run("-n", namespace, "annotate", "pod", "one", "gpushare-agent/resize-")
    cluster.wait_for("the share as the claim has it", lambda: listed() == share)
    cluster.delete_pods(namespace)
    cluster.wait_for("the directory is gone", lambda: listed() is None)


def test_a_kill_of_the_agent_costs_no_pod_and_no_booking(
    cluster: Cluster, claims: Installation, namespace: str
) -> None:
    """Pods that come while it is away wait, and start within seconds of its return: it wakes them."""
    cluster.apply(template("share", request(cores=20, memory="1Gi")), namespace=namespace)
    cluster.start(namespace, claiming(cluster, "before", "share"))
    before = booked(claims)
    claims.signal()
    names = [f"after-{number}" for number in range(4)]
    cluster.start(namespace, *(claiming(cluster, name, "share") for name in names))
    claims.wait_ready()
    after = cluster.wait_for("all are booked", lambda: len(found := booked(claims)) == 5 and found)
    assert before.items() <= after.items()
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


def test_the_slice_comes_back_after_the_kubelet_deleted_it(cluster: Cluster, claims: Installation) -> None:
    """As the kubelet does when it starts; by hand here, for it is the same to the agent."""
    (before,) = cluster.wait_for("the slice is published", cluster.slices)
    cluster.run("delete", "resourceslice", before["metadata"]["name"])

    def again() -> bool:
        found = cluster.slices()
        return len(found) == 1 and found[0]["metadata"]["uid"] != before["metadata"]["uid"]

    cluster.wait_for("another slice", again)
    assert cluster.slices()[0]["spec"]["pool"]["generation"] > before["spec"]["pool"]["generation"]


def test_what_cannot_be_had_waits_with_the_reason(cluster: Cluster, claims: Installation, namespace: str) -> None:
    """A mistake in the claim's configuration is in an Event of the pod."""
    wrong = template("wrong", request(cores=20, memory="1Gi"))
    wrong["spec"]["spec"]["devices"]["config"][0]["opaque"]["parameters"] = {**UNLIMITED, "isolatoin": "none"}
    cluster.apply(wrong, claiming(cluster, "p", "wrong"), namespace=namespace)

    def is_reported() -> bool:
        events = cluster.read(f"/api/v1/namespaces/{namespace}/events")["items"]
        return any("unknown field `isolatoin`" in one.get("message", "") for one in events)

    cluster.wait_for("the pod's Event names the field", is_reported)
    assert cluster.pods(namespace)["p"]["status"]["phase"] == "Pending" and not booked(claims)


CREATE_SLICE = """
import json, os, ssl, sys, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
host = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + ":" + os.environ["KUBERNETES_SERVICE_PORT"]
headers = {"Authorization": "Bearer " + open(folder + "token").read().strip(), "Content-Type": "application/json"}
url = host + "/apis/resource.k8s.io/v1/resourceslices?dryRun=All"
trust = ssl.create_default_context(cafile=folder + "ca.crt")
try:
    urllib.request.urlopen(urllib.request.Request(url, sys.argv[1].encode(), headers), context=trust, timeout=30)
    print("created")
except urllib.error.HTTPError as e:
    print(e.code, json.load(e)["message"])
"""
"""Runs in the agent's container, with its own token, which is bound to its pod."""


def test_an_agent_writes_slices_of_its_own_node_alone(cluster: Cluster, claims: Installation) -> None:
    """By the policy, whatever its rights are: its token names its node."""
    spec = cluster.slices()[0]["spec"]

    def created(**changes: str) -> str:
        name = f"e2e-{cluster.suffix}"
        raw = manifest("resource.k8s.io/v1", "ResourceSlice", name, spec={**spec, **changes})
        return claims.exec("/opt/gpushare-agent/bin/python", "-c", CREATE_SLICE, json.dumps(raw))

    assert created() == "created\n"
    assert "own node alone" in created(nodeName=f"not-{cluster.node}")
    assert "of driver gpushare-agent alone" in created(driver="gpu.nvidia.com")


def taints(cluster: Cluster) -> dict[str, list[Object]]:
    """Of the published devices that have some."""
    return {one["name"]: one["taints"] for one in published(cluster) or [] if one.get("taints")}


def shown_health(cluster: Cluster, namespace: str, pod: str) -> list[tuple[str, str]]:
    """Of each claim's device in the pod's status: its health and the reason."""
    statuses = cluster.pods(namespace)[pod]["status"].get("containerStatuses", [])
    resources = [one for status in statuses for one in status.get("allocatedResourcesStatus", [])]
    return [(one["health"], one.get("message", "")) for claim in resources for one in claim.get("resources", [])]


def test_a_cordoned_gpu_is_tainted_and_its_pods_say_so(cluster: Cluster, claims: Installation, namespace: str) -> None:
    """The pod on it goes on, the next one gets another GPU."""
    uuids = {gpu["index"]: gpu["uuid"] for gpu in claims.view()["gpus"]}
    cluster.apply(template("share", request(cores=20, memory="1Gi")), namespace=namespace)
    cluster.start(namespace, claiming(cluster, "first", "share"))
    assert visible(cluster, namespace, "first") == [uuids[0]]
    claims.exec("gpushare-agent", "cordon", "0", "--reason", "fan replaced")
    taint = cluster.wait_for("the taint", lambda: taints(cluster))[device_names(claims)[0]][0]
    assert (taint["key"], taint["value"], taint["effect"]) == (f"{DRIVER}/cordoned", "fan-replaced", "NoSchedule")
    cluster.wait_for(
        "the health in the pod's status",
        lambda: [one for one in shown_health(cluster, namespace, "first") if one[0] == "Unhealthy" and "fan" in one[1]],
    )
    cluster.start(namespace, claiming(cluster, "second", "share"))
    assert visible(cluster, namespace, "second") == [uuids[1]] and visible(cluster, namespace, "first") == [uuids[0]]
    claims.exec("gpushare-agent", "uncordon", "0")
    cluster.wait_for("no taint", lambda: not taints(cluster))
    cluster.wait_for(
        "a healthy GPU in the pod's status",
        lambda: [one[0] for one in shown_health(cluster, namespace, "first")] == ["Healthy"],
    )
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)


def test_no_execute_evicts_the_pods_of_a_cordoned_gpu(
    cluster: Cluster, claims: Installation, installation: Installation, namespace: str
) -> None:
    """And no other."""
    variables = {
        "GPUSHARE_DRA__GPUS": "0,1",
        "GPUSHARE_ISOLATIONS_ALLOWED": "none",
        "GPUSHARE_DRA__TAINT_EFFECT": "NoExecute",
    }
    installation.install(components=["components/dra"], patches=[with_variables(variables)])
    cluster.apply(template("big", request(cores=60, memory="1Gi")), namespace=namespace)
    cluster.start(namespace, claiming(cluster, "one", "big"), claiming(cluster, "two", "big"))
    gone = visible(cluster, namespace, "one")[0]
    index = next(gpu["index"] for gpu in claims.view()["gpus"] if gpu["uuid"] == gone)
    claims.exec("gpushare-agent", "cordon", str(index))
    cluster.wait_for("the eviction", lambda: cluster.pods(namespace).keys() == {"two"})
    claims.exec("gpushare-agent", "uncordon", str(index))
    cluster.delete_pods(namespace)
    wait_ended(cluster, claims)
