"""The text of a refusal, for the pod's owner: what was asked, what is free, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.model.errors import RefusalReason, Refused
from gpushare_agent.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.placement.gpu_account import GpuAccount
from gpushare_agent.placement.request import GpuRequest, describe_blocks, describe_request

_WAIT = "Wait for pods on this node to end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Writes refusals of one request. `healthy` is every healthy GPU, by index; `number_of_gpus` counts all."""

    request: GpuRequest
    healthy: Sequence[GpuAccount]
    number_of_gpus: int
    memory_block_mib: int

    def no_healthy_gpu(self) -> Refused:
        if self.number_of_gpus == 0:
            state = "this node has no GPUs that the driver can name"
        else:
            state = f"none of the {self.number_of_gpus} GPUs of this node is healthy"
        advice = "The agent's log has the reason; the pod can run on another node."
        return self._refuse(RefusalReason.NO_HEALTHY_GPU, f"{state}. {advice}")

    def no_gpu_for_share(self) -> Refused:
        largest = self._largest(1)
        if self.request.blocks > sum(gpu.total_blocks for gpu in largest):
            return self._larger_than("the largest GPU of this node", largest)
        free_cores = sum(gpu.free_cores for gpu in self.healthy)
        free_blocks = sum(gpu.free_blocks for gpu in self.healthy)
        best = self._best_free()
        if free_cores < self.request.cores:
            reason, state = RefusalReason.NOT_ENOUGH_CORES, f"only {free_cores} cores are free on all GPUs together"
        elif free_blocks < self.request.blocks:
            reason = RefusalReason.NOT_ENOUGH_MEMORY
            state = f"only {self._blocks(free_blocks)} are free on all GPUs together"
        else:
            reason = RefusalReason.FRAGMENTED
            state = f"{free_cores} cores and {self._blocks(free_blocks)} are free in all, but no GPU has enough of both"
        have = f"the best is GPU {best.label} with {best.free_cores} cores and {self._blocks(best.free_blocks)} free"
        return self._refuse(reason, f"{state}; {have}. {_WAIT}, or ask for less.")

    def no_whole_gpus(self) -> Refused:
        wanted = self.request.whole_gpus
        healthy = [gpu for gpu in self.healthy if not gpu.is_instance]
        if not healthy:
            state = "the GPUs of this node are MIG instances, and no whole GPUs"
            return self._refuse(RefusalReason.NOT_ENOUGH_CORES, f"{state}. The pod can run on another node.")
        if wanted > len(healthy):
            state = f"{wanted} whole GPUs are more than the {_gpus(len(healthy), 'healthy')} of this node"
            advice = f"Ask for at most {len(healthy) * CORES_PER_GPU} cores, or use a larger node."
            return self._refuse(RefusalReason.NOT_ENOUGH_CORES, f"{state}. {advice}")
        largest = self._largest(wanted)
        if self.request.blocks > sum(gpu.total_blocks for gpu in largest):
            what = "the largest GPU of this node" if wanted == 1 else f"the {wanted} largest GPUs of this node together"
            return self._larger_than(what, largest)
        free = [gpu for gpu in self.healthy if gpu.is_free]
        if len(free) >= wanted:
            largest_free = sum(sorted((gpu.total_blocks for gpu in free), reverse=True)[:wanted])
            state = (
                f"the largest free GPU has {self._blocks(largest_free)}"
                if wanted == 1
                else f"the {wanted} largest of {len(free)} free GPUs have {self._blocks(largest_free)} together"
            )
            return self._refuse(RefusalReason.NOT_ENOUGH_MEMORY, f"{state}. {_WAIT}, or ask for less memory.")
        return self._too_few_free(wanted, free)

    def wrong_gpus(self) -> Refused:
        """The must-include GPUs cannot be allocated."""
        named = ", ".join(self._state_of(uuid) for uuid in sorted(set(self.request.must_gpus)))
        need = "one GPU" if not self.request.whole_gpus else _gpus(self.request.whole_gpus, "wholly free")
        state = f"the kubelet must include devices of {named}, which cannot be part of {need} with enough free for this"
        advice = "Delete the pod, so that it is admitted afresh; if that recurs, restart the kubelet."
        return self._refuse(RefusalReason.WRONG_GPUS, f"{state}. {advice}")

    def _too_few_free(self, wanted: int, free: Sequence[GpuAccount]) -> Refused:
        cores = sum(gpu.free_cores for gpu in self.healthy)
        free_names = f"{len(free)} of {len(self.healthy)} GPUs {'is' if len(free) == 1 else 'are'} wholly free"
        if cores >= wanted * CORES_PER_GPU:
            state = f"{cores} cores are free in all, but only {free_names}: the others are in use"
            return self._refuse(RefusalReason.FRAGMENTED, f"{state}. {_WAIT}, or use a node with free GPUs.")
        state = f"{_gpus(wanted, 'wholly free')} {'is' if wanted == 1 else 'are'} needed, {free_names}"
        return self._refuse(RefusalReason.NOT_ENOUGH_CORES, f"{state}. {_WAIT}, or ask for fewer GPUs.")

    def _state_of(self, uuid: GpuUuid) -> str:
        gpu = next((gpu for gpu in self.healthy if gpu.uuid == uuid), None)
        if gpu is None:
            return f"{uuid} (not a healthy GPU of this node)"
        return f"GPU {gpu.label} ({gpu.free_cores} cores and {self._blocks(gpu.free_blocks)} free)"

    def _larger_than(self, what: str, largest: Sequence[GpuAccount]) -> Refused:
        names = ", ".join(f"GPU {gpu.label}" for gpu in largest)
        total = sum(gpu.total_blocks for gpu in largest)
        state = f"this is more memory than {what} ({names}) has at all: {self._blocks(total)}"
        return self._refuse(
            RefusalReason.NOT_ENOUGH_MEMORY, f"{state}. Ask for at most that much, or use a node with larger GPUs."
        )

    def _largest(self, count: int) -> list[GpuAccount]:
        ordered = sorted(self.healthy, key=lambda gpu: (-gpu.total_blocks, gpu.index))
        return sorted(ordered[:count], key=lambda gpu: gpu.index)

    def _best_free(self) -> GpuAccount:
        """The GPU that lacks least of the request, cores and memory weighed by their parts of it."""
        wanted = self.request

        def lack(gpu: GpuAccount) -> int:
            cores, blocks = max(0, wanted.cores - gpu.free_cores), max(0, wanted.blocks - gpu.free_blocks)
            return cores * wanted.blocks + blocks * wanted.cores

        return min(self.healthy, key=lambda gpu: (lack(gpu), -gpu.free_cores, -gpu.free_blocks, gpu.index))

    def _blocks(self, blocks: int) -> str:
        return describe_blocks(blocks, self.memory_block_mib)

    def _refuse(self, reason: RefusalReason, rest: str) -> Refused:
        asked = describe_request(self.request.cores, self.request.blocks, self.memory_block_mib)
        return Refused(reason=reason, detail=f"no GPU for {asked}: {rest}")


def _gpus(count: int, kind: str) -> str:
    return f"{count} {kind} GPU{'' if count == 1 else 's'}"
