"""Isolation `auto`: which isolation a node gets, from what is found on it. Pure.

The order, and why, is docs/explanation/isolation.md's, from what was measured: HAMi-core holds most programs of today, MPS
more of them where programs trust each other, vcuda those up to CUDA 11.5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from msgspec import Struct, field

from gpushare_agent.isolation.hami_core.edits import hides_compute
from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.gpus import KernelModule
from gpushare_agent.model.names import ISOLATION_ANNOTATION

_HAMI_CORE, _MPS, _VCUDA, _DRIVER = "hami-core", "mps", "vcuda", "driver"
_COMBINED = {_HAMI_CORE: "hami-core+driver", _MPS: "mps+driver"}


_SHOWN_CHARS = 40


class NodeFindings(Struct, frozen=True, kw_only=True):
    """`problems` has, for each isolation that is no combination, why it cannot be had, empty where it can. `running` are
    those that keep containers of this moment, which a restart of the agent must not take away. `sets_driver_limits`:
    the agent sets the driver's limits, so they are there."""

    problems: Mapping[str, str]
    running: Set[str] = field(default_factory=frozenset)
    is_exclusive_process: bool = False
    module: KernelModule | None = None
    sets_driver_limits: bool = False


class Choice(Struct, frozen=True, kw_only=True):
    """`reason` is for people: a sentence without its full stop."""

    isolation: str
    reason: str


def choose(found: NodeFindings) -> Choice:
    """The first of these that applies; with the driver's memory limits beside HAMi-core or MPS where the agent sets them.

    1. Containers run that one of the libraries keeps: that one, for they have its files mounted.
    2. The GPUs are in compute mode EXCLUSIVE_PROCESS: MPS, for nobody but its server may open them.
    3. HAMi-core, unless the kernel module keeps it from seeing its own use of compute and MPS can be had.
    4. MPS, 5. vcuda, 6. the driver's memory limits alone: whichever can be had.
    7. HAMi-core, whose shares are refused with the cure.
    """
    base = _base(found)
    if base.isolation in _COMBINED and not found.problems[_DRIVER] and found.sets_driver_limits:
        return Choice(
            isolation=_COMBINED[base.isolation], reason=f"{base.reason}; the driver limits memory (615 or later)"
        )
    return base


def _base(found: NodeFindings) -> Choice:
    problems = found.problems
    for library in (_HAMI_CORE, _VCUDA):
        if library in found.running:
            return Choice(isolation=library, reason=f"containers run here that {library} keeps")
    if found.is_exclusive_process:
        return Choice(isolation=_MPS, reason="the GPUs are in compute mode EXCLUSIVE_PROCESS, so all must use MPS")
    is_blind = found.module is not None and hides_compute(found.module)
    if not problems[_HAMI_CORE] and not (is_blind and not problems[_MPS]):
        return Choice(isolation=_HAMI_CORE, reason="its library is there for this machine")
    why_not = (
        f"HAMi-core does not keep compute under the open kernel modules {found.module.version}"
        if found.module is not None and not problems[_HAMI_CORE]
        else f"HAMi-core cannot be had ({problems[_HAMI_CORE]})"
    )
    if not problems[_MPS]:
        return Choice(isolation=_MPS, reason=f"an MPS daemon answers, and {why_not}")
    if not problems[_VCUDA]:
        return Choice(
            isolation=_VCUDA, reason=f"its control library is installed, no MPS daemon answers, and {why_not}"
        )
    if not problems[_DRIVER] and found.sets_driver_limits:
        return Choice(isolation=_DRIVER, reason=f"the driver limits memory, nothing here limits compute, and {why_not}")
    return Choice(isolation=_HAMI_CORE, reason=f"no isolation can be had, so its shares are refused: {why_not}")


def choose_isolation(annotations: Mapping[str, str], node: str, allowed: Collection[str]) -> str | Refused:
    """An annotation selects only among the isolations that the node's settings allow. Any other value is refused, not
    ignored: the pod was written for another isolation."""
    text = annotations.get(ISOLATION_ANNOTATION)
    if text is None:
        return node
    known = sorted({node, *allowed})
    if text in known:
        return text
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return Refused(
        reason=RefusalReason.INVALID_REQUEST,
        detail=f"the annotation {ISOLATION_ANNOTATION} is {shown!r}, but this node allows {', '.join(known)}. Name one of"
        f" these, leave the annotation out for {node}, or have the setting isolations_allowed changed.",
    )
