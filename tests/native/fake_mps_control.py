"""A control program and daemon of MPS that misbehave as files in a directory say: `fake_mps_control.py DIRECTORY [-f]`.

| file | behaviour |
|---|---|
| `old` | the control program knows no option but -f |
| `fails` | the daemon prints its reason and ends with code 3 at once; once only, where the file says so |
| `waits` | the daemon makes its socket only when this file has gone |
| `deaf` | the daemon ignores `quit` and SIGTERM |
| `hangs` | the control program never ends |
| `nonsense` | the control program prints the file's text, whatever it is asked |
| `clients` | lines `SERVER CLIENT`: what the daemon says it serves |

Each start of a daemon and each command goes to `record`, a line each, as they come.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from gpushare_agent.sandbox import mps_control

HERE = Path(sys.argv[1])


def record(text: str) -> None:
    with (HERE / "record").open("a") as file:
        file.write(f"{text}\n")


def daemon() -> int:
    record(" ".join([f"daemon {os.getpid()}", *sys.argv[3:]]))
    if (HERE / "old").exists() and sys.argv[3:]:
        sys.stdout.write("usage: nvidia-cuda-mps-control [-d | -f]\n")
        return 1
    if (HERE / "fails").exists():
        if (HERE / "fails").read_text() == "once":
            (HERE / "fails").unlink()
        sys.stdout.write("no CUDA-capable device is detected\n")
        return 3
    while (HERE / "waits").exists():
        time.sleep(0.01)
    serve()
    return 0


def serve() -> None:
    import asyncio  # only the daemon's: each question starts this program

    from gpushare_agent.sandbox.fake_mps import FakeMps

    class Misbehaving(FakeMps):
        def answer(self, command: str) -> str:
            record(command)
            self.clients = {}
            if (HERE / "clients").exists():
                for server, client in map(str.split, (HERE / "clients").read_text().splitlines()):
                    self.clients.setdefault(int(server), []).append(int(client))
            return "" if command == "quit" and (HERE / "deaf").exists() else super().answer(command)

    async def run() -> None:
        fake = Misbehaving(Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]))

        def end() -> None:
            record("SIGTERM") if (HERE / "deaf").exists() else fake.is_ended.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        await fake.run()

    asyncio.run(run())


def control() -> int:
    if (HERE / "hangs").exists():
        record(f"hangs {os.getpid()}")
        time.sleep(3600)
    if (HERE / "nonsense").exists():
        sys.stdout.write((HERE / "nonsense").read_text())
        return 0
    return mps_control.main()


sys.exit(daemon() if sys.argv[2:3] == ["-f"] else control())
