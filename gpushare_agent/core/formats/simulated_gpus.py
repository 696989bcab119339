"""The files of simulated GPUs, JSON, read at every poll. A person, a test or the sandbox writes the two input files.

A file that is absent, no regular file, too large or malformed is ignored, with one warning in the log. State owned: the
warning that was logged last. Every key is optional (docs/reference/sandbox.md):

- Faults, what fails, what the driver reports, which GPU was reset: `{"lost": {"<index>": "<reason>"}, "all_lost":
  "<reason>", "xids": [{"id": 1, "gpu": 3, "xid": 79}], "resets": [{"id": 2, "gpu": 3}], "mig": {"<index>": ["1g.10gb"]}}`.
  IDs grow; those that a driver finds at its first poll are history to it. An entry of `xids` may have `"kind":
  "double-bit-ecc"` instead of an xid, and no GPU, as where a driver does not name it.
  `mig` are the GPUs in MIG mode, with the instances that somebody has made there; `"mig_faults": {"<index>": {"refused":
  "<reason>", "create_s": 2, "in_use": "gpu"}}` is how making and destroying fails.
- Usage, what processes use: `{"processes": [{"pid": 123, "gpu": 0, "sm": 0.25, "memory_bytes": 1073741824}]}`. Ratios are
  of the whole GPU, 0..1. Optional: `memory`, `encoder` and `decoder`, ratios too, and `kind`: compute, graphics or mps.
  The values of the whole GPU are computed from it.

The driver itself keeps the MIG instances next to the faults file, in a file with `.mig` after its name, as a GPU keeps them
while no agent runs: `{"boot_id": "…", "gpus": {"<index>": [{"gi": 1, "name": "1g.10gb", "profile": 19, "start": 6, "uuid":
"MIG-…"}]}}`. After a reboot it counts no more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import structlog
from msgspec import Meta, Struct, field
from msgspec.json import Decoder, encode
from msgspec.structs import replace

from gpushare_agent.core.kit import regular_file
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.json_schema import UNREADABLE
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.gpu_health import GpuEventKind
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import MIB
from gpushare_agent.core.model.usage import GpuSample, ProcessKind, ProcessSample
from gpushare_agent.core.placement.topology import MAX_GPUS

log = structlog.get_logger(__name__)

MAX_FILE_BYTES = 4 * 2**20
"""Some 200 containers with 200 processes each."""
_READ_TIMEOUT_S = 5.0

T = TypeVar("T")


class SimulatedInput(Generic[T]):
    """`parse` gets the file's text and raises ValueError; `default` stands for an absent or ignored file."""

    def __init__(self, path: Path | None, *, name: str, parse: Callable[[str], T], default: T) -> None:
        self._path = path
        self._name = name
        self._parse = parse
        self._default = default
        self._ignored = ReportOnce()
        self._thread = DaemonThread(f"{name} file", advice="It is read again at the next poll. Check its file system.")

    async def read(self) -> tuple[T, bool]:
        """The file's content, and whether it could be read; an absent file counts as read.

        Raises:
            Unavailable: it cannot be read in time.
        """
        # No file was named: nothing fails, and nothing is used.
        if self._path is None:
            return self._default, True
        what = f"reading the simulated GPUs' {self._name} file {self._path}"
        return await self._thread.call(partial(self._read, self._path), what, _READ_TIMEOUT_S)

    def _read(self, path: Path) -> tuple[T, bool]:
        try:
            return self._parse(read_regular(path)), True
        except FileNotFoundError:
            return self._default, True
        except (OSError, ValueError, RecursionError) as error:
            # Read at each poll: a mistake in it would be a line each five seconds.
            if self._ignored.is_new(str(error)):
                log.warning(f"{self._name}_file_ignored", path=str(path), reason=str(error))
            return self._default, False


def read_regular(path: Path) -> str:
    """The file's text. Raises OSError, also for a pipe, which would block its reader for ever, and for what is too large;
    ValueError for what is no text."""
    return regular_file.read_regular(path, MAX_FILE_BYTES, follow=True).decode()  # a ConfigMap's files are links


def _decoded(text: str, schema: Decoder[T]) -> T:
    """Raises ValueError, which names the field."""
    try:
        return schema.decode(text)
    except UNREADABLE as error:
        raise ValueError(str(error)) from error


MAX_EVENTS = 100_000
MAX_XID = 100_000
_MAX_ID = 2**53
PROFILE = re.compile(r"(?:(?P<ci>\d)c\.)?(?P<gi>\d)g\.(?P<gb>\d{1,3})gb(?:[+-][a-z.]{2,6})?")
"""A MIG profile's name."""
MAX_INSTANCES = 7
"""The instances of one GPU."""

