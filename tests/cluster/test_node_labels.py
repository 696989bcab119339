"""What the node's object says of its GPUs: names, values, the least patch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.agent.cluster.node_facts import (
    LABELS_ANNOTATION,
    NodeFacts,
    NodePatch,
    gpu_labels,
    gpu_model,
    gpus_annotation,
    is_label,
    label_value,
    node_facts,
)
from gpushare_agent.agent.cluster.part import desired_facts
from gpushare_agent.core.model.gpus import GpuInventory, Health, HostMemory, Link, LinkKind
from gpushare_agent.core.model.names import GPU_MODEL_LABEL
from gpushare_agent.core.node_report.annotations import GPUS_ANNOTATION, parse_gpus
from gpushare_agent.core.placement.topology import build_topology
from gpushare_agent.core.settings.settings import Settings
from tests.cluster.support_node_facts import after, gpu, inventory, patch_of
from tests.gpus.support_gpus import read_topology, uuid_of
from tests.support_node import node_of

OWN = "gpushare-agent"
V100_ROW_0 = ["X", "NV1", "NV1", "NV2", "NV2"]


def facts_of(found: GpuInventory, prefix: str = OWN, **node_labels: str) -> NodeFacts:
    report = gpus_annotation(found, cordoned={}, memory_block_mib=256)
    return node_facts(found, report, label_prefix=prefix, node_labels=node_labels)


def node_with(labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "n", "labels": labels or {}, "annotations": annotations or {}}}


def changed(patch: NodePatch, part: str) -> dict[str, str | None]:
    metadata: Any = patch.body.get("metadata", {})
    found: dict[str, str | None] = metadata.get(part, {})
    return found


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Tesla P40", "P40"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("GeForce GTX 1080 Ti", "GTX-1080"),
        ("Quadro P2200", "P2200"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 6000", "RTX-6000"),
        ("GeForce GTX TITAN X", "GTX-TITAN-X"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX PRO 5000 72GB Blackwell", "RTX-PRO-5000"),
        ("NVIDIA RTX PRO", "RTX-PRO"),
        ("NVIDIA CMP 170HX", "CMP-170HX"),
        ("NVIDIA TITAN RTX", "TITAN-RTX"),
        ("NVIDIA TITAN X (Pascal)", "TITAN-X"),
        ("TITAN V", "TITAN-V"),
        ("GRID K520", "K520"),
        ("NVIDIA Simulated 24GB", "Simulated"),
        ("NVIDIA Graphics Device", "Graphics"),
        ("Acme P9 x", "P9"),
        ("Orin (nvgpu)", "nvgpu"),
        ("P40", "P40"),
        ("NVIDIA", "NVIDIA"),
        ("RTX", "RTX"),
        ("", ""),
    ],
)
def test_the_model_is_the_word_behind_the_brand(name: str, model: str) -> None:
    """Quota lists and node selectors of gpu-manager's users name GPUs by it."""
    assert gpu_model(name) == model


@given(st.text(max_size=200))
def test_every_name_gives_a_value_that_kubernetes_takes(name: str) -> None:
    """One bad value would make the API server refuse the whole patch."""
    assert is_label("a/b", gpu_model(name))
    assert is_label("a/b", label_value(name))


def test_equal_gpus_give_the_names_of_nvidias_feature_discovery_under_the_prefix() -> None:
    """With the prefix nvidia.com they are the same names, for clusters that do not run it."""
    gpus = (gpu(0, compute_capability=(9, 0)), gpu(1, compute_capability=(9, 0)))
    assert gpu_labels(inventory(*gpus, version="550.54.15"), "nvidia.com") == {
        "gaia.tencent.com/gpu-model": "H100",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/cuda.driver-version.full": "550.54.15",
        "nvidia.com/cuda.driver-version.major": "550",
        "nvidia.com/cuda.driver-version.minor": "54",
    }


def test_mixed_gpus_are_named_by_the_most_numerous_and_promise_the_least() -> None:
    """A selector on memory or compute capability then fits whichever GPU the pod gets."""
    found = inventory(
        gpu(0, "Tesla P40", 24576, compute_capability=(6, 1)),
        gpu(1, "NVIDIA A10", 23028, compute_capability=(8, 6)),
        gpu(2, "Tesla P40", 24576, compute_capability=(6, 1)),
    )
    of_gpus = {"product": "Tesla-P40", "memory": "23028", "count": "3", "mixed": "true"}
    of_gpus |= {"compute.major": "6", "compute.minor": "1"}
    expected = {f"{OWN}/gpu.{name}": value for name, value in of_gpus.items()}
    assert gpu_labels(found, OWN) == {GPU_MODEL_LABEL: "P40", **expected}


