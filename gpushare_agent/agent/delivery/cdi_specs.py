"""Ensures a CDI name for every GPU: by the specs of others where they name it, else by the agent's own spec.

`CdiSpecs` compares and writes, in blocking calls; `CdiWatch` calls it in a thread whenever the GPUs change and periodically:
control nodes appear when a GPU is first used, and a spec that nvidia-ctk writes later next to ours would make our names
ambiguous until the next check. State owned: the agent's own spec file, and the problems that were logged last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
from msgspec import Struct

from gpushare_agent.agent.delivery.cdi_files import CdiFiles
from gpushare_agent.agent.delivery.device_lists import CONTROL_NODES
from gpushare_agent.agent.delivery.own_spec import (
    SPEC_CONTROL_NODES,
    SpecNodes,
    build_spec,
    encode_spec,
    gpus_to_name,
    naming,
)
from gpushare_agent.agent.delivery.volume_config import untouched_driver
from gpushare_agent.agent.runtime.node_probes import require_writable
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.supervision import Reconciler, ReportOnce
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import SpecFile
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

PERIOD_S = 10.0
CHECK_TIMEOUT_S = 5.0


class SpecChange(StrEnum):
    """What `ensure` does with the agent's own file; `plan` only computes it."""

    NONE = "unchanged"
    WRITTEN = "written"
    REMOVED = "removed"


class CdiState(Struct, frozen=True, kw_only=True):
    """Who names which GPU, by UUID: the file that the runtime uses once `change` is made. `spec` is the agent's own, None
    where it needs none; `own_names` are those that its file has before `change`. `troubles` are GPUs without a usable name,
    each with the remedy; `passed_over` files that are no specs; `left_out` paths that the spec lacks because the host has
    none. The names are keys of `cdi -o json`."""

    kind: str
    own_path: str
    named: tuple[tuple[str, str], ...]
    unnamed: tuple[str, ...] = ()
    spec: dict[str, Any] | None = None
    own_names: tuple[str, ...] = ()
    change: SpecChange = SpecChange.NONE
    troubles: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class CdiSpecs:
    """`nodes` is called at each check, because control nodes come and go."""

    def __init__(self, files: CdiFiles, *, kind: str, nodes: Callable[[], SpecNodes]) -> None:
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
        theirs = {name for file in others if file.kind == self._kind for name in file.devices}
        spec = build_spec(ours, self._kind, nodes, names_of_others=theirs) if ours else None
        named = dict(found.named) | dict.fromkeys((gpu.uuid for gpu in ours), own_path)
        unnamed = tuple(gpu.uuid for gpu in gpus if gpu.uuid not in named)
        return CdiState(
            kind=self._kind,
            own_path=own_path,
            named=tuple((gpu.uuid, named[gpu.uuid]) for gpu in gpus if gpu.uuid in named),
            unnamed=unnamed,
            spec=spec,
            own_names=tuple(n for f in files if f.path == own_path and f.kind == self._kind for n in sorted(f.devices)),
            change=self._change(spec, gpus, files),
            troubles=(
                *(_ambiguity(self._kind, uuid, paths) for uuid, paths in found.ambiguous.items()),
                *(
                    f"{self._kind}={uuid} has no name: the driver does not report the GPU's minor number. Containers that"
                    " get it do not start; see the GPU's health"
                    for uuid in unnamed
                    if uuid not in found.ambiguous
                ),
            ),
            passed_over=tuple(f"{file.path}: {file.problem}" for file in others if file.problem),
            left_out=tuple(f"{path}: not on this host" for path in nodes.absent) if spec else (),
        )

    def look(self, gpus: Sequence[Gpu]) -> None:
        """Raises Unavailable: no GPU would have a name, or the agent's own spec cannot be written. One without a name is
        not enough: it may be one that was lost."""
        state = self.plan(gpus)
        if gpus and not state.named:
            raise Unavailable("; ".join(state.troubles))
        if state.change is SpecChange.WRITTEN:
            require_writable(self._files.own_path.parent)

    def ensure(self, gpus: Sequence[Gpu]) -> CdiState:
        """Writes the agent's own spec, or removes it where it names nothing any more; what was done is in `change`.

        Without any GPU the file stays: running containers still restart while the driver does not answer.

        Raises:
            Unavailable: the file could not be written or removed; what was there stays.
        """
        state = self.plan(gpus)
        # A file that is as it is to be is not written: runtimes watch the directory.
        if state.change is SpecChange.WRITTEN and state.spec is not None:
            self._files.write(encode_spec(state.spec))
        if state.change is SpecChange.REMOVED:
            self._files.remove()
        if state.change is not SpecChange.NONE:
            log.info("cdi_spec_changed", path=state.own_path, change=state.change.value, kind=state.kind)
        self._warn(state)
        return state

    def _change(self, spec: Mapping[str, Any] | None, gpus: Sequence[Gpu], files: Sequence[SpecFile]) -> SpecChange:
        if spec is not None:
            return SpecChange.NONE if self._files.holds(encode_spec(spec)) else SpecChange.WRITTEN
        is_there = any(file.path == str(self._files.own_path) for file in files)
        # Without a GPU nothing is known: a driver that does not answer now would cost containers that start again their
        # name.
        return SpecChange.REMOVED if gpus and is_there else SpecChange.NONE

    def _warn(self, state: CdiState) -> None:
        """Each problem once for as long as it lasts."""
        reported = (*state.troubles, *state.passed_over, *state.left_out)
        for text in reported:
            if text not in self._reported:
                log.warning("cdi_spec_problem", detail=text)
        self._reported = reported