_Index = Annotated[int, Meta(ge=0, le=MAX_GPUS - 1)]
_Id = Annotated[int, Meta(ge=1, le=_MAX_ID)]
_Profiles = Annotated[tuple[str, ...], Meta(max_length=MAX_INSTANCES)]
_Text = Annotated[str, Meta(max_length=1024)]


class SimulatedEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`gpu` is None where the driver is not to name it."""

    id: _Id
    gpu: _Index | None = None
    kind: GpuEventKind = GpuEventKind.XID
    xid: Annotated[int, Meta(ge=0, le=MAX_XID)] = 0

    def __post_init__(self) -> None:
        if self.kind is GpuEventKind.XID and not self.xid:
            raise ValueError(f'"xid" must be a whole number from 1 to {MAX_XID}')


class SimulatedReset(Struct, frozen=True, kw_only=True):
    """The GPU is lost at the next poll, and back at the one after it."""

    id: _Id
    gpu: _Index


class MigFault(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`refused`: why this process may make and destroy no instance. `create_s`: how long making one takes, s. `in_use`: what
    another client uses of each instance, so that destroying it fails: `compute`, before anything is gone, or `gpu`, when
    its compute instance is."""

    refused: _Text = ""
    create_s: Annotated[float, Meta(ge=0, le=600)] = 0.0
    in_use: Literal["", "compute", "gpu"] = ""


class SimulatedInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU instance with at most one compute instance, which has the `uuid`; empty without one. `number` is its place in
    the faults file's list, None where the agent made it. `profile` and `start` are None where the product has no such
    profile, or no room for it."""

    gi: Annotated[int, Meta(ge=0, le=4096)]
    name: _Text
    profile: int | None = None
    start: int | None = None
    uuid: _Text = ""
    number: int | None = None


class SimulatedMig(Struct, frozen=True, kw_only=True):
    boot_id: _Text = ""
    gpus: Annotated[dict[int, tuple[SimulatedInstance, ...]], Meta(max_length=MAX_GPUS)] = field(default_factory=dict)


class Faults(Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"events": "xids"}):
    """`lost` maps GPU index to reason; an empty `all_lost` means the driver answers. Events and resets by ID."""

    lost: dict[int, str] = field(default_factory=dict)
    all_lost: str | None = ""
    events: Annotated[tuple[SimulatedEvent, ...], Meta(max_length=MAX_EVENTS)] = ()
    resets: Annotated[tuple[SimulatedReset, ...], Meta(max_length=MAX_EVENTS)] = ()
    mig: Annotated[dict[int, _Profiles], Meta(max_length=MAX_GPUS)] = field(default_factory=dict)
    """Profiles of the instances of each GPU in MIG mode, by its index."""
    mig_faults: Annotated[dict[int, MigFault], Meta(max_length=MAX_GPUS)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Not Meta's pattern: its error would show the expression and no example.
        if not all(PROFILE.fullmatch(profile) for profiles in self.mig.values() for profile in profiles):
            raise ValueError("a profile in `mig` is not of the form 1g.10gb")

    @property
    def last_id(self) -> int:
        """The highest ID of both kinds, 0 where there is none."""
        return max((0, *(event.id for event in self.events), *(reset.id for reset in self.resets)))


_FAULTS = Decoder(Faults)


def parse_faults(text: str) -> Faults:
    """Raises ValueError."""
    faults = _decoded(text, _FAULTS)
    return replace(
        faults,
        events=tuple(sorted(faults.events, key=lambda event: event.id)),
        resets=tuple(sorted(faults.resets, key=lambda reset: reset.id)),
    )


_MIG = Decoder(SimulatedMig)


def parse_mig(text: str) -> SimulatedMig:
    """Raises ValueError."""
    return _decoded(text, _MIG)


MAX_PROCESSES = 50_000
MAX_PID = 4_194_304
"""Linux has none above (PID_MAX_LIMIT)."""

_MAX_MEMORY_BYTES = 2**50
_IDLE_CELSIUS, _BUSY_CELSIUS = 32.0, 74.0
_IDLE_WATTS, _LIMIT_WATTS = 45.0, 300.0
_IDLE_SM_HERTZ, _BUSY_SM_HERTZ = 210e6, 1_410e6
_IDLE_MEMORY_HERTZ, _BUSY_MEMORY_HERTZ = 405e6, 1_215e6
_PCIE_BYTES_PER_SECOND = 2e9
"""Received at full load; a quarter of it is sent."""
_MEMORY_PER_SM = 0.6
"""The memory's part of time for each part of the SMs' time, where the file does not give it."""
_CAPPED_FROM = 0.97


_Ratio = Annotated[float, Meta(ge=0, le=1)]


class SimulatedProcess(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ratios are of the whole GPU."""

    pid: Annotated[int, Meta(ge=1, le=MAX_PID)]
    gpu: _Index
    kind: ProcessKind = ProcessKind.COMPUTE
    memory_bytes: Annotated[int, Meta(ge=0, le=_MAX_MEMORY_BYTES)] = 0
    sm: _Ratio | None = None
    memory: _Ratio | None = None
    encoder: _Ratio | None = None
    decoder: _Ratio | None = None

    @property
    def sample(self) -> ProcessSample:
        sm = self.sm or 0.0
        return ProcessSample(
            pid=self.pid,
            kind=self.kind,
            memory_bytes=self.memory_bytes,
            sm_ratio=sm,
            memory_ratio=round(sm * _MEMORY_PER_SM, 6) if self.memory is None else self.memory,
            encoder_ratio=self.encoder or 0.0,
            decoder_ratio=self.decoder or 0.0,
        )


