"""One run of the sandbox: puts embedded nodes, agents and extender together and runs a mode on them.

The order of the run comes first, then the parts. A node has its agent, which is a child process, the player of its
containers' usage and, with isolation mps, a fake MPS control daemon. The scheduler extender is a child process too, on a
port of this machine and on the embedded API server.
State owned: the state directory while it runs. SIGINT and SIGTERM end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from rich.text import Text

from gpushare_agent.agent.gpus.part import NodeDriver, health_policy, open_driver
from gpushare_agent.agent.isolation.part import build_probes
from gpushare_agent.core.cli.command_line import Form, runnable
from gpushare_agent.core.cli.interrupts import INTERRUPTED
from gpushare_agent.core.cli.screen import Screen, View, has_screen
from gpushare_agent.core.kit.logs import setup_logging
from gpushare_agent.core.kit.supervision import at_most, forever, set_by_signals
from gpushare_agent.core.kit.tcp_listeners import close_all, listen_tcp
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.core.model.isolation import NO_ISOLATION, isolation_parts
from gpushare_agent.core.settings.resource_names import resource_names
from gpushare_agent.core.settings.settings import LoadedSettings, Settings, SettingsError, load_settings
from gpushare_agent.kubectl.agent_client import local_url
from gpushare_agent.sandbox.agent_process import AgentProcess, last_lines
from gpushare_agent.sandbox.api.pod_subresources import AgentServer
from gpushare_agent.sandbox.behaviour import KubeletTimes
from gpushare_agent.sandbox.control import open_control
from gpushare_agent.sandbox.controller import NodeController, SandboxController
from gpushare_agent.sandbox.fake_mps import open_fake_mps
from gpushare_agent.sandbox.gpu_faults import GpuFaults
from gpushare_agent.sandbox.held_port import HOST, free_port
from gpushare_agent.sandbox.manifests import Manifest, sample_manifests
from gpushare_agent.sandbox.node import EmbeddedCluster, EmbeddedNode, open_embedded_cluster, paths_of_node
from gpushare_agent.sandbox.render import name_of, pod_line, print_document, reason_text, report_tables
from gpushare_agent.sandbox.report import PodRow, SandboxDocument
from gpushare_agent.sandbox.state_directory import NodePaths, default_state_directory, owned_state_directory
from gpushare_agent.sandbox.workload import WorkloadPlayer

_TIMES = KubeletTimes(status_interval_s=1.0, container_start_s=0.2)


class Plan(Struct, frozen=True, kw_only=True):
    """The run of the command line. `flags` go to the agents as they are, and behind them those of each node; `form` is
    that of the report."""

    state: Path
    kubelet_version: str
    flags: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    is_once: bool
    form: Form
    node_flags: tuple[tuple[str, ...], ...] = ((),)
    has_extender: bool = False
    has_mig: bool = False


async def run(plan: Plan) -> int:
    """Returns the exit code. Raises AgentError for what a person must change."""
    loaded = load_settings(plan.flags, os.environ)
    setup_logging("warning", loaded.settings.log.format)  # of the embedded parts; the agents have their own logs
    names = node_names(loaded, len(plan.node_flags))
    whole = NodePaths(state=plan.state.absolute())
    # Before the state directory is taken: a topology that cannot be used is a mistake of the command line, and nothing
    # has been created yet.
    drivers = [
        check_driver(name, paths_of_node(whole, name, len(names)), (*plan.flags, *flags))
        for name, flags in zip(names, plan.node_flags, strict=True)
    ]
    # A report on standard output is for a program; a live sandbox speaks to a person.
    notify = Notices(to_stderr=plan.is_once or plan.form in ("json", "yaml"))
    stop = set_by_signals()
    with owned_state_directory(plan.state) as paths:
        # After the directory, which tells that a sandbox runs here already: its port would be the less helpful reason.
        await _check_port(loaded.settings.web.addr, loaded.settings.web.port)
        # Before the cluster, because its scheduler must know the address.
        extender_url = f"http://{HOST}:{free_port()}/scheduler" if plan.has_extender else ""
        extender = _extender(paths, plan.flags, notify, extender_url) if extender_url else None
        async with open_embedded_cluster(
            paths.state, node_names=names, kubelet_version=plan.kubelet_version, times=_TIMES,
            extender_url=extender_url, names=resource_names(loaded.settings),
        ) as cluster:  # fmt: skip
            nodes = [
                await build_node(
                    node, (*plan.flags, *flags), driver, notify, is_only=len(names) == 1, has_mig=plan.has_mig
                )
                for node, flags, driver in zip(cluster.nodes, plan.node_flags, drivers, strict=True)
            ]
            # All nodes have the same settings for it.
            if note := await _check_isolation(nodes[0].settings, nodes[0].node.paths, drivers[0]):
                notify(note)
            controller = SandboxController(nodes=tuple(nodes), extender=extender)
            session = Session(
                plan=plan, controller=controller, notify=notify,
                players=[node.player for node in nodes if node.player is not None],
                next_steps=_next_steps(cluster, plan, nodes),
            )  # fmt: skip
            notes = _introduce(cluster, plan, nodes, extender_url, notify)
            # The control socket ends last, so that a late command gets an answer while agents end.
            async with open_control(paths.control_socket, controller.handle), running(nodes, extender):
                work = run_once(session) if plan.is_once else run_live(session, notes)
                # Ctrl-C is how a live sandbox ends; a check that was interrupted has failed.
                return await _until_stopped(work, stop, INTERRUPTED if plan.is_once else 0)


def _introduce(
    cluster: EmbeddedCluster, plan: Plan, nodes: Sequence[RunningNode], extender_url: str, notify: Notices
) -> list[str]:
    """Reports the parts; returns what a person can do with a live sandbox."""
    settings, first = nodes[0].settings, nodes[0]
    webs = " ".join(node.addresses["web"] for node in nodes)
    logs = first.node.paths.agent_log if len(nodes) == 1 else f"{cluster.paths.state}/*/agent.log"
    asked = f"  extender {extender_url}, log {cluster.paths.extender_log}" if extender_url else ""
    places = f"web {webs}  API server {cluster.api.url}  agent's log {logs}{asked}"
    what = f"embedded node {first.name}" if len(nodes) == 1 else f"{len(nodes)} embedded nodes"
    notify(f"{what}, kubelet {plan.kubelet_version}, in {cluster.paths.state}")
    why_no_exec = first.node.kubelet.runtime.why_no_exec
    no_exec = f"; no exec, as {why_no_exec} (root can)" if why_no_exec else ""
    notify(f"{settings.driver} GPUs; containers are real processes, whose use of the GPUs is computed{no_exec}")
    # Where a share is not limited.
    if settings.isolation == NO_ISOLATION:
        notify(f"isolation {settings.isolation}: shares are allocated and not enforced; containers get no limit")
    of_all = f"the agent of {first.name} (`status` has every node's web and control socket):"
    return [
        f"other terminal: {runnable()} sandbox{_state_flag(plan)} "
        "status | apply -f FILE | delete NAME | exec POD -- COMMAND | fail-gpu N | heal-gpu N | restart-kubelet | "
        f"kill-agent{' | kill-extender' if extender_url else ''}",
        places,
        "\n".join(["its agent:" if len(nodes) == 1 else of_all, *(f"  {line}" for line in agent_lines(nodes[0]))]),
        "Ctrl-C ends the sandbox and removes everything",
    ]


def _next_steps(cluster: EmbeddedCluster, plan: Plan, nodes: Sequence[RunningNode]) -> tuple[str, str]:
    """The dashboard, and a first command."""
    web = f"next: {nodes[0].addresses['web']}/"
    # client-go sends credentials over TLS alone.
    if cluster.api.certificate is None:
        return web, f"{runnable()} sandbox{_state_flag(plan)} status (kubectl needs openssl, which makes a certificate)"
    return web, f"export KUBECONFIG={shlex.quote(str(cluster.paths.kubeconfig))}; kubectl get pods"


def _state_flag(plan: Plan) -> str:
    """Commands are shown as they must be typed, so with what differs from the defaults."""
    return "" if plan.state == default_state_directory() else f" --state-dir {shlex.quote(str(plan.state))}"


async def _check_port(host: str, port: int) -> None:
    """Fails before the agent does, which would be a second later, and again after each restart."""
    try:
        close_all(await listen_tcp(host, port, backlog=1))
    except Unavailable as error:
        raise StartupError(
            f"the agent's web server: {error}; choose another --port (0: any free) or --web.addr"
        ) from error


async def _until_stopped(work: Coroutine[object, object, int], stop: asyncio.Event, interrupted: int) -> int:
    async with asyncio.TaskGroup() as group:
        tasks = {group.create_task(work, name="sandbox"), group.create_task(stop.wait(), name="signals")}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Whichever is left: the work is endless in the live mode, a signal may never come.
        for task in tasks:
            task.cancel()
    results = [task.result() for task in done if not task.cancelled() and task.get_name() == "sandbox"]
    # Both may be done at once; then the work's own result counts.
    return results[0] if results else interrupted


# --- the nodes ---

NODE_NAME = "sandbox"


class RunningNode(NodeController, kw_only=True, eq=False):
    """One node, and what runs for it."""

    settings: Settings
    player: WorkloadPlayer | None = None


def node_names(loaded: LoadedSettings, count: int) -> list[str]:
    """The node name of the settings where one is set, else a name of the sandbox's. Several are numbered."""
    source = loaded.sources["node_name"]
    # NODE_NAME and the host's name are those of this machine, not wishes for the embedded node.
    is_set = source.startswith(("flag", "variable GPUSHARE")) or source.endswith((".yaml", ".yml"))
    name = loaded.settings.node_name if is_set else NODE_NAME
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def check_driver(name: str, paths: NodePaths, flags: Sequence[str]) -> NodeDriver:
    """The GPUs as the node's agent will see them. Raises SettingsError for a topology file that cannot be used: a mistake
    of the command line, as any other setting."""
    arguments = ("--driver=simulated", f"--simulated.faults={paths.faults}", *flags, f"--node-name={name}")
    try:
        return open_driver(load_settings(arguments, os.environ).settings)
    except StartupError as error:
        raise SettingsError([str(error)]) from error


