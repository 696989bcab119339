"""Chooses a node's isolation for the setting `auto`, from what is found there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpushare_agent.core.settings.isolation_names import isolation_names


class Standing(Struct, frozen=True, kw_only=True):
    """When `auto` takes an isolation, by its own word. `place` is its place in the order, the smallest first; `because` says
    what on the node speaks for it. `serves_exclusive`: programs under it reach GPUs in compute mode EXCLUSIVE_PROCESS."""

    place: int
    because: str
    serves_exclusive: bool = False


class Candidate(Struct, frozen=True, kw_only=True):
    """An isolation that is no combination. `problem` is why it is not available now, empty if it is. `is_running`: it
    limits containers now, and a restart of the agent must not take that away."""

    name: str
    standing: Standing
    problem: str = ""
    is_running: bool = False


class Choice(Struct, frozen=True, kw_only=True):
    """`reason` is for people: a sentence without its full stop."""

    isolation: str
    reason: str


def choose(candidates: Sequence[Candidate], *, is_exclusive_process: bool = False) -> Choice:
    """The first of these that applies, with the driver's memory limits as well where the agent sets them:

    1. The isolation that containers run under, because they have its files mounted; of several the first in order.
    2. If the GPUs are in compute mode EXCLUSIVE_PROCESS: the isolation that serves those, because no other may open them.
    3. The first in order that is available.
    4. The first in order. Its shares are refused with the remedy.

    Isolation none has no place in the order, so it is never chosen.
    """
    base = _base(sorted(candidates, key=lambda one: (one.standing.place, one.name)), is_exclusive_process)
    combined = f"{base.isolation}+driver"
    # The driver limits memory whatever a program does, so it is added wherever it is available.
    if combined in isolation_names() and any(one.name == "driver" and not one.problem for one in candidates):
        return Choice(isolation=combined, reason=f"{base.reason}; the driver limits memory (615 or later)")
    return base


def _base(ordered: Sequence[Candidate], is_exclusive_process: bool) -> Choice:
    # Before anything else: the kubelet keeps the mounts of containers that run, so they start again with these files.
    if running := [one.name for one in ordered if one.is_running]:
        return Choice(isolation=running[0], reason=f"containers run here that {running[0]} keeps")
    # Even if its daemon does not answer: under any other isolation no second program could open a GPU.
    if is_exclusive_process and (serving := [one.name for one in ordered if one.standing.serves_exclusive]):
        reason = f"the GPUs are in compute mode EXCLUSIVE_PROCESS, so all must use {serving[0]}"
        return Choice(isolation=serving[0], reason=reason)
    chosen = next((one for one in ordered if not one.problem), None)
    if chosen is not None:
        before, text = ordered[: ordered.index(chosen)], chosen.standing.because
    else:
        # Never "none" because no other is there: a share would silently be no share. The refusal has the remedy.
        chosen, before = ordered[0], ordered
        text = f"no isolation can be had, so the shares of {chosen.name} are refused"
    reason = "; ".join([text, *(f"{one.name} cannot be had ({one.problem})" for one in before)])
    return Choice(isolation=chosen.name, reason=reason)
