"""The fake driver does what an H200 was recorded to do (shared/data/h200): the same programs in virtual time, and the same
numbers.

Without libgpushare, but for shares by costs alone. What two programs did on the GPU is compared as a part of what one did
alone: the fake driver's kernel of a millisecond is not exactly the recorded one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.gpushare.cells import APART_S, H200
from tests.gpushare.conftest import MachineWith
from tests.gpushare.support_gpushare import Machine
from tests.native.build import NATIVE
from tests.native.gpu_program import finish

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "h200"

pytestmark = [
    pytest.mark.isolation,
    pytest.mark.skipif(
        not RECORDED.is_dir(), reason="the recordings are not there: ../shared/data/h200 next to the checkout"
    ),
]

KERNEL = "us=1002"
FULL = f"{KERNEL},wait=1"
"""The recorded kernel of a millisecond: two events say 1,003 µs of it where the host takes no time between them."""
GEMM = "us=1684,wait=4"
EMPTY = "us=1,wait=1"


def duty(busy_ms: float, period_ms: float) -> str:
    """Kernels that wait for a time to pass, at the beginning of each period."""
    return f"us={1000 * busy_ms},timed=1,wait=1,period={1000 * period_ms}"


Row = tuple[float, int, int, float]
"""When it was sampled, whose (the number of the program), percent, and when it was asked for."""


@dataclass(frozen=True, slots=True)
class Replayed:
    programs: list[dict[str, Any]]
    rows: list[Row]

    def rate(self, program: int) -> float:
        step = self.programs[program]
        return float(step["launches"] / (step["ended"] - step["began"]))

    def waited(self, program: int) -> float:
        """The part of its time between a launch and the end of waiting for it."""
        step = self.programs[program]
        return float(step["waited_s"] / (step["ended"] - step["began"]))

    def percent(self) -> float:
        """That NVML says, without the first rows and those behind the programs' ends."""
        return statistics.median(row[2] for row in self.rows[2:-3])

    def named(self, program: int) -> float:
        """The part of the rows that name the program."""
        return named(self.rows[2:-3], program)


def named(rows: Iterable[Sequence[Any]], who: object) -> float:
    of_all = [bool(row[1] == who) for row in rows]
    return sum(of_all) / len(of_all)


def replay(
    machine: Machine, *does: str, seconds: float = 6, cores: Sequence[float] = (), apart_s: float = APART_S
) -> Replayed:
    """All at once, each so much behind the one before; with `cores` in shares of libgpushare, without the agent."""
    virtual, time = machine.virtual_time(len(does) + 1), machine.built.virtual_time
    with ExitStack() as stack:
        asks = machine.start_tool(stack, NATIVE / "nvml_rows.py", seconds + 1, env=virtual, stdout=subprocess.PIPE)
        started = []
        for i, one in enumerate(does):
            share = machine.container(f"share-{i}", **({"cores": round(100 * cores[i])} if cores else {}))
            command = [str(machine.built.programs / "tenant"), f"start={apart_s * i}", f"{seconds},{one}"]
            preload = [time, machine.built.library] if cores else [time]
            started.append(share.start_command(command, preload=preload, env=virtual))
            stack.callback(started[-1].kill)
        ended = [finish(one) for one in started]
        output, _ = asks.communicate(timeout=60)
    assert [one.error for one in ended] == [""] * len(ended)
    numbers = {one.pid: i for i, one in enumerate(started)}
    rows = [json.loads(line) for line in output.splitlines()]
    return Replayed(
        [one.steps[0] for one in ended],
        [(at, numbers.get(pid, -1), percent, asked) for at, pid, percent, asked in rows],
    )


