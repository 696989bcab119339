"""The pages for Kueue and Volcano: their configurations ask for what our nodes offer, under our names.

The fields are those of the schemas of Kueue v0.19.2 and Volcano v1.15.1, as far as the pages use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.agent.cluster.node_facts import gpu_model
from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.claims.devices import DevicePolicy, capacity_of
from gpushare_agent.core.model.names import CORES_PER_GPU, GPU_MODEL_LABEL
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.simulation.schedulers import Policy
from gpushare_agent.simulation.workload import Cluster, Machine
from tests.simulation.support_simulation import arrival, replay, scheduler_of, workload_of
from tests.support_core import inventory

ROOT = Path(__file__).parents[2]
KUEUE, VOLCANO = (ROOT / f"docs/how-to/queue-with-{name}.md" for name in ("kueue", "volcano"))
NAMES = ResourceNames()
CORES, BLOCKS = NAMES.vcore, NAMES.vmemory
NODE = Machine(model="H100", gpus=8, memory_mib=81_559)
"""What both pages count on."""

FIELDS = {
    "Topology": "spec.levels.nodeLabel",
    "ResourceFlavor": "spec.nodeLabels.* spec.topologyName",
    "ClusterQueue": "spec.namespaceSelector spec.resourceGroups.coveredResources spec.resourceGroups.flavors.name"
    " spec.resourceGroups.flavors.resources.name spec.resourceGroups.flavors.resources.nominalQuota",
    "LocalQueue": "spec.clusterQueue",
    "Configuration": "featureGates.* resources.deviceClassMappings.name resources.deviceClassMappings.deviceClassNames"
    " resources.deviceClassMappings.sources.capacity.name resources.deviceClassMappings.sources.capacity.driver"
    " resources.deviceClassMappings.sources.capacity.deviceSelector.cel.expression",
    "Queue": "spec.reclaimable spec.deserved.* spec.capability.*",
    "PodGroup": "spec.queue spec.minMember spec.minResources.*",
}


def objects(page: Path) -> dict[str, dict[str, Any]]:
    """The objects of the page's configurations, by kind."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {one["kind"]: one for block in blocks for one in yaml.safe_load_all(block)}


def offered(nodes: int) -> dict[str, int]:
    """What so many nodes offer in sum, by the accounts of the agent and the extender."""
    cluster = Cluster(source="test", nodes=tuple(NODE.node(f"n{number}") for number in range(nodes)))
    scheduler = scheduler_of(cluster, Policy.BINPACK)
    gpus = [gpu for node in cluster.nodes for gpu in scheduler.gpus(node.name)]
    return {CORES: CORES_PER_GPU * len(gpus), BLOCKS: sum(gpu.total_blocks for gpu in gpus)}


def paths(value: object, at: str = "") -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from paths(one, f"{at}.{name}".lstrip("."))
    elif isinstance(value, list) and value:
        for one in value:
            yield from paths(one, at)
    else:
        yield at


@pytest.mark.parametrize("page", [KUEUE, VOLCANO], ids=["kueue", "volcano"])
def test_every_field_is_one_of_the_schema(page: Path) -> None:
    """A name of a label or a resource stands for any."""
    for kind, one in objects(page).items():
        if kind not in FIELDS:
            continue
        known = {re.escape(path).replace(r"\*", ".+") for path in FIELDS[kind].split()}
        given = {name: value for name, value in one.items() if name not in ("apiVersion", "kind", "metadata")}
        unknown = [path for path in paths(given) if not any(re.fullmatch(pattern, path) for pattern in known)]
        assert unknown == [], kind


