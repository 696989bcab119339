"""libgpushare's limit of compute, in virtual time (tests/native/virtual_time.c): the same numbers on a busy machine.

The error budget is a table: caps of cores, numbers of multiprocessors, kernels. Utilisation is what the agent sees: whole
percents, over a second, a while ago.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Machine

pytestmark = pytest.mark.isolation

CAPS = (10, 30, 50, 70, 90)
SM_COUNTS = (20, 76, 132, 188)
TURNS = {"slice_us": 2000, "switch_us": 130}
"""For contexts next to each other. Without turns all launches run in the order in which they came, and an event of an idle
stream is done while another context computes: so the other's kernels lie between two events, which an H200 does not show."""
PLACES = 8  # for blocks, of a multiprocessor of the fake driver
MOST_MEAN_ERROR, POINTS, POINTS_AT_FIRST = 2.0, 3.0, 6.0
"""Of the GPU's time: of a kernel on a GPU in the mean over all caps; of one run; of its first second, in which an idle share
has 5 points saved."""
POINTS_WITH_WRONG_EVENTS = 5.0
"""What events say wrongly is put right by the driver's whole percents, which are less exact."""


class Kernel:
    """Of so many blocks, each of which takes so long. "short" has many; "wave" one long one for each place of the GPU."""

    def __init__(self, kind: str, sm_count: int) -> None:
        self.block_us, self.blocks = (10, 16384) if kind == "short" else (1000, PLACES * sm_count)
        self.seconds = max(self.blocks, PLACES * sm_count) * self.block_us / (PLACES * sm_count) / 1e6
        self.settings = {"sm_count": sm_count, "block_us": self.block_us, "lag_ms": 200}

    def launch(self, seconds: float, kind: str = "kernel") -> str:
        return f"launch:{kind}:{seconds}:{self.blocks}"

    def percent(self, rate: float) -> float:
        return 100 * rate * self.seconds


def run_alone(machine: Machine, kernel: Kernel, cap: int, *seconds: float, kind: str = "kernel") -> list[float]:
    """Percent of the GPU in each of the times, one after the other."""
    share = machine.container(f"cap-{cap}", cores=100 * cap)
    [ended] = machine.run_virtual((share, [kernel.launch(one, kind) for one in seconds]))
    assert (ended.code, ended.error) == (0, "")
    return [kernel.percent(rate) for rate in ended.rates()]


BUDGET = [
    pytest.param(sm_count, kind, marks=[pytest.mark.smoke] if (sm_count, kind) == (132, "wave") else [])
    for sm_count in SM_COUNTS
    for kind in ("short", "wave")
]


@pytest.mark.parametrize(("sm_count", "kind"), BUDGET)
def test_the_error_budget(machine_with: MachineWith, sm_count: int, kind: str) -> None:
    """From the first second of a program on: what its launches took is measured at once."""
    kernel = Kernel(kind, sm_count)
    machines = [machine_with(**kernel.settings) for _ in CAPS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        shares = list(
            threads.map(lambda pair: run_alone(pair[0], kernel, pair[1], 1, 10), zip(machines, CAPS, strict=True))
        )
    first, later = zip(
        *([abs(found - cap) for found in share] for share, cap in zip(shares, CAPS, strict=True)), strict=True
    )
    assert max(first) <= POINTS_AT_FIRST, shares
    assert sum(later) / len(later) <= MOST_MEAN_ERROR and max(later) <= POINTS, shares


@pytest.mark.parametrize("event_percent", [25, 50, 200, 400])
@pytest.mark.parametrize("cap", [10, 30, 70])
def test_costs_that_are_wrong_are_put_right_by_what_the_agent_sees(
    machine_with: MachineWith, event_percent: int, cap: int
) -> None:
    """Events say a quarter or four times as much, as where kernels overlap. After five seconds."""
    kernel = Kernel("wave", 132)
    machine = machine_with(**kernel.settings, event_percent=event_percent)
    *_, found = run_alone(machine, kernel, cap, 5, 10)
    assert found == pytest.approx(cap, abs=POINTS_WITH_WRONG_EVENTS)


@pytest.mark.parametrize("period_s", [0.3, 1])
@pytest.mark.parametrize("event_percent", [50, 100, 200])
def test_an_agent_that_looks_seldom_is_enough(machine_with: MachineWith, event_percent: int, period_s: float) -> None:
    """As where its readings take long; then a wrong cost is noticed later."""
    kernel = Kernel("wave", 132)
    share = machine_with(**kernel.settings, event_percent=event_percent).container(cores=3000)
    launches = [kernel.launch(5), kernel.launch(20)]
    [ended] = share.machine.run_virtual((share, launches), period_s=period_s)
    assert kernel.percent(ended.rates()[1]) == pytest.approx(30, abs=POINTS)


@pytest.mark.parametrize("kind", ["kernel", "ex", "cooperative", "graph", "captured", "sync"])
def test_every_kind_of_launch_is_limited(machine_with: MachineWith, kind: str) -> None:
    """Captured launches are paid for by their graph, once."""
    kernel = Kernel("wave", 132)
    [found] = run_alone(machine_with(**kernel.settings), kernel, 30, 6, kind=kind)
    assert found == pytest.approx(30, abs=POINTS)


def test_a_mix_that_changes_is_limited(machine_with: MachineWith) -> None:
    """1,056 blocks, 64, and 1,056 again: each fills the same time of the GPU."""
    machine = machine_with(sm_count=132, block_us=1000, lag_ms=200)
    launches = [f"launch:kernel:3:{blocks}" for blocks in (1056, 64, 1056)]
    [ended] = machine.run_virtual((machine.container(cores=3000), launches))
    assert [rate / 10 for rate in ended.rates()] == pytest.approx([30, 30, 30], abs=POINTS)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["short", "wave"])
