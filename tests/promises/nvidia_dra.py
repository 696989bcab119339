"""NVIDIA's DRA driver (kubernetes-sigs/dra-driver-nvidia-gpu 95932046) with the component dra-nvidia-names."""

from __future__ import annotations

from collections.abc import Iterator

from tests.e2e.nvidia_dra_suites import BATS, EXAMPLES, GO_SPECS, SHARING
from tests.promises.promise import Promise, Promises, different, kept, not_kept

_E2E = "tests/e2e/test_nvidia_dra.py::"
_EDITS = "tests/dra/test_edits.py::"


def _suites() -> Iterator[Promise]:
    specs = sum(count for _, count in GO_SPECS.values())
    yield kept(
        "test/e2e",
        f"Go suite, {specs} specs",
        _E2E + "test_go_suite",
        here="all pass, that of unlimited shares by that setting",
    )
    for name, file in BATS.items():
        count = f"{file.tests} tests" if file.tests > 1 else "1 test"
        source, have, proof = f"tests/bats/test_gpu_{name}.bats", f"BATS {name}, {count}", _E2E + "test_bats"
        if not file.differs:
            yield kept(source, have, proof, here="all pass")
            continue
        why = "; ".join(f"`{test}`: {reason}" for test, reason in file.differs.items())
        yield different(source, have, f"{file.tests - len(file.differs)} pass; not {why}", proof)
    names = ", ".join(name.removeprefix("gpu-test").removeprefix("-") for name in EXAMPLES)
    yield kept("demo/specs/quickstart/v1", f"examples gpu-test {names}", _E2E + "test_examples", here="all run")
    yield kept(
        "demo/specs/consumable-shares",
        f"examples of shares by {', '.join(SHARING)}",
        _E2E + "test_examples_of_consumable_shares",
        here="all run, each with its value of `dra.consumable_shares`",
    )
    yield not_kept(
        "demo/specs/quickstart/v1/gpu-test4.yaml",
        "example gpu-test 4",
        "MIG instances are not offered by claims: its pods wait",
        _E2E + "test_the_example_of_mig_waits",
    )


PROMISES: Promises = {
    "Claims": (
        kept("deviceclass-gpu.yaml", "`nvidia.com/gpu: 1` without a claim", _E2E + "test_bats"),
        different(
            "deviceclass-gpu.yaml",
            "the driver `gpu.nvidia.com` of slices and results",
            "`gpushare-agent`",
            _E2E + "test_bats",
        ),
        different(
            "cmd/gpu-kubelet-plugin, deviceinfo.go",
            "attributes of its domain",
            "the same beside our own, without `addressingMode`",
            "tests/dra/test_slices.py::test_by_nvidias_names_a_claim_that_names_nothing_takes_no_cores",
        ),
        different(
            "demo/specs/quickstart/v1/gpu-test1.yaml",
            "no capacity",
            "a whole GPU; `cores` default to 0",
            "tests/dra/test_slices.py::test_by_nvidias_names_a_claim_that_names_nothing_takes_no_cores",
        ),
        different(
            "demo/specs/consumable-shares/memory-sharing.yaml",
            "`memory`",
            "a share: memory is kept, compute in proportion",
            _EDITS + "test_memory_alone_gets_compute_in_proportion",
        ),
        different(
            "demo/specs/consumable-shares/README.md",
            "`--consumable-shares`",
            "`dra.consumable_shares`: by `unlimited` or a number nothing is limited that names no memory",
            "tests/dra/test_claims.py::test_a_claim_without_a_size_uses_its_gpu_and_takes_nothing_of_it",
        ),
        different(
            "api/nvidia.com/resource/v1beta1/sharing.go",
            "GpuConfig, TimeSlicing",
            "isolation `none`; the node must allow it for shares. The interval is not set",
            _EDITS + "test_gpu_config_lifts_no_limit_that_the_node_keeps",
        ),
        different(
            "api/nvidia.com/resource/v1beta1/sharing.go",
            "GpuConfig, MPS",
            "isolation `mps` with those limits, for whole GPUs; no `multiUser`",
            _EDITS + "test_limits_of_mps_are_by_place_in_the_order_of_uuids_or_by_uuid",
        ),
        not_kept(
            "api/nvidia.com/resource/v1beta1",
            "MigDeviceConfig, VfioDeviceConfig",
            "refused by name",
            "tests/dra/test_gpu_config.py::test_what_cannot_be_done_is_named",
        ),
        different(
            "tests/bats/specs/gpu-two-claims-one-pod.yaml",
            "two claims in a container",
            "whole GPUs by templates, or any by `cdi-cri`; shares are refused",
            "tests/dra/test_claims.py::test_whole_gpus_of_claims_that_no_template_makes_add_up_by_cdi",
        ),
    ),
    "Its suites (the driver's name replaced) and examples (as they are), on Kubernetes 1.36 with simulated GPUs": tuple(
        _suites()
    ),
}
