"""The use of GPUs and containers, as one poll of the driver found it. Ratios are 0..1, sizes bytes, times seconds.

None means unknown: not supported by this GPU, or no value for this moment. It never means zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field

from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import GpuUuid


class ProcessKind(StrEnum):
    """The list of the driver's in which a process was found. A client of MPS is listed by its own PID."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class ProcessSample(Struct, frozen=True, kw_only=True):
    """One process on one GPU, by its PID on the host. The ratios are of the whole GPU."""

    pid: int
    kind: ProcessKind = ProcessKind.COMPUTE
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    memory_ratio: float | None = None
    """The part of the time in which device memory was read or written."""
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """What the kernel says of a process. Nothing of one that has ended, or whose PID another process has now."""

    pid_in_container: int | None = None
    """In its own PID namespace; None where that is the host's."""
    command: str | None = None
    """Its program's name without arguments, at most 64 printable characters: a tenant chooses it."""


class GpuUse(Struct, frozen=True, kw_only=True):
    """The use of one GPU, as it is shown."""

    sm_ratio: float | None = None
    memory_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None
    memory_used_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    ecc_corrected_total: int | None = None
    """Since the driver was loaded (NVML's volatile count), as is the next one."""
    ecc_uncorrected_total: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Snake-case names, sorted: `power_cap`, `hw_thermal`, …; empty while the GPU is not throttled."""
    pcie_received_bytes_per_second: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_total: int | None = None
    nvlink_sent_bytes_total: int | None = None


class GpuSample(GpuUse, frozen=True, kw_only=True):
    """One GPU. `processes` is None where the GPU could not list them, else sorted by PID, each PID once."""

    uuid: GpuUuid
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    """Less than what is not used: the driver keeps a part for itself."""
    processes: tuple[ProcessSample, ...] | None = None


class DriverSample(Struct, frozen=True, kw_only=True):
    """One poll of all GPUs that answer. `errors` counts the driver's errors by name (`gpu_is_lost`, `timeout`, …); what a
    GPU does not support is no error."""

    gpus: tuple[GpuSample, ...]
    errors: Mapping[str, int] = field(default_factory=dict)


class BusyProcess(Struct, frozen=True, kw_only=True):
    """One process on one GPU, by its PID on the host. `busy_ns` is how long it kept the GPU busy since the last reading."""

    pid: int
    memory_bytes: int | None
    busy_ns: int


class GpuBusy(Struct, frozen=True, kw_only=True):
    """One reading of who keeps a GPU busy. Times are of CLOCK_MONOTONIC.

    `busy_until_ns` is how far that is known, some time before `at_ns`; 0 where the driver does not say it. What is counted
    then reaches back to the `busy_until_ns` of the reading before, unless not `is_continued`: then it is nothing.
    """

    at_ns: int
    busy_until_ns: int
    is_continued: bool
    processes: tuple[BusyProcess, ...]


class SamplesBusy(Protocol):
    async def sample_busy(self, gpus: Collection[GpuUuid]) -> Mapping[GpuUuid, GpuBusy]:
        """One reading for each GPU that answers. It is quick enough for ten times a second. Raises Unavailable."""


class SmSource(StrEnum):
    """The source of a container's compute: the driver, by its processes, or its isolation's library, by what it has paid.
    Under MPS there may be none: the driver counts the clients' compute in the process of their server."""

    DRIVER = "driver"
    LIBRARY = "library"
    MPS = "mps"


class ContainerUse(Struct, frozen=True, kw_only=True):
    """The use of one GPU by one container, the sum over its processes. A ratio is None where no process's is known."""

    key: ContainerKey
    uuid: GpuUuid
    pids: tuple[int, ...]
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    sm_source: SmSource = SmSource.DRIVER
    memory_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None


class UsageRound(Struct, frozen=True, kw_only=True):
    """One round of sampling, joined with the containers. `sampled_at` is seconds since the epoch, `sampled_boot_s` the same
    moment of CLOCK_BOOTTIME: a process that began later is none of it. `covered_s`, which the sampling works out, is
    the time before it for which it stands.

    `unattributed` are the processes of no known container, by GPU: the MPS server, a program started on the node itself,
    a pod with devices of another plugin.
    """

    sampled_at: float
    gpus: Mapping[GpuUuid, GpuSample]
    containers: Mapping[tuple[ContainerKey, GpuUuid], ContainerUse]
    unattributed: Mapping[GpuUuid, tuple[ProcessSample, ...]] = field(default_factory=dict)
    sampled_boot_s: float = 0.0
    covered_s: float = 0.0
