"""When libgpushare is probed, what is remembered of it, and whose shares are refused (isolation/gpushare/probing.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.agent.isolation.gpushare.part import probe
from gpushare_agent.agent.isolation.gpushare.probe import (
    CAPS,
    MEMORY_BYTES,
    NEEDED_BYTES,
    Run,
    failure_of,
    idle_gpu,
    starved_text,
)
from gpushare_agent.agent.isolation.gpushare.probe_program import waited_s
from gpushare_agent.agent.isolation.gpushare.probing import (
    MOST_UNFINISHED,
    STATE_NAME,
    ProbedLibrary,
    Remembered,
    recall,
)
from gpushare_agent.agent.isolation.kept import ProbeState
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpus import Gpu, GpuInventory, Health
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.model.usage import GpuSample, ProcessSample, UsageRound
from gpushare_agent.core.settings.settings import load_settings
from tests.isolation.support_library import fake_library
from tests.isolation.support_requests import UID
from tests.support_core import allocation, container, ids, inventory, mig_instance, pod

DRIVER = "580.95.05"
INVENTORY = replace(inventory(2, memory_mib=24 * 1024), driver_version=DRIVER)
FIRST, SECOND = INVENTORY.gpus
PASSED, FAILED, SKIPPED = ProbeState.PASSED, ProbeState.FAILED, ProbeState.SKIPPED


class Probe:
    """Answers with what the test has put into it."""

    def __init__(self) -> None:
        self.answer = (PASSED, "held")
        self.gpus: list[str] = []
        self.gave_way = False
        self.context_bytes = 520 * MIB
        self.during: Any = lambda: None

    async def prove(self, gpu: Gpu) -> tuple[ProbeState, str]:
        self.gpus.append(gpu.uuid)
        self.during()
        return self.answer

    def give_way(self) -> None:
        self.gave_way = True


class World:
    """A node whose GPUs are idle."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.library = Library(fake_library(directory / "libgpushare.so"), directory / "own")
        self.library.install()
        self.probe = Probe()
        self.inventory: GpuInventory = INVENTORY
        self.allocations: dict[ContainerKey, Allocation] = {}
        self.samples = {gpu.uuid: sample(gpu) for gpu in INVENTORY.gpus}
        self.failures: list[str] = []

    def agent(self) -> ProbedLibrary:
        """A new one, on this node."""
        made = ProbedLibrary(
            library=self.library,
            probe=self.probe,
            inventory=lambda: self.inventory,
            allocations=lambda: self.allocations,
            failed=lambda found: self.failures.append(found.failure),
            request_usage=lambda: made.usage_sampled(UsageRound(sampled_at=1.0, gpus=self.samples, containers={})),
            round_timeout_s=0.05,
        )
        return made

    async def known_failure(self, driver: str) -> str:
        _, saved = await recall(DaemonThread("probe", advice=""), self.library, driver)
        return saved.failure if saved is not None else ""

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.library.directory / STATE_NAME).read_text())
        return found

    def allocate(self, gpu: int) -> None:
        owner = pod("share", container("cuda", cores=30, blocks=8), uid=UID)
        share = allocation(owner, "cuda", ids(gpu, range(30)), ids(gpu, range(8)))
        self.allocations[share.key] = share


