"""The owner of the instances that are made on demand.

State owned: `_held`, the places of each claim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.mig import MigPlacement
from gpushare_agent.core.model.names import GpuUuid


class MigInstances:
    """Places are named as their devices in the slice (`placement_device_name`)."""

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """The instances that are there and whole, made here, by the name of their place: as the inventory has them."""
        return {}

    @property
    def made(self) -> Collection[GpuUuid]:
        """The UUIDs of all instances that were made here: no devices of their own in the slice."""
        return ()

    @property
    def blocked(self) -> Mapping[MigPlacement, str]:
        """The places that no claim can get now, with the reason: instances of others, or half-destroyed ones, lie there."""
        return {}

    def restore(self, held: Mapping[str, Collection[str]]) -> None:
        """The places of claims that are prepared, by the UID of each, as an agent before this one recorded them."""

    async def hold(self, uid: str, places: Collection[str]) -> Refused | None:
        """Once an instance is at each of these places, and is this claim's until `release`; it is made where there is none.
        Returns at once, with why not, where that needs what only time brings: the caller tries again. Idempotent. If
        cancelled, the places stay held."""
        return Refused(RefusalReason.NOT_READY, f"MIG instances are not made here: {', '.join(places)}")

    def release(self, uid: str) -> None:
        """The claim has ended: its instances are idle, and kept to be used again."""
