"""core/web/debug_guard.py: which requests are answered."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import structlog

from gpushare_agent.core.kit.tcp_listeners import listen_tcp
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.web import debug_guard
from gpushare_agent.core.web.debug_guard import Guard
from tests.observability.support_debug import TOKEN, ask, send_raw, serving

HOST = b"Host: localhost\r\n"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


# --- this host ---


async def test_without_a_token_only_this_host_is_answered() -> None:
    """By both addresses of the connection, whatever the Host header is."""
    own = _own_address()
    async with serving(addr="0.0.0.0") as port:
        assert (await ask(port, "/debug/log")).status == 200
        for path in ("/debug/log", "/debug/none", "/debug"):
            answer = await ask(port, path, at=own, Host="localhost")
            assert answer.status == 403 and "kubectl port-forward" in answer.text, path
        # As from another host under route_localnet.
        assert (await ask(port, "/debug/log", source=own)).status == 403


async def test_with_a_token_other_hosts_are_answered_too(token_file: Path) -> None:
    """With it alone."""
    own = _own_address()
    async with serving(addr="0.0.0.0", token_file=token_file) as port:
        assert (await ask(port, "/debug/log", at=own)).status == 401
        assert (await ask(port, "/debug/log", at=own, Authorization=f"Bearer {TOKEN}")).status == 200


def _own_address() -> str:
    """One of this machine that is no loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback's")
        address: str = probe.getsockname()[0]
        return address


async def test_a_localhost_that_is_none_is_not_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hosts file may have any address: the resolved ones are checked."""

    async def resolve(*_args: object, **_more: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(Unavailable, match=r"10\.1\.2\.3, which other hosts reach"):
        await listen_tcp("localhost", 0, backlog=1, only_loopback=True)


# --- the token ---


@pytest.mark.parametrize("path", ["/debug/", "/debug/tasks", "/debug/none", "/debug"])
async def test_without_the_token_no_page_is_shown(token_file: Path, path: str) -> None:
    """Not even which pages there are; on localhost too where a token file is set."""
    async with serving(token_file=token_file) as port:
        for headers in (
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer wrong-wrong-wrong-wrong"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": TOKEN},
            {"Authorization": "Bearer é" + "x" * 2000},
        ):
            answer = await ask(port, path, **headers)
            assert answer.status == 401, headers
            assert "Bearer" in answer.headers["WWW-Authenticate"]
            assert "/debug" not in answer.text


async def test_with_the_token_any_name_of_the_host_is_accepted(token_file: Path) -> None:
    """A page of a browser has no token, so the name is not checked."""
    async with serving(token_file=token_file) as port:
        answer = await ask(port, "/debug/log", Authorization=f"bearer {TOKEN}", Host="node-1.example:5678")
        twice = f"Authorization: Bearer {TOKEN}\r\n".encode() * 2
        both = await send_raw(port, b"GET /debug/ HTTP/1.1\r\nConnection: close\r\n" + HOST + twice + b"\r\n")
    assert answer.status == 200
    assert both.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400"))


async def test_a_new_token_counts_without_a_restart(token_file: Path) -> None:
    """The file is read again at most once a second; the old token is out then."""
    now = 0.0
    guard = Guard(token_file, clock=lambda: now)
    assert await guard.denies("/debug/", _Headers(Authorization=f"Bearer {TOKEN}"), is_local=True) is None
    token_file.write_text("another-token-of-some-length")
    assert await guard.denies("/debug/", _Headers(Authorization=f"Bearer {TOKEN}"), is_local=True) is None
    now = debug_guard.READ_AGAIN_S
    denied = await guard.denies("/debug/", _Headers(Authorization=f"Bearer {TOKEN}"), is_local=True)
    assert denied is not None and denied.status == 401
    assert (
        await guard.denies("/debug/", _Headers(Authorization="Bearer another-token-of-some-length"), is_local=True)
        is None
    )


@pytest.mark.parametrize("content", [None, "", "  \n", "short", "x" * 5000])
async def test_a_token_file_that_cannot_be_used_refuses_every_request(tmp_path: Path, content: str | None) -> None:
    """Also not somebody with an empty token; the log has the reason once, and never what is in the file."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with structlog.testing.capture_logs() as logged:
        async with serving(token_file=file) as port:
            for token in ("", (content or "").strip()):
                answer = await ask(port, "/debug/", Authorization=f"Bearer {token}"[:3000])
                assert answer.status == 503
                assert str(file) not in answer.text
    reported = [line for line in logged if line["event"] == "debug_token_unusable"]
    assert len(reported) == 1
    assert not (content or "").strip() or (content or "").strip() not in str(reported)


# --- pages of a browser ---


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:15679", "127.0.0.1:5678", "LOCALHOST", "[::1]:5678", "127.1.2.3"]
)
async def test_this_host_s_names_are_served(host: str) -> None:
    """With any port: kubectl port-forward chooses its own."""
    async with serving() as port:
        assert (await ask(port, "/debug/log", Host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[2001:db8::1]", "[", "a b"),
        *("[::1].evil.example", "[::1]evil.example", "[127.0.0.1]evil", "[127.0.0.1]", "[localhost]", "::1"),
        *("127.0.0.1:evil.example", "localhost:", "localhost:1:2", "localhost:123456", "[::1]:x", "[::1", "::1]"),
    ],
)
async def test_another_name_for_loopback_is_refused(host: str) -> None:
    """DNS rebinding: the attacker's own name that resolves to 127.0.0.1."""
    async with serving() as port:
        answer = await send_raw(
            port, f"GET /debug/tasks HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
    assert answer.split(b" ")[1] in (b"403", b"400")
    assert b"tasks at" not in answer


async def test_a_request_without_a_host_or_with_two_is_refused() -> None:
    """Old HTTP/1.0 as well."""
    async with serving() as port:
        for head in (
            b"GET /debug/log HTTP/1.0\r\n\r\n",
            b"GET /debug/log HTTP/1.1\r\nHost: localhost\r\nHost: x\r\n\r\n",
        ):
            assert (await send_raw(port, head)).split(b" ")[1] in (b"403", b"400")


@pytest.mark.parametrize(
    "target", ["http://evil.example/debug/tasks", "http://localhost/debug/tasks", "evil.example:80", "*"]
)
@pytest.mark.parametrize("has_token", [False, True])
async def test_a_request_line_that_is_no_path_is_refused(token_file: Path, target: str, has_token: bool) -> None:
    """The URL of another host counts there, whatever the Host header is. What has no path is no page of /debug."""
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    async with serving(token_file=token_file if has_token else None) as port:
        answer = await send_raw(port, head.encode())
    assert answer.split(b" ")[1] in ((b"400",) if "/debug" in target else (b"400", b"404"))
    assert b"tasks at" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:5678"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/debug/log?level=debug"), ("GET", "/debug/tasks")])
async def test_what_a_web_page_sends_is_refused(headers: dict[str, str], method: str, path: str) -> None:
    """Browsers mark such requests; neither a change nor work is done for them."""
    async with serving() as port:
        answer = await ask(port, path, method=method, **headers)
    assert answer.status == 403


async def test_a_person_at_the_address_bar_is_served() -> None:
    """And the links of the index."""
    async with serving() as port:
        for site in ("none", "same-origin"):
            assert (await ask(port, "/debug/", Sec_Fetch_Site=site)).status == 200


class _Headers:
    def __init__(self, **fields: str) -> None:
        self._fields = fields

    def getall(self, key: str, default: list[str]) -> list[str]:
        return [self._fields[key]] if key in self._fields else default
