"""An in-container client of the vDevice socket, for tests and for the inspection of a pod.

`gpushare-agent vdevice`, or `python -m gpushare_agent.cli.vdevice` where start-up should be short,
registers with the flags of TKEStack's gpu-client, then prints the limits that it reads back from vcuda.config, and
the PIDs. Missing flags (pod UID, name) are taken from the vcuda.config beside the socket. It writes
text for people and JSON for programs. No state.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, to_builtins

from gpushare_agent.isolation.vdevice.format import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    SOCKET_NAME,
    VDeviceConfig,
    decode_config,
    decode_pids,
)
from gpushare_agent.kit.peer_credentials import is_host_pid_namespace, pid_namespace_of, socket_peer
from gpushare_agent.kit.regular_file import read_regular
from gpushare_agent.kit.sockets import connectable_path
from gpushare_agent.model.errors import AgentError, NotFound, Rejected, Unavailable
from gpushare_agent.model.names import MIB, is_container_id


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
    return json.dumps(document, sort_keys=True) + "\n"


def as_text(found: VDevice, *, own_pid: int | None, is_registered: bool | None) -> str:
    """`is_registered` is None where that was not tried, False where it failed."""
    pids = " ".join(map(str, found.pids)) or "-"
    rows = (*_limits(found.config), ("pids", pids), ("own pid", _own(found, own_pid, is_registered)))
    return "".join(f"{name:<11} {value}\n" for name, value in rows)


def changes_as_text(before: VDevice, after: VDevice, now: str) -> str:
    """A line for each row that changed, and one for PIDs that came and went. Empty where nothing did."""
    old = dict(_limits(before.config))
    lines = [f"{name}: {old[name]} -> {value}" for name, value in _limits(after.config) if old[name] != value]
    came, went = set(after.pids) - set(before.pids), set(before.pids) - set(after.pids)
    if came or went:
        moved = [f"+{pid}" for pid in sorted(came)] + [f"-{pid}" for pid in sorted(went)]
        lines.append(f"pids: {' '.join(moved)} ({len(after.pids)} now)")
    return "".join(f"{now} {line}\n" for line in lines)


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
DONE, FAILED, AGENT_UNAVAILABLE, INTERRUPTED = 0, 1, 3, 130

_EXIT_CODES = """\
exit codes:
  0    registered and read; with --no-register: read
  1    refused, or the files cannot be read
  2    the command line is wrong
  3    the agent did not answer; the files were read and printed
  130  interrupted, which is how --watch ends
