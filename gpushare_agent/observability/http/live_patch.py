"""What changed between two documents of the node, small enough to be sent each second.

Pure functions over the JSON of observability/node_snapshot.py. The format of a patch is docs/reference/api.md. Uses are
rounded to three digits, so that what nobody can see is not sent; and they come as lists in the order of GPU_USE and
CONTAINER_USE, because with names 16 GPUs and 200 containers would take 60 KB a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Document = dict[str, Any]

DIGITS = 3
GPU_USE = (
    "sm_ratio",
    "memory_ratio",
    "memory_used_bytes",
    "temperature_celsius",
    "power_watts",
    "encoder_ratio",
    "decoder_ratio",
    "power_limit_watts",
    "sm_clock_hertz",
    "memory_clock_hertz",
    "ecc_corrected_total",
    "ecc_uncorrected_total",
    "pcie_received_bytes_per_second",
    "pcie_sent_bytes_per_second",
    "nvlink_received_bytes_total",
    "nvlink_sent_bytes_total",
)
CONTAINER_USE = ("sm_ratio", "memory_bytes", "encoder_ratio", "decoder_ratio")
EXACT = frozenset({"ecc_corrected_total", "ecc_uncorrected_total", "pid"})
"""Values that are sent unrounded."""
MOST_UNATTRIBUTED = 20
"""Of one GPU, the largest: a node's other programs must not fill the stream."""
_WHOLE_PARTS = ("schema", "node", "resources", "topology")


def container_key(container: Mapping[str, Any]) -> str:
    return f"{container['pod_uid']}/{container['container']}"


def rounded(document: Document) -> Document:
    """The document as the stream shows it: the baseline of the patches that follow."""
    return {
        **document,
        "at": round(document["at"], 1),
        "agent": {**document["agent"], "sampled_at": _moment(document["agent"]["sampled_at"])},
        "cards": [_rounded_gpu(gpu) for gpu in document["cards"]],
        "containers": [
            {**container, "cards": [{**share, "usage": _rounded(share["usage"])} for share in container["cards"]]}
            for container in document["containers"]
        ],
    }


def patch(old: Document, new: Document) -> Document:
    """What turns `old` into `new`, both rounded; empty where nothing changed but the time."""
    found = {name: new[name] for name in _WHOLE_PARTS if old[name] != new[name]}
    _put(found, "agent", _changed(old["agent"], new["agent"]))
    old_gpus, new_gpus = _by_uuid(old), _by_uuid(new)
    old_containers, new_containers = _by_key(old), _by_key(new)
    cards, card_use = _changed_gpus(old_gpus, new_gpus)
    containers, container_use = _changed_containers(old_containers, new_containers)
    _put(found, "cards", cards)
    _put(found, "card_use", card_use)
    _put(found, "containers", containers)
    _put(found, "container_use", container_use)
    _put(found, "gone", sorted({*old_gpus, *old_containers} - {*new_gpus, *new_containers}))
    return {"at": new["at"], **found} if found else {}


def _put(found: Document, name: str, value: Any) -> None:
    if value:
        found[name] = value


def _by_uuid(document: Document) -> dict[str, Document]:
    return {gpu["uuid"]: gpu for gpu in document["cards"]}


def _by_key(document: Document) -> dict[str, Document]:
    return {container_key(container): container for container in document["containers"]}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    return {name: value for name, value in new.items() if name not in old or old[name] != value}


def _changed_gpus(old: Mapping[str, Document], new: Mapping[str, Document]) -> tuple[Document, Document]:
    """GPUs with a change besides their numbers, the changed fields of each; and those of which the numbers changed."""
    found, use = {}, {}
    for uuid, gpu in new.items():
        before = old.get(uuid)
        if before is None:
            found[uuid] = gpu
            continue
        changed = _changed(before, gpu)
        if _is_only_numbers(before["usage"], gpu["usage"], GPU_USE) and changed.pop("usage", None) is not None:
            use[uuid] = _numbers(gpu["usage"], GPU_USE)
        if changed:
            found[uuid] = changed
    return found, use


def _changed_containers(old: Mapping[str, Document], new: Mapping[str, Document]) -> tuple[Document, Document]:
    """Containers with a change besides their use; and `[[GPU's index, …], …]` of the GPUs on which only that changed."""
    found, use = {}, {}
    for key, container in new.items():
        before = old.get(key)
        if before is None or not _is_only_use(before, container):
            found[key] = container
        elif before != container:
            shares = zip(before["cards"], container["cards"], strict=True)
            use[key] = [
                [share["index"], *_numbers(share["usage"], CONTAINER_USE)] for was, share in shares if was != share
            ]
    return found, use


def _is_only_use(old: Document, new: Document) -> bool:
    """True where the containers differ at most in the numbers of their use."""
    if old == new:
        return True
    if any(old[name] != new[name] for name in new if name != "cards") or len(old["cards"]) != len(new["cards"]):
        return False
    return all(
        {**was, "usage": None} == {**share, "usage": None}
        and _is_only_numbers(was["usage"], share["usage"], CONTAINER_USE)
        for was, share in zip(old["cards"], new["cards"], strict=True)
    )


def _is_only_numbers(old: Document | None, new: Document | None, names: Sequence[str]) -> bool:
    if old is None or new is None:
        return old is new
    return all(old.get(name) == new.get(name) for name in {*old, *new} if name not in names)


def _numbers(usage: Document | None, names: Sequence[str]) -> list[Any]:
    """In the order of `names`, without the unknown ones at the end. Not for a use that is not known at all."""
    values = [usage.get(name) for name in names] if usage is not None else []
    while values and values[-1] is None:
        values.pop()
    return values


def _rounded_gpu(gpu: Document) -> Document:
    unattributed = sorted(gpu["strangers"], key=lambda one: (-(one["memory_bytes"] or 0), one["pid"]))
    return {
        **gpu,
        "usage": _rounded(gpu["usage"]),
        "strangers": [_rounded(one) for one in unattributed[:MOST_UNATTRIBUTED]],
        "strangers_count": len(unattributed),
    }


def _rounded(values: Document | None) -> Document | None:
    if values is None:
        return None
    return {name: value if name in EXACT else _three_digits(value) for name, value in values.items()}


def _three_digits(value: Any) -> Any:
    """Ratios get three digits behind the point, other numbers three at all; whole numbers are written as such."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value):
        return None
    if value == 0:
        return 0
    digits = DIGITS - 1 - math.floor(math.log10(abs(value)))
    short = round(value, min(digits, DIGITS))
    return int(short) if short == int(short) else short


def _moment(at: float | None) -> float | None:
    return None if at is None else round(at, 1)
