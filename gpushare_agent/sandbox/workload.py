"""What the embedded node's containers use of their GPUs: simulated, as a process that sleeps uses nothing.

Each running container's use is a slow wave within its share, the same for the same name at the same time, and memory that
fills up after its start; its annotation may set a constant load instead. Pure; workload_player.py writes it down.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.gpus.simulated.usage import RehearsedProcess
from gpushare_agent.model.usage import ProcessSample

PERIOD_S = 120.0
_LOW, _HIGH, _WHOLE_HIGH = 0.2, 0.95, 0.9
_OVER = 1.2
"""The peak of every third wave of a container that nothing limits."""
_MEMORY_AT_START, _MEMORY_FILLED = 0.1, 0.7
_FILLED_AFTER_S = 180.0
_MOST_PIDS = 256


class PlayedContainer(Struct, frozen=True, kw_only=True):
    """One running container with GPUs.

    `share` is the part of each GPU that it may use, 1 for whole ones; `memory_bytes` is its limit on each GPU. `load` is
    the constant part of both that it uses, None for the wave.
    """

    name: str
    """With namespace and pod: the wave's phase follows from it."""
    gpus: tuple[int, ...]
    pids: tuple[int, ...]
    share: float
    memory_bytes: int
    age_s: float
    is_limited: bool = True
    load: float | None = None


def played_usage(containers: Sequence[PlayedContainer], now_s: float) -> list[RehearsedProcess]:
    """Each container's use, its processes having equal parts. A GPU on which more is wanted than it has gives each its
    part of what there is, as its time is shared."""
    found = [process for container in containers for process in _processes(container, now_s)]
    wanted: dict[int, float] = {}
    for process in found:
        wanted[process.gpu] = wanted.get(process.gpu, 0.0) + (process.sample.sm_ratio or 0.0)
    return [
        replace(process, sample=replace(process.sample, sm_ratio=_part(process.sample.sm_ratio, wanted[process.gpu])))
        for process in found
    ]


def _part(sm_ratio: float | None, wanted: float) -> float:
    return round((sm_ratio or 0.0) / max(1.0, wanted), 6)


def _processes(container: PlayedContainer, now_s: float) -> list[RehearsedProcess]:
    pids = container.pids[:_MOST_PIDS]
    if not pids:
        return []
    sm = min(1.0, container.share * sm_load(container, now_s))
    each_bytes, rest_bytes = divmod(int(container.memory_bytes * memory_load(container)), len(pids))
    return [
        RehearsedProcess(
            gpu=gpu,
            sample=ProcessSample(
                pid=pid,
                sm_ratio=sm / len(pids),
                memory_bytes=each_bytes + (rest_bytes if position == 0 else 0),
            ),
        )
        for gpu in container.gpus
        for position, pid in enumerate(pids)
    ]


def sm_load(container: PlayedContainer, now_s: float) -> float:
    """The part of its share that it uses, above 1 at some peaks where nothing limits it."""
    if container.load is not None:
        return container.load
    turns = now_s / PERIOD_S + zlib.crc32(container.name.encode()) / 2**32
    high = _WHOLE_HIGH if container.share >= 1 else _HIGH
    if not container.is_limited and container.share < 1 and int(turns) % 3 == 0:
        high = _OVER
    return _LOW + (high - _LOW) * (0.5 - 0.5 * math.cos(2 * math.pi * turns))


def memory_load(container: PlayedContainer) -> float:
    """The part of its memory that it uses."""
    if container.load is not None:
        return min(1.0, container.load)
    filled = min(1.0, max(0.0, container.age_s) / _FILLED_AFTER_S)
    return _MEMORY_AT_START + (_MEMORY_FILLED - _MEMORY_AT_START) * filled
