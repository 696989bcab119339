"""The steps of a measurement: each runs programs and returns what it found, as JSON values.

On the bare machine first, then in the containers of a sandbox under one isolation. A step that cannot be carried out raises
StepFailed. Units: MiB, seconds, microseconds; `work` is launches × blocks × rounds in millions, and a rate is work a second.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.machine import Nvml, python_with, smi_memory_mib, torch_python
from bench.gpu.programs import Line, Outcome, Program, StepFailed, run_in_turn, run_program
from bench.gpu.sandbox import BLOCK_MIB, PodShare, Sandbox, Surroundings, sample_of

MEMORY_KINDS = ("plain", "pitch", "managed", "async", "pool", "vmm", "array", "array3d", "mipmap")
LAUNCH_KINDS = ("plain", "ex", "graph", "cooperative")
SAME_WORK = {"plain", "ex", "graph"}
"""Their launches run the same kernel."""
KERNEL_US = 1000
SMALL, LARGE, NEARLY_ALL = 30, 60, 99
"""Cores of the three shares. 100 would be a whole GPU, which no isolation limits."""

_MOST_SHARE_MIB = 4096
OVER = 1.5
"""What the memory step asks for at most, in shares: more is known to be unlimited."""
START_S = 10.0
"""Of a program: the agent's `exec`, namespaces, cuInit and compiling the kernels."""
_PROBE_S = 25.0
_DUTY_BUSY_MS, _DUTY_PERIOD_MS = 20, 50
_XID_S = 3.0
POLL_S = 0.1
"""Of the driver's samples: five of them between two that the driver makes."""
_RETURN_S, _RETURN_POLL_S = 5.0, 0.005
_ROUNDS = 2
"""Of what is measured on the bare machine and in a share in turn."""
RESERVED_PART = 8
"""A pool, the GPU's own pool and a graph get so large a part of the share each."""

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long each thing is measured. `settle_s` is what the agent's and the driver's means of use look back."""

    bare_s: float = 1.2
    warm_up_s: float = 2.0
    compute_s: float = 8.0
    alone_s: float = 4.0
    kind_s: float = 3.0
    mix_s: float = 2.0
    latency_runs: int = 1000
    work_s: float = 3.0
    bare_work_s: float = 1.5
    together_s: float = 4.5
    trace_s: float = 0.8
    bias_runs: int = 200
    bias_s: float = 5.0
    rows_s: float = 4.0
    settle_s: float = 3.0
    usage_s: float = 5.0
    neighbour_s: float = 6.0
    events_s: float = 0.7
    busy_s: float = 3.0
    torch_s: float = 2.0


QUICK = Durations(
    bare_s=0.6, warm_up_s=0.6, compute_s=1.2, alone_s=0.8, kind_s=0.6, mix_s=0.5, latency_runs=60, settle_s=2.5,
    usage_s=1.5, neighbour_s=3.0, torch_s=1.0, events_s=0.4, busy_s=1.5, work_s=0.6, bare_work_s=0.4, together_s=0.8,
    trace_s=0.1, bias_runs=20, bias_s=1.0, rows_s=0.8,
)  # fmt: skip


@dataclass(slots=True)
class Bare:
    """What the bare machine gave, which later steps compare with."""

    rounds: int = 0
    grid: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    works: dict[str, float] = field(default_factory=dict)
    """Iterations a second of PyTorch programs (torch_work.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPU, the program, and where they run. `environment` is that of programs on the bare machine."""

    nvml: Nvml
    probe: str
    environment: Mapping[str, str]
    around: Surroundings
    memory_mib: int
    uuid: str
    durations: Durations = Durations()
    bare: Bare = field(default_factory=Bare)

    @property
    def share_mib(self) -> int:
        """Memory of each share: a quarter of the GPU, 4 GiB at most, in whole blocks."""
        return max(BLOCK_MIB, min(_MOST_SHARE_MIB, self.memory_mib // 4) // BLOCK_MIB * BLOCK_MIB)

    def probe_bare(
        self, *actions: str, timeout_s: float = 30.0, at_wait: Callable[[int], None] | None = None
    ) -> Outcome:
        command = [self.probe, *actions]
        return run_program(command, env=self.environment, timeout_s=timeout_s, at_wait=at_wait)

    def start_probe(self, *actions: str) -> Program:
        return Program([self.probe, *actions], env=self.environment)


def rate_of(line: Line) -> float:
    """Work a second, in millions. Raises StepFailed where the launches failed."""
    if line["code"]:
        raise StepFailed(f"{line['kind']}: {line['error']}")
    return float(line["work"]) / float(line["seconds"])


# --- the bare machine ---


def bare_facts(machine: Machine) -> Values:
    """What CUDA says of the GPU, the memory that a program without allocations takes, and the size of a kernel of 1 ms."""
    before, at_start = machine.nvml.used_mib(), []
    outcome = machine.probe_bare(
        "facts", "wait", f"work-for:{KERNEL_US}", at_wait=lambda _: at_start.append(machine.nvml.used_mib())
    )
    work = outcome.first("work-for")
    machine.bare.rounds, machine.bare.grid = work["rounds"], work["grid"]
    return {
        **without_action(outcome.first("facts")),
        "start_s": outcome.first("start")["seconds"],
        "context_mib": _difference(at_start[0] if at_start else None, before),
        "kernel_us": KERNEL_US,
        "rounds": work["rounds"],
        "grid": work["grid"],
    }


def bare_launches(machine: Machine) -> Values:
    """Rates with which shares are compared: of the kinds that run the same kernel it is the GPU's own, by two events around
    a launch: a program that waits for each one does not reach it."""
    outcome = machine.probe_bare(
        *(launch_action(machine, kind, machine.durations.bare_s) for kind in LAUNCH_KINDS), _events(machine, "alone"),
        timeout_s=30.0,
    )  # fmt: skip
    found: Values = {}
    for line in outcome.of("launch"):
        with contextlib.suppress(StepFailed):
            machine.bare.rates[line["kind"]] = rate_of(line)
        found[line["kind"]] = _rate_values(machine, line)
    if "plain" not in machine.bare.rates:
        raise StepFailed(f"no launches on the bare machine: {outcome.why()}")
    each = outcome.first("events").get("each", {}).get("median", 0)
    if each > 0:
        rate = machine.bare.grid * machine.bare.rounds / each
        machine.bare.rates |= dict.fromkeys(SAME_WORK & machine.bare.rates.keys(), rate)
    return found


def bare_torch(machine: Machine) -> Values:
    command = _torch_command(machine)
    return _torch_values(run_program(command, env=machine.environment, timeout_s=60.0))


def bare_events(machine: Machine) -> Values:
    """What two events say of a launch of 1 ms: alone, in four streams, and while another program computes."""
    seconds = machine.durations.events_s
    beside = machine.start_probe("wait", launch_action(machine, "plain", 2 * seconds + 1))
    try:
        alone = machine.probe_bare(_events(machine, "alone"), _events(machine, "streams"))
        beside.until_wait(START_S)
        beside.go()
        sliced = machine.probe_bare(_events(machine, "alone"))
    finally:
        beside.finish(2 * seconds + START_S)
    own, streams = alone.of("events")
    return {
        "alone": _event_values(own),
        "streams": _event_values(streams),
        "beside another program": _event_values(sliced.first("events")),
    }


def bare_utilization(machine: Machine) -> Values:
    """The driver's samples of a program that computes for some seconds, as they are, asked ten times a second."""
    seconds, samples = machine.durations.busy_s, []
    program = machine.start_probe("wait", f"busy:1:{seconds:g}")
    try:
        if program.until_wait(START_S):
            since_us = int(time.time() * 1e6)
            program.go()
            end = time.monotonic() + seconds + 2
            while time.monotonic() < end:
                asked_us = int(time.time() * 1e6)
                found = machine.nvml.utilization_samples(since_us)
                samples += [[asked_us, *one] for one in found]
                since_us = max([since_us, *(one[1] for one in found)])
                time.sleep(POLL_S)
    finally:
        line = program.finish(START_S).first("busy")
    return {
        **utilization_shape(samples, line["began_us"], line["ended_us"]),
        "samples": samples,
        "error": line["error"],
    }


def utilization_shape(samples: Sequence[Sequence[int]], began_us: int, ended_us: int) -> Values:
    """Of [asked at, PID, sampled at, percent], in seconds: how long after its begin a program is seen at half and at nine
    tenths of the GPU, how long after its end at less than half, the time between two samples, and how old one is when it
    can be read. Pure."""
    moments = sorted({one[2] for one in samples})
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments) if later > earlier]
    at_half = [one[0] for one in samples if one[3] >= 50]
    nearly_all = [one[0] for one in samples if one[3] >= 90]
    below = [one[0] for one in samples if one[0] > ended_us and one[3] < 50]
    over = min(below) if below else max(at_half, default=None)
    ages = [one[0] - one[2] for one in samples]
    return {
        "rise_s": _seconds(min(at_half) - began_us if at_half else None),
        "full_s": _seconds(min(nearly_all) - began_us if nearly_all else None),
        "fall_s": _seconds(over - ended_us if over is not None else None),
        "period_s": _seconds(statistics.median(gaps) if gaps else None),
        "age_s": _seconds(statistics.median(ages) if ages else None),
    }