class Driver:
    """What `auto` asks of the driver."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self) -> GpuInventory:
        return self._world.inventory

    check_memory_limits = keep_memory_limits = None  # not of this isolation


def sample(gpu: Gpu, used: int = 0, processes: tuple[ProcessSample, ...] | None = ()) -> GpuSample:
    total = gpu.memory_mib * MIB
    return GpuSample(uuid=gpu.uuid, memory_used_bytes=used, memory_total_bytes=total, processes=processes)


@pytest.fixture
def world(short_dir: Path) -> World:
    return World(short_dir)


async def test_what_has_passed_is_not_probed_again(world: World) -> None:
    """Neither by the same agent nor by the next, until the library or the driver is another one."""
    agent = world.agent()
    assert agent.result is None and agent.is_failed() is None
    await agent.look()
    await agent.look()
    await agent.require_passed()
    assert agent.result is not None and agent.result.state is PASSED and agent.is_failed() is False
    following = world.agent()
    await following.look()
    assert following.result == agent.result and world.probe.gpus == [FIRST.uuid]
    world.library.source.write_bytes(world.library.source.read_bytes() + b"newer")
    await following.look()
    world.inventory = replace(world.inventory, driver_version="590.1")
    await following.look()
    assert len(world.probe.gpus) == 3
    assert (world.document()["driver"], world.document()["unfinished"]) == ("590.1", 0)


async def test_what_a_context_takes_is_remembered_for_gpus_of_that_name(world: World) -> None:
    agent = world.agent()
    assert agent.context_bytes(FIRST) == 0
    await agent.look()
    following = world.agent()
    await following.require_passed()
    for one in (agent, following):
        instance = replace(FIRST, name=f"{FIRST.name} MIG 1g.10gb")  # as of its GPU
        assert [one.context_bytes(gpu) for gpu in (FIRST, instance, replace(FIRST, name="another"))] == [
            520 * MIB
        ] * 2 + [0]


async def test_a_library_that_failed_is_refused_from_the_next_start_on_until_it_passes(world: World) -> None:
    """The next agent refuses before it has probed. `auto` sees the same."""
    world.probe.answer = (FAILED, "a program got 9 MiB")
    agent = world.agent()
    await agent.require_passed()  # nothing is known yet
    with capture_logs() as logs:
        await agent.look()
    assert [line["event"] for line in logs] == ["isolation_probe_failed"]
    with pytest.raises(Unavailable, match=r"under driver 580\.95\.05: a program got 9 MiB\. Update the agent"):
        await agent.require_passed()
    assert agent.is_failed() and len(world.failures) == 1
    assert "a program got 9 MiB" in await world.known_failure(DRIVER)
    assert not await world.known_failure("590.1")
    following = world.agent()
    with pytest.raises(Unavailable, match="a program got 9 MiB"):
        await following.require_passed()
    world.samples = {}
    await following.look()  # no GPU is idle: the failure stands
    with pytest.raises(Unavailable, match="a program got 9 MiB"):
        await following.require_passed()
    world.samples = {FIRST.uuid: sample(FIRST)}
    world.probe.answer = (PASSED, "held")
    await following.look()
    await following.require_passed()
    assert not await world.known_failure(DRIVER)


async def test_a_failure_that_is_found_again_has_auto_choose_but_once(world: World) -> None:
    """Where nothing else can be had `auto` stays with this isolation, and must not reload at every attempt."""
    world.probe.answer = (FAILED, "a program got 9 MiB")
    await world.agent().look()
    await world.agent().look()
    assert len(world.probe.gpus) == 2 and len(world.failures) == 1
    world.inventory = replace(world.inventory, driver_version="590.1")
    await world.agent().look()
    assert len(world.failures) == 2


async def test_auto_leaves_the_library_under_the_driver_with_which_it_failed(world: World) -> None:
    """And takes it again once there is another driver."""
    world.probe.answer = (FAILED, "a program got 9 MiB")
    await world.agent().look()
    flags = [f"--libgpushare.library={world.library.source}", f"--libgpushare.directory={world.library.directory}"]
    settings = load_settings(["--driver=nvml", f"--virtual-manager.path={world.directory / 'vm'}", *flags], {}).settings
    check = probe(settings, Driver(world)).check
    with pytest.raises(Unavailable, match="a program got 9 MiB"):
        await check()
    world.inventory = replace(world.inventory, driver_version="590.1")
    await check()


async def test_while_no_gpu_is_idle_it_is_skipped_with_the_reason_and_done_as_soon_as_one_is(world: World) -> None:
    busy = (ProcessSample(pid=1),)
    world.samples = {gpu.uuid: sample(gpu, processes=busy) for gpu in world.inventory.gpus}
    agent = world.agent()
    with capture_logs() as logs:
        await agent.look()
        await agent.look()
    assert [line["why"] for line in logs] == ["others use the GPUs"]
    assert agent.result is not None and (agent.result.state, agent.result.text) == (SKIPPED, "others use the GPUs")
    assert agent.is_failed() is None
    await agent.require_passed()
    world.samples[SECOND.uuid] = sample(SECOND)
    await agent.look()
    assert world.probe.gpus == [SECOND.uuid] and agent.is_failed() is False


async def test_a_container_that_comes_meanwhile_does_not_wait(world: World) -> None:
    """One on another GPU disturbs nothing."""
    agent = world.agent()

    def comes() -> None:
        world.allocate(1)
        agent.changed()
        assert not world.probe.gave_way
        world.allocate(0)
        agent.changed()

    world.probe.during, world.probe.answer = comes, (SKIPPED, "it gave way")
    await agent.look()
    assert world.probe.gave_way and agent.result is not None and agent.result.state is SKIPPED
    assert world.document()["unfinished"] == 0


async def test_an_attempt_with_which_agents_end_is_not_made_at_every_start(world: World) -> None:
    """As where the program's memory is too much for the agent's container."""

    class KilledError(Exception):
        pass

    def killed() -> None:
        raise KilledError

    world.probe.during = killed
    for _ in range(MOST_UNFINISHED):
        with pytest.raises(KilledError):
            await world.agent().look()
    agent = world.agent()
    await agent.look()
    assert len(world.probe.gpus) == MOST_UNFINISHED
    assert agent.result is not None and "2 agents have ended while it ran" in agent.result.text
    (world.library.directory / STATE_NAME).unlink()
    world.probe.during = lambda: None
    await agent.look()
    assert agent.is_failed() is False


@pytest.mark.parametrize("content", ["[]", "{", '{"version": 2}', json.dumps({"version": 1, "driver": "x" * 9999})])
async def test_a_file_that_is_no_result_is_set_aside(world: World, content: str) -> None:
    (world.library.directory / STATE_NAME).write_text(content)
    agent = world.agent()
    await agent.require_passed()
    await agent.look()
    assert agent.is_failed() is False and (world.library.directory / f"{STATE_NAME}.corrupt").exists()


async def test_without_a_driver_version_or_a_library_nothing_is_probed(world: World) -> None:
    """The checks of both say what is wrong."""
    world.inventory = replace(world.inventory, driver_version="")
    await world.agent().look()
    world.inventory = INVENTORY
    world.library.source.unlink()
    with pytest.raises(Unavailable):
        await world.agent().look()
    assert not world.probe.gpus


@pytest.mark.parametrize(
    ("gpu", "used", "processes", "allocated", "why"),
    [
        (FIRST, 0, (), False, ""),
        (FIRST, 0, None, False, "their processes are not known"),
        (FIRST, 0, (ProcessSample(pid=1),), False, "others use the GPUs"),
        (FIRST, 0, (), True, "others use the GPUs"),
        (FIRST, FIRST.memory_mib * MIB - NEEDED_BYTES + 1, (), False, "no GPU has 3072 MiB free"),
        (replace(FIRST, is_exclusive_process=True), 0, (), False, "EXCLUSIVE_PROCESS"),
        (replace(FIRST, health=Health.UNHEALTHY), 0, (), False, "unhealthy"),
        (mig_instance(1, 0, 0), 0, (), False, "divided by MIG"),
    ],
)
def test_the_gpu_is_one_that_nobody_uses(
    gpu: Gpu, used: int, processes: tuple[ProcessSample, ...] | None, allocated: bool, why: str
) -> None:
    found = idle_gpu([gpu], {gpu.uuid: sample(gpu, used, processes)}, lambda _: allocated)
    assert found == gpu if not why else isinstance(found, str) and why in found


@pytest.mark.parametrize(("free", "is_idle"), [(NEEDED_BYTES, True), (NEEDED_BYTES - 1, False)])
def test_a_gpu_with_the_hosts_memory_is_one_where_the_host_has_enough(free: int, is_idle: bool) -> None:
    """NVML says nothing of the memory of GB10."""
    unknown = GpuSample(uuid=FIRST.uuid, processes=())
    found = idle_gpu([FIRST], {FIRST.uuid: unknown}, lambda _: False, lambda: free)
    assert found == FIRST if is_idle else found == "no GPU has 3072 MiB free"


MEMORY = {"step": "memory", "blocks": 27, "block_bytes": 64 * MIB, "code": 2, "code_by_dlsym": 2}
MEMORY |= {"total_bytes": MEMORY_BYTES, "free_bytes": 0}
HELD = [{"step": "compute", "busy_s": cap / 10_000, "seconds": 1.0, "waited_s": 0.05} for cap in CAPS]
STARVED = HELD[0] | {"busy_s": 0.04, "waited_s": 0.5}
DRIVER_STEP, START = {"step": "driver", "libraries": ["/own/libgpushare.so"]}, {"step": "start"}


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([DRIVER_STEP, START, MEMORY, *HELD], ""),
        ([DRIVER_STEP, START, MEMORY | {"code": 0}, *HELD], "a program got 1728 MiB in a share of 2048 MiB"),
        ([DRIVER_STEP, START, MEMORY | {"blocks": 33}, *HELD], "a program got 2112 MiB"),
        ([DRIVER_STEP, START, MEMORY | {"code_by_dlsym": 0}, *HELD], "by dlsym got memory above"),
        ([DRIVER_STEP, START, MEMORY | {"blocks": 0}, *HELD], "a program got 0 MiB"),
        ([DRIVER_STEP, START, MEMORY | {"total_bytes": 4 * MEMORY_BYTES}, *HELD], "was shown 8192"),
        ([DRIVER_STEP, START, MEMORY, HELD[0], HELD[1] | {"busy_s": 0.71}], "with 60 cores computed 71 %"),
        ([DRIVER_STEP, START, MEMORY, HELD[0] | {"busy_s": 0.19}, HELD[1]], "with 30 cores computed 19 %"),
        ([DRIVER_STEP, START, MEMORY, STARVED, HELD[1]], ""),
        (
            [DRIVER_STEP, START, MEMORY, STARVED, HELD[1] | {"busy_s": 0.71, "waited_s": 0.5}],
            "with 60 cores computed 71 %",
        ),
        ([DRIVER_STEP, START, MEMORY | {"code": 0}, STARVED, HELD[1]], "a program got 1728 MiB"),
        ([DRIVER_STEP, START, MEMORY, HELD[0]], "it ended with exit code 0"),
        ([DRIVER_STEP, START | {"error": "cuInit fails"}], "cuInit fails"),
        ([DRIVER_STEP | {"libraries": []}, START, MEMORY, *HELD], "it was not loaded"),
    ],
)
def test_the_verdict(steps: list[dict[str, Any]], why: str) -> None:
    found = failure_of(Run(steps=steps, code=0), Path("/own/libgpushare.so"))
    assert why in found if why else not found


def test_a_program_that_got_no_processor_says_nothing_of_the_library() -> None:
    run = Run(steps=[DRIVER_STEP, START, MEMORY, STARVED, HELD[1]], code=0)
    assert starved_text(run) == "the node's processors are too busy: a program waited 50 % of the time for one"
    assert not starved_text(replace(run, steps=[DRIVER_STEP, START, MEMORY, *HELD]))
    late = replace(run, steps=[DRIVER_STEP, START, MEMORY, HELD[0]], code=None, waited=0.6)
    assert "waited 60 % of the time" in starved_text(late) and not starved_text(replace(late, waited=0.4))


def test_what_a_process_waited_for_a_processor_is_read_from_the_kernel() -> None:
    pid = os.getpid()
    before = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    assert before <= round(1e9 * waited_s(pid)) <= int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    assert waited_s(1 << 30) == 0


def test_a_result_says_why_and_what_to_do() -> None:
    """Only of a failure."""
    failed = Remembered(driver=DRIVER, library="x", state=FAILED, text="it ended")
    assert failed.failure.startswith(
        "isolation gpushare: its library does not limit programs under driver 580.95.05: it"
    )
    assert "--libgpushare.probe=false" in failed.failure
    assert replace(failed, state=PASSED).failure == ""