async def build_node(
    node: EmbeddedNode,
    flags: Sequence[str],
    driver: NodeDriver,
    notify: Callable[[str], None],
    *,
    is_only: bool = True,
    has_mig: bool = False,
) -> RunningNode:
    """The node's parts, not yet running. `flags` are those of the command line; they win over the sandbox's own, except for
    the name. `has_mig`: half of the GPUs are in MIG mode."""
    own = [f"--node-name={node.name}"]
    if load_settings(flags, os.environ).settings.web.port == 0:
        own.append(f"--web.port={free_port()}")  # can be printed, and stays over restarts of the agent
    # The last of equal flags counts: the person's beat the sandbox's, the name and the ports are not to be overridden.
    arguments = [*node.agent_arguments(), *flags, *own]
    settings = load_settings(arguments, os.environ).settings
    count, addresses = len((await driver.read()).known), addresses_of(settings)
    faults = GpuFaults(settings.simulated.faults, count, health_policy(settings))
    if has_mig:
        faults.enter_mig_mode((count + 1) // 2)
    inventory = await driver.read()
    node.api.add_agent(node.name, AgentServer(url=addresses["web"], log=node.paths.agent_log))
    name = "the agent" if is_only else f"the agent of {node.name}"
    made = RunningNode(
        node=node, gpus=tuple(sorted(inventory.known, key=lambda gpu: gpu.index)),
        names=resource_names(settings, inventory.mig_profiles), addresses=addresses,
        by_claims=settings.has_claims, settings=settings, faults=faults,
        agent=AgentProcess(arguments, node.paths.agent_log, notify, name=name),
    )  # fmt: skip
    # None where the settings name another usage file, or none.
    usage = node.paths.usage
    if settings.driver == "simulated" and settings.simulated.usage == usage:
        made.player = WorkloadPlayer(made, usage, isolation=settings.isolation, allowed=settings.isolations_allowed)
    return made


async def _check_isolation(settings: Settings, paths: NodePaths, driver: NodeDriver) -> str:
    """What its shares lack; empty if nothing is missing. Raises StartupError if the agent would wait for a library or a
    daemon that nobody brings."""
    probes = build_probes(settings, driver)
    notes = []
    try:
        for name in isolation_parts(settings.isolation):
            # Only what a machine without GPUs can have: the driver's parts are simulated.
            if name in probes and probes[name].is_for_sandbox and not _has_fake_mps(name, settings, paths):
                await probes[name].check()
                notes += [probes[name].note] if probes[name].note else []
    except (StartupError, Unavailable) as error:
        raise StartupError(
            f"no share could be given under isolation {settings.isolation}: {error}. Without a setting of the isolation the"
            " sandbox takes one that needs neither a library nor a daemon"
        ) from error
    return "; ".join(notes)


def addresses_of(settings: Settings) -> dict[str, str]:
    """The agent's addresses on this machine; empty for what a setting has switched off."""
    socket = settings.control.socket
    return {
        "web": local_url(settings.web.addr, settings.web.port),
        "control_socket": str(socket.absolute()) if socket is not None else "",
    }


def agent_lines(node: NodeController, pod: str = "POD") -> list[str]:
    """The commands that a person types to ask this node's agent, and about a pod."""
    where = node.addresses
    # The default address need not be typed.
    server = "" if where["web"] == addresses_of(load_settings((), {}).settings)["web"] else f" --server {where['web']}"
    cordon = [f"cordon GPU --socket {shlex.quote(where['control_socket'])}"] if where["control_socket"] else []
    # With it the command also says why a pod waits, which the agent does not know.
    cluster = f" --kubeconfig {shlex.quote(str(node.node.paths.kubeconfig.absolute()))}"
    return [f"{runnable()} {line}" for line in (f"top{server}", f"explain {pod}{server}{cluster}", *cordon)]


@asynccontextmanager
async def running(nodes: Sequence[RunningNode], extender: AgentProcess | None) -> AsyncIterator[None]:
    """Runs agents, extender and players until the block ends."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            settings, paths = node.settings, node.node.paths
            # Before the agents, which refuse shares under mps until the daemon answers.
            if any(_has_fake_mps(name, settings, paths) for name in settings.isolation_parts_in_use):
                mps = open_fake_mps(paths.mps_pipe, paths.mps_logs, paths.mps_control)
                await stack.enter_async_context(mps)
        async with asyncio.TaskGroup() as group:
            processes = [*(node.agent for node in nodes), *([extender] if extender is not None else ())]
            bodies = [(one.name, one.run) for one in processes]
            bodies += [(f"workload {one.name}", one.player.run) for one in nodes if one.player is not None]
            tasks = [group.create_task(forever(name, body), name=name) for name, body in bodies]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                # Together: each agent may need seconds to end.
                await asyncio.wait(tasks)


def _has_fake_mps(isolation: str, settings: Settings, paths: NodePaths) -> bool:
    """Not where a person has named the directory of a daemon."""
    return isolation == "mps" and settings.mps.pipe_directory == paths.mps_pipe


def _extender(paths: NodePaths, flags: Sequence[str], notify: Callable[[str], None], url: str) -> AgentProcess:
    """Not yet running. There is one only, so it leads without election: after a kill it would wait for its own lease."""
    port = urlsplit(url).port
    arguments = [
        f"--kubeconfig={paths.kubeconfig}",
        "--extender.leader-elect=false",
        *flags,
        f"--extender.addr={HOST}",
        f"--extender.port={port}",
    ]
    return AgentProcess(arguments, paths.extender_log, notify, command="extender", name="the extender")


# --- the two modes: once, until every pod runs, has ended or fits nowhere, and live, until Ctrl-C ---

STEADY_TIMEOUT_S = 60.0
_NOTICES_KEPT, _NOTICES_SHOWN = 50, 2
_KEYS = "Ctrl-C ends the sandbox and removes everything  ? all commands  j k scroll"
_GAP = "  "
_WAIT_REPORTED_AFTER_S = 2.0
_SAMPLED_WITHIN_S, _SAMPLED_POLL_S = 5.0, 0.2
"""An agent samples each second while it is asked."""
_REDRAW_S = 0.25
_READ_AGAIN_S = 1.0
"""Processes start and end, and the agent writes its files, without an event of the node."""
_STILL_S = 3.0
"""More than two back-offs of the scheduler, and than an agent needs to report its allocations."""


class Notices:
    """Lines for people: printed, or kept for the live view while it has the screen."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr
        self._kept: deque[str] = deque(maxlen=_NOTICES_KEPT)
        self._show: Callable[[], None] | None = None

    def __call__(self, text: str) -> None:
        # While the view has the screen a printed line would be drawn over.
        if self._show is None:
            print(text, file=sys.stderr if self._to_stderr else sys.stdout, flush=True)
        else:
            self._kept.extend(text.splitlines())
            self._show()

    def newest(self, count: int) -> list[str]:
        return list(self._kept)[-count:]

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[], None]) -> Iterator[None]:
        """Notices go to the view until the block ends, when they are printed: the screen goes with its last state."""
        self._show = show
        try:
            yield
        finally:
            self._show = None
            for line in self._kept:
                self(line)


