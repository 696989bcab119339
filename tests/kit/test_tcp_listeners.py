"""kit/tcp_listeners.py in network namespaces with one protocol, the other and both."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys

import pytest

from gpushare_agent.core.kit.tcp_listeners import host_port, listen_tcp
from gpushare_agent.core.model.errors import Unavailable

V4, V6 = ("10.9.9.9", "127.0.0.1"), ("fd00::5", "::1")
SETUP = {
    "ipv4": "ip -6 address flush dev lo; ip address add 10.9.9.9/32 dev lo",
    "ipv6": "ip -4 address flush dev lo; ip address add fd00::5/128 dev lo",
    "both": "ip address add 10.9.9.9/32 dev lo; ip address add fd00::5/128 dev lo",
    "a kernel without ipv6": "ip address add 10.9.9.9/32 dev lo",
}
PROGRAM = """
import asyncio, json, socket, sys
from gpushare_agent.core.kit.tcp_listeners import listen_tcp

def forbid_ipv6(number):
    # A seccomp filter: `socket(AF_INET6, …)` fails as in a kernel that was booted with ipv6.disable=1.
    import ctypes, struct
    fail, allow = (6, 0, 0, 0x50000 | 97), (6, 0, 0, 0x7FFF0000)
    steps = ((0x20, 0, 0, 0), (0x15, 0, 3, number), (0x20, 0, 0, 16), (0x15, 0, 1, 10), fail, allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0

async def main(addr, *asked):
    listeners = await listen_tcp(addr, 0, backlog=8)
    port = listeners[0].getsockname()[1]
    found = []
    for one in asked:
        try:
            socket.create_connection((one, port), timeout=5).close()
            found.append(one)
        except OSError:
            pass
    print(json.dumps(found))

if int(sys.argv[1]):
    forbid_ipv6(int(sys.argv[1]))
asyncio.run(main(*sys.argv[2:]))
"""
SOCKET_CALL = {"x86_64": 41, "aarch64": 198}
NAMESPACE = ("unshare", "--map-root-user", "--net")


def has_namespaces() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="no network namespace can be made here, or iproute2 is missing")
@pytest.mark.parametrize(
    ("network", "addr", "reached"),
    [
        ("ipv4", "", V4),
        ("ipv6", "", V6),
        ("both", "", V4 + V6),
        ("a kernel without ipv6", "", V4),
        ("both", "0.0.0.0", V4),
        ("both", "::", V6),
        ("both", "[::]", V6),
        ("both", "fd00::5", V6[:1]),
        ("both", "::ffff:10.9.9.9", V4[:1]),
    ],
)
def test_an_empty_address_is_every_address_of_both_protocols(network: str, addr: str, reached: tuple[str, ...]) -> None:
    """0.0.0.0 and :: are those of one, whichever the machine has."""
    lacks_ipv6 = network == "a kernel without ipv6"
    if lacks_ipv6 and platform.machine() not in SOCKET_CALL:
        pytest.skip("the number of the system call is not known for this processor")
    number = SOCKET_CALL[platform.machine()] if lacks_ipv6 else 0
    program = [sys.executable, "-c", PROGRAM, str(number), addr, *V4, *V6]
    shell = f'ip link set lo up; {SETUP[network]}; exec "$@"'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", shell, "sh", *program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)) == reached


@pytest.mark.parametrize("addr", ["a..b", "x" * 64 + ".example", "fe80::1%none", "localhost:80", "192.0.2.1"])
async def test_what_is_no_address_here_is_said(addr: str) -> None:
    """Python has an error of its own for a name that DNS cannot have."""
    why = "this machine has no such address" if addr == "192.0.2.1" else "the address is unknown"
    with pytest.raises(Unavailable, match=f"failed: {why}"):
        await listen_tcp(addr, 0, backlog=1)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("10.1.2.3", "10.1.2.3:80"),
        ("localhost", "localhost:80"),
        ("fd00::1", "[fd00::1]:80"),
        ("[fd00::1]", "[fd00::1]:80"),
        ("", "*:80"),
    ],
)
def test_an_address_is_shown_as_in_a_url(address: str, shown: str) -> None:
    """In brackets where it has colons of its own."""
    assert host_port(address, 80) == shown
