"""TKEStack's vcuda library: it replaces libcuda inside the container and reads its limits from /etc/vcuda.

Source: docs/formats.md, the vDevice protocol and the driver directory. A container on whole GPUs gets the untouched
libraries, and its vcuda.config says that nothing is limited.
"""

from __future__ import annotations

from gpushare_agent.isolation.request import Isolation, IsolationRequest, Preparation
from gpushare_agent.model.allocations import ContainerEdits, ContainerMount
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.names import LIBRARY_DIRECTORY

VDEVICE_DIRECTORY = "/etc/vcuda"


def edit_vcuda(request: IsolationRequest) -> ContainerEdits:
    """The container's own vDevice directory, and the driver directory where one is configured."""
    own = request.config.virtual_manager / request.pod_uid / request.container.name
    mounts = [ContainerMount(host_path=str(own), container_path=VDEVICE_DIRECTORY)]
    driver = request.config.whole_driver if request.is_whole else request.config.shared_driver
    if driver is not None:
        # The link to the version in force, not what it points to: the kubelet keeps this answer for restarts.
        mounts.append(ContainerMount(host_path=str(driver), container_path=LIBRARY_DIRECTORY))
    return ContainerEdits(mounts=tuple(mounts))


ISOLATION = Isolation(name=IsolationName.VCUDA, edit=edit_vcuda, preparation=Preparation.VDEVICE)
