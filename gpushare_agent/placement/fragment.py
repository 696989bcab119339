"""One whole GPU: from the branch of the topology tree that is broken up most, so that large branches stay whole."""

from __future__ import annotations

from collections.abc import Collection

from gpushare_agent.model.topology import Branch


def choose_fragment(root: Branch, free: Collection[int], fitting: Collection[int]) -> int:
    """The index of the GPU to give.

    Descends from the root: at each level into the child with the fewest free GPUs among those that hold a fitting one;
    of equals into the smaller one (the larger can become whole again), then the one with the lowest index. `fitting` is
    a non-empty part of `free`.
    """

    def rank(child: Branch) -> tuple[int, int, int]:
        return sum(gpu in free for gpu in child.gpus), len(child.gpus), child.gpus[0]

    branch = root
    while branch.children:
        branch = min((c for c in branch.children if any(gpu in fitting for gpu in c.gpus)), key=rank)
    return min(gpu for gpu in branch.gpus if gpu in fitting)
