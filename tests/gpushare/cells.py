"""What containers get of a GPU whose contexts take turns, as an H200 was measured to do (fake_driver/slices.c): a table of
cells, each in virtual time.

    python -m tests.gpushare.cells [--only PATTERN] [--jobs 2] [--list]
    python -m tests.gpushare.cells --into bench/measured/regulator.json --as after

A cell is some containers, each with programs (tests/native/tenant.c) and a share of the GPU. Of each container two numbers
are read from the fake driver, in percent of the GPU: what it computed (net), and that with what it lost at the beginnings of
its turns (gross). Both are of the first second of its last program, and of the seconds after that. A share is right where
net - 3 <= share <= gross + 3: nobody computes more than the share, and nobody has less of the GPU. A program that needs less
than its share is right where it computes 98.5 % of what it computes without libgpushare.

`--into` writes the numbers of the cells that ran over those of the same name in the file of which the documentation's table
is made.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_NAME
from tests.gpushare.support_gpushare import GpushareBuilt, Machine, build_for_gpushare
from tests.native.build import NATIVE, CannotBuildError
from tests.native.gpu_program import Ended, finish

H200: Mapping[str, object] = {
    "slice_us": 2000,
    "rows": "whole",
    "sample_ms": 200,
    "sample_every_ms": 200,
    "sm_count": 132,
}
"""Samples come at once; who asks ten times a second has them 50 ms old, on average."""
SECONDS = 6.5
"""Of a program's only phase."""
POINTS, POINTS_AT_FIRST, LEAST_OF_BARE = 3.0, 6.0, 0.985
APART_S = 0.0137
"""Between the begins of two programs."""

ASYNC_LONG = "us=50000"
SYNC = "us=1000,wait=1"


@dataclass(frozen=True, slots=True)
class Program:
    """`phases` are tenant.c's, without "SECONDS," at the beginning of an only one."""

    phases: tuple[str, ...]
    start_s: float = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A container. `bound`: its program needs less than the share. `resized`: to so many cores, so long after all began.

    `gpu` is as in Machine.container.
    `right` is what it is to have in `seconds` of its last program, where that is not its cores after the first second.
    """

    cores: float
    programs: tuple[Program, ...]
    ceiling: float | None = None
    bound: bool = False
    resized: tuple[float, float] | None = None
    right: float | None = None
    seconds: tuple[float, float] | None = None
    gpu: str = "0"

    @property
    def expected(self) -> float:
        return self.cores if self.right is None else self.right


@dataclass(frozen=True, slots=True)
class Cell:
    """`until_s`: the end of what is measured, after the first second."""

    name: str
    tenants: tuple[Tenant, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    observed: bool = True
    observed_s: float = float("inf")
    until_s: float = 6


@dataclass(frozen=True, slots=True)
class Found:
    """Percent of the GPU's time: net, and with what is lost."""

    first: tuple[float, float]
    later: tuple[float, float]

    def is_within(self, share: float) -> bool:
        """It computed no more, and had no less with what it lost."""
        return self.later[0] - POINTS <= share <= self.later[1] + POINTS

    def was_within(self, share: float) -> bool:
        """In its first second."""
        return self.first[0] - POINTS_AT_FIRST <= share <= self.first[1] + POINTS_AT_FIRST


def tenant(cores: float, *does: str, ceiling: float | None = None, bound: bool = False, count: int = 1) -> Tenant:
    """`count` programs, each of these phases, one after the other."""
    phases = does if len(does) > 1 else (f"{SECONDS},{does[0]}",)
    return Tenant(cores, (Program(phases),) * count, ceiling, bound)


def alone(name: str, cores: float, *does: str, **more: Any) -> Cell:
    return Cell(name, (tenant(cores, *does),), **more)


def two(name: str, one: str, other: str, **more: Any) -> Cell:
    return Cell(name, (tenant(30, one), tenant(60, other)), **more)


