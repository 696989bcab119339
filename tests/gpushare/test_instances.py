"""Shares inside a MIG instance: the library finds its limits by what CUDA and NVML say in a container that has an instance.

Cells of cells.py whose names begin with `instance` are about compute.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import (
    BLOCK_MIB,
    CONTEXT_MIB,
    SHARE_MIB,
    Container,
    Machine,
    needs_own_programs,
    neighbour,
    uuid_of,
)
from tests.native.build import build_fake_driver
from tests.native.gpu_program import finish

pytestmark = pytest.mark.isolation

INSTANCE_MIB = 10240
TAKE = f"alloc:alloc:{BLOCK_MIB}:80"
BLOCKS = (SHARE_MIB - CONTEXT_MIB) // BLOCK_MIB


@pytest.fixture
def machine(machine_with: MachineWith) -> Machine:
    """GPU 0 is divided into two instances, GPU 1 is not."""
    return machine_with(instances=f"{INSTANCE_MIB},20480", gpus=2)


def blocks(share: Container, *actions: str, **env: str) -> list[int]:
    ended = share.run(*actions, env=env)
    assert ended.code == 0, ended.error
    return ended.blocks()


@pytest.mark.smoke
@pytest.mark.parametrize("gpu", ["0:0", "0:1", "1"])
def test_a_share_has_its_memory_and_is_shown_that(machine: Machine, gpu: str) -> None:
    """Of an instance as of a whole GPU on the same machine, whatever its neighbours take."""
    shares = [machine.container(f"{name}-{gpu}", gpu, memory_mib=SHARE_MIB) for name in ("one", "other")]
    others = [machine.container(f"in-{other}", other, memory_mib=SHARE_MIB) for other in {"0:0", "0:1", "1"} - {gpu}]
    with neighbour(machine), shares[1].running(TAKE, "wait"):
        ended = shares[0].run(TAKE, "info")
        assert ended.step("alloc")["blocks"] == BLOCKS, ended.error
        info = ended.step("info")
        assert (info["total_mib"], info["free_mib"]) == (SHARE_MIB, SHARE_MIB - CONTEXT_MIB - BLOCKS * BLOCK_MIB)
        assert [blocks(other, TAKE) for other in others] == [[BLOCKS], [BLOCKS]]


def test_an_instance_has_no_more_than_it_has(machine: Machine) -> None:
    """Without a limit, or with one above the instance's memory."""
    most = (INSTANCE_MIB - CONTEXT_MIB) // BLOCK_MIB
    assert blocks(machine.container("whole", "0:0"), TAKE) == [most]
    assert blocks(machine.container("large", "0:0", memory_mib=2 * INSTANCE_MIB), TAKE) == [most]


@pytest.mark.parametrize("visible", [uuid_of("0:1"), "0"])
def test_a_program_may_choose_its_instance(machine: Machine, visible: str) -> None:
    """By its UUID, where the container sees another one, or as the first device."""
    share = machine.container("main", "0:1", memory_mib=SHARE_MIB)
    devices = "0:0,0:1" if visible.startswith("MIG") else "0:1"
    assert blocks(share, TAKE, FAKE_GPU_DEVICES=devices, CUDA_VISIBLE_DEVICES=visible) == [BLOCKS]


@needs_own_programs
def test_a_driver_that_knows_no_uuid_of_an_instance_lifts_no_limit(machine: Machine, tmp_path: Path) -> None:
    """Before CUDA 11.4 it names the GPU alone; memory and compute of the only instance are limited all the same."""
    built = replace(machine.built, driver=build_fake_driver(tmp_path / "older", ["cuDeviceGetUuid_v2"]))
    older = replace(machine, built=built, settings={**machine.settings, "lacks": "cuDeviceGetUuid_v2"})
    share = older.container("main", "0:0", memory_mib=SHARE_MIB, cores=3000)
    assert blocks(share, TAKE) == [BLOCKS]
    [ended] = older.run_virtual((share, ["launch:kernel:1", "launch:kernel:4"]))
    assert ended.rates()[-1] == pytest.approx(300, rel=0.05)


ASKING = r"""
import ctypes, json, sys, pynvml as nvml
cuda, made = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), 0)
nvml.nvmlInit()
parent = nvml.nvmlDeviceGetHandleByIndex(0)
handles = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, int(sys.argv[1])), nvml.nvmlDeviceGetHandleByUUID(sys.argv[2])]
class Entry(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]
for one in handles:
    entries, count = (Entry * 8)(), ctypes.c_uint(8)
    nvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(one, ctypes.byref(count), entries)
    print(json.dumps({"action": "asked", "total": nvml.nvmlDeviceGetMemoryInfo(one).total >> 20,
        "newer": nvml.nvmlDeviceGetMemoryInfo(one, nvml.nvmlMemory_v2).total >> 20,
        "attributes": nvml.nvmlDeviceGetAttributes(one).memorySizeMB,
        "processes": [[each.bytes >> 20, each.gi, each.ci] for each in entries[: count.value]]}))
for refused in (nvml.nvmlDeviceGetUtilizationRates, lambda one: nvml.nvmlDeviceGetProcessUtilization(one, 0)):
    for one in (parent, *handles):
        try:
            refused(one)
        except nvml.NVMLError_NotSupported:
            print(json.dumps({"action": "refused"}))
"""


@needs_own_programs
def test_nvml_shows_the_share_by_each_way_to_the_instance(machine: Machine) -> None:
    share = machine.container("main", "0:1", memory_mib=SHARE_MIB)
    with neighbour(machine):
        asked = finish(share.start_command([sys.executable, "-c", ASKING, "1", uuid_of("0:1")]))
    assert asked.code == 0, asked.error
    shown = {"total": SHARE_MIB, "newer": SHARE_MIB, "attributes": SHARE_MIB, "processes": [[CONTEXT_MIB, 2, 0]]}
    assert asked.steps[:2] == [{"action": "asked", **shown}] * 2 and len(asked.steps[2:]) == 6
