"""The control socket: who may be asked, and that every request gets an answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.sandbox.control import Answer, Request, ask, open_control
from gpushare_agent.sandbox.controller import SandboxController
from gpushare_agent.sandbox.state_directory import owned_state_directory, prepare_state_directory
from tests.sandbox.support_sandbox import controller_of, open_test_node

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


# --- who is asked ---


async def _obeys(request: Request, peer_pid: int) -> Answer:
    assert peer_pid == os.getpid()
    return {"ok": True, "lines": [request.command], "errors": []}


@as_root
async def test_a_socket_that_another_user_serves_is_reported_nothing(short_dir: Path) -> None:
    """The kernel knows who listens; what `exec` would run with is that user's word."""
    with bind_unix_socket(short_dir / "control.sock", mode=0o600) as theirs:
        os.seteuid(NOBODY)
        try:
            theirs.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(Unavailable, match=f"who runs it is user {NOBODY}, and you are user 0"):
            await ask(short_dir / "control.sock", {"command": "exec"})
        connection, _ = theirs.accept()
        with connection:
            connection.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(connection, 100) == b""


def _link(state: Path) -> Path:
    state.mkdir(mode=0o700)
    link = state.with_name("link")
    link.symlink_to(state)
    return link


def _open_to(mode: int, state: Path) -> Path:
    state.mkdir()
    state.chmod(mode)
    return state


def _theirs(state: Path) -> Path:
    state.mkdir(mode=0o700)
    os.chown(state, NOBODY, NOBODY)
    return state


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_link, "it is a link; name the directory itself"),
        (lambda state: _open_to(0o770, state), r"others may write to it \(mode 0770\); run `chmod go-w "),
        (lambda state: _open_to(0o1777, state), r"others may write to it \(mode 1777\); run `chmod go-w "),
        pytest.param(_theirs, f"it belongs to user {NOBODY}, and you are user 0", marks=as_root),
    ],
    ids=["a link", "for a group", "for all", "another user's"],
)
async def test_a_state_directory_that_is_not_its_users_alone_serves_nobody(
    short_dir: Path, make: Any, why: str
) -> None:
    """Neither a new sandbox nor the commands for one, whoever may have made what lies in it; nothing in it is touched."""
    state = make(short_dir / "s")
    async with open_control(state / "control.sock", _obeys):
        with pytest.raises(Unavailable, match=f"nothing was asked of a sandbox in {state}, .*: {why}.*--state-dir"):
            await ask(state / "control.sock", {"command": "status"})
    with (
        pytest.raises(StartupError, match=f"{state} cannot be trusted: {why}.*--state-dir"),
        owned_state_directory(state),
    ):
        pass
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("use", [prepare_state_directory, lambda state: owned_state_directory(state).__enter__()])
@pytest.mark.parametrize(
    "make",
    [pytest.param(_theirs, marks=as_root), lambda state: _open_to(0o777, state)],
    ids=["another user's", "for all"],
)
def test_nothing_is_written_into_a_directory_that_others_have_made(short_dir: Path, make: Any, use: Any) -> None:
    """Whoever makes it first, at whatever moment, may have put links there that lead to this user's files."""
    state, file = make(short_dir / "s"), short_dir / "file"
    file.write_text("kept")
    for name in ("owner", f".probe-{os.getpid()}", "vm", "kubeconfig"):
        (state / name).symlink_to(file)
    with pytest.raises(StartupError, match=f"{state} cannot be trusted: "):
        use(state)
    assert file.read_text() == "kept"
    assert len(list(state.iterdir())) == 4


def test_a_link_in_the_place_of_the_owners_file_is_not_followed(short_dir: Path) -> None:
    """It was put there while others could write to the directory."""
    state, file = _open_to(0o700, short_dir / "s"), short_dir / "file"
    file.write_text("kept")
    (state / "owner").symlink_to(file)
    with pytest.raises(StartupError, match="holds files that no sandbox left there"), owned_state_directory(state):
        pass
    assert file.read_text() == "kept"