def many(name: str, *tenants: tuple[float, str], **more: Any) -> Cell:
    return Cell(name, tuple(tenant(cores, does) for cores, does in tenants), **more)


def _ordinary() -> Iterator[Cell]:
    """The cells by which the regulator was designed."""
    lengths = {"5us": "us=5", "100us": "us=100", "1ms": "us=1000", "10ms": "us=10000", "50ms": ASYNC_LONG}
    no_nvml = {"utilization": "none"}
    yield alone("alone 30 5us", 30, "us=5")
    for length in ("100us", "1ms", "10ms", "50ms"):
        yield alone(f"alone 30 {length}", 30, lengths[length])
        yield alone(f"alone 30 {length} sync", 30, f"{lengths[length]},wait=1")
    for length in ("5us", "1ms", "50ms"):
        yield alone(f"alone 70 {length}", 70, lengths[length])
        yield alone(f"alone 10 {length}", 10, lengths[length])
    yield alone("alone 30 4 streams async", 30, "us=1000,streams=4")
    yield alone("alone 30 4 streams wait4", 30, "us=1000,streams=4,wait=4")
    yield alone("alone 80 4 streams wait4", 80, "us=1000,streams=4,wait=4")
    yield alone("alone 30 4 narrow streams wait4", 30, "us=1000,streams=4,wait=4,blocks=264")
    yield alone("alone 80 4 narrow streams async", 80, "us=1000,streams=4,blocks=264")
    rests = "us=1000,streams=4,wait=4,rest=6000"
    yield Cell("alone 60, 4 streams, cpu-bound 40", (tenant(60, rests, bound=True),))
    yield Cell("alone 60, 4 narrow streams, cpu-bound 14", (tenant(60, f"{rests},blocks=264", bound=True),))
    yield Cell("60, 4 streams, cpu-bound 40 + 30 1ms sync", (tenant(60, rests, bound=True), tenant(30, SYNC)))
    yield alone("alone 30 graph of 41 tiny", 30, "us=3.45,graph=41,wait=10")
    yield Cell("alone 30 small cpu-bound 16", (tenant(30, "us=3.45,host=17,wait=160", bound=True),))
    yield Cell("alone 30 cpu-bound 25 (250us/ms)", (tenant(30, "us=250,host=740,wait=1", bound=True),))
    yield alone("alone 30 mix with set", 30, "us=100+100+100+16,wait=4,set=32")
    yield alone("alone 99 mix with set", 99, "us=100+100+100+16,wait=4,set=32")
    yield alone("alone 30 half copies", 30, "us=100,set=286")
    yield alone("alone 30 alternating .1/10 same key", 30, "us=100+10000,keys=0")
    yield alone("alone 30 alternating .1/10 same key sync", 30, "us=100+10000,keys=0,wait=1")
    phases = [f"1.6,us={us},keys=0" for us in (100, 1000, 10000, 100)]
    yield alone("alone 30 lengths change same key .1>1>10>.1", 30, *phases)

    for length, does in lengths.items():
        yield two(f"30+60 {length} both", does, does)
        if length != "5us":
            yield two(f"30+60 {length} sync both", f"{does},wait=1", f"{does},wait=1")
    for length in ("5us", "100us"):
        yield two(f"30 {length} + 60 1ms sync", lengths[length], SYNC)
        yield two(f"30 1ms sync + 60 {length}", SYNC, lengths[length])
    for length in ("10ms", "50ms"):
        yield two(f"30 {length} sync + 60 1ms sync", f"{lengths[length]},wait=1", SYNC)
        yield two(f"30 1ms sync + 60 {length} sync", SYNC, f"{lengths[length]},wait=1")
    yield two("30 50ms + 60 1ms sync", ASYNC_LONG, SYNC)
    yield two("30 1ms sync + 60 50ms", SYNC, ASYNC_LONG)
    yield two("30 4streams + 60 1ms sync", "us=1000,streams=4,wait=4", SYNC)
    yield two("30 alternating same key + 60 1ms sync", "us=100+10000,keys=0", SYNC)

    yield many("20+30+50 1ms sync", (20, SYNC), (30, SYNC), (50, SYNC))
    yield many("20+30+50 100us async", (20, "us=100"), (30, "us=100"), (50, "us=100"))
    yield many("20 10ms + 30 1ms + 50 100us", (20, "us=10000"), (30, "us=1000"), (50, "us=100"))
    yield many("10+15+20+25+30 1ms sync", *((cores, SYNC) for cores in (10, 15, 20, 25, 30)))
    mixed = ("us=100", SYNC, "us=10000", "us=10000,wait=1", "us=50000,wait=1")
    yield many("5x15 mixed lengths", *((15, does) for does in mixed))
    yield alone("30 gemm boost", 30, "us=1684,wait=4", settings={"boost_percent": 22})
    small = tenant(30, "us=3.45,host=17,wait=160", bound=True)
    yield Cell("cpu-bound 16 of 30 + 60 1ms", (small, tenant(60, SYNC)))

    yield Cell("elastic 30..80 alone", (replace(tenant(30, SYNC, ceiling=80), right=80, seconds=(3, 6)),))
    beside = Tenant(20, (Program((f"4,{SYNC}",), start_s=4),), seconds=(1, 3.9))
    elastic = tenant(30, f"12,{SYNC}", "0.1", ceiling=80)
    yield Cell("elastic 30..80 while 20 is there, 4 s to 8 s", (replace(elastic, seconds=(5, 7.9)), beside))
    yield Cell(
        "elastic 30..80 after 20 was there, 4 s to 8 s", (replace(elastic, right=80, seconds=(10.5, 12)), beside)
    )
    grows, shrinks = (
        replace(tenant(cores, SYNC), resized=(3, to), right=to, seconds=(3.5, 6)) for cores, to in ((30, 60), (60, 30))
    )
    yield Cell("resized from 30 to 60 at 3 s", (grows,))
    yield Cell("resized from 60 to 30 at 3 s", (shrinks,))
    yield Cell("resized from 30 to 60 at 3 s + 30 1ms sync", (grows, tenant(30, SYNC)))

    yield two("agent away 30+60 1ms", SYNC, SYNC, observed=False)
    yield alone("agent away 30 4 streams", 30, "us=1000,streams=4", observed=False)
    yield alone("agent away 30 alternating", 30, "us=100+10000,keys=0", observed=False)
    yield alone("agent away 30 5us", 30, "us=5", observed=False)
    yield two("agent away 30 50ms + 60 1ms", "us=50000,wait=1", SYNC, observed=False)
    yield two("agent dies at 4 s 30+60 1ms", SYNC, SYNC, observed_s=4)
    yield two("no NVML 30+60 1ms", SYNC, SYNC, settings=no_nvml)
    yield two("no NVML 30 50ms + 60 1ms", "us=50000,wait=1", SYNC, settings=no_nvml)
    yield many("no NVML 20+30+50 1ms sync", (20, SYNC), (30, SYNC), (50, SYNC), settings=no_nvml)
    yield Cell("two processes in 30 + 60", (tenant(30, SYNC, count=2), tenant(60, SYNC)))
    yield Cell("two processes in 30 alone", (tenant(30, SYNC, count=2),))


