"""One container's cgroup by its ID."""

from __future__ import annotations

from gpushare_agent.agent.runtime.cgroups import CgroupDir, Cgroups
from gpushare_agent.core.model.names import PodUid


def find_cgroup(cgroups: Cgroups, container_id: str, pod_uid: PodUid | None = None) -> CgroupDir | None:
    return cgroups.find_many([(container_id, pod_uid)]).get(container_id)
