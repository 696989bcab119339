"""An in-container client of the vDevice socket, for tests and for the inspection of a pod.

`gpushare-agent vdevice` registers with the flags of TKEStack's gpu-client, then prints the limits that it reads back from
vcuda.config, and the PIDs. Missing flags (pod UID, name) are taken from the vcuda.config next to the socket. It writes text
for people and JSON for programs. No state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from pathlib import Path

from msgspec import Struct, to_builtins

from gpushare_agent.core.cli.command_line import PROGRAM, Invocation
from gpushare_agent.core.formats.vdevice import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    SOCKET_NAME,
    VDeviceConfig,
    decode_config,
    decode_pids,
)
from gpushare_agent.core.kit.logs import write_stderr
from gpushare_agent.core.kit.peer_credentials import is_host_pid_namespace, pid_namespace_of, socket_peer
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.kit.sockets import connectable_path
from gpushare_agent.core.kit.supervision import ReportOnce
from gpushare_agent.core.model.errors import AgentError, NotFound, Rejected, Unavailable, os_errors_as
from gpushare_agent.core.model.names import MIB, is_container_id
from gpushare_agent.core.settings.settings import SettingsError


class VDevice(Struct, frozen=True, kw_only=True):
    """A container's limits, and the PIDs of its processes as the driver reports them."""

    config: VDeviceConfig
    pids: tuple[int, ...]


def as_json(found: VDevice, *, own_pid: int | None, is_registered: bool | None) -> str:
    """One line. `own_pid` is null where it cannot be known; `registered` is absent where it was not tried."""
    document = {
        **to_builtins(found.config),
        "pids": found.pids,
        "own_pid": own_pid,
        "own_pid_listed": None if own_pid is None else own_pid in found.pids,
    }
    if is_registered is not None:
        document["registered"] = is_registered
    return json.dumps(document, sort_keys=True)


def as_text(found: VDevice, *, own_pid: int | None, is_registered: bool | None) -> str:
    """`is_registered` is None where that was not tried, False where it failed."""
    pids = " ".join(map(str, found.pids)) or "-"
    rows = (*_limits(found.config), ("pids", pids), ("own pid", _own(found, own_pid, is_registered)))
    return "\n".join(f"{name:<11} {value}" for name, value in rows)


def changes_as_text(before: VDevice, after: VDevice, now: str) -> str:
    """A line for each row that changed, and one for PIDs that came and went. Empty where nothing did."""
    old = dict(_limits(before.config))
    lines = [f"{name}: {old[name]} -> {value}" for name, value in _limits(after.config) if old[name] != value]
    came, went = set(after.pids) - set(before.pids), set(before.pids) - set(after.pids)
    if came or went:
        moved = [f"+{pid}" for pid in sorted(came)] + [f"-{pid}" for pid in sorted(went)]
        lines.append(f"pids: {' '.join(moved)} ({len(after.pids)} now)")
    return "\n".join(f"{now} {line}" for line in lines)


def _limits(config: VDeviceConfig) -> tuple[tuple[str, str], ...]:
    whole = "no: whole GPUs, the library passes every call on unchanged"
    return (
        ("pod uid", config.pod_uid),
        ("container", config.container),
        ("bus id", config.bus_id or "-"),
        ("cores", f"{config.utilization} %"),
        ("core limit", _ceiling(config)),
        ("hard limit", "yes" if config.hard_limit else "no"),
        ("memory", f"{config.memory_bytes / MIB:g} MiB"),
        ("driver", f"{config.driver[0]}.{config.driver[1]}"),
        ("limited", "yes" if config.enable else whole),
    )


def _ceiling(config: VDeviceConfig) -> str:
    if not config.limit:
        return "none"
    # A ceiling equal to the cores is how a share that is not elastic is written.
    return f"{config.limit} %" + (", no more than its cores" if config.limit == config.utilization else "")


def _own(found: VDevice, own_pid: int | None, is_registered: bool | None) -> str:
    if own_pid is None:
        return "not to be known: this process is in a PID namespace of its own, and the PIDs above may be the host's"
    if own_pid in found.pids:
        return f"{own_pid}, listed"
    if is_registered:
        return (
            f"{own_pid}, NOT listed: it is not in this container's cgroup, or the agent cannot see the host's processes"
        )
    if is_registered is None:
        return f"{own_pid}, not listed: it is no process of this container, or began within the last second"
    return f"{own_pid}, not listed: it could not be registered (above), and the agent that keeps the list may be away"


