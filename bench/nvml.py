"""What an idle agent costs with NVML: the real nvidia-ml-py on a fake libnvidia-ml.so.1 (tests/native/fake_nvml.c).

The fake's own time is in the figures. Two nodes run at the same time, each with its own agent: an empty and a filled one,
and under isolation gpushare one whose shares launch nothing and one whose shares all compute.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from bench.containers import Containers
from bench.node import (
    AGED_S,
    FIRST_PID,
    GPU_MEMORY_MIB,
    GPUS,
    NODE_NAME,
    POD_BLOCKS,
    PODS,
    PROCESSES,
    BenchNode,
    open_node,
)
from bench.observation import put_processes
from bench.pods import CONTAINER, BenchPod
from bench.results import Row, row
from gpushare_agent.agent.delivery.volume_plan import CONTROL_LIBRARY_NAME, GPU_CLIENT_NAME, LIBCUDA, VolumeName
from gpushare_agent.agent.gpus.simulated.driver import simulated_uuid
from gpushare_agent.agent.isolation.gpushare.edits import LIBRARY_NAME
from gpushare_agent.agent.isolation.gpushare.format import (
    CONFIG_NAME,
    USAGE_NAME,
    GpuLimits,
    encode_config,
    encode_usage,
)
from gpushare_agent.agent.isolation.gpushare.library import MARK
from gpushare_agent.core.model.names import MIB
from gpushare_agent.sandbox.state_directory import NodePaths

_SOURCE = Path(__file__).parents[1] / "tests" / "native" / "fake_nvml.c"
_EMPTY_PERCENT, _FILLED_PERCENT = 0.3, 0.5
_NO_LAUNCHES_PERCENT, _COMPUTING_PERCENT = 0.6, 5.0
_COMPUTING_PROCESSES = 2
_SAMPLE_US = 166_667
_SEQUENCE_AT, _LAUNCHES_AT = 512, 512 + 56
"""Of the first GPU in gpushare.config, and in usage: native/gpushare/format.h."""
_LAUNCHES = struct.Struct("=Q")


async def nvml_idle_rows(settle_s: float, window_s: float) -> list[Row]:
    """None without a C compiler. Raises CalledProcessError where the fake library cannot be built."""
    if shutil.which("cc") is None:
        return []
    with fake_library() as library:
        volume = _put_volume(library)
        async with AsyncExitStack() as stack:
            nodes = []
            for name, pods in (("empty", 0), ("filled", PODS)):
                (library / name).write_text(script_of(pods))
                environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCRIPT": str(library / name)}
                flags = {"driver": "nvml", "volume-config": volume}
                node = await stack.enter_async_context(open_node(flags=flags, environment=environment))
                if pods:
                    node.fill()
                nodes.append(node)
            await _start_all(nodes, settle_s)
            empty, filled = await _shares_of_a_core(nodes, window_s)
            note = f"of one CPU, over {window_s:g} s, {settle_s:g} s after the start, isolation vcuda"
            what = f"{PODS} shares with {PROCESSES} processes each"
            return [
                row("processor time, idle, NVML", [empty], unit="%", target_median=_EMPTY_PERCENT, note=note),
                row(f"  the same with {what}", [filled], unit="%", target_median=_FILLED_PERCENT, note=note),
                row("  resident memory then", [nodes[1].agent.resident_mib()], unit="MiB", note="VmRSS"),
            ]


async def gpushare_rows(settle_s: float, window_s: float) -> list[Row]:
    """As `nvml_idle_rows`. Raises RuntimeError where containers were not told what the driver shows."""
    if shutil.which("cc") is None:
        return []
    with fake_library() as library:
        preloaded = _put_library(library)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            nodes = []
            for name in ("none", "computing"):
                (library / name).write_text(script_of(PODS, _COMPUTING_PROCESSES, sampled=name == "computing"))
                environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCRIPT": str(library / name)}
                flags = {"driver": "nvml", "libgpushare.library": preloaded}
                node = await stack.enter_async_context(
                    open_node(isolation="gpushare", flags=flags, environment=environment)
                )
                node.fill()
                _put_files(node)
                nodes.append(node)
            launching = group.create_task(_launch(nodes[1]), name="launches")
            await _start_all(nodes, settle_s)
            before = [_times_told(node) for node in nodes]
            began = time.perf_counter()
            idle, computing = await _shares_of_a_core(nodes, window_s)
            none, told = [
                [(now - first) / 2 for now, first in zip(_times_told(node), earlier, strict=True)]
                for node, earlier in zip(nodes, before, strict=True)
            ]
            launching.cancel()
            took_s = time.perf_counter() - began
            if any(none) or not all(told):
                raise RuntimeError(f"not all containers were told what they use; {nodes[1].agent.log_tail(5)}")
            note = (
                f"of one CPU, over {window_s:g} s; {PODS} shares on {GPUS} GPUs, {_COMPUTING_PROCESSES} processes each"
            )
            return [
                row(
                    "isolation gpushare, no share launches",
                    [idle],
                    unit="%",
                    target_median=_NO_LAUNCHES_PERCENT,
                    note=note,
                ),
                row("  all compute", [computing], unit="%", target_median=_COMPUTING_PERCENT, note=note),
                row("  · wrote to each share what it uses", [one / took_s for one in told], unit="a second", note=note),
            ]


async def _start_all(nodes: list[BenchNode], settle_s: float) -> None:
    """Next to a kubelet that has been there for a while."""
    await asyncio.sleep(AGED_S)
    for node in nodes:
        await node.start_agent()
    await asyncio.sleep(settle_s)


def _put_volume(directory: Path) -> Path:
    """A volume.conf and its volume, as far as isolation vcuda looks: without it the agent would go on looking for one."""
    base = directory / "volumes"
    config = {"volume": [{"name": VolumeName.SHARED, "base": str(base), "components": {"libraries": [LIBCUDA]}}]}
    libraries, programs = base / VolumeName.SHARED / "lib64", base / VolumeName.SHARED / "bin"
    for place in (libraries, programs):
        place.mkdir(parents=True)
    (libraries / CONTROL_LIBRARY_NAME).touch()
    (libraries / f"{LIBCUDA}.1").symlink_to(CONTROL_LIBRARY_NAME)
    (programs / GPU_CLIENT_NAME).touch()
    path = directory / "volume.conf"
    path.write_text(json.dumps(config))
    return path


def _put_library(directory: Path) -> Path:
    """What the agent takes for libgpushare: no program loads it here."""
    path = directory / LIBRARY_NAME
    path.write_bytes((directory / "libnvidia-ml.so.1").read_bytes() + MARK)
    return path


def _directories(node: BenchNode) -> Iterator[tuple[int, BenchPod, Path]]:
    for number, pod in enumerate(node.kubelet.pods.values()):
        yield number, pod, NodePaths(state=node.state).virtual_manager / pod.uid / CONTAINER


def _put_files(node: BenchNode) -> None:
    """What the library's installation and PreStartContainer would have made."""
    containers = Containers(node.state / "cgroup")
    NodePaths(state=node.state).libgpushare.mkdir(parents=True)
    for number, pod, directory in _directories(node):
        directory.mkdir(parents=True)
        limits = GpuLimits(
            uuid=simulated_uuid(NODE_NAME, number % GPUS), memory_bytes=POD_BLOCKS * 256 * MIB, cores=500
        )
        (directory / CONFIG_NAME).write_bytes(encode_config(pod.uid, CONTAINER, [limits]))
        (directory / USAGE_NAME).write_bytes(encode_usage())
        pids = range(FIRST_PID + PROCESSES * number, FIRST_PID + PROCESSES * number + _COMPUTING_PROCESSES)
        put_processes(node.state / "proc", containers.text_of(pod.uid), pids)


