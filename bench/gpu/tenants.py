"""The steps with several containers at once, and with PyTorch programs; what `usage` and NVML say meanwhile.

As steps.py, whose values these are. State owned: the thread that records a series, for as long as a stage lasts.
"""

from __future__ import annotations

import re
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.gpu.machine import torch_python
from bench.gpu.programs import Outcome, Program, StepFailed, run_in_turn, run_together
from bench.gpu.sandbox import ROOT
from bench.gpu.steps import (
    POLL_S,
    START_S,
    Machine,
    Pods,
    Values,
    kept,
    launch_action,
    launch_actions,
    usage_path,
    without_action,
)

WORKS = ("gemm", "small", "train", "mem", "streams")
MIXES = ("gemm", "small"), ("small", "gemm"), ("train", "mem")
"""What two containers compute at the same time."""
_FIRST_GPU = 512
_TORCH_START_S = 40.0
_MPS_USERS_S = 6.0
_NOBODY = 65534


def compute(pods: Pods, names: Sequence[str], seconds: float) -> Values:
    """Plain launches of 1 ms in each of these pods, at the same time; `series` is what was seen meanwhile."""
    machine = pods.machine
    actions = ("wait", *launch_actions(machine, "plain", seconds))
    programs = {name: pods.start_probe(name, *actions) for name in names}
    series = Series(pods, programs)
    outcomes = run_together(programs, [machine.durations.warm_up_s + seconds], START_S, series.stage)
    return {name: kept(machine, outcome) for name, outcome in outcomes.items()} | {"series": series.stages}


def works(pods: Pods, pod: str, kinds: Sequence[str] = WORKS) -> Values:
    """PyTorch programs on the bare machine and in the share in turn, the first iterations of a model before them."""
    machine, durations = pods.machine, pods.machine.durations
    programs = {
        "bare": Program(_work_command(machine, ["first"], kinds, durations.bare_work_s), env=machine.environment),
        "share": pods.start(pod, _work_command(machine, ["first"], kinds, durations.work_s)),
    }
    series = Series(pods, {pod: programs["share"]})
    outcomes = run_in_turn(
        programs, 1 + len(kinds), durations.work_s + START_S, _TORCH_START_S,
        lambda name: series.stage(name) if name == "share" else series.nothing(),
    )  # fmt: skip
    bare = {line["kind"]: line for line in outcomes["bare"].of("work")}
    machine.bare.works |= {kind: line["count"] / line["seconds"] for kind, line in bare.items()}
    found = _work_values(machine, outcomes["share"], series.stages[1:])
    if not found:
        raise StepFailed("; ".join(f"{name}: {outcome.why()}" for name, outcome in outcomes.items()))
    return {
        "first_s": {
            name: outcome.of("first")[0]["seconds"] for name, outcome in outcomes.items() if outcome.of("first")
        },
        **{one["kind"]: one for one in found},
        "ended": {name: outcome.why() for name, outcome in outcomes.items() if outcome.code},
    }


def mixed_works(pods: Pods, names: Sequence[str]) -> Values:
    """Two PyTorch programs at the same time, each pair of MIXES after the other."""
    durations = pods.machine.durations
    programs = {
        name: pods.start(name, _work_command(pods.machine, [], [mix[index] for mix in MIXES], durations.together_s))
        for index, name in enumerate(names)
    }
    series = Series(pods, programs)
    outcomes = run_together(programs, [durations.together_s] * len(MIXES), _TORCH_START_S, series.stage)
    found = {name: _work_values(pods.machine, outcome, series.stages) for name, outcome in outcomes.items()}
    if not any(found.values()):
        raise StepFailed("; ".join(f"{name}: {outcome.why()}" for name, outcome in outcomes.items()))
    return {
        " + ".join(mix): {name: of_pod[stage] for name, of_pod in found.items() if stage < len(of_pod)}
        for stage, mix in enumerate(MIXES)
    }


def mps_users(pods: Pods, one: str, other: str) -> Values:
    """Root computes in one container: does another user's program start in the other one, and when root's has ended?"""
    actions = ("wait", launch_action(pods.machine, "plain", 0.5))
    programs = {"root": pods.start_probe(one, *actions)}
    starts = dict.fromkeys(("next_to_root", "after_root"), False)
    try:
        if programs["root"].until_wait(START_S):
            programs["other"] = second = pods.start_probe(other, *actions, uid=_NOBODY)
            starts["next_to_root"] = second.until_wait(_MPS_USERS_S)
            programs["root"].go()
            programs["root"].until_wait(START_S)  # until its end
            starts["after_root"] = starts["next_to_root"] or second.until_wait(_MPS_USERS_S)
            second.go()
    finally:
        outcomes = {name: program.finish(_MPS_USERS_S) for name, program in programs.items()}
    if "other" not in outcomes:
        raise StepFailed(outcomes["root"].why())
    return {**starts, "ended": {name: outcome.why() for name, outcome in outcomes.items()}}


