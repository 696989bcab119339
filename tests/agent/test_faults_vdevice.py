"""The agent is killed a hundred times while containers register and fork: what a container finds is whole and right after.

The containers are real processes in real cgroups (tests/native/vdevice_load.c, compiled here), the agent is a process of its
own. Every other kill is at a random moment of the start, the others follow a random moment after the first container's
socket is there, so that they fit a slow machine too.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError

from gpushare_agent.core.formats.vdevice import VDeviceConfig, decode_config, decode_pids
from gpushare_agent.sandbox.kubelet.container_config import HOST_IMAGE
from tests.agent.support_agent import poll_until
from tests.isolation.support_vdevice import MIB, register
from tests.sandbox.support_containers import KINDS
from tests.sandbox.support_sandbox import CORE, MEMORY, NodeUnderTest, limits_of, open_test_node, pod
from tests.settings.support_settings import clean_environment
from tests.support_process import running_process

SOURCE = Path(__file__).parent.parent / "native" / "vdevice_load.c"
CONTAINERS, DELETED, KILLS = 50, 8, 100
START_S, RUN_S = 0.5, 0.3
"""The longest time from the start to a kill, and from the first socket to one."""
LOADED_S = 300.0
"""For what a hundred processes and the agent's start need on a machine that does other work too."""
BLOCK_MIB = 256
FILES = {"vcuda.config", "pids.config"}
LIMIT_FILES = {"gpushare.config", "usage"}
"""Of the default isolation, which keeps them next to those."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program of a container."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler (cc) on this machine: 50 containers that register would cost too much in Python")
    program = tmp_path_factory.mktemp("native") / "vdevice_load"
    subprocess.run([compiler, "-Wall", "-Werror", "-O1", "-o", str(program), str(SOURCE)], check=True, timeout=60)
    return program


def cores(number: int) -> int:
    return 3 + number % 8


def blocks(number: int) -> int:
    return 1 + number % 9


def core_limit(number: int) -> int:
    """Every third share is elastic."""
    return 60 if number % 3 == 0 else 0


def manifest(number: int, load: Path, quiet: Path) -> dict[str, Any]:
    container = limits_of(
        "main",
        {CORE: cores(number), MEMORY: blocks(number)},
        command=[str(load)],
        env=[{"name": "GPUSHARE_QUIET", "value": str(quiet)}],
    )
    annotations = {"tencent.com/vcuda-core-limit": str(core_limit(number))} if core_limit(number) else {}
    return pod(f"load-{number:02d}", {**container, "image": HOST_IMAGE}, annotations=annotations)


@asynccontextmanager
async def running_agent(node: NodeUnderTest) -> AsyncIterator[asyncio.subprocess.Process]:
    """The agent, just executed; killed at the end."""
    with node.paths.agent_log.open("ab") as log:
        async with running_process(
            *(sys.executable, "-m", "gpushare_agent", "run", *node.agent_arguments(), "--web.port=0"),
            env=clean_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as child:
            yield child


def uid_of(node: NodeUnderTest, number: int) -> str:
    return str(node.uid_of(f"load-{number:02d}"))


def directory_of(node: NodeUnderTest, number: int) -> Path:
    return node.paths.virtual_manager / uid_of(node, number) / "main"


def expected(node: NodeUnderTest, number: int, driver: tuple[int, int]) -> VDeviceConfig:
    return VDeviceConfig(
        pod_uid=uid_of(node, number),
        container="main",
        limit=core_limit(number),
        memory_bytes=blocks(number) * BLOCK_MIB * MIB,
        utilization=cores(number),
        hard_limit=not core_limit(number),
        driver=driver,
        enable=True,
    )


def is_current(node: NodeUnderTest, number: int) -> bool:
    """pids.config holds the processes of the container's cgroup, of which there are two once it is quiet."""
    container = node.kubelet.runtime.find(uid_of(node, number), "main")
    assert container is not None
    there = node.kubelet.runtime.pids(container)
    return len(there) == 2 and decode_pids((directory_of(node, number) / "pids.config").read_bytes()) == tuple(there)


