"""Settings per node: reads the configuration that the Node's label names, and asks for a reload when it is another one.

The settings themselves and the rules are settings/node_configuration.py's; agent/program.py tries them and reloads. There
is one for the process. State owned: the Node's labels as last read, the configuration in force and the one before it, and
what was read last, be it a configuration or why there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
from msgspec import Raw

from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.regular_file import read_regular
from gpushare_agent.core.kit.supervision import run_together
from gpushare_agent.core.kit.watch_path import DirectoryWatch
from gpushare_agent.core.kube.client import KubeApi, node_named, open_kube_api
from gpushare_agent.core.kube.informer import Handler, Informer
from gpushare_agent.core.kube.objects import read_node_json
from gpushare_agent.core.model.errors import AgentError, StartupError, Unavailable
from gpushare_agent.core.settings.node_configuration import NamedConfiguration, choose_name
from gpushare_agent.core.settings.settings import Settings, SettingsError

log = structlog.get_logger(__name__)

LABELS_WAIT_S = 10.0
"""For the Node's labels at the agent's start: without an API server no pod comes to the node either."""
RETRY_S = 0.5
POLL_S = 30.0
MAX_BYTES = 256 * 1024
_Read = NamedConfiguration | str | None
"""A configuration, why there is none, or None where the node has none."""


class NodeConfiguration(Handler):
    """`load` reads settings with a named configuration, or with none; it may block. Raises SettingsError."""

    def __init__(self, load: Callable[[NamedConfiguration | None], Settings]) -> None:
        self._load = load
        self._labels: Mapping[str, str] = {}
        self._in_force: NamedConfiguration | None = None
        self._before: NamedConfiguration | None = None
        self._is_own = False
        """What was read last is of this node alone."""
        self._last_read: _Read = None
        self._changed = asyncio.Event()
        self.problem = ""
        """Why the configuration that is asked for is not in force; empty where it is."""

    async def first(self, base: Settings) -> Settings:
        """The settings of the process's first generation: `base` where the configuration cannot be used, because an
        agent that does not start would take the node's GPUs out of service."""
        if base.node_configuration.directory is None:
            return base
        self._labels = await _read_labels(base)
        try:
            return await self.read()
        # One bad file must not take the node's GPUs out of service in a crash loop.
        except SettingsError as e:
            self.refused(e)
            log.error(
                "node_configuration_refused", problems=list(e.problems), then="the settings of all nodes are in force"
            )
            return base

    async def read(self) -> Settings:
        """The settings as they are written now, with the configuration that the node's labels name. They are taken for in
        force until `refused`. Raises SettingsError."""
        # Before anything can fail: `refused` may be called for a base that cannot be read at all.
        self._before, self._is_own = self._in_force, False
        # The base first, because it names the directory; files may lie on a slow disk.
        base = await asyncio.to_thread(self._load, None)
        self._is_own = base.node_configuration.directory is not None
        self._last_read = found = await self._find(base)
        if isinstance(found, str):
            raise SettingsError([found])
        settings = base if found is None else await asyncio.to_thread(self._load, found)
        # In force already while it is tried: `wait_new` must not ask for a second reload meanwhile.
        self._in_force, self.problem = found, ""
        if found != self._before:
            log.info("node_configuration", name=found.name if found is not None else "")
        return settings

    def refused(self, error: AgentError) -> None:
        """What was read last cannot be used: what was in force before stays."""
        # A reload of the common settings that fails says nothing of the node's configuration.
        if self._is_own:
            self._in_force, self.problem = self._before, str(error)

    async def wait_new(self, settings: Settings) -> None:
        """Waits until the node's configuration is another one than that in force and the last that was tried. One
        waiter."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            found = await self._find(settings)
            # Changed and changed back: the mistake is gone without a reload.
            if found == self._in_force:
                self._last_read, self.problem = found, ""
            # What was tried and refused is not tried again until it changes.
            elif found != self._last_read:
                self._last_read = found
                return

    def key(self, raw: Raw) -> str:
        """The key for the informer, whose one object is the Node."""
        return "node"

    def put(self, raw: Raw) -> bool:
        """The labels are read."""
        labels = read_node_json(raw).meta.labels
        # The Node's status changes every few seconds; its labels seldom.
        if labels != self._labels:
            self._labels = labels
            self._changed.set()
        return True

    def remove(self, key: str) -> None:
        """A Node that is deleted and registered again comes with its labels: until then the last ones count."""

    async def watch_directory(self, directory: Path) -> NoReturn:
        with closing(DirectoryWatch(directory, poll_s=POLL_S)) as watch:
            while True:
                # At each turn, the first too: the directory may have changed while nobody watched it.
                self._changed.set()
                await watch.wait_change()

    async def run(self, node: Node, request_reload: Callable[[str], None], api: KubeApi) -> NoReturn:
        """Watches label and files for one generation of the agent, until cancelled; asks for a reload where the node's
        configuration is another one."""
        settings = node.settings
        informer = Informer(kind="node", watched=node_named(settings.node_name), handler=self, metrics=node.metrics)

        async def follow() -> NoReturn:
            while True:
                await self.wait_new(settings)
                request_reload("the node has another configuration")

        tasks: dict[str, Callable[[], Awaitable[object]]]
        tasks = {"node labels": partial(informer.run, api), "node configuration": follow}
        if (directory := settings.node_configuration.directory) is not None:
            tasks["configurations"] = partial(self.watch_directory, directory)
        await run_together(tasks)

    async def _find(self, settings: Settings) -> _Read:
        section = settings.node_configuration
        if section.directory is None:
            return None
        try:
            return await asyncio.to_thread(_read, section.directory, self._labels, section.default)
        except Unavailable as e:  # no thread
            return str(e)


def _read(directory: Path, labels: Mapping[str, str], default: str) -> _Read:
    """Reads the configuration. Its file's name comes from the directory's own list, never from a label: a label with `..`
    in it must not name another file."""
    try:
        name = choose_name(labels, [path.name for path in directory.iterdir() if path.is_file()], default)
        if not name:
            return None
        return NamedConfiguration(name=name, content=read_regular(directory / name, MAX_BYTES, follow=True))
    except OSError as e:
        return f"the configuration in {directory} cannot be read: {e.strerror}"
    except ValueError as e:
        return str(e)


async def _read_labels(settings: Settings) -> Mapping[str, str]:
    """The Node's labels, none where the API server does not answer in time: those of the watch follow."""
    error = "no answer"
    try:
        async with asyncio.timeout(LABELS_WAIT_S):
            while True:
                try:
                    async with open_kube_api(kubeconfig=settings.kubeconfig) as api:
                        return read_node_json(await api.get_node(settings.node_name)).meta.labels
                # A kubeconfig that is wrong does not become right by waiting.
                except StartupError:
                    raise
                except AgentError as e:
                    error = str(e)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        log.warning(
            "node_labels_unknown", error=error, then="the configuration of a node without the label, until they are"
        )
        return {}
