"""The bytes of every container's vcuda.config: what it holds, the pod's elastic limit, the driver's version.

Every second they are asked for; they are made anew where one of the things that they say has changed. State owned: the last
ones by container.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from gpushare_agent.isolation.vcuda.config_format import encode_config
from gpushare_agent.isolation.vcuda.limits import core_limit, driver_numbers, vdevice_share
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames


class VDeviceConfigs:
    """`complain` is told of an elastic limit that cannot count, each time that it is read."""

    def __init__(
        self,
        *,
        inventory: Callable[[], GpuInventory],
        driver_version: Callable[[], str],
        names: ResourceNames,
        complain: Callable[[Pod, str], None],
    ) -> None:
        self._inventory = inventory
        self._driver_version = driver_version
        self._names = names
        self._complain = complain
        self._made: dict[ContainerKey, tuple[tuple[object, ...], bytes]] = {}

    def keep_only(self, keys: Collection[ContainerKey]) -> None:
        for key in [key for key in self._made if key not in keys]:
            del self._made[key]

    def config(self, held: Allocation, pod: Pod | None) -> bytes:
        """`pod` None: its annotations are not known yet, and there is no elastic limit."""
        made_of = (held, pod, self._inventory(), self._driver_version())
        known = self._made.get(held.key)
        if known is not None and all(old is new for old, new in zip(known[0], made_of, strict=True)):
            return known[1]
        config = self._new(held, pod)
        self._made[held.key] = (made_of, config)
        return config

    def _new(self, held: Allocation, pod: Pod | None) -> bytes:
        annotations = pod.annotations if pod is not None else {}
        share = vdevice_share(held, annotations, self._inventory().by_uuid(), self._names)
        if pod is not None and not held.is_whole and (complaint := core_limit(annotations, share.cores).complaint):
            self._complain(pod, complaint)
        return encode_config(
            pod_uid=held.key.pod_uid,
            container=held.key.container,
            limit=share.core_limit,
            memory_bytes=share.memory_bytes,
            utilization=share.cores,
            hard_limit=not share.core_limit,
            driver=driver_numbers(self._driver_version()),
            enable=share.is_limited,
        )
