"""What the suites of NVIDIA's DRA driver have, at commit 95932046, and what does not pass there, with the reason.

test_nvidia_dra.py runs them; the table of docs/explanation/dra.md is made of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

GO_SPECS = {"memory": ("skip", 7), "unlimited": ("focus", 1)}
"""Of test/e2e, by the setting dra.consumable_shares: what Ginkgo does with the specs of `/unlimited`, and how many run."""


class BatsFile(NamedTuple):
    """tests/bats/test_gpu_<name>.bats. `shares` is the setting dra.consumable_shares, `limit_s` the time that it may take;
    `differs` has a part of the name of each test that does not pass, and why."""

    tests: int
    limit_s: float
    shares: str = "memory"
    differs: Mapping[str, str] = {}


BATS = {
    "basic": BatsFile(
        5,
        300,
        differs={"inspect device attributes": "the slice has the agent's own attributes too, and no `addressingMode`"},
    ),
    "sharing": BatsFile(
        2,
        200,
        differs={
            "MPS — 2 containers": "both run on one GPU, but the daemon is the node's, and no Deployment for each claim"
        },
    ),
    "consumable_shares": BatsFile(3, 200, shares="4"),
    "robustness": BatsFile(
        8,
        400,
        differs={
            "exposes Prometheus metrics": "the pod is elsewhere, and [metrics](../reference/metrics.md) other names",
            "device count matches host GPU count": "simulated GPUs have no device nodes",
        },
    ),
    "extres": BatsFile(1, 100),
    "stress": BatsFile(1, 400),
}


class Example(NamedTuple):
    """Of demo/specs/quickstart/v1: its pods, how many GPUs these have together, and how many containers MPS limits."""

    pods: int
    gpus: int
    limited: int = 0


EXAMPLES = {
    "gpu-test1": Example(2, 2),
    "gpu-test2": Example(1, 1),
    "gpu-test3": Example(2, 1),
    "gpu-test5": Example(1, 2, limited=2),
    "gpu-test6": Example(4, 4),
    "gpu-test-mps": Example(1, 1, limited=2),
}
SHARING = {"memory": "memory", "unlimited": "unlimited", "integer": "4"}
"""By demo/specs/consumable-shares/<name>-sharing.yaml: the setting."""