def test_of_as_many_gpus_of_two_kinds_the_larger_names_the_node() -> None:
    """Whatever their order, so that the label does not change with it."""
    pair = (gpu(0, "NVIDIA A10", 23028), gpu(1, "NVIDIA L40S", 46068))
    for gpus in (pair, pair[::-1]):
        assert gpu_labels(inventory(*gpus), OWN)[GPU_MODEL_LABEL] == "L40S"


def test_a_capability_that_one_gpu_does_not_tell_gives_no_label() -> None:
    """The least of the others could be more than that GPU has."""
    labels = gpu_labels(inventory(gpu(0, compute_capability=(9, 0)), gpu(1)), OWN)
    assert not [name for name in labels if "compute" in name]


def test_labels_do_not_change_with_the_health_of_a_gpu() -> None:
    """Pods are selected onto nodes by what they have; what fails is in the annotation."""
    ill = gpu(1, health=Health.UNHEALTHY, unhealthy_reason="Xid 79")
    assert gpu_labels(inventory(gpu(0), gpu(1)), OWN) == gpu_labels(inventory(gpu(0), ill), OWN)


def test_a_node_without_a_readable_gpu_has_no_gpu_labels_and_an_empty_list() -> None:
    """Zero GPUs is a fact for the scheduler extender; a GPU of which only the UUID is known counts for nothing."""
    blank = gpu(0, "", 0, health=Health.UNHEALTHY)
    assert gpu_labels(inventory(), OWN) == {} == gpu_labels(inventory(blank), OWN)
    assert json.loads(gpus_annotation(inventory(), cordoned={}, memory_block_mib=256))["gpus"] == []


def test_the_annotation_tells_each_gpu_with_its_links_in_the_lists_order() -> None:
    """The scheduler extender places with the same facts as the agent."""
    topology = read_topology("v100-x8-cube-mesh")
    gpus = tuple(gpu(index) for index in (2, 0, 1, 3, 7, 6, 5, 4))
    found = GpuInventory(gpus=gpus, topology=topology)
    text = gpus_annotation(found, cordoned={uuid_of(2): True}, memory_block_mib=512, in_parts={uuid_of(5)})
    document = json.loads(text)
    assert [gpu.index for gpu in parse_gpus(text).gpus if gpu.serves_parts] == [5]
    assert (document["schema"], document["memory_block_mib"]) == (1, 512)
    assert [fact["index"] for fact in document["gpus"]] == list(range(8))
    for fact in document["gpus"]:
        always = {"index", "uuid", "name", "memory_mib", "is_healthy", "numa", "links"}
        assert fact.keys() - {"cordoned", "would_be_healthy", "parts"} == always
    assert document["gpus"][0]["links"][:5] == V100_ROW_0
    assert [fact["index"] for fact in document["gpus"] if fact.get("cordoned")] == [2]
    assert [fact["index"] for fact in document["gpus"] if fact.get("would_be_healthy")] == [2]


def test_a_gpu_that_no_device_plugin_offers_says_so() -> None:
    """It is Unhealthy for the kubelet's resources alone: pods may have it by claims."""
    facts = desired_facts(node_of(settings=Settings(node_name="n", excluded_gpus=("1",))))
    assert facts is not None
    first, second = parse_gpus(facts.annotations[GPUS_ANNOTATION]).gpus
    assert (first.is_healthy, first.unhealthy_reason) == (True, "")
    assert (second.is_healthy, second.unhealthy_reason) == (False, "it is excluded (setting excluded_gpus)")


@pytest.mark.parametrize("kind", [*HostMemory, None])
def test_whose_memory_is_the_hosts_too_is_read_as_it_is_written(kind: HostMemory | None) -> None:
    found = GpuInventory(
        gpus=(gpu(0, host_memory=kind),), topology=build_topology([[Link(kind=LinkKind.SELF)]], [None])
    )
    text = gpus_annotation(found, cordoned={}, memory_block_mib=256)
    assert [one.host_memory for one in parse_gpus(text).gpus] == [kind]
    assert ("host_memory" in text) == (kind is not None)


