"""Which isolations keep a share inside a MIG instance."""

from __future__ import annotations

import pytest

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.model.allocations import ContainerEdits
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from tests.isolation.support_requests import request
from tests.support_core import mig_instance

INSTANCE = mig_instance(2, 0, 1)
HALF = request(50, INSTANCE.memory_mib // 2, gpus=[INSTANCE])


KEEPING = ("gpushare", "none")


@pytest.mark.parametrize("name", [name for name in ISOLATIONS if name not in KEEPING])
def test_a_share_of_an_instance_is_refused_with_the_cure(name: str) -> None:
    """The text has NVIDIA's name of the instance, and why by the part of a combination that cannot keep the share."""
    refused = ISOLATIONS[name].edits(HALF)
    assert isinstance(refused, Refused)
    assert "MIG instance 0:1" in refused.detail and "request a whole instance" in refused.detail
    assert ISOLATIONS[name].why_not_in_mig in refused.detail


@pytest.mark.parametrize("name", KEEPING)
def test_a_share_of_an_instance_is_given(name: str) -> None:
    """By libgpushare as one of a GPU; or nothing is kept, in an instance or elsewhere."""
    found = ISOLATIONS[name].edits(HALF)
    assert isinstance(found, ContainerEdits) and bool(found.mounts) == (name == "gpushare")


def test_a_part_of_the_compute_of_an_instance_has_no_shares() -> None:
    """Several such parts have the same memory, of which shares in each would be given."""
    part = mig_instance(2, 0, 1, profile="1c.3g.40gb")
    names = ResourceNames(shares_in_mig=True)
    assert [names.units(gpu, ResourceKind.VCORE) for gpu in (part, INSTANCE)] == [0, 100]
    refused = ISOLATIONS["gpushare"].edits(request(50, gpus=[part]))
    assert isinstance(refused, Refused) and "other compute instances have the same memory" in refused.detail
    assert not isinstance(ISOLATIONS["none"].edits(request(50, gpus=[part])), Refused)


@pytest.mark.parametrize("name", ["driver", "gpushare", "mps", "none"])
def test_a_whole_instance_needs_nothing(name: str) -> None:
    """MIG itself keeps it apart."""
    assert not isinstance(ISOLATIONS[name].edits(request(100, gpus=[INSTANCE], is_whole=True)), Refused)
