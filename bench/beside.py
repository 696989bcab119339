"""The agent next to another device plugin, on the same fake NVML and behind the same kubelet, in turns.

Both offer `nvidia.com/gpu` as replicas of 8 GPUs by one configuration file in NVIDIA's form. A device plugin has its
directory built in: it runs in a mount namespace of its own, so as root, in which /var/lib has the benchmark's node alone.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.kubelet import CallTimes, Plugin
from bench.node import GPUS, BenchNode, open_node
from bench.nvml import fake_library, script_of
from bench.pods import BenchPod
from bench.results import Row, row

RESOURCE = "nvidia.com/gpu"
REPLICAS = 10
_XID = 79
_XID_EVENT = 8
_UNHEALTHY = b"Unhealthy"
_KEPT_PODS = 40
_SEEN_S, _TIMEOUT_S = 0.03, 30.0
_CONFIGURATION = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: {RESOURCE}
      replicas: {REPLICAS}
"""
_IN_NAMESPACE = """
mount -t tmpfs none /var/lib && mkdir /var/lib/kubelet && mount --bind "$1" /var/lib/kubelet && shift && exec "$@"
"""


@dataclass(slots=True, kw_only=True)
class Rival:
    """One of the two. Milliseconds, but of `resident` (MiB) and `idle` (percent of a CPU)."""

    name: str
    node: BenchNode
    script: Path
    registered: list[float] = field(default_factory=list)
    stopped: list[float] = field(default_factory=list)
    empty: list[CallTimes] = field(default_factory=list)
    filled: list[CallTimes] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    unhealthy: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)
    """Devices that each Xid made Unhealthy."""

    @property
    def plugin(self) -> Plugin:
        return self.node.kubelet.plugins[RESOURCE]

    async def start(self) -> None:
        """Raises RuntimeError where it does not register."""
        self.node.kubelet.plugins.clear()
        started = await self.node.agent.start()
        await self.node.wait_registered(resources=(RESOURCE,))
        self.registered.append((self.plugin.registered_at - started) * 1000)

    async def admit(self, name: str, times: list[CallTimes], *, is_kept: bool = False) -> None:
        """One pod with one replica. Raises RefusedPodError."""
        pod = BenchPod(name=name, requests={RESOURCE: 1})
        pod.encode()
        self.node.create(pod)
        await asyncio.sleep(_SEEN_S)
        before = self.node.agent.processor_s()
        times.append((await self.node.kubelet.admit(pod, (RESOURCE,)))[RESOURCE])
        self.processor.append((self.node.agent.processor_s() - before) * 1000)
        if not is_kept:
            self.node.delete(pod)
        await asyncio.sleep(_SEEN_S)

    async def fail(self, gpu: int) -> None:
        """Until a device list has come that shows more Unhealthy devices. Raises TimeoutError."""
        fresh = self.script.with_suffix(".new")
        fresh.write_text(self.script.read_text() + f"event {gpu + 1} {gpu} {_XID_EVENT} {_XID}\n")
        plugin, changed = self.plugin, self.node.kubelet.changed
        before = plugin.message.count(_UNHEALTHY)
        happened = time.perf_counter()
        fresh.replace(self.script)
        async with asyncio.timeout(_TIMEOUT_S), changed:
            await changed.wait_for(lambda: plugin.message.count(_UNHEALTHY) > before)
        self.unhealthy.append((plugin.received_at - happened) * 1000)
        self.shown.append(plugin.message.count(_UNHEALTHY) - before)