def test_kueues_quota_is_what_two_nodes_offer() -> None:
    """Every resource is covered, and the model is the one that such a node's label has."""
    found = objects(KUEUE)
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
    assert [*quota] == group["coveredResources"] == ["cpu", "memory", CORES, BLOCKS]
    assert {name: quota[name] for name in (CORES, BLOCKS)} == offered(2)
    assert flavor["name"] == found["ResourceFlavor"]["metadata"]["name"]
    assert found["ResourceFlavor"]["spec"]["nodeLabels"] == {GPU_MODEL_LABEL: gpu_model("NVIDIA H100 80GB HBM3")}
    levels = [one["nodeLabel"] for one in found["Topology"]["spec"]["levels"]]
    annotations = found["Job"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"kueue.x-k8s.io/podset-required-topology": levels[0]}
    assert levels[-1] == "kubernetes.io/hostname"
    assert found["ResourceFlavor"]["spec"]["topologyName"] == found["Topology"]["metadata"]["name"]
    queue = found["LocalQueue"]
    assert found["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == found["ClusterQueue"]["metadata"]["name"]
    covered = {*group["coveredResources"]}
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    assert {*container["resources"]["requests"], *container["resources"]["limits"]} <= covered


def test_volcanos_queue_deserves_one_node_and_may_have_two() -> None:
    """The gang and the pod group ask for no more than the queue's capability."""
    found = objects(VOLCANO)
    assert found["Queue"]["spec"]["deserved"] == offered(1)
    assert found["Queue"]["spec"]["capability"] == offered(2)
    group, (task,) = found["PodGroup"]["spec"], found["Job"]["spec"]["tasks"]
    assert task["replicas"] == found["Job"]["spec"]["minAvailable"] == group["minMember"]
    assert found["Job"]["spec"]["queue"] == group["queue"] == found["Queue"]["metadata"]["name"]
    assert group["minResources"] == {CORES: offered(2)[CORES]}
    assert f"binpack.resources: {CORES}" in VOLCANO.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [KUEUE, VOLCANO], ids=["kueue", "volcano"])
@pytest.mark.parametrize("policy", [Policy.BINPACK, Policy.AGENT_ONLY])
def test_the_gang_fits_on_the_two_nodes(page: Path, policy: Policy) -> None:
    """All of it starts at once, on both, and needs all that the quota gives."""
    spec = objects(page)["Job"]["spec"]
    pods = spec["completions"] if page is KUEUE else spec["tasks"][0]["replicas"]
    template = spec["template"] if page is KUEUE else spec["tasks"][0]["template"]
    (container,) = template["spec"]["containers"]
    cores = container["resources"]["limits"][CORES]
    assert pods * cores == offered(2)[CORES]
    gang = [arrival(0, cores, 60, name=f"p{number}")._replace(gang="gang") for number in range(pods)]
    cluster = Cluster(source="test", nodes=(NODE.node("n0"), NODE.node("n1")))
    result = replay(cluster, workload_of(*gang), policy).tally.gangs["gang"]
    assert (result.started_at, sorted(set(result.nodes))) == (0, ["n0", "n1"])


def test_kueues_claims_are_counted_by_a_capacity_of_our_slices() -> None:
    """Its name, the driver and the class; without a capacity a claim takes the default, which is the whole GPU's cores."""
    (mapping,) = objects(KUEUE)["Configuration"]["resources"]["deviceClassMappings"]
    (source,) = mapping["sources"]
    capacity = source["capacity"]
    policy = DevicePolicy(block_mib=NAMES.memory_block_mib, order="", taint_effect="", isolation="")
    device = capacity_of(inventory(1).gpus[0], policy)[capacity["name"]]
    assert device.value == str(CORES_PER_GPU)
    assert device.request_policy is not None
    assert device.request_policy.default == str(CORES_PER_GPU)
    assert capacity["driver"] == DRIVER
    assert capacity["deviceSelector"]["cel"]["expression"] == f"device.driver == '{DRIVER}'"
    classes = (ROOT / "manifests/components/dra/classes.yaml").read_text(encoding="utf-8")
    names = {one["metadata"]["name"] for one in yaml.safe_load_all(classes)}
    assert {*mapping["deviceClassNames"]} <= names
    assert f"{capacity['name']}.deviceclass/{mapping['deviceClassNames'][0]}: {offered(2)[CORES]}" in VOLCANO.read_text(
        encoding="utf-8"
    )