def recorded(name: str) -> dict[str, Any]:
    """A step of tenants.json."""
    steps = json.loads((RECORDED / "tenants.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = next(step for step in steps if step["name"] == name)
    return found


def measured(name: str) -> dict[str, Any]:
    """What a step of results.json found on the bare machine."""
    steps = json.loads((RECORDED / "results.json").read_text(encoding="utf-8"))["steps"]
    found: dict[str, Any] = next(one["found"] for one in steps if (one["isolation"], one["step"]) == ("bare", name))
    return found


def of_bare(step: dict[str, Any], who: str) -> float:
    """The rate of a program of launches of a millisecond, as a part of that of one alone."""
    bare, found = recorded("bare launch")["programs"]["x"][0], step["programs"][who][0]
    return float(found["launches"] / found["seconds"] / (bare["launches"] / bare["seconds"]))


def test_launches_take_as_long(machine_with: MachineWith) -> None:
    """Microseconds; under virtual time each question for the time takes 0.2, of which a launch has four."""
    latency = recorded("bare latency")["v"]
    launch = replay(machine_with(**H200), "us=1", seconds=1).rate(0)
    waits = replay(machine_with(**H200), EMPTY, seconds=1).rate(0)
    assert 1e6 / launch - 0.8 == pytest.approx(latency["launch"], rel=0.1)
    assert 1e6 / waits == pytest.approx(latency["launch_and_wait"], rel=0.2)


def test_events_say_as_much(machine_with: MachineWith) -> None:
    """Kernels of a millisecond alone, in four streams of which each is waited for, and next to another program."""
    alone = replay(machine_with(**H200), f"{KERNEL},events=1", seconds=2).programs[0]
    streams = replay(machine_with(**H200), f"{KERNEL},events=1,streams=4", seconds=2).programs[0]
    beside = replay(machine_with(**H200), f"{KERNEL},events=1", FULL, seconds=2).programs[0]
    for name, found in {"alone": alone, "streams": streams, "beside another program": beside}.items():
        of_real, wall = measured("events")[name], (found["ended"] - found["began"]) / found["launches"]
        assert found["median_us"] == pytest.approx(of_real["median_us"], rel=0.02), name
        assert found["p90_us"] == pytest.approx(of_real["p90_us"], rel=0.02), name
        assert 1e6 * wall == pytest.approx(of_real["wall_us"], rel=0.02), name


def test_two_programs_that_wait_for_each_kernel(machine_with: MachineWith) -> None:
    """Each has less than half of what it has alone: they lose 130 µs at each change."""
    step = recorded("raw full+full")
    bare, found = replay(machine_with(**H200), FULL), replay(machine_with(**H200), FULL, FULL)
    for i, who in enumerate(("p0", "p1")):
        assert found.rate(i) / bare.rate(0) == pytest.approx(of_bare(step, who), abs=0.01)
    assert found.percent() == statistics.median(row[2] for row in step["nvml_rows"]) == 99
    for rows in (step["nvml_rows"], found.rows[:-3]):  # now the one, now the other, in no order
        assert 0.3 <= named(rows, rows[0][1]) <= 0.7
        changes = [one[1] != next_one[1] for one, next_one in pairwise(rows)]
        assert 0.2 <= sum(changes) / len(changes) <= 0.8


def test_a_program_of_three_in_ten_ms_next_to_a_full_one(machine_with: MachineWith) -> None:
    """Its kernel is interrupted after 2 ms, and the other's of a millisecond comes between; without turns it would wait for
    36 % of the time and not for 41, and turns of a millisecond would give the other one more."""
    step = recorded("raw duty30+full")
    bare, found = replay(machine_with(**H200), FULL), replay(machine_with(**H200), duty(3, 10.003), FULL)
    assert found.waited(0) == pytest.approx(step["programs"]["p0"][0]["busy_ratio"], abs=0.03)
    assert found.rate(1) / bare.rate(0) == pytest.approx(of_bare(step, "p1"), abs=0.02)
    assert found.percent() == 99


def test_who_is_named_has_computed_last_before_the_sample(machine_with: MachineWith) -> None:
    """A sample comes every 200 ms, so of a program with a period of 10 ms it meets nearly the same point each time: recorded
    were all but two rows of the full program. Where the period is another one, each is named as long as it computes."""
    step = recorded("raw duty30+full")
    assert {round(1000 * row[0]) % 10 for row in step["nvml_rows"] if row[1] == "p0"} == {1}
    locked = [
        replay(machine_with(**H200), FULL, duty(3, 10), apart_s=apart_s).named(1)
        for apart_s in (0.010, 0.0125, 0.015, 0.0175)
    ]
    assert max(locked) - min(locked) > 0.5
    assert 0.15 <= replay(machine_with(**H200), duty(3, 10.31), FULL, seconds=20).named(0) <= 0.4


def test_two_programs_that_leave_time(machine_with: MachineWith) -> None:
    """Of 3 and 6 in 10 ms: the second begins a little behind the first, so its kernel is interrupted too."""
    step = recorded("raw duty30+duty60")
    found = replay(machine_with(**H200), duty(3, 10), duty(6, 10), apart_s=0.0102)
    for i, who in enumerate(("p0", "p1")):
        assert found.waited(i) == pytest.approx(step["programs"][who][0]["busy_ratio"], abs=0.05)
    assert found.percent() == pytest.approx(statistics.median(row[2] for row in step["nvml_rows"]), abs=7)


def test_a_program_that_is_busy_for_two_fifths_of_the_time(machine_with: MachineWith) -> None:
    """By itself and by NVML: 40.1 and 40."""
    found = replay(machine_with(**H200), duty(4, 10), seconds=4)
    assert found.waited(0) == pytest.approx(0.401, abs=0.005) and found.percent() == pytest.approx(40, abs=1)


def test_rows_come_as_often_and_as_late(machine_with: MachineWith) -> None:
    """One PID in each, 200 ms apart; asked for ten times a second they are some 40 ms old."""
    found = replay(machine_with(**H200), FULL, FULL).rows
    steps = json.loads((RECORDED / "tenants.json").read_text(encoding="utf-8"))
    of_real = [step["nvml_rows"] for step in steps if step.get("nvml_rows") and not step["name"].startswith("hami")]
    assert len(of_real) > 10
    for rows in [found, *of_real]:
        apart = [after[0] - before[0] for before, after in pairwise(rows)]
        assert all(abs(one - 0.2) < 0.01 for one in apart), apart
        assert all(-0.001 <= row[3] - row[0] <= 0.115 for row in rows)
    ages = [row[3] - row[0] for rows in of_real for row in rows]
    assert statistics.median(row[3] - row[0] for row in found) == pytest.approx(statistics.median(ages), abs=0.025)


def test_costs_alone_hold_two_shares(machine_with: MachineWith) -> None:
    """Without the agent: 30.3 and 60.6 of the bare rate, and NVML says 97."""
    step = recorded("T2 30+60 costs alone")
    bare, found = (
        replay(machine_with(**H200), FULL),
        replay(machine_with(**H200), FULL, FULL, cores=(30, 60), seconds=20),
    )
    for i, who in enumerate("ab"):
        assert found.rate(i) / bare.rate(0) == pytest.approx(of_bare(step, who), abs=0.01)
    assert found.percent() == pytest.approx(statistics.median(row[2] for row in step["nvml_rows"]), abs=2)
    pids = [row[1] for row in step["nvml_rows"]]
    assert found.named(0) == pytest.approx(min(pids.count(pid) for pid in set(pids)) / len(pids), abs=0.12)


def test_costs_alone_of_three_shares(machine_with: MachineWith) -> None:
    """Recorded is only what the agent of that time did wrong: 11, 31 and 43, by what NVML named. Costs alone give the first
    two theirs, and the third one what the losses leave."""
    bare = replay(machine_with(**H200), FULL)
    found = replay(machine_with(**H200), FULL, FULL, FULL, cores=(20, 30, 50))
    assert [100 * found.rate(i) / bare.rate(0) for i in range(3)] == pytest.approx([20, 30, 40], abs=2)
    assert found.percent() >= 97


def test_clocks_rise_while_the_gpu_rests(machine_with: MachineWith) -> None:
    """A matrix multiplication takes 1.68 ms where the GPU does nothing but such, for its power is limited; in a share of 30,
    1.37 to 1.38 by libgpushare's costs."""
    bare = replay(machine_with(**H200, boost_percent=22), GEMM)
    found = replay(machine_with(**H200, boost_percent=22), GEMM, cores=(30,))
    assert bare.rate(0) == pytest.approx(recorded("bare work")["rates"]["gemm"], rel=0.01)
    numbers = [numbers for _, who, numbers in recorded("T3 30 alone gemm")["library"] if who == "a"]
    paid, launches = (numbers[-1][name] - numbers[0][name] for name in ("launched", "launches"))
    assert 1e9 * 0.3 / found.rate(0) == pytest.approx(paid / launches, rel=0.03)
