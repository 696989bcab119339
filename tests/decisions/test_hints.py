"""The scheduler extender's annotations are hints that any tenant can write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.decisions.hints import predicted_cards
from gpushare_agent.model.names import PREDICATE_GPU_INDEX_PREFIX, PREDICATE_NODE_ANNOTATION
from gpushare_agent.model.pods import ContainerKind
from tests.support_core import container

FIRST = PREDICATE_GPU_INDEX_PREFIX + "0"


@pytest.mark.parametrize(("text", "cards"), [("0", (0,)), ("1,3", (1, 3)), (" 2 , 0 ", (2, 0))])
def test_indexes_are_read(text: str, cards: tuple[int, ...]) -> None:
    """In the order given."""
    assert predicted_cards({FIRST: text}, container(), "node") == cards


@pytest.mark.parametrize(
    "text", ["", "-1", "1,-2", "1,1", "x", "1;2", "1,", "9" * 5, "1" + ",1" * 400, "0x1", "１", "1.5", "\0"]
)
def test_garbage_is_no_hint(text: str) -> None:
    """Negative, doubled, huge, foreign digits, nonsense."""
    assert predicted_cards({FIRST: text}, container(), "node") == ()


def test_another_nodes_choice_is_no_hint() -> None:
    """The pod was moved by hand, or the annotation copied."""
    annotations = {FIRST: "1", PREDICATE_NODE_ANNOTATION: "elsewhere"}
    assert predicted_cards(annotations, container(), "node") == ()
    assert predicted_cards(annotations, container(), "elsewhere") == (1,)


def test_each_container_has_its_own_hint() -> None:
    """By position among spec.containers; init containers have none."""
    annotations = {FIRST: "1", PREDICATE_GPU_INDEX_PREFIX + "1": "2"}
    assert predicted_cards(annotations, container(position=1), "node") == (2,)
    assert predicted_cards(annotations, container(kind=ContainerKind.INIT), "node") == ()


@given(st.text(max_size=300))
def test_any_text_gives_distinct_small_indexes_or_nothing(text: str) -> None:
    """Whatever a tenant writes."""
    cards = predicted_cards({FIRST: text}, container(), "node")
    assert len(set(cards)) == len(cards) <= 64 and all(0 <= card < 1000 for card in cards)
