"""The results of a run as Markdown. Pure: the same results give the same text.

`results` is results.json: `machine`, `package`, `plan`, and `steps`, each with `isolation` ("bare" for the machine itself),
`step`, `state` (done, failed, skipped), `reason`, `seconds` and `found`, which is what the functions of steps.py return.
What a step did not find is an empty cell, and why is in the last table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.gpu.verdicts import (
    COMPARED,
    COMPUTED,
    GRANULE_MIB,
    LINES,
    as_text,
    is_same,
    of_process,
    over_mib,
)

Found = Mapping[str, Any]

_UNITS = {"launch": "launch", "launch_and_wait": "launch and wait", "alloc_and_free": "cuMemAlloc and free",
          "alloc_async_and_free": "cuMemAllocAsync and free", "mem_get_info": "cuMemGetInfo"}  # fmt: skip
_BARE = "bare"


def render(results: Mapping[str, Any]) -> str:
    """The whole report; also of a run that has not ended."""
    steps = {(step["isolation"], step["step"]): step for step in results["steps"]}
    names = list(dict.fromkeys(step["isolation"] for step in results["steps"] if step["isolation"] != _BARE))
    measured = [name for name in names if _found(steps, name, "pods") is not None]
    parts = [
        _head(results),
        _verdicts(steps, [name for name in measured if name in COMPARED]),
        _machine(results, _found(steps, _BARE, "facts")),
        _memory(steps, measured, results["plan"]["share_mib"]),
        _compute(steps, measured, results["plan"]["cores"]),
        _works(steps, measured),
        _launches(steps, measured),
        _overhead(steps, measured),
        _driver(_found(steps, _BARE, "events"), _found(steps, _BARE, "utilization")),
        _turns(steps),
        _bias(steps, measured),
        _rows(_found(steps, _BARE, "rows")),
        _users(steps, measured),
        _kept_memory(steps, measured),
        _programs(steps, measured),
        _usage(steps, measured),
        _faults(steps, measured),
        _torch(steps, measured),
        _wiring(steps, measured),
        _not_done(results["steps"]),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _found(steps: Mapping[tuple[str, str], Found], isolation: str, step: str) -> Any:
    return steps.get((isolation, step), {}).get("found")


def _head(results: Mapping[str, Any]) -> str:
    took = f", {results['took_s']:g} s" if "took_s" in results else ", not ended"
    namespaces = (
        "Programs ran in mount and PID namespaces with the environment, mounts and device nodes that the agent answered."
        if not results["namespaces"]
        else f"No namespaces here ({results['namespaces']}): libraries were preloaded and paths set by hand."
    )
    commit = results["package"]["commit"][:12]
    return f"# What the isolations keep on a real GPU\n\n{results['started']}{took}. Agent {commit}. {namespaces}"


def _machine(results: Mapping[str, Any], bare: Found | None) -> str:
    machine = results["machine"]
    rows = [
        ("GPU", f"{machine['gpu']}, {machine['memory_mib']} MiB; {machine['gpus']} on the machine"),
        ("driver", f"{machine['driver']}, CUDA {machine['cuda']}"),
        ("kernel module", machine["kernel_module"]),
        ("kernel, cgroups", f"{machine['kernel']}, {machine['cgroups']}"),
        ("PyTorch", machine["torch"] or "none"),
        ("MPS control", machine["mps_control"] or "none"),
        ("NVML's memory limits for cgroups", "yes" if machine["has_memory_limits"] else "no"),
        ("libraries", ", ".join(results["package"]["libraries"]) or "none"),
        *((f"no {name}", reason) for name, reason in results["package"]["missing"].items()),
    ]
    if bare is not None:
        rows.append(("compute capability", f"{bare['capability']}, {bare['multiprocessors']} multiprocessors"))
        rows.append(("a context alone", f"{_mib(bare['context_mib'])} of the GPU, {bare['start_s']:.2f} s to start"))
    return "## Machine\n\n" + _table(("", ""), rows)


def _verdicts(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    if not names:
        return ""
    bare = partial(_found, steps, _BARE)
    rows = [
        (what, bound, *(as_text(judge(partial(_found, steps, name), bare)) for name in names))
        for what, bound, judge in LINES
    ]
    return "## Verdicts\n\n" + _table(("what", "bound", *names), rows)


def _memory(steps: Mapping[tuple[str, str], Found], names: Sequence[str], share_mib: int) -> str:
    kinds = _steps_named(steps, "memory ")
    if not kinds:
        return ""
    views = [(name, _found(steps, name, "view")) for name in names]
    shown = [
        f"{name}: CUDA says {view['total_mib']} MiB, cuMemGetInfo {view['info_total_mib']} MiB, nvidia-smi "
        f"{'?' if view['nvidia_smi_total_mib'] is None else view['nvidia_smi_total_mib']} MiB"
        for name, view in views
        if view is not None
    ]
    rows = [(kind, *(_memory_cell(_found(steps, name, f"memory {kind}")) for name in names)) for kind in kinds]
    text = (
        f"## Memory: a share of {share_mib} MiB\n\nAllocated until refused; in brackets what NVML has of the process, the "
        f"context included. Exact is a bracket of at most a granule ({GRANULE_MIB} MiB) above the share. Managed memory, "
        "which NVML counts for no process, is added as it was asked for.\n\n"
    )
    warned = [f"{name}: {text}" for name, view in views if view is not None for text in view["agent_warned"]]
    below = [("Shown to the program", shown), ("The agent warned", list(dict.fromkeys(warned)))]
    lines = [f"{what}: {'; '.join(texts)}." for what, texts in below if texts]
    return "\n\n".join([text + _table(("allocation", *names), rows), *lines])


def _memory_cell(found: Found | None) -> str:
    if found is None:
        return ""
    process_mib = of_process(found)
    used = "" if process_mib is None else f" ({process_mib:g})"
    if not found["code"]:
        return f"**{found['got_mib']}{used}, no limit met**"
    over = over_mib(found)
    return f"{found['got_mib']}{used}{f', **{over:g} over**' if over else ''}, {found['error']}"


def _compute(steps: Mapping[tuple[str, str], Found], names: Sequence[str], cores: Sequence[int]) -> str:
    together = sorted({len(name.split("+")) for name in _steps_named(steps, "compute ")})
    if not together:
        return ""
    columns = [
        (f"{count}" + (f" next to {' and '.join(others)}" if others else " alone"), step, pod)
        for step, pods in COMPUTED.items()
        for pod, count in pods.items()
        if len(pods) in together
        for others in [[str(other) for name, other in pods.items() if name != pod]]
    ]
    rows = [
        (name, *(_share_cell((_found(steps, name, step) or {}).get(pod)) for _, step, pod in columns)) for name in names
    ]
    return (
        "## Compute: launches of 1 ms\n\nPercent of what the bare machine does, without the first seconds; in brackets the "
        "tenth and ninetieth percentile of windows of half a second.\n\n"
        + _table(("isolation", *(head for head, _, _ in columns)), rows)
    )


def _works(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    """Of PyTorch programs."""
    rows = []
    for name in names:
        alone, mixes = _found(steps, name, "works 30") or {}, _found(steps, name, "works 30+60") or {}
        for kind, one in alone.items():
            if "of_bare" in one:
                rows.append((name, f"{kind} in 30", _work_cell(one)))
        for mix, pods in mixes.items():
            rows.append((name, f"{mix} in 30 and 60", "; ".join(map(_work_cell, pods.values()))))
        for where, seconds in alone.get("first_s", {}).items():
            cell = ", ".join(f"{one:g}" for one in seconds)
            rows.append((name, f"first iterations of a model of many kernels, {where}", f"{cell} s"))
    if not rows:
        return ""
    return (
        "## PyTorch programs in shares\n\nPercent of their rate on the bare machine, measured in turn with it. NVML's "
        "number is the whole GPU's use: of a program alone the time that it had.\n\n"
        + _table(("isolation", "program", ""), rows)
    )


def _work_cell(found: Found) -> str:
    of_bare = "?" if found["of_bare"] is None else _percent(found["of_bare"])
    return f"{of_bare} % of the rate, NVML {'?' if found['nvml_percent'] is None else found['nvml_percent']} %"


def _share_cell(found: Found | None) -> str:
    if found is None:
        return ""
    if found["error"]:
        return str(found["error"])
    if found["of_bare"] is None:
        return f"{found['launches_per_s']:g}/s"
    windows = sorted(found.get("windows", ()))
    spread = f" ({_percent(_quantile(windows, 0.1))}–{_percent(_quantile(windows, 0.9))})" if len(windows) > 1 else ""
    return f"{_percent(found['of_bare'])} %{spread}"


def _launches(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    kinds = _steps_named(steps, "launch ")
    if not kinds:
        return ""
    bare = _found(steps, _BARE, "launches") or {}
    rows = []
    for kind in kinds:
        own = bare.get(kind)
        own_cell = "" if own is None else own["error"] or f"{own['launches_per_s']:g}/s"
        rows.append((kind, own_cell, *(_share_cell(_found(steps, name, f"launch {kind}")) for name in names)))
    return (
        "## Compute: other ways to launch, in the share of 30\n\nPercent of the bare machine's rate of the same kind.\n\n"
        + _table(("launch", "bare machine", *names), rows)
    )


def _overhead(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    columns = [(name, found) for name in names if (found := _found(steps, name, "overhead")) is not None]
    if not columns:
        return ""
    rows: list[tuple[str, ...]] = [
        (
            f"{text}, µs",
            *(_pair_cell(*(of["latency_us"].get(call) for of in _bare_and_share(found))) for _, found in columns),
        )
        for call, text in _UNITS.items()
    ]
    rows.append(
        ("one of the mix, µs", *(_pair_cell(*(of["mix_us"] for of in _bare_and_share(found))) for _, found in columns))
    )
    rows.append((
        "mixes a second",
        *(" → ".join(of["error"] or f"{of['mix_per_s']:g}" for of in _bare_and_share(found)) for _, found in columns),
    ))  # fmt: skip
    return (
        "## Overhead: the bare machine → a share of 99 cores, in turn\n\nMedian; in brackets the tenth and ninetieth "
        "percentile in the share. The mix: ten kernels of 0.1 ms, a copy of 32 MiB, setting 32 MiB.\n\n"
        + _table(("", *(name for name, _ in columns)), rows)
    )


def _bare_and_share(found: Found) -> tuple[Found, Found]:
    return found["bare"], found["share"]


def _pair_cell(bare: Found | None, share: Found | None) -> str:
    before = f"{bare['median']:.1f} → " if bare and "median" in bare else ""
    return before + _quantiles_cell(share)


def _quantiles_cell(found: Found | None) -> str:
    if not found:
        return ""
    if "error" in found:
        return str(found["error"])
    spread = f" ({found['p10']:.1f}–{found['p90']:.1f})" if "p10" in found else ""
    return f"{found['median']:.1f}{spread}"


def _driver(events: Found | None, utilization: Found | None) -> str:
    parts = []
    if events is not None:
        rows = [
            (name, one["error"] or f"{one['median_us']:.0f} ({one['p90_us']:.0f})", f"{one['wall_us']:.0f}")
            for name, one in events.items()
        ]
        head = ("a launch of 1 ms", "two events say, µs: median (ninetieth percentile)", "of the program's time, µs")
        parts.append(_table(head, rows))
    if utilization is not None:
        names = {
            "rise_s": "half of the GPU is seen after",
            "full_s": "nine tenths after",
            "fall_s": "less than half again after its end",
            "period_s": "between two samples",
            "age_s": "age of a sample",
        }
        found = [f"{text} {utilization[name]:g} s" for name, text in names.items() if utilization[name] is not None]
        parts.append(f"NVML's utilization of a program, asked ten times a second: {'; '.join(found) or 'no sample'}.")
    return "## The driver's own measures\n\n" + "\n\n".join(parts) if parts else ""


def _turns(steps: Mapping[tuple[str, str], Found]) -> str:
    rows = []
    for count in _steps_named(steps, "turns of "):
        for length, one in (_found(steps, _BARE, f"turns of {count}") or {}).items():
            cells = [
                one[key]
                for key in (
                    "turn_ms", "away_ms", "loss_us", "lost_percent", "interruptions_per_kernel", "events_median_us",
                    "events_p90_us",
                )
            ]  # fmt: skip
            rows.append((count, length, *(one["error"] or ("" if cell is None else f"{cell:g}") for cell in cells)))
    if not rows:
        return ""
    head = (
        "programs", "kernels of", "a turn, ms", "until the next, ms", "a change loses, µs", "of the time, %",
        "interruptions of a kernel", "two events say, µs", "ninetieth percentile",
    )  # fmt: skip
    return "## Turns of contexts with full queues, by the GPU's timer\n\n" + _table(head, rows)


def _bias(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    columns = [
        (f"{name}, {where}", found)
        for name in (_BARE, *names)
        for where, found in (_found(steps, name, "bias") or {}).items()
    ]
    if not columns:
        return ""
    texts = {
        "first_event_is_done": "an event of an idle GPU is done after", "call_of_a_launch": "a launch's call",
        "call_of_a_measured_launch": "the same with three events", "call_of_a_query": "a query's call",
        "empty_kernel_idle": "two events around an empty kernel, idle",
        "two_events_idle": "two events behind each other, idle",
        "empty_kernel_queued": "around an empty kernel, full queue",
        "two_events_queued": "behind each other, full queue", "across_streams_off": "events of two streams differ by",
        "union_less_wall": "the union of two streams less the program's time",
    }  # fmt: skip
    rows = [(f"{text}, µs", *(_quantiles_cell(of.get(key)) for _, of in columns)) for key, text in texts.items()]
    rows.append(("such an event within 4 µs", *(f"{of['within_4_us']} of {of['runs']}" for _, of in columns)))
    rows.append(
        (
            "done when the launch behind it returns",
            *(f"{of['done_behind_the_launch']} of {of['runs']}" for _, of in columns),
        )
    )
    return "## What events cost and say\n\n" + _table(("", *(head for head, _ in columns)), rows)


def _rows(found: Found | None) -> str:
    if found is None:
        return ""
    rows = [
        (
            way, one["answers"] or one["error"], one["most_processes"], ", ".join(map(str, one["rows_by_process"])),
            "?" if one["percent"] is None else f"{one['percent']:g}",
        )
        for way, one in found["ways"].items()
    ]  # fmt: skip
    head = ("asked, since", "answers with rows", "processes in one", "rows by process", "mean, %")
    busy = ", ".join(f"{one:g}" for one in found["busy_percent"])
    return (
        f"## NVML's rows of two programs\n\nOne computes all the time, the other has kernels for {busy or '?'} % of it.\n\n"
        + _table(head, rows)
    )


def _users(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    found = [(name, one) for name in names if (one := _found(steps, name, "users")) is not None]
    rows = [
        (
            name, *("yes" if one[key] else "no" for key in ("next_to_root", "after_root")),
            *(_one_line(one["ended"].get(user, "")) for user in ("root", "other")),
        )
        for name, one in found
    ]  # fmt: skip
    head = (
        "isolation",
        "another user's program starts next to root's",
        "after it",
        "root's ended by",
        "the other one's by",
    )
    return "## A container of another user\n\n" + _table(head, rows) if rows else ""


def _kept_memory(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        kept, killed = _found(steps, name, "reserved"), _found(steps, name, "killed")
        if kept is None and killed is None:
            continue
        cells = [(kept or {}).get(key) for key in ("pool_mib", "own_pool_mib", "graph_mib", "driver_mib", "slots_mib")]
        cells += [(killed or {}).get(key) for key in ("returned_s", "next_mib")]
        rows.append((name, *("?" if cell is None else f"{cell:g}" for cell in cells)))
    if not rows:
        return ""
    head = ("isolation", "a pool", "the GPU's pool", "a graph", "driver", "slots", "after kill -9, s", "the next got")
    return "## Memory that was given back, MiB\n\nReserved after all was freed.\n\n" + _table(head, rows)


def _programs(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    bare = _found(steps, _BARE, "programs")
    if not bare:
        return ""
    rows = []
    for program, own in bare.items():
        cells = [own["ended"] or f"{own.get('steps', '?')} steps"]
        for name in names:
            found = (_found(steps, name, "programs") or {}).get(program)
            if found is None:
                cells.append("")
            elif found["ended"]:
                cells.append(_one_line(found["ended"]))
            else:
                same = "the same" if is_same(found, own) else "**another result**"
                cells.append(f"{same}, {found['allocated_mib'] or '?'} MiB")
        rows.append((program, *cells))
    return "## CUDA runtimes and frameworks, 50 steps, in a share of 99 cores\n\n" + _table(
        ("program", "bare machine", *names), rows
    )


def _usage(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        found = _found(steps, name, "usage")
        if found is None:
            continue
        cells = [
            found.get(key) for key in ("agent_percent", "driver_percent", "gpu_percent", "agent_mib", "driver_mib")
        ]
        rows.append((name, f"{found['busy_percent']:g} %", *("?" if cell is None else f"{cell:g}" for cell in cells)))
    if not rows:
        return ""
    head = (
        "isolation",
        "kernels ran",
        "agent, % SM",
        "driver's processes, %",
        "driver's GPU, %",
        "agent, MiB",
        "driver, MiB",
    )
    return "## Usage: the agent's metrics next to the driver's numbers\n\nMedians of some seconds.\n\n" + _table(
        head, rows
    )


def _faults(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    rows = []
    for name in names:
        found = _found(steps, name, "fault")
        if found is None:
            continue
        xids = ", ".join(map(str, found["driver_xids"])) or "none"
        events = "; ".join(event.removeprefix("gpushare_gpu_events_total") for event in found["agent_events"]) or "none"
        health = found["gpu_health"] + (f": {found['gpu_health_reason']}" if found["gpu_health_reason"] else "")
        rows.append((name, found["error"] or "no error", xids, events.replace("|", "/"), health, found["neighbour"]))
    if not rows:
        return ""
    head = ("isolation", "the program got", "Xids", "the agent counted", "the GPU is", "the neighbour")
    return "## An illegal address in one container\n\n" + _table(head, rows)


def _torch(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    rows = []
    for name in (_BARE, *names):
        found = _found(steps, name, "torch")
        if found is None:
            continue
        own, got, matmul, graph = (found.get(key) or {} for key in ("torch", "allocate", "matmul", "graph"))
        rows.append((
            name, f"{own.get('import_s', '?')} + {own.get('init_s', '?')}", f"{own.get('total_mib', '?')}",
            f"{got.get('got_mib', '?')}" + (f", {got['error']}" if got.get("error") else ""),
            f"{matmul.get('tflops', '?')}", f"{graph.get('tflops', '?')}", found["ended"],
        ))  # fmt: skip
    if not rows:
        return ""
    head = (
        "isolation",
        "import and start, s",
        "memory shown, MiB",
        "allocated, MiB",
        "matmul, TFLOP/s",
        "in a graph",
        "ended by",
    )
    return "## PyTorch, in a share of 99 cores\n\n" + _table(head, rows)


def _wiring(steps: Mapping[tuple[str, str], Found], names: Sequence[str]) -> str:
    lines = []
    for name in names:
        found = _found(steps, name, "pods")
        container = found["a"]
        variables = " ".join(f"{key}={value}" for key, value in sorted(container["env"].items()))
        mounts = " ".join(sorted(container["mounts"])) or "none"
        devices = " ".join(container["devices"]) or "none"
        lines.append(f"- **{name}**: environment `{variables}`; mounts {mounts}; devices {devices}")
    return "## What the agent answered for the share of 30\n\n" + "\n".join(lines) if lines else ""


def _not_done(steps: Iterable[Found]) -> str:
    rows = [
        (step["isolation"], step["step"], step["state"], _one_line(step["reason"]))
        for step in steps
        if step["state"] != "done"
    ]
    return "## Not measured\n\n" + _table(("isolation", "step", "", "why"), rows) if rows else ""


# --- text ---


def _steps_named(steps: Mapping[tuple[str, str], Found], prefix: str) -> list[str]:
    """The rest of the names of the steps that begin so, in their order."""
    return list(dict.fromkeys(name.removeprefix(prefix) for _, name in steps if name.startswith(prefix)))


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("\n", " ") for cell in line) + " |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:400]


def _mib(value: float | None) -> str:
    return "? MiB" if value is None else f"{value:g} MiB"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f}" if ratio >= 0.1 else f"{100 * ratio:.1f}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest of the ordered values; their median where there are fewer than three."""
    if len(ordered) < 3:
        return statistics.median(ordered)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
