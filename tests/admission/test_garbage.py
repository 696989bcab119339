"""What one poll of the kubelet releases, and what it keeps."""

from __future__ import annotations

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.recovery import (
    UNNAMED,
    Evidence,
    Reconciliation,
    Records,
    rebuild,
    reconcile,
)
from gpushare_agent.agent.kubelet.records import ListedContainer, ListedPod
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import GpuUuid, unit_id
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from tests.support_core import NAMES, allocation, container, ids, inventory, listed, pod

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


def test_an_equal_ledger_needs_no_correction() -> None:
    """The usual case."""
    result = poll((OTHER_ALLOCATED,), [OTHER], [OTHER_POD])
    assert kinds(result) == [] and not result.missing and not result.deleted


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
    """The kubelet shows the pod and nothing in it: a later container's failure freed the earlier one."""
    bare = listed("one", main=([], []))
    assert kinds(poll((ALLOCATED,), [bare], [ONE])) == [("unlisted", ONE.uid)]


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


def test_an_allocation_of_this_moment_is_left_alone() -> None:
    """The kubelet may not have written it down yet."""
    bare = listed("one", main=([], []))
    assert kinds(poll((ALLOCATED,), [bare], [ONE], fresh=(ALLOCATED,))) == []


def test_what_only_the_kubelet_has_is_adopted() -> None:
    """Its records are the truth."""
    result = poll((), [OTHER], [OTHER_POD])
    assert [(c.kind, c.allocation and c.allocation.cores) for c in result.corrections] == [("adopted", 5)]


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


def test_a_name_that_becomes_known_is_no_correction_of_the_ledger() -> None:
    """After a restart the checkpoint gives IDs without names; the pod list brings them."""
    unnamed = replace(OTHER_ALLOCATED, pod_name="", namespace="")
    result = poll((unnamed,), [OTHER], [OTHER_POD])
    assert [c.kind for c in result.corrections] == ["named"]
    assert result.corrections[0].allocation is not None and result.corrections[0].allocation.pod_name == "other"


def test_units_on_other_gpus_than_ours_replace_ours() -> None:
    """They count as device IDs as those of every other resource do."""
    names = ResourceNames(gpu=("nvidia.com/gpu",))
    owner = pod("one", ContainerSpec(name="main", kind=ContainerKind.MAIN, position=0, requests={"nvidia.com/gpu": 1}))
    first, second = (frozenset({unit_id(GpuUuid(f"GPU-{n}"), 0, "1")}) for n in (0, 1))
    ours = replace(allocation(owner, "main", [], []), ids={ResourceKind.GPU: first})
    units = ListedContainer(name="main", devices={"nvidia.com/gpu": second})
    shown = [ListedPod(namespace="default", name="one", containers=(units,))]
    found = rebuild(Records(listed=shown, checkpoint=[], pods=[owner]), names, inventory(), 0.0)
    evidence = Evidence(
        listed=shown, rebuilt=found, pods={owner.uid: owner}, scope=None, is_trusted=True, missing_before=()
    )
    assert [c.kind for c in reconcile({ours.key: ours}, evidence).corrections] == ["changed"]
    assert reconcile({one.key: one for one in found}, evidence).corrections == ()
