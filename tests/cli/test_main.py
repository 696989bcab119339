"""The command line as a user meets it: exit codes, readable lines, no traceback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from gpushare_agent import __version__
from gpushare_agent.commands import COMMAND_LINE, COMMANDS, main
from gpushare_agent.core.cli import interrupts
from gpushare_agent.core.cli.command_line import Command, CommandLine, runnable
from gpushare_agent.core.kit.lean_imports import Hollow, import_lean
from gpushare_agent.core.settings.reference import all_keys, select_keys
from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.kubectl.plugin import PLUGIN_LINE
from tests.settings.support_settings import clean_environment, run_program
from tests.support_process import output_of, running_process

SLOW_LIBRARIES = ("argcomplete", "kubernetes_asyncio", "aiohttp", "pynvml", "yaml", "rich.live", "grpclib")


def test_bad_settings_end_in_lines_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads settings reports each mistake in one line on standard error."""
    for command in ("run", "config", "check"):
        assert main([command, "--query-prt=1", "--driver=cuda"], {}) == 2
        out, err = capsys.readouterr()
        assert out == ""
        first, second = err.splitlines()
        assert "--query-port" in first
        assert "nvml, simulated" in second


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error is easy to correct."""
    assert main(["rnu"], {}) == 2
    assert "did you mean run?" in capsys.readouterr().err
    assert main(["--driver", "nvml"], {}) == 2
    assert "a command comes first" in capsys.readouterr().err
    assert main(["-n", "default", "explain"], {}) == 2
    assert "such as `gpushare-agent explain -n`" in capsys.readouterr().err
    assert main([], {}) == 2
    assert "usage:" in capsys.readouterr().err
    assert main(["sandbox", "aply", "-f", "pod.yaml"], {}) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpushare-agent: 'aply' is no command (did you mean apply?); the commands are apply, delete")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "argv", "meant"),
    [
        (PLUGIN_LINE, "top --onec", "--once"),
        (PLUGIN_LINE, "inspect --outpt=json", "--output"),
        (PLUGIN_LINE, "version --hlep", "--help"),
        (COMMAND_LINE, "explain --contaner main train", "--container"),
        (COMMAND_LINE, "sandbox fail-gpu 0 --xdi 79", "--xid"),
        (COMMAND_LINE, "sandbox --gpu 4", "--gpus"),
        (COMMAND_LINE, "sandbox --sample fitting --once", "--samples"),
        (COMMAND_LINE, "sandbox apply --fil pod.yaml", "--file"),
        (COMMAND_LINE, "top --loglevel debug", "--log.level"),
    ],
)
def test_a_mistyped_option_names_the_nearest_of_the_command_and_its_settings(
    line: CommandLine, argv: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is done."""
    assert line.main(argv.split(), {}) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert f"is unknown (did you mean {meant}?)" in err
    assert PLUGIN_LINE.main(["version", "--zzz"], {}) == 2  # like no other: nothing is guessed
    assert "unrecognized arguments: --zzz" in capsys.readouterr().err


def test_every_app_that_the_table_names_exists() -> None:
    """They are imported by name, which mypy does not follow."""
    runs = [getattr(command.run, "func", command.run) for command in (*COMMANDS, *PLUGIN_LINE.commands)]
    named = {run.__qualname__ for run in runs if ":" in run.__qualname__}
    assert len(named) > 10
    for module, _, function in (name.partition(":") for name in sorted(named)):
        assert callable(getattr(import_module(f"gpushare_agent.{module}"), function))


@pytest.mark.parametrize("argv", [["--help"], ["help"], ["help", "config"]])
def test_help_ends_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of the program and of a command, in both ways to ask."""
    assert main(argv, {}) == 0
    out = capsys.readouterr().out
    assert "gpushare-agent" in out and ("--web.port" in out) == ("config" in argv)


TAKE_SETTINGS = [command for command in COMMANDS if command.settings is not None]


@pytest.mark.parametrize("command", TAKE_SETTINGS, ids=lambda command: command.name)
def test_the_help_of_a_command_has_an_example_and_the_settings_that_it_declares(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example works as it stands. Each declared name is a section or a key; each has its flag and variable, no other
    setting is listed, and the help names the place of the others."""
    assert command.settings is not None
    for name in command.settings:
        assert select_keys([name]), name
    assert main([command.name, "--help"], {}) == 0
    out = capsys.readouterr().out
    assert f"\n  gpushare-agent {command.name}" in out.partition("example")[2]
    listed = {
        key.name for key in all_keys() if f"; {key.variable}]" in " ".join(out.split()) and f"--{key.flag}" in out
    }
    assert listed == {key.name for key in select_keys(["config", *command.settings])}
    assert ("`gpushare-agent run --help` and docs/reference/settings.md list them" in out) == (
        len(listed) < len(all_keys())
    )


