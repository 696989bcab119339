"""The agent's probe of libgpushare (isolation/gpushare/probe.py), with the real library on the fake driver."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.library import MARK
from gpushare_agent.agent.isolation.gpushare.probe import LibraryProbe
from gpushare_agent.agent.isolation.gpushare.probing import STATE_NAME
from gpushare_agent.agent.isolation.kept import ProbeState
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import MIB, GpuUuid
from gpushare_agent.core.model.usage import BusyProcess, GpuBusy
from native.build_gpushare import build_gpushare
from tests.agent.support_agent import open_child, poll_until
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import CONTEXT_MIB, Machine, needs_own_programs, uuid_of
from tests.gpushare.test_many_processes import bytes_of_driver
from tests.native.build import NATIVE, build_program, cuda_include
from tests.sandbox.support_sandbox import MEMORY, NodeUnderTest, open_test_node
from tests.settings.support_settings import run_program

pytestmark = [pytest.mark.isolation, needs_own_programs]

GPU = Gpu(index=0, minor=0, uuid=GpuUuid(f"GPU-00000000-0000-4000-8000-{0:012x}"), bus_id="", name="", memory_mib=24576)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As containers get it: with the container's directory compiled in."""
    path = tmp_path_factory.mktemp("shipped") / "libgpushare.so"
    build_gpushare(cuda_include(), path)
    return path


def probe_of(machine: Machine, library: Path, **how: Any) -> LibraryProbe:
    place = machine.directory / "own"
    place.mkdir(exist_ok=True)
    return LibraryProbe(
        library=library.read_bytes,
        place=place,
        environment=machine.env(),
        thread=DaemonThread("probe", advice=""),
        **how,
    )


def is_clean(machine: Machine) -> bool:
    return not list((machine.directory / "own").iterdir())


@pytest.mark.smoke
@pytest.mark.parametrize("unified", [0, 1])
async def test_the_library_passes(machine_with: MachineWith, library: Path, unified: int) -> None:
    """In the second run of compute it follows limits that changed while the program ran, and nothing is left. Also with a
    GPU of whose memory NVML says nothing."""
    machine = machine_with(unified=unified)
    state, text = await probe_of(machine, library).prove(GPU)
    assert state is ProbeState.PASSED, text
    assert "refused memory after 1728 MiB and its context in 2048 MiB" in text
    assert is_clean(machine)


async def test_it_passes_on_a_gpu_next_to_one_that_mig_divides(machine_with: MachineWith, library: Path) -> None:
    """It names that GPU; else CUDA would show it an instance."""
    machine = machine_with(instances="10240", gpus=2)
    state, text = await probe_of(machine, library).prove(replace(GPU, index=1, uuid=GpuUuid(uuid_of("1"))))
    assert state is ProbeState.PASSED, text


class Driver:
    """What NVML shows of a GPU's processes, here each with what the whole GPU has."""

    def __init__(self, machine: Machine, processes: int) -> None:
        self._share, self._processes = machine.container("asks"), processes

    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        if not self._processes:
            raise Unavailable("NVML is away")
        found = tuple(
            BusyProcess(pid=pid, memory_bytes=bytes_of_driver(self._share, CONTEXT_MIB), busy_ns=0)
            for pid in range(self._processes)
        )
        return {uuid: GpuBusy(at_ns=1, busy_until_ns=0, is_continued=False, processes=found) for uuid in gpus}


@pytest.mark.parametrize(("processes", "measured_mib"), [(1, CONTEXT_MIB + 2), (2, 0), (0, 0)])
async def test_it_measures_what_a_context_takes(
    machine_with: MachineWith, library: Path, processes: int, measured_mib: int
) -> None:
    """With the module of its kernel, and without the memory that it has given back. What cannot be known is not guessed."""
    machine = machine_with()
    probe = probe_of(machine, library, driver=Driver(machine, processes))
    state, text = await probe.prove(GPU)
    assert (state, probe.context_bytes) == (ProbeState.PASSED, measured_mib * MIB), text


def build_broken(path: Path, does: str = "") -> Path:
    """A library with libgpushare's mark that limits nothing: it passes cuInit on, or does something in its place."""
    mark = MARK.rstrip(b"\0").decode()
    flags = ["-shared", "-fPIC", f'-DMARK="{mark}"', *([f"-DDOES={does}"] if does else [])]
    return build_program(path, NATIVE / "broken_library.c", flags)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        pytest.param("", "a program got 16384 MiB in a share of 2048 MiB", marks=pytest.mark.smoke),
        ("abort()", "it ended with signal 6"),
        ("pause()", "it did not end in time"),
        ("no library", "it was not loaded: .* cannot be preloaded"),
    ],
)
async def test_a_library_that_does_not_limit_or_lets_no_program_start_fails(
    machine_with: MachineWith, tmp_path: Path, does: str, said: str
) -> None:
    """Without it the program starts: so it is the library's fault. What hangs is killed at the time limit."""
    if does == "no library":
        library = tmp_path / "broken.so"
        library.write_bytes(b"\x7fELF" + MARK)
    else:
        library = build_broken(tmp_path / "broken.so", does)
    machine = machine_with()
    state, text = await probe_of(machine, library, timeout_s=5.0).prove(GPU)
    assert state is ProbeState.FAILED and re.search(said, text), text
    assert is_clean(machine)


FAILED, SKIPPED = ProbeState.FAILED, ProbeState.SKIPPED


