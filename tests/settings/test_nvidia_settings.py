"""The section nvidia: pairs, names, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpushare_agent.core.settings.settings import SettingsError, load_settings
from gpushare_agent.core.settings.tree import Settings


def loaded(*argv: str) -> Settings:
    return load_settings([f"--nvidia.{flag}" for flag in argv], {"NODE_NAME": "n"}).settings


def test_lists_are_pairs_in_their_order() -> None:
    nvidia = loaded("replicas=0=4, *A100*=2,*=3", "names=*A100*=nvidia.com/a100", "rename-replicas").nvidia
    assert nvidia.replica_counts == (("0", 4), ("*A100*", 2), ("*", 3))
    assert nvidia.name_pairs == (("*A100*", "nvidia.com/a100"),)
    assert nvidia.resource_names == {
        "nvidia.com/gpu",
        "nvidia.com/a100",
        "nvidia.com/gpu.shared",
        "nvidia.com/a100.shared",
    }


@pytest.mark.parametrize(
    ("argv", "refuses"),
    [
        ((), False),
        (("sharing=mps",), True),
        (("sharing=mps", "refuse-several-replicas=false"), False),
        (("refuse-several-replicas=true",), True),
        (("refuse-several-replicas=",), False),
    ],
)
def test_several_replicas_are_refused_under_mps_unless_said_otherwise(argv: Sequence[str], refuses: bool) -> None:
    """NVIDIA's failRequestsGreaterThanOne has the same defaults."""
    assert loaded(*argv).nvidia.refuses_several_replicas is refuses


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("replicas=*",), "is no pair such as LEFT=RIGHT"),
        (("replicas=*=0",), "must be from 1 to 1000"),
        (("replicas=*=many",), "must be from 1 to 1000"),
        (("replicas=*=16384",), "must be from 1 to 1000 for each GPU: the kubelet takes all units"),
        (("names=*A100*=a100",), "allowed: resource name such as"),
        (("resource=nvidia.com/" + "g" * 53,), "NVIDIA's names have at most 63"),
        (("resource=nvidia.com/" + "g" * 50, "rename-replicas"), "NVIDIA's names have at most 63"),
        (("enabled", "resource=tencent.com/vcuda-core"), "both have the resource tencent.com/vcuda-core"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(argv: Sequence[str], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(*argv)
    assert expected in str(caught.value)
