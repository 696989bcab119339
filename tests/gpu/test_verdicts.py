"""The verdicts of a GPU measurement: one for each line of what only a GPU can show."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.report import render
from bench.gpu.steps import utilization_shape
from bench.gpu.verdicts import LINES, NOT_MEASURED, as_text, is_same
from tests.gpu.test_report import recorded, row_of

SHARE = {"kind": "plain", "code": 2, "got_mib": 3576, "processes_mib": {"7": 66, "8": 4098}, "share_mib": 4096}
POOL = SHARE | {"kind": "pool", "processes_mib": {"8": 4099}}
MANAGED = SHARE | {"kind": "managed", "processes_mib": {"8": 522}}


def verdict(what: str, found: dict[str, Any], bare: dict[str, Any] | None = None) -> tuple[bool | None, str]:
    """Of the only line that begins so."""
    [judge] = [judge for name, _, judge in LINES if name.startswith(what)]
    return judge(found.get, (bare or {}).get)


@pytest.mark.parametrize("what", [what for what, _, _ in LINES])
def test_what_was_not_measured_is_neither_kept_nor_broken(what: str) -> None:
    assert verdict(what, {}) == NOT_MEASURED


def latency(launch: float, allocation: float) -> dict[str, Any]:
    return {"latency_us": {"launch": {"median": launch}, "alloc_and_free": {"median": allocation}}}


def compute(of_bare: float, at_first: float = 0.3) -> dict[str, Any]:
    return {"a": {"of_bare": of_bare, "at_first": at_first}}


def full(*of_bare: float) -> dict[str, Any]:
    return {pod: {"of_bare": one} for pod, one in zip("cde", of_bare, strict=True)}


def work(nvml_percent: float, of_bare: float) -> dict[str, Any]:
    return {"nvml_percent": nvml_percent, "of_bare": of_bare}


EVENTS = {"alone": {"median_us": 1000.0}, "streams": {"median_us": 3900.0}}
LAG = {"rise_s": 0.6, "full_s": 1.1, "fall_s": 0.7}


@pytest.mark.parametrize(
    ("what", "kept", "broken"),
    [
        ("the agent's", {"proof": {"state": "passed", "text": ""}}, {"proof": {"state": "failed", "text": ""}}),
        ("memory", {"memory plain": SHARE, "memory pool": SHARE | {"kind": "pool"}}, {"memory pool": POOL}),
        ("memory", {"memory managed": MANAGED}, {"memory managed": MANAGED | {"got_mib": 3577}}),
        ("memory", {"memory plain": SHARE}, {"memory plain": SHARE | {"code": 0}}),
        ("compute, points", {"compute 30": compute(0.329)}, {"compute 30": compute(0.331)}),
        ("compute, points", {"compute 30": compute(0.271)}, {"compute 30": compute(0.269)}),
        ("the same of a full", {"compute 20+30+50": full(0.18, 0.27, 0.44)}, {"compute 20+30+50": full(0.11, 0.31, 0.43)}),
        ("PyTorch", {"works 30": {"a": work(32.9, 0.4), "b": work(16, 0.97)}}, {"works 30": {"a": work(33.1, 0.4)}}),
        ("PyTorch", {"works 30": {"gemm": work(27, 0.3)}}, {"works 30": {"small": work(16, 0.9)}}),
        ("compute in", {"compute 30": compute(1, 0.39)}, {"compute 30": compute(0.3, 0.41)}),
        ("compute of", {"launch graph": {"of_bare": 0.3}}, {"launch graph": {"of_bare": 1.0}}),
        ("pools", {"reserved": {"driver_mib": 900, "slots_mib": 860}}, {"reserved": {"driver_mib": 900, "slots_mib": 800}}),
        (
            "a killed",
            {"killed": {"returned_s": 0.2, "next_mib": 3700, "held_mib": 2348}},
            {"killed": {"returned_s": 0.2, "next_mib": 1700, "held_mib": 2348}},
        ),
    ],
)  # fmt: skip
def test_a_bound_that_is_kept_and_one_that_is_not(what: str, kept: dict[str, Any], broken: dict[str, Any]) -> None:
    assert verdict(what, kept)[0] is True
    assert verdict(what, broken)[0] is False


def test_what_is_added_to_calls_is_against_the_bare_machine() -> None:
    """As it was in turn with the share."""

    def kept(launch: float, allocation: float) -> bool | None:
        return verdict("added", {"overhead": {"bare": latency(2.0, 10.0), "share": latency(launch, allocation)}})[0]

    assert (kept(2.4, 11.9), kept(2.6, 11.9), kept(2.4, 12.1)) == (True, False, False)


def test_the_drivers_own_measures_are_the_machines() -> None:
    assert verdict("the driver's events", {}, {"events": EVENTS}) == (True, "streams × 3.90")
    assert verdict("the driver's events", {}, {"events": EVENTS | {"x": {"median_us": 4100.0}}})[0] is False
    assert verdict("the driver's utilization", {}, {"utilization": LAG})[0] is True
    assert verdict("the driver's utilization", {}, {"utilization": LAG | {"fall_s": 2.0}})[0] is False


def test_programs_must_come_to_the_same_result() -> None:
    """Those that did not run on the bare machine either say nothing."""
    bare = {"cudart 13.0": {"steps": 50, "digest": "a"}, "jax": {"steps": 50, "result": 0.25}, "nccl": {"steps": 0}}
    own = {"cudart 13.0": {"steps": 50, "digest": "a"}, "jax": {"steps": 50, "result": 0.2501}}
    assert verdict("50 steps", {"programs": own}, {"programs": bare}) == (True, "cudart 13.0, jax")
    own["jax"]["result"] = 0.26
    assert verdict("50 steps", {"programs": own}, {"programs": bare}) == (False, "cudart 13.0; not jax")
    assert not is_same({}, bare["jax"])
    train = {"torch": {"train": {"steps": 50, "result": 1.0}}}
    assert verdict("50 steps", {"programs": {"x": 1}} | train, {"programs": {"nccl": {}}} | train) == (True, "torch")


def test_the_shape_of_a_load_is_read_from_the_drivers_samples() -> None:
    """Asked each 0.1 s for samples that are made each 0.2 s, of a program that computes from 1 s to 3 s."""
    second = 1_000_000
    percents = {1.2: 20, 1.4: 40, 1.6: 60, 1.8: 80, 2.0: 100, 2.8: 100, 3.2: 80, 3.4: 60, 3.6: 40, 3.8: 20}
    samples = [[int((at + 0.1) * second), 7, int(at * second), percent] for at, percent in percents.items()]
    shape = utilization_shape(samples, second, 3 * second)
    assert shape == {"rise_s": 0.7, "full_s": 1.1, "fall_s": 0.7, "period_s": 0.2, "age_s": 0.1}
    assert set(utilization_shape([], 0, 0).values()) == {None}


def test_the_report_has_the_verdicts_of_ours_beside_hami_core() -> None:
    results = recorded()
    ours = [{**step, "isolation": "gpushare"} for step in results["steps"] if step["isolation"] == "hami-core"]
    results["steps"] += ours
    report = render(results)
    assert "| what | bound | hami-core | gpushare |" in report
    assert "NO: " in row_of(report, "memory ends at the share, of each kind", "Verdicts")[2]
    assert as_text((True, "9")) == "yes: 9" and as_text(NOT_MEASURED) == "not measured"