# --- parts ---


def _work_command(machine: Machine, before: Sequence[str], kinds: Sequence[str], seconds: float) -> list[str]:
    """It waits before each action."""
    python = torch_python(dict(machine.environment))
    if python is None:
        raise StepFailed("no Python with PyTorch is here")
    actions = [*before, *(f"{kind}:{seconds:g}" for kind in kinds)]
    waiting = [word for action in actions for word in ("wait", action)]
    return [python, str(Path(__file__).with_name("torch_work.py")), *waiting]


def _work_values(machine: Machine, outcome: Outcome, stages: Sequence[Values]) -> list[Values]:
    """`nvml_percent` is the whole GPU's use: of a program that computes alone it is the time that it had."""
    found = []
    for line, stage in zip(outcome.of("work"), stages, strict=False):
        bare, rate = machine.bare.works.get(line["kind"]), line["count"] / line["seconds"]
        found.append({
            **without_action(line),
            "rate": round(rate, 2),
            "of_bare": round(rate / bare, 4) if bare else None,
            "nvml_percent": stage["nvml_percent"],
            "series": stage,
        })  # fmt: skip
    return found


class Series:
    """Ten times a second: each container's numbers in `usage`, and NVML's rows of processes, asked with the newest time
    stamp seen. In `stages`, one for each stage:

        columns, usage    [second, pod, a number for each column]; empty without libgpushare
        nvml              [sampled at, pod, percent, asked at], seconds from the stage's begin
        nvml_percent      mean of the rows of the last two thirds; None where there are none
    """

    def __init__(self, pods: Pods, programs: Mapping[str, Program]) -> None:
        self._nvml = pods.machine.nvml
        self._pids = {program.pid: name for name, program in programs.items()}
        paths = {name: usage_path(pods.containers[name]) for name in programs}
        self._files = {name: path for name, path in paths.items() if path is not None}
        self.stages: list[Values] = []

    @contextmanager
    def stage(self, _: object) -> Iterator[None]:
        columns = usage_columns((ROOT / "native" / "gpushare" / "format.h").read_text()) if self._files else {}
        found: Values = {"columns": list(columns), "usage": [], "nvml": []}
        over = threading.Event()
        thread = threading.Thread(target=self._record, args=(found, columns, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            last = max((row[0] for row in found["nvml"]), default=0.0)
            late = [row[2] for row in found["nvml"] if row[0] > last / 3]
            found["nvml_percent"] = round(statistics.mean(late), 1) if late else None
            self.stages.append(found)

    @contextmanager
    def nothing(self) -> Iterator[None]:
        yield

    def _record(self, found: Values, columns: Mapping[str, tuple[int, str]], over: threading.Event) -> None:
        began = time.time()
        newest_us, owners = int(began * 1e6), dict[int, str]()
        while not over.wait(POLL_S):
            asked = time.time()
            for name, path in self._files.items():
                with path.open("rb") as file:
                    head = file.read(_FIRST_GPU + 256)
                numbers = [struct.unpack_from(code, head, _FIRST_GPU + at)[0] for at, code in columns.values()]
                found["usage"].append([round(asked - began, 2), name, *numbers])
            for pid, at_us, percent in self._nvml.utilization_samples(newest_us):
                newest_us = max(newest_us, at_us)
                owner = owners.get(pid) or owners.setdefault(pid, self._owner(pid))
                found["nvml"].append([round(at_us / 1e6 - began, 3), owner, percent, round(asked - began, 3)])

    def _owner(self, pid: int) -> str:
        """The program from which the process descends; its PID where that is none of these."""
        ancestor = pid
        while ancestor > 1 and ancestor not in self._pids:
            try:
                ancestor = int(Path(f"/proc/{ancestor}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                break
        return self._pids.get(ancestor, str(pid))


def usage_columns(header: str) -> dict[str, tuple[int, str]]:
    """The numbers of compute in libgpushare's struct usage_gpu: offset and struct's code, by the text of format.h. Pure."""
    body = re.sub(r"/\*.*?\*/", "", header.partition("struct usage_gpu {")[2].partition("};")[0], flags=re.S)
    found: dict[str, tuple[int, str]] = {}
    at = 0
    for kind, names in re.findall(r"\b(uint64_t|int64_t|double) ([^;]+);", body):
        for name in names.split(","):
            found[name.strip()] = (at, {"uint64_t": "Q", "int64_t": "q", "double": "d"}[kind])
            at += 8
    left_out = {"changed_at", "unattributed", "refused", "earned", "refilled_at", "sampled_at"}
    return {name: place for name, place in found.items() if name not in left_out and not name.endswith("_at_sample")}
