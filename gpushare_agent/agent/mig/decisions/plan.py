"""What becomes of the instances of one GPU: what is known of each that was made here, the next call to the driver, and the
places that cannot be had. Pure.

An instance that was made here is `creating` from before the driver is called until it was seen whole, `ready` with the UUID
of its life, `destroying` from before the driver is called until it was seen to be gone. One that is ready and that no claim
holds is idle. All others are foreign: made by hand or by another program, and never destroyed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.core.model.mig import MigGpuInstance, MigLayout, MigPlacement
from gpushare_agent.core.model.names import GpuUuid


class MigState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    DESTROYING = "destroying"


class MadeInstance(Struct, frozen=True, kw_only=True):
    """One instance that was made here, or is to be. `profile` is the profile's name. `gi` is None until it was seen, `uuid`
    empty until it was seen whole."""

    place: MigPlacement
    profile: str
    state: MigState = MigState.CREATING
    gi: int | None = None
    uuid: GpuUuid = GpuUuid("")

    @property
    def is_ready(self) -> bool:
        return self.state is MigState.READY


class Wishes(Struct, frozen=True, kw_only=True):
    """What is wanted of one GPU. `held` are the places of claims; `wanted` those of them where an instance is to be made,
    oldest first. `claimed` are the instances that prepared claims have, as their records say.

    `expired`: nobody needs an instance there any longer. `in_doubt`: the driver was called for it and has not answered, so
    that the call may still be carried out. `refused`: it answered that it did not make it, so that what is whole there is
    another's. `failed`: the last call failed, with the reason, and is not to be tried yet where `waiting`. `short`: the
    driver lacked something to make it, which may be no slices. `no_making` and `no_calls` are why nothing may be made, and
    why nothing may be made or destroyed, empty where it may."""

    held: Collection[MigPlacement] = ()
    wanted: Sequence[MigPlacement] = ()
    claimed: Mapping[MigPlacement, GpuUuid] = {}
    expired: Collection[MigPlacement] = ()
    in_doubt: Collection[MigPlacement] = ()
    refused: Collection[MigPlacement] = ()
    failed: Mapping[MigPlacement, str] = {}
    waiting: Collection[MigPlacement] = ()
    short: Collection[MigPlacement] = ()
    no_making: str = ""
    no_calls: str = ""


class Step(Struct, frozen=True, kw_only=True):
    """A call to the driver, for an instance that is `creating` (made, or completed) or `destroying`. `instance` is the one
    to destroy."""

    made: MadeInstance
    instance: MigGpuInstance | None = None


def settle(layout: MigLayout, made: Iterable[MadeInstance], wishes: Wishes) -> list[MadeInstance]:
    """What was made here, as a list of the driver shows it that was read after the last call for this GPU."""
    at = _by_place(layout)
    settled = [_settled(one, at.get(one.place), wishes) for one in made]
    found = [one for one in settled if one is not None]
    known = {one.place for one in found}
    for place, uuid in wishes.claimed.items():
        instance = at.get(place)
        # The records were lost, and the claim's own says that this instance was made for it.
        if place not in known and instance is not None and uuid and uuid in _uuids(instance):
            name = _profile_name(layout, place.profile)
            found.append(MadeInstance(place=place, profile=name, state=MigState.READY, gi=instance.gi, uuid=uuid))
    return found


def _settled(made: MadeInstance, instance: MigGpuInstance | None, wishes: Wishes) -> MadeInstance | None:
    """None: it is gone, or another one lies there."""
    is_doubtful = made.place in wishes.in_doubt
    if instance is None:
        # Only a call that may still be carried out makes one later.
        return made if made.state is MigState.CREATING and is_doubtful else None
    if not _is_life(made, instance) or (made.place in wishes.refused and instance.compute):
        return None
    if made.state is MigState.DESTROYING and (is_doubtful or made.place not in wishes.held):
        return made
    # Half made or half destroyed: a compute instance makes it whole again, with a new UUID.
    uuid = next(iter(_uuids(instance)), made.uuid) if instance.compute else GpuUuid("")
    return replace(made, state=MigState.READY if uuid else MigState.CREATING, gi=instance.gi, uuid=uuid)


def next_step(layout: MigLayout, made: Collection[MadeInstance], wishes: Wishes) -> Step | None:
    """The next call for this GPU, None where nothing is to be done now. `made` is settled."""
    if wishes.no_calls or layout.problem:
        return None
    at, by_place = _by_place(layout), {one.place: one for one in made}

    def destroys(one: MadeInstance) -> Step | None:
        instance = at.get(one.place)
        if instance is None or one.place in wishes.held or one.place in wishes.waiting:
            return None
        return Step(made=replace(one, state=MigState.DESTROYING, gi=instance.gi), instance=instance)

    for place in wishes.wanted:
        own, profile = by_place.get(place), layout.profile(place.profile)
        if place in wishes.waiting or profile is None or wishes.no_making or (own is not None and own.is_ready):
            continue
        if own is not None and own.state is MigState.DESTROYING:
            # An earlier call may yet destroy it: to make it whole now would be to lose it.
            return Step(made=own, instance=at[place])
        ours, others = _in_the_way(layout, by_place, place)
        if others:
            continue
        # It may lack media engines, which slices do not show: what is idle is destroyed.
        more = [one for one in made if one.place != place] if place in wishes.short else []
        steps = [step for one in (*ours, *more) if (step := destroys(one)) is not None]
        if steps:
            return steps[0]
        is_making = place in at and bool(at[place].compute)
        if not ours and not is_making:
            return Step(made=own or MadeInstance(place=place, profile=profile.name))
    for one in made:
        is_needed = one.is_ready and one.place not in wishes.expired
        if not is_needed and (step := destroys(one)) is not None:
            return step
    return None


def blocked(layout: MigLayout, made: Iterable[MadeInstance], wishes: Wishes) -> dict[MigPlacement, str]:
    """The places that no claim can get now, with the reason. A place where an instance of ours is ready is none of them."""
    at, by_place = _by_place(layout), {one.place: one for one in made}
    found: dict[MigPlacement, str] = {}
    of_gpu = wishes.no_calls or layout.problem or wishes.no_making
    if not (of_gpu or wishes.failed or foreign(layout, by_place.values())):
        return found  # as it is nearly always
    for place in layout.placements:
        own, instance = by_place.get(place), at.get(place)
        # One that is to be destroyed, and is whole yet, can be used again.
        is_whole = own is not None and own.state is MigState.DESTROYING and instance is not None and instance.compute
        if is_whole or (own is not None and own.is_ready):
            continue
        ours, others = _in_the_way(layout, by_place, place)
        reasons = [of_gpu, *(_foreign(layout, one) for one in others)]
        # Also while it is tried again: a taint that came and went with each try would have pods placed there.
        reasons += [wishes.failed.get(one, "") for one in (place, *(one.place for one in ours))]
        if why := next(filter(None, reasons), ""):
            found[place] = why
    return found


def exclude(layouts: Mapping[GpuUuid, MigLayout], one: MigPlacement, other: MigPlacement) -> bool:
    """Whether there cannot be instances at both: they need a memory slice of the same GPU, or are of a profile that it can
    have one of. Of a profile that is not known it is assumed."""
    layout = layouts.get(one.parent)
    if one.parent != other.parent or one == other:
        return False
    found = [profile for it in (one, other) if layout and (profile := layout.profile(it.profile)) is not None]
    if len(found) < 2 or (one.profile == other.profile and found[0].most == 1):
        return True
    return one.start < other.start + found[1].size and other.start < one.start + found[0].size


def foreign(layout: MigLayout, made: Iterable[MadeInstance]) -> list[MigGpuInstance]:
    """The instances of a GPU that were not made here."""
    by_place = {one.place: one for one in made}
    return [one for one in layout.instances if not _is_ours(layout, by_place, one)]


def _in_the_way(
    layout: MigLayout, made: Mapping[MigPlacement, MadeInstance], place: MigPlacement
) -> tuple[list[MadeInstance], list[MigGpuInstance]]:
    """What must go before an instance can be made at a place: those that were made here, and the others."""
    profile = layout.profile(place.profile)
    size = profile.size if profile is not None else layout.slices
    rest = [one for one in layout.instances if not _is_ours(layout, made, one) or _place(layout, one) != place]
    found = [one for one in rest if place.start < one.start + one.size and one.start < place.start + size]
    same = [one for one in rest if one.profile == place.profile]
    # `+me` has the GPU's media engines, which are there once: slices do not tell.
    if not found and profile is not None and 0 < profile.most <= len(same):
        found = sorted(same, key=lambda one: not _is_ours(layout, made, one))[:1]
    ours = [made[_place(layout, one)] for one in found if _is_ours(layout, made, one)]
    return ours, [one for one in found if not _is_ours(layout, made, one)]


def _is_ours(layout: MigLayout, made: Mapping[MigPlacement, MadeInstance], instance: MigGpuInstance) -> bool:
    one = made.get(_place(layout, instance))
    return one is not None and _is_life(one, instance)


def _is_life(made: MadeInstance, instance: MigGpuInstance) -> bool:
    """Whether an instance at its place is the same one: IDs are used again, UUIDs are not."""
    if made.gi not in (None, instance.gi):
        return False
    uuids = _uuids(instance)
    return not uuids or not made.uuid or made.uuid in uuids


def _foreign(layout: MigLayout, instance: MigGpuInstance) -> str:
    name = _profile_name(layout, instance.profile)
    return (
        f"instance {name} at memory slice {instance.start} (GPU instance {instance.gi}) lies there and was not made by the"
        " agent, which leaves it: its maker must remove it"
    )


def _profile_name(layout: MigLayout, number: int) -> str:
    profile = layout.profile(number)
    return profile.name if profile is not None else f"of profile {number}"


def _place(layout: MigLayout, instance: MigGpuInstance) -> MigPlacement:
    return MigPlacement(layout.parent, instance.profile, instance.start)


def _by_place(layout: MigLayout) -> dict[MigPlacement, MigGpuInstance]:
    return {_place(layout, one): one for one in layout.instances}


def _uuids(instance: MigGpuInstance) -> list[GpuUuid]:
    return [GpuUuid(one.uuid) for one in instance.compute if one.uuid]