async def kill_repeatedly(node: NodeUnderTest) -> None:
    """Pods are deleted in between."""
    rng, sockets = random.Random(5), node.paths.virtual_manager
    doomed = list(range(CONTAINERS, CONTAINERS + DELETED))
    for number in range(KILLS):
        for socket in node.paths.virtual_manager.glob("*/main/vcuda.sock"):
            socket.unlink()  # a killed agent leaves its sockets: those that are there next are the new agent's
        async with running_agent(node) as agent:
            if number % (KILLS // DELETED) == 5:
                node.api.delete_pod("default", f"load-{doomed.pop():02d}")
            if number % 2 == 0:
                await poll_until(
                    lambda: any(sockets.glob("*/main/vcuda.sock")) or agent.returncode is not None,
                    "a socket",
                    deadline_s=LOADED_S,
                )
            try:
                async with asyncio.timeout(rng.uniform(0, START_S if number % 2 else RUN_S)):
                    await agent.wait()
                raise AssertionError(f"the agent ended by itself with {agent.returncode} after kill {number}")
            except TimeoutError:
                agent.kill()
    assert doomed == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0]])
async def test_after_100_kills_every_file_is_whole_and_right_and_every_share_is_served(
    load: Path, short_dir: Path, kind: str
) -> None:
    """50 containers register by name and by ID and fork meanwhile, 8 more pods are deleted: then limits and processes are
    what they are, nothing is left half-written, every socket has a listener, no directory is of a pod that is gone."""
    quiet = short_dir / "quiet"
    async with open_test_node(cgroups=kind) as node:
        numbers = range(CONTAINERS)
        async with running_agent(node):
            await node.wait_registered()
            names = [f"load-{number:02d}" for number in range(CONTAINERS + DELETED)]
            for number in range(CONTAINERS + DELETED):
                node.api.create_pod(manifest(number, load, quiet))
            await node.wait_running(*names)
            driver = decode_config((directory_of(node, 0) / "vcuda.config").read_bytes()).driver
            await poll_until(
                lambda: all(any(directory_of(node, n).glob("?" * 64)) for n in numbers),
                "registrations by ID",
                deadline_s=LOADED_S,
            )
        await kill_repeatedly(node)
        async with running_agent(node) as agent:
            deleted = names[CONTAINERS:]
            await node.wait_until(lambda: all(node.api.find_pod("default", n) is None for n in deleted), "pods deleted")
            quiet.touch()
            what = "pids.config as the cgroups"
            await poll_until(lambda: all(is_current(node, n) for n in numbers), what, deadline_s=LOADED_S)
            live = {uid_of(node, number) for number in numbers}
            root = node.paths.virtual_manager
            await wait_cleaned(root, live)
            for number in numbers:
                await check_container(node, number, driver)
            assert agent.returncode is None


async def wait_cleaned(root: Path, live: set[str]) -> None:
    """The agent removes directories of pods that are gone every 5 s."""
    async with asyncio.timeout(LOADED_S):
        while True:
            if {path.name for path in root.iterdir()} == live:
                return
            await asyncio.sleep(0.05)


async def check_container(node: NodeUnderTest, number: int, driver: tuple[int, int]) -> None:
    directory = directory_of(node, number)
    container = node.kubelet.runtime.find(uid_of(node, number), "main")
    assert container is not None
    assert {p.name for p in directory.parent.iterdir()} == {"main"}
    assert {p.name for p in directory.iterdir()} == FILES | LIMIT_FILES | {"vcuda.sock", container.id}
    assert decode_config((directory / "vcuda.config").read_bytes()) == expected(node, number, driver)
    assert {p.name for p in (directory / container.id).iterdir()} == FILES
    for name in sorted(FILES):
        assert (directory / container.id / name).read_bytes() == (directory / name).read_bytes()
    with pytest.raises(GRPCError, match="the calling process is in no container"):  # so it answers
        await register(directory / "vcuda.sock", pod_uid=uid_of(node, number), name="main")
    output = node.kubelet.runtime.log_of(container).read_text()
    assert int(output.partition("ok=")[2]) > 0
