"""Compares each container's vDevice directory with what it should be, and writes what differs. It blocks: run in a thread.

What the agent does not know yet is not overwritten: at its start the pods' annotations and processes come seconds after the
containers, and a running container must not lose its elastic limit or its list of processes meanwhile.

`VDeviceConfigs` has what vcuda.config says, from a container's allocation, the pod's elastic limit and the driver's
version: they are needed every second, and made again only where an input has changed. State owned: the last ones by
container. Format: docs/reference/formats.md, the vDevice protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.isolation.vdevice.files import BoundSocket, VDeviceFiles
from gpushare_agent.core.formats.vdevice import VDeviceConfig, decode_config, encode_config
from gpushare_agent.core.kit.sockets import FileIdentity
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, Corrupt
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.model.shares import core_limit, share_limits


class Written(Struct, frozen=True, kw_only=True):
    """What the agent wrote last, and the files' identities then. `pids` None: a list of a previous agent."""

    config: VDeviceConfig
    pids: tuple[int, ...] | None
    stamps: tuple[FileIdentity | None, FileIdentity | None]


class DesiredDirectory(Struct, frozen=True, kw_only=True):
    """`is_config_known`: the pod's annotations are known. `pids` None: not known now. `socket`: of the running server."""

    key: ContainerKey
    config: VDeviceConfig
    is_config_known: bool
    pids: tuple[int, ...] | None
    before: Written | None
    socket: FileIdentity | None


class Directories(Struct, eq=False):
    """Writes those of `desired` that differ, in order; one that cannot be written does not stop the others. The outcomes are
    of those that are not as they were: most are, and take three stats. An error is one too.

    `close` at any time, also while `write` goes on in its thread, which then ends with the one that it is at: nobody serves
    the new sockets. Their files stay, because a disk that hangs must not hold the caller; the next start replaces them.
    """

    files: VDeviceFiles
    desired: Sequence[DesiredDirectory]
    bound: dict[ContainerKey, BoundSocket] = field(default_factory=dict)
    """New sockets, where the running server's is not in place. Whoever takes one out has it from there on."""
    _is_closed: bool = False

    def write(self) -> dict[ContainerKey, Written | AgentError]:
        outcomes = dict[ContainerKey, Written | AgentError]()
        for one in self.desired:
            if self._is_closed:  # another agent of this process may bind the other sockets by now
                break
            try:
                if (outcome := self._write(one)) is not None:
                    outcomes[one.key] = outcome
            except AgentError as e:
                outcomes[one.key] = e
        if self._is_closed:
            self.close()
        return outcomes

    def close(self) -> None:
        """Closes the sockets that nobody has taken, also those that `write` is still to bind."""
        self._is_closed = True
        while self.bound:
            with suppress(KeyError):  # the other thread was faster
                self.bound.popitem()[1][0].close()

    def _write(self, one: DesiredDirectory) -> Written | None:
        files, key, before = self.files, one.key, one.before
        has_socket = one.socket is not None and files.has_socket(key, one.socket)
        kept = before if has_socket and before is not None and files.stamps(key) == before.stamps else None
        # Not known now: what was written last is better than an empty list, under which the library limits nobody.
        pids = one.pids if one.pids is not None or before is None else before.pids
        if kept is not None and (kept.config, kept.pids) == (one.config, pids):
            return None
        config, content = one.config, None
        if kept is None or kept.config != config:  # else other processes alone are written: most often
            content = encode_config(config)
            # A restarted agent knows the pods' annotations seconds later; a container that runs must not lose its elastic
            # limit until then.
            if not one.is_config_known:
                content = _with_existing_limit(content, files.read_config(key))
                config = decode_config(content)  # kept without the content, which has 8 KiB for names that the key has
        if kept is not None:
            files.write(key, pids=pids, config=content)
        else:
            # Also where a file alone was replaced: what else is in there is not known. Neither known nor written by this
            # agent: a list that a former one left stays; without one the file is empty, as the library expects one there.
            files.prepare(key, pids=pids if pids is not None else files.read_pids(key) or (), config=content)
        if not has_socket:
            self.bound[key] = files.bind_socket(key)
        return Written(config=config, pids=pids, stamps=files.stamps(key))


def _with_existing_limit(config: bytes, existing: bytes | None) -> bytes:
    """The elastic limit comes from the pod's annotations; until they are known the file's own stays."""
    if existing is None:
        return config
    try:
        old, new = decode_config(existing), decode_config(config)
    except Corrupt:
        return config
    # Only where nothing else differs: memory and cores are known, and count at once.
    return existing if replace(old, limit=new.limit, hard_limit=new.hard_limit) == new else config


_DRIVER = re.compile(r"(\d{1,6})\.(\d{1,6})")
"""Major and minor of a version such as 580.159.04; simulated GPUs have none."""


class VDeviceConfigs(Struct, kw_only=True, eq=False):
    """`on_problem` is called with an elastic limit that is ignored, each time that it is read."""

    inventory: Callable[[], GpuInventory]
    driver_version: Callable[[], str]
    names: ResourceNames
    on_problem: Callable[[Pod, str], None]
    _known: dict[ContainerKey, tuple[tuple[object, ...], VDeviceConfig]] = field(default_factory=dict)

    def forget(self, keys: Iterable[ContainerKey]) -> None:
        for key in keys:
            self._known.pop(key, None)

    def config(self, allocation: Allocation, pod: Pod | None) -> VDeviceConfig:
        """`pod` None: its annotations are not known yet; the config has no elastic limit then."""
        inventory, driver_version = self.inventory(), self.driver_version()
        inputs = (allocation, pod, inventory, driver_version)
        known = self._known.get(allocation.key)
        # By identity: values are replaced, never changed.
        if known is not None and all(old is new for old, new in zip(known[0], inputs, strict=True)):
            return known[1]
        share = share_limits(allocation, pod, inventory.by_uuid(), self.names)
        # A problem of the annotation concerns shares of vcore alone; the others have no elastic limit.
        is_pods = not allocation.is_whole and allocation.claim is None and not allocation.unit_ids
        if pod is not None and is_pods and (problem := core_limit(pod.annotations, share.cores).problem):
            self.on_problem(pod, problem)
        driver = _DRIVER.match(driver_version)
        config = VDeviceConfig(
            pod_uid=allocation.key.pod_uid,
            container=allocation.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            # gpu-manager's pair: with a ceiling the library lets a container above its cores while the GPU is idle.
            hard_limit=not share.core_limit,
            driver=(int(driver[1]), int(driver[2])) if driver else (0, 0),
            enable=share.is_limited,
        )
        self._known[allocation.key] = (inputs, config)
        return config
