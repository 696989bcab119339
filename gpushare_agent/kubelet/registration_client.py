"""The kubelet's registration socket: announces a device-plugin server.

kubelet/device_plugin.py answers the kubelet's calls afterwards. No state.
Format: protos/deviceplugin.proto, service Registration.
"""

from __future__ import annotations

from pathlib import Path

from grpclib import Status

from gpushare_agent.kit.grpc_client import RpcFailed, UnixChannel
from gpushare_agent.kit.wire_scan import MalformedMessageError
from gpushare_agent.model.errors import Rejected, Unavailable
from gpushare_agent.wire import v1beta1

API_VERSION = "v1beta1"

_TRANSIENT = (Status.UNAVAILABLE, Status.CANCELLED)


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
    channel = UnixChannel(kubelet_socket)
    try:
        await channel.unary("/v1beta1.Registration/Register", request, v1beta1.Empty, timeout_s=timeout_s)
    except RpcFailed as e:
        if e.status is Status.DEADLINE_EXCEEDED:
            raise Unavailable(f"{attempt} got no answer within {timeout_s:g} s; it is tried again") from e
        if not e.is_answer or e.status in _TRANSIENT:
            advice = "" if e.is_answer else ". Is the kubelet running?"
            raise Unavailable(f"{attempt} failed: {e}; it is tried again{advice}") from e
        raise Rejected(
            f"{attempt} was refused: {e}; check that the kubelet supports device plugins of {API_VERSION}"
        ) from e
    except MalformedMessageError as e:
        raise Unavailable(f"{attempt} was answered with no valid message: {e}; it is tried again") from e
    finally:
        channel.close()