def bare_programs(machine: Machine, runtimes: Mapping[str, str]) -> Values:
    return {
        name: _program_values(run_program(command, env=machine.environment, timeout_s=60.0))
        for name, command in _program_commands(machine, runtimes).items()
    }


# --- in containers ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """A running sandbox with the containers of its pods, by the pods' names."""

    machine: Machine
    sandbox: Sandbox
    containers: Mapping[str, Mapping[str, Any]]

    def probe(
        self, pod: str, *actions: str, timeout_s: float = 30.0, at_wait: Callable[[int], None] | None = None
    ) -> Outcome:
        return self.sandbox.run(pod, self.containers[pod], [self.machine.probe, *actions], timeout_s, at_wait)

    def start_probe(self, pod: str, *actions: str, uid: int = 0) -> Program:
        return self.start(pod, [self.machine.probe, *actions], uid)

    def start(self, pod: str, command: Sequence[str], uid: int = 0) -> Program:
        return self.sandbox.program(pod, self.containers[pod], command, uid)


def start_pods(machine: Machine, sandbox: Sandbox, cores: Mapping[str, int]) -> Pods:
    shares = [PodShare(name=name, cores=count, memory_mib=machine.share_mib) for name, count in cores.items()]
    return Pods(machine=machine, sandbox=sandbox, containers=sandbox.run_pods(shares))