@pytest.mark.parametrize("odd", [1, [], {}, "other", None, "x" * 10_000, True])
def test_another_text_of_the_hosts_memory_costs_no_report(odd: object) -> None:
    fact = {"index": 0, "uuid": "GPU-a", "name": "A", "memory_mib": 1, "is_healthy": True, "host_memory": odd}
    [read] = parse_gpus(json.dumps({"schema": 1, "gpus": [fact]})).gpus
    assert read.host_memory is None


def test_links_of_a_gpu_that_the_topology_does_not_know_are_the_farthest() -> None:
    """A gap in the indexes must not shift the words of the others."""
    found = inventory(gpu(0), gpu(5))
    rows = [fact["links"] for fact in json.loads(facts_of(found).annotations[GPUS_ANNOTATION])["gpus"]]
    assert rows == [["X", "SYS"], ["SYS", "X"]]


def test_sixteen_gpus_take_a_small_part_of_what_annotations_may() -> None:
    """Kubernetes allows 256 KiB for all annotations of an object together."""
    gpus = tuple(gpu(index, "N" * 95) for index in range(16))
    assert len(gpus_annotation(inventory(*gpus), cordoned={}, memory_block_mib=256)) < 8192


def test_the_operators_labels_win_and_one_that_kubernetes_refuses_is_left_out() -> None:
    """A wrong one must not keep the others away."""
    found = facts_of(inventory(gpu(0)), **{"gaia.tencent.com/gpu-model": "big", "bad name": "x", "ok": "é"})
    assert found.labels[GPU_MODEL_LABEL] == "big"
    assert not {"bad name", "ok"} & found.labels.keys()
    assert found.unusable == ("bad name", "ok")


def test_a_fresh_node_gets_everything_and_the_second_look_changes_nothing() -> None:
    """Level, not edge: patched only where it differs."""
    facts = facts_of(inventory(gpu(0)), rack="a")
    node = after(node_with({"kubernetes.io/os": "linux"}), facts)
    assert node["metadata"]["labels"] == {"kubernetes.io/os": "linux", **facts.labels}
    assert node["metadata"]["annotations"][LABELS_ANNOTATION] == ",".join(sorted(facts.labels))
    assert not patch_of(node, facts).body


def test_labels_that_no_longer_apply_go_and_those_of_others_stay() -> None:
    """Only what the node's own record names as written by the agent is removed."""
    mixed = facts_of(inventory(gpu(0), gpu(1, "Tesla P40", 24576)), rack="a")
    node = after(node_with({"gpushare-agent/by-hand": "x", "zone": "z"}), mixed)
    plain = facts_of(inventory(gpu(0)))
    patch = patch_of(node, plain)
    assert {name for name, value in changed(patch, "labels").items() if value is None} == {f"{OWN}/gpu.mixed", "rack"}
    assert {"gpushare-agent/by-hand", "zone"} <= after(node, plain)["metadata"]["labels"].keys()


def test_labels_stay_while_no_gpu_of_the_node_tells_its_name() -> None:
    """GPUs that are lost from the agent's start on are known by their UUIDs alone; the annotation has their health."""
    node = after(node_with(), facts_of(inventory(gpu(0)), rack="a"))
    lost = facts_of(inventory(gpu(0, "", 0, health=Health.UNHEALTHY, unhealthy_reason="lost")))
    dark = after(node, lost)
    assert dark["metadata"]["labels"] == node["metadata"]["labels"]
    assert not json.loads(dark["metadata"]["annotations"][GPUS_ANNOTATION])["gpus"][0]["is_healthy"]
    assert not patch_of(dark, lost).body
    assert "rack" not in after(dark, facts_of(inventory(gpu(0))))["metadata"]["labels"]


