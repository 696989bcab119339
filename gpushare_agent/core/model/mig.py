"""How MIG divides a GPU: profiles, the places where an instance may lie, and the GPU instances that there are.

A placement is identified by its GPU, the ID of its profile, and its first memory slice. GPU instance IDs, compute instance
IDs and device indexes are used again for other instances; the UUID of an instance is new with each life of it, and so
tells whether it is still the same. The number of slices identifies no profile: `1g.10gb`, `1g.10gb+me` and `1g.20gb` have
one each.

Source: NVML API reference, "Multi Instance GPU Management"; NVIDIA's MIG user guide.
"""

from __future__ import annotations

from msgspec import Struct

from gpushare_agent.core.model.names import GpuUuid


class MigAttributes(Struct, frozen=True, kw_only=True):
    """A MIG instance's part of its GPU (nvmlDeviceAttributes_t): counts, and memory in MiB."""

    memory_mib: int
    gi_slices: int
    ci_slices: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class MigPlace(Struct, frozen=True, kw_only=True):
    """The place of a MIG instance in its GPU. `profile` is as nvidia-smi has it, such as `1g.10gb` or `1g.10gb+me`; `number`
    is the driver's, the 1 of NVIDIA's name `0:1`, and changes when others are made or removed. `gi` and `ci` are the IDs of
    the GPU instance and the compute instance, `gi_cap` and `ci_cap` the n of their nodes `/dev/nvidia-caps/nvidia-cap<n>`,
    None where the host has none. `is_gone`: it no longer exists, and is listed because a container has it."""

    profile: str
    number: int
    parent: GpuUuid
    parent_index: int
    gi: int
    ci: int
    gi_cap: int | None = None
    ci_cap: int | None = None
    attributes: MigAttributes | None = None
    is_gone: bool = False
    profile_id: int | None = None
    """The driver's ID of the GPU instance profile; None where it does not say."""
    start: int | None = None
    """The first memory slice of the GPU instance."""
    caps_major: int = 0
    """The major number of its two nodes; 0 where the host does not say."""

    @property
    def has_own_memory(self) -> bool:
        """False for a part of a GPU instance's compute, as `1c.3g.40gb`: all parts have the same memory."""
        return not self.profile.partition(".")[0].endswith("c")


class MigPlacement(Struct, frozen=True, order=True):
    """A place where an instance may lie. `profile` is the driver's ID of the GPU instance profile, `start` its first memory
    slice."""

    parent: GpuUuid
    profile: int
    start: int


class MigProfile(Struct, frozen=True, kw_only=True):
    """A GPU instance profile of one GPU, under the driver's ID. `name` is as nvidia-smi has it, without `MIG `. An instance
    takes `size` memory slices from one of `starts` on. `most` is how many of it there can be at once on an empty GPU.
    `attributes` are those of an instance with one compute instance that has all of it."""

    id: int
    name: str
    size: int
    starts: tuple[int, ...]
    most: int
    attributes: MigAttributes


class MigComputeInstance(Struct, frozen=True, kw_only=True):
    """`uuid` is that of the MIG device, empty where the driver does not tell it; `slices` are its compute slices."""

    ci: int
    uuid: str
    slices: int


class MigGpuInstance(Struct, frozen=True, kw_only=True):
    """A GPU instance that exists. Without compute instances it is half made or half destroyed, and no MIG device."""

    gi: int
    profile: int
    start: int
    size: int
    compute: tuple[MigComputeInstance, ...] = ()


class MigLayout(Struct, frozen=True, kw_only=True):
    """A GPU in MIG mode on which instances may be made. `slices` is how many memory slices it has. `instances` are all that
    exist, whoever made them. `problem` is why no instance can be made or destroyed, with the remedy; empty where it can.
    With a problem the rest may be that of an earlier poll: what is missing need not be gone."""

    parent: GpuUuid
    slices: int = 0
    profiles: tuple[MigProfile, ...] = ()
    instances: tuple[MigGpuInstance, ...] = ()
    problem: str = ""

    def profile(self, number: int) -> MigProfile | None:
        """The profile with the driver's ID."""
        return next((one for one in self.profiles if one.id == number), None)

    @property
    def placements(self) -> dict[MigPlacement, MigProfile]:
        """Every place for an instance, with its profile."""
        return {MigPlacement(self.parent, one.id, start): one for one in self.profiles for start in one.starts}