def answered(pods: Pods) -> Values:
    """What the agent answered, so that the report shows under which wiring it was measured."""
    return {
        name: {
            "env": container["env"],
            "mounts": {mount["container_path"]: mount["host_path"] for mount in container["mounts"]},
            "devices": sorted(device["container_path"] for device in container["devices"]),
        }
        for name, container in sorted(pods.containers.items())
    }


def view(pods: Pods, pod: str) -> Values:
    """What a program in the container is shown of the GPU, and what the agent warned of."""
    seen = pods.probe(pod, "facts")
    smi = None
    if shutil.which("nvidia-smi", path=pods.machine.environment["PATH"]):
        smi = _smi_in(pods, pod)
    return {
        **without_action(seen.first("facts")),
        "start_s": seen.first("start")["seconds"],
        "nvidia_smi_total_mib": smi,
        "agent_warned": pods.sandbox.agent_warnings(),
    }


def memory(pods: Pods, pod: str, kind: str) -> Values:
    """How much of one kind of allocation a share gives. `gpu_mib` is what the whole GPU had in use more than before."""
    nvml, share = pods.machine.nvml, pods.machine.share_mib
    used: list[float | None] = []
    before = nvml.used_mib()
    processes: dict[int, float | None] = {}

    def at_wait(_: int) -> None:
        used.append(nvml.used_mib())
        processes.update(nvml.processes())

    outcome = pods.probe(pod, f"memory:{kind}:{int(share * OVER)}", "wait", at_wait=at_wait, timeout_s=START_S + 15)
    return {
        **without_action(outcome.first("memory")),
        "share_mib": share,
        "gpu_mib": _difference(used[0] if used else None, before),
        "processes_mib": processes,
    }


