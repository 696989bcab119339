"""What the pages say of a real GPU: tables of bench/measured/h200.json, the results of `nox -s gpu` on one.

The file has the steps of bench/gpu as results.json has them. `regulator` is 1 where the library limited compute as before
docs/explanation/regulator.md; a newer run has no such field. Of two steps of the same name the later one is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.gpu.tenants import WORKS
from bench.gpu.verdicts import COMPUTED, is_same, of_process

RESULTS = Path(__file__).parents[2] / "bench/measured/h200.json"
_ISOLATIONS = ("gpushare", "mps")
_WORK = "PyTorch in 30, percent of the bare rate (busy by NVML)"
_CALLS = {
    "launch": "a launch",
    "launch_and_wait": "a launch that is waited for",
    "alloc_and_free": "a cuMemAlloc with its cuMemFree",
    "alloc_async_and_free": "a cuMemAllocAsync with its free",
    "mem_get_info": "a cuMemGetInfo",
}


@cache
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def find(isolation: str, step: str) -> Any:
    found = [one["found"] for one in results()["steps"] if (one["isolation"], one["step"]) == (isolation, step)]
    return found[-1] if found else None


def gpu_name() -> str:
    return str(results()["machine"]["gpu"])


Table = tuple[str, list[Sequence[str]]]
"""What stands before it, and its rows, the head first."""


def gpu_measured() -> Table:
    """What a user of each isolation has to know: shares alone and next to others, memory, costs."""
    rows = [
        _row("30 alone, 60 alone", lambda name: _percents([_pods(name, f"compute {n}")[0] for n in (30, 60)], ", ")),
        *(_row(_step_text(step), lambda name, step=step: _percents(_pods(name, step))) for step in _together()),
        _row("cuLaunchKernelEx, a graph, cooperative, in 30", lambda name: _percents(_kinds(name), ", ")),
        _row(_memory_head(), _memory),
        _row(
            "memory after `kill -9` is back in, s", lambda name: _cell((find(name, "killed") or {}).get("returned_s"))
        ),
        _row("50 steps come out as without a share", _programs),
    ]
    return _machine(), [("percent of the GPU's time, or as named", *_ISOLATIONS), *filter(_has_cells, rows)]


def gpu_regulator() -> Table:
    """What the regulator of the time made of programs that are no plain launches."""
    rows: list[Sequence[str]] = []
    if two := find("bare", "two programs"):
        rows.append(("two programs without limits", _percents([_of_bare(one) for one in two.values()])))
    works = [(kind, cell) for kind in WORKS if (cell := _work("gpushare", kind))]
    rows.append((f"{_WORK}: {', '.join(kind for kind, _ in works)}", ", ".join(cell for _, cell in works)))
    mixes = find("gpushare", "works 30+60") or {}
    mixed = [_percents([_of_bare(one) for one in pods.values()]) for pods in mixes.values()]
    rows.append((f"PyTorch in 30 and 60, of the bare rate: {', '.join(mixes)}", ", ".join(mixed)))
    rows.append(("kernels and copies in 99", _mixes("gpushare")))
    former = (
        "**The regulator of this page has not run on a real GPU yet.** `bench/measured/h200.json` is of the former."
    )
    return former if is_former() else f"{gpu_name()}:", [("percent", "gpushare"), *filter(_has_cells, rows)]


def gpu_two_shares() -> Mapping[str, str]:
    """What shares of 30 and 60 on one GPU got, by library; for the comparison of libraries."""
    return {name: _percents(_pods(name, "compute 30+60"), " and ") for name in ("gpushare", "hami-core")}


def is_former() -> bool:
    return results().get("regulator") == 1


def gpu_numbers() -> Table:
    """For the README: memory, compute alone and next to another share, and what the library costs."""
    alone = _percents([_pods("gpushare", f"compute {n}")[0] for n in (30, 60)], " and ")
    steps = [step for step in _together() if step in ("compute 30+60", "compute 30+60, again")]
    together = " %; a second time ".join(_percents(_pods("gpushare", step), " and ") for step in steps)
    kinds, bare = _memory_kinds("gpushare"), find("gpushare", "overhead")["bare"]["latency_us"]["launch"]["median"]
    rows = [
        ("share", "measured"),
        (
            f"{kinds[0]['share_mib']:,} MiB of memory",
            f"NVML counts {_span(of_process(one) or 0 for one in kinds)} MiB when the next allocation is refused",
        ),
        ("30 or 60 cores, alone", f"{alone} % of the GPU's time"),
        ("30 and 60 cores, together", f"{together} %"),
        ("99 cores", f"a launch took {bare + float(_added('gpushare', 'launch')):.2f} µs, without a share {bare:.2f}"),
    ]
    text = f"One {gpu_name()}, driver {results()['machine']['driver']}, isolation `gpushare`, by `nox -s gpu`"
    regulator = "[regulator](docs/explanation/regulator.md)"
    former = f"; compute was limited by a former {regulator}, **today's has not run on a GPU**" if is_former() else ""
    return f"{text}{former}:", list(rows)


def gpu_added() -> dict[str, str]:
    """What each kind of call takes more, in microseconds."""
    return {text: _added("gpushare", call) for call, text in _CALLS.items()}


# --- cells ---


def _row(what: str, cell: Callable[[str], str]) -> Sequence[str]:
    """A cell for each isolation."""
    return (what, *map(cell, _ISOLATIONS))


def _has_cells(row: Sequence[str]) -> bool:
    return any(row[1:])


def _machine() -> str:
    machine, context = results()["machine"], find("bare", "facts")
    return (
        f"{gpu_name()}, {machine['memory_mib']:,} MiB, driver {machine['driver']}, CUDA {machine['cuda']}; "
        f"{results()['started'][:10]}, agent {results()['package']['commit'][:8]}; a context takes "
        f"{context['context_mib']:.0f} MiB and {context['start_s']:.2f} s"
        + ("; gpushare with its former regulator:" if is_former() else ":")
    )


def _together() -> list[str]:
    """The steps in which several shares compute."""
    names = dict.fromkeys(one["step"] for one in results()["steps"] if one["step"].startswith("compute "))
    return sorted((name for name in names if "+" in name), key=lambda name: (name.count("+"), name))


def _step_text(step: str) -> str:
    numbers, comma, more = step.removeprefix("compute ").partition(",")
    return numbers.replace("+", " + ") + comma + more


def _cores(step: str) -> Mapping[str, int]:
    """Of each of its pods."""
    return COMPUTED[step.partition(",")[0]]


def _pods(isolation: str, step: str) -> list[float | None]:
    found = find(isolation, step) or {}
    return [_of_bare(found.get(pod)) for pod in _cores(step)]


def _of_bare(one: Mapping[str, Any] | None) -> float | None:
    return None if not one or one.get("of_bare") is None else 100 * float(one["of_bare"])


def _kinds(isolation: str) -> list[float | None]:
    return [_of_bare(find(isolation, f"launch {kind}")) for kind in ("ex", "graph", "cooperative")]


def _percents(values: Sequence[float | None], between: str = " + ") -> str:
    return "" if None in values else between.join(f"{value:.1f}" for value in values if value is not None)


def _work(isolation: str, kind: str) -> str:
    found = (find(isolation, "works 30") or {}).get(kind)
    if not found:
        return ""
    of_bare, busy = ("?" if one is None else f"{one:.0f}" for one in (_of_bare(found), found["nvml_percent"]))
    return f"{of_bare} ({busy})"


def _mixes(isolation: str) -> str:
    found = find(isolation, "overhead") or {}
    rates = [(found.get(name) or {}).get("mix_per_s") for name in ("bare", "share")]
    return f"{100 * rates[1] / rates[0]:.1f}" if all(rates) else ""


def _memory_kinds(isolation: str) -> list[Mapping[str, Any]]:
    steps = dict.fromkeys(one["step"] for one in results()["steps"] if one["step"].startswith("memory "))
    return [found for step in steps if (found := find(isolation, step)) is not None]


def _memory_head() -> str:
    kinds = _memory_kinds("gpushare")
    return f"MiB of {kinds[0]['share_mib']:,}, {len(kinds)} kinds: refused after; NVML has of the process"


def _memory(isolation: str) -> str:
    kinds = _memory_kinds(isolation)
    return (
        "" if not kinds else f"{_span(one['got_mib'] for one in kinds)}; {_span(of_process(one) or 0 for one in kinds)}"
    )


def _span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:,.0f}" + (f" to {ordered[-1]:,.0f}" if ordered[-1] > ordered[0] else "")


def _added(isolation: str, call: str) -> str:
    found = find(isolation, "overhead")
    if not found:
        return ""
    bare, share = (found[name]["latency_us"][call]["median"] for name in ("bare", "share"))
    return f"{share - bare:.2f}"


def _programs(isolation: str) -> str:
    bare, own = find("bare", "programs") or {}, find(isolation, "programs")
    if not own:
        return ""
    return ", ".join(name for name, one in bare.items() if one.get("steps") and is_same(own.get(name, {}), one))


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
