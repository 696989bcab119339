"""`gpushare-agent sandbox exec` as a person uses it: real processes in the containers of a running sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.core.settings.sources import read_variables
from gpushare_agent.sandbox.command import split_inner_command
from gpushare_agent.sandbox.run import NODE_NAME
from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox import container, pod
from tests.sandbox.support_sandbox_cli import ROOT, document_of, ended, live, read_until, sandbox, start

CLIENT = (sys.executable, "-m", "gpushare_agent", "vdevice")
"""Found in the directory in which the tests run `exec`: the checkout."""


async def containers_of(state: Path, name: str) -> dict[str, dict[str, Any]]:
    pods = {p["name"]: p for p in (await document_of(state))["pods"]}
    return {c["name"]: c for c in pods[name]["containers"]}


@needs_processes
@pytest.mark.slow
async def test_a_process_in_a_container_registers_and_reads_its_limits_and_its_own_pid(short_dir: Path) -> None:
    """The command has taken the place of the CLI's process, whose PID is therefore in the list that the agent wrote."""
    state = short_dir / "s"
    async with live(state, "--samples", "fitting") as node:
        await read_until(node, "default/two-shares Running")
        process = await start("exec", "share", "--state-dir", state, "--", *CLIENT, "-o", "json")
        done = await ended(process)
        assert done.code == 0, done.err
        reported = json.loads(done.out)
        shown = (await containers_of(state, "share"))["main"]
        assert (reported["utilization"], reported["memory_bytes"], reported["enable"]) == (25, 16 * 256 * 2**20, True)
        assert set(reported["pids"]) == {process.pid, shown["pid"]}

        where = ("--state-dir", state, "-c", "evaluator", "two-shares")
        other = await sandbox("exec", *where, "--", *CLIENT, "-o", "json")
        assert json.loads(other.out)["container"] == "evaluator", other.err

        stays = await start("exec", "--state-dir", state, "default/share", "sleep", "600")
        await _poll(state, "share", lambda main: stays.pid in main["pids"])
        main = (await containers_of(state, "share"))["main"]
        assert main["pids"] == sorted([main["pid"], stays.pid])
        assert (await containers_of(state, "pair"))["main"]["mounts"] == [], "whole GPUs have nothing to read"

        assert (await sandbox("delete", "share", "--state-dir", state)).code == 0
        assert (await ended(stays)).code == -signal.SIGKILL


async def _poll(state: Path, name: str, holds: Any) -> None:
    while not holds((await containers_of(state, name))["main"]):
        await asyncio.sleep(0.05)  # another process: it can only be asked again


@needs_processes
@pytest.mark.slow
async def test_exec_is_as_transparent_as_the_command_alone(short_dir: Path) -> None:
    """Exit code, signal, standard input, environment, arguments and the terminal are the command's own."""
    state = short_dir / "s"
    async with live(state, "--samples", "fitting") as node:
        await read_until(node, "default/two-shares Running")
        inside = ("exec", "--state-dir", state)
        assert (await sandbox(*inside, "share", "--", "sh", "-c", "exit 7")).code == 7
        assert (await sandbox(*inside, "share", "sh", "-c", "kill -TERM $$")).code == -signal.SIGTERM
        assert (await sandbox(*inside, "share", "--", "cat", text="one\ntwo\n")).out == "one\ntwo\n"
        words = ["--port", "5", "-o", "json", "-c", "x", "--node-name=y", "--", "-h"]
        assert (await sandbox(*inside, "share", "echo", *words)).out == " ".join(words) + "\n"
        ignored = await sandbox(*inside, "share", "--", "grep", "SigIgn", "/proc/self/status")
        assert int(ignored.out.split()[1], 16) == _ignored_by_the_caller()

        first = await sandbox(*inside, "two-shares", "--", "sh", "-c", "echo $GPUSHARE_VDEVICE; echo $PATH")
        address, path = first.out.splitlines()
        assert Path(address).is_socket()
        assert (Path(address).parent.name, Path(address).name) == ("trainer", "vcuda.sock")
        assert str(Path(sys.executable).parent) in path.split(os.pathsep)
        assert first.err == 'Defaulted container "trainer" out of: trainer, evaluator\n'
        named = await sandbox(*inside, "-ctrainer", "two-shares", "--", "true")
        assert (named.code, named.err) == (0, "")

        assert await _in_a_terminal(state, b"test -t 0 && test -t 1 && exit 4\n") == 4


