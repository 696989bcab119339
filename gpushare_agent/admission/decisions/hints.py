"""Reads the scheduler extender's annotations. Any tenant can write them, so they are hints: bounded, checked, else ignored.

Format: docs/reference/formats.md, predicate annotations of gpu-admission, and GPUShare's.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_agent.model.names import (
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
)
from gpushare_agent.model.pods import ContainerKind, ContainerSpec

MAX_GPUS = 64
MAX_LENGTH = 256


def predicted_gpus(annotations: Mapping[str, str], container: ContainerSpec, node_name: str) -> tuple[int, ...]:
    """The GPU indexes that the extender chose for the container on this node, empty where it did not or is wrong.

    gpu-admission has none for init containers and sidecars; ours are counted within spec.initContainers. Whether those GPUs
    exist and fit is for placement to check.
    """
    if annotations.get(PREDICATE_NODE_ANNOTATION, node_name) != node_name:
        return ()
    group = "" if container.kind is ContainerKind.MAIN else "init-"
    text = annotations.get(f"{PREDICATE_GPU_INDEX_PREFIX}{group}{container.position}", "")
    if not text or len(text) > MAX_LENGTH:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in parts):
        return ()
    indexes = tuple(int(part) for part in parts)
    if len(indexes) > MAX_GPUS or len(set(indexes)) != len(indexes):
        return ()
    return indexes


def hinted_gpus(
    annotations: Mapping[str, str], container: ContainerSpec, node_name: str, *, is_gpu_mem: bool
) -> tuple[int, ...]:
    """The GPUs that an extender chose for the container. For GPUShare's resource, GPUShare's index counts only where no
    extender has named this node: one index for a whole pod cannot say what ours plans, and may be older, or forged."""
    predicted = predicted_gpus(annotations, container, node_name)
    if predicted or not is_gpu_mem or annotations.get(PREDICATE_NODE_ANNOTATION) == node_name:
        return predicted
    return _gpushare_gpu(annotations)


def _gpushare_gpu(annotations: Mapping[str, str]) -> tuple[int, ...]:
    """The GPU index that GPUShare's extender chose for the pod, empty where it did not or is wrong."""
    text = annotations.get(GPUSHARE_INDEX_ANNOTATION, "")
    return (int(text),) if text.isascii() and text.isdigit() and len(text) <= 3 else ()
