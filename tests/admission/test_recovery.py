"""Rebuilding the cache from PodResources, checkpoint and pod store; what one poll of the kubelet releases."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.recovery import (
    UNNAMED,
    Evidence,
    Reconciliation,
    Records,
    adopt,
    rebuild,
    reconcile,
)
from gpushare_agent.agent.kubelet.records import ListedPod, read_checkpoint
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import NAMES, allocation, container, ids, inventory, listed, pod, written
from tests.support_json import undecoded
from tests.support_steps import counted

DATA = Path(__file__).parent.parent / "data" / "kubelet"


def rebuilt(records: Records) -> dict[ContainerKey, Allocation]:
    return {a.key: a for a in rebuild(records, NAMES, inventory(), 0.0)}


SHOWN = listed("one", main=(ids(0, range(10)), ids(0, range(4))))


def test_the_checkpoint_tells_the_uid_of_a_listed_pod() -> None:
    """Before the pod store has listed, container name and IDs are enough to join the two."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    found = rebuilt(Records(listed=[SHOWN], checkpoint=entries, pods=None))
    assert set(found) == {ContainerKey(PodUid("u1"), "main")}
    got = found[ContainerKey(PodUid("u1"), "main")]
    assert (got.pod_name, got.cores, got.memory_blocks, got.kind) == ("one", 10, 4, ContainerKind.MAIN)


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
    found = rebuilt(Records(listed=[SHOWN], checkpoint=[], pods=[old, new]))
    assert set(found) == {ContainerKey(PodUid("new"), "main")}


def test_a_container_s_ids_are_the_set_that_the_kubelet_s_record_has() -> None:
    """Both are kept, and have up to thousands of IDs."""
    [got] = rebuilt(Records(listed=[SHOWN], checkpoint=[], pods=None)).values()
    (recorded,) = SHOWN.containers
    assert {id(one) for one in got.ids.values()} == {id(one) for one in recorded.devices.values()}


def test_with_neither_a_stand_in_holds_the_ids() -> None:
    """They must not be allocated while their container is unknown."""
    found = rebuilt(Records(listed=[SHOWN], checkpoint=[], pods=None))
    assert [key.pod_uid for key in found] == [f"{UNNAMED}default/one"]


def test_init_containers_come_from_the_checkpoint() -> None:
    """PodResources never lists them; they count while their pod lives."""
    entries = written("u1", "i", ids(0, range(10, 15)), []) + written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    found = rebuilt(Records(listed=[SHOWN], checkpoint=entries, pods=None))
    assert found[ContainerKey(PodUid("u1"), "i")].kind is ContainerKind.INIT


def test_before_the_pods_are_known_only_what_was_given_again_is_left_out() -> None:
    """A kubelet that is still starting lists only some of its pods: the others' IDs must not be given away."""
    entries = written("u1", "main", ids(0, range(10)), ids(0, range(4)))
    entries += written("later", "main", ids(1, range(10)), []) + written("ended", "main", ids(0, range(5, 15)), [])
    found = rebuilt(Records(listed=[SHOWN], checkpoint=entries, pods=None))
    assert {key.pod_uid for key in found} == {"u1", "later"}


