"""The protobuf bodies that kubectl sends: captured ones over a real socket, and what no reader should fall over."""

from __future__ import annotations

import base64
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.core.kit.protobuf import MalformedMessageError, bytes_field, integer_field
from gpushare_agent.sandbox.api.protobuf import CONTENT_TYPE, UnreadFieldError, decoded
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.sandbox.support_sandbox import pod

PODS = "/api/v1/namespaces/default/pods"
SENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "create namespace team": (
        "/api/v1/namespaces",
        {"metadata": {"name": "team"}},
        "azhzAAoPCgJ2MRIJTmFtZXNwYWNlEhwKFAoEdGVhbRIAGgAiACoAMgA4AEIAEgAaAgoAGgAiAA==",
    ),
    "create quota most --hard=pods=3,requests.tencent.com/vcuda-core=100": (
        "/api/v1/namespaces/default/resourcequotas",
        {"spec": {"hard": {"pods": "3", "requests.tencent.com/vcuda-core": "100"}}},
        "azhzAAoTCgJ2MRINUmVzb3VyY2VRdW90YRJRChQKBG1vc3QSABoAIgAqADIAOABCABI3CgsKBHBvZHMSAwoBMwooCh9yZXF1ZXN0cy50"
        "ZW5jZW50LmNvbS92Y3VkYS1jb3JlEgUKAzEwMBoAGgAiAA==",
    ),
    "create deployment web --image=nginx:1 --replicas=0 --port=80 -- sleep infinity": (
        "/apis/apps/v1/namespaces/default/deployments",
        {"spec": {"replicas": 0, "selector": {"matchLabels": {"app": "web"}}}},
        "azhzAAoVCgdhcHBzL3YxEgpEZXBsb3ltZW50EssBCh8KA3dlYhIAGgAiACoAMgA4AEIAWgoKA2FwcBIDd2ViEpkBCAASDAoKCgNhcHAS"
        "A3dlYhp/ChwKABIAGgAiACoAMgA4AEIAWgoKA2FwcBIDd2ViEl8SQQoFbmdpbngSB25naW54OjEaBXNsZWVwGghpbmZpbml0eSoAMgoK"
        "ABAAGFAiACoAQgBqAHIAgAEAiAEAkAEAogEAGgAyAEIASgBSAFgAYABoAIIBAIoBAJoBAMIBACICCgAoADgAGgwIABAAGAAgACgAOAAa"
        "ACIA",
    ),
    "create job train --image=busybox:1.36 -- sh -c true": (
        "/apis/batch/v1/namespaces/default/jobs",
        {"kind": "Job"},
        "azhzAAoPCghiYXRjaC92MRIDSm9iEpMBChUKBXRyYWluEgAaACIAKgAyADgAQgAScDJuChAKABIAGgAiACoAMgA4AEIAEloSNwoFdHJh"
        "aW4SDGJ1c3lib3g6MS4zNhoCc2gaAi1jGgR0cnVlKgBCAGoAcgCAAQCIAQCQAQCiAQAaBU5ldmVyMgBCAEoAUgBYAGAAaACCAQCKAQCa"
        "AQDCAQAaCCAAKAAwADoAGgAiAA==",
    ),
    "create configmap c --from-literal=key=value": (
        "/api/v1/namespaces/default/configmaps",
        {"data": {"key": "value"}},
        "azhzAAoPCgJ2MRIJQ29uZmlnTWFwEiEKEQoBYxIAGgAiACoAMgA4AEIAEgwKA2tleRIFdmFsdWUaACIA",
    ),
    "create service clusterip s --tcp=80:http": (
        "/api/v1/namespaces/default/services",
        {"spec": {"ports": [{"name": "80-http", "protocol": "TCP", "port": 80, "targetPort": "http", "nodePort": 0}]}},
        "azhzAAoNCgJ2MRIHU2VydmljZRJmChsKAXMSABoAIgAqADIAOABCAFoICgNhcHASAXMSQwoeCgc4MC1odHRwEgNUQ1AYUCIKCAEQABoE"
        "aHR0cCgAEggKA2FwcBIBcxoAIglDbHVzdGVySVA6AEIAUgBaAGAAaAAaAgoAGgAiAA==",
    ),
    "autoscale deployment web --min=1 --max=3 --cpu-percent=70": (
        "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers",
        {"spec": {"maxReplicas": 3, "targetCPUUtilizationPercentage": 70}},
        "azhzAAopCg5hdXRvc2NhbGluZy92MRIXSG9yaXpvbnRhbFBvZEF1dG9zY2FsZXISPwoTCgN3ZWISABoAIgAqADIAOABCABIiChoKCkRl"
        "cGxveW1lbnQSA3dlYhoHYXBwcy92MRABGAMgRhoEGAAgABoAIgA=",
    ),
    "auth can-i get pods --namespace=team": (
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "spec": {"resourceAttributes": {"namespace": "team", "verb": "get", "resource": "pods"}},
            "status": {"allowed": True},
        },
        "azhzAAoyChdhdXRob3JpemF0aW9uLms4cy5pby92MRIXU2VsZlN1YmplY3RBY2Nlc3NSZXZpZXcSOQoQCgASABoAIgAqADIAOABCABIb"
        "ChkKBHRlYW0SA2dldBoAIgAqBHBvZHMyADoAGggIABIAGgAgABoAIgA=",
    ),
    "auth can-i --list": (
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        {"spec": {"namespace": "default"}},
        "azhzAAoxChdhdXRob3JpemF0aW9uLms4cy5pby92MRIWU2VsZlN1YmplY3RSdWxlc1JldmlldxIjChAKABIAGgAiACoAMgA4AEIAEgkK"
        "B2RlZmF1bHQaBBgAIgAaACIA",
    ),
    "auth whoami": (
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        {"status": {"userInfo": {"username": "sandbox"}}},
        "azhzAAotChhhdXRoZW50aWNhdGlvbi5rOHMuaW8vdjESEVNlbGZTdWJqZWN0UmV2aWV3EhoKEAoAEgAaACIAKgAyADgAQgASBgoECgAS"
        "ABoAIgA=",
    ),
}
"""What kubectl 1.32 sends for each command: where to, what is to be in the answer, and the body in base64."""
DELETE_NOW = base64.b64decode("azhzAAoTCgJ2MRINRGVsZXRlT3B0aW9ucxICCAAaACIA")
"""Of `kubectl drain --disable-eviction --grace-period=0`."""


