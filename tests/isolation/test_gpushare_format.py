"""The files that the agent shares with libgpushare: their layout against the library's own header, and what is written."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest

from gpushare_agent.agent.isolation.gpushare import format as layout
from gpushare_agent.agent.isolation.gpushare import turns
from tests.gpushare.usage_reader import KINDS
from tests.isolation.support_driver import NATIVE, require_cc

HEADER = NATIVE.parents[1] / "native" / "gpushare"
UUID = "GPU-00000000-0000-4000-8000-000000000000"
POD = "11111111-2222-3333-4444-555555555555"
GPU = layout._FIRST_GPU
"""Where its first number is: the sequence."""
PLACES = [(GPU, 4), (layout._BETWEEN_OFFSET, 2), (layout._CONTEXT_OFFSET, 4)]
PLACES += [(GPU + offset, size) for offset, size in (*layout._LIMITS, *layout._OBSERVED)]


def printed_offsets(directory: Path) -> dict[str, int]:
    program = directory / "layout"
    source = str(NATIVE / "gpushare_layout.c")
    subprocess.run([require_cc(), "-std=c11", "-Wall", "-o", str(program), f"-I{HEADER}", source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in map(str.split, printed.splitlines())}


def test_the_layout_is_that_of_the_librarys_header(tmp_path: Path) -> None:
    """Every offset that is written or read."""
    found = printed_offsets(tmp_path)
    heads = {"layout": 4, "size": 8, "gpus": 12, "boot_id": 16, "pod_uid": 128, "container": 176, "gpu": GPU}
    assert {name: found[f"config.{name}"] for name in heads} == heads
    limits = [found[f"config.gpu.{name}"] for name in ("flags", "memory", "cores", "ceiling")]
    assert limits == [offset for offset, _ in layout._LIMITS]
    names = ("observed_at", "observed_bytes", "busy_since", "busy_until", "busy_ns", "others_ns")
    names += ("published_at", "companions", "full")
    assert [found[f"config.gpu.{name}"] for name in names] == [offset for offset, _ in layout._OBSERVED]
    assert (found["config.gpu.sequence"], found["config.gpu.uuid"]) == (0, layout._UUID_OFFSET)
    usage = {"unattributed": 8, "refused": 16, "launched": 48, "launches": 56, "throttled": 64}
    usage |= {"launched_long": 192, "turns": 200, "present_long": 208, "changed_at": 0, "ended_at": 168}
    assert {name: found[f"usage.gpu.{name}"] for name in usage} == usage
    assert (found["config.between_us"], found["config.context_kib"]) == (layout._BETWEEN_OFFSET, layout._CONTEXT_OFFSET)
    slot = [found[f"slot.{name}"] for name in ("pid", "started_at", "held", "pending", "of_kind", "unhooked")]
    most = layout.MOST_GPUS
    assert slot == [0, 8, 16, 16 + 8 * most, 16 + 16 * most, 16 + 16 * most + 8 * len(KINDS)]
    assert (layout._UNHOOKED_OFFSET, layout._SLOT.size) == (slot[-1], layout._SLOT_BYTES)
    assert found["FIRST_LOCKED_BYTE"] == layout.FIRST_LOCKED_BYTE
    assert (found["usage.gpu"], found["usage.slot"]) == (512, layout._FIRST_SLOT)
    assert (found["sizeof.config"], found["sizeof.config.gpu"]) == (layout.CONFIG_BYTES, layout._GPU_BYTES)
    assert (found["sizeof.usage.gpu"], found["sizeof.slot"]) == (layout._USAGE_GPU_BYTES, layout._SLOT_BYTES)
    assert (found["TURN_NS"], found["CHANGE_NS"]) == (turns.TURN_NS, turns.CHANGE_NS)
    numbers = (layout.USAGE_BYTES, most, layout.MOST_SLOTS, len(KINDS), layout.LAYOUT)
    assert tuple(found[name] for name in ("USAGE_BYTES", "MOST_GPUS", "MOST_SLOTS", "KINDS", "LAYOUTS")) == numbers
    assert found["flags"] == layout._LIMITS_MEMORY | layout._LIMITS_CORES << 8 | layout._HAS_CEILING << 16


def test_limits_are_written_under_a_sequence() -> None:
    """Even before and behind, and another one."""
    config = bytearray(layout.encode_config(POD, "main", [layout.GpuLimits(uuid=UUID, memory_bytes=7 << 30)]))
    [before] = struct.unpack_from("I", config, GPU)
    layout.write_limits(config, 0, layout.GpuLimits(uuid=UUID, memory_bytes=8 << 30, cores=3000, ceiling=6000))
    sequence, flags, uuid, memory, cores, ceiling = struct.unpack_from("=II48sQII", config, GPU)
    assert (flags, uuid.rstrip(b"\0").decode(), memory, cores, ceiling) == (7, UUID, 8 << 30, 3000, 6000)
    assert sequence % 2 == before % 2 == 0 and sequence != before


@pytest.mark.parametrize(("left", "odd", "even"), [(5, 7, 8), (0xFFFFFFFF, 1, 2)])
def test_behind_the_odd_sequence_of_a_dead_agent_comes_another_odd_one(
    left: int, odd: int, even: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers have waited for the one that was left, and do so no more: they would take what is half written."""
    config = bytearray(layout.encode_config(POD, "main", [layout.GpuLimits(uuid=UUID)]))
    struct.pack_into("I", config, GPU, left)
    sequences: set[int] = set()
    monkeypatch.setattr(layout, "_order_stores", lambda: sequences.update(struct.unpack_from("I", config, GPU)))
    seen = layout.Observed(at_ns=1, used_bytes=2, busy_since_ns=3, busy_until_ns=4, busy_ns=5, others_ns=6)
    layout.write_observed(config, 0, seen)
    assert (sequences, *struct.unpack_from("I", config, GPU)) == ({odd}, even)
    assert struct.unpack_from("6Q", config, GPU + 72) == (1, 2, 3, 4, 5, 6)


