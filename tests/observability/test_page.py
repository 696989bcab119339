"""The dashboard's files over real HTTP: which client gets the page, what protects it, and what is sent again."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from aiohttp import ClientSession
from multidict import CIMultiDict

import gpushare_agent
from bench.sample_node import SampleNode
from tests.observability.support_web import served_node

DIRECTORY = Path(gpushare_agent.__file__).parent / "core" / "web" / "dashboard"
FILES = sorted(path.name for path in DIRECTORY.iterdir())
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


async def _get(path: str, **headers: str) -> tuple[int, bytes, CIMultiDict[str]]:
    async with served_node(SampleNode(gpus=1, containers=0)) as served:
        return await _ask(f"{served.url}{path}", **headers)


async def _ask(url: str, **headers: str) -> tuple[int, bytes, CIMultiDict[str]]:
    headers = {"Accept-Encoding": "identity"} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with ClientSession(auto_decompress=False) as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers.copy()


async def test_a_browser_gets_the_page() -> None:
    """The root answers a reader that accepts HTML with the file of the package."""
    status, body, headers = await _get("/", Accept=BROWSER)
    assert (status, body) == (200, (DIRECTORY / "index.html").read_bytes())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "Accept" in headers["Vary"].split(", ")


@pytest.mark.parametrize("accept", ["*/*", "text/plain", "application/json", "text/htmlx", ""])
async def test_everything_else_gets_the_list_of_paths(accept: str) -> None:
    """curl and programs see text, which names the API and not the page's files, and says where the page is."""
    status, body, headers = await _get("/", Accept=accept)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert "the dashboard, in a browser" in body.decode().splitlines()[0]
    listed = re.findall(r"^  (/\S*)$", body.decode(), flags=re.M)
    assert {"/", "/api/v1/node", "/metrics"} <= set(listed)
    assert not [path for path in listed if path.startswith("/dashboard")]


async def test_every_file_is_served_with_its_type() -> None:
    """And nothing is in the directory that is not."""
    kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    async with served_node(SampleNode(gpus=1, containers=0)) as served:
        for name in FILES:
            status, body, headers = await _ask(f"{served.url}/dashboard/{name}")
            if name.endswith(".html"):  # the other page is kubectl/cluster_nodes.py's, with a server of its own
                assert status == 404
                continue
            assert (status, body) == (200, (DIRECTORY / name).read_bytes()), name
            assert headers["Content-Type"] == f"{kinds[Path(name).suffix]}; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/dashboard/app.js", "/api/v1/node", "/metrics", "/absent", "/readyz"])
async def test_every_answer_protects_a_browser(path: str) -> None:
    """No foreign resource, no frame, no guessing of types, no referrer, and no word of what serves it; 404 too."""
    _, _, headers = await _get(path, Accept=BROWSER)
    policy = headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"} <= set(policy)
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Server"] == "gpushare-agent"
    assert "Access-Control-Allow-Origin" not in headers


async def test_an_unchanged_file_is_not_sent_again() -> None:
    """304 for its tag, also among others and strong; the whole for another tag."""
    async with served_node(SampleNode(gpus=1, containers=0)) as served:
        url = f"{served.url}/dashboard/app.js"
        _, _, headers = await _ask(url)
        tag = headers["ETag"]
        assert headers["Cache-Control"] == "no-cache"
        for asked in (tag, f'"other", {tag}', tag.removeprefix("W/")):
            status, body, again = await _ask(url, If_None_Match=asked)
            assert (status, body, again["ETag"]) == (304, b"", tag)
        assert (await _ask(url, If_None_Match='"other"'))[0] == 200


async def test_files_are_packed_for_those_who_accept_it() -> None:
    """The same content, a fraction of the bytes."""
    status, body, headers = await _get("/dashboard/dashboard.css", Accept_Encoding="gzip, br")
    whole = (DIRECTORY / "dashboard.css").read_bytes()
    assert (status, headers["Content-Encoding"], gzip.decompress(body)) == (200, "gzip", whole)
    assert len(body) < len(whole) / 3


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/../web.py", "/dashboard/%2e%2e/cli.py", "/dashboard/x.js"])
async def test_nothing_but_these_files_can_be_had(path: str) -> None:
    """There is no directory behind the address, only a table of names."""
    assert (await _get(path))[0] == 404


def test_the_page_names_no_address_outside_and_no_inline_code() -> None:
    """Nothing is loaded from elsewhere, and the policy against inline code and markup from values is kept."""
    for name in FILES:
        text = (DIRECTORY / name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"']*", text)) - {
            "http://www.w3.org/2000/svg"
        }
        assert not addresses, (name, addresses)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    page = (DIRECTORY / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]* src=)", page)
    assert not re.search(r"(?:href|src)=\"/", page), "relative addresses work behind a proxy's path too"
