"""What an idle agent costs with NVML: the real nvidia-ml-py on a fake libnvidia-ml.so.1 (tests/native/fake_nvml.c).

The fake's own time is in the figures. An empty node and a filled one run at the same time, each with its own agent.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.node import FIRST_PID, GPU_MEMORY_MIB, GPUS, NODE_NAME, PODS, PROCESSES, BenchNode, open_node
from bench.results import Row, row
from gpushare_agent.gpus.simulated.driver import simulated_uuid

_SOURCE = Path(__file__).parents[1] / "tests" / "native" / "fake_nvml.c"
_EMPTY_PERCENT, _FILLED_PERCENT = 0.3, 0.5


async def nvml_idle_rows(settle_s: float, window_s: float) -> list[Row]:
    """None without a C compiler. Raises CalledProcessError where the fake library cannot be built."""
    if shutil.which("cc") is None:
        return []
    with _fake_library() as library:
        async with AsyncExitStack() as stack:
            nodes = []
            for name, pods in (("empty", 0), ("filled", PODS)):
                (library / name).write_text(_script(pods))
                environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_SCRIPT": str(library / name)}
                flags = {"driver": "nvml", "debug.addr": ""}
                node = await stack.enter_async_context(open_node(flags=flags, environment=environment))
                if pods:
                    node.fill()
                await node.start_agent()
                nodes.append(node)
            await asyncio.sleep(settle_s)
            empty, filled = await _shares_of_a_core(nodes, window_s)
            note = f"of one core, over {window_s:g} s, {settle_s:g} s after the start, isolation vcuda"
            what = f"{PODS} shares with {PROCESSES} processes each"
            return [
                row("processor time, idle, NVML", [empty], unit="%", target_median=_EMPTY_PERCENT, note=note),
                row(f"  the same with {what}", [filled], unit="%", target_median=_FILLED_PERCENT, note=note),
                row("  resident memory then", [nodes[1].agent.resident_mib()], unit="MiB", note="VmRSS"),
            ]


async def _shares_of_a_core(nodes: list[BenchNode], window_s: float) -> list[float]:
    """In percent."""
    started, before = time.perf_counter(), [node.agent.processor_s() for node in nodes]
    await asyncio.sleep(window_s)
    took_s = time.perf_counter() - started
    return [(node.agent.processor_s() - earlier) / took_s * 100 for node, earlier in zip(nodes, before, strict=True)]


@contextmanager
def _fake_library() -> Iterator[Path]:
    with TemporaryDirectory(prefix="gsb", dir="/tmp") as directory:
        command = ["cc", "-shared", "-fPIC", "-pthread", "-o", f"{directory}/libnvidia-ml.so.1", str(_SOURCE)]
        subprocess.run(command, check=True)  # noqa: S603 - a constant
        yield Path(directory)


def _script(pods: int) -> str:
    """The machine of bench/node.py as tests/native/fake_nvml.c reads it, with the processes of its pods."""
    lines = [f"count {GPUS}"]
    for gpu in range(GPUS):
        uuid, bus_id = simulated_uuid(NODE_NAME, gpu), f"00000000:{16 + gpu:02X}:00.0"
        lines += [
            f"GPU {gpu} {uuid} {gpu} {bus_id} {GPU_MEMORY_MIB} 0 NVIDIA A100-SXM4-80GB",
            f"value utilization {gpu} 50 20",
        ]
    lines += [f"processes compute {n % GPUS} {FIRST_PID + PROCESSES * n} {PROCESSES} 1000000" for n in range(pods)]
    return "\n".join(lines) + "\n"
