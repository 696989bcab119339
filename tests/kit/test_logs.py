"""Log lines that nobody reads: the program goes on, ends, and reports how many lines were dropped."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog

from gpushare_agent.core.kit.logs import WRITER, RepeatedLines, setup_logging, write_stderr
from tests.settings.support_settings import clean_environment

PREAMBLE = """
import logging, sys, threading
import structlog
from gpushare_agent.core.kit.logs import MAX_LINES
from gpushare_agent.core.kit.logs import setup_logging
setup_logging("info", "json")
log = structlog.get_logger("x")
def pause(word):
    print(word, flush=True)
    sys.stdin.readline()
"""


@asynccontextmanager
async def running(code: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that logs into a pipe with nobody at its end; asyncio's own reader stops at 2 bytes."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PREAMBLE + code),
        env=clean_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1,
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def resumed(child: asyncio.subprocess.Process) -> None:
    """Waits for the line that `pause` prints, then lets the program go on."""
    await paused(child)
    assert child.stdin is not None
    child.stdin.write(b"\n")


async def paused(child: asyncio.subprocess.Process) -> None:
    assert child.stdout is not None
    while (byte := await child.stdout.read(1)) != b"\n":
        assert byte, "it has ended"


LOGS_AT_THE_END = """
import logging
from gpushare_agent.core.kit.logs import setup_logging
setup_logging("info", "json")
class Last:
    def __del__(self):
        logging.getLogger("x").error("late")
kept = [Last()]
kept.append(kept)
"""


async def test_what_logs_while_python_ends_does_not_keep_it_from_its_end() -> None:
    """As a task that Ctrl-C has left pending: no thread runs any more that could write it."""
    async with running(LOGS_AT_THE_END) as child:
        assert await child.wait() == 0


async def test_a_program_whose_log_nobody_reads_goes_on_and_ends() -> None:
    """Far more than the pipe takes, an uncaught error behind it, and the exit code is the program's own."""
    code = "for n in range(3000): log.info('line', n=n, pad='x' * 200)\npause('on')\nraise KeyError"
    async with running(code) as child:
        await resumed(child)
        while child.returncode is None:  # wait() would also wait for the end of the unread pipe
            await asyncio.sleep(0.01)
        assert child.returncode == 1


async def test_lines_that_found_no_room_are_counted_once_the_log_moves_again() -> None:
    """What was read and what was dropped are together what was logged."""
    code = "for n in range(3 * MAX_LINES): log.info('line', n=n)\npause('on')"
    async with running(code) as child:
        assert child.stderr is not None and child.stdin is not None
        await paused(child)
        text = b""
        while b"log_lines_dropped" not in text or not text.endswith(b"\n"):
            text += (piece := await child.stderr.read(65536))
            assert piece, "it has ended"
        child.stdin.write(b"\n")
    entries = [json.loads(line) for line in text.splitlines()]
    dropped = [entry for entry in entries if entry["event"] == "log_lines_dropped"]
    assert [entry["level"] for entry in dropped] == ["error"]
    assert dropped[0]["lines"] > 0
    assert len(entries) - 1 + dropped[0]["lines"] == 30_000
    numbers = [entry["n"] for entry in entries if entry["event"] == "line"]
    assert numbers == sorted(numbers)


async def written_by(code: str) -> tuple[str, str]:
    """What a program printed and logged by its end."""
    async with running(code) as child:
        out, err = await child.communicate()
    return out.decode(), err.decode()


async def test_the_last_lines_and_an_uncaught_error_are_written_before_the_end() -> None:
    """In their order, with names bound where the line was made; also a library's line carries them."""
    code = """
structlog.contextvars.bind_contextvars(pod="p")
log.info("ours")
logging.getLogger("library").warning("theirs")
raise KeyError("the end")
"""
    lines = (await written_by(code))[1].splitlines()
    logged = [(json.loads(line)["event"], json.loads(line)["pod"]) for line in lines[:2]]
    assert logged == [("ours", "p"), ("theirs", "p")]
    assert lines[2].startswith("Traceback")
    assert lines[-1] == "KeyError: 'the end'"


