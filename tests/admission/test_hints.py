"""The scheduler extender's annotations are hints that any tenant can write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.decide import hinted_gpus
from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.core.model.names import (
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
)
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceNames
from tests.support_core import container

GPU_MEM = "aliyun.com/gpu-mem"
HERE_POLICY = Policy(names=ResourceNames(gpu_mem=GPU_MEM), node_name="node")
FIRST = PREDICATE_GPU_INDEX_PREFIX + "0"


@pytest.mark.parametrize(("text", "gpus"), [("0", (0,)), ("1,3", (1, 3)), (" 2 , 0 ", (2, 0))])
def test_indexes_are_read(text: str, gpus: tuple[int, ...]) -> None:
    """In the order given."""
    assert hinted_gpus({FIRST: text}, container(), HERE_POLICY) == gpus


@pytest.mark.parametrize(
    "text", ["", "-1", "1,-2", "1,1", "x", "1;2", "1,", "9" * 5, "1" + ",1" * 400, "0x1", "１", "1.5", "\0"]
)
def test_garbage_is_no_hint(text: str) -> None:
    """Negative, doubled, huge, foreign digits, nonsense."""
    assert hinted_gpus({FIRST: text}, container(), HERE_POLICY) == ()


def test_each_container_has_its_own_hint() -> None:
    """By position among spec.containers; init containers have none."""
    annotations = {FIRST: "1", PREDICATE_GPU_INDEX_PREFIX + "1": "2"}
    assert hinted_gpus(annotations, container(position=1), HERE_POLICY) == (2,)
    assert hinted_gpus(annotations, container(kind=ContainerKind.INIT), HERE_POLICY) == ()


FORGED = {GPUSHARE_INDEX_ANNOTATION: "1"}
HERE, ELSEWHERE = {PREDICATE_NODE_ANNOTATION: "node"}, {PREDICATE_NODE_ANNOTATION: "elsewhere"}


@pytest.mark.parametrize(
    ("annotations", "gpus"),
    [
        (FORGED, (1,)),
        ({**FORGED, **ELSEWHERE}, (1,)),
        ({**FORGED, **HERE}, ()),
        ({**FORGED, **HERE, FIRST: "0"}, (0,)),
        ({**FORGED, FIRST: "0"}, (0,)),
        ({**FORGED, **ELSEWHERE, FIRST: "0"}, (1,)),
        ({**FORGED, **HERE, FIRST: "garbage"}, ()),
        ({GPUSHARE_INDEX_ANNOTATION: "0,1"}, ()),
        ({**HERE, FIRST: "0"}, (0,)),
        ({}, ()),
    ],
)
def test_gpushares_index_counts_only_where_no_extender_named_this_node(
    annotations: dict[str, str], gpus: tuple[int, ...]
) -> None:
    """Our extender's plan is by container; an index left on the pod by somebody else does not change it."""
    assert hinted_gpus(annotations, replace(container(), requests={GPU_MEM: 1}), HERE_POLICY) == gpus


def test_gpushares_index_is_no_hint_for_other_resources() -> None:
    """It says where memory units are."""
    assert hinted_gpus(FORGED, container(), HERE_POLICY) == ()


def test_an_init_containers_units_have_their_own_hint() -> None:
    """Also where GPUShare's index names another GPU."""
    annotations = {**FORGED, **HERE, FIRST: "2", PREDICATE_GPU_INDEX_PREFIX + "init-0": "3"}
    assert hinted_gpus(
        annotations, replace(container(kind=ContainerKind.INIT), requests={GPU_MEM: 1}), HERE_POLICY
    ) == (3,)


@given(st.text(max_size=300))
def test_any_text_gives_distinct_small_indexes_or_nothing(text: str) -> None:
    """Whatever a tenant writes."""
    gpus = hinted_gpus({FIRST: text}, container(), HERE_POLICY)
    assert len(set(gpus)) == len(gpus) <= 64 and all(0 <= gpu < 1000 for gpu in gpus)