def _data() -> Iterator[Cell]:
    """The lengths of one function's kernels depend on data: all launches look alike. Each pattern alone and next to another
    container, with the agent and without it."""
    patterns: dict[str, tuple[str, ...]] = {
        "alternating .1/10": ("us=100+10000",),
        "alternating .1/10 sync": ("us=100+10000,wait=1",),
        "200x10us+20ms": ("us=10+20000,times=200+1",),
        "200x10us+20ms wait201": ("us=10+20000,times=200+1,wait=201",),
        "200x10us+20ms sync": ("us=10+20000,times=200+1,wait=1",),
        "1000x5us+50ms": ("us=5+50000,times=1000+1",),
        "1000x5us+50ms wait1001": ("us=5+50000,times=1000+1,wait=1001",),
        "1000x5us+50ms sync": ("us=5+50000,times=1000+1,wait=1",),
        "50x1ms+50ms": ("us=1000+50000,times=50+1",),
        "random 10us-10ms": ("us=10+30+100+300+1000+3000+10000,random=7",),
        "random 10us-10ms sync": ("us=10+30+100+300+1000+3000+10000,random=7,wait=1",),
        "random 200:1 10us/20ms": ("us=10+20000,times=200+1,random=11",),
        "warm-up 5us then 10ms": ("0.3,us=5", "6.5,us=10000"),
        "warm-up 5us then 10ms sync": ("0.3,us=5", "6.5,us=10000,wait=1"),
        "phases of 3 s .1/10": tuple(f"3,us={us}" for us in (100, 10000, 100, 10000)),
        "phases of 3 s .1/10 sync": tuple(f"3,us={us},wait=1" for us in (100, 10000, 100, 10000)),
    }
    for name, pattern in patterns.items():
        does = tuple(f"{phase},keys=0" for phase in pattern)
        until_s = 12 if name.startswith("phases") else 6
        for observed in (True, False):
            where = "" if observed else "agent away "
            yield alone(f"data {where}30 {name}", 30, *does, observed=observed, until_s=until_s)
            other = tenant(60, f"12.5,{SYNC}", "0.01") if until_s == 12 else tenant(60, SYNC)
            pair = (tenant(30, *does), other)
            yield Cell(f"data {where}30 {name} + 60 1ms sync", pair, observed=observed, until_s=until_s)
    yield Cell("data 60 1000x5us+50ms + 30 1ms sync", (tenant(60, "us=5+50000,times=1000+1,keys=0"), tenant(30, SYNC)))