class Session(Struct, frozen=True, kw_only=True):
    """A running sandbox as its modes use it."""

    plan: Plan
    controller: SandboxController
    notify: Notices
    players: Sequence[WorkloadPlayer]
    next_steps: tuple[str, ...]


async def _create(session: Session) -> None:
    """Creates the pods when the agents have registered: before that no pod fits."""
    controller, notify = session.controller, session.notify
    async with reported_after(_WAIT_REPORTED_AFTER_S, "waiting for the agent to register its resources…", notify):
        is_registered = await controller.wait_registered()
    late = next((one for one in controller.nodes if not one.is_registered()), None)
    # Pods are created all the same: a pod that stays Pending is what a person must see.
    if not is_registered and late is not None:
        notify(
            f"{late.agent.name} has not registered its resources; pods that want them will stay Pending. "
            "The end of its log:\n"
            f"{last_lines(late.node.paths.agent_log)}"
        )
    for line in controller.apply(one.raw for one in session.plan.manifests):
        notify(line)


@asynccontextmanager
async def reported_after(seconds: float, text: str, notify: Callable[[str], None]) -> AsyncIterator[None]:
    """Reports what the sandbox waits for, if it takes that long."""
    timer = asyncio.get_running_loop().call_later(seconds, notify, text)
    try:
        yield
    finally:
        timer.cancel()


