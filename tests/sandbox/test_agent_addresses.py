"""Where the agent of an embedded node is asked, and that the sandbox says so."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from gpushare_agent.core.settings.settings import load_settings
from gpushare_agent.sandbox.run import addresses_of
from gpushare_agent.sandbox.state_directory import NodePaths
from tests.sandbox.support_sandbox_cli import DEADLINE_S, ROOT, document_of, live, read_until, registered, sandbox


async def page_of(url: str) -> str:
    """Asked again until the agent listens."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE_S):
        while True:
            try:
                async with session.get(url) as response:
                    return await response.text()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)  # another process: it can only be asked again


async def printed_by(line: str) -> str:
    """Of a command line as the sandbox prints it."""
    child = await asyncio.create_subprocess_exec(*shlex.split(line), stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await child.communicate()
    assert child.returncode == 0
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
            assert explain == f"{sys.executable} -m gpushare_agent explain POD --server {reported['web']}"
            assert "/debug/tasks" in await page_of(f"{reported['web']}/debug/")
            assert "is cordoned" in await printed_by(cordon.replace("GPU", "1"))
            assert " Cordoned " in await printed_by(f"{top} --once")
            status = (await sandbox("status", "--state-dir", state)).out
            assert f"web {reported['web']}  control socket {reported['control_socket']}" in status
            await sandbox("kill-agent", "--state-dir", state)
            await read_until(process, "starting it again")
            assert "/debug/tasks" in await page_of(f"{reported['web']}/debug/")


def test_an_address_that_means_all_is_reported_as_one_that_can_be_asked() -> None:
    """And what is switched off is not printed."""
    flags = ("--web.addr=0.0.0.0", "--web.port=5", "--control.socket=")
    assert addresses_of(load_settings(flags, {}).settings) == {"web": "http://localhost:5", "control_socket": ""}
