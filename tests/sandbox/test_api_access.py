"""The embedded API server obeys whoever has its token, and nobody else: a pod in it can be any command of its user."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import aiohttp
import pytest
import yaml

from gpushare_agent.sandbox.api.access import write_kubeconfig
from gpushare_agent.sandbox.api.responses import MAX_VALUES
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.fakes.api_server import PODS
from tests.sandbox.support_containers import host_container
from tests.sandbox.support_sandbox import open_test_node, pod

JSON = {"Content-Type": "application/json"}
COMMAND = json.dumps({**pod("theirs"), "spec": {"containers": [host_container("main", "true")]}})


async def posted(api: EmbeddedApiServer, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    """A pod with a command of the host, sent by somebody with these headers: HTTP status and answer."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
        session.post(api.url + PODS, data=COMMAND, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer ", "Bearer x", "Basic {token}", "{token}", "Bearer {token}x", "Bearer {short}", "Bearer ü"],
)
async def test_nothing_is_created_without_the_token(authorization: str | None) -> None:
    """401 with a Status body, whatever else is right about the request."""
    async with EmbeddedApiServer() as api:
        headers = dict(JSON)
        if authorization is not None:
            headers["Authorization"] = authorization.format(token=api.token, short=api.token[:-1])
        status, body = await posted(api, headers)
        assert (status, body["kind"], body["code"], body["reason"]) == (401, "Status", 401, "Unauthorized")
        assert api.pods() == [] and not api.requests


@pytest.mark.parametrize("path", [PODS, "/api/v1/nodes", "/api", "/apis", "/absent", f"{PODS}?watch=true"])
async def test_reading_needs_the_token_too(path: str) -> None:
    """Also what does not exist; versions and health are open, as in a real API server."""
    async with EmbeddedApiServer() as api, aiohttp.ClientSession() as session:
        async with session.get(api.url + path) as answer:
            assert answer.status == 401
        for open_path in ("/version", "/healthz", "/livez", "/readyz"):
            async with session.get(api.url + open_path) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_that_a_page_could_send_unasked_is_refused(content_type: str) -> None:
    """415, with the token: nothing that a browser sends across origins without a question is read."""
    async with EmbeddedApiServer() as api:
        status, body = await posted(api, {**api.headers, "Content-Type": content_type})
        assert (status, body["reason"]) == (415, "UnsupportedMediaType")
        assert api.pods() == []


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT", "DELETE"])
@pytest.mark.parametrize("value", ["[]", "{}", '"k":""', "0"])
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(method: str, value: str) -> None:
    """413, also of one that is no JSON: reading small values by the hundred thousand would keep the event loop."""
    path = PODS if method == "POST" else f"{PODS}/a"
    content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
    async with EmbeddedApiServer() as api, aiohttp.ClientSession(headers=api.headers) as session:
        data = "[" + ",".join([value] * (MAX_VALUES + 1))
        headers = {"Content-Type": content_type}
        async with session.request(method, api.url + path, data=data, headers=headers) as answer:
            body = await answer.json()
        assert (answer.status, body["kind"], body["reason"]) == (413, "Status", "RequestEntityTooLarge")
        assert f"at most {MAX_VALUES}" in body["message"]


async def test_a_foreign_host_name_is_refused() -> None:
    """A name that resolves to 127.0.0.1 is still another origin's; also for what is open to everybody."""
    async with EmbeddedApiServer() as api, aiohttp.ClientSession(headers=api.headers) as session:
        for host in (
            "evil.example",
            f"evil.example:{api.port}",
            "127.0.0.1",
            "127.0.0.1:1",
            f"127.0.0.1.evil:{api.port}",
        ):
            status, body = await posted(api, {**api.headers, **JSON, "Host": host})
            assert (status, body["reason"]) == (403, "Forbidden")
            async with session.get(api.url + "/version", headers={"Host": host}) as answer:
                assert answer.status == 403
        assert api.pods() == []
        for host in (f"localhost:{api.port}", f"[::1]:{api.port}"):
            async with session.get(api.url + PODS, headers={"Host": host}) as answer:
                assert answer.status == 200


async def test_the_kubeconfig_of_a_node_holds_the_token_for_its_user_only() -> None:
    """Mode 0600; two nodes have two tokens, and one's opens nothing at the other."""
    async with open_test_node() as node, open_test_node() as other:
        assert stat.S_IMODE(node.paths.kubeconfig.stat().st_mode) == 0o600
        user = yaml.safe_load(node.paths.kubeconfig.read_text())["users"][0]["user"]
        assert user == {"token": node.api.token}
        assert (await posted(other.api, {**node.api.headers, **JSON}))[0] == 401
        assert (await posted(node.api, {"Authorization": f"Bearer {user['token']}", **JSON}))[0] == 201


def test_a_kubeconfig_takes_the_place_of_what_lay_there(short_dir: Path) -> None:
    """The token is not written through a link, nor into a file that others have open."""
    target, path = short_dir / "target", short_dir / "kubeconfig"
    target.write_text("")
    path.symlink_to(target)
    write_kubeconfig(path, "http://127.0.0.1:1", "secret")
    assert target.read_text() == "" and "secret" in path.read_text() and not path.is_symlink()
