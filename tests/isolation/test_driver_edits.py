"""Isolation driver: the variables that NVIDIA's container toolkit sets the limit by, alone and with another isolation."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.isolation import isolation_parts
from gpushare_agent.core.model.names import ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST
from tests.isolation.support_requests import request
from tests.support_core import container

WITH_DRIVER = [name for name in ISOLATIONS if "driver" in isolation_parts(name)]


@pytest.mark.parametrize("name", WITH_DRIVER)
@pytest.mark.parametrize("variable", [ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST])
def test_a_spec_that_sets_a_limit_of_its_own_is_refused(name: str, variable: str) -> None:
    """It would go before the agent's, and the toolkit would set that."""
    own = replace(container("cuda"), env={variable: "999999"})
    refused = ISOLATIONS[name].edit(request(container=own))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID_REQUEST
    assert variable in refused.detail and "Nothing was allocated" in refused.detail


@pytest.mark.parametrize("name", WITH_DRIVER)
def test_a_share_without_memory_is_refused(name: str) -> None:
    """A limit of 0 would let no program start."""
    assert isinstance(ISOLATIONS[name].edit(request(memory_mib=0)), Refused)


def test_the_parts_of_a_name() -> None:
    """In the order of the name; what is no combination is its own part."""
    assert isolation_parts("gpushare+driver") == ("gpushare", "driver")
    assert isolation_parts("none") == ("none",)