def _kinds() -> Iterator[Cell]:
    """Programs whose launches are not like those before."""
    for observed in (True, False):
        where = "" if observed else "agent away "
        yield alone(f"kinds {where}30 ever-new 5us", 30, "us=5,kinds=1", observed=observed)
        yield alone(f"kinds {where}30 ever-new 1ms", 30, "us=1000,kinds=1", observed=observed)
        yield alone(f"kinds {where}30 ever-new 1ms sync", 30, "us=1000,kinds=1,wait=1", observed=observed)
        full = ("0.3,us=5,kinds=1", "6.5,us=1000,kinds=1")
        yield alone(f"kinds {where}30 5000 of 5us, then ever-new 1ms", 30, *full, observed=observed)
        mixed = "us=10+1000,times=20+1,kinds=1"
        yield alone(f"kinds {where}30 ever-new 20x10us+1ms", 30, mixed, observed=observed)
    yield two("kinds 30 ever-new 5us + 60 1ms sync", "us=5,kinds=1", SYNC)
    yield two("kinds 30 ever-new 1ms + 60 1ms sync", "us=1000,kinds=1", SYNC)
    yield alone("kinds 30 graph updated, .1/10", 30, "us=100+10000,graph=1,update=1")
    yield alone("kinds 30 graph updated, .1/10 sync", 30, "us=100+10000,graph=1,update=1,wait=1")
    yield alone("kinds 30 graph of 41 updated, 3us/300us", 30, "us=3+300,graph=41,update=1,wait=10")
    yield two("kinds 30 graph updated, .1/10 + 60 1ms sync", "us=100+10000,graph=1,update=1,wait=1", SYNC)


def _streams_and_fills() -> Iterator[Cell]:
    yield alone("streams 30 of 32 1ms async", 30, "us=1000,streams=32")
    yield alone("streams 30 of 32 100us async", 30, "us=100,streams=32")
    yield alone("streams 30 of 8 100us wait8", 30, "us=100,streams=8,wait=8")
    yield alone("streams 30 of 8 50ms async", 30, f"{ASYNC_LONG},streams=8")
    yield alone("streams 60 of 32 narrow 1ms wait32", 60, "us=1000,streams=32,wait=32,blocks=66")
    yield two("streams 30 of 32 1ms + 60 1ms sync", "us=1000,streams=32,wait=32", SYNC)
    yield alone("fills 30 half sync", 30, "us=100,set=286,wait=1")
    yield two("fills 30 half + 60 1ms sync", "us=100,set=286", SYNC)
    yield alone("fills agent away 30 half", 30, "us=100,set=286", observed=False)
    yield alone("fills 30 half of 10 ms", 30, "us=5000,set=14305")