def test_processes_of_a_container_share_its_time_evenly(machine_with: MachineWith, count: int, kind: str) -> None:
    kernel = Kernel(kind, 132)
    machine = machine_with(**kernel.settings, **TURNS)
    share = machine.container(cores=3000)
    ended = machine.run_virtual(*[(share, [kernel.launch(3), kernel.launch(8)])] * count)
    found = [kernel.percent(one.rates()[1]) for one in ended]
    assert sum(found) == pytest.approx(30, abs=POINTS)
    assert found == pytest.approx([30 / count] * count, rel=0.25)


@pytest.mark.parametrize(("event_percent", "without"), [(50, 30), (100, 30), (200, 15)])
def test_an_agent_that_goes_away_takes_no_limit_with_it(
    machine_with: MachineWith, event_percent: int, without: int
) -> None:
    """The scale holds for 15 s of launching; then only as far as it gives the program less."""
    kernel = Kernel("wave", 132)
    share = machine_with(**kernel.settings, event_percent=event_percent).container(cores=3000)
    launches = [kernel.launch(one) for one in (7, 10, 10, 10)]
    [ended] = share.machine.run_virtual((share, launches), observed_s=8)
    _, at_first, _, later = [kernel.percent(rate) for rate in ended.rates()]
    assert at_first == pytest.approx(30, abs=POINTS)
    assert later == pytest.approx(without, abs=2)


@pytest.mark.parametrize("away_s", [1, 10])
def test_an_elastic_share_falls_to_its_cores_without_the_agent(machine_with: MachineWith, away_s: int) -> None:
    """15 s of launching after its last word, for nobody says whether the others are idle."""
    kernel = Kernel("wave", 132)
    share = machine_with(**kernel.settings).container(cores=3000, ceiling=8000)
    launches = [kernel.launch(5), kernel.launch(3), f"sleep:{away_s}", kernel.launch(12), kernel.launch(5)]
    [ended] = share.machine.run_virtual((share, launches), observed_s=5)
    found = [kernel.percent(rate) for rate in ended.rates()]
    assert found[1] == pytest.approx(80, abs=6)
    assert found[3] == pytest.approx(30, abs=POINTS)


WINDOWS = [(160, 0), (160, 1000), (500, 300), (1000, 0), (1000, 600), (1000, 1000)]
"""What a driver measures utilisation over, and how late it shows it, in ms."""


@pytest.mark.parametrize(("sample_ms", "lag_ms"), WINDOWS)
@pytest.mark.parametrize("event_percent", [50, 100, 200])
def test_the_scale_is_right_whatever_the_drivers_window_and_lag(
    machine_with: MachineWith, sample_ms: int, lag_ms: int, event_percent: int
) -> None:
    """Samples come once in a window, and of an idle process none."""
    kernel = Kernel("wave", 132)
    driver = {"sample_ms": sample_ms, "lag_ms": lag_ms, "sample_every_ms": sample_ms, "event_percent": event_percent}
    *_, found = run_alone(machine_with(**kernel.settings | driver), kernel, 30, 6, 10)
    assert found == pytest.approx(30, abs=POINTS)


@pytest.mark.parametrize("event_percent", [50, 100])
def test_a_program_in_bursts_is_not_slowed_down(machine_with: MachineWith, event_percent: int) -> None:
    """A burst of 50 ms a second is 5 % of the GPU, though the driver's only sample of that second shows a third of it.
    Its launches are free, for the share has that much left at each burst."""
    kernel = Kernel("wave", 132)
    driver = {"sample_ms": 160, "sample_every_ms": 160, "event_percent": event_percent}
    share = machine_with(**kernel.settings | driver).container(cores=3000)
    bursts = [step for _ in range(20) for step in (kernel.launch(0.05), "sleep:1")]
    [ended] = share.machine.run_virtual((share, bursts))
    rates = [kernel.percent(rate) for rate in ended.rates()]
    assert min(rates[10:]) > 85, rates


@pytest.mark.parametrize("utilization", ["none", "denied"])
def test_a_driver_without_samples_leaves_the_measured_costs(machine_with: MachineWith, utilization: str) -> None:
    """NOT_SUPPORTED, as where MIG is on, or no permission: no feedback is not idleness."""
    kernel = Kernel("wave", 132)
    [found] = run_alone(machine_with(**kernel.settings, utilization=utilization), kernel, 30, 10)
    assert found == pytest.approx(30, abs=POINTS)


def test_an_agent_that_cannot_tell_whose_a_process_is_leaves_the_measured_costs(machine_with: MachineWith) -> None:
    """As without the host's PID namespace: what the container computes is nobody's, and must not be taken for idleness."""
    kernel = Kernel("wave", 132)
    share = machine_with(**kernel.settings).container(cores=3000)
    [ended] = share.machine.run_virtual((share, [kernel.launch(5), kernel.launch(10)]), knows_nobody=True)
    assert [kernel.percent(rate) for rate in ended.rates()] == pytest.approx([30, 30], abs=POINTS)


def test_a_large_kernel_after_small_ones_does_not_wait_for_a_guess(machine_with: MachineWith) -> None:
    """Small ones of one block say far too much of a block's time; what was guessed too high is given back to who waits for
    it. Here a second was guessed for a kernel of a millisecond."""
    kernel = Kernel("wave", 132)
    share = machine_with(**kernel.settings).container(cores=9000)
    [ended] = share.machine.run_virtual((share, ["launch:kernel:1:1", kernel.launch(1)]))
    assert kernel.percent(ended.rates()[1]) == pytest.approx(90, abs=POINTS)
