"""What a pod's life takes must not depend on the other shares of its node."""

from __future__ import annotations

from pathlib import Path

from tests.agent.support_growth import CrowdedNode, Steps, grown

FEW, MANY = 100, 1500
LISTED = 70
"""Steps for each pod of a List answer, which the kubelet makes of all pods in an order of its own: finding where it begins,
and that it is as it was."""


async def _admission(shares: int, directory: Path) -> dict[str, Steps]:
    node = await CrowdedNode.open(shares, directory)
    for name in ("first", "second"):
        admitted = node.pod(name)
        seen = node.take(lambda: node.agent.node.pods.upsert(admitted))  # noqa: B023 - called at once
        # The first pod meets caches that are empty.
        found = {"seen by the watch": seen, **await node.admit(admitted)}
    return found


async def test_an_admission_takes_as_many_steps_next_to_1500_shares_as_next_to_100(tmp_path: Path) -> None:
    few, many = await _admission(FEW, tmp_path / "few"), await _admission(MANY, tmp_path / "many")
    listed = {step: LISTED * (MANY - FEW) for step in many if step.startswith("GetPreferred")}
    assert not grown(few, many, listed), grown(few, many, listed)
