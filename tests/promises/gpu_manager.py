"""gpu-manager v1.1.5 (tkestack/gpu-manager), and the reading notes of its source that this project was begun from."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

PROMISES: Promises = {
    "Command line and environment": (
        kept(
            "cmd/manager/options",
            "`EXTRA_FLAGS` with gpu-manager's flags",
            "tests/settings/test_gpu_manager.py::test_extra_flags_are_flags",
        ),
        different(
            "build/start.sh",
            "`LOG_LEVEL`, klog's number",
            "5 and more are level debug, less is info",
            "tests/settings/test_gpu_manager.py::test_log_level_is_klogs_number_or_a_word_of_ours",
        ),
        not_kept(
            "build/copy-bin-lib.sh",
            "`LIBCUDA`",
            "the driver directory is described by the file of `volume_config`; a warning says so",
            "tests/settings/test_gpu_manager.py::test_libcuda_is_reported",
        ),
    ),
    "Observation": (
        kept(
            "pkg/services/display",
            "the four `container_…` series, `/usage`, `/graph`, `/version` on port 5678",
            "tests/agent/test_display_node.py::test_a_pod_shows_on_the_display_the_web_port_and_the_debug_pages",
        ),
    ),
}
