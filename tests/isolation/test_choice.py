"""Isolation auto: what is chosen from what is found, and that the reason says why."""

from __future__ import annotations

from itertools import combinations

import pytest

from gpushare_agent.agent.gpus.simulated.driver import SimulatedDriver
from gpushare_agent.agent.isolation.choice import Candidate, Choice, choose
from gpushare_agent.agent.isolation.part import build_probes
from gpushare_agent.core.settings.settings import load_settings

STANDINGS = {
    name: probe.standing
    for name, probe in build_probes(load_settings(["--driver=simulated"], {}).settings, SimulatedDriver).items()  # type: ignore[arg-type]
}
SIMPLE = OURS, MPS, VCUDA, DRIVER = "gpushare", "mps", "vcuda", "driver"


def chosen(*usable: str, running: tuple[str, ...] = (), is_exclusive: bool = False) -> Choice:
    problems = {name: "" if name in usable else f"no {name} here" for name in STANDINGS}
    candidates = [
        Candidate(name=name, standing=standing, problem=problems[name], is_running=name in running)
        for name, standing in STANDINGS.items()
    ]
    return choose(candidates, is_exclusive_process=is_exclusive)


def test_every_isolation_that_limits_has_a_place_of_its_own() -> None:
    assert sorted(STANDINGS) == sorted(SIMPLE)
    assert len({one.place for one in STANDINGS.values()}) == len(SIMPLE)


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (SIMPLE[:-1], OURS),
        ((MPS, VCUDA), MPS),
        ((VCUDA,), VCUDA),
        ((DRIVER,), DRIVER),
        ((), OURS),
    ],
)
def test_the_first_that_can_be_had_is_chosen(usable: tuple[str, ...], expected: str) -> None:
    """gpushare, MPS, vcuda, the driver alone; without any gpushare, whose shares are refused with the cure."""
    assert chosen(*usable).isolation == expected


def test_the_reason_names_what_was_missing() -> None:
    """An operator who expected something else finds it there."""
    found = chosen(MPS)
    assert found.reason == "an MPS daemon answers; gpushare cannot be had (no gpushare here)"
    assert chosen(OURS, MPS).reason == "libgpushare is there for this machine"
    assert "no isolation can be had" in chosen().reason and all(f"no {name} here" in chosen().reason for name in SIMPLE)


def test_exclusive_gpus_need_mps() -> None:
    """Also while its daemon does not answer: nobody else may open such a GPU."""
    for usable in ((OURS, MPS), (OURS,)):
        found = chosen(*usable, is_exclusive=True)
        assert found.isolation == MPS and "EXCLUSIVE_PROCESS" in found.reason


def test_running_containers_keep_their_library() -> None:
    """A restart of the agent must not take it from them, whatever else is there now."""
    assert chosen(OURS, MPS, VCUDA, running=(VCUDA,)).isolation == VCUDA
    found = chosen(OURS, MPS, running=(VCUDA,))
    assert found.isolation == VCUDA and "containers run" in found.reason
    assert chosen(OURS, VCUDA, running=(VCUDA, OURS)).isolation == OURS


def test_the_drivers_limits_are_added_where_the_agent_sets_them() -> None:
    """Elsewhere nobody knows whether NVIDIA's toolkit does, and its check says so."""
    for name in (OURS, MPS):
        assert chosen(name).isolation == name
        assert chosen(name, DRIVER).isolation == f"{name}+driver"
    assert chosen(VCUDA, DRIVER).isolation == VCUDA
    assert "615" in chosen(OURS, DRIVER).reason


def test_none_is_never_chosen_and_a_reason_is_never_missing() -> None:
    """Whatever is found: shares are kept by something, or refused."""
    for count in range(len(SIMPLE) + 1):
        for usable in combinations(SIMPLE, count):
            for is_exclusive in (False, True):
                found = chosen(*usable, is_exclusive=is_exclusive)
                assert found.isolation not in ("none", "auto")
                assert found.reason and not found.reason.endswith(".")
