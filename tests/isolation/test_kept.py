"""What of a share is kept, by whom, and what is said not to be."""

from __future__ import annotations

import pytest

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.kept import (
    ITS_OWN_GPU,
    NOBODY,
    NOT_KEPT_TEXTS,
    NOTHING_KEPT,
    WHOLE_GPU,
    NotKept,
    kept_together,
)
from tests.real_isolation.checks import CHECKS, Verdict


def test_a_whole_gpu_needs_nobody() -> None:
    """Under every isolation: no other container is on it."""
    assert (WHOLE_GPU.memory_by, WHOLE_GPU.compute_by, WHOLE_GPU.not_kept) == (ITS_OWN_GPU, ITS_OWN_GPU, ())
    assert "the GPU is its own" in WHOLE_GPU.text


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_every_isolation_has_its_row_in_order(isolation: str) -> None:
    """Terms are sorted, once each, and every one has its words."""
    found = ISOLATIONS[isolation].keeps
    assert list(found.not_kept) == sorted(set(found.not_kept))
    assert all(NOT_KEPT_TEXTS[term] in found.text for term in found.not_kept)


def test_every_term_has_words_and_a_stable_spelling() -> None:
    """Labels and JSON: small letters and dashes."""
    assert set(NOT_KEPT_TEXTS) == set(NotKept)
    assert all(term.value.replace("-", "").islower() for term in NotKept)


def test_none_keeps_nothing() -> None:
    found = ISOLATIONS["none"].keeps
    assert found.text == "memory is kept by nobody, compute by nobody"


@pytest.mark.parametrize(
    ("isolation", "compute_by"),
    [
        ("driver", NOBODY),
        ("gpushare+driver", "gpushare"),
        ("mps+driver", "mps"),
    ],
)
def test_the_driver_keeps_memory_and_the_other_part_compute(isolation: str, compute_by: str) -> None:
    """What the library lets past of memory the driver does not."""
    found = ISOLATIONS[isolation].keeps
    assert (found.memory_by, found.compute_by) == ("driver", compute_by)
    assert NotKept.POOLS not in found.not_kept
    # Measured: gpushare keeps what the driver does not count.
    assert (NotKept.MANAGED_MEMORY in found.not_kept) is (compute_by != "gpushare")


def test_without_the_drivers_limit_the_other_part_keeps_what_it_can() -> None:
    """And under the driver alone nobody does."""
    assert kept_together([ISOLATIONS["gpushare"].keeps]) == ISOLATIONS["gpushare"].keeps
    assert kept_together([]) == NOTHING_KEPT


_TERMS = {
    "managed": NotKept.MANAGED_MEMORY,
    "async": NotKept.ASYNC_ALLOCATIONS,
    "pool": NotKept.POOLS,
    "vmm": NotKept.VIRTUAL_MEMORY,
    "ex": NotKept.EXTENDED_LAUNCHES,
    "graph": NotKept.GRAPHS,
}
"""Of a check's kind of memory or of launch."""


@pytest.mark.parametrize("isolation", ["gpushare", "vcuda", "driver"])
def test_what_is_said_is_what_was_measured(isolation: str) -> None:
    """The table of `nox -s isolation` and this one cannot differ: what goes past there is a term here, and the other way."""
    found = ISOLATIONS[isolation].keeps
    passes: dict[NotKept, bool] = {}
    for check in CHECKS:
        term = NotKept.SMALL_LAUNCHES if check.blocks_of_launch == 1024 else _TERMS.get(check.memory or check.launch)
        verdict = check.expected.get(isolation)
        if term is not None and verdict is not None:
            passes[term] = passes.get(term, False) or verdict is Verdict.BYPASSED
    assert {term for term, is_past in passes.items() if is_past} == {t for t in found.not_kept if t in passes}
