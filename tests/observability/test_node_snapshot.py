"""The node's document where something is not known."""

from __future__ import annotations

from msgspec.structs import replace

from gpushare_agent.agent.observability.attribution import AllocatedContainers, join_usage
from gpushare_agent.agent.observability.metrics.node import node_series
from gpushare_agent.core.model.allocations import ClaimShare
from gpushare_agent.core.model.names import unit_id
from gpushare_agent.core.model.resources import ResourceKind
from tests.dra.support_claims import ref_of, using
from tests.observability.support_usage import allocation, driver_sample, facts, gpu_sample, key_of, snapshot
from tests.support_core import pod
from tests.support_json import written_node


def test_units_have_their_resource_and_what_limits_them() -> None:
    """Two of four replicas by MPS, and a whole GPU; a share has none."""
    share = allocation(key_of(1), (0,))
    uuid = share.gpus[0]
    without_ids = replace(share, ids={}, gpu_resource="nvidia.com/gpu")
    replicas = replace(without_ids, ids={ResourceKind.GPU: frozenset({unit_id(uuid, 0, "4m"), unit_id(uuid, 2, "4m")})})
    whole = replace(without_ids, ids={ResourceKind.GPU: frozenset({unit_id(uuid, 0, "1")})}, is_whole=True)
    found = [written_node(snapshot(facts(one)))["containers"][0]["units"] for one in (replicas, whole, share)]
    assert found == [
        {"resource": "nvidia.com/gpu", "count": 2, "sharing": "mps"},
        {"resource": "nvidia.com/gpu", "count": 1, "sharing": None},
        None,
    ]


def test_replicas_on_two_gpus_have_their_part_of_each() -> None:
    """A quarter of GPU 0 and two of GPU 1; what a GPU has of the container is never the sum."""
    both = allocation(key_of(1), (0, 1), cores=200, blocks=0)
    ids = {unit_id(both.gpus[0], 0, "4"), unit_id(both.gpus[1], 1, "4"), unit_id(both.gpus[1], 2, "4")}
    replicas = replace(both, ids={ResourceKind.GPU: frozenset(ids)}, gpu_resource="nvidia.com/gpu", is_whole=False)
    shown = snapshot(facts(replicas))
    (container,) = written_node(shown)["containers"]
    parts = {gpu.index: gpu.memory_mib << 18 for gpu in shown.inventory.gpus}
    assert [(one["cores"], one["memory_bytes"]) for one in container["gpus"]] == [(25, parts[0]), (50, 2 * parts[1])]
    limits = next(one for one in node_series(shown) if one.name.endswith("container_memory_limit_bytes"))
    assert [int(one.split()[-1]) for one in "".join(limits.lines).splitlines()] == [parts[0], 2 * parts[1]]


def test_a_container_has_no_use_on_a_gpu_that_lists_no_processes() -> None:
    """Null, as in the metrics: a zero would be a measured zero. On a GPU that lists none of its, it is zero."""
    allocated = allocation(key_of(1), (0, 1), cores=200, blocks=0)
    gpus = driver_sample(gpu_sample(0, lists=False), gpu_sample(1))
    usage = join_usage(gpus, {}, AllocatedContainers(gpus={allocated.key: allocated.gpus}, by_id={}), sampled_at=1.0)
    [container] = written_node(snapshot(facts(allocated), usage=usage))["containers"]
    silent, listing = (gpu["usage"] for gpu in container["gpus"])
    assert silent is None
    assert (listing["sm_ratio"], listing["memory_bytes"], listing["pids"]) == (0.0, 0, [])
    [before] = written_node(snapshot(facts(allocated)))["containers"]
    assert [gpu["usage"] for gpu in before["gpus"]] == [None, None]


def test_a_claim_runs_while_a_container_that_uses_it_does() -> None:
    """It ends with all of its pods, and waits for its first."""
    share = ClaimShare(ref=ref_of(), shown_as="g", request="r", isolation="gpushare")
    claims = replace(allocation(key_of(1), (0,)), claim=share)
    user = using("x", ("g", ""))
    waits, runs, ends = (
        (pod(name, user, running=frozenset(running), is_deleting=is_deleting), user)
        for name, running, is_deleting in (("a", (), False), ("b", ("x",), True), ("c", (), True))
    )
    cases = ((), (waits, ends), (waits, runs), (ends,))
    found = [written_node(snapshot(replace(facts(claims), users=users)))["containers"][0]["phase"] for users in cases]
    assert found == ["Pending", "Pending", "Running", "Terminating"]