def _after_others() -> Iterator[Cell]:
    """A program begins after an old one in the same container, or next to it: measured from its begin on."""
    old = {
        "half copies": "us=100,set=286",
        "long": "us=50000,wait=1",
        "5us": "us=5",
        "4 streams": "us=1000,streams=4,wait=4",
    }
    gemm = "us=1684,wait=4"
    for name, did in old.items():
        both = (Program((f"4,{did}",)), Program((f"{SECONDS},{gemm}",), start_s=4.3))
        yield Cell(f"start 30 gemm after {name}", (Tenant(30, both),))
        late = (Program((f"4,{did}",)), Program((f"{SECONDS},{gemm}",), start_s=4.05))
        yield Cell(
            f"start 30 gemm at once after {name} + 60 1ms sync", (Tenant(30, late), tenant(60, f"11,{SYNC}", "0.01"))
        )
    beside = (Program((f"11,{SYNC}",)), Program((f"{SECONDS},{gemm}",), start_s=4))
    yield Cell("start 30 gemm next to an old 1ms sync", (Tenant(30, beside),))
    yield Cell(
        "start 30 5us next to an old 1ms sync", (Tenant(30, (beside[0], Program((f"{SECONDS},us=5",), start_s=4))),)
    )


def _drivers() -> Iterator[Cell]:
    """GPUs and drivers that are not like the H200."""
    machines: dict[str, dict[str, object]] = {
        "rows each": {"rows": "each"},
        "rows each, old and seldom": {"rows": "each", "sample_ms": 1000, "sample_every_ms": 1000, "lag_ms": 500},
        "rows old": {"lag_ms": 40},
        "rows old and seldom": {"sample_ms": 1000, "sample_every_ms": 1000, "lag_ms": 500},
        "turns of 1 ms": {"slice_us": 1000},
        "turns of 5 ms": {"slice_us": 5000},
        "changes of 20 us": {"switch_us": 20},
        "changes of 300 us": {"switch_us": 300},
        "events of 3 us": {"event_us": 3},
        "events of 0.3 us": {"event_us": 0.3},
        "launches of 2 us": {"launch_us": 2},
        "launches of 8 us": {"launch_us": 8},
        "launches of 15 us": {"launch_us": 15},
    }
    for name, settings in machines.items():
        yield two(f"driver {name}: 30+60 1ms sync both", SYNC, SYNC, settings=settings)
        yield two(f"driver {name}: 30 1ms sync + 60 10ms sync", SYNC, "us=10000,wait=1", settings=settings)
        if name.startswith(("events", "launches")):
            yield alone(f"driver {name}: alone 30 5us", 30, "us=5", settings=settings)
            yield alone(f"driver {name}: alone 30 100us sync", 30, "us=100,wait=1", settings=settings)


