"""The kubelet's registration socket: announces a device-plugin server.

kubelet/device_plugin.py answers the kubelet's calls afterwards. No state.
Format: protos/deviceplugin.proto, service Registration.
"""

from __future__ import annotations

from pathlib import Path

from grpclib import GRPCError, Status
from grpclib.client import Channel
from grpclib.exceptions import ProtocolError, StreamTerminatedError

from gpushare_agent.kit.sockets import connectable_path
from gpushare_agent.model.errors import Rejected, Unavailable
from gpushare_agent.wire import v1beta1

API_VERSION = "v1beta1"

_TRANSIENT = frozenset({Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED, Status.CANCELLED})


async def register(
    kubelet_socket: Path, *, endpoint: str, resource: str, options: v1beta1.DevicePluginOptions, timeout_s: float
) -> None:
    """Announces to the kubelet that `endpoint`, a file name beside its own socket, serves `resource`.

    The kubelet connects to the endpoint before it answers, so it must be served already, and go on being served.

    Raises:
        Unavailable: no answer at the socket, or not in time.
        Rejected: the kubelet refuses, with its reason.
    """
    attempt = f"registering {resource} ({endpoint}) with the kubelet at {kubelet_socket}"
    request = v1beta1.RegisterRequest(version=API_VERSION, endpoint=endpoint, resource_name=resource, options=options)
    try:
        with connectable_path(kubelet_socket) as path:
            async with Channel(path=path) as channel:
                await v1beta1.RegistrationStub(channel).register(request, timeout=timeout_s)
    except GRPCError as e:
        reason = f"{e.status.name}: {e.message or 'no reason given'}"
        if e.status in _TRANSIENT:
            raise Unavailable(f"{attempt} failed: {reason}; it is tried again") from e
        raise Rejected(
            f"{attempt} was refused: {reason}; check that the kubelet supports device plugins of {API_VERSION}"
        ) from e
    except TimeoutError as e:
        raise Unavailable(f"{attempt} got no answer within {timeout_s:g} s; it is tried again") from e
    except (OSError, StreamTerminatedError, ProtocolError) as e:
        raise Unavailable(f"{attempt} failed: {e}; it is tried again. Is the kubelet running?") from e