Stores = Mapping[int, int]
"""What is written, by the offset of the number."""


def stores_between_barriers(write: Callable[[bytearray], None], monkeypatch: pytest.MonkeyPatch) -> list[Stores]:
    """What the product's own writer changes up to each of its barriers, and behind the last one."""
    config = bytearray(layout.encode_config(POD, "main", [layout.GpuLimits(uuid=UUID)]))
    seen = [bytes(config)]
    monkeypatch.setattr(layout, "_order_stores", lambda: seen.append(bytes(config)))
    write(config)
    numbers = [(offset, slice(offset, offset + size)) for offset, size in PLACES]
    return [
        {offset: int.from_bytes(now[at], sys.byteorder) for offset, at in numbers if now[at] != before[at]}
        for before, now in pairwise([*seen, bytes(config)])
    ]


def is_torn(groups: Sequence[Stores]) -> bool:
    """Whether the library (region.c) may take old and new numbers together, where stores of a group are seen in any order,
    as on Arm. It reads the sequence, then the numbers, then the sequence, in that order, and takes the numbers if it was the
    same even one. So of everything that can be seen under one even sequence all must be old, or all new.
    """
    everything = set().union(*groups) - {GPU}
    seen: defaultdict[int, set[bool]] = defaultdict(set)
    before: Stores = {}
    for group in groups:
        for some in chain.from_iterable(combinations(group, count) for count in range(len(group) + 1)):
            visible = {**before, **{offset: group[offset] for offset in some}}
            seen[visible.get(GPU, 0)] |= {offset in visible for offset in everything}
        before = {**before, **group}
    return any(len(kinds) > 1 for sequence, kinds in seen.items() if sequence % 2 == 0)


LIMITS = layout.GpuLimits(uuid=UUID, memory_bytes=8 << 30, cores=3000, ceiling=6000, context_bytes=7 << 20)
OBSERVED = layout.Observed(**dict.fromkeys(layout.Observed.__struct_fields__, 7))


@pytest.mark.parametrize(
    ("write", "count"),
    [
        (lambda config: layout.write_limits(config, 0, LIMITS), 5),
        (lambda config: layout.write_observed(config, 0, OBSERVED), 10),
    ],
)
def test_in_no_order_of_stores_that_arm_allows_a_config_is_torn(
    write: Callable[[bytearray], None], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both barriers; without either of them one is."""
    first, numbers, last = groups = stores_between_barriers(write, monkeypatch)
    assert (first, len(numbers), last) == ({GPU: 3}, count, {GPU: 4})
    assert not is_torn(groups)
    assert is_torn([{**first, **numbers}, last]) and is_torn([first, {**numbers, **last}])


def keeps_order(operations: Sequence[str]) -> bool:
    """Whether a store before them is seen before a store behind them, by what Arm orders of a thread (Arm Architecture
    Reference Manual, B2.3, Barrier-ordered-before): all before a release, all behind an acquisition, a release before an
    acquisition."""
    all_in_order = ["store", *operations, "store"]
    reached = {0}
    for later, operation in enumerate(all_in_order):
        for earlier in sorted(reached):
            pair = all_in_order[earlier], operation
            if earlier < later and (pair[1] == "release" or pair[0] == "acquire" or pair == ("release", "acquire")):
                reached.add(later)
    return len(all_in_order) - 1 in reached


def test_the_barrier_is_one_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[str] = []

    class Recorded:
        def acquire(self) -> None:
            operations.append("acquire")

        def release(self) -> None:
            operations.append("release")

    monkeypatch.setattr(layout, "Lock", Recorded)
    layout._order_stores()
    assert keeps_order(operations)
    assert not keeps_order(["acquire", "release"]) and not keeps_order(["acquire"]) and not keeps_order(["release"])


@pytest.mark.parametrize("uuid", ["GPU-" + "0" * 44, "GPU-" + "0" * 100])
def test_a_uuid_that_does_not_fit_is_refused(uuid: str) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        layout.encode_config(POD, "main", [layout.GpuLimits(uuid=uuid)])


def test_a_hostile_region_is_read_as_numbers() -> None:
    """All bytes set: the agent shows what is there, and nothing else happens."""
    assert layout.read_held(b"\xff" * layout.USAGE_BYTES, 2) == [0, 0]
    assert len(held := layout.read_held(b"\x7f" * layout.USAGE_BYTES, 16)) == 16 and min(held) >= 0