def _instances() -> Iterator[Cell]:
    """Inside a MIG instance, of which no driver says how busy it is; and next to it, another instance and a whole GPU."""
    machine = {"instances": "10240,20480", "gpus": 2}
    shares: dict[str, tuple[tuple[float, str], ...]] = {
        "30 1ms": ((30, "us=1000"),),
        "30 5us": ((30, "us=5"),),
        "30 50ms sync": ((30, "us=50000,wait=1"),),
        "30+60 1ms": ((30, "us=1000"), (60, "us=1000")),
        "30+60 1ms sync": ((30, SYNC), (60, SYNC)),
        "30+60 100us": ((30, "us=100"), (60, "us=100")),
        "30+60 5us": ((30, "us=5"), (60, "us=5")),
        "30+60 10ms sync": ((30, "us=10000,wait=1"), (60, "us=10000,wait=1")),
        "30 10ms sync + 60 1ms sync": ((30, "us=10000,wait=1"), (60, SYNC)),
        "30 mix + 60 gemm": ((30, "us=100+100+100+16,wait=4,set=32"), (60, "us=1684,wait=4")),
        "30 alternating + 60 1ms sync": ((30, "us=100+10000,keys=0"), (60, SYNC)),
        "10+20+70 1ms sync": ((10, SYNC), (20, SYNC), (70, SYNC)),
        "10+20+70 100us": ((10, "us=100"), (20, "us=100"), (70, "us=100")),
        "20+30+50 of several lengths": ((20, "us=10000"), (30, "us=1000"), (50, "us=100")),
    }
    for name, each in shares.items():
        tenants = tuple(replace(tenant(cores, does), gpu="0:0") for cores, does in each)
        yield Cell(f"instance {name}", tenants, settings=machine)
    pulses = tuple(word for _ in range(3) for word in (f"1,{SYNC}", "sleep=1"))
    # It computes in every other second alone, at 60 %.
    idle = replace(tenant(60, *pulses), gpu="0:0", right=30, seconds=(1, 5))
    yield Cell("instance 30 1ms sync + 60 half of the time", (replace(tenant(30, SYNC), gpu="0:0"), idle), machine)
    alone, beside = tenant(30, SYNC, ceiling=80), Tenant(20, (Program((f"4,{SYNC}",), start_s=4),), seconds=(1, 3.9))
    yield Cell("instance elastic 30..80 alone", (replace(alone, right=80, seconds=(3, 6), gpu="0:0"),), machine)
    while_there, after = (
        replace(tenant(30, f"12,{SYNC}", "0.1", ceiling=80), seconds=seconds, right=right, gpu="0:0")
        for seconds, right in (((5, 7.9), 30), ((10.5, 12), 80))
    )
    here = replace(beside, gpu="0:0")
    yield Cell("instance elastic 30..80 while 20 is there, 4 s to 8 s", (while_there, here), machine)
    yield Cell("instance elastic 30..80 after 20 was there, 4 s to 8 s", (after, here), machine)
    yield Cell("instance elastic 30..80 without the agent", (replace(alone, gpu="0:0"),), machine, observed=False)
    everywhere = tuple(replace(tenant(cores, SYNC), gpu=gpu) for cores in (30, 60) for gpu in ("0:0", "0:1", "1"))
    yield Cell("instance 30+60 1ms sync in each of two and on a GPU", everywhere, machine)


CELLS: tuple[Cell, ...] = (
    *_ordinary(), *_data(), *_kinds(), *_streams_and_fills(), *_after_others(), *_drivers(), *_instances(),
)  # fmt: skip


LIES = {False: ("0.05", "3"), True: ("0.01", "7")}
"""How often and for how long, in seconds, `usage` is written over: with random bytes; by one that hides what it computes."""


def cell_named(name: str) -> Cell:
    [found] = [cell for cell in CELLS if cell.name == name]
    return found