async def beside_rows(command: str, *, starts: int, admissions: int, settle_s: float, idle_s: float) -> list[Row]:
    """`command` is the other plugin's program with its arguments. Raises RuntimeError, TimeoutError, CalledProcessError."""
    async with _open_rivals(shlex.split(command)) as rivals:
        for number in range(starts + 1):
            for rival in rivals:
                if number:
                    rival.stopped.append(await rival.node.agent.stop() * 1000)
                await rival.start()
        for rival in rivals:
            del rival.registered[0]  # the first one compiles, or reads from the disk, what is not there yet
        await asyncio.sleep(settle_s)
        for number in range(admissions):
            for rival in rivals:
                await rival.admit(f"empty-{number:03d}", rival.empty)
        for number in range(_KEPT_PODS):
            for rival in rivals:
                await rival.admit(f"kept-{number:03d}", [], is_kept=True)
        for number in range(admissions):
            for rival in rivals:
                await rival.admit(f"filled-{number:03d}", rival.filled)
        await _idle(rivals, settle_s, idle_s)
        for gpu in range(GPUS):
            for rival in rivals:
                await rival.fail(gpu)
            # One Xid at a time: after events the agent fetches no others for a moment.
            await asyncio.sleep(_SEEN_S * 10)
        return _rows(rivals, idle_s)


async def _idle(rivals: list[Rival], settle_s: float, idle_s: float) -> None:
    await asyncio.sleep(settle_s)
    before = [rival.node.agent.processor_s() for rival in rivals]
    started = time.perf_counter()
    await asyncio.sleep(idle_s)
    took_s = time.perf_counter() - started
    for rival, earlier in zip(rivals, before, strict=True):
        rival.idle.append((rival.node.agent.processor_s() - earlier) / took_s * 100)
        rival.resident.append(rival.node.agent.resident_mib())


def _rows(rivals: list[Rival], idle_s: float) -> list[Row]:
    """Both plugins' figures of one thing below each other."""

    def whole(times: list[CallTimes]) -> list[float]:
        return [one.total_s * 1000 for one in times]

    calls = f"GetPreferredAllocation + Allocate of one of {GPUS * REPLICAS} replicas"
    measured: list[tuple[str, Callable[[Rival], list[float]], str]] = [
        ("start to registered", lambda rival: rival.registered, "ms"),
        ("SIGTERM to the end", lambda rival: rival.stopped, "ms"),
        (f"{calls}, none taken", lambda rival: whole(rival.empty), "ms"),
        (f"{calls}, {_KEPT_PODS} taken", lambda rival: whole(rival.filled), "ms"),
        ("processor time of an admission", lambda rival: rival.processor, "ms"),
        (f"resident, {_KEPT_PODS} shares", lambda rival: rival.resident, "MiB"),
        (f"processor time, idle, over {idle_s:g} s", lambda rival: rival.idle, "%"),
        ("Xid to the Unhealthy device list", lambda rival: rival.unhealthy, "ms"),
        (f"  of the GPU's {REPLICAS} replicas Unhealthy then", lambda rival: rival.shown, ""),
    ]
    return [row(f"{what}: {rival.name}", of(rival), unit=unit) for what, of, unit in measured for rival in rivals]


@asynccontextmanager
async def _open_rivals(command: list[str]) -> AsyncIterator[list[Rival]]:
    program = shutil.which(command[0])
    if program is None:
        raise RuntimeError(f"{command[0]} is no program")
    with fake_library() as library:
        async with AsyncExitStack() as stack:
            rivals: list[Rival] = []
            for name in ("gpushare-agent", Path(program).name):
                directory = library / name
                directory.mkdir()
                script, configuration = directory / "script", directory / "config.yaml"
                script.write_text(script_of(0))
                configuration.write_text(_CONFIGURATION)
                environment = {
                    "LD_LIBRARY_PATH": str(library),
                    "FAKE_NVML_SCRIPT": str(script),
                    "CONFIG_FILE": str(configuration),
                    "DEVICE_DISCOVERY_STRATEGY": "nvml",
                }
                flags = {"driver": "nvml", "nvidia.enabled": "true"}
                node = await stack.enter_async_context(
                    open_node(isolation="none", flags=flags, environment=environment)
                )
                if rivals:
                    bound = [
                        "unshare",
                        "--mount",
                        "sh",
                        "-c",
                        _IN_NAMESPACE,
                        "sh",
                        str(node.kubelet.plugin_directory.parent),
                    ]
                    node.agent.become([*bound, program, *command[1:]])
                rivals.append(Rival(name=name, node=node, script=script))
            yield rivals
