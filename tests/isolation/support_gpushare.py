"""For isolation gpushare: a share with its files on the disk, of which a test is the agent and the tenant."""

from __future__ import annotations

import struct
from pathlib import Path

from gpushare_agent.agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.agent.isolation.gpushare.format import CONFIG_NAME, USAGE_NAME, GpuLimits
from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.core.model.allocations import ContainerKey
from gpushare_agent.core.model.names import MIB, PodUid
from tests.isolation.support_library import fake_library
from tests.isolation.support_requests import GPUS, UID

KEY = ContainerKey(UID, "cuda")
OTHER = ContainerKey(PodUid("22222222-2222-3333-4444-555555555555"), "cuda")
UUID = GPUS[0].uuid
LIMITS = GpuLimits(uuid=UUID, memory_bytes=2048 * MIB, cores=3000)


class World:
    """The files of every container, all with the same limits, which the test changes; `made` is their class."""

    def __init__(self, directory: Path, made: type[GpushareFiles] = GpushareFiles) -> None:
        self.limits: GpuLimits | None = LIMITS
        self.is_claims = False
        self.library = Library(fake_library(directory / "libgpushare.so"), directory / "own")
        self.files = made(
            self.library,
            directory / "vm",
            lambda _: [self.limits] if self.limits is not None else None,
            lambda _: self.is_claims,
        )
        self.path = self.files.container_directory(KEY)

    def usage(self, key: ContainerKey = KEY) -> Path:
        return self.files.container_directory(key) / USAGE_NAME

    def config(self, key: ContainerKey = KEY) -> bytes:
        return (self.files.container_directory(key) / CONFIG_NAME).read_bytes()

    def write_usage(self, key: ContainerKey = KEY, gpu: int = 0, **numbers: float) -> None:
        """As the container's processes write them: `changed_at`, `paid_ns`, `launches`, `paid_long_ns` on a GPU."""
        places = {"changed_at": 0, "paid_ns": 48, "launches": 56, "paid_long_ns": 192}
        with self.usage(key).open("r+b") as file:
            for name, number in numbers.items():
                file.seek(512 + 256 * gpu + places[name])
                file.write(struct.pack("Q", int(number)))

    def launch(self, count: int) -> None:
        self.write_usage(launches=count)