async def run_once(session: Session) -> int:
    """Waits until every pod is steady and prints the report; 1 where a pod neither runs nor has succeeded, else 0."""
    controller, notify = session.controller, session.notify
    await _create(session)
    # A script must come to its end; the report has the pods that are not steady.
    if not await at_most(STEADY_TIMEOUT_S, _wait_steady(controller)):
        notify(f"not every pod runs or has ended after {STEADY_TIMEOUT_S:g} s; the report shows their state")
    document = await _document_with_use(session)
    print_document(document, session.plan.form)
    sys.stdout.flush()  # before what follows on standard error, where both go to one place
    others = [pod for pod in document["pods"] if pod["phase"] not in ("Running", "Succeeded")]
    for pod in others:
        notify(f"{name_of(pod)} is {pod['phase']}: {reason_text(pod) or 'without a reason'}")
    if others:
        notify("exit code 1: not every pod is Running or Succeeded")
    if session.plan.form in ("table", "wide"):
        for line in _to_go_on(session, others, document["pods"]):
            notify(line)
    return 1 if others else 0


def _to_go_on(session: Session, waiting: Sequence[PodRow], pods: Sequence[PodRow]) -> list[str]:
    """The commands with which a person goes on, to be typed as they stand: the sandbox is gone. The live one creates a pod
    that waits where none does, but with claims, which have no such sample."""
    first = session.controller.nodes[0]
    pod, phase = next(((name_of(pod), pod["phase"]) for pod in (*waiting, *pods)), ("POD", "there"))
    has_waiting = bool(waiting) or first.by_claims
    if not has_waiting:
        pod, phase = sample_manifests("waiting")[0].raw["metadata"]["name"], "Pending"
    web = first.addresses["web"]
    return [
        f"next, a live sandbox with its dashboard on {web}/ (Ctrl-C ends it):",
        f"  {runnable()} {live_words(sys.argv[1:], web, has_waiting=has_waiting)}",
        f"in a second terminal, in this folder: why {pod} is {phase}, and its end:",
        f"  {agent_lines(first, pod)[1]}",
        f"  {runnable()} sandbox{_state_flag(session.plan)} delete {pod}",
    ]


