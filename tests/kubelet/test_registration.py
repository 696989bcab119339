"""kubelet/registration.py against a fake kubelet on real sockets.

The slow poll is set to never wherever an event must do the work, so that a lost event fails the test.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpushare_agent.agent.kubelet.device_plugin import DevicePlugin
from gpushare_agent.agent.kubelet.device_table import DeviceRow, DeviceTable
from gpushare_agent.agent.kubelet.registration import PluginEndpoint, Registrar, register
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.sockets import bind_unix_socket
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Rejected, Unavailable
from gpushare_agent.core.wire import v1beta1
from tests.cluster.support_kube import running
from tests.kubelet.support_plugin import (
    DEADLINE_S,
    FakeAdmission,
    FakeKubelet,
    Recorder,
    RpcLog,
    fake_kubelet,
)

CORES, MEMORY = "example.com/cores", "example.com/memory"
SOCKETS = {CORES: "vcore.sock", MEMORY: "vmemory.sock"}
NEVER_S = 3600.0
FAST = Backoff(base_s=0.01, cap_s=0.05)


@dataclass(frozen=True, kw_only=True)
class Agent:
    registrar: Registrar
    tables: dict[str, DeviceTable]
    reported: Recorder
    """("registered", resource) and "kubelet-restart", in order."""


@asynccontextmanager
async def agent(directory: Path, *, poll_s: float = NEVER_S, backoff: Backoff = FAST) -> AsyncIterator[Agent]:
    """Two device plugins under a running registrar."""
    reported, handler = Recorder(), FakeAdmission()
    tables = {name: DeviceTable([DeviceRow(id=f"{name}-0", healthy=True)]) for name in SOCKETS}
    endpoints = [
        PluginEndpoint(
            device_plugin_path=directory,
            socket_name=socket_name,
            plugin=DevicePlugin(name, tables[name], handler, RpcLog().rpc_finished, DeviceIds(), has_pre_start=True),
        )
        for name, socket_name in SOCKETS.items()
    ]
    registrar = Registrar(
        device_plugin_path=directory,
        endpoints=endpoints,
        register=register,
        poll_s=poll_s,
        backoff=backoff,
    )
    registrar.on_registered = lambda resource: reported.record(("registered", resource))
    registrar.on_kubelet_restart = lambda: reported.record("kubelet-restart")
    async with running(registrar.run):
        yield Agent(registrar=registrar, tables=tables, reported=reported)
    assert not any((directory / name).is_socket() for name in SOCKETS.values()), "a socket was left behind"


async def both_registered(kubelet: FakeKubelet, times: int = 1) -> None:
    """Waits until the kubelet has registered both resources so often, and each has sent its devices."""
    for name in SOCKETS:
        await kubelet.happened.wait_for(("register", name), times)
        await kubelet.wait_listed(name, times=times)


async def test_both_resources_are_registered_and_list_their_devices(short_dir: Path) -> None:
    """With version, socket name and options; the kubelet's dial-back inside Register is answered."""
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir) as a:
        await both_registered(kubelet)
        options = v1beta1.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
        assert sorted(kubelet.requests, key=lambda r: r.resource_name) == [
            v1beta1.RegisterRequest("v1beta1", SOCKETS[name], name, options) for name in sorted(SOCKETS)
        ]
        assert {name: one.options for name, one in kubelet.endpoints.items()} == dict.fromkeys(SOCKETS, options)
        assert [*kubelet.lists[CORES][0]] == [f"{CORES}-0"]
        await a.reported.wait_for(("registered", CORES))
        await a.reported.wait_for(("registered", MEMORY))
        assert a.registrar.is_registered(CORES)
        assert a.registrar.is_registered(MEMORY)
        assert not a.registrar.is_registered("example.com/other")


async def test_a_kubelet_that_comes_later_is_waited_for(short_dir: Path) -> None:
    """No kubelet at start is no error; the directory may be missing, too."""
    directory = short_dir / "device-plugins"
    async with fake_kubelet(directory, started=False) as kubelet, agent(directory) as a:
        await asyncio.sleep(0.02)
        assert not a.registrar.is_registered(CORES)
        await kubelet.start()
        await both_registered(kubelet)
        assert "kubelet-restart" not in a.reported.events


