"""From the model's values to the device-plugin API's answers and errors. Pure functions.

Format: protos/deviceplugin.proto.
"""

from __future__ import annotations

from grpclib import GRPCError, Status

from gpushare_agent.model.allocations import ContainerEdits
from gpushare_agent.model.errors import TRANSIENT_REASONS, RefusalReason, Refused
from gpushare_agent.wire import v1beta1

_MAX_DETAIL = 2000
"""Characters of a refusal. The text ends up in the pod's status, and HTTP/2 peers limit their headers."""


def refusal(refused: Refused) -> GRPCError:
    """A refusal as the kubelet gets it: the code says whether to try again, the text goes into the pod's status."""
    text = f"{refused.reason}: {refused.detail}"[:_MAX_DETAIL]
    return GRPCError(status_of(refused.reason), text.removesuffix("."))  # the kubelet goes on: ", which is unexpected"


def status_of(reason: RefusalReason) -> Status:
    if reason in TRANSIENT_REASONS:
        return Status.UNAVAILABLE
    match reason:
        case RefusalReason.INVALID_REQUEST | RefusalReason.UNKNOWN_DEVICE | RefusalReason.WRONG_GPUS:
            return Status.INVALID_ARGUMENT
        case RefusalReason.SHARING_DISABLED:
            return Status.FAILED_PRECONDITION
        case _:
            return Status.RESOURCE_EXHAUSTED


def container_response(edits: ContainerEdits) -> v1beta1.ContainerAllocateResponse:
    return v1beta1.ContainerAllocateResponse(
        envs=dict(sorted(edits.env)),
        mounts=[
            v1beta1.Mount(container_path=m.container_path, host_path=m.host_path, read_only=m.read_only)
            for m in sorted(edits.mounts, key=lambda m: m.container_path)
        ],
        devices=[
            v1beta1.DeviceSpec(container_path=d.container_path, host_path=d.host_path, permissions=d.permissions)
            for d in sorted(edits.devices, key=lambda d: d.container_path)
        ],
        annotations=dict(sorted(edits.annotations)),
        cdi_devices=[v1beta1.CdiDevice(name=name) for name in sorted(edits.cdi_devices)],
    )
