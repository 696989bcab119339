"""`gpushare-agent sandbox` as a person runs it: processes, exit codes, output, clean-up."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpushare_agent.sandbox import command as app
from gpushare_agent.sandbox.run import Notices, reported_after
from tests.sandbox.support_sandbox import container, pod
from tests.sandbox.support_sandbox_cli import ROOT, ended, live, once, read_until, registered, sandbox


@pytest.mark.slow
async def test_the_fitting_samples_run_and_the_document_is_complete(short_dir: Path) -> None:
    """--once -o json: exit 0, one document on stdout, nothing left behind."""
    state = short_dir / "s"
    document = await once(state, "--samples", "fitting", "--gpus", "4")
    gpus = document["node"]["gpus"]
    assert [gpu["index"] for gpu in gpus] == [0, 1, 2, 3]
    assert sum(gpu["cores"]["allocated"] for gpu in gpus) == 25 + 60 + 200
    pods = {p["name"]: p for p in document["pods"]}
    assert {p["phase"] for p in pods.values()} == {"Running"}
    parts = [part for one in document["node"]["containers"] for part in one["gpus"]]
    assert len(parts) == 5 and all(0 < part["usage"]["sm_ratio"] <= 0.9 for part in parts)
    assert {gpu["usage"]["sm_ratio"] > 0 for gpu in gpus if gpu["cores"]["allocated"]} == {True}
    (main,) = pods["share"]["containers"]
    assert main["env"]["NVIDIA_VISIBLE_DEVICES"] == gpus[main["gpus"][0]]["uuid"]
    assert len(pods["pair"]["containers"][0]["gpus"]) == 2
    assert not state.exists()


@pytest.mark.slow
async def test_pods_that_do_not_run_make_exit_code_one(short_dir: Path) -> None:
    """One is refused by the agent, one fits nowhere: both are reported with their reasons, in file order."""
    manifest = short_dir / "pods.yaml"
    bad, large = pod("bad", container("main", cores=50)), pod("large", container("main", cores=900))
    manifest.write_text(yaml.safe_dump_all([bad, large, pod("fine", container("main", cores=50, blocks=4))]))
    done = await sandbox("--state-dir", short_dir / "s", "--port", "0", "--once", "--apply", manifest)
    assert done.code == 1
    created = [line for line in done.err.splitlines() if line.endswith("created")]
    assert created == ["pod default/bad created", "pod default/large created", "pod default/fine created"]
    assert "default/bad is Failed: UnexpectedAdmissionError: Pod was rejected: Allocate failed" in done.err
    assert "default/large is Pending: Unschedulable: 0/1 nodes are available" in done.err
    assert "default/fine" in done.out


UNKNOWN_KIND = (
    "kind 'CronJob' cannot be applied: the embedded node knows Pod, DeviceClass, ResourceClaim, ResourceClaimTemplate, "
    "Deployment, StatefulSet, Job, Service, ConfigMap, Namespace, ResourceQuota, HorizontalPodAutoscaler"
)
MISSPELT = {"name": "main", "resorces": {"limits": {"x/y": 1}}}


@pytest.mark.parametrize("command", [("--once", "--apply"), ("apply", "-f")])
@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({"kind": "CronJob"}, UNKNOWN_KIND),
        (pod("a", MISSPELT), 'Pod: unknown field "spec.containers[0].resorces"'),  # it would run without its GPU
    ],
)
async def test_a_bad_manifest_is_one_readable_line_and_exit_code_two(
    short_dir: Path, manifest: dict[str, Any], why: str, command: tuple[str, ...]
) -> None:
    """Nothing is started for it."""
    (short_dir / "bad.yaml").write_text(yaml.safe_dump(manifest))
    done = await sandbox(*command, short_dir / "bad.yaml", "--state-dir", short_dir / "s")
    assert (done.code, done.err) == (2, f"gpushare-agent sandbox: {short_dir}/bad.yaml: {why}\n")


GPUS = "allowed: a whole number from 1 to 64"


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (("--gpus", "many"), 2, GPUS),
        (("--gpus", "0"), 2, GPUS),
        (("--gpus", "65"), 2, GPUS),
        (("--topology", "absent.txt"), 2, "absent.txt"),
        (("--state-dir", "/dev/null"), 1, "--state-dir"),
    ],
)
async def test_a_wrong_setting_is_one_line(short_dir: Path, flags: tuple[str, ...], code: int, why: str) -> None:
    """Before anything starts; 2 for a mistake of the command line, 1 for the machine's."""
    done = await sandbox("--state-dir", short_dir / "s", "--once", *flags)
    assert (done.code, done.err.count("\n")) == (code, 1), done.err
    assert why in done.err


