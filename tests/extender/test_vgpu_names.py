"""Pods with HAMi's or vgpu-manager's names: what they become, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, GPU_CHOICE_ANNOTATIONS
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.claims_webhook import ClaimsWebhook
from gpushare_agent.extender.decisions.claims import Conversion, convert_pod
from gpushare_agent.extender.decisions.vgpu_names import translate_pod
from tests.extender.test_claims_webhook import patched, pod_of, review
from tests.fakes.api_server import Raw
from tests.support_json import undecoded

NAMES = ResourceNames()


def asks(name: str = "main", **limits: object) -> Raw:
    """`gpu=1, gpumem=3000` of NVIDIA's prefix; the API server has set the requests."""
    found = {f"nvidia.com/{key.replace('_', '-')}": str(value) for key, value in limits.items()}
    return {"name": name, "resources": {"limits": {"cpu": "1", **found}, "requests": {"cpu": "1", **found}}}


def translated(raw: Raw) -> tuple[Raw, Conversion]:
    found = translate_pod(read_pod_json(undecoded(raw)), NAMES)
    assert isinstance(found, Conversion), found
    return patched(raw, found.patch), found


def limits_of(raw: Raw) -> list[dict[str, str]]:
    return [one["resources"]["limits"] for one in raw["spec"]["containers"]]


@pytest.mark.parametrize(
    ("limits", "cores", "blocks"),
    [
        ({"gpu": 1, "gpumem": 3000, "gpucores": 30}, 30, 12),
        ({"gpumem": 256, "gpucores": 1}, 1, 1),
        ({"gpu": 1}, 100, 0),
        ({"gpu": 2}, 200, 0),
        ({"gpu": 1, "gpumem_percentage": 100}, 100, 0),
        ({"gpu": 2, "gpumem": 3000, "gpucores": 100}, 200, 24),
        ({"gpu": 1, "gpumem": 3000}, 1, 12),
        ({"gpu": 1, "gpumem": 3000, "gpumem_percentage": 50, "gpucores": 30}, 30, 12),
        ({"gpu": 1, "gpumem": 3000, "gpucores": 0}, 1, 12),
        ({"vgpu_number": 1, "vgpu_cores": 10, "vgpu_memory": 1024}, 10, 4),
        ({"vgpu_number": 2}, 200, 0),
        ({"vgpu_number": 1, "vgpu_memory": 1024}, 1, 4),
    ],
)
def test_a_request_becomes_cores_and_blocks(limits: dict[str, int], cores: int, blocks: int) -> None:
    """Memory in whole blocks; without memory the GPU is the container's own, as to HAMi."""
    pod, _ = translated(pod_of(asks(**limits)))
    expected = {"cpu": "1", NAMES.vcore: str(cores)} | ({NAMES.vmemory: str(blocks)} if blocks else {})
    (one,) = pod["spec"]["containers"]
    assert one["resources"] == {"limits": expected, "requests": expected}


@pytest.mark.parametrize("annotations", [{}, {"a": "b"}, {CORE_LIMIT_ANNOTATION: "50"}])
def test_compute_of_which_nothing_is_said_is_limited_only_where_others_use_it(annotations: dict[str, str]) -> None:
    """By the pod's ceiling, unless it has one; with gpucores there is none."""
    pod, _ = translated(pod_of(asks(gpu=1, gpumem=3000), annotations=annotations))
    assert pod["metadata"]["annotations"] == {CORE_LIMIT_ANNOTATION: "100"} | annotations
    pod, _ = translated(pod_of(asks(gpu=1, gpumem=3000, gpucores=30), annotations=annotations))
    assert pod["metadata"]["annotations"] == annotations


def test_init_containers_and_those_that_ask_for_nothing() -> None:
    """Each in its own list."""
    pod, _ = translated(
        pod_of({"name": "log"}, asks(gpumem=512, gpucores=10), init=(asks("init", gpumem=512, gpucores=10),))
    )
    (init,), (plain, main) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert plain == {"name": "log"}
    assert init["resources"] == main["resources"]
    untouched = pod_of({"name": "log", "resources": {"limits": {"cpu": "1"}}})
    assert translated(untouched)[1] == Conversion()


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (pod_of(asks(gpu=1, gpumem_percentage=50)), "how much 50 % of a GPU's memory are"),
        (pod_of(asks(gpu=1, gpucores=30)), "how much 100 % of a GPU's memory are"),
        (pod_of(asks(gpu=2, gpumem=3000)), "parts of 2 GPUs"),
        (pod_of(asks(gpu=1, gpumem=3000, gpucores=101)), "at most 100"),
        (
            pod_of(asks("a", gpumem=1), asks("b", gpumem=1, gpucores=5)),
            "container a: it says no number of cores, and b does",
        ),
        (pod_of(asks(gpu=1, vgpu_number=1)), "nvidia.com/gpu and nvidia.com/vgpu-number are names of two programs"),
    ],
)
def test_what_cannot_be_said_here_is_refused_with_what_to_write(pod: Raw, words: str) -> None:
    """At once, by the webhook."""
    found = translate_pod(read_pod_json(undecoded(pod)), NAMES)
    assert isinstance(found, Refused)
    assert words in found.detail


