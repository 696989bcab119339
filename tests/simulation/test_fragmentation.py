"""What counts as unusable."""

from __future__ import annotations

from gpushare_agent.simulation.replay import typical_shapes, unusable_cores
from gpushare_agent.simulation.workload import Shape
from tests.gpus.support_gpus import gpu

EMPTY = gpu(0, cores=100, blocks=64, total=64)
HALF = gpu(0, cores=50, blocks=32, total=64)
NO_MEMORY = gpu(0, cores=90, blocks=0, total=64)


def test_a_share_cannot_use_a_gpu_that_lacks_cores_or_memory() -> None:
    """The GPU's free cores count; those of GPUs that fit do not."""
    assert unusable_cores([EMPTY, HALF, NO_MEMORY], Shape(60, 8)) == 140
    assert unusable_cores([EMPTY, HALF, NO_MEMORY], Shape(50, 32)) == 90
    assert unusable_cores([EMPTY], Shape(10, 65)) == 100


def test_whole_gpus_need_wholly_free_ones() -> None:
    """Two halves are no GPU; a GPU without memory in use but with cores is none either, nor the other way round."""
    assert unusable_cores([HALF, HALF], Shape(100, 0)) == 100
    assert unusable_cores([EMPTY, HALF], Shape(100, 0)) == 50
    assert unusable_cores([gpu(0, cores=100, blocks=63, total=64)], Shape(100, 0)) == 100


def test_too_few_free_gpus_on_the_node_are_all_unusable() -> None:
    """So are those that lack the memory together."""
    assert unusable_cores([EMPTY, EMPTY, HALF], Shape(300, 0)) == 250
    assert unusable_cores([EMPTY, EMPTY, HALF], Shape(200, 0)) == 50
    assert unusable_cores([EMPTY, EMPTY], Shape(200, 129)) == 200


def test_the_typical_shapes_are_the_most_frequent_whatever_model_they_want() -> None:
    """In a fixed order."""
    counts = {Shape(10, 1): 2, Shape(10, 1, ("T4",)): 3, Shape(100, 0): 4, Shape(20, 1): 4}
    assert typical_shapes(counts) == ((Shape(10, 1), 5), (Shape(20, 1), 4), (Shape(100, 0), 4))