def documented_commands() -> list[list[str]]:
    """Arguments of the command lines in the first code block of docs/reference/sandbox.md; a remark stands behind three
    blanks."""
    block = (ROOT / "docs/reference/sandbox.md").read_text().split("```")[1]
    lines = [line.partition("   ")[0].split() for line in block.splitlines() if line]
    assert all(words[:2] == ["gpushare-agent", "sandbox"] for words in lines)
    return [words[2:] for words in lines]


@pytest.mark.parametrize("arguments", [c for c in documented_commands() if "--once" in c], ids=" ".join)
async def test_the_documented_runs_work(short_dir: Path, arguments: list[str]) -> None:
    """As they stand in docs/reference/sandbox.md, next to a pods.yaml and a short_dir with the name of the package."""
    (short_dir / "pods.yaml").write_text(yaml.safe_dump(pod("mine", container("main", cores=100))))
    (short_dir / "gpushare_agent").mkdir()
    (short_dir / "gpushare_agent" / "__init__.py").write_text("raise RuntimeError('the wrong code')")
    done = await sandbox(*arguments, "--state-dir", short_dir / "s", "--port", "0", cwd=short_dir)
    assert done.code == 0, done.err
    assert "web http" not in done.err
    if "json" in arguments:
        gpus = json.loads(done.out)["node"]["gpus"]
        assert [gpu["memory"]["capacity_bytes"] >> 20 for gpu in gpus] == [24576, 16384]
        whole = next(gpu for gpu in gpus if gpu["cores"]["allocated"])
        assert whole["memory"]["allocated_bytes"] == whole["memory"]["capacity_bytes"]


def test_every_documented_command_is_known() -> None:
    """The argument parser takes each line of the block; the sentence behind it has the other commands."""
    parser = argparse.ArgumentParser()
    app.add_arguments(parser)
    found = {parser.parse_args(app.split_inner_command(words)[0]).command for words in documented_commands()}
    further = re.search(r"^Further commands: (.+?)\.", (ROOT / "docs/reference/sandbox.md").read_text(), re.MULTILINE)
    assert further is not None
    assert found | set(re.findall(r"`([a-z-]+)`", further[1])) == {None, *app._COMMANDS}


@pytest.mark.parametrize("addr", ["--web.addr=localhost", "--web.addr="])
async def test_a_busy_port_is_one_line_that_names_the_flag(short_dir: Path, addr: str) -> None:
    """Found before the agent starts: exit 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = await sandbox("--state-dir", short_dir / "s", "--once", addr, "--port", str(taken.getsockname()[1]))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "--port" in done.err


@pytest.mark.parametrize(
    ("isolation", "flag", "why"),
    [
        ("gpushare", "--libgpushare.library=/proc/self/status", "/proc/self/status is no shared object"),
        ("mps+driver", "--mps.pipe-directory=/absent", "the MPS pipe directory /absent cannot be "),
    ],
    ids=["a library", "a daemon of the user's own"],
)
async def test_an_isolation_without_what_it_needs_is_refused_at_the_start(
    short_dir: Path, isolation: str, flag: str, why: str
) -> None:
    """Its agent would wait, and the sandbox with it, for what nobody brings: one line with the cure, and nothing is left."""
    done = await sandbox("--state-dir", short_dir / "s", "--once", "--port", "0", "--isolation", isolation, flag)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1), done.err
    assert done.err.startswith(f"gpushare-agent: no share could be given under isolation {isolation}: ")
    assert why in done.err and "Without a setting of the isolation the sandbox takes one that" in done.err
    assert not (short_dir / "s").exists()


@pytest.mark.slow
async def test_leftovers_of_a_dead_sandbox_go_with_the_next_one(short_dir: Path) -> None:
    """SIGKILL leaves the directory; --once takes it over and removes it."""
    state = short_dir / "s"
    async with live(state, "--samples", "none") as process:
        await read_until(process, "Ctrl-C ends")
        process.kill()
        await ended(process)
    assert state.exists()
    assert (await sandbox("--state-dir", state, "--port", "0", "--once", "--samples", "none")).code == 0
    assert not state.exists()


def arguments_of(pid: str) -> bytes:
    """Empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
