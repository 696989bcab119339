"""An in-container client of the vDevice socket, for trying, for tests, and for looking into a pod.

`python -m gpushare_agent.vdevice_client` registers with the flags of TKEStack's gpu-client, then prints the limits that it
reads back from vcuda.config, and the PIDs. What is not given (pod UID, name) is taken from the vcuda.config beside the
socket. Exit codes: 0 registered, 1 refused or unreadable, 2 the command line is wrong. No state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpclib import GRPCError
from grpclib.client import Channel
from grpclib.exceptions import StreamTerminatedError

from gpushare_agent.kit.sockets import connectable_path
from gpushare_agent.model.errors import AgentError, NotFound, Rejected, Unavailable
from gpushare_agent.model.vdevice import (
    CONFIG_BYTES,
    CONFIG_NAME,
    MAX_PIDS,
    PIDS_NAME,
    VDeviceConfig,
    decode_config,
    decode_pids,
    is_container_id,
)
from gpushare_agent.wire.vcuda import VcudaServiceStub, VDeviceRequest

DEFAULT_ADDRESS = Path("/etc/vcuda/vcuda.sock")
TIMEOUT_S = 15.0
"""Longer than the server takes at most for one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VDevice:
    """What a container was given: its limits and the host PIDs of its processes."""

    config: VDeviceConfig
    pids: tuple[int, ...]


async def register(address: Path, request: VDeviceRequest, *, timeout_s: float = TIMEOUT_S) -> None:
    """Registers through the socket at `address`.

    Raises:
        Unavailable: nobody answers there.
        Rejected: the agent said no.
    """
    try:
        with connectable_path(address) as path:
            async with asyncio.timeout(timeout_s), Channel(path=path) as channel:
                await VcudaServiceStub(channel).register_v_device(request)
    except GRPCError as e:
        raise Rejected(f"the agent refused to register: {e.status.name}: {e.message}") from e
    except (OSError, StreamTerminatedError) as e:  # a TimeoutError is an OSError
        why = e or f"no answer within {timeout_s:g} s"
        raise Unavailable(
            f"registering through {address} failed: {why}; check that the agent runs on this node and that this "
            f"container asks for a share of a card"
        ) from e


def read_vdevice(directory: Path) -> VDevice:
    """Reads the two files of a vDevice directory.

    Raises:
        NotFound: a file cannot be read.
        Corrupt: a file is not what the agent writes.
    """
    return VDevice(config=_read_config(directory), pids=decode_pids(_read(directory / PIDS_NAME, 4 * MAX_PIDS + 1)))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        request = _request(arguments)
        asyncio.run(register(arguments.addr, request))
        directory = arguments.addr.parent
        found = read_vdevice(directory / request.container_id if request.container_id else directory)
    except AgentError as e:
        sys.stderr.write(f"vdevice_client: {e}\n")
        return 1
    sys.stdout.write(_as_json(found) if arguments.output == "json" else _as_text(found))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gpushare_agent.vdevice_client",
        description="Register this container with the node's GPU agent and print the limits and PIDs that it wrote.",
    )
    parser.add_argument("--addr", type=Path, default=DEFAULT_ADDRESS, help="the vDevice socket (default: %(default)s)")
    parser.add_argument("--bus-id", default="", help="PCI bus ID; usually empty")
    parser.add_argument("--pod-uid", default="", help="default: as vcuda.config beside the socket says")
    container = parser.add_mutually_exclusive_group()
    container.add_argument(
        "--cont-id", default="", metavar="ID", help="register by container ID, 64 hexadecimal digits"
    )
    container.add_argument(
        "--cont-name", default="", metavar="NAME", help="register by name; default: as vcuda.config says"
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    if arguments.cont_id and not is_container_id(arguments.cont_id):
        parser.error("--cont-id must be 64 hexadecimal digits in lower case")
    return arguments


def _request(arguments: argparse.Namespace) -> VDeviceRequest:
    pod_uid, name = arguments.pod_uid, arguments.cont_name
    if not pod_uid or not (name or arguments.cont_id):
        config = _read_config(arguments.addr.parent)
        pod_uid = pod_uid or config.pod_uid
        name = name or ("" if arguments.cont_id else config.container)
    return VDeviceRequest(bus_id=arguments.bus_id, pod_uid=pod_uid, container_name=name, container_id=arguments.cont_id)


def _read_config(directory: Path) -> VDeviceConfig:
    return decode_config(_read(directory / CONFIG_NAME, CONFIG_BYTES + 1))


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as e:
        raise NotFound(f"reading {path} failed: {e.strerror}; is it the directory of a container with a share?") from e


def _as_json(found: VDevice) -> str:
    return json.dumps({**asdict(found.config), "pids": found.pids}, sort_keys=True) + "\n"


def _as_text(found: VDevice) -> str:
    config = found.config
    rows = (
        ("pod uid", config.pod_uid),
        ("container", config.container),
        ("bus id", config.bus_id or "-"),
        ("cores", f"{config.utilization} %"),
        ("core limit", f"{config.limit} %" if config.limit else "none"),
        ("hard limit", "yes" if config.hard_limit else "no"),
        ("memory", f"{config.memory_bytes / 2**20:g} MiB"),
        ("driver", f"{config.driver[0]}.{config.driver[1]}"),
        ("limited", "yes" if config.enable else "no"),
        ("pids", " ".join(map(str, found.pids)) or "-"),
    )
    return "".join(f"{name:<11} {value}\n" for name, value in rows)


if __name__ == "__main__":
    raise SystemExit(main())
