"""For tests of the operator's commands: what agents and API servers answer, and a real terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec import to_builtins

from gpushare_agent.commands import COMMAND_LINE
from gpushare_agent.core.cli.command_line import CommandLine
from gpushare_agent.core.model.decision_records import Asked, Candidate, DecisionRecord, Outcome
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import ContainerUse, ProcessSample, UsageRound
from tests.cluster.support_kube import write_kubeconfig
from tests.fakes.api_server import FakeApiServer, Seen, answers, json_server
from tests.observability.support_usage import UUIDS, allocation, facts, gpu_sample, inventory, key_of, snapshot
from tests.settings.support_settings import clean_environment
from tests.support_deadline import Changes
from tests.support_json import written_node
from tests.support_process import running_process

SAMPLED_AT = 999.5


async def call(name: str, *words: str, line: CommandLine = COMMAND_LINE) -> int:
    """Runs a command in this process, on this event loop; its errors are raised."""
    [command] = [one for one in line.commands if one.name == name]
    code = command.run(command.parse(line.program, words, {"NODE_NAME": "n1"}))
    return code if isinstance(code, int) else await code


def agent_answers(document: dict[str, Any], *decisions: DecisionRecord) -> dict[str, Any]:
    """An agent that selects decisions as the real one does, `decisions` with the newest first."""

    async def chosen(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        found = [
            to_builtins(one)
            for one in decisions
            if seen.query.get("pod", one.pod) == one.pod and seen.query.get("namespace", one.namespace) == one.namespace
        ]
        shown = found[: int(seen.query.get("limit", "50"))]
        return await answers(200, {"decisions": shown})(server, seen, request)

    return {"/api/v1/node": document, "/api/v1/decisions": chosen}


def busy_node() -> dict[str, Any]:
    """GPU 0 with two shares and an unattributed process, GPU 1 allocated whole and unhealthy, GPU 2 cordoned, GPU 3 free."""
    trainer, evaluator, whole = key_of(1, "trainer"), key_of(2, "evaluator"), key_of(3)
    usage = UsageRound(
        sampled_at=SAMPLED_AT,
        gpus={
            UUIDS[n]: gpu_sample(
                n, sm_ratio=0.5, memory_used_bytes=3000 * MIB, temperature_celsius=61.0, power_watts=250.4,
                power_limit_watts=700.0,
            )
            for n in range(3)
        },
        containers={
            (trainer, UUIDS[0]): ContainerUse(
                key=trainer, uuid=UUIDS[0], pids=(7,), memory_bytes=2000 * MIB, sm_ratio=0.31
            )
        },
        unattributed={UUIDS[0]: (ProcessSample(pid=4711, memory_bytes=100 * MIB, sm_ratio=0.02),)},
    )  # fmt: skip
    return written_node(
        snapshot(
            facts(allocation(trainer, (0,), cores=40, blocks=16, pod="train"), core_limit=60),
            facts(allocation(evaluator, (0,), cores=20, blocks=8, pod="eval")),
            facts(allocation(whole, (1,), cores=100, blocks=0, pod="big")),
            usage=usage,
            gpus=inventory(4, sick={1: "Xid 79: the GPU fell off the bus"}),
            cordoned={UUIDS[2]: "fan replaced on Monday"},
        )
    )


def decision(number: int = 1, *, pod: str = "train", container: str = "main", **fields: Any) -> DecisionRecord:
    """A share on GPU 0 of two; `fields` replace what the record has."""
    defaults: dict[str, Any] = {
        "at": 1_700_000_000.0,
        "namespace": "default",
        "pod_uid": f"uid-{pod}",
        "resource": "tencent.com/vcuda-core",
        "outcome": Outcome.ALLOCATED,
        "reason": "",
        "explanation": "GPU 0: the fullest of 2 GPUs that fit",
        "policy": "share",
        "gpus": (0,),
        "labels": ("0",),
        "asked": Asked(cores=40, memory_bytes=4096 * MIB),
        "candidates": (
            candidate(0, is_chosen=True, verdict="chosen"),
            candidate(1, verdict="fits, but the policy prefers the chosen one"),
        ),
    }
    return DecisionRecord(number=number, pod=pod, container=container, **(defaults | fields))


def candidate(index: int, *, is_chosen: bool = False, is_healthy: bool = True, verdict: str = "") -> Candidate:
    return Candidate(
        index=index,
        label=str(index),
        uuid=GpuUuid(f"GPU-{index}"),
        is_healthy=is_healthy,
        free_cores=75,
        free_memory_bytes=20480 * MIB,
        total_memory_bytes=24576 * MIB,
        is_chosen=is_chosen,
        verdict=verdict,
    )


# --- a cluster ---


def raw_node(
    name: str, gpus: list[dict[str, Any]] | str | None, *, held: dict[str, Any] | None = None, **capacity: str
) -> dict[str, Any]:
    """A node whose annotations have these GPUs, or this text, and what pods have of them by UID; without any it has only
    a capacity, by `_` for / and -."""
    annotations = {}
    if held is not None:
        annotations["gpushare-agent/allocations"] = json.dumps({"schema": 1, "allocations": held})
    if gpus is not None:
        text = gpus if isinstance(gpus, str) else json.dumps({"schema": 1, "memory_block_mib": 256, "gpus": gpus})
        annotations["gpushare-agent/gpus"] = text
    return {
        "metadata": {"name": name, "annotations": annotations},
        "status": {"capacity": {f"tencent.com/vcuda-{key}": value for key, value in capacity.items()}},
    }


def raw_gpu(index: int, **fields: Any) -> dict[str, Any]:
    usual = {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100", "memory_mib": 24576, "is_healthy": True}
    return {**usual, "numa": 0, "links": ["X"], **fields}


def raw_list(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "List", "items": items, "metadata": {"resourceVersion": "7"}}


def raw_agent_pod(node: str, *, name: str = "", phase: str = "Running", port: int = 5678) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": port}]
    return {
        "metadata": {"name": name or f"agent-{node}", "namespace": "gpushare-system"},
        "spec": {"nodeName": node, "containers": [{"name": "agent", "ports": ports}]},
        "status": {"phase": phase},
    }


@asynccontextmanager
async def api_server(directory: Path, answers: Mapping[str, Any]) -> AsyncIterator[tuple[FakeApiServer, str]]:
    """It answers so by path; and the flag of a kubeconfig that leads there."""
    async with json_server(answers) as server:
        kubeconfig = write_kubeconfig(directory, server.url, {"token": "secret"})
        yield server, f"--kubeconfig={kubeconfig}"


# --- a terminal ---


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.shown = ""
        self._master = master
        self._changed = Changes()

    def read(self) -> None:
        with contextlib.suppress(OSError):  # EIO once the program has ended
            self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
        self._changed.set()

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, *, columns: int, rows: int) -> None:
        """With the signal that the kernel sends to whom the terminal controls, which this program it does not."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def mode(self) -> list[Any]:
        return termios.tcgetattr(self._master)

    async def wait_shown(self, is_shown: Callable[[str], bool]) -> None:
        await self._changed.until(lambda: is_shown(self.shown))

    async def wait_end(self) -> int:
        return await self.process.wait()


@asynccontextmanager
async def at_terminal(*argv: str, columns: int = 120, rows: int = 30, term: str = "xterm") -> AsyncIterator[Terminal]:
    """`python -m gpushare_agent ARGV` with a terminal as its standard input and output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    loop = asyncio.get_running_loop()
    environ = clean_environment(TERM=term)
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    command = (sys.executable, "-m", "gpushare_agent", *argv)
    try:
        async with running_process(*command, env=environ, stdin=slave, stdout=slave, stderr=slave) as process:
            terminal = Terminal(process, master)
            loop.add_reader(master, terminal.read)
            yield terminal
    finally:
        loop.remove_reader(master)
        os.close(slave)
        os.close(master)


def screen_of(shown: str) -> list[str]:
    """The last whole picture: each begins at the home position."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.rpartition("\x1b[H")[2])
    return [line.rstrip() for line in plain.splitlines()]


def foot_of(shown: str) -> str:
    return "".join(screen_of(shown)[-1:])
