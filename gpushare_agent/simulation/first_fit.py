"""Dynamic Resource Allocation: kube-scheduler allocates GPUs to the pods' claims, first fit in the order of the slices.

A share is a claim with cores and memory, whole GPUs are a claim with a count. The agent orders the slice by `dra.order`;
here that takes no time. Of the nodes where a claim fits, the score is as without an extender: claims have none of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gpushare_agent.extender.values import ClusterNode
from gpushare_agent.model.charges import Charge
from gpushare_agent.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.placement import GpuAccount
from gpushare_agent.placement.gpu_account import account_of
from gpushare_agent.sandbox.scheduler.allocation import (
    Capacity,
    ClaimRequests,
    Device,
    DeviceKey,
    Option,
    Share,
    allocate,
)
from gpushare_agent.sandbox.scheduler.selectors import DeviceView
from gpushare_agent.simulation.judges import Choice, SumsJudge
from gpushare_agent.simulation.workload import Shape

_CORES, _MEMORY = "gpu/cores", "gpu/memory"


class FirstFit:
    """State owned: what the pods' claims have, and which nodes a shape fits, until something on them changes."""

    def __init__(
        self, nodes: Sequence[ClusterNode], by_sums: SumsJudge, names: ResourceNames, *, is_binpack: bool
    ) -> None:
        self._by_sums = by_sums
        self._names = names
        self._sign = -1 if is_binpack else 1
        self._nodes = {node.name: node for node in nodes}
        self._devices = {node.name: [self._device(node, index) for index in range(len(node.gpus))] for node in nodes}
        self._used: dict[str, dict[DeviceKey, dict[str, int]]] = {node.name: {} for node in nodes}
        self._claims: dict[PodUid, tuple[str, list[Share]]] = {}
        self._fits: dict[Shape, dict[str, bool]] = {}

    def choose(self, _pod: Pod, shape: Shape, names: Sequence[str]) -> Choice:
        known = self._fits.setdefault(shape, {})
        for name in names:
            if name not in known:
                known[name] = self._allocated(name, shape) is not None
        return self._by_sums.best_of([name for name in names if known[name]])

    def changed(self, name: str) -> None:
        for known in self._fits.values():
            known.pop(name, None)

    def take(self, uid: PodUid, shape: Shape, name: str) -> None:
        """On one of the nodes that were chosen."""
        shares = self._allocated(name, shape)
        if shares is None:
            raise AssertionError(f"{shape} does not fit {name} any more")
        self._claims[uid] = name, shares
        self._add(name, shares, 1)

    def remove_pod(self, uid: PodUid) -> None:
        self._add(*self._claims.pop(uid), -1)

    def gpus(self, name: str) -> Sequence[GpuAccount]:
        used = self._used[name]
        return [
            account_of(gpu, self._names, Charge(cores=consumed.get(_CORES, 0), blocks=consumed.get(_MEMORY, 0)))
            for gpu, device in zip(self._nodes[name].gpus, self._devices[name], strict=True)
            for consumed in (used.get(device.key, {}),)
        ]

    def _allocated(self, name: str, shape: Shape) -> list[Share] | None:
        used = self._used[name]
        ordered = sorted(self._devices[name], key=lambda device: self._sign * used.get(device.key, {}).get(_CORES, 0))
        found = allocate([_requests_of(shape)], ordered, used)
        return None if found is None else found[0]

    def _add(self, name: str, shares: Sequence[Share], sign: int) -> None:
        for share in shares:
            device = self._used[name].setdefault(share.device.key, dict.fromkeys(share.consumed, 0))
            for capacity, amount in share.consumed.items():
                device[capacity] += sign * amount

    def _device(self, node: ClusterNode, index: int) -> Device:
        blocks = node.gpus[index].memory_mib // self._names.memory_block_mib
        return Device(
            key=("gpu", node.name, f"gpu-{index}"),
            view=DeviceView(driver="gpu", attributes={}, capacity={_MEMORY: Fraction(blocks)}),
            capacity={
                _CORES: Capacity(value=CORES_PER_GPU, default=CORES_PER_GPU, steps=(0, CORES_PER_GPU, 1)),
                _MEMORY: Capacity(value=blocks, default=blocks, steps=(1, blocks, 1)),
            },
        )


def _requests_of(shape: Shape) -> ClaimRequests:
    """Whole GPUs have together the memory that is asked for, if each has its part."""
    if shape.cores % CORES_PER_GPU:
        option = Option(name="gpu", asked={_CORES: shape.cores, _MEMORY: shape.blocks})
    else:
        least = -(-shape.blocks // shape.whole_gpus)
        option = Option(
            name="gpu", count=shape.whole_gpus, selects=lambda device: device.capacity[_MEMORY].value >= least
        )
    return ClaimRequests(requests=((option,),))
