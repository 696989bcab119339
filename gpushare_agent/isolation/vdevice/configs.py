"""The bytes of every container's vcuda.config, from its allocation, the pod's elastic limit and the driver's version.

They are needed every second, and encoded anew only where an input has changed. State owned: the last ones by container.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from msgspec import Struct, field

from gpushare_agent.isolation.shares import core_limit, limit_annotations, share_limits
from gpushare_agent.isolation.vdevice.format import VDeviceConfig, encode_config
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

_DRIVER = re.compile(r"(\d{1,6})\.(\d{1,6})")


class VDeviceConfigs(Struct, kw_only=True, eq=False):
    """`on_problem` is called with an elastic limit that is ignored, each time that it is read."""

    inventory: Callable[[], GpuInventory]
    driver_version: Callable[[], str]
    names: ResourceNames
    on_problem: Callable[[Pod, str], None]
    _encoded: dict[ContainerKey, tuple[tuple[object, ...], bytes]] = field(default_factory=dict)

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        for key in [key for key in self._encoded if key not in keys]:
            del self._encoded[key]

    def config(self, allocation: Allocation, pod: Pod | None) -> bytes:
        """`pod` None: its annotations are not known yet; the config has no elastic limit then."""
        inputs = (allocation, pod, self.inventory(), self.driver_version())
        known = self._encoded.get(allocation.key)
        if known is not None and all(old is new for old, new in zip(known[0], inputs, strict=True)):
            return known[1]
        config = self._encode(allocation, pod)
        self._encoded[allocation.key] = (inputs, config)
        return config

    def _encode(self, allocation: Allocation, pod: Pod | None) -> bytes:
        annotations = limit_annotations(allocation, pod)
        share = share_limits(allocation, annotations, self.inventory().by_uuid(), self.names)
        is_pods = pod is not None and not allocation.is_whole and allocation.claim is None and not allocation.unit_ids
        if pod is not None and is_pods and (problem := core_limit(annotations, share.cores).problem):
            self.on_problem(pod, problem)
        config = VDeviceConfig(
            pod_uid=allocation.key.pod_uid,
            container=allocation.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            hard_limit=not share.core_limit,
            driver=driver_numbers(self.driver_version()),
            enable=share.is_limited,
        )
        return encode_config(config)


def driver_numbers(version: str) -> tuple[int, int]:
    """Major and minor of a driver version such as 580.159.04; (0, 0) where it has none (simulated GPUs)."""
    match = _DRIVER.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
