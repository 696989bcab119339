"""gpu-admission (tkestack/gpu-admission), and the quota that its later version has no more."""

from __future__ import annotations

from tests.promises.promise import Promises, different, kept, not_kept

_FLAGS = "tests/settings/test_gpu_manager.py::"
_QUOTA = "tests/extender/test_quota.py::"
_STATIC = "tests/manifests/test_extender.py::test_the_static_pod_takes_gpu_admissions_place"
_ON_A_NODE = "tests/e2e/test_static_extender.py::test_gpu_admissions_static_pod_schedules_with_its_policy"

PROMISES: Promises = {
    "Command line and place": (
        kept(
            "deploy/gpu-admission.yaml",
            "a static pod in the host's network, `127.0.0.1:3456`",
            _ON_A_NODE,
            "`manifests/extender/static-pod/gpu-admission.yaml`",
        ),
        different(
            "Dockerfile",
            "the image's own command",
            "`command: [gpushare-agent, extender]`: the image's is the agent's",
            _STATIC,
        ),
        kept("main.go", "`--address`", _FLAGS + "test_gpu_admissions_address_is_the_extenders"),
        kept("main.go", "`--config`", _FLAGS + "test_gpu_admissions_configuration_is_named_by_the_same_flag"),
        kept("main.go", "`--kubeconfig`", _STATIC),
        different(
            "main.go",
            "`--incluster-mode`, `--pprofAddress`, `--v`, `--logtostderr`, `--log-dir`",
            "accepted and reported once; without `--kubeconfig` the service account is used",
            _FLAGS + "test_a_flag_without_effect_is_accepted_and_reported_once",
        ),
        not_kept(
            "main.go",
            "`--master`",
            "refused: the address belongs into the kubeconfig",
            "tests/settings/test_settings.py::test_a_bad_flag_ends_in_one_line_that_tells_what_is_allowed",
        ),
        kept(
            "Dockerfile",
            "`/etc/kubernetes/gpu-admission.config`, `gpu-quota-admission.config`",
            "tests/extender/test_app.py::test_gpu_admissions_configuration_is_found_at_its_usual_place",
        ),
        different(
            "Dockerfile",
            "every address, without TLS",
            "`127.0.0.1`, as its flag's default; other addresses need TLS or the component `without-tls`",
            "tests/manifests/test_extender.py::test_the_static_pod_takes_gpu_admissions_place",
        ),
    ),
    "Scheduling": (
        different(
            "build/scheduler-policy-config.json",
            "a policy file with the filter verb alone",
            "set `extender.reserve: filter`; without it two pods that fit once both pass, and a warning says so",
            "tests/extender/test_verbs.py::test_a_scheduler_that_only_filters_is_warned_of_where_binds_reserve",
        ),
        different(
            "build/scheduler-policy-config.json",
            "the policy file itself",
            "its fields in a KubeSchedulerConfiguration: Kubernetes 1.23 removed policy files",
            _ON_A_NODE,
        ),
        kept(
            "pkg/predicate, its own test",
            "pods go to the nodes that it documents",
            "tests/extender/test_verbs.py::test_gpu_admission_scenario_with_its_filter",
        ),
        kept(
            "pkg/route",
            "`POST /scheduler/predicates`, whole nodes",
            "tests/extender/test_messages.py::test_args_with_whole_nodes_are_read_and_given_back_untouched",
        ),
        kept(
            "pkg/route",
            "`GET /version`",
            "tests/extender/test_verbs.py::test_the_version_is_answered",
        ),
        kept(
            "pkg/predicate",
            "annotations `predicate-time`, `predicate-node`, `predicate-gpu-idx-<i>`, `gpu-assigned`",
            "tests/extender/test_verbs.py::test_bind_annotates_and_binds",
        ),
        kept(
            "pkg/device",
            "nodes whose agent is gpu-manager",
            "tests/extender/test_objects.py::test_a_node_of_gpu_manager_has_equal_gpus",
        ),
        different(
            "pkg/predicate",
            "the annotations decide what is taken",
            "what the node's agent reports does; a pod's annotations are hints",
            "tests/extender/test_cluster_state.py::test_the_agents_word_counts_whatever_was_planned",
        ),
    ),
    "Quota": (
        kept(
            "gpu-quota, 3",
            "ConfigMap `gpuquota` with the key `gpu_quota`",
            _QUOTA + "test_gpu_admissions_own_example_is_read",
        ),
        kept(
            "gpu-quota, 2", "pools by `GPUPoolLabel`", _QUOTA + "test_a_namespace_uses_the_pools_that_its_quota_names"
        ),
        kept(
            "gpu-quota, 1",
            "a namespace that is not named may use everything",
            _QUOTA + "test_a_namespace_that_the_quota_does_not_name_may_use_everything",
        ),
        kept(
            "GPUFilterConfig",
            "`QuotaConfigMapName`, `QuotaConfigMapNamespace`, `GPUModelLabel`, `GPUPoolLabel`",
            "tests/extender/test_app.py::test_gpu_admissions_configuration_is_read",
        ),
        different(
            "GPUFilterConfig",
            "`SkipBindTime`",
            "accepted without effect: a bind reserves, so nothing waits",
            "tests/extender/test_app.py::test_gpu_admissions_configuration_is_read",
        ),
        kept(
            "syncQuota",
            "an unreadable quota keeps the last one",
            "tests/extender/test_quota_verbs.py::test_a_malformed_one_keeps_the_last_good_and_says_so",
        ),
        different(
            "pkg/prioritize",
            "`CPUNodeFirst` sends pods without GPUs to other nodes",
            "the agents' taint `gpushare-agent/free-gpus` does (`facts.taint_above`)",
            "tests/cluster/test_free_gpus_taint.py::test_the_taint_comes_above_the_threshold_and_goes_a_tenth_below_it",
        ),
    ),
}
