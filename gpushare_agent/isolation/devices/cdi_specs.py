"""Keeps a CDI name for every GPU: by somebody else's specs where they name it, else by the agent's own.

Look again whenever the GPUs change, and every now and then: control nodes appear when a GPU is first used, and a spec that
nvidia-ctk writes later beside ours would make our names ambiguous, which the next look cures. All calls block; run them in a
DaemonThread, one at a time. State owned: none but the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import structlog

from gpushare_agent.isolation.devices.cdi_spec import SpecNodes, build_spec, encode_spec, gpus_to_name, naming
from gpushare_agent.model.cdi import SpecFile
from gpushare_agent.model.gpus import Gpu

log = structlog.get_logger(__name__)


class SpecFiles(Protocol):
    @property
    def own_path(self) -> Path: ...

    def read(self) -> tuple[SpecFile, ...]: ...

    def holds(self, content: bytes) -> bool:
        """Whether the agent's own file is exactly so."""

    def write(self, content: bytes) -> None:
        """Raises Unavailable."""

    def remove(self) -> None:
        """Raises Unavailable."""


class SpecChange(StrEnum):
    """What becomes of the agent's own file; `plan` only tells."""

    NONE = "unchanged"
    WRITTEN = "written"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CdiState:
    """Who names which GPU, by UUID: the file that the runtime uses once `change` is made. `spec` is the agent's own, None
    where it needs none. `troubles` are GPUs without a name, each with the cure; `passed_over` files that are no specs;
    `left_out` what the spec lacks because the host does."""

    kind: str
    own_path: str
    named: tuple[tuple[str, str], ...]
    unnamed: tuple[str, ...] = ()
    spec: dict[str, Any] | None = None
    change: SpecChange = SpecChange.NONE
    troubles: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class CdiSpecs:
    """`nodes` is asked at each look, for control nodes come and go."""

    def __init__(self, files: SpecFiles, *, kind: str, nodes: Callable[[], SpecNodes]) -> None:
        self._files = files
        self._kind = kind
        self._nodes = nodes
        self._reported: tuple[str, ...] = ()

    def plan(self, gpus: Sequence[Gpu]) -> CdiState:
        """What `ensure` would do; changes nothing."""
        own_path = str(self._files.own_path)
        files, nodes = self._files.read(), self._nodes()
        others = [file for file in files if file.path != own_path]
        found = naming(others, self._kind, [gpu.uuid for gpu in gpus])
        ours = gpus_to_name(gpus, found, nodes)
        spec = build_spec(ours, self._kind, nodes) if ours else None
        named = dict(found.named) | dict.fromkeys((gpu.uuid for gpu in ours), own_path)
        unnamed = tuple(gpu.uuid for gpu in gpus if gpu.uuid not in named)
        return CdiState(
            kind=self._kind,
            own_path=own_path,
            named=tuple((gpu.uuid, named[gpu.uuid]) for gpu in gpus if gpu.uuid in named),
            unnamed=unnamed,
            spec=spec,
            change=self._change(spec, gpus, files),
            troubles=(
                *(_ambiguity(self._kind, uuid, paths) for uuid, paths in found.ambiguous.items()),
                *(
                    f"{self._kind}={uuid} has no name: the driver does not tell the GPU's minor number. Containers that get"
                    " it do not start; see the GPU's health"
                    for uuid in unnamed
                    if uuid not in found.ambiguous
                ),
            ),
            passed_over=tuple(f"{file.path}: {file.problem}" for file in others if file.problem),
            left_out=tuple(f"{path}: not on this host" for path in nodes.absent) if spec else (),
        )

    def ensure(self, gpus: Sequence[Gpu]) -> CdiState:
        """Writes the agent's own spec, or removes it where it names nothing any more; what was done is in `change`.

        Without any GPU the file stays: a driver that is away for a moment takes no names from running containers' restarts.

        Raises:
            Unavailable: the file could not be written or removed; what was there stays.
        """
        state = self.plan(gpus)
        if state.change is SpecChange.WRITTEN and state.spec is not None:
            self._files.write(encode_spec(state.spec))
        if state.change is SpecChange.REMOVED:
            self._files.remove()
        if state.change is not SpecChange.NONE:
            log.info("cdi_spec_changed", path=state.own_path, change=state.change.value, kind=state.kind)
        self._tell(state)
        return state

    def _change(self, spec: Mapping[str, Any] | None, gpus: Sequence[Gpu], files: Sequence[SpecFile]) -> SpecChange:
        if spec is not None:
            return SpecChange.NONE if self._files.holds(encode_spec(spec)) else SpecChange.WRITTEN
        is_there = any(file.path == str(self._files.own_path) for file in files)
        return SpecChange.REMOVED if gpus and is_there else SpecChange.NONE

    def _tell(self, state: CdiState) -> None:
        """Once, until it changes."""
        reported = (*state.troubles, *state.passed_over, *state.left_out)
        for text in reported:
            if text not in self._reported:
                log.warning("cdi_spec_trouble", detail=text)
        self._reported = reported


def _ambiguity(kind: str, uuid: str, paths: Sequence[str]) -> str:
    return (
        f"{kind}={uuid} is named by {' and '.join(paths)}, files of one directory: container runtimes refuse such a name,"
        " and containers that get the GPU do not start. Remove all but one of the files"
    )