def _ignored_by_the_caller() -> int:
    """The signals that these tests were started with ignored, such as SIGHUP under nohup; not those of Python's own."""
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    ours = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    return sum(1 << (number - 1) for number in ours if number not in pythons)


async def _in_a_terminal(state: Path, typed: bytes) -> int:
    """The exit code of `exec -it share -- sh` in which a person types this."""
    ours, theirs = os.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "gpushare_agent", "sandbox", "exec", "-it", "share", "--state-dir", str(state),
            "--", "sh", stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
        os.write(ours, typed)
        return await process.wait()
    finally:
        os.close(theirs)
        os.close(ours)


@needs_processes
@pytest.mark.slow
async def test_what_cannot_be_run_is_reported_as_kubectl_and_a_shell_tell_it(short_dir: Path) -> None:
    """1 where there is no such running container, 126 and 127 where there is no such program, 2 without a command."""
    state = short_dir / "s"
    (short_dir / "text").write_text("no program\n")
    pods = [
        pod("share", container("main", cores=25, blocks=16), init=(container("setup"),)),
        pod("large", container("main", cores=900)),
        pod("done", container("main"), annotations={"sandbox.gpushare/run-seconds": "0"}),
    ]
    (short_dir / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    async with live(state, "--apply", short_dir / "pods.yaml") as node:
        await read_until(node, "default/done Succeeded")

        async def fails(*arguments: str) -> tuple[int, str]:
            done = await sandbox("exec", "--state-dir", state, *arguments)
            assert done.out == ""
            return done.code, done.err.removeprefix("gpushare-agent sandbox: ").rstrip("\n")

        for words, code, text in (
            ("absent true", 1, 'pods "absent" not found'),
            ("-n elsewhere share true", 1, 'pods "share" not found'),
            ("-c other share true", 1, "container other not found in pod share; it has main, setup (init)"),
            ("done true", 1, "cannot exec into a container in a completed pod; current phase is Succeeded"),
            (
                "-c setup share true",
                1,
                "container setup of pod default/share is not running: it ended with exit code 0",
            ),
            ("-c main share no-such-program", 127, "no-such-program: command not found"),
            (f"-c main share {short_dir}/text", 126, f"{short_dir}/text: cannot be run: Permission denied"),
            ("share --qqqqq -- true", 2, "unknown arguments for exec: --qqqqq"),
        ):
            assert await fails(*words.split()) == (code, text), words
        code, text = await fails("-n", "gpushare-system", f"gpushare-agent-{NODE_NAME}", "top")
        assert code == 1 and "type the command here as it stands behind `--`" in text
        waits = "container main of pod default/large is not running: the pod is Pending, Unschedulable: 0/1"
        for words, code, begin in (("-c main large true", 1, waits), ("share", 2, "exec: no command")):
            found, text = await fails(*words.split())
            assert found == code and text.startswith(begin), words
    gone = await sandbox("exec", "--state-dir", state, "share", "true")
    assert gone.code == 1
    assert "no sandbox runs in" in gone.err


@pytest.mark.parametrize(
    ("line", "inner"),
    [
        ("exec share -- ls -l", "ls -l"),
        ("exec share ls -l -c x", "ls -l -c x"),
        ("--state-dir exec exec -cmain -it share sh", "sh"),
        ("exec share -n=x -n y --state-dir=z -- a -- b", "a -- b"),
        ("exec share --bogus -- true", "true"),
        ("-- exec share true", ""),
        ("exec share", ""),
        ("exec share --", ""),
        ("delete exec a b", ""),
        ("--once --samples all", ""),
    ],
)
def test_the_inner_command_begins_behind_the_pods_name_or_two_dashes(line: str, inner: str) -> None:
    """What stands before it is the sandbox's; only `exec` has one."""
    outer_words, inner_words = split_inner_command(line.split())
    assert " ".join(inner_words) == inner
    assert " ".join(outer_words) == line.removesuffix(inner).rstrip().removesuffix(" --")


def test_the_variables_of_a_sandboxs_container_are_no_unknown_settings() -> None:
    """Every command of ours can be run in there; what only looks like a setting is still named."""
    found = read_variables({"GPUSHARE_VDEVICE": "/x", "GPUSHARE_SANDBOX_CGROUPS": "v2", "GPUSHARE_VDEVICES": "1"})
    assert not found.values
    assert len(found.problems) == 1