@pytest.mark.parametrize("later", [0, 1 << 50])
async def test_where_no_thread_can_be_started_lines_wait_for_one_or_for_the_end(later: int) -> None:
    """A node has its most processes. No thread can have such a stack."""
    code = f"""
import threading
threading.stack_size(1 << 50)
log.info("first")
threading.stack_size({later})
log.info("second")
raise KeyError("the end")
"""
    lines = (await written_by(code))[1].splitlines()
    assert [json.loads(line)["event"] for line in lines[:2]] == ["first", "second"]
    assert (lines[2], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'the end'")


async def test_a_second_setup_changes_the_level_and_starts_no_second_thread() -> None:
    """As SIGHUP does."""
    code = """
log.debug("hidden")
log.info("first")
for _ in range(5):
    setup_logging("debug", "json")
    log.debug("shown")
setup_logging("error", "json")
log.info("hidden")
print(sorted(t.name for t in threading.enumerate()), len(logging.getLogger().handlers))
"""
    out, err = await written_by(code)
    assert out.strip() == "['MainThread', 'log-writer'] 1"
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["first", *["shown"] * 5]


@pytest.mark.parametrize("form", ["json", "console"])
async def test_no_text_of_a_tenant_moves_the_cursor_of_a_terminal(form: str) -> None:
    """In no value, list or traceback."""
    code = f"""
setup_logging("info", {form!r})
bad = "a\\x1b[2Jb\\x9bc\\u202ed\\r"
log.warning(bad, detail=bad, several=[bad])
try:
    raise ValueError(bad)
except ValueError:
    log.exception("failed")
logging.getLogger("other").warning("%s", bad)
"""
    _, text = await written_by(code)
    assert "failed" in text and "ValueError" in text
    assert not [one for one in text if not one.isprintable() and one not in "\n\t"]


async def test_what_a_library_logs_for_each_input_does_not_fill_the_log() -> None:
    """asyncio at each attempt to accept, grpclib at each call that it cannot read: one line a minute is enough."""
    code = """
import asyncio
asyncio_log = logging.getLogger("asyncio")
for _ in range(2):
    setup_logging("info", "json")
for _ in range(1000):
    asyncio_log.error("socket.accept() out of system resource\\nsocket: <...>")
asyncio_log.error("something else")
for n in range(1000):
    logging.getLogger("grpclib.server").info("Request was cancelled: %s", n)
    try:
        raise KeyError(n) if n else ValueError
    except Exception:
        logging.getLogger("grpclib.server").exception("Server error")
"""
    _, err = await written_by(code)
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert [event.partition("\n")[0] for event in events] == [
        "socket.accept() out of system resource",
        "something else",
        "Server error",
        "Server error",
    ]


async def test_lines_that_tenants_cause_are_limited_and_counted_at_the_end() -> None:
    """In the process as it is set up, by names that are bound where the line was made; also after a second set-up."""
    code = """
structlog.contextvars.bind_contextvars(namespace="n", pod="p", pod_uid="u")
for n in range(300):
    log.info("allocate", n=n)
    setup_logging("info", "json")
"""
    _, err = await written_by(code)
    lines = [json.loads(line) for line in err.splitlines()]
    assert lines[-1]["event"] == "log_lines_left_out"
    assert lines[-1]["events"] == {"allocate": 300 - (len(lines) - 1)}
    assert len(lines) < 60


async def test_a_report_waits_for_no_further_line() -> None:
    """The writer's thread has its turns also where nothing is logged."""
    code = """
from gpushare_agent.core.kit.logs import LogWriter
has_turned = threading.Barrier(2)
writer = LogWriter(turn_s=0.001)
writer.on_turn = has_turned.wait
writer.put(sys.stdout, "")
for _ in range(4):
    has_turned.wait()
writer.on_turn = lambda: None
"""
    async with running(code) as child:
        await child.communicate()
        assert child.returncode == 0


@pytest.mark.parametrize("order", ["in a first test", "in a second test"])
def test_the_log_that_one_test_sets_up_is_not_the_next_ones(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The second would lose its line in the first one's closed stream, and read of that in its own."""
    logging.getLogger("library").error(order)
    setup_logging("error", "json")
    write_stderr(f"{order}\n")
    assert WRITER.flush()  # what is reported of lost lines stands behind a line that was written
    assert capsys.readouterr().err == f"{order}\n"


def test_the_next_line_tells_how_many_were_left_out() -> None:
    """After its minute."""
    now = 0.0
    keeps = RepeatedLines(clock=lambda: now).filter

    def record() -> logging.LogRecord:
        text = "socket.accept() out of system resource"
        return logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, None)

    assert [keeps(record()) for _ in range(3)] == [True, False, False]
    now = 61.0
    last = record()
    assert keeps(last)
    assert "2 more" in last.getMessage()


class _Unshown:
    def __repr__(self) -> str:
        raise ValueError("no text of it")


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_cannot_be_shown_ends_nobody_who_logs_it(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its line there is the traceback, and the next one is written; no traceback shows a variable."""
    setup_logging("info", form)
    log = structlog.get_logger("x")
    log.info("first", value=_Unshown())
    try:
        secret = "hunter2"
        raise KeyError(len(secret))
    except KeyError:
        log.exception("second")
    assert WRITER.flush()
    text = capsys.readouterr().err
    assert "ValueError: no text of it\n" in text
    assert "second" in text and "KeyError" in text
    assert "hunter2" not in text.replace('secret = "hunter2"', "")  # the line of the source


def test_a_logger_with_values_of_its_own_follows_a_reload(capsys: pytest.CaptureFixture[str]) -> None:
    """The server of each container has one, and outlives the settings that it began with."""
    setup_logging("info", "json")
    log = structlog.get_logger("x").bind(pod="p")
    setup_logging("debug", "console")
    log.debug("now")
    assert WRITER.flush()
    assert capsys.readouterr().err.split()[1:] == ["[debug", "]", "now", "[x]", "pod=p"]
