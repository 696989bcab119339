"""The whole agent on the NVML driver: the real nvidia-ml-py, on a scripted libnvidia-ml.so.1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.support_agent import CORES, log_lines, open_child, poll_until, wait_until
from tests.gpus.support_nvml import TWO_PAIRS, fake_library
from tests.sandbox.support_sandbox import CORE, open_test_node

FLAGS = (
    "--driver=nvml",
    "--isolation=none",
    "--sample-period-s=0.1",
    "--usage.idle-period-s=0",
    "--health.recovery-probes=1",
    "--health.recovery-period-s=0.05",
)
GPUS = TWO_PAIRS + "value utilization 0 1 1\n"
HANGS = GPUS + "hang_sample\n"


@pytest.fixture(scope="module")
def library_directory() -> Iterator[Path]:
    with fake_library() as directory:
        yield directory


def _set(script: Path, text: str) -> None:
    """Changes in one step what the library shows."""
    fresh = script.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(script)


async def test_a_node_whose_sampling_hangs_keeps_its_gpus(
    library_directory: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While usage cannot be sampled, a GPU that is lost goes alone, within moments, and comes back."""
    script = short_dir / "script"
    _set(script, GPUS)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_directory))
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(script))
    async with open_test_node() as node, open_child(node, *FLAGS):
        everything = (4 * CORES, 4 * CORES)
        await wait_until(node, lambda: node.kubelet.devices.capacity()[CORE] == everything, "all GPUs")
        _set(script, HANGS)
        await poll_until(lambda: log_lines(node, "usage_not_sampled"), "a sample that failed")
        _set(script, HANGS + "error 1 15\n")
        await wait_until(node, lambda: node.kubelet.devices.capacity()[CORE] == (4 * CORES, 3 * CORES), "one GPU lost")
        _set(script, HANGS)
        await wait_until(node, lambda: node.kubelet.devices.capacity()[CORE] == everything, "all GPUs again")
        assert not log_lines(node, "gpus_lost")
        _set(script, GPUS)
