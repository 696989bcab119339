"""Where the agent of an embedded node is asked, and that the sandbox says so."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import aiohttp
import pytest

from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.sandbox.run import addresses_of, live_words
from gpushare_agent.sandbox.state_directory import NodePaths
from tests.kit.support_http import free_port
from tests.sandbox.support_sandbox_cli import ROOT, document_of, ended, live, read_until, registered, sandbox
from tests.support_process import output_of


async def page_of(url: str) -> str:
    """Asked again until the agent listens."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    return await response.text()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)  # another process: it can only be asked again


async def printed_by(line: str) -> str:
    """Of a command line as the sandbox prints it."""
    code, out, _ = await output_of(*shlex.split(line), cwd=ROOT)
    assert code == 0
    return out.decode()


@pytest.mark.slow
async def test_the_first_lines_say_how_the_agent_is_asked_and_that_works(short_dir: Path) -> None:
    """The lines can be used as they stand; the debug pages stay where they are when the agent is started again."""
    state = short_dir / "s"
    async with live(state, "--samples", "none", "--gpus", "2") as process:
        assert process.stdout is not None
        await read_until(process, "its agent:")
        top, explain, cordon = [(await process.stdout.readline()).decode().strip() for _ in range(3)]
        await registered(state)
        reported = (await document_of(state))["node"]["addresses"]
        await read_until(process, f"next: {reported['web']}/  export KUBECONFIG={state}/kubeconfig; kubectl get pods")
        assert reported["control_socket"] == str(NodePaths(state=state).agent_control_socket)
        given = f"--server {reported['web']} --kubeconfig {state}/kubeconfig"
        assert explain == f"{sys.executable} -m gpushare_agent explain POD {given}"
        assert "/debug/tasks" in await page_of(f"{reported['web']}/debug/")
        assert "is cordoned" in await printed_by(cordon.replace("GPU", "1"))
        assert " Cordoned " in await printed_by(f"{top} --once")
        status = (await sandbox("status", "--state-dir", state)).out
        assert f"web {reported['web']}  control socket {reported['control_socket']}" in status
        await sandbox("kill-agent", "--state-dir", state)
        await read_until(process, "starting it again")
        assert "/debug/tasks" in await page_of(f"{reported['web']}/debug/")


SAMPLES = re.search(r'^SAMPLES = "(.*)"', (ROOT / "noxfile.py").read_text(), re.M)[1]  # type: ignore[index]
PROGRAM = """\
#!{python}
import sys
from gpushare_agent.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_tools", [True, False], ids=["tools", "no tools"])
async def test_the_last_lines_of_a_first_run_are_three_commands_that_work(has_tools: bool) -> None:
    """As printed, by sh, in a folder whose name needs quotes, with the words of `nox -s sandbox`, behind a dead proxy: one
    keeps a sandbox running, one explains a pod that waits, one deletes it. Without tools there is no kubectl or openssl."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    dead = {name: "http://127.0.0.1:9" for upper in names for name in (upper, upper.lower())}
    with tempfile.TemporaryDirectory(prefix="a POD's $s", dir="/tmp") as folder:
        environ = {**os.environ, **dead, "PYTHONPATH": str(ROOT), **({} if has_tools else {"PATH": folder})}

        async def typed(line: str) -> asyncio.subprocess.Process:
            pipe = asyncio.subprocess.PIPE
            command = ("/bin/sh", "-c", f"exec {line}")
            return await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environ
            )

        program = Path(folder) / ".nox" / "sandbox" / "bin" / "gpushare-agent"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        (Path(folder) / "manifests").symlink_to(ROOT / "manifests")
        port = free_port()
        # In that folder, so that the commands must quote it.
        words = f"sandbox --state-dir {shlex.quote(f'{folder}/s')} --port {port} --apply {SAMPLES}"
        done = await ended(await typed(f".nox/sandbox/bin/gpushare-agent {words} --once"))
        assert done.code == 0, done.err
        first, live_one, second, explain, delete = done.err.splitlines()[-5:]
        assert first == f"next, a live sandbox with its dashboard on http://localhost:{port}/ (Ctrl-C ends it):"
        assert second == "in a second terminal, in this folder: why too-large is Pending, and its end:"
        for command in (live_one, explain, delete):
            assert command.startswith("  .nox/sandbox/bin/gpushare-agent ")
        process = await typed(live_one)
        try:
            await read_until(process, "pod default/too-large Pending")
            assert "the dashboard" in await page_of(f"http://localhost:{port}/")
            shown = await ended(await typed(explain))
            gone = await ended(await typed(delete))
            assert (gone.code, gone.err) == (0, "")
            await read_until(process, "gone: pod default/too-large")
        finally:
            process.send_signal(signal.SIGINT)
            await ended(process)
    assert shown.out.startswith("default/too-large waits for a node\n"), shown.err
    assert "container main: 10000 cores are 100 GPUs" in shown.out


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("--once", "sandbox"),
        ("--once --samples fitting", "sandbox --samples all"),
        ("--samples=fitting --apply a.yaml --once", "sandbox --samples=all --apply a.yaml"),
        ("--once --samples none --apply 'a b'", "sandbox --samples waiting --apply 'a b'"),
        ("--once --port 0 --apply a.yaml", "sandbox --port 0 --apply a.yaml --web.port=4711 --samples waiting"),
        ("--once --port 0 --gpus 14711", "sandbox --port 0 --gpus 14711 --web.port=4711 --samples waiting"),
    ],
)
def test_the_live_sandbox_has_the_pods_of_the_first_and_one_that_waits(words: str, printed: str) -> None:
    """And the port that was free, which the other commands name."""
    is_waiting = printed == "sandbox"
    web = "http://localhost:4711" if "--port 0" in words else "http://localhost:5678"
    assert live_words(["sandbox", *shlex.split(words)], web, has_waiting=is_waiting) == printed


@pytest.mark.slow
async def test_the_guides_explanation_is_what_a_first_sandbox_shows(short_dir: Path) -> None:
    """Word for word."""
    guide = (ROOT / "docs/how-to/find-out-why-refused.md").read_text()
    shown = re.search(r"^\$ kubectl gpushare (explain .*)\n((?:.+\n)+)```$", guide, re.M)
    assert shown is not None
    async with live(short_dir / "s") as process:
        waits_for = {"share", "two-shares", "pair"}
        while waits_for:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            waits_for = {name for name in waits_for if f"pod default/{name} Running" not in line}
        code = "import sys; from gpushare_agent.__main__ import run_plugin; sys.exit(run_plugin())"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": f"{short_dir}/s/kubeconfig"}
        _, out, _ = await output_of(sys.executable, "-c", code, *shown[1].split(), env=environment)
    assert out.decode() == shown[2]


def test_an_address_that_means_all_is_reported_as_one_that_can_be_asked() -> None:
    """And what is switched off is not printed."""
    flags = ("--web.addr=0.0.0.0", "--web.port=5", "--control.socket=")
    assert addresses_of(load_settings(flags, {}).settings) == {"web": "http://localhost:5", "control_socket": ""}