async def test_an_agent_ended_by_sigterm_is_started_again_without_a_complaint(short_dir: Path) -> None:
    """A short note, and the next agent registers."""
    async with live(short_dir / "s", "--samples", "fitting") as process:
        await read_until(process, "default/share Running")
        assert process.pid is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        agents = [pid for pid in children if b"gpushare_agent\0run" in arguments_of(pid)]
        assert len(agents) == 1
        os.kill(int(agents[0]), signal.SIGTERM)
        await read_until(process, "the agent has ended as it was asked to; starting it again")
        await registered(short_dir / "s")


@pytest.mark.slow
async def test_an_agent_that_cannot_start_is_reported_with_its_last_lines(short_dir: Path) -> None:
    """A wrong setting that only the agent meets: exit 1, its own words, and no sandbox left."""
    absent = short_dir / "absent.json"
    done = await sandbox("--state-dir", short_dir / "s", "--once", "--port", "0", "--extra-config", absent)
    assert done.code == 1
    assert "absent.json" in done.err
    assert not (short_dir / "s").exists()


@pytest.mark.slow
async def test_isolation_none_is_said_at_the_start(short_dir: Path) -> None:
    """Its containers show a dash for a limit; why is not to be guessed."""
    words = ("--port", "0", "--once", "--samples", "none", "--isolation", "none")
    done = await sandbox("--state-dir", short_dir / "s", *words)
    assert (done.code, "isolation none: shares are allocated and not enforced" in done.err) == (0, True)


async def test_a_wait_is_reported_only_where_it_is_long(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error where standard output has a document."""
    notices = Notices(to_stderr=True)
    async with reported_after(3600, "not this", notices):
        pass
    async with reported_after(0, "waiting…", notices):
        due = asyncio.Event()
        asyncio.get_running_loop().call_later(0, due.set)  # behind the one that tells
        await due.wait()
    assert capsys.readouterr() == ("", "waiting…\n")


@pytest.mark.slow
async def test_a_live_sandbox_obeys_from_another_terminal_and_cleans_up_at_the_end(short_dir: Path) -> None:
    """apply, delete, kill-agent, restart-kubelet, status; SIGINT ends it with nothing left."""
    state = short_dir / "s"
    (short_dir / "p.yaml").write_text(yaml.safe_dump(pod("mine", container("main", cores=20, blocks=2))))
    async with live(state, "--samples", "none") as process:
        await read_until(process, "Ctrl-C ends")
        where = ("--state-dir", state)
        assert (await sandbox("apply", "-f", short_dir / "p.yaml", *where)).out == "pod default/mine created\n"
        await read_until(process, "pod default/mine Running")
        again = await sandbox("apply", "-f", "-", *where, text=yaml.safe_dump(pod("piped", container("main"))))
        assert again.out == "pod default/piped created\n", again.err
        # One that comes and goes between two drawings is never shown.
        await read_until(process, "pod default/piped Running")
        assert (await sandbox("delete", "default/piped", *where)).out == "pod default/piped deleted\n"
        await read_until(process, "gone: pod default/piped\n")
        assert (await sandbox("kill-agent", *where)).code == 0
        await read_until(process, "the agent was killed by signal 9; starting it again")
        assert (await sandbox("restart-kubelet", *where)).code == 0
        await registered(state)
        shown = json.loads((await sandbox("status", *where, "-o", "json")).out)
        assert [p["phase"] for p in shown["pods"]] == ["Running"]
        twice = await sandbox("apply", "-f", short_dir / "p.yaml", *where)
        assert (twice.code, twice.out) == (0, "pod default/mine unchanged\n")
        (short_dir / "p.yaml").write_text(yaml.safe_dump(pod("mine", container("main", cores=21, blocks=2))))
        changed = await sandbox("apply", "-f", short_dir / "p.yaml", *where)
        assert changed.code == 1 and "delete the pod and create it again" in changed.err
        deleted = await sandbox("delete", "mine", "absent", *where)
        assert (deleted.code, deleted.out) == (1, "pod default/mine deleted\n")
        assert deleted.err == 'gpushare-agent sandbox: pods "absent" not found\n'
        await read_until(process, "gone: pod default/mine")
        second = await sandbox("--once", *where)
        assert second.code == 1
        assert "another sandbox" in second.err and f"`{sys.executable} -m gpushare_agent sandbox status" in second.err
        process.send_signal(signal.SIGINT)
        done = await ended(process)
        assert done.code == 0, done.err
    assert not state.exists()
    assert (await sandbox("status", *where)).code == 1