ADDRESS_VARIABLE = "GPUSHARE_VDEVICE"
DEFAULT_ADDRESS = Path("/etc/vcuda/vcuda.sock")
TIMEOUT_S = 15.0
"""Longer than the server takes at most for one call."""
PEER_TIMEOUT_S = 2.0
AGENT_UNAVAILABLE = 3
"""An exit code."""

_AGENT_UNAVAILABLE = (
    "check that the agent runs on this node; while it restarts its sockets are missing for a moment. The limits that it"
    " wrote stay in force, only pids.config becomes stale"
)


async def register(options: argparse.Namespace, address: Path) -> None:
    """Registers through the socket at `address`, by name or by ID; what the options leave out is in the config next to it.

    Raises:
        Unavailable: there is no answer, or the agent cannot decide now.
        Rejected: the agent refused.
        NotFound, Corrupt: the config cannot be read.
    """
    from grpclib import Status

    from gpushare_agent.core.kit.grpc_client import RpcFailed, UnixChannel
    from gpushare_agent.core.kit.protobuf import MalformedMessageError
    from gpushare_agent.core.wire.vcuda import VDeviceRequest, VDeviceResponse

    # Imported above, not at the head: reading alone does without gRPC, which takes most of the start.
    pod_uid, name, container_id = options.pod_uid, options.cont_name, options.cont_id
    if not pod_uid or not (name or container_id):
        config = _read_config(address.parent)
        # What was given counts, so that a test can claim to be another container and be refused.
        pod_uid = pod_uid or config.pod_uid
        name = name or ("" if container_id else config.container)
    named = {"container_name": name, "container_id": container_id}
    request = VDeviceRequest(bus_id=options.bus_id, pod_uid=pod_uid, **named)
    channel = UnixChannel(address)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await channel.unary("/vcuda.VCUDAService/RegisterVDevice", request, VDeviceResponse)
    except (RpcFailed, MalformedMessageError, TimeoutError) as e:
        # Nobody answered, or not in time: nothing is known about the request itself.
        if not isinstance(e, RpcFailed) or not e.is_answer:
            why = _why(e.__cause__ or e)
            raise Unavailable(f"registering through {address} failed: {why}; {_AGENT_UNAVAILABLE}") from e
        # These pass: the agent starts, is busy, or limits calls.
        if e.status in (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.RESOURCE_EXHAUSTED):
            raise Unavailable(f"the agent could not register now: {e}; try again") from e
        raise Rejected(f"the agent refused to register: {e}") from e
    finally:
        channel.close()


def read_vdevice(directory: Path) -> VDevice:
    """Reads the two files of a vDevice directory.

    Raises:
        NotFound: a file cannot be read.
        Corrupt: a file is not what the agent writes.
    """
    return VDevice(config=_read_config(directory), pids=decode_pids(_read(directory / PIDS_NAME, 4 * MAX_PIDS + 1)))


def own_host_pid(address: Path) -> int | None:
    """This process's PID as the agent writes it; None where that cannot be known.

    A process in a PID namespace of its own cannot read its PID outside of it: /proc shows inner numbers only. So the
    PID is known in the machine's first namespace, and where the agent behind `address` is in our own.
    """
    if is_host_pid_namespace():
        return os.getpid()
    agent = _listener_pid(address)
    ours = pid_namespace_of("self")
    # PID 0 of the peer: the agent is in a namespace that this one cannot see into.
    return os.getpid() if agent > 0 and ours is not None and pid_namespace_of(agent) == ours else None


