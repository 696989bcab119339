"""A verdict for each line of what only a GPU can show: whether its bound is kept, by the numbers of a run. Pure.

A line is judged by `find`, which has what a step of one isolation found (steps.py), and `bare`, the same of the machine
itself. The bounds are those that the library was built for; docs/explanation/isolation.md has what of them a fake
driver shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COMPARED = ("gpushare", "hami-core")
"""Ours, and the competitor."""
MOST_POINTS, MOST_FIRST_POINTS = 3.0, 10.0
"""Of the GPU's time, by which compute may differ from its share; and in a program's first seconds."""
COMPUTED: Mapping[str, Mapping[str, int]] = {
    "compute 30": {"a": 30}, "compute 60": {"b": 60}, "compute 30+60": {"a": 30, "b": 60},
    "compute 20+30+50": {"c": 20, "d": 30, "e": 50},
}  # fmt: skip
"""The cores of the pods that compute in a step."""
GRANULE_MIB = 2
"""The driver's pages: a share is exact to one of them."""
LEAST_RATE = 0.95
"""Of the bare machine's, of a program that does not use its share up."""
MOST_LAUNCH_US, MOST_ALLOCATION_US = 0.5, 2.0
MOST_UNCOUNTED_MIB = 64.0
MOST_RETURN_S = 1.0
MOST_EVENT_RATIO = 4.0
"""A cost that is so far off is put right by what the driver shows (tests/gpushare/test_compute.py)."""
MOST_LAG_S = 1.6
"""Utilization is measured over a second, and is a while on its way."""
MOST_RESULT_RATIO = 1e-3
"""Between the same 50 steps in a share and without: no framework promises the same bits."""

Find = Callable[[str], Any]
Verdict = tuple[bool | None, str]
"""Whether the bound is kept, None where it was not measured, and the numbers."""
NOT_MEASURED: Verdict = (None, "not measured")

_MEMORY_KINDS = ("plain", "pitch", "managed", "async", "pool", "vmm", "array", "array3d", "mipmap")
_LAUNCH_KINDS = ("ex", "graph", "cooperative")


def _proof(find: Find, _: Find) -> Verdict:
    found = find("proof")
    return NOT_MEASURED if found is None else (found["state"] == "passed", found["text"])


def _memory(find: Find, _: Find) -> Verdict:
    found = {kind: one for kind in _MEMORY_KINDS if (one := find(f"memory {kind}")) is not None}
    over = [kind for kind, one in found.items() if not one["code"] or over_mib(one)]
    text = f"{len(found) - len(over)} of {len(found)}" + (f", not {', '.join(over)}" if over else "")
    return (not over, text) if found else NOT_MEASURED


def of_process(found: Mapping[str, Any]) -> float | None:
    """What NVML has of the process that allocated, the largest; under MPS there is a server too. Managed memory, which NVML
    counts for no process, as it was asked for."""
    known = max((mib for mib in found["processes_mib"].values() if mib is not None), default=None)
    return known + found["got_mib"] if known is not None and found["kind"] == "managed" else known


def over_mib(found: Mapping[str, Any]) -> float:
    """By how much NVML's number of the process is above the share, where that is more than a granule."""
    over = (of_process(found) or 0.0) - float(found["share_mib"])
    return over if over > GRANULE_MIB else 0.0


def _off(cores: float, share: Mapping[str, Any] | None, key: str = "of_bare") -> float | None:
    return None if not share or share.get(key) is None else 100 * float(share[key]) - cores


def _within(values: Mapping[str, float | None], most: float) -> Verdict:
    known = {name: value for name, value in values.items() if value is not None}
    text = ", ".join(f"{name}: {value:+.1f}" for name, value in known.items())
    return (max(map(abs, known.values())) <= most, text) if known else NOT_MEASURED


def _compute(find: Find, _: Find) -> Verdict:
    values = {
        f"{cores} of {step.removeprefix('compute ')}": _off(cores, (find(step) or {}).get(pod))
        for step, pods in COMPUTED.items()
        if sum(pods.values()) < 100
        for pod, cores in pods.items()
    }
    return _within(values, MOST_POINTS)


def _full(find: Find, _: Find) -> Verdict:
    """What all lose by taking turns is lost by each alike: judged is what a share has of what all had together."""
    found = find("compute 20+30+50")
    if not found:
        return NOT_MEASURED
    pods = COMPUTED["compute 20+30+50"]
    rates = {pod: float((found.get(pod) or {}).get("of_bare") or 0.0) for pod in pods}
    if not (together := sum(rates.values())):
        return NOT_MEASURED
    kept, text = _within({str(cores): 100 * rates[pod] / together - cores for pod, cores in pods.items()}, MOST_POINTS)
    return kept, f"{text}; together {100 * together:.0f} % of the bare rate"


def _works(find: Find, _: Find) -> Verdict:
    """A program has the time of its share, or its rate where it does not use that up."""
    found = {kind: one for kind, one in (find("works 30") or {}).items() if "of_bare" in one and one["nvml_percent"]}
    wrong = [
        kind
        for kind, one in found.items()
        if abs(one["nvml_percent"] - 30) > MOST_POINTS
        and (one["nvml_percent"] > 30 or (one["of_bare"] or 0) < LEAST_RATE)
    ]
    text = ", ".join(f"{kind}: {one['nvml_percent']:g} %" for kind, one in found.items())
    return (not wrong, text) if found else NOT_MEASURED


