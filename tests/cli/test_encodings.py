"""Every command prints where the terminal's encoding lacks letters of the output."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from gpushare_agent.commands import COMMANDS, main
from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.cli.render_text import print_report
from gpushare_agent.core.kit.logs import write_stderr
from tests.cli.support_cli import agent_answers, busy_node, decision
from tests.fakes.api_server import json_server
from tests.settings.support_settings import clean_environment, run_program
from tests.support_process import output_of

ENCODINGS = ("ascii", "iso8859-1")
EXPLANATION = "GPU 0 – the fullest… of Zoë's 日本"


class Output:
    """Both standard streams in one encoding, which stops at letters that it lacks, as Python opens them."""

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")

    def text(self) -> str:
        """What was printed since the last time."""
        self.stream.flush()
        assert isinstance(self.stream.buffer, io.BytesIO)
        content = self.stream.buffer.getvalue().decode(self.encoding)
        self.stream.seek(0)
        self.stream.truncate()
        return content


@contextmanager
def printing(encoding: str) -> Iterator[Output]:
    """Until the block ends; pytest has streams of its own in fixtures."""
    found = Output(encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", found.stream)
        patch.setattr(sys, "stderr", found.stream)
        yield found
    found.stream.close()


in_each_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


@in_each_encoding
@pytest.mark.parametrize("name", sorted(command.name for command in COMMANDS))
def test_the_help_of_every_command_is_printed(name: str, encoding: str) -> None:
    """With the texts of all its settings."""
    with printing(encoding) as output:
        assert main([name, "--help"], {}) == 0
        assert f"gpushare-agent {name}" in output.text()


@in_each_encoding
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_the_settings_are_printed(form: str, encoding: str) -> None:
    """Also with a value that cannot be: json and yaml have it whole, the table a letter in the place of each."""
    with printing(encoding) as output:
        assert main(["config", "-o", form], {"GPUSHARE_VOLUME_CONFIG": "/日本"}) == 0
        text = output.text()
    match form:
        case "json":
            assert json.loads(text)["volume_config"]["value"] == "/日本"
        case "yaml":
            assert yaml.safe_load(text)["volume_config"] == "/日本"
        case "table":
            assert [line.split()[1] for line in text.splitlines() if line.startswith("volume_config ")] == ["/??"]


@in_each_encoding
async def test_tables_keep_their_columns(encoding: str) -> None:
    """`top`: one letter for each that is not to be had."""
    document = busy_node()
    document["gpus"][2]["cordoned"] = "fan…"
    async with json_server(agent_answers(document)) as agent:
        words = ["top", "--once", "--server", agent.url]
        with printing(encoding) as output:
            assert await asyncio.to_thread(main, words, {"NODE_NAME": "n1"}) == 0
            text = output.text()
    assert "default/train/trainer" in text and " 40-60 " in text and "    fan.\n" in text
    header, trainer = (next(line for line in text.splitlines() if words in line) for words in ("GPU CORES", "40-60"))
    assert header.index("GPU CORES") + len("GPU CORES") == trainer.index("40-60") + len("40-60")


@in_each_encoding
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
async def test_explain_prints_what_it_can(form: str, encoding: str) -> None:
    """The texts of an agent; json and yaml have them whole."""
    async with json_server(agent_answers(busy_node(), decision(explanation=EXPLANATION))) as agent:
        words = ["explain", "train", "-o", form, "--server", agent.url]
        with printing(encoding) as output:
            assert await asyncio.to_thread(main, words, {"NODE_NAME": "n1"}) == 0
            text = output.text()
    if form == "table":
        shown = {"ascii": "GPU 0 - the fullest. of Zo?'s ??", "iso8859-1": "GPU 0 - the fullest. of Zoë's ??"}
        assert shown[encoding] in text
    else:
        document = json.loads(text) if form == "json" else yaml.safe_load(text)
        assert document["decisions"][0]["explanation"] == EXPLANATION


@in_each_encoding
async def test_a_process_prints_in_the_encoding_that_it_was_given(encoding: str) -> None:
    """On both streams, from the interpreter's start on."""
    environ = clean_environment(PYTHONIOENCODING=encoding)
    shown = await run_program("run", "--help", environ=environ)
    assert (shown.code, shown.err) == (0, "")
    assert "gpushare-agent run" in shown.out
    failed = await run_program("zoë…", environ=environ)
    letter = "?" if encoding == "ascii" else "ë"
    assert (failed.code, failed.err.startswith(f"gpushare-agent: 'zo{letter}.' is no command")) == (2, True)


def test_a_last_line_is_written_in_the_encoding_of_standard_error(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What ends the process goes past the stream's buffer."""
    with open(2, "w", encoding="iso8859-1", closefd=False) as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        write_stderr("Zoë…\n")
    assert capfdbinary.readouterr().err == b"Zo\xeb\\u2026\n"


@pytest.mark.parametrize("words", [["config", "-o", "json"], ["config", "-o", "yaml"], ["--version"], ["nope"]])
async def test_a_stream_that_is_closed_takes_nothing(words: list[str]) -> None:
    """No traceback: whoever closes standard output wants the exit code alone."""
    closed = ["-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "gpushare_agent", *words]
    code, _, err = await output_of("/bin/sh", *closed, env=clean_environment(), stdout=None)
    assert (code, b"Traceback" in err) == (2 if words == ["nope"] else 0, False)


def test_a_stream_of_texts_has_no_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters beyond ASCII are written as they are."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["config", "-o", "json"], {"GPUSHARE_VOLUME_CONFIG": "/日本"}) == 0
    assert "/日本" in stream.getvalue()


UNSEEN = [
    *map(chr, range(1, 9)), "\x0b", "\x1b]0;x\x07", "\x7f", *map(chr, range(0x80, 0xA0)), "\xad", "\u200b", "\u200e",
    "\u2028", "\u2029", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A)), "\ufeff",
    "\ue000", "\U000e0001", "\ud800",
]  # fmt: skip
"""Of Unicode's controls, and of what turns or hides text."""


@pytest.mark.parametrize("encoding", ["utf-8", *ENCODINGS])
@pytest.mark.parametrize("form", ["json", "yaml"])
def test_no_document_has_what_a_terminal_obeys(form: Form, encoding: str) -> None:
    """It is escaped, also in names, and is the same when it is read again; other letters are as they were."""
    document = {
        "texts": [*UNSEEN, *(f"a{one}b: {one}" for one in UNSEEN), "".join(UNSEEN) * 3, "Zoë 日本 😀", "1\n2", "- yes"],
        **{f"name{one}": one for one in UNSEEN},
        "long" * 40 + UNSEEN[-1]: None,
    }  # fmt: skip
    with printing(encoding) as output:
        print_report(form, document, "")
        text = output.text()
    assert not [one for one in text if not one.isprintable() and one not in "\n\t"]
    assert (json.loads(text) if form == "json" else yaml.safe_load(text)) == document
    assert encoding != "utf-8" or "Zoë 日本 😀" in text
