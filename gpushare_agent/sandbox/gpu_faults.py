"""Failing GPUs of the embedded node: what `sandbox fail-gpu` and `heal-gpu` write into the agent's faults file.

The file is read before each change, so that what a person has written there stays. State owned: the last ID given, because
IDs leave the file when their GPU is healed. Format: core/formats/simulated_gpus.py.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.json import encode
from msgspec.structs import replace

from gpushare_agent.core.formats.simulated_gpus import (
    MAX_XID,
    Faults,
    SimulatedEvent,
    SimulatedReset,
    parse_faults,
    read_regular,
)
from gpushare_agent.core.kit.regular_file import replace_whole
from gpushare_agent.core.model.errors import Rejected, Unavailable, os_errors_as
from gpushare_agent.core.model.gpu_health import EventMeaning, GpuEvent, GpuEventKind, HealthPolicy, meaning_of
from gpushare_agent.core.model.names import GpuUuid

LOST_REASON = "GPU is lost"
"""NVML's words."""
_MOST_ENTRIES = 1000
"""Events and resets in the file; the agent has read older ones long ago."""
_THE_GPU = GpuUuid("the GPU")


class GpuFaults:
    """`path` is None where the agent reads no faults file; `gpus` is how many there are; `policy` is the agent's."""

    def __init__(self, path: Path | None, gpus: int, policy: HealthPolicy | None = None) -> None:
        self._path = path
        self._gpus = gpus
        self._policy = policy or HealthPolicy()
        self._last_id = 0

    def enter_mig_mode(self, gpus: int) -> None:
        """The first of the GPUs are in MIG mode from now on, without an instance, unless the file has some that are. Raises
        Rejected, Unavailable."""
        faults = self._read()
        self._write(replace(faults, mig=faults.mig or dict.fromkeys(range(gpus), ())))

    def lose(self, index: int, reason: str = "") -> None:
        """The driver no longer finds the GPU, until it is healed. Raises Rejected, Unavailable (as all of these do)."""
        # Read again each time: a person may have edited the file meanwhile.
        faults = self._checked(index)
        self._write(replace(faults, lost={**faults.lost, index: reason or LOST_REASON}))

    def report_xid(self, index: int, xid: int) -> None:
        """The driver reports an Xid error of the GPU, once."""
        if not 1 <= xid <= MAX_XID:
            raise Rejected(
                f"Xid {xid} cannot be reported: there are 1 to {MAX_XID}; 79 says that a GPU fell off the bus"
            )
        faults = self._checked(index)
        event = SimulatedEvent(id=self._next_id(faults), gpu=index, xid=xid)
        # The last thousand: older ones were reported long ago.
        self._write(replace(faults, events=(*faults.events, event)[-_MOST_ENTRIES:]))

    def heal(self, index: int, *, is_offered: bool = False) -> str:
        """Takes everything back that was done to the GPU: a loss ends; after errors that took it out of service the driver
        sees it reset. Returns what was done, a sentence. `is_offered`: the kubelet has it as Healthy.

        A reset takes a GPU away for a while. So none is shown after errors that the agent ignores, nor if the GPU has come
        back by itself.
        """
        faults = self._checked(index)
        own = [event for event in faults.events if event.gpu == index]
        ignored = [event for event in own if self._meaning(event) is EventMeaning.IGNORED]
        # The rest needs no reset: ignored, or the GPU has passed its probes already.
        harmful = [
            event
            for event in own
            if self._meaning(event) is EventMeaning.NEEDS_RESET  # also where the kubelet has not heard of it yet
            or (event not in ignored and not is_offered)
        ]
        done = [f"is no longer lost ({faults.lost[index]})"] if index in faults.lost else []
        resets = faults.resets
        if harmful:
            done.append(f"was reset after {_event_words(harmful)}")
            resets = (*resets, SimulatedReset(id=self._next_id(faults), gpu=index))[-_MOST_ENTRIES:]
        if own or done:
            self._last_id = max(self._last_id, faults.last_id)  # the driver has seen the IDs that go
            lost = {gpu: reason for gpu, reason in faults.lost.items() if gpu != index}
            events = tuple(event for event in faults.events if event.gpu != index)
            self._write(replace(faults, lost=lost, events=events, resets=resets))
        if done:
            return f"GPU {index} {' and '.join(done)}; the agent takes it back once it has passed its probes"
        over = [event for event in own if event not in ignored]
        spared = [f"{_event_words(ignored)}: ignored (health.ignored_xids)"] if ignored else []
        spared += [f"{_event_words(over)}: the agent has taken the GPU back by itself"] if over else []
        if spared:
            return f"GPU {index} is not ill ({'; '.join(spared)}); nothing was done to it"
        return f"nothing is wrong with GPU {index}"

    def _meaning(self, event: SimulatedEvent) -> EventMeaning:
        return meaning_of(GpuEvent(kind=event.kind, uuid=_THE_GPU, xid=event.xid), {_THE_GPU}, self._policy)

    def _checked(self, index: int) -> Faults:
        if not 0 <= index < self._gpus:
            raise Rejected(f"there is no GPU {index}: this node has the GPUs 0 to {self._gpus - 1}")
        return self._read()

    def _next_id(self, faults: Faults) -> int:
        self._last_id = max(self._last_id, faults.last_id) + 1
        return self._last_id

    def _read(self) -> Faults:
        try:
            return parse_faults(read_regular(self._file()))
        except FileNotFoundError:
            return Faults()
        except (OSError, ValueError, RecursionError) as error:
            raise Rejected(
                f"the faults file {self._file()} cannot be read: {error}. Correct it, or remove it: then nothing fails."
            ) from error

    def _write(self, faults: Faults) -> None:
        with os_errors_as(Unavailable, f"the faults file {self._path} cannot be written"):
            replace_whole(self._file(), encode(faults))

    def _file(self) -> Path:
        if self._path is None:
            raise Rejected("GPUs cannot fail here: the sandbox was started with an empty --simulated.faults")
        return self._path


def _event_words(events: list[SimulatedEvent]) -> str:
    """`Xid 79, Xid 48`: each once, in order of the first report."""
    names = [f"Xid {event.xid}" if event.kind is GpuEventKind.XID else event.kind.value for event in events]
    return ", ".join(dict.fromkeys(names))
