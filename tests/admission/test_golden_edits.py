"""The complete container edits of every isolation under every device list strategy, as files that a person has read.

`GOLDEN_EDITS=rewrite pytest tests/admission/test_golden_edits.py` writes them again; read the difference before it is
committed. What was checked in them is in tests/data/edits.README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy, edits_for
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, GpuUuid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.settings.sections import MpsSettings
from tests.support_core import NAMES, container, isolation_config, pod, raw_edits

DIRECTORY = Path(__file__).parent.parent / "data" / "edits"
UID = "5ca1ab1e-0000-4000-8000-00000000cafe"
GPUS = tuple(
    Gpu(
        index=index,
        minor=index + 2,  # not the index, so that a mix-up shows
        uuid=GpuUuid(f"GPU-{index}{index}{index}{index}aaaa-0000-4000-8000-00000000000{index}"),
        bus_id=f"0000:{index + 1}7:00.0",
        name="Test",
        memory_mib=24 * 1024,
    )
    for index in range(2)
)
CONFIG = isolation_config(
    virtual_manager=Path("/etc/gpu-manager/vm"),
    shared_driver=Path("/etc/gpu-manager/vdriver/nvidia"),
    whole_driver=Path("/etc/gpu-manager/vdriver/origin"),
    mps=MpsSettings(pipe_directory=Path("/run/gpushare-mps/pipe"), shm_directory=Path("/dev/shm")),
)
STRATEGIES: tuple[tuple[DeviceListStrategy, ...], ...] = (
    *((strategy,) for strategy in DeviceListStrategy),
    (DeviceListStrategy.ENVVAR, DeviceListStrategy.DEVICE_NODES),
    (DeviceListStrategy.VOLUME_MOUNTS, DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI),
)
SHARE = pod("share", container("cuda", cores=30, blocks=24), uid=UID)
"""A quarter of the GPU's memory, as in GPUShare's documents."""
CASES: Mapping[str, tuple[Pod, int]] = {
    "elastic share: 30 cores, at most 60, 6144 MiB": (replace(SHARE, annotations={CORE_LIMIT_ANNOTATION: "60"}), 1),
    "share: 30 cores, 6144 MiB": (SHARE, 1),
    "two whole GPUs": (pod("pair", container("cuda", cores=200), uid=UID), 2),
    "whole GPU": (pod("whole", container("cuda", cores=100), uid=UID), 1),
}


def golden_path(isolation: str, strategies: tuple[DeviceListStrategy, ...]) -> Path:
    return DIRECTORY / isolation / f"{'+'.join(strategies)}.json"


def edits_of(owner: Pod, gpus: int, isolation: str, strategies: tuple[DeviceListStrategy, ...]) -> Any:
    policy = EditPolicy(names=NAMES, config=CONFIG, isolation=isolation, strategies=strategies)
    edits = edits_for(owner, owner.containers[0], GPUS[:gpus], policy)
    assert isinstance(edits, ContainerEdits), edits
    return raw_edits(edits)


@pytest.mark.parametrize("strategies", STRATEGIES, ids="+".join)
@pytest.mark.parametrize("isolation", list(ISOLATIONS))
def test_the_edits_are_those_that_were_read(isolation: str, strategies: tuple[DeviceListStrategy, ...]) -> None:
    """Nothing more, nothing less, nothing in another order."""
    found = {name: edits_of(owner, gpus, isolation, strategies) for name, (owner, gpus) in CASES.items()}
    text = json.dumps(found, indent=2, sort_keys=True) + "\n"
    path = golden_path(isolation, strategies)
    if os.environ.get("GOLDEN_EDITS") == "rewrite":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_there_is_no_golden_file_that_nothing_is_compared_with() -> None:
    """A strategy that was renamed leaves none behind."""
    wanted = {golden_path(isolation, strategies) for isolation in ISOLATIONS for strategies in STRATEGIES}
    assert set(DIRECTORY.rglob("*.json")) == wanted


def test_isolation_and_device_list_do_not_meddle_with_each_other() -> None:
    """Each strategy gives the same under every isolation, and each isolation the same under every strategy."""
    by_isolation: dict[tuple[str, str], set[str]] = {}
    by_strategy: dict[tuple[str, str], set[str]] = {}
    for path in DIRECTORY.rglob("*.json"):
        for case, edits in json.loads(path.read_text(encoding="utf-8")).items():
            listed = {
                "NVIDIA_VISIBLE_DEVICES": edits["env"].pop("NVIDIA_VISIBLE_DEVICES"),
                "cdi": [edits.pop("cdi_devices"), {k: v for k, v in edits["annotations"].items() if "cdi" in k}],
                "devices": edits.pop("devices"),
                "mounts": [mount for mount in edits["mounts"] if mount.startswith("/dev/null ")],
            }
            edits["annotations"] = {k: v for k, v in edits["annotations"].items() if "cdi" not in k}
            edits["mounts"] = [mount for mount in edits["mounts"] if mount not in listed["mounts"]]
            by_strategy.setdefault((path.stem, case), set()).add(json.dumps(listed, sort_keys=True))
            by_isolation.setdefault((path.parent.name, case), set()).add(json.dumps(edits, sort_keys=True))
    assert len(by_isolation) == len(ISOLATIONS) * len(CASES) and len(by_strategy) == len(STRATEGIES) * len(CASES)
    assert all(len(found) == 1 for found in (*by_isolation.values(), *by_strategy.values()))
