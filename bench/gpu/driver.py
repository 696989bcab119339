"""The steps that ask the driver itself, on the bare machine or between containers: turns of contexts, what events say, NVML.

As steps.py, whose values these are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench.gpu.machine import WAYS
from bench.gpu.programs import Program, run_together
from bench.gpu.steps import KERNEL_US, POLL_S, START_S, Machine, Values, launch_action, without_action

TRACED_US = (100, 1000, 5000, 20000)
"""How long the kernels are whose turns are traced."""
_WAVES = 8
"""Of blocks in a kernel of work-for; one of `trace` has all its blocks on the GPU at once, and as much work."""
_SINCE = ("newest seen", "a second ago", "ever")
_DUTY_MS = 3, 10
_MOST_ROWS = 300


def turns(machine: Machine, count: int) -> Values:
    """So many programs with full queues of kernels of the same length, for each length: by the GPU's timer how long a turn
    is and what a change of turns loses, how often a kernel was interrupted, and what two events say of it."""
    durations, bare = machine.durations, machine.bare
    actions: list[str] = []
    for length_us in TRACED_US:
        rounds = max(1, bare.rounds * _WAVES * length_us // KERNEL_US)
        actions += ["wait", f"trace:{durations.trace_s:g}:{rounds}:{max(1, bare.grid // _WAVES)}"]
    programs = {str(index): machine.start_probe(*actions) for index in range(count)}
    outcomes = run_together(programs, [durations.trace_s] * len(TRACED_US), START_S)
    traced = [outcome.of("trace") for outcome in outcomes.values()]
    return {
        f"{length_us / 1000:g} ms": {
            **turns_of([lines[stage]["turns"] for lines in traced]),
            **_lines_of(traced, stage),
        }
        for stage, length_us in enumerate(TRACED_US)
        if all(stage < len(lines) for lines in traced)
    }


def _lines_of(traced: Sequence[Sequence[Mapping[str, Any]]], stage: int) -> Values:
    lines = [of_program[stage] for of_program in traced]
    launches = sum(line["launches"] for line in lines)
    interruptions = sum(max(0, line["pairs"] - line["launches"]) for line in lines)
    medians = [line["each"]["median"] for line in lines if "each" in line]
    return {
        "launches": launches,
        "interruptions_per_kernel": round(interruptions / launches, 3) if launches else None,
        "events_median_us": statistics.median(medians) if medians else None,
        "events_p90_us": max((line["each"]["p90"] for line in lines if "each" in line), default=None),
        "error": next((line["error"] for line in lines if line["error"]), ""),
    }


def turns_of(by_program: Sequence[Sequence[Sequence[int]]]) -> Values:
    """Of [begin, end] in nanoseconds of one timer, of programs that compute at the same time: while all do, how long a turn
    is, how long a program waits for its next one, how many changes there are, and what of the time nobody had, by change
    and by the whole. None where nothing was traced. Pure."""
    none = dict.fromkeys(("turn_ms", "turn_p90_ms", "away_ms", "changes", "loss_us", "lost_percent"))
    if not all(by_program):
        return dict(none)
    since, until = max(turns[0][0] for turns in by_program), min(turns[-1][1] for turns in by_program)
    inside = [[turn for turn in turns if turn[0] >= since and turn[1] <= until] for turns in by_program]
    order = sorted((begin, end, owner) for owner, turns in enumerate(inside) for begin, end in turns)
    if until <= since or len(order) < 2:
        return dict(none)
    changes = [(one[1], other[0]) for one, other in pairwise(order) if one[2] != other[2]]
    lost = [max(0, begin - end) for end, begin in changes]
    lasted = sorted(end - begin for begin, end, _ in order)
    away = [later[0] - turn[1] for turns in inside for turn, later in pairwise(turns)]
    return {
        "turn_ms": round(statistics.median(lasted) / 1e6, 3),
        "turn_p90_ms": round(lasted[len(lasted) * 9 // 10] / 1e6, 3),
        "away_ms": round(statistics.median(away) / 1e6, 3) if away else None,
        "changes": len(changes),
        "loss_us": round(statistics.median(lost) / 1e3, 1) if lost else None,
        "lost_percent": round(100 * sum(lost) / (order[-1][1] - order[0][0]), 1),
    }


def bias(machine: Machine, own: Callable[..., Program], other: Callable[..., Program]) -> Values:
    """What events and a query cost, and what they say of each other: alone, and next to a program that computes."""
    bare = machine.bare
    action = f"bias:{machine.durations.bias_runs}:{bare.rounds}:{bare.grid}"
    next_to = other("wait", launch_action(machine, "plain", machine.durations.bias_s))
    try:
        next_to.until_wait(START_S)
        alone = own(action).finish(START_S)
        next_to.go()
        shared = own(action).finish(START_S)
    finally:
        next_to.finish(START_S)  # to its own end: who kills a client of MPS may break it for the others
    return {
        name: without_action(outcome.first("bias"))
        for name, outcome in (("alone", alone), ("next to another program", shared))
    }


def utilization_rows(machine: Machine) -> Values:
    """Which processes NVML's answers name while a program computes all the time and another 3 of 10 ms: by both functions,
    each asked with several time stamps. `rows` are [asked at, PID, sampled at, percent], microseconds."""
    seconds = machine.durations.rows_s
    programs = {
        "all the time": machine.start_probe("wait", launch_action(machine, "plain", seconds)),
        "3 of 10 ms": machine.start_probe("wait", f"duty:{_DUTY_MS[0]}:{_DUTY_MS[1]}:{seconds:g}"),
    }
    rows: dict[str, list[list[int]]] = {}
    errors: dict[str, str] = {}

    def ask() -> None:
        began_us = int(time.time() * 1e6)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for way in WAYS:
                for since in _SINCE:
                    asked_us, key = int(time.time() * 1e6), f"{way}, {since}"
                    known = rows.setdefault(key, [])
                    newest_us = max((row[2] for row in known), default=began_us)
                    stamp = {"newest seen": newest_us, "a second ago": asked_us - 1_000_000, "ever": 0}[since]
                    found = machine.nvml.utilization_by(way, stamp)
                    if isinstance(found, str):
                        errors.setdefault(key, found)
                    else:
                        known += [[asked_us, *one] for one in found]
            time.sleep(POLL_S)

    try:
        for program in programs.values():
            program.until_wait(START_S)
        for program in programs.values():
            program.go()
        ask()
    finally:
        outcomes = [program.finish(START_S) for program in programs.values()]
    return {
        "busy_percent": [round(100 * line["busy_ratio"], 1) for outcome in outcomes for line in outcome.of("duty")],
        "ways": {
            key: {**rows_shape(found), "error": errors.get(key, ""), "rows": found[-_MOST_ROWS:]}
            for key, found in rows.items()
        },
    }


def rows_shape(rows: Sequence[Sequence[int]]) -> Values:
    """Of such rows: answers with any, most processes in one answer, rows by process (most first), mean percent. Pure."""
    answers: dict[int, set[int]] = {}
    by_pid: dict[int, set[int]] = {}
    for asked_us, pid, at_us, _ in rows:
        answers.setdefault(asked_us, set()).add(pid)
        by_pid.setdefault(pid, set()).add(at_us)
    return {
        "answers": len(answers),
        "most_processes": max(map(len, answers.values()), default=0),
        "rows_by_process": sorted(map(len, by_pid.values()), reverse=True),
        "percent": round(statistics.mean(row[3] for row in rows), 1) if rows else None,
    }