async def run(call: Invocation) -> int:
    """Raises AgentError, SettingsError where the command line is wrong."""
    options = call.options
    usual = call.environ.get(ADDRESS_VARIABLE) or str(DEFAULT_ADDRESS)
    address = _socket_at(usual if options.addr is None else options.addr)
    if options.cont_id and not is_container_id(options.cont_id):
        raise SettingsError(["--cont-id must be 64 hexadecimal digits in lower case"])
    directory = address.parent
    if not directory.is_dir():
        raise NotFound(
            f"there is no directory {directory}: this is not a container with a share of a GPU, or the agent runs with"
            f" isolation none. A container gets it by asking for cores of a GPU; outside of one, name the socket with"
            f" --addr or {ADDRESS_VARIABLE}"
        )
    is_registered = None
    if options.register:
        try:
            await register(options, address)
            is_registered = True
        # The files are read all the same: the limits hold while the agent is away.
        except Unavailable as e:
            is_registered = False
            write_stderr(f"{PROGRAM} vdevice: {e}\n")
    # Registered by ID, the container has a directory of its own below the pod's.
    if options.cont_id:
        directory /= options.cont_id
    pid = own_host_pid(address)
    found = read_vdevice(directory)
    is_json = options.output == "json"
    if is_json:
        print(as_json(found, own_pid=pid, is_registered=bool(is_registered)), flush=True)
    else:
        print(as_text(found, own_pid=pid, is_registered=is_registered), flush=True)
    if options.watch is not None:
        await _watch(directory, found, interval_s=options.watch, is_json=is_json, own_pid=pid)
    return AGENT_UNAVAILABLE if is_registered is False else 0


def _socket_at(text: str) -> Path:
    """People name the directory, gpu-client's flag the socket in it. Raises SettingsError."""
    if not text or "://" in text:
        what = f"it names the vDevice socket or its directory, such as {DEFAULT_ADDRESS}"
        raise SettingsError([f"--addr: {text!r} is no path; {what}"])
    address = Path(text)
    if address.is_file():
        what = "--addr names the vDevice socket, or the directory that it is in"
        raise SettingsError([f"{address} is a plain file; {what}"])
    if not address.is_dir():
        return address
    if containers := _containers_in(address):
        raise SettingsError([f"{address} is a pod's directory; name one of its containers: {', '.join(containers)}"])
    return address / SOCKET_NAME


def _containers_in(directory: Path) -> list[str]:
    """Of a pod's directory; a container's own has the files, and none but copies for container IDs below."""
    try:
        if (directory / CONFIG_NAME).exists():
            return []
        return sorted(
            child.name
            for child in directory.iterdir()
            if (child / CONFIG_NAME).exists() and not is_container_id(child.name)
        )
    except OSError:  # reading the files raises a better error
        return []


def _why(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket"
    if isinstance(error, ConnectionRefusedError):
        return "no process listens there"
    # asyncio's own has no text.
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {TIMEOUT_S:g} s"
    return str(error)


def _listener_pid(address: Path) -> int:
    """The listener's PID at `address`; 0 where there is none, or it is not visible in this PID namespace."""
    try:
        with socket.socket(socket.AF_UNIX) as client, connectable_path(address) as path:
            # A stopped agent whose backlog is full would never accept.
            client.settimeout(PEER_TIMEOUT_S)
            client.connect(path)
            return socket_peer(client).pid
    except OSError:
        return 0


async def _watch(directory: Path, last: VDevice, *, interval_s: float, is_json: bool, own_pid: int | None) -> None:
    """Prints each change of the files, and once when they cannot be read; they may come back. Ends by an interrupt."""
    shown: VDevice | None = last
    failure = ReportOnce()
    while True:
        await asyncio.sleep(interval_s)
        now = time.strftime("%H:%M:%S")
        try:
            found = read_vdevice(directory)
        except AgentError as e:
            if failure.is_new(str(e)):
                # So that the same content counts as news when it can be read again.
                shown = None
                sys.stderr.write(f"{now} {e}\n")
            continue
        if found != shown:
            text = as_json(found, own_pid=own_pid, is_registered=None) if is_json else changes_as_text(last, found, now)
            print(text or f"{now} readable again, nothing changed", flush=True)
        failure.is_over()
        shown = last = found


def _read_config(directory: Path) -> VDeviceConfig:
    return decode_config(_read(directory / CONFIG_NAME, CONFIG_BYTES + 1))


def _read(path: Path, limit: int) -> bytes:
    with os_errors_as(NotFound, f"reading {path} failed", otherwise="is it the directory of a container with a share?"):
        return read_regular(path, limit)
