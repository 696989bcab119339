"""libgpushare's limit of compute on a GPU whose contexts take turns, as an H200 was measured to do (fake_driver/slices.c):
in virtual time, the driver's samples name one process and have the whole GPU's percents.

Of each container is read what it computed, and that with what it lost at the beginnings of its turns: where the GPU is full
the containers have their shares of the latter. Both are between the first second of the program and its sixth.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from gpushare_agent.isolation.gpushare.format import USAGE_NAME
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Machine, finish
from tests.native.build import NATIVE

pytestmark = pytest.mark.isolation

H200 = {"slice_us": 2000, "rows": "whole", "sample_ms": 200, "sample_every_ms": 200, "lag_ms": 40, "sm_count": 132}
SYNC = "us=1000,wait=1"
POINTS, POINTS_AT_FIRST = 3.5, 7.0


@dataclass(frozen=True, slots=True)
class Found:
    """Percent of the GPU's time: net, and with what is lost."""

    first: tuple[float, float]
    later: tuple[float, float]

    def is_within(self, share: float) -> bool:
        """It computed no more, and had no less with what it lost."""
        return self.later[0] - POINTS <= share <= self.later[1] + POINTS


def run(machine: Machine, *tenants: tuple[float, str], observed: bool = True, seed: int | None = None) -> list[Found]:
    """Each has so many cores and does so much, a little after the one before it; with a seed the `usage` of the last one is
    overwritten with random bytes for three seconds."""
    built, clock = machine.built, machine.directory / "clock"
    clock.write_bytes(b"")
    virtual = {"VIRTUAL_TIME": str(clock), "VIRTUAL_COUNT": str(len(tenants) + observed + (seed is not None))}
    shares = [machine.container(f"share-{i}", cores=round(100 * cores)) for i, (cores, _) in enumerate(tenants)]
    with ExitStack() as stack:
        if observed:
            command = [sys.executable, str(NATIVE / "observing_agent.py"), *(str(one.directory) for one in shares)]
            env = machine.env([built.virtual_time]) | virtual
            agent = stack.enter_context(subprocess.Popen(command, env=env, cwd=machine.directory))
            stack.callback(agent.kill)
        if seed is not None:
            usage = str(shares[-1].directory / USAGE_NAME)
            command = [sys.executable, str(NATIVE / "random_writer.py"), usage, str(seed), "0.05", "3"]
            stack.callback(subprocess.Popen(command, env=machine.env([built.virtual_time]) | virtual).kill)
        started = []
        for i, (share, (_, does)) in enumerate(zip(shares, tenants, strict=True)):
            command = [str(built.programs / "tenant"), f"sleep={0.0137 * i}", f"6.5,{does}"]
            started.append(share.start_command(command, preload=[built.virtual_time, built.library], env=virtual))
            stack.callback(started[-1].kill)
        ended = [finish(one) for one in started]
    assert [one.error for one in ended] == [""] * len(ended)
    command = [str(built.programs / "meter"), machine.env()["FAKE_GPU_STATE"]]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    meters = {meter["pid"]: meter for meter in map(json.loads, lines)}
    return [found_of(meters[one.pid], run.steps[0]["began"]) for one, run in zip(started, ended, strict=True)]


def found_of(meter: dict, began: float) -> Found:
    slot = meter["slot_s"]
    at = round((began - meter["clock"]) / slot)

    def percent(kind: str, since: float, until: float) -> float:
        return sum(meter[kind][at + round(since / slot) : at + round(until / slot)]) / 10 / (until - since)

    return Found(*((percent("net", *span), percent("gross", *span)) for span in ((0, 1), (1, 6))))


KERNELS = ["us=5", "us=100", "us=100,wait=1", "us=1000", SYNC, "us=10000", "us=50000", "us=50000,wait=1"]


