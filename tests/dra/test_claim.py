"""A ResourceClaim from JSON: what is read, and with which words another one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gpushare_agent.core.claims.claim import AllocatedClaim, ClaimPolicy, read_claim
from gpushare_agent.core.claims.gpu_config import MpsLimits, ShareConfig
from gpushare_agent.core.model.errors import Corrupt
from tests.dra.support_claims import (
    NODE,
    admin,
    gpu_config,
    raw_claim,
    ref_of,
    result,
    share_config,
    uid_of,
    whole,
)
from tests.support_json import undecoded


def read(raw: dict[str, Any], policy: ClaimPolicy = ClaimPolicy()) -> AllocatedClaim:  # noqa: B008 - frozen
    return read_claim(undecoded(raw), pool=NODE, policy=policy)


def test_results_are_read_in_their_order_with_the_consumed_capacity() -> None:
    """The scheduler rounds what is asked for up to the slice's step: the request is not read."""
    claim = read(raw_claim(result("a", 1, cores=25, memory="512Mi"), whole("b/big", 0), users=("p", "q")))
    assert claim.ref == ref_of()
    assert [(r.request, r.device, r.cores, r.memory_mib) for r in claim.results] == [
        ("a", "gpu-1", 25, 512),
        ("b/big", "gpu-0", 100, 24576),
    ]
    assert claim.users == (("p", "uid-p"), ("q", "uid-q"))


def test_admin_access_has_no_size_and_no_ceiling() -> None:
    """The API server shows a capacity as consumed, or none: the scheduler counts neither."""
    bare = {name: value for name, value in admin("b", 1).items() if name != "consumedCapacity"}
    claim = read(raw_claim(admin("a"), bare, result("c", adminAccess=False), config=[share_config(coreLimit=80)]))
    assert [(r.is_admin, r.cores, r.memory_mib, r.config.core_limit) for r in claim.results] == [
        (True, 0, 0, 0),
        (True, 0, 0, 0),
        (False, 40, 16384, 80),
    ]


def test_other_drivers_devices_are_passed_over() -> None:
    claim = read(raw_claim(result("nic", driver="nics.example.com", device="eth0"), result()))
    assert [one.request for one in claim.results] == ["gpu"]


def test_the_claims_own_configuration_wins_over_its_classs_field_by_field() -> None:
    config = (share_config("FromClaim", isolation="mps"), share_config("FromClass", isolation="none", coreLimit=80))
    assert read(raw_claim(result(), config=config)).results[0].config == ShareConfig(isolation="mps", core_limit=80)


def test_a_configuration_is_of_the_requests_that_it_names() -> None:
    """By the main request, also for an alternative of it; of nobody's else."""
    config = (share_config(requests=["b"], coreLimit=70), {"source": "FromClaim", "opaque": {"driver": "other"}})
    claim = read(raw_claim(result("a", 0), result("b/x", 1), config=config))
    assert [one.config.core_limit for one in claim.results] == [0, 70]


NVIDIA = ClaimPolicy(nvidia_names=True)


def test_nvidias_configuration_is_read_by_the_setting_and_the_later_one_replaces_its_limits() -> None:
    """Without it the entry is another driver's. A claim may be of both drivers: what is for the other's request is left."""
    mps = gpu_config("MPS", "FromClass", mpsConfig={"defaultActiveThreadPercentage": 50})
    slicing = gpu_config("TimeSlicing", requests=["b"], timeSlicingConfig={"interval": "Long"})
    foreign = gpu_config("none", requests=["mig"], kind="MigDeviceConfig")
    raw = raw_claim(whole("a", 0), whole("b/x", 1), config=[slicing, mps, foreign])
    configs = [one.config for one in read(raw, NVIDIA).results]
    assert configs == [
        ShareConfig(isolation="mps", mps=MpsLimits(thread_percentage=50)),
        ShareConfig(isolation="none"),
    ]
    assert {one.config for one in read(raw).results} == {ShareConfig()}
    with pytest.raises(Corrupt, match=r"MigDeviceConfig.*Invalid enum value 'none'"):
        read(raw_claim(whole("mig"), config=[foreign]), NVIDIA)


def test_a_claim_without_a_size_is_one_by_the_setting_alone_and_under_no_isolation() -> None:
    nothing = result(consumedCapacity={"cores": "0", "memory": "0"})
    policy = ClaimPolicy(nvidia_names=True, has_unlimited=True)
    (one,) = read(raw_claim(nothing, config=[gpu_config("TimeSlicing")]), policy).results
    assert (one.is_unlimited, one.config) == (True, ShareConfig(isolation="none"))
    assert not read(raw_claim(admin()), policy).results[0].is_unlimited
    with pytest.raises(Corrupt, match="asks for mps, and on this node what names no memory is not limited"):
        read(raw_claim(nothing, config=[gpu_config("MPS")]), policy)
    with pytest.raises(Corrupt, match="no share of it"):
        read(raw_claim(nothing), NVIDIA)
    with pytest.raises(Corrupt, match="no share of it"):
        read(raw_claim(result(consumedCapacity={"cores": "5", "memory": "0"})), policy)


UNTYPED = {"source": "FromClaim", "opaque": {"driver": "gpushare-agent", "parameters": {"isolation": "mps"}}}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "name no claim"),
        (raw_claim(result()) | {"metadata": {"namespace": "../x", "name": "n", "uid": "u"}}, "name no claim"),
        (raw_claim(), "no device of driver"),
        (raw_claim(result(pool="elsewhere")), "this node's pool is node"),
        (raw_claim(result(device="Card.1")), "does not publish"),
        (raw_claim(result(device="x" * 64)), "does not publish"),
        (raw_claim(result(request="A/../b")), "no name of a request"),
        (raw_claim(result(shareID="x")), "no UUID"),
        (raw_claim(result(cores=101)), "no share of it"),
        (raw_claim(result(memory="1")), "no share of it"),
        (raw_claim(result(memory="-16Gi")), "negative"),
        (raw_claim(result(consumedCapacity={"cores": "5"})), "DRAConsumableCapacity"),
        (raw_claim(*[result()] * 33), "length <= 32"),
        (raw_claim(result(), config=[{}] * 65), "length <= 64"),
        (raw_claim(result(), users=["p"] * 257), "length <= 256"),
        (raw_claim(result(), result(shareID=uid_of(3))), "request gpu is allocated the device gpu-0 2 times"),
        (raw_claim(result(), config=[share_config(isolatoin="mps")]), "unknown field `isolatoin`; it has isolation"),
        (raw_claim(result(), config=[share_config(coreLimit=True)]), "whole number from 0 to 100"),
        (raw_claim(result(cores=40), config=[share_config(coreLimit=30)]), "below its 40 cores"),
        (raw_claim(result(), config=[share_config(kind="GpuConfig")]), "reads gpushare-agent/v1alpha1 ShareConfig"),
        (raw_claim(result(), config=[UNTYPED]), "have apiVersion '' and kind '', and this driver reads"),
    ],
)
def test_what_cannot_be_used_is_named(raw: dict[str, Any], words: str) -> None:
    """The text becomes an Event of the pod, behind driver and claim."""
    with pytest.raises(Corrupt, match=words):
        read(raw)
