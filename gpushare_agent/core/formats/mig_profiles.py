"""The GPU instance profiles that NVIDIA's driver has for each product with MIG: for simulated GPUs, and for tests.

Source, per product: what `nvidia-smi mig -lgip` and `-lgipp` print, as shown in public reports, and NVIDIA's MIG user guide
("Supported MIG Profiles"). What was found in neither is marked as inferred. nvidia-smi prints GiB with two digits; the
driver's sizes are multiples of 64 MiB.

An instance needs more than free memory slices: every engine of the GPU is there once, and the largest profile has all of
them. Where a GPU has four computing slices, engines run out first: one `+me` takes the only OFA, `+me.all` all decoders.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import le

from msgspec.structs import astuple

from gpushare_agent.core.model.mig import MigAttributes, MigProfile

# A line for each profile: the driver's ID; NVML_GPU_INSTANCE_PROFILE_…; computing slices and suffix; memory slices; starts;
# how many there can be; copy engines, decoders, encoders, JPEG decoders, OFAs.
_SEVEN = """
    19 0 1g    1 0,1,2,3,4,5,6 7 {}
    20 7 1g+me 1 0,1,2,3,4,5,6 1 {}
    15 9 1g    2 0,2,4,6       4 {}
    14 1 2g    2 0,2,4         3 {}
     9 2 3g    4 0,4           2 {}
     5 3 4g    4 0             1 {}
     0 4 7g    8 0             1 {}"""
"""Placements as printed for A100, H100 and H100 NVL; the IDs are the same for all."""
_A100 = _SEVEN.format("1 0 0 0 0", "1 1 0 1 1", "1 1 0 0 0", "2 1 0 0 0", "3 2 0 0 0", "4 2 0 0 0", "7 5 0 1 1")
_HOPPER = _SEVEN.format("1 1 0 1 0", "1 1 0 1 1", "1 1 0 1 0", "2 2 0 2 0", "3 3 0 3 0", "4 4 0 4 0", "8 7 0 7 1")
# Of 3g, 4g and 7g: copy engines as in the user guide, decoders inferred (the guide's differ from those that are printed).
_BLACKWELL = _SEVEN.format("2 1 0 1 0", "2 1 0 1 1", "2 1 0 1 0", "4 2 0 2 0", "6 3 0 3 0", "8 4 0 4 0", "16 7 0 7 1")
_A30 = """
    14 0 1g    1 0,1,2,3 4 1 1 0 0 0
    21 7 1g+me 1 0,1,2,3 1 1 1 0 1 1
     5 1 2g    2 0,2     2 2 2 0 0 0
     6 8 2g+me 2 0,2     1 2 2 0 1 1
     0 3 4g    4 0       1 4 4 0 1 1"""
_RTX_PRO_6000 = """
    14  0 1g        3  0,3,6,9 4 1 1 1 1 0
    21  7 1g+me     3  0,3,6,9 1 1 1 1 1 1
    47 10 1g+gfx    3  0,3,6,9 4 1 1 1 1 0
    65 15 1g+me.all 3  0,3,6,9 1 1 4 4 4 1
    67 13 1g-me     3  0,3,6,9 4 1 0 0 0 0
     5  1 2g        6  0,6     2 2 2 2 2 0
    35 11 2g+gfx    6  0,6     2 2 2 2 2 0
    64 16 2g+me.all 6  0,6     1 2 4 4 4 1
    66 14 2g-me     6  0,6     2 2 0 0 0 0
     0  3 4g        12 0       1 4 4 4 4 1
    32 12 4g+gfx    12 0       1 4 4 4 4 1"""


_PRODUCTS = (
    (r"\bA30\b", _A30, "6 12 24", "5952 11968 24000", "14 28 56"),
    (r"\bA[18]00\b.*\b40GB", _A100, "5 10 20 40", "4864 9984 20096 40448", "14 14 28 42 56 98"),
    (r"\bA[18]00\b.*\b80GB", _A100, "10 20 40 80", "9728 19968 40192 80896", "14 14 28 42 56 98"),
    (r"\bH[18]00 PCIe", _HOPPER, "10 20 40 80", "9984 20096 40448 81152", "14 14 30 46 62 114"),
    (r"\bH[18]00 NVL", _HOPPER, "12 24 47 94", "11008 22144 47488 95360", "16 26 32 60 64 132"),
    (r"\bH100 96GB|\bGH200 480GB", _HOPPER, "12 24 48 96", "11264 23552 47616 95232", "16 26 32 60 64 132"),
    # Inferred: memory as of H100 96GB; it has 78 multiprocessors, how they are divided was not found.
    (r"\bH20\b", _HOPPER, "12 24 48 96", "11264 23552 47616 95232", "10 10 20 36 40 78"),
    (r"\bH[18]00\b", _HOPPER, "10 20 40 80", "9984 20096 40448 81152", "16 26 32 60 64 132"),
    # Inferred: memory and multiprocessors of 3g, 4g and 7g; here and in the next two.
    (r"\bGH200 144G", _HOPPER, "18 36 72 144", "17920 36096 72704 146432", "16 26 32 60 64 132"),
    (r"\bB200\b", _BLACKWELL, "23 45 90 180", "22528 45312 91136 182784", "18 30 36 70 72 148"),
    (r"\bGB200\b", _BLACKWELL, "23 47 93 186", "22528 46592 94208 188928", "18 32 38 72 76 152"),
    (r"\bH200\b", _HOPPER, "18 35 71 141", "16384 33024 71168 143104", "16 26 32 60 64 132"),
    # Inferred: all but names and IDs (GPU Operator's release notes 25.10; NVIDIA's page on MIG of the DGX Station).
    (r"\bB300\b", _BLACKWELL, "34 67 135 269", "33792 68352 137216 274432", "18 30 36 70 72 148"),
    (r"\bGB300\b", _BLACKWELL, "35 70 139 278", "34816 70656 141824 283648", "18 32 38 72 76 152"),
    (r"\bRTX PRO 6000\b", _RTX_PRO_6000, "24 48 96", "24192 48512 97280", "46 94 188"),
)
"""What a product's name contains (the first counts); its profiles; by memory slices, ascending, the size in names, GB, and
the memory, MiB; by computing slices and memory, ascending, the multiprocessors."""
_OF_UNKNOWN, _ITS_MIB = _PRODUCTS[2], 81_920


def profile_names() -> tuple[str, ...]:
    """Those of all products, by computing slices and memory."""
    found = {profile.name for _, *product in _PRODUCTS for profile in _profiles(*product).values()}
    return tuple(sorted(found, key=lambda name: (tuple(map(int, re.findall(r"\d+", name))), name)))


def numbered_profiles(product: str, memory_mib: int) -> dict[int, MigProfile]:
    """The profiles of a GPU with that product name, such as `NVIDIA H100 80GB HBM3`, by NVML_GPU_INSTANCE_PROFILE_….

    A product that is not known here, or with less memory than it has: those of an A100 80GB, in proportion to the memory.
    """
    for pattern, lines, gb, mib, multiprocessors in _PRODUCTS:
        if re.search(pattern, product) and int(mib.split()[-1]) <= memory_mib:
            return _profiles(lines, gb, mib, multiprocessors)
    _, lines, _, mib, multiprocessors = _OF_UNKNOWN
    sizes = (max(1, (size * -(-memory_mib // 1024) + 4) // 8) for size in (1, 2, 4, 8))
    scaled = (max(1, int(each) * memory_mib // _ITS_MIB) for each in mib.split())
    return _profiles(lines, " ".join(map(str, sizes)), " ".join(map(str, scaled)), multiprocessors)


def mig_profiles(product: str, memory_mib: int) -> tuple[MigProfile, ...]:
    """The same without those numbers. The largest has all memory slices and all engines of the GPU."""
    return tuple(numbered_profiles(product, memory_mib).values())


def has_room(
    profiles: Sequence[MigProfile], placed: Sequence[tuple[MigProfile, int]], profile: MigProfile, start: int
) -> bool:
    """Whether an instance can be made at `start` next to those that are `placed`: the slices are free, there can be one more
    of its profile, and the engines suffice."""
    if any(at < start + profile.size and start < at + other.size for other, at in placed):
        return False
    _, _, _, *whole = astuple(max(profiles, key=lambda one: one.size).attributes)
    _, _, _, *used = (
        sum(of) for of in zip(*(astuple(one.attributes) for one in (profile, *(one for one, _ in placed))), strict=True)
    )
    return sum(other.id == profile.id for other, _ in placed) < profile.most and all(map(le, used, whole))


def _profiles(lines: str, gb: str, mib: str, multiprocessors: str) -> dict[int, MigProfile]:
    rows = [line.split() for line in lines.strip().splitlines()]
    sizes, kinds = dict.fromkeys(row[3] for row in rows), dict.fromkeys((row[2][:2], row[3]) for row in rows)
    gigabytes, memory = (dict(zip(sizes, values.split(), strict=True)) for values in (gb, mib))
    counts = dict(zip(kinds, multiprocessors.split(), strict=True))
    found = {}
    for number, nvml, kind, size, starts, most, *engines in rows:
        computing = kind[:2]
        copy, decoders, encoders, jpeg, ofa = map(int, engines)
        found[int(nvml)] = MigProfile(
            id=int(number),
            name=f"{computing}.{gigabytes[size]}gb{kind[2:]}",
            size=int(size),
            starts=tuple(map(int, starts.split(","))),
            most=int(most),
            attributes=MigAttributes(
                memory_mib=int(memory[size]), gi_slices=int(computing[0]), ci_slices=int(computing[0]),
                multiprocessors=int(counts[computing, size]), copy_engines=copy, decoders=decoders, encoders=encoders,
                jpeg_engines=jpeg, ofa_engines=ofa,
            ),
        )  # fmt: skip
    return found
