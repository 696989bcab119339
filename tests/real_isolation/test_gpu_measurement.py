"""The measurement for a GPU, on the fake driver: that every step runs; the numbers mean nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.competitor import COMPETITOR, LIBRARY_NAME
from bench.gpu.pack import MANIFEST, build_probe, manifest_of
from bench.gpu.verdicts import LINES
from native.build_gpushare import build_gpushare
from tests.native.build import CannotBuildError, build_vgpu, cuda_include
from tests.native.fake_driver.host_view import HostView
from tests.real_isolation.support_isolation import Built

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 700.0


def package_of(built: Built, folder: Path) -> Path:
    """As `nox -s gpu -- --pack` makes it, with the library that is built already, and this Python's packages for wheels."""
    for name in ("lib", "bin", "cudart"):
        (folder / name).mkdir(parents=True)
    build_gpushare(cuda_include(), folder / "lib" / "libgpushare.so")
    shutil.copy(next((cuda_include().parent / "lib").glob("libcudart.so.*")), folder / "cudart" / "13.so")
    build_probe(folder / "bin" / "gpu-probe")
    with suppress(CannotBuildError):
        build_vgpu(folder / "lib" / LIBRARY_NAME)
    manifest = manifest_of(
        folder, {}, {"libcuda-control.so": "not packed"}, commit="unknown", machine=os.uname().machine
    )
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def measure(built: Built, directory: Path) -> dict[str, Any]:
    """results.json of a quick run, with a report next to it."""
    state, out = directory / "state", directory / "out"
    state.mkdir()
    (state / "config").write_text("gpus 1\n")
    view = HostView(state)
    command = [
        sys.executable, "-m", "bench.gpu", "--quick", "--limit-s", "300", "--out", str(out),
        "--isolations", f"gpushare,{COMPETITOR},vcuda",
        "--from", str(package_of(built, directory / "package")), "--driver-libraries", str(built.driver),
        "--env", f"FAKE_GPU_STATE={state / 'state'}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    finally:
        view.close()
    assert done.returncode == 0, done.stderr
    assert "# What the isolations keep on a real GPU" in (out / "report.md").read_text()
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


KEPT_ON_THE_FAKE = ("the agent's own proof", "memory ends", "pools and graphs", "a killed program")
"""Lines of verdicts.py in which no time of a busy machine counts."""


def is_kept_by(isolation: str, steps: Mapping[tuple[str, str], Mapping[str, Any]], line: str) -> bool | None:
    def found(of: str) -> Callable[[str], Any]:
        return lambda name: steps.get((of, name), {}).get("found")

    [judge] = [judge for what, _, judge in LINES if what.startswith(line)]
    return judge(found(isolation), found("bare"))[0]


@pytest.mark.isolation
def test_every_step_of_the_measurement_runs(built: Built, tmp_path: Path) -> None:
    """What is missing is skipped. Of HAMi-core's real library the driver's own count shows the limit of memory."""
    steps = {(step["isolation"], step["step"]): step for step in measure(built, tmp_path)["steps"]}
    not_done = {name: step["reason"] for name, step in steps.items() if step["state"] != "done"}
    skipped = [name for name, reason in not_done.items() if reason == "no Python with PyTorch is here"]
    assert {name[1] for name in skipped} <= {"works 30", "works 30+60", "torch"}
    failed = [name for name in not_done if name not in skipped]
    assert failed in ([("vcuda", "start")], [(COMPETITOR, "start"), ("vcuda", "start")]), not_done
    assert steps["gpushare", "proof"]["found"]["state"] == "passed"
    assert all(is_kept_by("gpushare", steps, line) for line in KEPT_ON_THE_FAKE), steps
    memory = steps["gpushare", "memory plain"]["found"]
    assert memory["error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < memory["gpu_mib"] <= memory["share_mib"]
    if (COMPETITOR, "start") not in failed:
        assert not is_kept_by(COMPETITOR, steps, "memory ends")
        assert steps[COMPETITOR, "memory plain"]["found"]["error"] == "CUDA_ERROR_OUT_OF_MEMORY"
    usage = steps["gpushare", "usage"]["found"]
    assert usage["agent_mib"] == usage["driver_mib"]
    assert steps["gpushare", "fault"]["found"]["gpu_health"] == "Healthy"
    both = steps["gpushare", "compute 30+60"]["found"]
    [series] = both["series"]
    assert {row[1] for row in series["usage"]} == {"a", "b"} == {row[1] for row in series["nvml"]}
    assert steps["gpushare", "overhead"]["found"].keys() == {"bare", "share"}
    assert {name for isolation, name in steps if isolation == "bare"} >= {
        "facts", "launches", "turns of 1", "turns of 2", "turns of 3", "bias", "events", "rows", "programs",
    }  # fmt: skip