@pytest.mark.parametrize(("mode", "name"), [(0, "closed/s"), (0o500, "closed/s"), (0, "closed"), (0o500, "closed")])
def test_a_directory_without_rights_is_refused_with_advice(mode: int, name: str, short_dir: Path) -> None:
    """Neither one that cannot be made, searched or seen, nor one of the user's own that cannot be written."""
    closed, refused = short_dir / "closed", ""
    short_dir.chmod(0o755)
    closed.mkdir()
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(closed, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        closed.chmod(mode)
        with owned_state_directory(short_dir / name):
            pass
    except StartupError as error:
        refused = str(error)
    finally:
        closed.chmod(0o700)
        if is_root:
            os.seteuid(0)
    assert refused.startswith(f"the state directory {short_dir / name} cannot be used: Permission denied; ")
    assert refused.endswith("choose another with --state-dir")
    assert list(closed.iterdir()) == []


async def test_a_directory_that_others_may_only_read_serves(short_dir: Path) -> None:
    """As mkdir makes it. The socket is the owner's alone, and goes with its sandbox."""
    path = _open_to(0o755, short_dir / "s") / "control.sock"
    async with open_control(path, _obeys):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await ask(path, {"command": "hello"}) == {"ok": True, "lines": ["hello"], "errors": []}
    with pytest.raises(Unavailable, match=r"no sandbox runs in .*start one with"):
        await ask(path, {"command": "hello"})


# --- what is asked ---


@asynccontextmanager
async def open_controller() -> AsyncIterator[tuple[SandboxController, Path]]:
    """A node without an agent, and the socket that obeys for it."""
    async with open_test_node() as node:
        controller = SandboxController(nodes=(controller_of(node),))
        async with open_control(node.paths.control_socket, controller.handle):
            yield controller, node.paths.control_socket


async def _sent(path: Path, line: bytes) -> Answer:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(line)
        writer.write_eof()
        answer: Answer = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b"1", "Expected `object`, got `int`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{", "Input data was truncated"),
        (b"\xff\xfe{}", "invalid character"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "cannot be read"),
        (b'"' + b"x" * (9 * 2**20) + b'"', "on one line of at most 8388608 bytes"),
        (b"{}", "missing required field `command`"),
        (b'{"command": ["apply"]}', "at `$.command`"),
        (b'{"command": "hello"}', "unknown command 'hello'"),
        (b'{"command": "apply", "pods": 5}', "at `$.pods`"),
        (b'{"command": "apply", "pods": [1]}', "at `$.pods[0]`"),
        (b'{"command": "apply", "pods": [{"metadata": 3}]}', '"pods" must hold manifests'),
        (b'{"command": "apply", "pods": [{"metadata": {"name": {}}}]}', "into field metadata.name"),
        (b'{"command": "delete", "names": 3}', "at `$.names`"),
        (b'{"command": "delete", "names": [3]}', "at `$.names[0]`"),
        (b'{"command": "fail-gpu"}', "there is no GPU -1"),
        (b'{"command": "fail-gpu", "gpu": true}', "at `$.gpu`"),
        (b'{"command": "fail-gpu", "gpu": 2}', "there is no GPU 2: this node has the GPUs 0 to 1"),
        (b'{"command": "fail-gpu", "gpu": 0, "xid": "79"}', "at `$.xid`"),
        (b'{"command": "fail-gpu", "gpu": 0, "xid": 0}', "Xid 0 cannot be reported"),
        (b'{"command": "heal-gpu", "gpu": -1}', "there is no GPU -1"),
        (b'{"command": "exec", "pod": "absent"}', 'pods "absent" not found'),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
async def test_a_malformed_request_is_answered_with_what_is_wrong(line: bytes, why: str) -> None:
    """Nothing is done for it, and the next request is heard."""
    async with open_controller() as (controller, path):
        answer = await _sent(path, line + b"\n")
        assert (answer["ok"], answer["lines"]) == (False, [])
        assert why in answer["errors"][0]
        assert answer.get("is_rejected", True) is ("not found" not in why)  # exit code 2, or 1
        assert controller.api.pods() == []
        assert (await ask(path, {"command": "status"}))["ok"]


async def test_a_request_that_breaks_the_sandbox_is_answered_too(short_dir: Path) -> None:
    """The peer hears of it, and the sandbox goes on."""

    async def fails(_request: Request, _peer_pid: int) -> Answer:
        raise KeyError("missing")

    async with open_control(short_dir / "control.sock", fails):
        for _ in range(2):
            answer = await ask(short_dir / "control.sock", {"command": "x"})
            assert answer["errors"] == [
                "the sandbox has failed at the request: KeyError('missing'); its terminal shows where"
            ]


async def test_an_asker_that_says_nothing_gets_an_answer_or_goes(short_dir: Path) -> None:
    """A connection without a request harms nobody."""
    async with open_control(short_dir / "control.sock", _obeys):
        with socket.socket(socket.AF_UNIX) as mute:
            mute.connect(str(short_dir / "control.sock"))
        assert (await ask(short_dir / "control.sock", {"command": "hello"}))["ok"]