def live_words(words: Sequence[str], web: str, *, has_waiting: bool) -> str:
    """The words of `sandbox --once` for a sandbox that stays, at the same port and with a pod that waits."""
    line = shlex.join(word for word in words if word != "--once")
    port = urlsplit(web).port
    # A free port was taken, and the other commands name it.
    if str(port) not in re.split("[ =]", line) and port != Settings().web.port:
        line += f" --web.port={port}"
    if has_waiting:
        return line
    others = {"fitting": "all", "none": "waiting"}
    line, count = re.subn(r"(?<= --samples[ =])\w+", lambda found: others.get(found[0], found[0]), line)
    return line if count else f"{line} --samples waiting"


async def _document_with_use(session: Session) -> SandboxDocument:
    """The report, with the use of containers that have just started: the agents' own, else GPUs would show less than what
    is in them."""
    # Before: the agents say which MIG instances the containers have.
    await session.controller.document()
    for player in session.players:
        player.play()
    played_at, nodes = time.time(), session.controller.nodes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SAMPLED_WITHIN_S if session.players else 0):
            while any((one.agent_document.get("agent", {}).get("sampled_at") or 0.0) < played_at for one in nodes):
                await asyncio.sleep(_SAMPLED_POLL_S)
                await session.controller.document()
    return await session.controller.document()