def enveloped(version: str, kind: str, content: bytes) -> bytes:
    kinds = bytes_field(1, version.encode()) + bytes_field(2, kind.encode())
    return b"k8s\x00" + bytes_field(1, kinds) + bytes_field(2, content)


async def sent(api: EmbeddedApiServer, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    headers = {**api.headers, "Content-Type": CONTENT_TYPE}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.request(method, api.url + path, data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def holds(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(holds(whole.get(name), value) for name, value in part.items())
    return bool(whole == part)


@pytest.mark.parametrize("command", SENT)
async def test_what_kubectl_sends_is_read_as_the_object_that_it_means(command: str) -> None:
    """Created with what was asked for, and without what protobuf writes of empty fields."""
    path, expected, body = SENT[command]
    async with EmbeddedApiServer() as api:
        status, made = await sent(api, "POST", path, base64.b64decode(body))
        assert status == 201 and holds(made, expected), made
        assert "" not in made.get("metadata", {}).values() and "null" not in str(made)


async def test_a_deployments_template_is_whole() -> None:
    """Of nested messages: labels, the image, the command, the port."""
    path, _, body = SENT["create deployment web --image=nginx:1 --replicas=0 --port=80 -- sleep infinity"]
    async with EmbeddedApiServer() as api:
        _, made = await sent(api, "POST", path, base64.b64decode(body))
        template = made["spec"]["template"]
        assert template["metadata"]["labels"] == {"app": "web"}
        (main,) = template["spec"]["containers"]
        assert (main["name"], main["image"], main["command"]) == ("nginx", "nginx:1", ["sleep", "infinity"])
        assert main["ports"][0]["containerPort"] == 80


async def test_a_pod_is_evicted_and_deleted_with_the_options_of_the_body() -> None:
    """Grace 0: it goes at once; of another UID it stays."""
    async with EmbeddedApiServer() as api:
        for name in ("a", "b", "c"):
            api.create_pod(pod(name))
            api.bind_pod("default", name, "n")
        assert (await sent(api, "DELETE", f"{PODS}/a", DELETE_NOW))[0] == 200
        options = integer_field(1, 0) + bytes_field(2, bytes_field(1, b"other"))
        for inner, code in ((options, 409), (integer_field(1, 0), 201)):
            eviction = enveloped("policy/v1", "Eviction", bytes_field(2, inner))
            assert (await sent(api, "POST", f"{PODS}/b/eviction", eviction))[0] == code
        dry = enveloped("policy/v1", "Eviction", bytes_field(2, bytes_field(5, b"All")))
        assert (await sent(api, "POST", f"{PODS}/c/eviction", dry))[0] == 201
        assert [one["metadata"]["name"] for one in api.pods()] == ["c"]


async def test_a_field_that_is_not_read_is_refused_with_the_way_that_works() -> None:
    """Never left out: a pod without its affinity would be another pod. The kind is named, too."""
    affinity = enveloped("v1", "Namespace", bytes_field(2, bytes_field(7, b"x")))
    unknown = enveloped("v1", "Secret", b"")
    async with EmbeddedApiServer() as api:
        for body, named in ((affinity, "field 7 of V1NamespaceSpec"), (unknown, "V1Secret")):
            status, said = await sent(api, "POST", "/api/v1/namespaces", body)
            assert (status, said["reason"]) == (415, "UnsupportedMediaType")
            assert named in said["message"] and "kubectl apply -f -" in said["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"k8s\x00\x0a\xff", enveloped("v1", "Namespace", b"\x0a\x7f"),
        enveloped("v1", "Namespace", integer_field(1, 5)), enveloped("v1", "Namespace", bytes_field(1, b"\x0a\x01\xff")),
        enveloped("autoscaling/v1", "HorizontalPodAutoscaler", bytes_field(2, bytes_field(3, b"x"))),
        enveloped("v1", "Namespace", bytes_field(2, bytes_field(1, b"x") * 20_000)),
    ],
    ids=["empty", "JSON", "cut", "too long", "a number", "no UTF-8", "no number", "too many fields"],
)  # fmt: skip
async def test_a_body_that_is_no_such_message_is_a_bad_request(body: bytes) -> None:
    """400 with a Status, and the server goes on."""
    async with EmbeddedApiServer() as api:
        status, said = await sent(api, "POST", "/api/v1/namespaces", body)
        assert (status, said["reason"]) == (400, "BadRequest")


def test_a_number_that_is_a_text_is_no_number() -> None:
    """It would be stored, and no answer with it could be written."""
    port = bytes_field(4, bytes_field(2, b"80"))
    with pytest.raises(MalformedMessageError, match="targetPort is no number"):
        decoded(enveloped("v1", "Service", bytes_field(2, bytes_field(1, port))))


@given(content=st.binary(max_size=200), kind=st.sampled_from(["Namespace", "Deployment", "Eviction", "Service"]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(content: bytes, kind: str) -> None:
    """An object or one of two errors."""
    try:
        assert decoded(enveloped("v1", kind, content))["kind"] == kind
    except (MalformedMessageError, UnreadFieldError):
        pass
