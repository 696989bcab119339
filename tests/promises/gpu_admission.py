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
        kept(
            "Dockerfile",
            "every address without TLS, `--address=0.0.0.0:3456`",
            "tests/extender/test_app.py::test_gpu_admissions_address_of_its_image_is_served_without_tls",
            "the same, where the flag says so; the image has no address of its own",
        ),
        kept("Dockerfile", "`LOG_LEVEL`, `EXTRA_FLAGS`", _FLAGS + "test_extra_flags_are_flags"),
        kept("main.go", "flags with `_` for `-`", _FLAGS + "test_a_flag_without_effect_is_accepted_and_reported_once"),
        kept(
            "pkg/version",
            "`--version`",
            "tests/cli/test_main.py::test_version_is_the_packages",
            "the same, of `gpushare-agent`",
        ),
        not_kept("reading notes, static pod", "logs in `/var/log/gpu-admission`", "logs go to standard error"),
        different(
            "main.go",
            "`/debug/pprof` on port 3457",
            "`/debug/state` and `/metrics` on the extender's own port",
            "tests/extender/test_http.py::test_the_state_is_shown_a_page_at_a_time",
        ),
        not_kept(
            "build/gpu-admission.service",
            "a service of systemd, with `/etc/kubernetes/gpu-admission.conf`",
            "there is no unit file: the static pod, or `gpushare-agent extender` with the flags",
        ),
        different(
            "main.go",
            "one process for a cluster",
            "the Deployment has two, one of which leads",
            "tests/extender/test_app.py::test_the_other_replica_takes_over_what_a_killed_one_had_bound",
        ),
        different(
            "pkg/predicate, NewGPUFilter",
            "it answers before it has listed nodes and pods",
            "503 until it has, so that nothing is given twice",
            "tests/extender/test_app.py::test_a_replica_is_ready_once_it_has_listed_the_cluster",
        ),
    ),
    "Scheduling": (
        different(
            "build/scheduler-policy-config.json",
            "a policy file with the filter verb alone",
            "set `extender.reserve: filter`; without it two pods that fit once both pass, and a warning says so",
            "tests/extender/test_verbs.py::test_a_scheduler_that_only_filters_is_warned_of_where_binds_reserve",
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
        different(
            "README.md",
            "the Policy file, which kube-scheduler reads up to Kubernetes 1.22",
            "a KubeSchedulerConfiguration that says the same, and the Policy file",
            "tests/manifests/test_extender.py::test_the_old_policy_file_says_the_same_as_the_new_configuration",
        ),
        different(
            "pkg/predicate, deviceFilter",
            "the filter answers one node",
            "with `reserve: filter` too; else the best of those that fit, which kube-scheduler scores",
            "tests/extender/test_verbs.py::test_filter_answers_the_best_of_many_nodes",
        ),
        different(
            "pkg/predicate, deviceFilter",
            "a pod with its annotations fails, `had been predicated`",
            "it is answered again",
            "tests/extender/test_verbs.py::test_a_pod_that_is_filtered_twice_gets_an_answer_twice",
        ),
        kept(
            "pkg/predicate, Filter",
            "pods without GPUs fit everywhere",
            "tests/extender/test_verbs.py::test_a_pod_that_asks_for_nothing_of_ours_fits_everywhere",
        ),
        kept(
            "pkg/algorithm/exclusive.go",
            "whole GPUs are wholly free ones",
            "tests/extender/test_cluster_state.py::test_half_free_on_two_gpus_is_no_whole_gpu",
        ),
        kept(
            "pkg/algorithm/share.go, pkg/device/sort.go",
            "a share goes to the fullest node, and the fullest GPU, that fits",
            "tests/extender/test_cluster_state.py::test_nodes_are_scored_by_the_policy",
        ),
        different(
            "pkg/algorithm/allocate.go",
            "each GPU of a node has an equal part of its memory",
            "its own memory, which the agent reports",
            "tests/extender/test_objects.py::test_the_gpus_and_links_that_the_agent_writes_are_read_back",
        ),
        different(
            "pkg/algorithm/exclusive.go",
            "several GPUs by their number",
            "by their links, as the agent places them",
            "tests/extender/test_pod_plan.py::test_the_agent_does_what_was_planned",
        ),
        different(
            "pkg/predicate, deviceFilter",
            "`no GPU device`, `does not match with this node`",
            "what the node lacks",
            "tests/placement/test_lack.py::test_a_nodes_lack_is_one_sentence_without_a_gpus_name",
        ),
        kept(
            "pkg/predicate, ListPodsOnNode",
            "a pod that has ended holds nothing",
            "tests/extender/test_cluster_state.py::test_a_pod_that_has_ended_holds_nothing",
        ),
        kept(
            "pkg/route",
            "a request that cannot be read is answered in `Error`",
            "tests/extender/test_verbs.py::test_a_malformed_request_is_reported_what_is_wrong",
        ),
        kept(
            "pkg/predicate, patchPodWithAnnotations",
            "a conflict of the API server is tried again",
            "tests/extender/test_bind.py::test_one_fault_is_overcome",
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
            "gpu-quota, 2",
            "a model that the quota does not name may not be used",
            _QUOTA + "test_a_model_that_the_quota_does_not_name_may_not_be_used",
        ),
        kept("gpu-quota, 2", "a share counts as that part of a GPU", _QUOTA + "test_shares_count_as_parts_of_a_gpu"),
        kept(
            "syncQuota",
            "no ConfigMap, no quota",
            "tests/extender/test_quota_verbs.py::test_no_config_map_is_no_quota",
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
