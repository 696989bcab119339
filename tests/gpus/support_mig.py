"""MIG on the fake libnvidia-ml.so.1: a GPU's profiles as lines of its script, and its instances in the hands of others."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpushare_agent.core.formats.mig_profiles import numbered_profiles
from gpushare_agent.core.model.mig import MigProfile

CI_PROFILES = {1: 50, 2: 51, 3: 52, 4: 53, 7: 54}
"""The ID of the compute instance profile by its slices, as the fake has it."""


def profile_lines(index: int, product: str, memory_mib: int, *, named: bool = True) -> str:
    """The GPU's lines of the script. Not `named`: the driver does not name profiles."""
    lines = []
    for number, one in numbered_profiles(product, memory_mib).items():
        a = one.attributes
        counts = (one.size, a.gi_slices, one.most, a.multiprocessors, a.copy_engines, a.decoders, a.encoders)
        rest = (a.jpeg_engines, a.ofa_engines, a.memory_mib, ",".join(map(str, one.starts)))
        name = f"MIG {one.name}" if named else "-"
        lines.append(" ".join(map(str, ("gi_profile", index, number, one.id, *counts, *rest, name))) + "\n")
    return "".join(lines)


def machine_of(*cards: tuple[str, int], named: bool = True) -> str:
    """GPUs in MIG mode, GPU-0 and so on."""
    lines = [f"count {len(cards)}\n"]
    for index, (name, mib) in enumerate(cards):
        lines += [f"GPU {index} GPU-{index} {index} 00000000:{index + 1:02X}:00.0 {mib} 1 {name}\n"]
        lines += [profile_lines(index, name, mib, named=named)]
    return "".join(lines)


class Hardware:
    """The instances that outlive processes, as nvidia-smi or a reboot changes them. See the head of native/fake_nvml.c."""

    def __init__(self, directory: Path) -> None:
        self._script = directory / "script"

    @contextmanager
    def lines(self) -> Iterator[list[list[str]]]:
        """The words of each line, to be changed."""
        path = self._script.with_name("script.mig")
        with self._script.with_name("script.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            yield lines
            fresh = path.with_name("script.mig.new")
            fresh.write_text("".join(f"{' '.join(words)}\n" for words in lines))
            fresh.replace(path)

    @property
    def instances(self) -> list[tuple[int, int, int, list[str]]]:
        """GPU, ID of the profile and start of each GPU instance, with the UUIDs of its compute instances."""
        with self.lines() as lines:
            return sorted(
                (int(gpu), int(profile), int(start), [w[7] for w in lines if w[:3] == ["ci", gpu, gi]])
                for kind, gpu, gi, profile, start, *_ in (words for words in lines if words[0] == "gi")
            )

    def make(self, gpu: int, gi: int, profile: MigProfile, start: int, *compute: tuple[str, int]) -> None:
        """A GPU instance with this ID, and compute instances: the UUID and the slices of each."""
        with self.lines() as lines:
            lines.append([*map(str, ("gi", gpu, gi, profile.id, start, profile.size, 0))])
            at = 0
            for ci, (uuid, slices) in enumerate(compute):
                lines.append([*map(str, ("ci", gpu, gi, ci, CI_PROFILES[slices], at, slices, uuid, 0))])
                at += slices

    def remove(self, gpu: int, gi: int) -> None:
        with self.lines() as lines:
            lines[:] = [words for words in lines if words[1:3] != [str(gpu), str(gi)]]

    def use(self, gpu: int, gi: int, ci: int = -1) -> None:
        """Somebody has the compute instance open, or with -1 the GPU instance."""
        with self.lines() as lines:
            lines.append([*map(str, ("use", gpu, gi, ci))])

    def end_use(self) -> None:
        with self.lines() as lines:
            lines[:] = [words for words in lines if words[0] != "use"]

    def reboot(self) -> None:
        with self.lines() as lines:
            lines[:] = [words for words in lines if words[0] == "serial"]