async def test_a_restarted_kubelet_is_registered_with_again(short_dir: Path) -> None:
    """It removed our sockets without notice: both are served and registered anew, and the restart is reported once."""
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir) as a:
        await both_registered(kubelet)
        for restarts in (1, 2, 3):
            await kubelet.restart()
            await both_registered(kubelet, 1 + restarts)
            await a.reported.wait_for("kubelet-restart", restarts)
            for name in SOCKETS:
                await a.reported.wait_for(("registered", name), 1 + restarts)
            assert a.reported.events.count("kubelet-restart") == restarts
            assert a.registrar.is_registered(CORES)


async def test_a_new_kubelet_socket_alone_is_enough_to_register_again(short_dir: Path) -> None:
    """Our own socket may still be there, for instance when it was served again before kubelet.sock came."""
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir) as a:
        await both_registered(kubelet)
        async with fake_kubelet(short_dir, started=False) as second:
            await second.start(removes_sockets=False)  # the first one goes on following ListAndWatch
            await both_registered(second)
            await a.reported.wait_for("kubelet-restart")


async def test_a_kubelet_that_dropped_the_streams_is_registered_with_again_and_one_that_stopped_is_not(
    short_dir: Path,
) -> None:
    """Without a stream the kubelet does not use the plugin, although its socket is the same. The socket of one that stopped
    stays behind, but no kubelet follows ListAndWatch; the next kubelet is noticed."""
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir) as a:
        await both_registered(kubelet)
        kubelet.drop_streams()
        await both_registered(kubelet, 2)
        await kubelet.stop()
        while a.registrar.is_registered(CORES) or a.registrar.is_registered(MEMORY):
            await asyncio.sleep(0.01)
        await kubelet.start()
        await both_registered(kubelet, 3)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_our_own_socket_gone_or_replaced_is_served_and_registered_again(
    is_replaced: bool, short_dir: Path
) -> None:
    """The other resource is left in peace."""
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir) as a:
        await both_registered(kubelet)
        path = short_dir / SOCKETS[CORES]
        if is_replaced:
            bind_unix_socket(path, mode=0o600).close()
        else:
            path.unlink()
        await kubelet.happened.wait_for(("register", CORES), 2)
        await kubelet.wait_listed(CORES, times=2)
        assert kubelet.registrations(MEMORY) == 1
        assert "kubelet-restart" not in a.reported.events


@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_replaced_directory_is_served_in_again(is_moved: bool, short_dir: Path) -> None:
    """Moved away or removed with all that was in it, and made anew by a kubelet."""
    directory = short_dir / "device-plugins"
    async with fake_kubelet(directory) as kubelet, agent(directory):
        await both_registered(kubelet)
        if is_moved:
            directory.rename(short_dir / "old")
        else:
            shutil.rmtree(directory)
        await kubelet.restart()
        await both_registered(kubelet, 2)


async def test_without_events_the_poll_notices(short_dir: Path) -> None:
    """What inotify does not report is found at the next poll."""
    real = short_dir / "real"
    real.mkdir()
    directory = short_dir / "link"
    directory.symlink_to(real)
    async with fake_kubelet(directory) as kubelet, agent(directory, poll_s=0.05):
        await both_registered(kubelet)
        (short_dir / "other").mkdir()
        directory.unlink()
        directory.symlink_to(short_dir / "other")
        await kubelet.restart()
        await both_registered(kubelet, 2)
        for name in SOCKETS.values():
            (real / name).unlink(missing_ok=True)


async def test_a_refusing_kubelet_is_asked_again(short_dir: Path) -> None:
    """Until it accepts; the other resource is registered meanwhile."""
    async with fake_kubelet(short_dir) as kubelet:
        kubelet.refuse_next[CORES] = 4
        async with agent(short_dir):
            await both_registered(kubelet)
            assert kubelet.happened.events.count(("refused", CORES)) == 4
            assert kubelet.registrations(MEMORY) == 1