def test_a_flag_that_the_help_leaves_out_is_accepted() -> None:
    """One command line serves every command; only unknown flags are mistakes."""
    assert main(["driver-volume", "--web.port=1", "--volume-config=/nonexistent"], {}) == 1


def test_the_help_of_vdevice_tells_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """It has no settings, and its variable disturbs no command that has: those belong to the agent."""
    assert main(["vdevice", "--help"], {}) == 0
    out = capsys.readouterr().out
    for words in ("Exit code 3: the agent did not answer", "GPUSHARE_VDEVICE", "--no-register", "--watch"):
        assert words in out
    assert "--virtual-manager-path" not in out
    assert main(["vdevice", "--driver=nvml"], {}) == 2
    assert main(["config"], {"GPUSHARE_VDEVICE": "/etc/vcuda/vcuda.sock"}) == 0


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """`version` and `--version` are the same."""
    assert main(["version"], {}) == main(["--version"], {}) == 0
    assert capsys.readouterr().out == f"gpushare-agent {__version__}\n" * 2


def test_config_tells_value_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a row for every setting; json has the same with types."""
    argv, environ = ["--query-port", "80"], {"GPUSHARE_LOG__LEVEL": "debug", "NODE_NAME": "n1"}
    assert main(["config", *argv], environ) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["web.port", "80", "flag --query-port"] in rows
    assert ["log.level", "debug", "variable GPUSHARE_LOG__LEVEL"] in rows
    assert ["node_name", "n1", "variable NODE_NAME"] in rows
    assert len(rows) == len(all_keys()) + 1

    assert main(["config", "-o", "json", *argv], environ) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["web.port"] == {"value": 80, "source": "flag --query-port"}
    assert document["simulated.gpu_memory_mib"] == {"value": [24576], "source": "default"}
    assert list(document) == sorted(key.name for key in all_keys())


def test_config_shows_what_a_named_configuration_gives(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the agent's own settings, or a file of NVIDIA's plugin; flags beat it, and it beats the settings file. One that
    cannot be read or used is a mistake."""
    named, file, nvidia = (short_dir / name for name in ("large-blocks", "settings.yaml", "plugin"))
    named.write_text("resources: {memory_block_mib: 512}\nshare_mode: false\n")
    file.write_text("resources: {memory_block_mib: 128}\n")
    nvidia.write_text("version: v1\nflags: {migStrategy: mixed}\n")

    def shown(path: Path, *argv: str) -> tuple[int, str]:
        code = main(["config", "-o", "json", "--node-configuration", str(path), "--config", str(file), *argv], {})
        captured = capsys.readouterr()
        return code, captured.out or captured.err

    found = json.loads(shown(named, "--share-mode=yes")[1])
    assert found["resources.memory_block_mib"] == {"value": 512, "source": "configuration large-blocks"}
    assert found["share_mode"]["value"] is True
    assert json.loads(shown(nvidia)[1])["nvidia.mig_strategy"]["value"] == "mixed"
    code, text = shown(short_dir / "none")
    assert code == 2 and "none cannot be read: No such file or directory" in text
    named.write_text("resources: {memory_block_mib: 0}\n")
    assert shown(named)[0] == 2


