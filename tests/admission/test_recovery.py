"""Rebuilding the cache from PodResources, checkpoint and pod store."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.recovery import UNNAMED, Records, adopt, rebuild
from gpushare_agent.agent.kubelet.records import read_checkpoint
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import NAMES, allocation, container, ids, inventory, listed, pod, written
from tests.support_json import undecoded
from tests.support_steps import counted

DATA = Path(__file__).parent.parent / "data" / "kubelet"


def rebuilt(records: Records) -> dict[ContainerKey, Allocation]:
    return {a.key: a for a in rebuild(records, NAMES, inventory(), 0.0)}


ONE = listed("one", main=(ids(0, range(10)), ids(0, range(4))))


def test_the_checkpoint_tells_the_uid_of_a_listed_pod() -> None:
    """Before the pod store has listed, container name and IDs are enough to join the two."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    found = rebuilt(Records(listed=[ONE], checkpoint=entries, pods=None))
    assert set(found) == {ContainerKey(PodUid("u1"), "main")}
    got = found[ContainerKey(PodUid("u1"), "main")]
    assert (got.pod_name, got.cores, got.memory_blocks, got.kind) == (
        "one",
        10,
        4,
        ContainerKind.MAIN,
    )


def _steps_for(pods: int) -> int:
    """Of rebuilding the cache of a node with so many pods from both records."""
    records = Records(
        listed=[listed(f"p{n}", main=(ids(0, [n]), ids(0, [n]))) for n in range(pods)],
        checkpoint=[one for n in range(pods) for one in written(f"u{n}", "main", ids(0, [n]), ids(0, [n]))],
        pods=None,
    )
    with counted() as steps:
        found = rebuilt(records)
    assert [key.pod_uid for key in found] == sorted(f"u{n}" for n in range(pods))
    return steps.count


def test_a_pod_costs_the_same_on_a_full_node() -> None:
    """The start of the agent must not take the square of the pods."""
    assert _steps_for(80) <= 4.1 * _steps_for(20)


def test_without_checkpoint_the_pod_store_tells_it() -> None:
    """The live pod of that name, not one of the same name that ended."""
    old = pod("one", container(cores=10), uid="old", phase=PodPhase.FAILED)
    new = pod("one", container(cores=10), uid="new")
    found = rebuilt(Records(listed=[ONE], checkpoint=[], pods=[old, new]))
    assert set(found) == {ContainerKey(PodUid("new"), "main")}


def test_a_container_s_ids_are_the_set_that_the_kubelet_s_record_has() -> None:
    """Both are kept, and have up to thousands of IDs."""
    [got] = rebuilt(Records(listed=[ONE], checkpoint=[], pods=None)).values()
    (recorded,) = ONE.containers
    assert {id(one) for one in got.ids.values()} == {id(one) for one in recorded.devices.values()}


def test_with_neither_a_stand_in_holds_the_ids() -> None:
    """They must not be allocated while their container is unknown."""
    found = rebuilt(Records(listed=[ONE], checkpoint=[], pods=None))
    assert [key.pod_uid for key in found] == [f"{UNNAMED}default/one"]


def test_init_containers_come_from_the_checkpoint() -> None:
    """PodResources never lists them; they count while their pod lives."""
    entries = written("u1", "i", ids(0, range(10, 15)), []) + written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    found = rebuilt(Records(listed=[ONE], checkpoint=entries, pods=None))
    assert found[ContainerKey(PodUid("u1"), "i")].kind is ContainerKind.INIT


def test_entries_of_ended_pods_are_left_out() -> None:
    """The kubelet keeps them in the file until its next Allocate."""
    entries = written("ended", "main", ids(1, range(10)), []) + written(
        "u1", "main", ids(0, range(10)), ids(0, range(4))
    )
    pods = [pod("one", container(cores=10), uid="u1")]
    found = rebuilt(Records(listed=[ONE], checkpoint=entries, pods=pods))
    assert set(found) == {ContainerKey(PodUid("u1"), "main")}


def test_before_the_pods_are_known_only_what_was_given_again_is_left_out() -> None:
    """A kubelet that is still starting lists only some of its pods: the others' IDs must not be given away."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    entries += written("later", "main", ids(1, range(10)), []) + written("ended", "main", ids(0, range(5, 15)), [])
    found = rebuilt(Records(listed=[ONE], checkpoint=entries, pods=None))
    assert {key.pod_uid for key in found} == {"u1", "later"}


def test_an_empty_list_means_not_known_yet() -> None:
    """A kubelet that has just started lists nothing: the checkpoint counts, and nothing is released."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    found = rebuilt(Records(listed=[], checkpoint=entries, pods=None))
    assert set(found) == {ContainerKey(PodUid("u1"), "main")}


def test_the_recorded_checkpoint_gives_every_container_of_the_recorded_pods() -> None:
    """A real kubelet's file and the API server's pods of that moment."""
    entries = read_checkpoint(DATA / "checkpoint-1.36.json")
    pods = [
        parse_pod(read_pod_json(undecoded(raw))) for raw in json.loads((DATA / "pods-1.36.json").read_text())["items"]
    ]
    found = rebuild(Records(listed=[], checkpoint=entries, pods=pods), NAMES, inventory(), 0.0)
    got = {(a.pod_name, a.key.container): (a.cores, a.memory_blocks, a.kind.value) for a in found}
    assert got == {
        ("share-a", "main"): (30, 10, "main"),
        ("two", "a"): (20, 8, "main"),
        ("two", "b"): (10, 4, "main"),
        ("chain", "i"): (5, 2, "init"),
        ("chain", "s"): (5, 2, "sidecar"),
        ("chain", "m"): (10, 4, "main"),
        ("whole", "main"): (100, 0, "main"),
    }


def test_a_starting_container_is_taken_over_from_the_checkpoint() -> None:
    """Its IDs are in the kubelet's file though not in our cache."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    result = adopt(entries, ResourceKind.VCORE, frozenset(ids(0, range(10))), {}, NAMES, inventory(), 0.0)  # type: ignore[arg-type]
    assert isinstance(result, list) and [a.key for a in result] == [ContainerKey(PodUid("u1"), "main")]
    assert result[0].memory_blocks == 4


def test_unknown_and_foreign_ids_are_not_taken_over() -> None:
    """IDs of no record, and IDs that another pod holds."""
    wanted = frozenset(ids(0, range(10)))
    unknown = adopt([], ResourceKind.VCORE, wanted, {}, NAMES, inventory(), 0.0)  # type: ignore[arg-type]
    assert isinstance(unknown, Refused) and unknown.reason is RefusalReason.NOT_READY
    other = replace(allocation(pod("other"), "main", ids(0, range(3)), []))
    entries = written("u1", "main", ids(0, range(10)), [])
    taken = adopt(entries, ResourceKind.VCORE, wanted, {other.key: other}, NAMES, inventory(), 0.0)  # type: ignore[arg-type]
    assert isinstance(taken, Refused) and taken.reason is RefusalReason.DEVICE_IN_USE
