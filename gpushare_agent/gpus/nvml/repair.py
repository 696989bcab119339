"""What a GPU that answers says of its own need for repair: a recovery action, or memory rows that cannot be remapped.

Blocking, only for nvml_reader.py. Owns no state.

Source: NVML API reference (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION of newer drivers, nvmlDeviceGetRemappedRows of
GPUs from Ampere on); `nvidia-smi -q`, "GPU Recovery Action", says the same to an operator.
"""

from __future__ import annotations

from typing import Any

from gpushare_agent.gpus.nvml.session import NvmlSession

_RESET = "stop its pods, then `nvidia-smi --gpu-reset -i <its bus ID>`"
_REBOOT = "drain the node, then reboot it"
_ACTIONS = {
    "GPU_RESET": f"a reset of the GPU: {_RESET}",
    "NODE_REBOOT": f"a reboot of the node: {_REBOOT}",
    "DRAIN_P2P": "the end of all programs that use several GPUs together, to see what else is needed",
    "DRAIN_AND_RESET": f"a reset once the GPU is idle, it runs with less than its capacity: {_RESET}",
    "BUS_RESET": "a reset of the GPU's PCIe bus: drain the node, then reset or reboot it",
    "SYSTEM_REBOOT": f"a reboot of the whole system: {_REBOOT}",
}
"""RECOVER_IMEX_DOMAIN is left out: it concerns memory shared between nodes, and the GPU works."""

_REMAPPING_FAILED = "row remapping failed: the GPU's memory needs replacement. Take the GPU out of service."


def repair_reason(session: NvmlSession, nvml: Any, handle: Any) -> str:
    """Why the GPU must not be given, empty where it may. Raises DriverLostError.

    Rows that merely wait to be remapped are no reason: the driver has already taken them out of use, and the remapping
    itself happens at the next reset, whenever that is.
    """
    action = _recovery_action(session, nvml, handle)
    for name, wish in _ACTIONS.items():
        if action is not None and action == getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None):
            return f"the driver asks for {wish} (recovery action {name.lower()})"
    return _REMAPPING_FAILED if _has_remapping_failed(session, nvml, handle) else ""


def _recovery_action(session: NvmlSession, nvml: Any, handle: Any) -> int | None:
    try:
        [answer] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except nvml.NVMLError as error:
        session.check_driver(error)
        return None
    return answer.value.uiVal if answer.nvmlReturn == nvml.NVML_SUCCESS else None


def _has_remapping_failed(session: NvmlSession, nvml: Any, handle: Any) -> bool:
    try:
        *_, failure = nvml.nvmlDeviceGetRemappedRows(handle)
    except nvml.NVMLError as error:
        session.check_driver(error)
        return False
    return bool(failure)
