"""NVIDIA's device plugin v0.20.0. Its keys, variables and flags have a table of their own (settings/nvidia_options.py)."""

from __future__ import annotations

from tests.promises.promise import Promises, kept

PROMISES: Promises = {
    "Configuration": (
        kept(
            "chart, templates/daemonset-device-plugin.yml",
            "the variables that the chart writes",
            "tests/docs/test_migration_nvidia.py::test_every_variable_of_the_chart_is_known",
        ),
    ),
}