Usage = tuple[SimulatedProcess, ...]


class _Usage(Struct):
    processes: Annotated[Usage, Meta(max_length=MAX_PROCESSES)] = ()


_USAGE = Decoder(_Usage)


def parse_usage(text: str) -> Usage:
    """Raises ValueError."""
    found = _decoded(text, _USAGE).processes
    twice = [place for place, count in Counter((one.gpu, one.pid) for one in found).items() if count > 1]
    # Two equal entries are a mistake in the file: no driver shows their sum.
    if twice:
        raise ValueError(f"process {twice[0][1]} is on GPU {twice[0][0]} twice")
    return found


def encode_usage(usage: Iterable[SimulatedProcess]) -> str:
    """The text that parse_usage reads, by GPU and PID."""
    return encode(_Usage(tuple(sorted(usage, key=lambda process: (process.gpu, process.pid))))).decode()


def gpu_samples(gpus: Sequence[Gpu], usage: Usage) -> tuple[GpuSample, ...]:
    """One for each GPU, in their order; processes on a GPU that is not there are left out."""
    by_gpu: dict[int, list[ProcessSample]] = {gpu.index: [] for gpu in gpus}
    for process in usage:
        if process.gpu in by_gpu:
            by_gpu[process.gpu].append(process.sample)
    return tuple(_gpu_sample(gpu, by_gpu[gpu.index]) for gpu in gpus)


def _gpu_sample(gpu: Gpu, processes: Sequence[ProcessSample]) -> GpuSample:
    """The sums, none above the whole GPU; temperature, power, clocks and traffic as a GPU under such a load has them."""
    total_bytes = gpu.memory_mib * MIB
    used_bytes = min(total_bytes, sum(p.memory_bytes or 0 for p in processes))
    if gpu.mig is not None:  # NVML has nothing else of an instance
        only = tuple(ProcessSample(pid=p.pid, kind=p.kind, memory_bytes=p.memory_bytes) for p in processes)
        return GpuSample(
            uuid=gpu.uuid,
            memory_used_bytes=used_bytes,
            memory_total_bytes=total_bytes,
            processes=tuple(sorted(only, key=lambda p: p.pid)),
        )
    load = _whole(p.sm_ratio for p in processes)
    memory_load = _whole(p.memory_ratio for p in processes)
    return GpuSample(
        uuid=gpu.uuid,
        sm_ratio=load,
        memory_ratio=memory_load,
        encoder_ratio=_whole(p.encoder_ratio for p in processes),
        decoder_ratio=_whole(p.decoder_ratio for p in processes),
        memory_used_bytes=used_bytes,
        memory_total_bytes=total_bytes,
        memory_free_bytes=total_bytes - used_bytes,
        temperature_celsius=round(_between(_IDLE_CELSIUS, _BUSY_CELSIUS, load)),
        power_watts=round(_between(_IDLE_WATTS, _LIMIT_WATTS, load), 1),
        power_limit_watts=_LIMIT_WATTS,
        sm_clock_hertz=_BUSY_SM_HERTZ if load else _IDLE_SM_HERTZ,
        memory_clock_hertz=_BUSY_MEMORY_HERTZ if load else _IDLE_MEMORY_HERTZ,
        ecc_corrected_total=0,
        ecc_uncorrected_total=0,
        throttle_reasons=("power_cap",) if load >= _CAPPED_FROM else (),
        pcie_received_bytes_per_second=round(load * _PCIE_BYTES_PER_SECOND),
        pcie_sent_bytes_per_second=round(load * _PCIE_BYTES_PER_SECOND / 4),
        processes=tuple(sorted(processes, key=lambda p: p.pid)),
    )


def _whole(ratios: Iterable[float | None]) -> float:
    return min(1.0, round(sum(ratio or 0.0 for ratio in ratios), 6))


def _between(idle: float, busy: float, load: float) -> float:
    return idle + (busy - idle) * load