@pytest.mark.parametrize("does", KERNELS)
def test_a_program_alone(machine_with: MachineWith, does: str) -> None:
    [found] = run(machine_with(**H200), (30, does))
    assert found.is_within(30) and found.first[0] <= 30 + POINTS_AT_FIRST, found


@pytest.mark.parametrize(
    "does",
    [
        "us=1000,streams=4",
        "us=1000,streams=4,wait=4,blocks=264",
        "us=3.45,graph=41,wait=10",
        "us=100+100+100+16,wait=4,set=32",
        "us=100+10000,keys=0",
        "us=100+10000,keys=0,wait=1",
    ],
)
OUTSIDE = {
    "30+60 100us sync both": "half of the GPU is lost in changes of context, which costs do not see",
    "alone 30 half copies": "fills are not charged",
    "fills *": "fills are not charged",
    "start 30 gemm * half copies*": "fills are not charged",
    "data *": "samples by lot miss the few long launches that are nearly all of the time",
    "kinds *": "a mean of the rest says nothing of lengths that differ",
    "30 *ms sync + 60 1ms sync": "a long kernel between two others is paid by an expected stretch",
    "30+60 50ms *": "a long kernel between two others is paid by an expected stretch",
    "20+30+50 *": "the price is bounded",
    "no NVML 30 50ms *": "a long kernel between two others is paid by an expected stretch",
    "no NVML 20+30+50 *": "without utilization nothing says that the GPU is full",
    "agent away 30 50ms + 60 1ms": "without the agent, others' kernels between two events are paid for",
}
"""Patterns of cells in which a share may be outside, and why: those that are right all the same are not looked for."""


@pytest.mark.parametrize(
    ("cores", "does", "bare"),
    [
        (30, "us=3.45,host=17,wait=160", 16.2),
        (30, "us=250,host=740,wait=1", 25.1),
        (60, "us=1000,streams=4,wait=4,rest=6000", 40.0),
    ],
)
def test_who_stays_below_the_share_is_not_delayed(
    machine_with: MachineWith, cores: int, does: str, bare: float
) -> None:
    [found] = run(machine_with(**H200), (cores, does))
    assert found.later[0] >= 0.985 * bare, found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    all_cells = metafunc.config.getoption("--all-cells", default=False)
    names = [cell.name for cell in CELLS] if all_cells else CHOSEN
    metafunc.parametrize("name", [_parameter(name) for name in names])


@pytest.mark.parametrize("cores", [(20, 30, 50), (10, 15, 20, 25, 30)])
def test_a_full_gpu(machine_with: MachineWith, cores: tuple[int, ...]) -> None:
    """What is lost by taking turns is paid by all alike."""
    found = run(machine_with(**H200), *((each, SYNC) for each in cores))
    assert all(each.is_within(share) for each, share in zip(found, cores, strict=True)), found


def test_clocks_that_rise_while_the_gpu_rests_change_nothing(machine_with: MachineWith) -> None:
    [found] = run(machine_with(**H200, boost_percent=22), (30, "us=1684,wait=4"))
    assert found.is_within(30) and found.first[0] <= 30 + POINTS_AT_FIRST, found


def test_without_the_agent(machine_with: MachineWith) -> None:
    found = run(machine_with(**H200), (30, SYNC), (60, SYNC), observed=False)
    assert [each.is_within(share) for each, share in zip(found, (30, 60), strict=True)] == [True, True], found


HANGS = pytest.mark.xfail(
    reason="limit.c takes what somebody has written for a debt, and waits for a century", strict=True
)


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=HANGS) for seed in (3, 6)), 4])
def test_random_bytes_in_a_region_cost_nobody_else_anything(machine_with: MachineWith, seed: int) -> None:
    """The whole `usage` of one container, twenty times a second; its own program has no more than its share, and ends."""
    honest, liar = run(machine_with(**H200), (30, SYNC), (60, SYNC), seed=seed)
    assert honest.is_within(30) and liar.later[0] <= 60 + POINTS, (honest, liar)
