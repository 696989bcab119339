"""The driver's memory limits of cgroups: the real nvidia-ml-py on the fake driver, with real cgroups.

The fake driver follows nvml.h and NVIDIA's guide; no GPU with such a driver was at hand.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gpus.support_nvml import Probe, running_probe
from tests.gpus.support_real_cgroups import hierarchies, why_not
from tests.native.build import CannotBuildError, build_fake_driver

UUID = "GPU-00000000-0000-4000-8000-000000000000"
FINE: dict[str, Any] = {"problem": "", "used_bytes": 0, "is_gone": False, "has_no_controller": False}

pytestmark = [
    pytest.mark.isolation,  # it needs the headers of that session
    pytest.mark.smoke,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_fake_driver(tmp_path_factory.mktemp("driver"))
    except CannotBuildError as error:
        pytest.skip(str(error))


@contextmanager
def cgroup(name: str) -> Iterator[Path]:
    """One of cgroup v2."""
    directory = hierarchies()[0] / f"gs-{name}-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        if directory.exists():
            directory.rmdir()


@pytest.fixture
def machine(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the fake driver's state; with driver 615 unless the test says otherwise."""
    monkeypatch.setenv("FAKE_GPU_STATE", str(short_dir / "state"))
    monkeypatch.setenv("FAKE_GPU_DRIVER_VERSION", "615.71")
    return short_dir


async def keep(probe: Probe, directory: Path, mib: int, *, may_set: bool) -> Any:
    return await probe.ask(f"keep_limit {UUID} {directory} {mib} {int(may_set)}")


async def test_a_limit_is_set_once_read_and_changed(library: Path, machine: Path) -> None:
    """Who may not set it reads it all the same, and says who sets it where it is missing."""
    with cgroup("limit") as directory:
        async with running_probe(library, "") as probe:
            missing = await keep(probe, directory, 4096, may_set=False)
            assert "is not set, and should be 4096 MiB" in missing["problem"]
            assert "container toolkit" in missing["problem"] and "driver_limits.set_by_agent" in missing["problem"]
            assert await keep(probe, directory, 4096, may_set=True) == FINE
            assert await keep(probe, directory, 4096, may_set=False) == FINE
            assert await keep(probe, directory, 8192, may_set=False) == FINE, "a lower limit keeps the share too"
            above = await keep(probe, directory, 2048, may_set=False)
            assert "is 4096 MiB, and should be 2048 MiB" in above["problem"]
            assert await keep(probe, directory, 2048, may_set=True) == FINE


async def test_the_limit_holds_for_the_processes_of_the_cgroup(library: Path, machine: Path) -> None:
    """What another process sees of the GPU: the limit inside, the whole GPU outside."""
    program = (
        "import ctypes\n"
        "cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0); context = ctypes.c_void_p()\n"
        "assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0\n"
        "address, taken = ctypes.c_uint64(), 0\n"
        "while cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(256 << 20)) == 0: taken += 1\n"
        "print(taken)\n"
    )

    def blocks(*, inside: Path | None) -> int:
        enters = f"echo $$ > {inside}/cgroup.procs && " if inside else ""
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
        done = subprocess.run(
            ["sh", "-c", f"{enters}exec python3 -c \"$0\"", program],
            *(), check=True, capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
        return int(done.stdout)

    with cgroup("holds") as directory:
        async with running_probe(library, "") as probe:
            assert await keep(probe, directory, 2560, may_set=True) == FINE
            inside, outside = blocks(inside=directory), blocks(inside=None)
    assert inside == (2560 - 300) // 256, "a context takes 300 MiB of it"
    assert outside == (24576 - 300) // 256


async def test_a_driver_before_615_is_named_with_the_cure(
    library: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a refusal, for no retry cures it."""
    monkeypatch.setenv("FAKE_GPU_DRIVER_VERSION", "580.95.05")
    with cgroup("old") as directory:
        async with running_probe(library, "") as probe:
            answer = await probe.ask(f"check_limits {directory} 1")
    assert "the driver 580.95.05 has no memory limits" in answer["rejected"] and "615" in answer["rejected"]


async def test_driver_615_passes_the_check(library: Path, machine: Path) -> None:
    with cgroup("new") as directory:
        async with running_probe(library, "") as probe:
            assert await probe.ask(f"check_limits {directory} 1") is None


async def test_without_the_capability_the_agent_only_reads(library: Path, machine: Path) -> None:
    """Root alone is not enough: the kernel module asks for CAP_SYS_ADMIN."""
    with cgroup("rights") as directory:
        async with running_probe(library, "", wrapper=("setpriv", "--bounding-set=-sys_admin")) as probe:
            answer = await probe.ask(f"check_limits {directory} 1")
            assert "SYS_ADMIN" in answer["rejected"] and "components/driver-limits" in answer["rejected"]
            assert await probe.ask(f"check_limits {directory} 0") is None
            refused = await keep(probe, directory, 4096, may_set=True)
            assert "the agent has no right to set it" in refused["problem"]


async def test_a_cgroup_that_has_ended_is_no_fault(library: Path, machine: Path) -> None:
    """And its limit went with it: one of the same name later has none."""
    with cgroup("ends") as directory:
        async with running_probe(library, "") as probe:
            assert await keep(probe, directory, 4096, may_set=True) == FINE
            directory.rmdir()
            assert (await keep(probe, directory, 4096, may_set=True))["is_gone"]
            directory.mkdir()
            with cgroup("other") as other:
                assert await keep(probe, other, 4096, may_set=True) == FINE
            assert "is not set" in (await keep(probe, directory, 4096, may_set=False))["problem"]