def _ambiguity(kind: str, uuid: str, paths: Sequence[str]) -> str:
    return (
        f"{kind}={uuid} is named by {' and '.join(paths)}, files of one directory: container runtimes refuse such a name,"
        " and containers that get the GPU do not start. Remove all but one of the files"
    )


class CdiWatch:
    """`check` before the node registers, `run` once, `gpus_changed` at any time."""

    def __init__(self, specs: CdiSpecs, gpus: Callable[[], Sequence[Gpu]]) -> None:
        self._specs = specs
        self._gpus = gpus
        self._thread = DaemonThread("cdi-specs", advice="Check the disks of the setting cdi.spec_directories.")
        self._reconciler = Reconciler()
        self._failure = ReportOnce()

    def gpus_changed(self) -> None:
        self._reconciler.request()

    async def check(self) -> None:
        """Ensures the names once; a failure is logged once, and the next check tries again."""
        gpus = tuple(self._gpus())
        try:
            await self._thread.call(partial(self._specs.ensure, gpus), "checking the CDI specs", CHECK_TIMEOUT_S)
        except Exception as e:  # noqa: BLE001 - one cycle: an unexpected file in the directory must not end the agent
            error = str(e) if isinstance(e, AgentError) else repr(e)
            if self._failure.is_new(error):
                log.error("cdi_specs_not_ensured", error=error, then="containers of new pods may not start")
        else:
            self._failure.is_over()

    async def look(self, gpus: Sequence[Gpu]) -> None:
        """Whether `check` can give names, to one of the GPUs at least. Writes nothing that stays. Raises Unavailable."""
        await self._thread.call(partial(self._specs.look, gpus), "looking at the CDI specs", CHECK_TIMEOUT_S)

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._reconciler.run(self.check, lambda: PERIOD_S)


def cdi_specs(settings: Settings, *, mounts_driver: bool) -> CdiSpecs:
    """The keeper of the node's names, as the settings say. `mounts_driver`: containers also get a driver directory, of
    the isolation's choice, whose place CDI's mount would take: a share under vcuda would get the libraries without limits.

    Raises:
        StartupError: volume.conf is wrong.
    """
    is_real = settings.driver == "nvml"
    directory = untouched_driver(settings) if settings.volume_config is not None and not mounts_driver else None
    control = SPEC_CONTROL_NODES if is_real else CONTROL_NODES

    def nodes() -> SpecNodes:
        absent = [path for path in control if is_real and not Path(path).exists()]
        has_directory = directory is not None and directory.is_dir()
        return SpecNodes(
            control=tuple(path for path in control if path not in absent),
            has_gpu_nodes=is_real or settings.simulated.device_nodes,
            driver_directory=directory if has_directory else None,
            absent=(*absent, *([str(directory)] if directory is not None and not has_directory else [])),
        )

    return CdiSpecs(CdiFiles(settings.cdi.spec_directories), kind=settings.cdi.kind, nodes=nodes)