def launch_kind(pods: Pods, pod: str, kind: str) -> Values:
    durations = pods.machine.durations
    actions = launch_actions(pods.machine, kind, durations.kind_s)
    return kept(pods.machine, pods.probe(pod, *actions, timeout_s=START_S + durations.warm_up_s + durations.kind_s))


def overhead(pods: Pods, pod: str) -> Values:
    """Latencies and the mix on the bare machine and in the share in turn: a machine's moods change all calls by half."""
    machine = pods.machine
    actions = [action for _ in range(_ROUNDS) for action in ("wait", *_overhead_actions(machine))]
    programs = {"bare": machine.start_probe(*actions), "share": pods.start_probe(pod, *actions)}
    outcomes = run_in_turn(programs, _ROUNDS, machine.durations.mix_s + START_S, START_S)
    return {name: _overhead_values(outcome) for name, outcome in outcomes.items()}


def usage(pods: Pods, pod: str) -> Values:
    """A program that holds memory and computes two fifths of the time: the agent's metrics next to the driver's numbers."""
    held_mib = pods.machine.share_mib // 4
    durations = pods.machine.durations
    lasts_s = durations.settle_s + durations.usage_s
    program = pods.start_probe(
        pod, f"memory:plain:{held_mib}", "wait", f"duty:{_DUTY_BUSY_MS}:{_DUTY_PERIOD_MS}:{lasts_s:g}"
    )
    samples: list[Values] = []
    try:
        if program.until_wait(START_S):
            program.go()
            end = time.monotonic() + lasts_s - 0.3
            time.sleep(durations.settle_s)
            while time.monotonic() < end:
                samples.append(_usage_sample(pods, pod))
                time.sleep(0.5)
    finally:
        outcome = program.finish(START_S)
    duty = outcome.first("duty")
    return {
        "held_mib": held_mib,
        "busy_percent": round(100 * duty["busy_ratio"], 1),
        "error": duty["error"],
        "samples": samples,
        **{name: _median(sample[name] for sample in samples) for name in (samples[0] if samples else ())},
    }


def fault(pods: Pods, pod: str, neighbour: str) -> Values:
    """An illegal address in one pod: what the driver reports, what the agent makes of it, and how the neighbour fares."""
    machine = pods.machine
    other = pods.start_probe(neighbour, "wait", launch_action(machine, "plain", machine.durations.neighbour_s))
    try:
        if other.until_wait(START_S):
            other.go()
        machine.nvml.watch_xids()
        own = pods.probe(pod, "fault", timeout_s=START_S + 5)
        xids = machine.nvml.xids(_XID_S)
        events = _wait_for_events(pods)
    finally:
        outcome = other.finish(START_S + machine.durations.neighbour_s)
    line = own.first("fault")
    gpu = next(gpu for gpu in pods.sandbox.status()["node"]["gpus"] if gpu["uuid"] == machine.uuid)
    neighbours = outcome.of("launch")
    return {
        "code": line["code"],
        "error": line["error"],
        "driver_xids": xids,
        "agent_events": events,
        "agent_log": pods.sandbox.agent_log("(?i)xid"),
        "gpu_health": "Healthy" if gpu["is_healthy"] else "Unhealthy",
        "gpu_health_reason": gpu["health_reason"],
        "neighbour": neighbours[0]["error"] or "went on" if neighbours else outcome.why(),
    }


