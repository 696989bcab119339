"""The output of the in-container client: a container's limits and PIDs as text for people, JSON for programs. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable

from msgspec import Struct, to_builtins

from gpushare_agent.isolation.vcuda.format import VDeviceConfig
from gpushare_agent.model.names import MIB


class VDevice(Struct, frozen=True, kw_only=True):
    """A container's limits, and the PIDs of its processes as the driver reports them."""

    config: VDeviceConfig
    pids: tuple[int, ...]


def as_json(found: VDevice, *, own_pid: int | None, is_registered: bool | None) -> str:
    """One line. `own_pid` is null where it cannot be known; `registered` is absent where it was not tried."""
    document = {
        **to_builtins(found.config),
        "pids": found.pids,
        "own_pid": own_pid,
        "own_pid_listed": None if own_pid is None else own_pid in found.pids,
    }
    if is_registered is not None:
        document["registered"] = is_registered
    return json.dumps(document, sort_keys=True) + "\n"


def as_text(found: VDevice, *, own_pid: int | None, is_registered: bool | None) -> str:
    """`is_registered` is None where that was not tried, False where it failed."""
    rows = (*_limits(found.config), ("pids", _numbers(found.pids)), ("own pid", _own(found, own_pid, is_registered)))
    return "".join(f"{name:<11} {value}\n" for name, value in rows)


def changes_as_text(before: VDevice, after: VDevice, now: str) -> str:
    """A line for each row that changed, and one for PIDs that came and went. Empty where nothing did."""
    old = dict(_limits(before.config))
    lines = [f"{name}: {old[name]} -> {value}" for name, value in _limits(after.config) if old[name] != value]
    came, went = set(after.pids) - set(before.pids), set(before.pids) - set(after.pids)
    if came or went:
        moved = [f"+{pid}" for pid in sorted(came)] + [f"-{pid}" for pid in sorted(went)]
        lines.append(f"pids: {' '.join(moved)} ({len(after.pids)} now)")
    return "".join(f"{now} {line}\n" for line in lines)


def _limits(config: VDeviceConfig) -> tuple[tuple[str, str], ...]:
    whole = "no: whole GPUs, the library passes every call on unchanged"
    return (
        ("pod uid", config.pod_uid),
        ("container", config.container),
        ("bus id", config.bus_id or "-"),
        ("cores", f"{config.utilization} %"),
        ("core limit", _ceiling(config)),
        ("hard limit", "yes" if config.hard_limit else "no"),
        ("memory", f"{config.memory_bytes / MIB:g} MiB"),
        ("driver", f"{config.driver[0]}.{config.driver[1]}"),
        ("limited", "yes" if config.enable else whole),
    )


def _ceiling(config: VDeviceConfig) -> str:
    if not config.limit:
        return "none"
    return f"{config.limit} %" + (", no more than its cores" if config.limit == config.utilization else "")


def _own(found: VDevice, own_pid: int | None, is_registered: bool | None) -> str:
    if own_pid is None:
        return "not to be known: this process is in a PID namespace of its own, and the PIDs above may be the host's"
    if own_pid in found.pids:
        return f"{own_pid}, listed"
    if is_registered:
        return (
            f"{own_pid}, NOT listed: it is not in this container's cgroup, or the agent cannot see the host's processes"
        )
    if is_registered is None:
        return f"{own_pid}, not listed: it is no process of this container, or began within the last second"
    return f"{own_pid}, not listed: it could not be registered (above), and the agent that keeps the list may be away"


def _numbers(pids: Iterable[int]) -> str:
    return " ".join(map(str, pids)) or "-"
