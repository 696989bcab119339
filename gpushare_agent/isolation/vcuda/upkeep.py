"""One look at one container's vDevice directory: what is missing or different is written, all else is left alone.

Blocking, for a thread: a round brings every container up to date in one go. Not for sockets' servers or for deciding what
a file should say: isolation/vcuda/virtual_manager.py. No state.

What the agent does not know yet is not written over: at a start the pods' annotations and processes come seconds after the
containers, and a running container must not lose its elastic limit or its list of processes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from gpushare_agent.isolation.vcuda.config_format import decode_config
from gpushare_agent.kit.sockets import FileIdentity
from gpushare_agent.model.allocations import ContainerKey
from gpushare_agent.model.errors import AgentError, Corrupt

Stamps = tuple[FileIdentity | None, FileIdentity | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the agent wrote last, and what the files looked like then. `pids` None: a list of an earlier agent's."""

    config: bytes
    pids: tuple[int, ...] | None
    stamps: Stamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """What should be so. `is_config_sure`: the pod's annotations are known. `pids` None: not known now. `socket`: of the
    server that runs."""

    key: ContainerKey
    config: bytes
    is_config_sure: bool
    pids: tuple[int, ...] | None
    before: Written | None
    socket: FileIdentity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkept:
    """`written` None where it failed. `is_served`: the server's socket is in place."""

    key: ContainerKey
    written: Written | None
    is_served: bool
    error: AgentError | None = None


class KeepsFiles(Protocol):
    """Every method raises AgentError."""

    def prepare(self, key: ContainerKey) -> None: ...
    def stamps(self, key: ContainerKey) -> Stamps: ...
    def has_socket(self, key: ContainerKey, identity: FileIdentity) -> bool: ...
    def read_config(self, key: ContainerKey) -> bytes | None: ...
    def write_config(self, key: ContainerKey, content: bytes) -> bool: ...
    def write_pids(self, key: ContainerKey, pids: tuple[int, ...]) -> bool: ...
    def write_pids_if_none(self, key: ContainerKey) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A container of which nothing is to be changed, if its files and its socket are still what they were."""

    key: ContainerKey
    stamps: Stamps
    socket: FileIdentity


def disturbed(files: KeepsFiles, settled: Iterable[Settled]) -> list[ContainerKey]:
    """Those whose files or socket somebody has changed or taken away. Most containers, each second: cheap."""
    return [
        one.key for one in settled if not files.has_socket(one.key, one.socket) or files.stamps(one.key) != one.stamps
    ]


def keep_up(files: KeepsFiles, wanted: Iterable[Upkeep]) -> list[Upkept]:
    """In order; a container whose directory cannot be kept does not keep the others from theirs."""
    kept = []
    for one in wanted:
        try:
            kept.append(_keep_one(files, one))
        except AgentError as e:
            kept.append(Upkept(key=one.key, written=None, is_served=False, error=e))
    return kept


def _keep_one(files: KeepsFiles, one: Upkeep) -> Upkept:
    key, before = one.key, one.before
    is_served = one.socket is not None and files.has_socket(key, one.socket)
    is_untouched = before is not None and is_served and files.stamps(key) == before.stamps
    pids = one.pids if one.pids is not None or before is None else before.pids
    if before is not None and is_untouched and (before.config, before.pids) == (one.config, pids):
        return Upkept(key=key, written=before, is_served=True)
    if not is_untouched:
        files.prepare(key)
    if pids is None:
        files.write_pids_if_none(key)
    elif not (is_untouched and before is not None and before.pids == pids):
        files.write_pids(key, pids)
    config = one.config if one.is_config_sure else _with_the_limit_that_is_there(one.config, files.read_config(key))
    if not (is_untouched and before is not None and before.config == config):
        files.write_config(key, config)  # last: its presence tells the library that both are there
    return Upkept(key=key, written=Written(config=config, pids=pids, stamps=files.stamps(key)), is_served=is_served)


def _with_the_limit_that_is_there(config: bytes, there: bytes | None) -> bytes:
    """The elastic limit comes from the pod's annotations; until they are known the file's own stands."""
    if there is None:
        return config
    try:
        old, new = decode_config(there), decode_config(config)
    except Corrupt:
        return config
    return there if replace(old, limit=new.limit, hard_limit=new.hard_limit) == new else config