def test_the_yaml_of_config_is_a_settings_file(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given back with --config it makes the same settings, on another node with that node's name."""
    argv = ["--gpus=2", "--gpu-memory-mib=1024,2048", "--node-labels=a=b,c=d", "--topology=/t", "--share-mode=no"]
    assert main(["config", "-o", "yaml", *argv], {"NODE_NAME": "one"}) == 0
    text = capsys.readouterr().out
    path = short_dir / "settings.yaml"
    path.write_text(text)
    before = load_settings(argv, {"NODE_NAME": "other"}).settings
    after = load_settings(["--config", str(path)], {"NODE_NAME": "other"}).settings
    assert after.model_copy(update={"config": None}) == before
    assert "node_name" not in yaml.safe_load(text)


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_the_texts_of_a_configuration_stay_texts(
    form: str, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may write the ConfigMap writes no key into the file that -o yaml prints, and nothing to the terminal."""
    path = short_dir / "plugin"
    odd = "x\nweb: {port: 1}\x1b]0;title\x07"
    path.write_text(json.dumps({"version": "v1", "flags": {"plugin": {"containerDriverRoot": odd}}}))
    assert main(["config", "-o", form, "--nvidia.config", str(path)], {"GPUSHARE_NVIDIA__GPUS": "\x1b[31m\udcff"}) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text and "\nweb: {port: 1}" not in text
    text.encode()
    assert form != "yaml" or yaml.safe_load(text)["web"]["port"] == 5678


async def test_an_agent_error_ends_in_one_line_and_code_1() -> None:
    """What keeps the agent from starting is reported without a traceback."""
    ended = await run_program("run", "--driver=simulated", "--topology=/nonexistent", "--log.level=error")
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert len([line for line in ended.err.splitlines() if line.startswith("gpushare-agent: ")]) == 1
    assert "/nonexistent" in ended.err


@contextmanager
def closed_pipe() -> Iterator[int]:
    """The end to write to, that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        yield write_end
    finally:
        os.close(write_end)


async def test_a_reader_that_hangs_up_early_is_no_error_to_tell() -> None:
    """`gpushare-agent config | head -1` prints nothing on standard error."""
    with closed_pipe() as stdout:
        ended = await run_program("config", stdout=stdout)
    assert (ended.code, ended.err) == (1, "")


async def interrupted_at(fifo: Path, *words: str) -> tuple[int | None, bytes, bytes]:
    """How Python with these words ended that was interrupted when it had opened the pipe, and its outputs."""
    async with running_process(
        *(sys.executable, *words),
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)  # returns once the program has opened it
        process.send_signal(signal.SIGINT)
        os.close(writer)  # a program that was not reading yet would wait for ever: it gets the end of the file
        out, err = await process.communicate()
        return process.returncode, out, err


async def test_an_interrupt_ends_with_130_and_quietly(short_dir: Path) -> None:
    """Ctrl-C during a command without a handler of its own is reported by the exit code alone."""
    fifo = short_dir / "settings.yaml"
    os.mkfifo(fifo)  # reading it waits for a writer: the program hangs in a known place
    found = await interrupted_at(fifo, "-m", "gpushare_agent", "config", "--config", str(fifo))
    assert found == (130, b"", b"")


LOSES_AN_INTERRUPT = """
class Waits:
    def __del__(self):
        open({fifo!r}).read()

Waits()
"""
BLOCKS_AT_THE_END = "import atexit; atexit.register(lambda: open({fifo!r}).read())"
PROGRAM = "import sys; from gpushare_agent import __main__; sys.exit(__main__.{function}())"


@pytest.mark.parametrize(
    ("function", "words", "module"),
    [
        ("main", ("version",), "structlog"),
        ("main", ("sandbox", "--once"), "gpushare_agent.sandbox.command"),
        ("run_plugin", ("version",), "structlog"),
        ("complete_plugin", ("top", ""), "structlog"),
        ("main", ("version",), ""),
        ("run_plugin", ("top", "--help"), ""),
    ],
)
async def test_an_interrupt_of_imports_and_of_the_end_is_quiet(
    function: str, words: tuple[str, ...], module: str, short_dir: Path
) -> None:
    """Before a command's own code, while `module` is imported, where Python prints KeyboardInterrupt and goes on; and behind
    it, in what the process does last."""
    fifo = short_dir / "fifo"
    os.mkfifo(fifo)
    waits = (LOSES_AN_INTERRUPT if module else BLOCKS_AT_THE_END).format(fifo=str(fifo))
    finder = f"""
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            return spec_from_file_location(name, {str(short_dir / "waits.py")!r})
sys.meta_path.insert(0, Finder)
"""
    (short_dir / "waits.py").write_text(waits)
    code = f"{finder if module else waits}\n{PROGRAM.format(function=function)}"
    ended, _, err = await interrupted_at(fifo, "-c", code, *words)
    assert (ended, err) == (130, b"")


async def test_an_interrupt_of_a_request_is_quiet() -> None:
    """While an agent has not answered."""
    asked = asyncio.Queue[asyncio.StreamWriter]()
    async with await asyncio.start_server(lambda reader, writer: asked.put_nowait(writer), "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpushare_agent", "top", "--once", "--server", url),
            env=clean_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        writer = await asked.get()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        writer.close()
        await writer.wait_closed()
    assert (process.returncode, out, err) == (130, b"", b"")


def test_an_interrupt_that_an_import_has_wrapped_is_one() -> None:
    """Python 3.11 raises a RuntimeError where a class was being made; an error of ours is none."""
    wrapped = RuntimeError("Error calling __set_name__")
    wrapped.__cause__ = KeyboardInterrupt()
    assert interrupts.is_behind(wrapped) and interrupts.is_behind(KeyboardInterrupt())
    assert not interrupts.is_behind(RuntimeError())


async def test_what_a_shell_runs_in_the_background_goes_on_ignoring_interrupts() -> None:
    """Its SIGINT is ignored from the start."""
    code = "import signal; from gpushare_agent.core.cli import interrupts as i; i.end_at_once(); i.raise_error()"
    shown = f"{code}; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    script = """trap '' INT; exec "$0" -c "$1" """
    _, out, _ = await output_of("/bin/sh", "-c", script, sys.executable, shown, env=clean_environment())
    assert out == b"True\n"


@pytest.mark.parametrize("words", ["version", "config", "config -o yaml", "--help", "run --help", "completion bash"])
async def test_a_full_disk_is_one_line(words: str) -> None:
    """Whether the output is written at once, at the command's end, or by argparse, which ignores errors."""
    with open("/dev/full", "wb") as full:
        ended = await run_program(*words.split(), stdout=full.fileno())
    expected = "gpushare-agent: cannot write to standard output: No space left on device\n"
    assert (ended.code, ended.err) == (1, expected)


PRINTS_IN_TASKS = """
import asyncio, sys
from gpushare_agent.core.cli.command_line import Command, CommandLine

async def show():
    print("x", flush=True)

async def run():
    async with asyncio.TaskGroup() as group:
        group.create_task(show())
        group.create_task(show())

command = Command(name="c", summary="", description="", run=lambda call: run())
sys.exit(CommandLine(program="p", purpose="", commands=[command], more="").main(["c"], {}))
"""


@pytest.mark.parametrize("is_full", [False, True], ids=["closed", "full"])
async def test_output_that_several_tasks_cannot_write_is_no_bug(is_full: bool) -> None:
    """A TaskGroup raises their errors in a group, as a live view does."""
    with closed_pipe() as closed, open("/dev/full", "wb") as full:
        stdout = full.fileno() if is_full else closed
        code, _, err = await output_of(*(sys.executable, "-c", PRINTS_IN_TASKS), env=clean_environment(), stdout=stdout)
    expected = b"p: cannot write to standard output: No space left on device\n" if is_full else b""
    assert (code, err) == (1, expected)


WITHOUT_THREADS = """
import asyncio, sys, threading
from gpushare_agent.core.cli.command_line import Command, CommandLine
from gpushare_agent.core.model.errors import Unavailable

async def child():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('child')", stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return (out.decode().strip(), process.returncode)

async def run():
    loop = asyncio.get_running_loop()
    for size in (1 << 50, 0):  # no thread can have such a stack
        threading.stack_size(size)
        print(await child())
        for look in (lambda: asyncio.to_thread(len, "abc"), lambda: loop.getaddrinfo("localhost", 6443)):
            try:
                print(len(str(await look())) > 0)
            except Unavailable as error:
                print(error)
    threading.stack_size(1 << 50)  # nor for the end
    return 0

command = Command(name="c", summary="", description="", run=lambda call: run())
sys.exit(CommandLine(program="p", purpose="", commands=[command], more="").main(["c"], {}))
"""


async def test_where_no_thread_can_be_started_a_call_is_unavailable_and_the_next_one_is_made() -> None:
    """A node has its most processes: to look up the API server's name takes a thread, a child takes none."""
    code, out, err = await output_of(sys.executable, "-c", WITHOUT_THREADS, env=clean_environment())
    refused, child = "no thread could be started (can't start new thread)", "('child', 0)"
    assert (code, out.decode().splitlines()) == (0, [child, refused, refused, child, "True", "True"]), err


async def test_the_environment_of_the_process_is_read() -> None:
    """Variables reach the settings of the real program."""
    environ = clean_environment(GPUSHARE_WEB__PORT="81", GPUSHARE_SERVICE_HOST="10.0.0.1")
    ended = await run_program("config", "-o", "json", environ=environ)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["web.port"] == {"value": 81, "source": "variable GPUSHARE_WEB__PORT"}


async def test_reading_settings_loads_no_slow_library() -> None:
    """The way to the first registration is short of time: each command imports its app only when it runs."""
    code = f"import sys, gpushare_agent.commands; print([m for m in {SLOW_LIBRARIES!r} if m in sys.modules])"
    _, out, _ = await output_of(sys.executable, "-c", code, env=clean_environment())
    assert out.decode().strip() == "[]"


LEAN = """
import sys
from gpushare_agent.__main__ import import_libraries
import_libraries(is_agent=True)
from gpushare_agent.agent import program
print([m for m in ("rich", "email", "importlib.metadata", "dotenv", "http.server", "urllib.request") if m in sys.modules])
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version
print(BaseHTTPRequestHandler.__module__, version("betterproto2")[:1], "rich" in sys.modules)
"""


async def test_the_agent_starts_without_what_its_libraries_import_for_others() -> None:
    """Whoever imports that later gets the real modules."""
    _, out, err = await output_of(sys.executable, "-c", LEAN, env=clean_environment(PYDANTIC_DISABLE_PLUGINS="true"))
    assert out.decode().splitlines() == ["[]", "http.server 0 False"], err


def test_a_library_that_cannot_do_without_a_module_is_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first attempt stays, and the agent starts, a little later."""
    (tmp_path / "needing.py").write_text("import colorsys\nhue = {1 / 3: 0.0}[colorsys.ONE_THIRD]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert isinstance(import_lean("needing", {"colorsys": Hollow("colorsys")}), KeyError)
    assert import_module("needing").hue == 0.0
    del sys.modules["needing"]


VIEWS = ("top", "inspect", "explain pod", "config", "check", "cdi list", "driver-volume", "cordon --list")


@pytest.mark.parametrize("command", [*VIEWS, "simulate", "sandbox --once", "sandbox status"])
def test_every_command_has_the_same_forms_of_output(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`-o table|wide|json|yaml`; another form ends in 2."""
    assert main([*command.split(), "-o", "xml"], {}) == 2
    assert "choose from 'table', 'wide', 'json', 'yaml'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("top", "--server", "localhost:5678"),
        ("top", "-A", "-n", "default"),
        ("top", "n1", "--node", "n2"),
        ("inspect", "--all-nodes", "n1"),
        ("explain", "pod", "--server", "http://localhost:1", "--node", "n1"),
        ("explain", "a/pod", "-n", "b", "--server", "http://localhost:1"),
        ("explain", "a/", "--server", "http://localhost:1"),
        ("explain", "a/b/c", "--server", "http://localhost:1"),
        ("defragment",),
        ("simulate", "--nodes", "/absent.csv"),
        ("simulate", "--nodes", "/absent.csv", "--pods", "/absent.csv"),
        ("sandbox", "--once", "--gpus", "0"),
        ("sandbox", "--once", "--apply", "/absent"),
        ("inspect", "--config", "/absent"),
    ],
)
async def test_a_bad_value_ends_in_2_by_every_command(words: tuple[str, ...], short_dir: Path) -> None:
    """1 is for what could not be done."""
    state = ("--state-dir", str(short_dir / "s")) if words[0] == "sandbox" else ()
    assert (await run_program(*words, *state)).code == 2


@pytest.mark.parametrize(
    ("place", "path", "typed"),
    [
        (".nox/sandbox/bin", ".nox/sandbox/bin", ".nox/sandbox/bin/gpushare-agent"),
        ("../usr/bin", "../usr/bin", "gpushare-agent"),
        ("../opt/a b", "", "'{root}/opt/a b/gpushare-agent'"),
    ],
    ids=["in this directory", "on PATH", "elsewhere"],
)
def test_hints_name_the_program_as_it_can_be_typed(
    place: str, path: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nox has its environment on a PATH that the person's own shell has not."""
    home = tmp_path / "home"
    home.mkdir()
    program = Path(os.path.normpath(home / place / "gpushare-agent"))
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(program.parent) if path else "/nowhere")
    assert runnable() == typed.format(root=tmp_path)
