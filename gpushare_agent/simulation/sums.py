"""kube-scheduler's own arithmetic: it adds up a node's cores and memory blocks, and does not consider GPUs.

What is counted is what pods ask for. A whole GPU without a request for memory takes no blocks here, though nobody else
gets any of that GPU: as in a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpushare_agent.extender.values import ClusterNode
from gpushare_agent.model.names import CORES_PER_GPU
from gpushare_agent.simulation.workload import Shape


class NodeSums:
    """State owned: the free cores and blocks of every node, and what part of its own that is."""

    def __init__(self, nodes: Iterable[ClusterNode], block_mib: int) -> None:
        self._total = {
            node.name: (
                CORES_PER_GPU * len(node.gpus),
                sum(gpu.memory_mib // block_mib for gpu in node.gpus),
            )
            for node in nodes
        }
        self._cores = {name: cores for name, (cores, _) in self._total.items()}
        self._blocks = {name: blocks for name, (_, blocks) in self._total.items()}
        self._free_part = dict.fromkeys(self._total, 1.0)

    def fits(self, name: str, shape: Shape) -> bool:
        return self._cores[name] >= shape.cores and self._blocks[name] >= shape.blocks

    def fitting(self, names: Sequence[str], shape: Shape) -> list[str]:
        free_cores, free_blocks, (cores, blocks, _) = self._cores, self._blocks, shape
        return [name for name in names if free_cores[name] >= cores and free_blocks[name] >= blocks]

    def free_parts(self, names: Sequence[str]) -> list[float]:
        """0 to 1 each, the mean of both resources: what kube-scheduler's LeastAllocated prefers."""
        return list(map(self._free_part.__getitem__, names))

    def take(self, name: str, shape: Shape) -> None:
        self._add(name, -shape.cores, -shape.blocks)

    def give_back(self, name: str, shape: Shape) -> None:
        self._add(name, shape.cores, shape.blocks)

    def _add(self, name: str, cores: int, blocks: int) -> None:
        self._cores[name] += cores
        self._blocks[name] += blocks
        all_cores, all_blocks = self._total[name]
        self._free_part[name] = (self._cores[name] / all_cores + self._blocks[name] / all_blocks) / 2