def _first_seconds(find: Find, _: Find) -> Verdict:
    values = {
        "30": _off(30, (find("compute 30") or {}).get("a"), "at_first"),
        "60": _off(60, (find("compute 60") or {}).get("b"), "at_first"),
    }
    return _within(values, MOST_FIRST_POINTS)


def _launch_kinds(find: Find, _: Find) -> Verdict:
    return _within({kind: _off(30, find(f"launch {kind}")) for kind in _LAUNCH_KINDS}, MOST_POINTS)


def _added_us(find: Find, call: str) -> float | None:
    found = find("overhead") or {}
    cells = [(found.get(name) or {}).get("latency_us", {}).get(call, {}).get("median") for name in ("bare", "share")]
    return None if None in cells else cells[1] - cells[0]


def _overhead(find: Find, _: Find) -> Verdict:
    launch, allocation = _added_us(find, "launch"), _added_us(find, "alloc_and_free")
    if launch is None or allocation is None:
        return NOT_MEASURED
    is_kept = launch <= MOST_LAUNCH_US and allocation <= MOST_ALLOCATION_US
    return is_kept, f"a launch {launch:+.2f} µs, an allocation with its free {allocation:+.2f} µs"


def _reserved(find: Find, _: Find) -> Verdict:
    found = find("reserved")
    if found is None or found["driver_mib"] is None or found["slots_mib"] is None:
        return NOT_MEASURED
    difference = found["driver_mib"] - found["slots_mib"]
    return abs(difference) <= MOST_UNCOUNTED_MIB, f"{difference:+.0f} MiB of {found['driver_mib']:.0f}"


def _killed(find: Find, _: Find) -> Verdict:
    found = find("killed")
    if found is None or found["returned_s"] is None:
        return NOT_MEASURED
    is_kept = found["returned_s"] <= MOST_RETURN_S and found["next_mib"] >= found["held_mib"]
    return is_kept, f"{found['returned_s']:g} s; the next one got {found['next_mib']} MiB"


def _programs(find: Find, bare: Find) -> Verdict:
    own, of_bare = find("programs"), bare("programs")
    if not own or not of_bare:
        return NOT_MEASURED
    own, of_bare = dict(own), dict(of_bare)
    if (torch := (find("torch") or {}).get("train")) and (torch_bare := (bare("torch") or {}).get("train")):
        own["torch"], of_bare["torch"] = torch, torch_bare
    ran = [name for name, one in of_bare.items() if one.get("steps")]
    wrong = [name for name in ran if not is_same(own.get(name, {}), of_bare[name])]
    text = f"{', '.join(name for name in ran if name not in wrong) or 'none'}" + (
        f"; not {', '.join(wrong)}" if wrong else ""
    )
    return (not wrong, text) if ran else NOT_MEASURED


def is_same(own: Mapping[str, Any], bare: Mapping[str, Any]) -> bool:
    """As many steps, and what came out of them."""
    if own.get("steps") != bare.get("steps") or own.get("digest") != bare.get("digest"):
        return False
    one, other = own.get("result"), bare.get("result")
    return one == other if one is None or other is None else abs(one - other) <= MOST_RESULT_RATIO * abs(other)


def _events(_: Find, bare: Find) -> Verdict:
    found = bare("events")
    if not found or not found["alone"]["median_us"]:
        return NOT_MEASURED
    ratios = {name: one["median_us"] / found["alone"]["median_us"] for name, one in found.items() if one["median_us"]}
    text = ", ".join(f"{name} × {ratio:.2f}" for name, ratio in ratios.items() if name != "alone")
    return max(ratios.values()) <= MOST_EVENT_RATIO, text


def _lag(_: Find, bare: Find) -> Verdict:
    found = bare("utilization")
    if not found or found["rise_s"] is None:
        return NOT_MEASURED
    seen = {"half": found["rise_s"], "nine tenths": found["full_s"], "gone": found["fall_s"]}
    text = ", ".join(f"{name} after {value:g} s" for name, value in seen.items() if value is not None)
    return max(value for value in seen.values() if value is not None) <= MOST_LAG_S, text


LINES: Sequence[tuple[str, str, Callable[[Find, Find], Verdict]]] = (
    ("the agent's own proof", "passes", _proof),
    ("memory ends at the share, of each kind", "all", _memory),
    ("compute, points off the share", f"{MOST_POINTS:g}", _compute),
    ("the same of a full GPU, of what all had", f"{MOST_POINTS:g}", _full),
    ("PyTorch programs at 30: the time of the share, or the bare rate", f"{MOST_POINTS:g}", _works),
    ("compute in a program's first seconds", f"{MOST_FIRST_POINTS:g}", _first_seconds),
    ("compute of other launches, in 30", f"{MOST_POINTS:g}", _launch_kinds),
    ("added to calls", f"{MOST_LAUNCH_US:g} and {MOST_ALLOCATION_US:g} µs", _overhead),
    ("pools and graphs: the driver's count beyond the slots", f"{MOST_UNCOUNTED_MIB:g} MiB", _reserved),
    ("a killed program's memory is back, for the next one", f"{MOST_RETURN_S:g} s", _killed),
    ("50 steps come out as without a share", "all", _programs),
    ("the driver's events, against a launch alone", f"× {MOST_EVENT_RATIO:g}", _events),
    ("the driver's utilization of a program that begins, ends", f"{MOST_LAG_S:g} s", _lag),
)


def as_text(verdict: Verdict) -> str:
    is_kept, text = verdict
    return text if is_kept is None else f"yes: {text}" if is_kept else f"**NO: {text}**"