async def test_a_register_call_that_hangs_does_not_hold_up_the_other_resource_or_the_next_kubelet(
    short_dir: Path,
) -> None:
    """It is given up as soon as another kubelet is there."""
    async with fake_kubelet(short_dir) as kubelet:
        kubelet.stalls.add(CORES)
        async with agent(short_dir) as a:
            await kubelet.happened.wait_for(("stalled", CORES))
            await kubelet.happened.wait_for(("register", MEMORY))
            assert not a.registrar.is_registered(CORES)
            kubelet.stalls.clear()
            kubelet.socket.unlink()  # a second kubelet; the first one's connection stays open and silent
            async with fake_kubelet(short_dir) as second:
                await both_registered(second)


async def test_a_file_at_the_path_of_our_socket_is_kept_until_it_is_removed(short_dir: Path) -> None:
    """Nothing but a socket is removed; the other resource is served."""
    (short_dir / SOCKETS[CORES]).write_text("precious")
    async with fake_kubelet(short_dir) as kubelet, agent(short_dir):
        await kubelet.happened.wait_for(("register", MEMORY))
        assert (short_dir / SOCKETS[CORES]).read_text() == "precious"
        (short_dir / SOCKETS[CORES]).unlink()
        await both_registered(kubelet)


async def test_stopping_ends_the_streams_and_removes_only_our_sockets(short_dir: Path) -> None:
    """A successor's socket at the same path stays, kubelet.sock too."""
    async with fake_kubelet(short_dir) as kubelet:
        async with agent(short_dir):
            await both_registered(kubelet)
        for name in SOCKETS:
            await kubelet.happened.wait_for(("stream-ended", name))
        assert sorted(p.name for p in short_dir.iterdir()) == ["kubelet.sock"]


async def test_an_endpoint_whose_path_a_successor_took_leaves_it_at_stop(short_dir: Path) -> None:
    """Two agents may overlap during an update; the one that goes does not cut off the one that comes."""
    old, new = (
        PluginEndpoint(
            device_plugin_path=short_dir,
            socket_name="s.sock",
            plugin=DevicePlugin(CORES, DeviceTable(), FakeAdmission(), RpcLog().rpc_finished, DeviceIds()),
        )
        for _ in range(2)
    )
    await old.serve()
    await new.serve()
    assert (old.is_serving, old.is_replaced, new.is_serving, new.is_replaced) == (False, True, True, False)
    await old.stop()
    assert new.is_serving
    await new.stop()
    assert not (short_dir / "s.sock").exists()


async def test_registration_works_below_a_path_longer_than_an_address(short_dir: Path) -> None:
    """Serving and registering; the kubelet itself would connect by a path of its own."""
    directory = short_dir / ("d" * 120)
    directory.mkdir()
    short = short_dir / "short"
    short.symlink_to(directory)
    async with fake_kubelet(short) as kubelet, agent(directory):
        await both_registered(kubelet)


OPTIONS = v1beta1.DevicePluginOptions()


def registering(directory: Path, timeout_s: float = DEADLINE_S) -> Awaitable[None]:
    socket = directory / "kubelet.sock"
    return register(socket, endpoint="x.sock", resource=CORES, options=OPTIONS, timeout_s=timeout_s)


async def test_a_refusal_is_rejected_with_its_text_and_silence_is_unavailable_in_time(short_dir: Path) -> None:
    """The text names resource, socket and the kubelet's reason; the call has a deadline of its own."""
    async with fake_kubelet(short_dir) as kubelet, asyncio.timeout(DEADLINE_S):
        kubelet.refuse_next[CORES] = 1
        with pytest.raises(Rejected, match=rf"{CORES} .*kubelet.sock was refused: UNKNOWN: no place for {CORES} today"):
            await registering(short_dir)
        kubelet.stalls.add(CORES)
        with pytest.raises(Unavailable, match="got no answer within"):
            await registering(short_dir, 0.05)


@pytest.mark.parametrize("is_stale", [False, True])
async def test_no_kubelet_is_unavailable(is_stale: bool, short_dir: Path) -> None:
    """A missing socket and one without a server."""
    if is_stale:
        bind_unix_socket(short_dir / "kubelet.sock", mode=0o600).close()
    with pytest.raises(Unavailable, match="Is the kubelet running"):
        await registering(short_dir)