async def _wait_steady(controller: SandboxController) -> None:
    """With an extender a pod may be unschedulable because another pod's allocation was not known yet: it is steady when
    it has stayed so for a while."""
    signal_ = controller.api.signal
    while True:
        await signal_.wait_until(controller.is_steady, STEADY_TIMEOUT_S)
        if controller.extender is None or not controller.has_waiting():
            return
        with contextlib.suppress(TimeoutError):
            # Steady so far; only a change within _STILL_S says otherwise, so the timeout is the good end.
            await signal_.wait_until(lambda: not controller.has_waiting() or not controller.is_steady(), _STILL_S)
            continue
        return


async def run_live(session: Session, notes: Sequence[str]) -> int:
    """Prints `notes`, then shows the pods. Endless."""
    for note in notes:
        session.notify(note)
    async with asyncio.TaskGroup() as group:
        # A pipe or a file gets a line for each change, which a script can read.
        if has_screen() and session.plan.form in ("table", "wide"):
            group.create_task(_create(session), name="create-pods")
            await _draw(session, notes)
        else:
            group.create_task(_create_and_tell(session), name="create-pods")
            await _print_changes(session.controller, session.notify)
    return 0


async def _create_and_tell(session: Session) -> None:
    await _create(session)
    session.notify(_GAP.join(session.next_steps))


class _LiveView:
    """The tables of `status`, below them the newest notices. Changed by keys and by the cluster, both on the event loop."""

    def __init__(self, session: Session, notes: Sequence[str], document: SandboxDocument) -> None:
        self.document = document
        self._session = session
        self._notes = notes
        self._has_help = False

    def press(self, key: str) -> bool:
        """q is no key here: it would end every pod."""
        if key == "?":
            self._has_help = not self._has_help
        # q is taken here, so that the screen does not see it.
        return key in ("?", "q", "Q")

    def show(self, width: int, _height: int) -> View:
        body = Text("\n".join(self._notes)) if self._has_help else report_tables(self.document, width)
        notices = [Text(line, style="dim") for line in self._session.notify.newest(_NOTICES_SHOWN)]
        steps = self._session.next_steps
        # A line of its own for each where the terminal would cut the last one.
        whole = _GAP.join(steps)
        last = [whole] if len(whole) <= width else steps
        return View(head=(), body=body, foot=[*notices, Text(_KEYS, style="dim"), *map(Text, last)])


async def _draw(session: Session, notes: Sequence[str]) -> None:
    """On the whole screen, until cancelled."""
    view = _LiveView(session, notes, await session.controller.document())
    screen = Screen(view.show, view.press)
    with session.notify.shown_by(screen.is_changed.set):
        await screen.run(_follow(session.controller, view, screen), ends_on_signals=False)


async def _follow(controller: SandboxController, view: _LiveView, screen: Screen) -> None:
    async for view.document in _documents(controller):
        screen.is_changed.set()


async def _print_changes(controller: SandboxController, notify: Callable[[str], None]) -> None:
    """A line for every pod that is new, has changed, or has gone."""
    shown: dict[str, str] = {}
    async for document in _documents(controller):
        lines = {pod["uid"]: pod_line(pod, has_node=len(document["nodes"]) > 1) for pod in document["pods"]}
        for uid, line in lines.items():
            if shown.get(uid) != line:
                notify(line)
        # By UID: a pod that was recreated under the same name is another one, and the first has gone.
        for uid in shown.keys() - lines.keys():
            notify(f"gone: {' '.join(shown[uid].split()[:2])}")
        shown = lines


async def _documents(controller: SandboxController) -> AsyncIterator[SandboxDocument]:
    """The document now, and again after each change, or a while; without an end."""
    while True:
        # Before the reading: a change during it is seen at once.
        seen = controller.api.signal.count
        yield await controller.document()
        await controller.api.signal.wait(seen, _READ_AGAIN_S)
        # A pod's start is a burst of events: one drawing for all of them.
        await asyncio.sleep(_REDRAW_S)