def test_the_recorded_checkpoint_gives_every_container_of_the_recorded_pods() -> None:
    """A real kubelet's file and the API server's pods of that moment."""
    entries = read_checkpoint(DATA / "checkpoint-1.36.json")
    pods = [
        parse_pod(read_pod_json(undecoded(raw)), NAMES.names)
        for raw in json.loads((DATA / "pods-1.36.json").read_text())["items"]
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


def test_unknown_and_foreign_ids_are_not_taken_over() -> None:
    """IDs of no record, and IDs that another pod holds."""
    wanted = frozenset(ids(0, range(10)))
    unknown = adopt([], ResourceKind.VCORE, wanted, {}, NAMES, inventory(), 0.0)  # type: ignore[arg-type]
    assert isinstance(unknown, Refused) and unknown.reason is RefusalReason.NOT_READY
    other = replace(allocation(pod("other"), "main", ids(0, range(3)), []))
    entries = written("u1", "main", ids(0, range(10)), [])
    taken = adopt(entries, ResourceKind.VCORE, wanted, {other.key: other}, NAMES, inventory(), 0.0)  # type: ignore[arg-type]
    assert isinstance(taken, Refused) and taken.reason is RefusalReason.DEVICE_IN_USE


ONE = pod("one", container(cores=10, blocks=4))
ALLOCATED = allocation(ONE, "main", ids(0, range(10)), ids(0, range(4)))
OTHER = listed("other", main=(ids(1, range(5)), ids(1, range(2))))
OTHER_POD = pod("other", container(cores=5, blocks=2))
OTHER_ALLOCATED = allocation(OTHER_POD, "main", ids(1, range(5)), ids(1, range(2)))


def poll(
    present: tuple[Allocation, ...],
    shown: list[ListedPod],
    pods: list[Pod] | None,
    *,
    trusted: bool = True,
    missing: tuple[Allocation, ...] = (),
    fresh: tuple[Allocation, ...] = (),
) -> Reconciliation:
    records = Records(listed=shown, checkpoint=[], pods=pods)
    evidence = Evidence(
        listed=shown,
        rebuilt=rebuild(records, NAMES, inventory(), 0.0),
        pods=None if pods is None else {p.uid: p for p in pods},
        scope=None,
        is_trusted=trusted,
        missing_before={a.key for a in missing},
        fresh={a.key for a in fresh},
    )
    return reconcile({a.key: a for a in present}, evidence)


def kinds(result: Reconciliation) -> list[tuple[str, str]]:
    return [(c.kind, c.key.pod_uid) for c in result.corrections]


def test_a_terminal_pod_is_released_and_a_deleted_one_reported() -> None:
    """A deleted pod may have processes, which decide."""
    ended = pod("one", container(cores=10), phase=PodPhase.SUCCEEDED)
    assert kinds(poll((ALLOCATED,), [OTHER], [ended, OTHER_POD]))[0] == ("ended", ONE.uid)
    assert poll((ALLOCATED,), [OTHER], [OTHER_POD]).deleted == {ONE.uid}


def test_a_pod_must_be_missing_twice() -> None:
    """Once may be a moment between two of the kubelet's steps."""
    first = poll((ALLOCATED, OTHER_ALLOCATED), [OTHER], [ONE, OTHER_POD])
    assert kinds(first) == [] and first.missing == {ALLOCATED.key}
    second = poll((ALLOCATED, OTHER_ALLOCATED), [OTHER], [ONE, OTHER_POD], missing=(ALLOCATED,))
    assert kinds(second) == [("unlisted", ONE.uid)]


def test_a_container_listed_without_devices_is_freed() -> None:
    """The kubelet shows the pod and nothing in it: a later container's failure freed the earlier one. An allocation of this
    moment it may not have written down yet."""
    bare = listed("one", main=([], []))
    assert kinds(poll((ALLOCATED,), [bare], [ONE])) == [("unlisted", ONE.uid)]
    assert kinds(poll((ALLOCATED,), [bare], [ONE], fresh=(ALLOCATED,))) == []


def test_a_kubelet_that_has_just_started_frees_nothing() -> None:
    """It lists a pod only once it has admitted it again; an empty answer means nothing at all."""
    assert kinds(poll((ALLOCATED,), [OTHER], [ONE, OTHER_POD], trusted=False, missing=(ALLOCATED,))) == [
        ("adopted", OTHER_POD.uid)
    ]
    assert kinds(poll((ALLOCATED,), [], [ONE], missing=(ALLOCATED,))) == []


def test_without_a_pod_list_nothing_is_freed() -> None:
    """The API server has not been reached yet."""
    result = poll((ALLOCATED, OTHER_ALLOCATED), [], None, missing=(ALLOCATED,))
    assert kinds(result) == [] and not result.deleted


def test_other_ids_than_ours_replace_ours() -> None:
    """The container was allocated again while we were away."""
    ours = allocation(OTHER_POD, "main", ids(0, range(50, 55)), ids(1, range(2)))
    result = poll((ours,), [OTHER], [OTHER_POD])
    assert [c.kind for c in result.corrections] == ["changed"]
    assert result.corrections[0].allocation is not None
    assert result.corrections[0].allocation.ids_of(ResourceKind.VCORE) == frozenset(ids(1, range(5)))


def test_a_provisional_uid_ends_when_the_name_is_known() -> None:
    """The same IDs are adopted under the real UID, and the provisional one ends."""
    provisional = rebuild(Records(listed=[OTHER], checkpoint=[], pods=None), NAMES, inventory(), 0.0)[0]
    assert provisional.key.pod_uid.startswith(UNNAMED)
    result = poll((provisional,), [OTHER], [OTHER_POD])
    assert sorted(kinds(result)) == [("adopted", OTHER_POD.uid), ("ended", provisional.key.pod_uid)]


def test_an_init_container_stays_while_its_pod_is_listed() -> None:
    """PodResources never shows it."""
    chain = pod("chain", container("i", cores=5, kind=ContainerKind.INIT), container("m", cores=10, blocks=1))
    init = allocation(chain, "i", ids(0, range(5)), [], ContainerKind.INIT)
    main = allocation(chain, "m", ids(0, range(10)), ids(0, range(1)))
    shown = listed("chain", m=(ids(0, range(10)), ids(0, range(1))))
    assert kinds(poll((init, main), [shown], [chain])) == []


def test_devices_shown_in_a_pod_that_ended_are_not_adopted() -> None:
    """Kubelets show a half-refused pod's devices until the next device admission."""
    failed = pod("one", container(cores=10, blocks=4), phase=PodPhase.FAILED)
    shown = listed("one", main=(ids(0, range(10)), ids(0, range(4))))
    assert kinds(poll((), [shown], [failed])) == []
    assert kinds(poll((ALLOCATED,), [shown], [failed])) == [("ended", ONE.uid)]
