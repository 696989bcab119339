"""MIG instances on demand through the life of an agent: reloaded, killed, and followed by the next version of it."""

from __future__ import annotations

import json
import signal

from gpushare_agent.sandbox.manifests import sample_manifests
from tests.agent.support_agent import open_child, poll_until, write_faults
from tests.sandbox.support_sandbox import NodeUnderTest, limits_of, open_test_node, pod

SMALL = "nvidia.com/mig-1g.10gb"


def instances(node: NodeUnderTest) -> list[tuple[str, str, str]]:
    """Those that the agent has recorded: profile, state and UUID."""
    path = node.paths.claim_records.with_name("mig.json")
    made = json.loads(path.read_text())["instances"] if path.exists() else []
    return [(one["profile"], one["state"], one["uuid"]) for one in made]


def flags_of(node: NodeUnderTest) -> tuple[str, ...]:
    """Of an agent of two H100, the first in MIG mode; its classes are made."""
    faults = node.paths.state / "mig-faults.json"
    write_faults(faults, mig={"0": []})
    for manifest in sample_manifests("fitting", by_claims=True, has_mig=True):
        if manifest.raw["kind"] == "DeviceClass":
            node.api.create("deviceclasses", manifest.raw)
    return (
        *("--simulated.gpus=2", "--simulated.gpu-name=NVIDIA H100 80GB HBM3", "--gpu-memory-mib=81559"),
        *(f"--simulated.faults={faults}", "--mig.on-demand=all", "--isolation=none"),
    )


async def test_the_instance_of_a_pod_outlives_the_agent() -> None:
    async with open_test_node() as node:
        flags = flags_of(node)
        async with open_child(node, *flags) as child:
            await node.start_pods(pod("p", limits_of("main", {SMALL: 1}), terminationGracePeriodSeconds=1))
            [(profile, state, _)] = made = instances(node)
            assert (profile, state) == ("1g.10gb", "ready")
            child.send_signal(signal.SIGHUP)
            await poll_until(lambda: len(node.log_lines("claims_restored")) == 2, "the next life")
            child.kill()
        async with open_child(node, *flags):
            await poll_until(lambda: len(node.log_lines("claims_restored")) == 3, "the next process")
            assert instances(node) == made
            await node.remove_pod("p")
            await node.start_pods(pod("q", limits_of("main", {SMALL: 1}), terminationGracePeriodSeconds=1))
            assert instances(node) == made  # used again
            async with open_child(node, *flags):
                await poll_until(lambda: len(node.log_lines("claims_restored")) == 4, "the handover")
                await node.remove_pod("q")
                await node.start_pods(pod("r", limits_of("main", {SMALL: 1}), terminationGracePeriodSeconds=1))
                assert instances(node) == made
        assert len(node.log_lines("mig_instance_made")) == 1


async def test_an_instance_that_a_person_removes_is_made_again_and_the_slices_stay() -> None:
    """It has a UUID that no device has, and until its claim has another one the ledger keeps it in the inventory."""
    async with open_test_node() as node, open_child(node, *flags_of(node)):
        await node.start_pods(pod("p", limits_of("main", {SMALL: 1}), terminationGracePeriodSeconds=1))
        [(_, _, before)] = instances(node)
        written = len(node.log_lines("slice_published"))
        hardware = node.paths.state / "mig-faults.json.mig"
        content = json.loads(hardware.read_text())
        fresh = hardware.with_suffix(".new")
        fresh.write_text(json.dumps(content | {"gpus": {"0": []}}))
        fresh.replace(hardware)
        await poll_until(lambda: len(node.log_lines("claim_made_again")) == 1, "the claim's other instance")
        [(_, state, now)] = instances(node)
        assert state == "ready" and now != before
        assert len(node.log_lines("slice_published")) == written