def probed(sandbox: Sandbox, isolation: str) -> Values:
    """The agent's own proof (isolation/gpushare/probe.py), which runs as soon as its GPU is idle."""
    deadline = time.monotonic() + _PROBE_S
    while time.monotonic() < deadline:
        found = next((one["probe"] for one in sandbox.isolations() if one["name"] == isolation), None)
        if found is not None and found["state"] != "skipped":
            return dict(found)
        time.sleep(0.5)
    raise StepFailed(f"no result: {found['text'] if found else 'it was not tried'}")


def reserved(pods: Pods, pod: str) -> Values:
    """What pools and graphs keep, in the driver's count of the program and, under gpushare, in the library's slots."""
    nvml, files = pods.machine.nvml, {}
    part = pods.machine.share_mib // RESERVED_PART

    def at_wait(_: int) -> None:
        files["driver_mib"] = sum(size for size in nvml.processes().values() if size is not None) or None
        files["slots_mib"] = _slots_mib(pods.containers[pod])

    outcome = pods.probe(pod, f"reserved:{part}", "wait", at_wait=at_wait, timeout_s=START_S + 15)
    return {**without_action(outcome.first("reserved")), **files}


def killed(pods: Pods, pod: str) -> Values:
    """How long after `kill -9` the memory of a program is back, and what the next one gets that starts at that moment."""
    machine, half = pods.machine, pods.machine.share_mib // 2
    before = machine.nvml.used_mib()
    program = pods.start_probe(pod, f"memory:plain:{half}", "wait")
    try:
        is_waiting = program.until_wait(START_S)
        held = machine.nvml.used_mib()
        killed_at = time.monotonic()
        program.kill()
        following = pods.start_probe(pod, f"memory:plain:{machine.share_mib}", "wait")
    finally:
        outcome = program.finish(0.0)
    try:
        returned_s = _until_returned(machine.nvml, before, held, killed_at)
        has_next = following.until_wait(START_S)
    finally:
        following.go()
        next_outcome = following.finish(START_S)
    if not is_waiting or before is None or held is None:
        raise StepFailed(outcome.why())
    got = next_outcome.first("memory") if has_next else {"got_mib": 0, "error": next_outcome.why()}
    return {
        "held_mib": round(held - before, 1),
        "returned_s": returned_s,
        "next_mib": got["got_mib"],
        "error": got["error"],
    }


def _until_returned(nvml: Nvml, before: float | None, held: float | None, since: float) -> float | None:
    """Until the GPU has half of that in use at most, for the next program may begin already; None where that is not seen."""
    if before is None or held is None:
        return None
    while (now := time.monotonic()) - since < _RETURN_S:
        used = nvml.used_mib()
        if used is not None and used < (before + held) / 2:
            return round(now - since, 3)
        time.sleep(_RETURN_POLL_S)
    return None


def programs(pods: Pods, pod: str, runtimes: Mapping[str, str]) -> Values:
    """CUDA runtimes and frameworks, each 50 steps, as `bare_programs`."""
    return {
        name: _program_values(pods.sandbox.run(pod, pods.containers[pod], command, timeout_s=START_S + 50))
        for name, command in _program_commands(pods.machine, runtimes).items()
    }


def torch(pods: Pods, pod: str) -> Values:
    command = _torch_command(pods.machine)
    return _torch_values(pods.sandbox.run(pod, pods.containers[pod], command, timeout_s=START_S + 50))


# --- parts ---


def launch_action(machine: Machine, kind: str, seconds: float) -> str:
    bare = machine.bare
    if not bare.rounds:
        raise StepFailed("the bare machine gave no size of a kernel to compare with")
    return f"launch:{kind}:{seconds:g}:{bare.rounds}:{bare.grid}"