async def _launch(node: BenchNode) -> NoReturn:
    count = 0
    while True:
        count += 1
        for _, _, directory in _directories(node):
            with (directory / USAGE_NAME).open("r+b") as file:
                file.seek(_LAUNCHES_AT)
                file.write(_LAUNCHES.pack(count))
        await asyncio.sleep(0.5)


def _times_told(node: BenchNode) -> list[int]:
    """How often each container's file was written, by its sequence."""
    return [
        int.from_bytes((directory / CONFIG_NAME).read_bytes()[_SEQUENCE_AT : _SEQUENCE_AT + 4], sys.byteorder)
        for _, _, directory in _directories(node)
    ]


async def _shares_of_a_core(nodes: list[BenchNode], window_s: float) -> list[float]:
    """In percent."""
    started, before = time.perf_counter(), [node.agent.processor_s() for node in nodes]
    await asyncio.sleep(window_s)
    took_s = time.perf_counter() - started
    return [(node.agent.processor_s() - earlier) / took_s * 100 for node, earlier in zip(nodes, before, strict=True)]


@contextmanager
def fake_library() -> Iterator[Path]:
    with TemporaryDirectory(prefix="gsb", dir="/tmp") as directory:
        command = ["cc", "-shared", "-fPIC", "-pthread", "-o", f"{directory}/libnvidia-ml.so.1", str(_SOURCE)]
        subprocess.run(command, check=True)  # noqa: S603 - a constant
        yield Path(directory)


def script_of(pods: int, processes: int = PROCESSES, *, sampled: bool = False) -> str:
    """The machine of bench/node.py as tests/native/fake_nvml.c reads it, with the processes of its pods."""
    lines = [f"count {GPUS}"]
    for gpu in range(GPUS):
        uuid, bus_id = simulated_uuid(NODE_NAME, gpu), f"00000000:{16 + gpu:02X}:00.0"
        lines += [
            f"GPU {gpu} {uuid} {gpu} {bus_id} {GPU_MEMORY_MIB} 0 NVIDIA A100-SXM4-80GB",
            f"value utilization {gpu} 50 20",
            f"value capability {gpu} 8 0",
            f"value brand {gpu} 14",
        ]
    firsts = [(n % GPUS, FIRST_PID + PROCESSES * n) for n in range(pods)]
    lines += [f"processes compute {gpu} {first} {processes} 1000000" for gpu, first in firsts]
    if sampled:
        lines += [f"sampled {gpu} {first} {processes} {_SAMPLE_US} 4" for gpu, first in firsts]
    return "\n".join(lines) + "\n"
