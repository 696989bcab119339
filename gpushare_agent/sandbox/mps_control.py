"""The control program of the fake MPS daemon (fake_mps.py): it asks the commands on its standard input.

Each question starts a process of it, so it imports no asyncio: a start takes 40 ms of processor time, not 110. No state.
"""

from __future__ import annotations

import os
import socket
import sys

CONTROL = "control"
"""The daemon's socket, in the directory CUDA_MPS_PIPE_DIRECTORY."""
ANSWER_TIMEOUT_S = 30.0
MAX_COMMANDS_BYTES = 64 * 1024


def main() -> int:
    commands = sys.stdin.buffer.read(MAX_COMMANDS_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(f"{os.environ['CUDA_MPS_PIPE_DIRECTORY']}/{CONTROL}")
            connection.sendall(commands)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                sys.stdout.buffer.write(piece)
        except OSError:
            print("Cannot find MPS control daemon process")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
