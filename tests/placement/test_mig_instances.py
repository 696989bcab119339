"""MIG instances in placement: shares only where the isolation keeps them, whole GPUs of vcuda's never."""

from __future__ import annotations

import pytest

from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.resources import Request, ResourceKind, ResourceNames
from gpushare_agent.core.placement import GpuAccount, place
from gpushare_agent.core.placement.gpu_account import account_of
from gpushare_agent.core.placement.place import Placed
from tests.support_core import inventory, mig_instance

NODE = inventory(3)
INSTANCE = mig_instance(2, 0, 0)


def accounts(*, shares_in_mig: bool) -> list[GpuAccount]:
    names = ResourceNames(shares_in_mig=shares_in_mig)
    return [account_of(gpu, names) for gpu in (NODE.gpus[1], INSTANCE)]


@pytest.mark.parametrize(("shares_in_mig", "units"), [(False, 0), (True, 100)])
def test_an_instance_has_cores_only_where_shares_are_kept_in_it(*, shares_in_mig: bool, units: int) -> None:
    """So the kubelet offers none that would be refused."""
    names = ResourceNames(shares_in_mig=shares_in_mig)
    assert names.units(INSTANCE, ResourceKind.VCORE) == units
    assert (names.units(INSTANCE, ResourceKind.VMEMORY) > 0) is shares_in_mig


def test_a_share_is_on_an_instance_only_where_it_is_kept() -> None:
    """Binpack prefers the small one, where it may."""
    request = Request(cores=50, blocks=4)
    for shares_in_mig, expected in ((True, "MIG-2"), (False, None)):
        gpus = accounts(shares_in_mig=shares_in_mig)[1:]
        found = place(request, gpus, NODE.topology, share_policy="binpack")
        assert (found.gpus[0] if isinstance(found, Placed) else None) == expected


@pytest.mark.parametrize("shares_in_mig", [False, True])
def test_whole_gpus_of_vcuda_are_no_instances(*, shares_in_mig: bool) -> None:
    """100 cores are a GPU, not a seventh of one; two are not a GPU and an instance."""
    gpus = accounts(shares_in_mig=shares_in_mig)
    one = place(Request(cores=100, blocks=0), gpus, NODE.topology, share_policy="binpack")
    two = place(Request(cores=200, blocks=0), gpus, NODE.topology, share_policy="binpack")
    assert isinstance(one, Placed) and one.gpus == ("GPU-1",)
    assert isinstance(two, Refused)


def test_an_instance_can_be_given_whole_by_nvidias_names() -> None:
    """What is free of it for these does not depend on shares."""
    assert [account.free_units_of(1) for account in accounts(shares_in_mig=False)] == [1, 1]
