"""Several container edits as one. Pure."""

from __future__ import annotations

from gpushare_agent.model.allocations import ContainerEdits


def merged(*parts: ContainerEdits) -> ContainerEdits:
    """All of them together; of one variable or annotation the last counts."""
    return ContainerEdits(
        env=tuple(sorted({name: value for part in parts for name, value in part.env}.items())),
        mounts=tuple(dict.fromkeys(mount for part in parts for mount in part.mounts)),
        devices=tuple(dict.fromkeys(device for part in parts for device in part.devices)),
        annotations=tuple(sorted({name: value for part in parts for name, value in part.annotations}.items())),
        cdi_devices=tuple(dict.fromkeys(device for part in parts for device in part.cdi_devices)),
    )