"""
_AGENT_UNAVAILABLE = (
    "check that the agent runs on this node; while it restarts its sockets are missing for a moment. The limits that it"
    " wrote stay in force, only pids.config becomes stale"
)


async def register(
    address: Path, *, pod_uid: str, container_name: str = "", container_id: str = "", bus_id: str = ""
) -> None:
    """Registers through the socket at `address`, by name or by ID.

    Raises:
        Unavailable: there is no answer, or the agent cannot decide now.
        Rejected: the agent refused.
    """
    import asyncio

    from grpclib import Status

    from gpushare_agent.kit.grpc_client import RpcFailed, UnixChannel
    from gpushare_agent.kit.protobuf import MalformedMessageError
    from gpushare_agent.wire.vcuda import VDeviceRequest, VDeviceResponse

    request = VDeviceRequest(bus_id=bus_id, pod_uid=pod_uid, container_name=container_name, container_id=container_id)
    # Imported above, not at the head: reading alone does without gRPC and asyncio, which take most of the start.
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


def run(argv: Sequence[str], environ: Mapping[str, str], *, program: str) -> int:
    """One call of the command; `program` is its name in messages.

    Raises:
        AgentError: for a person; exit code 1.
    """
    options = _parse(argv, environ, program)
    _require_directory(options.addr.parent)
    code = DONE
    if options.register:
        code = _register(options, program)
    directory = options.addr.parent
    # Registered by ID, the container has a directory of its own below the pod's.
    if options.cont_id:
        directory /= options.cont_id
    pid = own_host_pid(options.addr)
    found = read_vdevice(directory)
    is_registered = options.register and code == DONE
    if options.output == "json":
        _print(as_json(found, own_pid=pid, is_registered=is_registered))
    else:
        _print(as_text(found, own_pid=pid, is_registered=is_registered if options.register else None))
    if options.watch is not None:
        _watch(directory, found, interval_s=options.watch, is_json=options.output == "json", own_pid=pid)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if argv is None else argv, os.environ, program="vdevice_client")
    except AgentError as e:
        sys.stderr.write(f"vdevice_client: {e}\n")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    # Python would report the closed pipe once more when it flushes at its end.
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _parse(argv: Sequence[str], environ: Mapping[str, str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Registers this container with the node's GPU agent and prints the limits and PIDs that it wrote.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, environ)
    options = parser.parse_args(argv)
    if options.cont_id and not is_container_id(options.cont_id):
        parser.error("--cont-id must be 64 hexadecimal digits in lower case")
    # People name the directory, gpu-client's flag the socket in it.
    if options.addr.is_dir():
        if containers := _containers_in(options.addr):
            parser.error(f"{options.addr} is a pod's directory; name one of its containers: {', '.join(containers)}")
        options.addr /= SOCKET_NAME
    elif options.addr.is_file():
        parser.error(f"{options.addr} is a plain file; --addr names the vDevice socket, or the directory that it is in")
    return options


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    parser.add_argument(
        "--addr",
        type=_address,
        default=environ.get(ADDRESS_VARIABLE) or str(DEFAULT_ADDRESS),  # a text, so that it is checked as a flag is
        help=f"the vDevice socket, or its directory (default: {ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )
    parser.add_argument("--bus-id", default="", help="PCI bus ID; usually empty")
    parser.add_argument("--pod-uid", default="", help="default: as vcuda.config beside the socket says")
    container = parser.add_mutually_exclusive_group()
    container.add_argument(
        "--cont-id", default="", metavar="ID", help="register by container ID, 64 hexadecimal digits"
    )
    container.add_argument(
        "--cont-name", default="", metavar="NAME", help="register by name; default: as vcuda.config says"
    )
    parser.add_argument("--no-register", dest="register", action="store_false", help="only read the files")
    parser.add_argument(
        "-w",
        "--watch",
        nargs="?",
        type=_interval,
        const=1.0,
        metavar="SECONDS",
        help="go on reading every SECONDS (1) and print what changed, until interrupted",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="json: a document a line")


def _address(text: str) -> Path:
    if not text or "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no path; it names the vDevice socket or its directory, such as {DEFAULT_ADDRESS}"
        )
    return Path(text)


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


def _interval(text: str) -> float:
    seconds = float(text)
    # Also refuses NaN, which compares with nothing.
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return seconds


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise NotFound(
            f"there is no directory {directory}: this is not a container with a share of a GPU, or the agent runs with"
            f" isolation none. A container gets it by asking for cores of a GPU; outside of one, name the socket with"
            f" --addr or {ADDRESS_VARIABLE}"
        )


def _register(options: argparse.Namespace, program: str) -> int:
    import asyncio

    pod_uid, name = options.pod_uid, options.cont_name
    if not pod_uid or not (name or options.cont_id):
        config = _read_config(options.addr.parent)
        # What was given counts, so that a test can claim to be another container and be refused.
        pod_uid = pod_uid or config.pod_uid
        name = name or ("" if options.cont_id else config.container)
    try:
        asyncio.run(
            register(
                options.addr,
                pod_uid=pod_uid,
                container_name=name,
                container_id=options.cont_id,
                bus_id=options.bus_id,
            )
        )
    # The files are read all the same: the limits hold while the agent is away.
    except Unavailable as e:
        sys.stderr.write(f"{program}: {e}\n")
        return AGENT_UNAVAILABLE
    return DONE


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


def _watch(directory: Path, last: VDevice, *, interval_s: float, is_json: bool, own_pid: int | None) -> None:
    """Prints each change of the files, and once when they cannot be read; they may come back. Ends by an interrupt."""
    from gpushare_agent.kit.supervision import ReportOnce  # takes asyncio, which reading once does without

    shown: VDevice | None = last
    failure = ReportOnce()
    while True:
        time.sleep(interval_s)
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
            _print(text or f"{now} readable again, nothing changed\n")
        failure.is_over()
        shown = last = found


def _read_config(directory: Path) -> VDeviceConfig:
    return decode_config(_read(directory / CONFIG_NAME, CONFIG_BYTES + 1))


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit)
    except OSError as e:
        raise NotFound(f"reading {path} failed: {e.strerror}; is it the directory of a container with a share?") from e


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
