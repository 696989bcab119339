"""`gpushare-agent top` against an HTTP server that plays the agent: what it shows, and its errors."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import yaml
from aiohttp import web
from rich.console import Console, Group

from gpushare_agent.commands import main
from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.model.errors import Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.node_report.documents import GpuHistory, HistoryDocument
from gpushare_agent.core.node_report.reported import NO_REASON
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.kubectl.agent_client import MAX_ANSWER_BYTES, local_url, open_agent_client, read_node
from gpushare_agent.kubectl.render_top import (
    MOST_CURVE_LINES,
    Choice,
    blocks,
    top_lines,
    top_table,
    with_history,
)
from gpushare_agent.kubectl.view_commands import server_url
from tests.cli.support_cli import Terminal, agent_answers, at_terminal, busy_node, call, foot_of, screen_of
from tests.fakes.api_server import FakeApiServer, Seen, answers, json_server, stalls_before_headers
from tests.settings.support_settings import run_program


async def printed(document: dict[str, Any], capsys: pytest.CaptureFixture[str], form: Form = "table") -> str:
    """What `top --once` prints of an agent that has this document."""
    async with json_server(agent_answers(document)) as agent:
        assert await call("top", f"--server={agent.url}", "--once", f"--output={form}") == 0
    return capsys.readouterr().out


def drawn(document: dict[str, Any], width: int) -> list[str]:
    """The table in a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    header, rows = top_table(top_lines(document, width), width)
    console.print(Group(header, *rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


async def test_each_container_stands_below_its_gpu_with_limit_and_use(capsys: pytest.CaptureFixture[str]) -> None:
    """The columns are those of the header, in GiB and percent; all GPUs together are in the second line."""
    lines = (await printed(busy_node(), capsys)).splitlines()
    assert lines[0].startswith("node n1  ready  4 GPUs, 1 unhealthy, 1 cordoned  3 containers  usage is current  iso")
    assert lines[1] == ("allocated 160/400 GPU cores (40 %), memory 30/96 GiB (31 %)  used: SM 38 %, memory 8.79 GiB")
    assert lines[2].split() == [
        *("GPU", "/", "CONTAINER", "STATE", "GPU", "CORES", "SM", "%", "MEMORY", "GiB", "ALLOC", "GiB"),
        *("TEMP", "°C", "POWER", "W"),
    ]
    rows = [line.split() for line in lines[3:]]
    assert rows[0] == [
        *("0", "NVIDIA", "H100", "80GB", "HBM3", "Healthy", "60/100", "50", "2.93/24", "6", "61", "250/700")
    ]
    assert rows[1] == ["default/eval/evaluator", "Unknown", "20", "0", "0/2"]
    assert rows[2] == ["default/train/trainer", "Unknown", "40–60", "31", "1.95/4"]
    assert rows[3] == ["process", "4711", "of", "no", "container", "compute", "2", "0.1"]
    assert rows[6][:4] == ["default/big/main", "Unknown", "whole", "0"]
    # What was not sampled is not known, and not zero.
    assert (rows[-1][0], rows[-1][5:]) == ("3", ["Healthy", "0/100", "-", "-/24", "0", "-", "-"])


@pytest.mark.parametrize(
    ("usage", "more", "cells", "note"),
    [
        ({"sm_source": "library"}, {}, ["31*", "1.95/4"],
         "* paid, as libgpushare counts: of several that compute the driver's samples name one"),
        # Instead of a dash: the GPU's own value is in its line, and the server's among the processes of nobody.
        ({"sm_ratio": None, "sm_source": "mps"}, {}, ["mps", "1.95/4"],
         "mps: not known of each container; the driver counts it in the process of the MPS server"),
        ({}, {"not_limited": "no library"}, ["31", "1.95/4!"],
         "! without a limit: explain POD and the pod's Events say why, and what to do"),
    ],
)  # fmt: skip
async def test_what_is_special_of_a_container_has_a_mark_and_a_note(
    usage: dict[str, Any], more: dict[str, Any], cells: list[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = busy_node()
    [trainer] = [one for one in document["containers"] if one["container"] == "trainer"]
    assert note not in await printed(document, capsys)
    trainer["gpus"][0]["usage"] |= usage
    trainer |= more
    lines = (await printed(document, capsys)).splitlines()
    assert (lines[5].split(), lines[-1]) == (["default/train/trainer", "Unknown", "40–60", *cells], note)


async def test_the_highest_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """By `--sort`, GPUs and the containers of each; what was not sampled comes last."""
    async with json_server(agent_answers(busy_node())) as agent:
        words = ["top", "--once", "--sort", "sm", "--server", agent.url]
        assert await asyncio.to_thread(main, words, {"NODE_NAME": "n1"}) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    order = [
        next(n for n, line in enumerate(lines) if line.startswith(name)) for name in ("default/train", "default/ev")
    ]
    assert order == sorted(order)
    assert lines[-1].startswith("3 ")


async def test_a_gpu_out_of_service_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Unhealthy with the driver's reason, Cordoned with the operator's, each whole on a line below the GPU; without the
    operator's there is the one word, and with both it is said whose reason each is."""
    document = busy_node()
    long = "Xid 79: the GPU fell off the bus; " + "it is probed again and again; " * 8 + "the end"
    document["gpus"][1]["health_reason"] = long

    async def below(index: int) -> list[str]:
        lines = (await printed(document, capsys)).splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{index} "))
        return [re.split(r" {2,}", lines[at])[1], *lines[at + 1 : at + 3]]

    assert (await below(1))[:2] == ["Unhealthy", f"    {long}"]
    assert (await below(2))[:2] == ["Cordoned", "    fan replaced on Monday"]
    document["gpus"][1]["cordoned"] = "loud"
    document["gpus"][2]["cordoned"] = NO_REASON
    assert await below(1) == ["Cordoned, Unhealthy", "    Cordoned: loud", f"    Unhealthy: {long}"]
    state, following, *_ = await below(2)
    assert state == "Cordoned" and following.startswith("3 ")
    assert "4 GPUs, 1 unhealthy, 2 cordoned" in (await printed(document, capsys)).splitlines()[0]


def test_a_reason_is_folded_in_a_narrow_terminal() -> None:
    """Nothing of it is cut off."""
    document = busy_node()
    reason = "Xid 79: " + " ".join(f"word-{number}" for number in range(40))
    document["gpus"][1]["health_reason"] = reason
    text = "\n".join(drawn(document, 60))
    assert " ".join(reason.split()) in " ".join(text.split())


async def test_an_agent_that_is_not_ready_or_does_not_sample_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Old values are marked as old."""
    document = busy_node()
    document["agent"] |= {"is_ready": False, "not_ready": ["tencent.com/vcuda-core is not registered with the kubelet"]}
    document["at"] = document["agent"]["sampled_at"] + 42
    lines = (await printed(document, capsys)).splitlines()
    assert "NOT READY" in lines[0] and "usage sampled 42 s ago" in lines[0]
    assert lines[2] == "  not ready: tencent.com/vcuda-core is not registered with the kubelet"
    document["agent"]["sampled_at"] = None
    assert "usage not sampled yet" in await printed(document, capsys)


async def test_what_has_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No allocated share is left out; and an empty table would look like a fault of the program."""
    document = busy_node()
    document["containers"][0]["gpus"] = []
    lines = (await printed(document, capsys)).splitlines()
    assert lines[-2] == "on no GPU that the driver names"
    assert lines[-1].split()[:3] == ["default/big/main", "Unknown", "whole"]
    empty = busy_node() | {"gpus": [], "containers": []}
    assert "this node has no GPU that the driver can name" in await printed(empty, capsys)


async def test_json_and_yaml_are_the_agents_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Unchanged, so that docs/reference/api.md is the format of both."""
    document = busy_node()
    assert json.loads(await printed(document, capsys, "json")) == document
    assert yaml.safe_load(await printed(document, capsys, "yaml")) == document


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (15, ""),
        (20, ""),
        (40, "SM % MEMORY GiB"),
        *((width, "GPU CORES SM % MEMORY GiB") for width in (44, 60, 80, 100, 140)),
    ],
)
def test_no_line_is_wider_than_the_terminal(width: int, kept: str) -> None:
    """Columns are left out, never a part of one; the first stays, and where there is room for them cores and use."""
    lines = drawn(busy_node(), width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 1 + len(top_lines(busy_node(), width))
    assert set(kept.split()) <= set(lines[0].split()) and "…" not in lines[0]
    assert lines[0].startswith("GPU / CONTAINER")


def test_columns_go_in_the_order_of_their_worth() -> None:
    """Memory's allocation and the bars first, then names are cut; power, temperature and state are there at 80 columns, and
    at 60 still which GPU is ill."""
    header, first, *_ = drawn(busy_node(), 160)
    assert "█████·····" in first and "ALLOC GiB  TEMP °C  POWER W" in header
    assert "ALLOC" not in drawn(busy_node(), 100)[0]
    assert "███···" in drawn(busy_node(), 100)[1]
    for width in (80, 100):
        header, first, *_ = drawn(busy_node(), width)
        assert ("STATE" in header, header.split()[-3:]) == (True, ["°C", "POWER", "W"])
        assert first.split()[-2:] == ["61", "250/700"]
    header, first, *_ = drawn(busy_node(), 60)
    assert ("STATE" in header, "°C" in header, "██" in first) == (True, False, False)
    assert "STATE" not in drawn(busy_node(), 50)[0]


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    """Where pods of one Deployment differ; temperature and power stay at 80 columns."""
    document = busy_node()
    for container in document["containers"]:
        container["namespace"] = "department-of-machine-learning"
        container["pod"] = f"{container['pod']}-of-a-very-long-name-7d9f8b6c5-x2x4z"
    lines = drawn(document, 80)
    assert (max(map(len, lines)), lines[1].split()[-2:]) == (80, ["61", "250/700"])
    assert [line.split()[0] for line in lines[2:4]] == ["department-…x4z/evaluator", "department-…x2x4z/trainer"]


def test_control_characters_do_not_reach_the_terminal() -> None:
    """A name could clear the screen or set the window's title."""
    document = busy_node()
    document["gpus"][0]["name"] = "H100\x1b]0;title\x07\nx"
    document["containers"][0]["phase"] = "\x1b[2J"
    text = "\n".join(drawn(document, 200))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "H100\N{REPLACEMENT CHARACTER}]0;title" in text


async def test_an_agent_that_is_not_there_is_reported_in_one_line() -> None:
    """With what was tried and what to do, and exit code 1."""
    ended = await run_program("top", "--once", "--server", "http://127.0.0.1:1")
    assert (ended.code, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert "cannot read http://127.0.0.1:1/api/v1/node: the connection is refused" in line
    assert "--query-port" in line
    assert "--server URL" in line


async def test_what_a_server_says_cannot_command_the_terminal() -> None:
    """Its words are part of the error's line; its control characters are not."""
    async with json_server({"/api/v1/node": (500, b"\x1b[2Jgone \x07")}) as server:
        ended = await run_program("top", "--once", "--server", server.url)
    assert ended.code == 1
    assert "\ufffd[2Jgone \ufffd" in ended.err
    assert ended.err.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (b"<html>", Corrupt, "no JSON"),
        (b"[1]", Corrupt, "no JSON object"),
        ({"schema": 3, "gpus": []}, Corrupt, r"value 3 - at `\$\.schema`; use .* of the agent.s own version"),
        ({"schema": 2}, Corrupt, "missing required field"),
        (b" " * (MAX_ANSWER_BYTES + 1), Corrupt, "longer than 32 MiB"),
        ((404, {}), NotFound, "another program"),
        ((503, {"error": "busy"}), Unavailable, "503.*busy.*try again"),
        ((500, b"oops"), Rejected, "500 .oops."),
    ],
    ids=["html", "list", "other-format", "no-gpus", "long", "404", "503", "500"],
)
async def test_an_answer_that_is_not_the_agents_is_reported(answer: Any, error: type[Exception], text: str) -> None:
    """Each names what is wrong with the address or the other side."""
    async with json_server({"/api/v1/node": answer}) as server, open_agent_client(server.url) as agent:
        with pytest.raises(error, match=text):
            await read_node(agent)


async def test_an_agent_that_does_not_answer_is_given_up() -> None:
    """After the time limit, in words."""
    async with (
        json_server({"/api/v1/node": stalls_before_headers}) as server,
        open_agent_client(server.url, timeout_s=0.05) as agent,
    ):
        with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
            await read_node(agent)


async def test_an_address_without_a_host_is_reported() -> None:
    """A name that does not exist is not the agent's fault."""
    async with open_agent_client("http://no-such-host.invalid:5678") as agent:
        with pytest.raises(
            Unavailable, match=r"cannot read http://no-such-host.invalid:5678/api/v1/node: .*--server URL"
        ):
            await read_node(agent)


@pytest.mark.parametrize("url", ["localhost:5678", "ftp://x", "http://", "http://x:y", "http://x?a=b", "http://[::1"])
def test_a_wrong_url_is_rejected_before_anything_is_asked(url: str) -> None:
    """With an example of a right one."""
    with pytest.raises(argparse.ArgumentTypeError, match="http://localhost:5678"):
        server_url(url)


@pytest.mark.parametrize(
    ("addr", "url"),
    [
        ("localhost", "http://localhost:5678"),
        ("0.0.0.0", "http://localhost:5678"),
        ("::", "http://[::1]:5678"),
        ("[::]", "http://[::1]:5678"),
        ("", "http://localhost:5678"),
        ("10.1.2.3", "http://10.1.2.3:5678"),
        ("fd00::1", "http://[fd00::1]:5678"),
    ],
)
def test_without_a_server_the_settings_tell_where_the_agent_listens(addr: str, url: str) -> None:
    """An address that means all addresses is this host."""
    web = load_settings(["--web.addr", addr], {"NODE_NAME": "n1"}).settings.web
    assert local_url(web.addr, web.port) == url


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "4000"])
async def test_an_interval_out_of_bounds_ends_in_2(interval: str) -> None:
    """It would poll without a pause, or never."""
    ended = await run_program("top", f"--interval={interval}")
    assert ended.code == 2
    assert "is not between 0.1 and 3600 seconds" in ended.err


async def test_without_a_terminal_or_with_a_dumb_one_there_is_one_table() -> None:
    """`gpushare-agent top | grep` ends, with the settings read. Where a screen cannot be drawn, nothing would be shown
    until q."""
    async with json_server(agent_answers(busy_node())) as agent:
        port = agent.url.rpartition(":")[2]
        ended = await run_program("top", "--web.addr=127.0.0.1", f"--web.port={port}")

        async with at_terminal("top", "--server", agent.url, term="dumb") as terminal:
            await terminal.wait_shown(lambda text: "default/train/trainer" in text)
            assert await terminal.wait_end() == 0
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out + terminal.shown
    assert len(agent.seen) == 2


@asynccontextmanager
async def live_top(agent: FakeApiServer, *words: str, columns: int = 120, rows: int = 30) -> AsyncIterator[Terminal]:
    """`top` at a terminal; q ends it after the block."""
    async with at_terminal("top", "--server", agent.url, *words, columns=columns, rows=rows) as terminal:
        yield terminal
        terminal.press("q")
        assert await terminal.wait_end() == 0


@pytest.mark.parametrize("end", ["q", signal.SIGINT, signal.SIGTERM])
async def test_the_live_table_ends_and_leaves_the_terminal_as_it_was(end: str | signal.Signals) -> None:
    """Exit code 0, the mode is back, the screen that was there before is shown again."""
    async with json_server(agent_answers(busy_node())) as agent:
        async with at_terminal("top", "--interval=0.1", "--server", agent.url) as terminal:
            before = terminal.mode()
            await terminal.wait_shown(lambda text: "default/train/trainer" in text and "q ends" in text)
            assert terminal.mode() != before
            if isinstance(end, signal.Signals):
                terminal.process.send_signal(end)
            else:
                terminal.press(end)
            assert await terminal.wait_end() == 0
            await terminal.wait_shown(lambda text: "\x1b[?1049l" in text)
            assert terminal.mode() == before
        assert "Traceback" not in terminal.shown


async def test_the_live_table_shows_what_changes_and_outlives_the_agent() -> None:
    """A restart of the agent is shown, and its node stays on the screen."""
    document = busy_node()
    async with json_server(agent_answers(document)) as agent, live_top(agent, "--interval=0.1") as terminal:
        await terminal.wait_shown(lambda text: "q ends" in text)
        agent.script.answers["/api/v1/node"] = document | {"node": "renamed"}
        await terminal.wait_shown(lambda text: "node renamed" in text)
        agent.script.answers.clear()
        await terminal.wait_shown(lambda text: "as of the last answer" in text)
        assert terminal.process.returncode is None


PROCESSES = [
    {"pid": 4242, "pid_in_container": 12, "command": "python3.11", "memory_bytes": 3 << 30, "sm_ratio": 0.3},
    {"pid": 88, "pid_in_container": None, "command": None, "memory_bytes": None, "sm_ratio": None},
]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_process_has_its_command_its_pid_in_the_container_and_its_use(width: int) -> None:
    """What is not known of it is a dash; the name may take the place of state and cores. Those that the agent left out are
    counted."""
    document = busy_node()
    [trainer] = [one for one in document["containers"] if one["container"] == "trainer"]
    trainer["gpus"][0]["usage"] |= {"pids": [4242, 88, 7], "processes": PROCESSES}
    document["gpus"][0]["unattributed"][0]["command"] = "Xorg"
    shown = Choice(has_processes=True, has_bars=False)
    lines = top_lines(document, width, shown)
    rows = [row.plain.rstrip() for row in top_table(lines, width, shown)[1]]
    at = next(number for number, row in enumerate(rows) if row.startswith("    process"))
    assert re.split(r" {2,}", rows[at].strip()) == ["process 4242 python3.11, inside 12", "30", "3"]
    assert re.split(r" {2,}", rows[at + 1].strip()) == ["process 88", "-", "-"]
    assert rows[at + 2] == "    1 more, with less memory"
    assert rows[at + 3].startswith("  process 4711 Xorg")
    assert max(map(len, rows)) <= width


def curves(document: dict[str, Any], sm: list[float | None]) -> HistoryDocument:
    size = document["gpus"][0]["memory"]["capacity_bytes"]
    of_gpu: GpuHistory = {"sm_ratio": sm, "memory_used_bytes": [None if one is None else size / 2 for one in sm]}
    return {"step_seconds": 5.0, "gpus": {gpu["uuid"]: of_gpu for gpu in document["gpus"][:2]}}


def test_curves_stand_below_their_gpus_as_high_as_the_room_allows() -> None:
    """Below each or below none; then next to them, where the table leaves that many columns."""
    document = busy_node()
    lines, idle = top_lines(document, 100), [0.0] * 180

    def rows(room: int, width: int, history: HistoryDocument) -> list[str]:
        found = with_history(lines, document, history, width, room)
        return [row.plain.rstrip() for row in top_table(found, width)[1]]

    busy = curves(document, [None] * 90 + [1.0] * 90)
    below = rows(5, 100, busy)
    # Two GPUs, two lines each; the first GPU has no reason below it, the second one.
    assert [number for number, row in enumerate(below) if "█" * 19 in row or "15 min" in row] == [1, 2, 8, 9]
    assert re.fullmatch(r" {4}15 min  SM  {19}█{19}  memory  {19}█{19}", below[2])
    assert below[1].strip() == "█" * 19
    assert len(rows(100, 100, busy)) == len(lines) + 2 * MOST_CURVE_LINES
    assert rows(1, 100, busy) == rows(-9, 100, busy) == rows(9, 100, curves(document, idle))
    assert re.search(r"250/700 {4}15 min  SM {14}█{13}  memory {14}▄{13}$", rows(1, 200, busy)[0])
    unknown: HistoryDocument = {"step_seconds": 5.0, "gpus": {"GPU-unknown": {}, document["gpus"][0]["uuid"]: {}}}
    assert rows(9, 100, unknown) == rows(0, 100, unknown)


def test_a_curve_has_the_mean_of_its_steps() -> None:
    """A cell without a sample is blank, one with next to nothing a line on the ground; a curve may have fewer steps than
    cells."""
    assert blocks([0.0, 0.5, 1.0, None], 4, 1) == ["▁▄█ "]
    assert blocks([0.0, 1.0, None, 0.5], 2, 1) == ["▄▄"]
    assert blocks([0.25, 1.5], 4, 2) == ["  ██", "▄▄██"]
    assert blocks([], 3, 1) == ["   "]


async def test_p_asks_the_agent_for_processes_and_the_screen_has_curves() -> None:
    """At once, not at the next poll."""
    document = busy_node()

    async def node(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        body = json.loads(json.dumps(document))
        if seen.query == {"processes": "true"}:
            [usage] = [g["usage"] for c in body["containers"] for g in c["gpus"] if c["container"] == "trainer"]
            usage["processes"] = PROCESSES
        return await answers(200, body)(server, seen, request)

    history = curves(document, [0.5] * 180)
    async with (
        json_server({"/api/v1/node": node, "/api/v1/history": dict(history)}) as agent,
        live_top(agent, "--interval=600", columns=80, rows=24) as terminal,
    ):
        await terminal.wait_shown(lambda text: "15 min  SM" in "\n".join(screen_of(text)))
        terminal.press("p")
        await terminal.wait_shown(lambda text: "process 4242 python3.11, inside 12" in "\n".join(screen_of(text)))
        terminal.press("p")
        await terminal.wait_shown(lambda text: "process 4242" not in "\n".join(screen_of(text)))


async def test_a_small_terminal_scrolls() -> None:
    """As many lines as fit; the rest is counted, and j and the arrows lead there."""
    async with json_server(agent_answers(busy_node())) as agent, live_top(agent, "--interval=60", rows=9) as terminal:
        await terminal.wait_shown(lambda text: "5 more lines" in text)
        assert "Cordoned" not in terminal.shown
        terminal.press("jjj\x1b[B")
        await terminal.wait_shown(lambda text: "Cordoned" in text)


async def test_keys_sort_filter_and_help() -> None:
    """Each shows at once what it changed."""
    async with (
        json_server(agent_answers(busy_node())) as agent,
        live_top(agent, "--interval=60", columns=80, rows=24) as terminal,
    ):
        await terminal.wait_shown(lambda text: "? help" in text)
        terminal.press("?")
        await terminal.wait_shown(lambda text: "in hundredths of the GPU" in text)
        terminal.press("?s")
        await terminal.wait_shown(lambda text: "by sm" in foot_of(text))
        rows = [line.strip().partition(" ")[0] for line in screen_of(terminal.shown)]
        assert rows.index("default/train/trainer") < rows.index("default/eval/evaluator")
        terminal.press("/")
        await terminal.wait_shown(lambda text: "filter:" in foot_of(text))
        terminal.press("evalq\x7f\r")
        await terminal.wait_shown(lambda text: "[eval]" in foot_of(text))
        assert not re.search("train|big|^[123] ", "\n".join(screen_of(terminal.shown)), re.M)
        terminal.press("/\x1b")
        await terminal.wait_shown(lambda text: "default/big/main" in "\n".join(screen_of(text)))


async def test_a_new_size_draws_the_whole_screen_again() -> None:
    """No line is longer than the terminal, and the head does not wrap."""
    async with json_server(agent_answers(busy_node())) as agent, live_top(agent, "--interval=60") as terminal:
        await terminal.wait_shown(lambda text: "POWER W" in text)
        terminal.resize(columns=60, rows=12)
        await terminal.wait_shown(lambda text: "more lines" in foot_of(text))
        lines = screen_of(terminal.shown)
        assert (len(lines), max(map(len, lines)) <= 60) == (12, True)
        assert [line.split()[0] for line in lines[:3]] == ["node", "allocated", "GPU"]