@pytest.mark.parametrize(
    "name",
    [
        "node-role.kubernetes.io/control-plane",
        "kubernetes.io/hostname",
        "node-restriction.kubernetes.io/tenant",
        "k8s.io/x",
        "a.b.k8s.io/x",
        "Zone of/nobody",
        "-zone",
        "a/b/c",
    ],
)
def test_a_forged_record_removes_no_label_of_kubernetes_and_no_name_that_is_none(name: str) -> None:
    """A kubelet may write the record, but must not have the agent remove what it may not remove itself."""
    node = node_with({name: "x", "rack": "a"}, {LABELS_ANNOTATION: f"rack,{name}"})
    patch = patch_of(node, facts_of(inventory(gpu(0))))
    assert [gone for gone, value in changed(patch, "labels").items() if value is None] == ["rack"]


@pytest.mark.parametrize("name", ["mykubernetes.io/x", "k8s.io.example.com/x", "kubernetes.io"])
def test_names_that_only_look_like_those_of_kubernetes_are_removed(name: str) -> None:
    """The domain counts, at a dot."""
    patch = patch_of(node_with({name: "x"}, {LABELS_ANNOTATION: name}), facts_of(inventory(gpu(0))))
    assert changed(patch, "labels")[name] is None


@pytest.mark.parametrize("record", [",".join(f"l{n}" for n in range(257)), "l0," + "l" * 16384])
def test_a_record_that_is_larger_than_any_of_ours_removes_nothing(record: str) -> None:
    """It is forged; what the agent sees to is written all the same."""
    facts = facts_of(inventory(gpu(0)))
    patch = patch_of(node_with({"l0": "x"}, {LABELS_ANNOTATION: record}), facts)
    assert dict(changed(patch, "labels")) == dict(facts.labels)
    assert changed(patch, "annotations")[LABELS_ANNOTATION] == ",".join(sorted(facts.labels))


def test_a_foreign_prefix_is_not_fought_over() -> None:
    """Where NVIDIA's feature discovery runs too, its values stay, and nothing of it is recorded as ours or removed."""
    facts = facts_of(inventory(gpu(0)), "nvidia.com")
    theirs = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED", "nvidia.com/gpu.count": "1"}
    patch = patch_of(node_with(theirs), facts)
    assert patch.foreign == ("nvidia.com/gpu.product",)
    node = after(node_with(theirs), facts)
    assert node["metadata"]["labels"]["nvidia.com/gpu.product"].endswith("-SHARED")
    emptied = after(node, facts_of(inventory(), "nvidia.com"))
    assert emptied["metadata"]["labels"] == theirs


def test_a_change_by_hand_of_a_label_that_is_ours_is_put_right() -> None:
    """Also where the record is lost: the names under the own prefix and gpu-manager's are the agent's."""
    facts = facts_of(inventory(gpu(0)))
    node = after(node_with(), facts)
    node["metadata"]["labels"][GPU_MODEL_LABEL] = "P40"
    node["metadata"]["labels"][f"{OWN}/gpu.count"] = "7"
    del node["metadata"]["annotations"][LABELS_ANNOTATION]
    assert after(node, facts) == after(node_with(), facts)


@pytest.mark.parametrize("raw", [{}, {"metadata": None}, {"metadata": {"labels": [], "annotations": {"a": 1}}}])
def test_a_node_without_labels_or_with_odd_ones_is_patched(raw: dict[str, Any]) -> None:
    """The API server omits empty maps."""
    facts = facts_of(inventory(gpu(0)))
    assert dict(changed(patch_of(raw, facts), "labels")) == dict(facts.labels)


names = st.sampled_from(["gpushare-agent/a", "gpushare-agent/b", GPU_MODEL_LABEL, "nvidia.com/a", "zone"])
label_maps = st.dictionaries(names, st.sampled_from(["1", "2"]))


@given(label_maps, label_maps, st.lists(label_maps, max_size=3))
def test_whatever_came_before_a_second_look_is_quiet_and_others_labels_are_never_removed(
    initial: dict[str, str], wanted: dict[str, str], earlier: list[dict[str, str]]
) -> None:
    """After each of several wanted states nothing is left to patch, and the labels of others stay."""
    owned = frozenset(name for name in wanted if name.startswith("gpushare-agent/"))
    node = node_with(initial)
    for labels in (*earlier, wanted):
        facts = NodeFacts(labels=labels, annotations={GPUS_ANNOTATION: "{}"}, owned=owned)
        node = after(node, facts)
        assert not patch_of(node, facts).body
    untouched = initial.keys() - wanted.keys() - {name for labels in earlier for name in labels}
    assert untouched <= node["metadata"]["labels"].keys()
