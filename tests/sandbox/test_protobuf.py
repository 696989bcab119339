"""The protobuf bodies that kubectl sends: captured ones over a real socket, and what no reader should fall over."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_agent.core.kit.protobuf import MalformedMessageError, bytes_field, integer_field
from gpushare_agent.sandbox.api.protobuf import CONTENT_TYPE, UnreadFieldError, decoded
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.fakes.api_server import PODS
from tests.sandbox.support_sandbox import pod

SENT = {
    one["command"]: one
    for one in json.loads((Path(__file__).parents[1] / "data/kubectl/created-1.32.json").read_text())
}
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
    sends = SENT[command]
    async with EmbeddedApiServer() as api:
        status, made = await sent(api, "POST", sends["path"], base64.b64decode(sends["body"]))
        assert status == 201 and holds(made, sends["expected"]), made
        assert "" not in made.get("metadata", {}).values() and "null" not in str(made)


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
