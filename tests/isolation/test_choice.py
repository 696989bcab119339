"""Isolation auto: what is chosen from what is found, and that the reason says why."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpushare_agent.isolation.choice import Choice, NodeFindings, choose
from gpushare_agent.model.gpus import KernelModule

SIMPLE = HAMI, MPS, VCUDA, DRIVER = "hami-core", "mps", "vcuda", "driver"
OPEN_565 = KernelModule(version="565.57.01", is_open=True)


def chosen(*usable: str, **others: object) -> Choice:
    problems = {name: "" if name in usable else f"no {name} here" for name in SIMPLE}
    return choose(NodeFindings(problems=problems, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (SIMPLE, HAMI),
        ((MPS, VCUDA), MPS),
        ((VCUDA,), VCUDA),
        ((), HAMI),
        ((DRIVER,), HAMI),
    ],
)
def test_the_first_that_can_be_had_is_chosen(usable: tuple[str, ...], expected: str) -> None:
    """HAMi-core, MPS, vcuda; without any HAMi-core, whose shares are refused with the cure."""
    assert chosen(*usable).isolation == expected


def test_the_reason_names_what_was_missing() -> None:
    """An operator who expected something else finds it there."""
    assert "no hami-core here" in chosen(MPS).reason and "an MPS daemon answers" in chosen(MPS).reason
    assert "no isolation can be had" in chosen().reason and "no hami-core here" in chosen().reason


def test_exclusive_gpus_need_mps() -> None:
    """Also while its daemon does not answer: nobody else may open such a GPU."""
    for usable in ((HAMI, MPS), (HAMI,)):
        found = chosen(*usable, is_exclusive_process=True)
        assert found.isolation == MPS and "EXCLUSIVE_PROCESS" in found.reason


def test_where_hami_core_sees_no_use_of_compute_mps_goes_before_it() -> None:
    """But is better than nothing: memory it keeps."""
    assert chosen(HAMI, MPS, module=OPEN_565).isolation == MPS
    assert "565.57.01" in chosen(HAMI, MPS, module=OPEN_565).reason
    assert chosen(HAMI, VCUDA, module=OPEN_565).isolation == HAMI


def test_running_containers_keep_their_library() -> None:
    """A restart of the agent must not take it from them, whatever else is there now."""
    assert chosen(HAMI, MPS, VCUDA, running=frozenset({VCUDA})).isolation == VCUDA
    assert chosen(MPS, running=frozenset({HAMI})).isolation == HAMI
    assert "containers run" in chosen(MPS, running=frozenset({HAMI})).reason


def test_the_drivers_limits_are_added_where_the_agent_sets_them() -> None:
    """Elsewhere nobody knows whether NVIDIA's toolkit does."""
    assert chosen(HAMI, DRIVER).isolation == HAMI
    assert chosen(HAMI, DRIVER, sets_driver_limits=True).isolation == "hami-core+driver"
    assert chosen(MPS, DRIVER, sets_driver_limits=True).isolation == "mps+driver"
    assert chosen(DRIVER, sets_driver_limits=True).isolation == DRIVER
    assert chosen(VCUDA, DRIVER, sets_driver_limits=True).isolation == VCUDA


def test_none_is_never_chosen_and_a_reason_is_never_missing() -> None:
    """Whatever is found: shares are kept by something, or refused."""
    for count in range(len(SIMPLE) + 1):
        for usable in combinations(SIMPLE, count):
            for is_exclusive in (False, True):
                for sets in (False, True):
                    found = chosen(*usable, is_exclusive_process=is_exclusive, sets_driver_limits=sets, module=OPEN_565)
                    assert found.isolation not in ("none", "auto")
                    assert found.reason and not found.reason.endswith(".")