@pytest.mark.parametrize(
    ("settings", "variables", "state", "said"),
    [
        # Its events say a hundredth of the time that a kernel took.
        ({"event_percent": 1}, {}, FAILED, "with 30 cores computed"),
        # It starts without the library, which is then not proven: shares are refused.
        ({"lacks": "cuMemAlloc"}, {}, FAILED, "cuGetProcAddress finds no cuMemAlloc of CUDA 12000"),
        ({"dies_in": "cuDevicePrimaryCtxRetain"}, {}, SKIPPED, "either: it ended with signal 9"),
        ({"memory_mib": 64}, {}, SKIPPED, "either: cuDevicePrimaryCtxRetain fails with CUDA error 2"),
        # A stopped process, which answers no request to end.
        ({"stops_in": "cuDevicePrimaryCtxRetain"}, {}, SKIPPED, "either: it did not end in time"),
        # As the agent's own container, where NVIDIA's runtime gives it no compute, or no device nodes.
        ({}, {"LD_LIBRARY_PATH": ""}, SKIPPED, "the driver's library for programs is not here: libcuda.so.1"),
        ({}, {"FAKE_GPU_DEVICES": "7"}, SKIPPED, "either: cuInit fails with CUDA error 100"),
    ],
)
async def test_only_what_a_driver_does_without_the_library_too_is_no_failure_of_it(
    machine_with: MachineWith,
    library: Path,
    settings: dict[str, object],
    variables: dict[str, str],
    state: ProbeState,
    said: str,
) -> None:
    machine = machine_with(**settings)
    probe = probe_of(machine, library, **({"timeout_s": 0.5} if "stops_in" in settings else {}))
    probe.environment = machine.env() | variables
    found, text = await probe.prove(GPU)
    assert found is state and said in text
    assert ("without the library " in text) is ("either" in said)
    assert is_clean(machine)


@pytest.mark.parametrize(("waited_s", "expected"), [(3.0, ProbeState.SKIPPED), (1.0, ProbeState.FAILED)])
async def test_a_program_that_got_no_processor_until_the_limit_is_no_failure(
    machine_with: MachineWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_s: float, expected: ProbeState
) -> None:
    """The kernel's count is replaced. Without the library it starts in time."""
    monkeypatch.setattr("gpushare_agent.agent.isolation.gpushare.probe.waited_s", lambda pid: waited_s)
    library = build_broken(tmp_path / "ends.so", "pause()")
    state, text = await probe_of(machine_with(), library, timeout_s=4.0).prove(GPU)
    assert state is expected
    assert ("a program waited 75 % of the time" if expected is ProbeState.SKIPPED else "did not end in time") in text


async def test_it_gives_way_to_a_container(machine_with: MachineWith, library: Path) -> None:
    machine = machine_with(stops_in="cuDevicePrimaryCtxRetain")
    probe = probe_of(machine, library, timeout_s=60)
    async with asyncio.TaskGroup() as group:
        result = group.create_task(probe.prove(GPU))
        while probe._scope is None:
            await asyncio.sleep(0.01)
        probe.give_way()
    assert result.result() == (ProbeState.SKIPPED, "it gave way to a container on its GPU")
    assert is_clean(machine)


# ---- the agent, and check ----


def use_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in machine.env().items():
        monkeypatch.setenv(name, value)


def agent_flags(machine: Machine, library: Path) -> list[str]:
    own = machine.directory / "own"
    own.mkdir(exist_ok=True)
    flags = ["--driver=nvml", "--isolation=gpushare", f"--libgpushare.library={library}"]
    return [*flags, f"--libgpushare.directory={own}", "--sample-period-s=0.2"]


def remembered(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((machine.directory / "own" / STATE_NAME).read_text())
    return found


async def test_the_agent_proves_the_library_once(
    machine_with: MachineWith, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent takes the result over."""
    machine = machine_with()
    use_driver(machine, monkeypatch)
    async with open_test_node() as node:
        async with open_child(node, *agent_flags(machine, library)):
            await poll_until(lambda: node.log_lines("isolation_probe_passed"), "a result", deadline_s=60)
        [line] = node.log_lines("isolation_probe_passed")
        async with open_child(node, *agent_flags(machine, library)):
            await node.wait_allocatable(MEMORY, 96)
            assert node.log_lines("isolation_probe_passed") == [line]
    assert (remembered(machine)["state"], remembered(machine)["driver"]) == ("passed", "580.95.05")


async def test_shares_are_refused_under_a_library_that_does_not_limit(
    machine_with: MachineWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet sees no memory, and the node has an Event with the driver's version."""
    machine = machine_with()
    library = build_broken(tmp_path / "passes.so")
    use_driver(machine, monkeypatch)
    async with open_test_node() as node, open_child(node, *agent_flags(machine, library)):
        await node.wait_until(lambda: _probe_events(node), "an Event of the node")
        await node.wait_until(lambda: not node.kubelet.devices.capacity()[MEMORY][1], "no memory")
        [event] = _probe_events(node)
        assert "under driver 580.95.05: a program got 16384 MiB in a share of 2048 MiB" in event["message"]
        assert (event["type"], event["involvedObject"]["kind"]) == ("Warning", "Node")


def _probe_events(node: NodeUnderTest) -> list[dict[str, Any]]:
    return [event for event in node.api.events() if event["reason"] == "IsolationProbeFailed"]


@pytest.mark.parametrize(
    ("is_broken", "level", "text"), [(False, "ok", "was refused memory after"), (True, "error", "got 16384 MiB")]
)
async def test_check_prints_a_line(
    machine_with: MachineWith,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_broken: bool,
    level: str,
    text: str,
) -> None:
    """And nothing stays of its run."""
    machine = machine_with()
    used = build_broken(tmp_path / "passes.so") if is_broken else library
    use_driver(machine, monkeypatch)
    found = await run_program("check", "--output=json", *agent_flags(machine, used))
    [line] = [one for one in json.loads(found.out)["findings"] if one["what"] == "gpushare probe"]
    assert line["level"] == level and text in line["detail"]
    assert is_clean(machine)