def run(machine: Machine, cell: Cell, *, bare: Sequence[int] = (), lies: str = "") -> list[Found]:
    """Of each container. Those in `bare` run without libgpushare; where it `lies`, the last one's `usage` is written over
    as liar.py says."""
    built = machine.built
    processes = sum(len(each.programs) + bool(each.resized) for each in cell.tenants)
    virtual = machine.virtual_time(processes + cell.observed + bool(lies))
    shares = []
    for i, each in enumerate(cell.tenants):
        limits: dict[str, int] = {} if each.ceiling is None else {"ceiling": round(100 * each.ceiling)}
        shares.append(machine.container(f"share-{i}", each.gpu, cores=round(100 * each.cores), **limits))
    with ExitStack() as stack:
        if cell.observed:
            env = virtual | {"OBSERVING_FOR_S": str(cell.observed_s)}
            machine.start_tool(stack, NATIVE / "observing_agent.py", *(one.directory for one in shares), env=env)
        if lies:
            usage = shares[-1].directory / USAGE_NAME
            machine.start_tool(stack, NATIVE / "liar.py", usage, lies, *LIES[lies == "hides"], env=virtual)
        for share, each in zip(shares, cell.tenants, strict=True):
            if each.resized:
                config, (at_s, cores) = share.directory / CONFIG_NAME, each.resized
                machine.start_tool(stack, NATIVE / "set_cores.py", config, at_s, round(100 * cores), env=virtual)
        started: list[list[subprocess.Popen[str]]] = []
        for i, (share, each) in enumerate(zip(shares, cell.tenants, strict=True)):
            started.append([])
            for program in each.programs:
                start_s = program.start_s + APART_S * sum(len(one) for one in started)
                command = [str(built.programs / "tenant"), f"start={start_s}", *program.phases]
                preload = [built.virtual_time] if i in bare else [built.virtual_time, built.library]
                started[-1].append(share.start_command(command, preload=preload, env=virtual))
                stack.callback(started[-1][-1].kill)
        ended = [[finish(one) for one in of_share] for of_share in started]
    errors = [one.error or f"exit code {one.code}" for of_share in ended for one in of_share if one.error or one.code]
    assert not errors, errors
    command = [str(built.programs / "meter"), machine.env()["FAKE_GPU_STATE"]]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    meters = {meter["pid"]: meter for meter in map(json.loads, lines)}
    return [
        found_of([meters[one.pid] for one in processes], programs, each.seconds or (1.0, cell.until_s))
        for each, processes, programs in zip(cell.tenants, started, ended, strict=True)
    ]


def found_of(meters: Sequence[Mapping[str, Any]], programs: Sequence[Ended], seconds: tuple[float, float]) -> Found:
    """Since the last program's begin, of all programs of the container."""
    slot, clock = meters[0]["slot_s"], meters[0]["clock"]
    last = max(programs, key=lambda program: program.steps[0]["began"])
    at = round((last.steps[0]["began"] - clock) / slot)
    since_s, until_s = seconds[0], min(seconds[1], last.steps[-1]["ended"] - last.steps[0]["began"])

    def percent(kind: str, since: float, until: float) -> float:
        span = slice(at + round(since / slot), at + round(until / slot))
        return sum(sum(meter[kind][span]) for meter in meters) / 10 / (until - since)

    first, later = ((percent("net", *span), percent("gross", *span)) for span in ((0.0, 1.0), (since_s, until_s)))
    return Found(first, later)


@dataclass(frozen=True, slots=True)
class Result:
    """`bare` is what each program that needs less than its share computes without libgpushare; None of others."""

    cell: Cell
    found: list[Found]
    bare: list[float | None]

    def outside(self) -> str:
        """Whose share is not right, by letter, after the first second."""
        return self._letters(lambda each, found: found.is_within(each.expected))

    def outside_at_first(self) -> str:
        return self._letters(lambda each, found: found.was_within(each.cores), of_bound=False)

    def _letters(self, is_right: Callable[[Tenant, Found], bool], *, of_bound: bool = True) -> str:
        wrong = ""
        for i, (each, found, bare) in enumerate(zip(self.cell.tenants, self.found, self.bare, strict=True)):
            if not each.bound:
                right = is_right(each, found)
            else:
                right = not of_bound or bare is None or found.later[0] >= LEAST_OF_BARE * bare
            wrong += "" if right else "abcdefgh"[i]
        return wrong


def judge(machine: Machine, cell: Cell, other: Machine) -> Result:
    """Runs a cell; and once more on the machine `other` without libgpushare in who needs less than its share."""
    found = run(machine, cell)
    bare: list[float | None] = [None] * len(found)
    bound = [i for i, each in enumerate(cell.tenants) if each.bound]
    if bound:
        without = run(other, cell, bare=bound)
        for i in bound:
            bare[i] = without[i].later[0]
    return Result(cell, found, bare)


