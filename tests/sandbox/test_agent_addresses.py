"""Where the agent of an embedded node is asked, and that the sandbox says so."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.sandbox.run import addresses_of
from gpushare_agent.sandbox.state_directory import NodePaths
from tests.kit.support_http import free_port
from tests.sandbox.support_sandbox_cli import (
    ROOT,
    document_of,
    ended,
    live,
    read_until,
    registered,
    sandbox,
)
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
async def test_the_first_lines_say_how_the_agent_is_asked_and_that_works() -> None:
    """The lines can be used as they stand; the debug pages stay where they are when the agent is started again."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gs", dir="/tmp"))) / "s"
        async with live(state, "--samples", "none", "--gpus", "2") as process:
            assert process.stdout is not None
            await read_until(process, "its agent:")
            top, explain, cordon = [(await process.stdout.readline()).decode().strip() for _ in range(3)]
            await registered(state)
            reported = (await document_of(state))["node"]["addresses"]
            await read_until(
                process, f"next: {reported['web']}/  export KUBECONFIG={state}/kubeconfig; kubectl get pods"
            )
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


PROGRAM = """\
#!{python}
import sys
from gpushare_agent.__main__ import {function}
sys.exit({function}())
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_plugin", [True, False], ids=["plugin", "no plugin"])
async def test_the_last_lines_of_a_first_run_are_the_next_step_also_behind_a_proxy(has_plugin: bool) -> None:
    """Each can be typed as it stands: what keeps the sandbox running, and an explanation of a pod that is there."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    dead = {name: "http://127.0.0.1:9" for upper in names for name in (upper, upper.lower())}
    environ = {**os.environ, **dead, "PYTHONPATH": str(ROOT)}

    async def typed(line: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_shell(
            f"exec env {line}", stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, env=environ
        )

    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder:
        for name, function in (("gpushare-agent", "main"), ("kubectl-gpushare", "run_plugin"))[: 1 + has_plugin]:
            program = Path(folder) / name
            program.write_text(PROGRAM.format(python=sys.executable, function=function))
            program.chmod(0o755)
        port = free_port()
        words = f"sandbox --state-dir {folder}/s --port {port} --apply manifests/samples/share.yaml"
        done = await ended(await typed(f"{folder}/gpushare-agent {words} --once"))
        assert done.code == 0, done.err
        again, page, explain = done.err.splitlines()[-3:]
        assert again == f"next: {folder}/gpushare-agent {words}"
        assert page == f"  keeps it running, with a page on http://localhost:{port}/; then, in another terminal:"
        process = await typed(again.removeprefix("next: "))
        try:
            await read_until(process, "default/share Running")
            shown = await ended(await typed(explain))
        finally:
            process.send_signal(signal.SIGINT)
            await ended(process)
        assert shown.out.startswith("default/share, container cuda got GPU 0"), shown.err
        assert ("kubectl-gpushare" in explain) is has_plugin


@pytest.mark.slow
async def test_the_guides_explanation_is_what_a_first_sandbox_shows() -> None:
    """Word for word."""
    guide = (ROOT / "docs/how-to/find-out-why-refused.md").read_text()
    shown = re.search(r"^\$ kubectl gpushare (explain .*)\n((?:.+\n)+)```$", guide, re.M)
    assert shown is not None
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder:
        state = Path(folder) / "s"
        async with live(state) as process:
            waits_for = {"share", "two-shares", "pair"}
            while waits_for:
                assert process.stdout is not None
                line = (await process.stdout.readline()).decode()
                waits_for = {name for name in waits_for if f"pod default/{name} Running" not in line}
            code = "import sys; from gpushare_agent.__main__ import run_plugin; sys.exit(run_plugin())"
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": f"{state}/kubeconfig"}
            _, out, _ = await output_of(sys.executable, "-c", code, *shown[1].split(), env=environment)
    assert out.decode() == shown[2]


def test_an_address_that_means_all_is_reported_as_one_that_can_be_asked() -> None:
    """And what is switched off is not printed."""
    flags = ("--web.addr=0.0.0.0", "--web.port=5", "--control.socket=")
    assert addresses_of(load_settings(flags, {}).settings) == {"web": "http://localhost:5", "control_socket": ""}
