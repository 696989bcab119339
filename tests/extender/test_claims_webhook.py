"""The webhook that turns pods' limits into ResourceClaims: on the same terms, refused or with a warning where it cannot."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from gpushare_agent.core.claims.claim import read_config
from gpushare_agent.core.claims.gpu_config import ShareConfig
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.errors import Corrupt, Refused
from gpushare_agent.core.model.names import (
    CORE_LIMIT_ANNOTATION,
    ISOLATION_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    RESIZE_ANNOTATION,
)
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.claims_webhook import MOST_NEW, ClaimsWebhook
from gpushare_agent.extender.decisions.claims import Conversion, Template, convert_pod
from gpushare_agent.extender.messages import MAX_POD_BYTES
from gpushare_agent.sandbox.api import patch as api_patch
from tests.extender.support_extender import FakeCluster, fake_cluster, running_extender
from tests.extender.test_app import TLS, session_of_client
from tests.fakes.api_server import Raw
from tests.support_core import GPU_MEM_NAMES as NAMES
from tests.support_json import undecoded

TEMPLATES = "resourceclaimtemplates"


def container(name: str, cores: int = 0, blocks: int = 0, units: int = 0, **more: Any) -> Raw:
    asked = {NAMES.vcore: cores, NAMES.vmemory: blocks, NAMES.gpu_mem: units}
    limits = {key: str(value) for key, value in asked.items() if value}
    return {"name": name, "resources": {"limits": {"cpu": "1", **limits}, "requests": dict(limits)}, **more}


def pod_of(*containers: Raw, init: tuple[Raw, ...] = (), annotations: dict[str, str] | None = None, **spec: Any) -> Raw:
    """As the API server shows it to a webhook: without UID, its name not made yet."""
    more = {"initContainers": list(init)} if init else {}
    metadata = {"generateName": "p-", "annotations": annotations or {}}
    return {"metadata": metadata, "spec": {"containers": list(containers), **more, **spec}}


def converted(raw: Raw) -> Conversion:
    found = convert_pod(read_pod_json(undecoded(raw)), NAMES)
    assert isinstance(found, Conversion), found
    return found


def spec_of(template: Template) -> Raw:
    """As it is written."""
    found: Raw = to_builtins(template.spec())
    return found


def template_of(raw: Raw) -> Template:
    (found,) = converted(raw).templates
    return found


def patched(raw: Raw, patch: Any) -> Raw:
    """As an API server applies a JSON Patch: a path that is not there is an error."""
    return api_patch.patched(raw, list(to_builtins(patch)), api_patch.JSON_PATCH)


@pytest.mark.parametrize(
    ("asked", "template"),
    [
        (container("c", 30, 16), Template(cores=30, memory_mib=4096)),
        (container("c", 100), Template()),
        (container("c", 300), Template(count=3)),
        (container("c", 200, 41), Template(count=2, memory_mib=21 * 256)),
        (container("c", units=6), Template(cores=0, memory_mib=6144)),
    ],
)
def test_a_request_means_what_it_means_to_the_agents(asked: Raw, template: Template) -> None:
    """Shares by both numbers, whole GPUs by count, memory alone with compute in proportion."""
    assert template_of(pod_of(asked)) == template
    assert not converted(pod_of(container("c", 30, 16))).warnings


def test_the_spec_is_what_the_driver_reads() -> None:
    """Memory in bytes, rounded by no one; a whole GPU without capacity takes all, on a GPU that has that much."""
    (request,) = spec_of(Template(cores=30, memory_mib=4352))["devices"]["requests"]
    assert request["exactly"]["capacity"] == {"requests": {"cores": "30", "memory": "4352Mi"}}
    assert (request["exactly"]["deviceClassName"], request["exactly"]["count"]) == ("gpu.gpushare-agent", 1)
    (whole,) = spec_of(Template(count=2, memory_mib=5120))["devices"]["requests"]
    assert "capacity" not in whole["exactly"]
    (selector,) = whole["exactly"]["selectors"]
    assert "memory.compareTo(quantity('5Gi')) >= 0" in selector["cel"]["expression"]
    assert "config" not in spec_of(Template())["devices"]


def test_annotations_of_terms_become_the_claims_configuration() -> None:
    """The elastic ceiling of shares, and the isolation of all."""
    annotations = {ISOLATION_ANNOTATION: "mps", CORE_LIMIT_ANNOTATION: "60"}
    share = template_of(pod_of(container("c", 40, 8), annotations=annotations))
    (config,) = spec_of(share)["devices"]["config"]
    assert read_config(undecoded(config["opaque"]["parameters"])) == ShareConfig(isolation="mps", core_limit=60)
    whole = template_of(pod_of(container("c", 100), annotations=annotations))
    assert (whole.isolation, whole.core_limit) == ("mps", 0), "a whole GPU has no ceiling"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (pod_of(container("c", 30)), "share of a GPU without memory"),
        (pod_of(container("c", 0, 4)), "memory without cores"),
        (pod_of(container("c", 150, 4)), "next valid numbers"),
        (pod_of(container("c", 3300)), "more than the 32"),
        (pod_of(container("c", 30, 4, 2)), "memory alone"),
        (pod_of(container("c", 30, 4), annotations={ISOLATION_ANNOTATION: "auto"}), "Name one of"),
        (pod_of(container("c", 30, 4), resourceClaims=[{"name": "gpushare-0"}]), "another name"),
    ],
)
def test_what_the_agents_would_refuse_is_refused_at_once(raw: Raw, words: str) -> None:
    """With the container and their sentence."""
    found = convert_pod(read_pod_json(undecoded(raw)), NAMES)
    assert isinstance(found, Refused) and words in found.detail
    with pytest.raises(Corrupt, match=r"limit tencent.com/vcuda-core"):
        converted(pod_of({"name": "c", "resources": {"limits": {NAMES.vcore: "1.5"}}}))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (pod_of(container("c", 30, 4), annotations={f"{PREDICATE_GPU_INDEX_PREFIX}0": "1"}), "not carried over"),
        (pod_of(container("c", 30, 4), annotations={RESIZE_ANNOTATION: "c:cores=20"}), "must name the claim"),
        (pod_of(container("c", 30, 4), annotations={CORE_LIMIT_ANNOTATION: "20"}), "below the 30 cores"),
        (pod_of(container("c", 30, 4), annotations={CORE_LIMIT_ANNOTATION: "40"}), "later change"),
        (pod_of(container("c", units=1), annotations={CORE_LIMIT_ANNOTATION: "40"}), "does not count"),
        (pod_of(container("c", units=1)), "ALIYUN_COM_GPU_MEM_"),
        (pod_of(container("c", 30, 4), init=(container("i", 10, 4),)), "lasts as the pod does"),
    ],
)
def test_what_becomes_different_is_a_warning(raw: Raw, words: str) -> None:
    """To whoever creates the pod; nothing changes silently."""
    assert any(words in text for text in converted(raw).warnings)
    in_mib = ResourceNames(gpu_mem=NAMES.gpu_mem, gpu_mem_unit_mib=1)
    found = convert_pod(read_pod_json(undecoded(pod_of(container("c", units=100)))), in_mib)
    assert isinstance(found, Conversion) and "100 MiB become 256" in found.warnings[0]


@pytest.mark.parametrize(
    "raw",
    [
        pod_of(container("c")),
        pod_of(container("c", 30, 4), nodeName="n"),
        {**pod_of(container("c", 30, 4)), "metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}},
    ],
)
def test_pods_that_stay_as_they_are(raw: Raw) -> None:
    """Those that ask for nothing, those past the scheduler (with a warning), and mirrors of static pods."""
    found = converted(raw)
    assert not found.patch and not found.templates
    assert bool(found.warnings) == ("nodeName" in raw["spec"])


def test_an_init_container_uses_the_claim_of_one_that_asks_for_the_same() -> None:
    """As the kubelet hands on its devices; a sidecar, which runs next to it, never does."""
    init = (
        container("same", 20, 4),
        container("side", 10, 4, restartPolicy="Always"),
        container("like-side", 10, 4),
        container("again", 10, 4),
    )
    raw = pod_of(container("a", 20, 4), container("b", 20, 4), init=init)
    made = patched(raw, converted(raw).patch)
    used = {
        one["name"]: one["resources"]["claims"]
        for place in ("containers", "initContainers")
        for one in made["spec"][place]
    }
    names = {name: claims[0]["name"] for name, claims in used.items()}
    assert names["same"] == names["a"] == "gpushare-0" and names["b"] == "gpushare-1"
    assert names["like-side"] == names["again"] == "gpushare-init-2" and names["side"] == "gpushare-init-1"
    assert {one["name"] for one in made["spec"]["resourceClaims"]} == set(names.values())


def test_a_request_that_differs_from_its_limit_stays() -> None:
    """The API server refuses such a pod, with or without the webhook."""
    raw = pod_of(container("c", 30, 4))
    raw["spec"]["containers"][0]["resources"]["requests"][NAMES.vcore] = "20"
    made = patched(raw, converted(raw).patch)
    assert made["spec"]["containers"][0]["resources"]["requests"] == {NAMES.vcore: "20"}


REQUESTS = st.sampled_from([(0, 0, 0), (20, 4, 0), (20, 8, 0), (100, 0, 0), (200, 0, 0), (0, 0, 3)])


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.lists(st.tuples(REQUESTS, st.booleans()), max_size=4))
def test_any_pod_asks_for_the_same_by_claims(mains: list[Any], inits: list[Any]) -> None:
    """Nothing of the old resources is left, every container that asked has one claim of its template, those that run
    together have different ones, and converting again changes nothing."""
    containers = [container(f"c{n}", *asked) for n, asked in enumerate(mains)]
    init = tuple(
        container(f"i{n}", *asked, **({"restartPolicy": "Always"} if is_sidecar else {}))
        for n, (asked, is_sidecar) in enumerate(inits)
    )
    raw = pod_of(*containers, init=init, resourceClaims=[{"name": "own", "resourceClaimName": "x"}])
    found = converted(raw)
    made = patched(raw, found.patch)
    by_claim = {one["name"]: one.get("resourceClaimTemplateName") for one in made["spec"]["resourceClaims"]}
    templates = {one.name for one in found.templates}
    assert {name for claim, name in by_claim.items() if claim != "own"} == templates
    together = []
    for before, after in zip(
        [*containers, *init], [*made["spec"]["containers"], *made["spec"].get("initContainers", [])], strict=True
    ):
        limits = after["resources"]["limits"]
        assert limits == {"cpu": "1"} and not after["resources"]["requests"]
        claims = after["resources"].get("claims", [])
        assert len(claims) == (len(before["resources"]["limits"]) > 1)
        if claims:
            assert by_claim[claims[0]["name"]] == template_of(pod_of(before)).name
            if before["name"].startswith("c") or before.get("restartPolicy"):
                together.append(claims[0]["name"])
    assert len(set(together)) == len(together)
    assert converted(made) == Conversion()


# --- the webhook, and its templates in an API server ---


def review(raw: Raw, *, is_dry_run: bool = False, **changes: Any) -> Raw:
    request = {
        "uid": "u",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "ns",
        "dryRun": is_dry_run,
        "object": raw,
        **changes,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def mutated(cluster: FakeCluster, *reviews: Raw, clock: Any = lambda: 0.0) -> list[Raw]:
    async with cluster.opened_api() as api:
        webhook = ClaimsWebhook(api=api, names=NAMES, clock=clock)
        answers = [json.loads((await webhook.mutate(json.dumps(one).encode())).body) for one in reviews]
    return [answer["response"] for answer in answers]


SHARE = pod_of(container("c", 30, 16))


async def test_a_template_is_made_once_and_a_dry_run_makes_none() -> None:
    """The second pod of that request finds it; the patch names it."""
    async with fake_cluster() as cluster:
        dry, first, second = await mutated(cluster, review(SHARE, is_dry_run=True), review(SHARE), review(SHARE))
        posts = [path for method, path in cluster.requests if method == "POST"]
        (raw,) = cluster.objects[TEMPLATES].values()
    assert posts == [f"/apis/resource.k8s.io/v1/namespaces/ns/{TEMPLATES}"]
    assert raw["spec"] == {"spec": spec_of(template_of(SHARE))}
    assert dry["patch"] == first["patch"] == second["patch"] and first["uid"] == "u" and first["allowed"]
    made = patched(SHARE, json.loads(base64.b64decode(first["patch"])))
    assert made["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == raw["metadata"]["name"]


async def test_a_template_of_that_name_and_another_spec_is_an_error() -> None:
    """Nobody gets other terms than he asked for; defaults that an API server adds are no difference."""
    template = template_of(SHARE)
    spec = spec_of(template)
    spec["devices"]["requests"][0]["exactly"]["adminAccess"] = False
    for cores, is_allowed in (("30", True), ("90", False)):
        spec["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["cores"] = cores
        async with fake_cluster() as cluster:
            cluster.put(TEMPLATES, {"metadata": {"name": template.name, "namespace": "ns"}, "spec": {"spec": spec}})
            (answer,) = await mutated(cluster, review(SHARE, is_dry_run=True))
        assert answer["allowed"] is is_allowed
    assert "another spec" in answer["status"]["message"]


async def test_a_template_that_another_replica_makes_meanwhile_is_taken() -> None:
    """A 409 to the creation is no error, where the template is there then."""
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        webhook = ClaimsWebhook(api=api, names=NAMES)
        content = json.dumps(review(SHARE)).encode()
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(webhook.mutate(content)) for _ in range(5)]
        assert len(cluster.objects[TEMPLATES]) == 1
    assert [one.result().outcome for one in answers] == ["ok"] * 5


async def test_an_api_server_that_refuses_or_is_away_denies_the_pod_with_the_reason() -> None:
    """It is tried again by whoever creates it; nothing passes unchanged."""
    async with fake_cluster() as cluster:
        cluster.faults = ["403"]
        (refused,) = await mutated(cluster, review(SHARE))
        cluster.is_down = True
        (away,) = await mutated(cluster, review(SHARE))
    assert not refused["allowed"] and "ResourceClaimTemplate" in refused["status"]["message"]
    assert not away["allowed"] and away["status"]["code"] == 503


async def test_templates_are_created_at_a_bounded_rate() -> None:
    """Whoever reaches the port may ask; known requests are answered all the same."""
    now = [0.0]
    reviews = [review(pod_of(container("c", 30, blocks))) for blocks in range(1, MOST_NEW + 2)]
    async with fake_cluster() as cluster, cluster.opened_api() as api:
        webhook = ClaimsWebhook(api=api, names=NAMES, clock=lambda: now[0])

        async def is_allowed(one: Raw) -> bool:
            return bool(json.loads((await webhook.mutate(json.dumps(one).encode())).body)["response"]["allowed"])

        assert [await is_allowed(one) for one in reviews] == [True] * MOST_NEW + [False]
        assert await is_allowed(reviews[0])
        now[0] = 1.0
        assert await is_allowed(reviews[-1])


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        json.dumps({**review(SHARE), "apiVersion": "admission.k8s.io/v1beta1"}).encode(),
        json.dumps(review(SHARE, operation="UPDATE")).encode(),
        json.dumps(review(SHARE, subResource="status")).encode(),
        json.dumps(review(SHARE, object=None)).encode(),
        json.dumps(review(SHARE, uid=None)).encode(),
        json.dumps(review(pod_of(*(container(f"c{n}", 1, 1) for n in range(300))))).encode(),
        json.dumps(review({**SHARE, "metadata": {"annotations": {"a": "x" * MAX_POD_BYTES}}})).encode(),
    ],
)
async def test_what_is_no_review_of_a_new_pod_is_refused(body: bytes) -> None:
    """Without a request to the API server."""
    async with fake_cluster() as cluster:
        async with cluster.opened_api() as api:
            refused = await ClaimsWebhook(api=api, names=NAMES).mutate(body)
        assert (refused.status, refused.outcome) == (400, "bad")
        assert not cluster.requests


@pytest.mark.parametrize(("mode", "expected"), [("open", [200, 200]), ("certificate", [200, 403]), ("off", [404, 404])])
async def test_who_may_ask_is_a_setting_and_every_replica_answers(mode: str, expected: list[int]) -> None:
    """With a certificate of client_ca and without one; the lease is another's."""
    found = []
    async with (
        fake_cluster() as cluster,
        running_extender(cluster, claims_webhook=mode, leader_elect=True, is_ready=False, **TLS) as asker,
    ):
        url = f"https://127.0.0.1:{asker.parts.web.bound_port}/mutate-pods?timeout=5s"
        for has_certificate in (True, False):
            async with (
                session_of_client(has_certificate=has_certificate) as session,
                session.post(url, json=review(SHARE, is_dry_run=True)) as answer,
            ):
                found.append(answer.status)
    assert found == expected


async def test_a_wrong_request_is_answered_at_once_with_what_to_write() -> None:
    """A part of a unit, which Kubernetes would refuse without a remedy, is denied; a mistyped name beside is a warning."""
    half = pod_of({"name": "c", "resources": {"limits": {NAMES.vcore: "0.5", NAMES.vmemory: "16"}}})
    beside = pod_of({"name": "c", "resources": {"limits": {NAMES.vcore: "100", "tencent.com/vcuda-mem": "4Gi"}}})
    async with fake_cluster() as cluster:
        denied, warned = await mutated(cluster, review(half), review(beside))
    assert not denied["allowed"]
    assert denied["status"]["message"].endswith("Write tencent.com/vcuda-core: 50, in 1/100 of a GPU's compute.")
    assert warned["allowed"] and warned["warnings"][0].endswith("Write tencent.com/vcuda-memory: 16 for 4 GiB.")