def _events(machine: Machine, kind: str) -> str:
    bare, durations = machine.bare, machine.durations
    return f"events:{kind}:{durations.events_s:g}:{bare.rounds}:{bare.grid}"


def _event_values(line: Line) -> Values:
    each = line.get("each") or {}
    return {
        "error": line["error"],
        "median_us": each.get("median"),
        "p90_us": each.get("p90"),
        "wall_us": line["wall_us"],
    }


def _program_commands(machine: Machine, runtimes: Mapping[str, str]) -> dict[str, list[str]]:
    """Of what is packed, or on the machine."""
    here, most = Path(__file__).parent, str(int(machine.share_mib * OVER))
    found = {
        f"cudart {version}": [sys.executable, str(here / "cudart_program.py"), path, most]
        for version, path in sorted(runtimes.items())
    }
    for name, package in (("nccl", "torch"), ("jax", "jax")):
        if (python := python_with(package, dict(machine.environment))) is not None:
            found[name] = [python, str(here / "frameworks_program.py"), name]
    return found


def _program_values(outcome: Outcome) -> Values:
    lines = {line["action"]: without_action(line) for line in outcome.lines if "action" in line}
    own = next((lines[name] for name in ("cudart", "nccl", "jax") if name in lines), {})
    return {
        **own,
        "allocated_mib": lines.get("allocate", {}).get("got_mib"),
        "ended": outcome.why() if outcome.code else "",
    }


def usage_path(container: Mapping[str, Any]) -> Path | None:
    """Where the host has libgpushare's `usage` of a container; None under another isolation."""
    from gpushare_agent.agent.isolation.gpushare.format import USAGE_NAME

    found = (m["host_path"] for m in container["mounts"] if m["container_path"].endswith(f"/{USAGE_NAME}"))
    return next(map(Path, found), None)


def _slots_mib(container: Mapping[str, Any]) -> float | None:
    """What libgpushare's processes say that they have; None of another isolation."""
    from gpushare_agent.agent.isolation.gpushare.format import read_held

    if (path := usage_path(container)) is None:
        return None
    return round(read_held(path.read_bytes(), 1)[0] / (1 << 20), 1)


def _seconds(microseconds: float | None) -> float | None:
    return None if microseconds is None else round(microseconds / 1e6, 3)


def launch_actions(machine: Machine, kind: str, seconds: float) -> tuple[str, str]:
    """Plain launches first: HAMi-core lets 8,650,752 blocks pass on an H100 before it limits anything (measured)."""
    return launch_action(machine, "plain", machine.durations.warm_up_s), launch_action(machine, kind, seconds)


def kept(machine: Machine, outcome: Outcome) -> Values:
    """Of the launches after the first ones, whose rate is `at_first`."""
    lines = [line for line in outcome.of("launch") if "failed" not in line]
    if len(lines) != 2:
        raise StepFailed(outcome.why())
    at_first = _rate_values(machine, lines[0])
    return {**_rate_values(machine, lines[1]), "at_first": at_first.get("of_bare"), "error_at_first": at_first["error"]}


def _rate_values(machine: Machine, line: Line) -> Values:
    """`of_bare` is the rate compared with the bare machine's of the same kind; `windows` likewise, of half a second each."""
    if line["code"]:
        return {"error": line["error"], "code": line["code"]}
    rate, bare = rate_of(line), machine.bare.rates.get(line["kind"], 0.0)
    window_work = 2 * 1e-6 * line["grid"] * line["rounds"]
    windows = [round(count * window_work / bare, 4) for count in line["windows"]] if bare else []
    return {
        "error": "",
        "rate": round(rate, 3),
        "launches_per_s": round(line["launches"] / line["seconds"], 1),
        "of_bare": round(rate / bare, 4) if bare else None,
        "windows": windows,
    }


def _overhead_actions(machine: Machine) -> tuple[str, ...]:
    bare, durations = machine.bare, machine.durations
    return (f"latency:{durations.latency_runs}", f"mix:{durations.mix_s:g}:{max(1, bare.rounds // 10)}:{bare.grid}")