@pytest.mark.parametrize("name", GPU_CHOICE_ANNOTATIONS)
def test_a_choice_of_gpus_stays_on_the_pod(name: str) -> None:
    """For the extender and the agents. No claim follows it, so a pod that would get claims is refused."""
    annotations = {name: "A100"}
    pod, found = translated(pod_of(asks(gpu=1), annotations=annotations))
    assert pod["metadata"]["annotations"] == annotations and not found.warnings
    refused = convert_pod(read_pod_json(undecoded(pod)), NAMES)
    assert isinstance(refused, Refused) and f"no claim follows {name}" in refused.detail


def test_what_has_no_effect_is_warned_of() -> None:
    """And the resource goes, because no node has it."""
    pod, found = translated(pod_of(asks(gpu=1, priority=1), annotations={"nvidia.com/vgpu-mode": "hami-core"}))
    assert found.warnings == (
        "the annotation nvidia.com/vgpu-mode has no effect",
        "container main: nvidia.com/priority has no effect",
    )
    assert limits_of(pod) == [{"cpu": "1", NAMES.vcore: "100"}]


@pytest.mark.parametrize(
    "name",
    [
        *("nvidia.com/numa-bind", "hami.io/node-scheduler-policy", "hami.io/gpu-scheduler-policy"),
        *("nvidia.com/node-scheduler-policy", "nvidia.com/device-scheduler-policy", "nvidia.com/device-topology-mode"),
        *("nvidia.com/memory-scheduler-policy", "nvidia.com/cross-pod-topology", "hami.io/device-scoring-weights"),
    ],
)
def test_an_annotation_that_chooses_no_gpu_is_warned_of(name: str) -> None:
    """Policies of scheduling are settings here, of all pods alike."""
    _, found = translated(pod_of(asks(gpu=1), annotations={name: "spread"}))
    assert found.warnings == (f"the annotation {name} has no effect",)


@pytest.mark.parametrize(
    ("policy", "limits", "ceiling"),
    [
        ("balance", {"vgpu_number": 1, "vgpu_cores": 30, "vgpu_memory": 1024}, "100"),
        ("none", {"vgpu_number": 1, "vgpu_cores": 30, "vgpu_memory": 1024}, "100"),
        ("fixed", {"vgpu_number": 1, "vgpu_cores": 30, "vgpu_memory": 1024}, None),
        ("balance", {"vgpu_number": 1}, None),
    ],
)
def test_a_compute_policy_is_the_pods_ceiling(policy: str, limits: dict[str, int], ceiling: str | None) -> None:
    """What nobody else uses of the GPU is the share's, as under vgpu-manager; a whole GPU needs none, and the pod's own
    ceiling stays."""
    asked = {"nvidia.com/vgpu-compute-policy": policy}
    pod, found = translated(pod_of(asks(**limits), annotations=asked))
    assert (pod["metadata"]["annotations"].get(CORE_LIMIT_ANNOTATION), found.warnings) == (ceiling, ())
    pod, _ = translated(pod_of(asks(**limits), annotations=asked | {CORE_LIMIT_ANNOTATION: "50"}))
    assert pod["metadata"]["annotations"][CORE_LIMIT_ANNOTATION] == "50"


def test_a_translated_pod_may_become_claims() -> None:
    """Both webhooks, one after the other."""
    pod, _ = translated(pod_of(asks(gpu=1, gpumem=3000, gpucores=30)))
    found = convert_pod(read_pod_json(undecoded(pod)), NAMES)
    assert isinstance(found, Conversion)
    assert [(one.cores, one.memory_mib) for one in found.templates] == [(30, 3072)]


async def test_the_webhook_answers_with_the_patch_or_the_denial() -> None:
    """Without a request to the API server."""
    webhook = ClaimsWebhook(api=NO_API, names=NAMES)
    result = await webhook.translate(json.dumps(review(pod_of(asks(gpu=1)))).encode())
    answer = json.loads(result.body)["response"]
    assert (result.outcome, answer["allowed"], answer["patchType"]) == ("ok", True, "JSONPatch")
    assert json.loads(base64.b64decode(answer["patch"]))[-1]["value"] == "100"
    result = await webhook.translate(json.dumps(review(pod_of(asks(gpu=1, gpumem_percentage=50)))).encode())
    answer = json.loads(result.body)["response"]
    assert (result.outcome, answer["allowed"], answer["status"]["code"]) == ("error", False, 422)


NO_API: Any = None
"""Whoever asks it fails the test."""