def machine_for(built: GpushareBuilt, directory: Path, cell: Cell) -> Machine:
    directory.mkdir(parents=True)
    return Machine(built, directory, {**H200, **cell.settings})


def shown(numbers: Sequence[tuple[float, float]]) -> str:
    """Net, or net/gross where they differ."""
    return " + ".join(
        f"{net:.0f}" if round(net) == round(gross) else f"{net:.0f}/{gross:.0f}" for net, gross in numbers
    )


def _say(*words: object, file: TextIO = sys.stdout) -> None:
    print(*words, sep="\n", flush=True, file=file)


def _merge(path: Path, kind: str, results: Sequence[Result]) -> None:
    """A line for each cell, of each container its net and gross in both times, and what it computes without the library."""
    numbers = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    told = numbers.setdefault(kind, {})
    for result in results:
        rows = zip(result.found, result.bare, strict=True)
        told[result.cell.name] = [
            [round(one, 1) for one in (*found.first, *found.later, *([] if bare is None else [bare]))]
            for found, bare in rows
        ]
    parts = (
        f' "{kind}": {{\n'
        + ",\n".join(f"  {json.dumps(cell.name)}: {json.dumps(of[cell.name])}" for cell in CELLS if cell.name in of)
        + "\n }"
        for kind, of in numbers.items()
    )
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def recorded(numbers: Mapping[str, Any], cell: Cell) -> Result | None:
    """What `--into` wrote of it. None: it did not end."""
    if (rows := numbers.get(cell.name)) is None:
        return None
    found = [Found((row[0], row[1]), (row[2], row[3])) for row in rows]
    return Result(cell, found, [row[4] if len(row) > 4 else None for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the cells of the limit of compute, and print what each container got."
    )
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names, as the shell has them, or a part")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--into", type=Path, metavar="FILE", help="writes what each cell got over what is there")
    parser.add_argument("--as", dest="kind", choices=("before", "after"), default="after", help="in that file")
    parser.add_argument("--list", action="store_true", help="the names alone")
    arguments = parser.parse_args()
    patterns = [pattern if "*" in pattern else f"*{pattern}*" for pattern in arguments.only or ["*"]]
    cells = [cell for cell in CELLS if any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]
    if arguments.list:
        _say(*(cell.name for cell in cells))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpushare-cells-") as name, ThreadPoolExecutor(arguments.jobs) as threads:
        directory = Path(name)
        try:
            built = build_for_gpushare(directory / "built")
        except CannotBuildError as error:
            _say(error, file=sys.stderr)
            return 1

        def of(number: int) -> Result | str:
            cell = cells[number]
            limited, bare = (machine_for(built, directory / f"{number}-{kind}", cell) for kind in ("limited", "bare"))
            try:
                return judge(limited, cell, bare)
            except AssertionError as error:
                return str(error)

        results: list[Result] = []
        _say("| cell | 1st s | later | 1st s | later |\n|---|---|---|---|---|")
        for cell, result in zip(cells, threads.map(of, range(len(cells))), strict=True):
            if isinstance(result, str):
                _say(f"| {cell.name} | failed: {result.strip()[:300]} |")
                continue
            results.append(result)
            bare = "".join(f" (bare {one:.1f})" for one in result.bare if one is not None)
            judged = [one or "ok" for one in (result.outside_at_first(), result.outside())]
            first, later = (shown([getattr(found, kind) for found in result.found]) for kind in ("first", "later"))
            _say(f"| {cell.name} | {first} | {later}{bare} | {' | '.join(judged)} |")
    outside, at_first = (
        sum(bool(one) for one in found)
        for found in ([each.outside() for each in results], [each.outside_at_first() for each in results])
    )
    _say(f"{len(cells)} cells; outside: {outside}; first second: {at_first}; failed: {len(cells) - len(results)}")
    if arguments.into:
        _merge(arguments.into, arguments.kind, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