def _overhead_values(outcome: Outcome) -> Values:
    """The median round of each call; `mix_windows` are the first round's mixes in half seconds."""
    outcome.first("latency"), outcome.first("mix")
    rounds, mixes = outcome.of("latency"), outcome.of("mix")
    lasted_s = sum(mix["seconds"] for mix in mixes)
    failed = next((mix["error"] for mix in mixes if mix["code"]), "")
    return {
        "latency_us": {
            call: found if "error" in found else _median_of([one[call] for one in rounds if "error" not in one[call]])
            for call, found in rounds[0].items()
            if isinstance(found, dict)
        },
        "mix_us": _median_of([mix["each"] for mix in mixes if "each" in mix]),
        "mix_per_s": None if failed or not lasted_s else round(sum(mix["count"] for mix in mixes) / lasted_s, 2),
        "mix_windows": mixes[0]["windows"],
        "error": failed,
    }


def _median_of(quantiles: Sequence[Mapping[str, float]]) -> Values | None:
    """Of several rounds' quantiles of the same thing."""
    if not quantiles:
        return None
    return {name: round(statistics.median(one[name] for one in quantiles), 3) for name in quantiles[0]}


def _torch_command(machine: Machine) -> list[str]:
    python = torch_python(dict(machine.environment))
    if python is None:
        raise StepFailed("no Python with PyTorch is here")
    script = str(Path(__file__).with_name("torch_program.py"))
    return [python, script, str(int(machine.share_mib * OVER)), str(machine.durations.torch_s)]


def _torch_values(outcome: Outcome) -> Values:
    found = {
        action: without_action(line)
        for action in ("torch", "allocate", "matmul", "graph", "train")
        for line in outcome.of(action)
    }
    if "torch" not in found:
        raise StepFailed(outcome.why())
    return {**found, "ended": "" if outcome.code == 0 else outcome.why()}


def _usage_sample(pods: Pods, pod: str) -> Values:
    metrics = ""
    with contextlib.suppress(OSError):
        metrics = pods.sandbox.metrics()
    sm = sample_of(metrics, "gpushare_container_sm_utilization_ratio", pod=pod)
    held = sample_of(metrics, "gpushare_container_memory_used_bytes", pod=pod)
    nvml = pods.machine.nvml
    memory_of = [size for size in nvml.processes().values() if size is not None]
    busy = nvml.process_utilization(1.0)
    return {
        "agent_percent": None if sm is None else round(100 * sm, 1),
        "agent_mib": None if held is None else round(held / (1 << 20), 1),
        "driver_percent": round(sum(busy.values()), 1) if busy else None,
        "driver_mib": round(sum(memory_of), 1) if memory_of else None,
        "gpu_percent": nvml.utilization(),
    }


def _wait_for_events(pods: Pods) -> list[str]:
    """The agent's counters of the driver's events, without its comments; waits for the first one."""
    deadline = time.monotonic() + _XID_S
    while True:
        with contextlib.suppress(OSError):
            lines = [
                line for line in pods.sandbox.metrics().splitlines() if line.startswith("gpushare_gpu_events_total{")
            ]
            if lines or time.monotonic() > deadline:
                return lines
        if time.monotonic() > deadline:
            return []
        time.sleep(0.2)


def _smi_in(pods: Pods, pod: str) -> int | None:
    """The GPU's memory as `nvidia-smi` shows it in the container."""
    program = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    command = pods.sandbox.command_inside(pod, pods.containers[pod], program)
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, text=True, timeout=START_S, check=False, stdin=subprocess.DEVNULL,
            env=dict(pods.machine.around.agent_environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return smi_memory_mib(done.stdout)


def without_action(line: Line) -> Values:
    return {name: value for name, value in line.items() if name != "action"}


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else round(after - before, 1)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None
