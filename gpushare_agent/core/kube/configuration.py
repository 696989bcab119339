"""The address of the API server and our credentials: in-cluster service account or kubeconfig.

kubernetes-asyncio reads both (tokens, client certificates, exec plugins); this module chooses the source, keeps the
library's import in a thread (never before the agent has registered with the kubelet) and renames its errors. A fault that
waiting does not cure is a StartupError; what may appear later (a projected token, a plugin's answer) is Unavailable.

The library's packages import every API class and model in their `__init__`: 33 MiB of memory and a third of a second
of one CPU (docs/reference/measurements.md), for an agent that works on raw JSON. So the packages are put in place without
running their `__init__`, and the few modules that are needed are imported from them. A library that the process has imported
already is used as it is; code that wants all of it next to the agent's client imports it first. Where the layout is not the
one known, it is imported whole. urllib3 is loaded when it is first used, which is for a kubeconfig with a user's name and
password alone. State owned: the library's entries in sys.modules.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import structlog
from msgspec import Struct

from gpushare_agent.core.kit.lean_imports import Hollow, import_lean
from gpushare_agent.core.model.errors import StartupError, Unavailable

log = structlog.get_logger(__name__)

_LIBRARY = "kubernetes_asyncio"
_HOLLOW = (_LIBRARY, f"{_LIBRARY}.client", f"{_LIBRARY}.client.models")
"""Packages whose `__init__` is not run, parents first."""
_OFFERED = {"Configuration": f"{_LIBRARY}.client.configuration", "ApiClient": f"{_LIBRARY}.client.api_client"}
"""The modules that the library imports from its client package, in the order in which they need each other."""
_UNUSED = ("dateutil.parser", "multiprocessing.pool")
"""Modules that the library imports for the dates of its models and for a pool of threads."""

_lock = threading.Lock()


class KubeLibrary(Struct, frozen=True, kw_only=True):
    """The modules `client`, `config` and `config.kube_config`. Of `client` only Configuration and ApiClient are there."""

    client: Any
    config: Any
    kube_config: Any


def load_library() -> KubeLibrary:
    """The library, imported at the first call. Raises ImportError where it is not installed."""
    # Called in threads: two clients may be opened at once, and modules must not be put in place twice.
    with _lock:
        stand_ins = {"urllib3": _LoadedOnUse("urllib3"), **{name: Hollow(name) for name in _UNUSED}}
        if (reason := import_lean(_LIBRARY, stand_ins, _load_lean)) is not None:
            log.info("kubernetes_library_loaded_whole", reason=str(reason))
        return KubeLibrary(
            client=import_module(f"{_LIBRARY}.client"),
            config=import_module(f"{_LIBRARY}.config"),
            kube_config=import_module(f"{_LIBRARY}.config.kube_config"),
        )


def _load_lean() -> None:
    for name in _HOLLOW:
        _put_package(name)
    for name, module in _OFFERED.items():
        setattr(sys.modules[f"{_LIBRARY}.client"], name, getattr(import_module(module), name))
    import_module(f"{_LIBRARY}.config.kube_config")


class _LoadedOnUse(ModuleType):
    """Stands for a module while another one imports it. importlib.util.LazyLoader does not: until Python 3.12 the import
    statement itself loads the module."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _put_package(name: str) -> None:
    """Makes the package importable from, with nothing in it."""
    spec = find_spec(name)
    if spec is None:
        raise ImportError(f"no package {name}")
    package = sys.modules[name] = module_from_spec(spec)
    parent, _, child = name.rpartition(".")
    if parent:
        # What Python's import does too: `package.child` has to be found as an attribute.
        setattr(sys.modules[parent], child, package)


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOAD_TIMEOUT_S = 30.0
"""An exec credential plugin may ask a cloud's service; longer than this is a hang."""


class ConfigurationSource(Struct, frozen=True, kw_only=True):
    """`kubeconfig` is a path list as in $KUBECONFIG; empty means the pod's service account. An empty `context` means the
    kubeconfig's current one."""

    kubeconfig: str = ""
    context: str = ""
    service_account: Path = SERVICE_ACCOUNT

    def __str__(self) -> str:
        return f"kubeconfig {self.kubeconfig}" if self.kubeconfig else f"service account {self.service_account}"


def find_configuration(kubeconfig: Path | None, environ: Mapping[str, str], context: str = "") -> ConfigurationSource:
    """The explicit kubeconfig, else in-cluster, else $KUBECONFIG, else ~/.kube/config. A context is one of a kubeconfig:
    with it the pod's own cluster is not used.

    Raises:
        StartupError: there is none, or the named file does not exist.
    """
    if kubeconfig is not None:
        if not kubeconfig.is_file():
            raise StartupError(
                f"cannot reach the API server: kubeconfig {kubeconfig} is no file; correct --kubeconfig or leave it out"
            )
        return ConfigurationSource(kubeconfig=str(kubeconfig), context=context)
    if environ.get("KUBERNETES_SERVICE_HOST") and not context:
        return ConfigurationSource()
    # As kubectl: a list of paths; some may not exist.
    paths = environ.get("KUBECONFIG") or str(Path(environ.get("HOME", "/root")) / ".kube" / "config")
    if any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        return ConfigurationSource(kubeconfig=paths, context=context)
    raise StartupError(
        "cannot reach the API server: no configuration found (KUBERNETES_SERVICE_HOST is not set, and "
        f"{paths} does not exist); set KUBECONFIG, give --kubeconfig FILE, or run in a pod with a service account"
    )


async def open_api_client(source: ConfigurationSource) -> Any:
    """A kubernetes-asyncio ApiClient with credentials loaded now. The caller closes it.

    Raises:
        StartupError: the kubeconfig is malformed, or the proxy's address.
        Unavailable: credentials cannot be had at present.
    """
    # A third of a second of import: admissions are answered meanwhile.
    library = await asyncio.to_thread(load_library)
    client, config = library.client, library.config
    configuration = client.Configuration()
    try:
        # The library runs an exec plugin without a limit.
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            if source.kubeconfig:
                # Files and YAML, which may take a while.
                loader = await asyncio.to_thread(_read_kubeconfig, library, source.kubeconfig, source.context)
                await loader.load_and_set(configuration)
            else:
                config.load_incluster_config(
                    configuration,
                    token_filename=str(source.service_account / "token"),
                    cert_filename=str(source.service_account / "ca.crt"),
                )
        server = urlsplit(configuration.host)
        if server.scheme not in ("http", "https") or not server.hostname:
            what = f"the server {configuration.host!r} is no URL such as https://HOST:6443"
            raise StartupError(f"cannot use {source}: {what}; check it with `kubectl config view`")
        proxy, variable, origin = configuration.proxy or "", "", "proxy-url of the kubeconfig"
        if not proxy:
            proxy, variable = environment_proxy(configuration.host, os.environ)
            origin = f"{variable}; NO_PROXY lists the servers that need none"
        configuration.proxy, through = _checked_proxy(proxy, origin)
        return _own_requests(client.ApiClient(configuration), through)
    # a malformed user entry surfaces in the library as TypeError or AssertionError
    except (config.ConfigException, OSError, ValueError, TypeError, AssertionError) as e:
        raise Unavailable(
            f"cannot load the API server's credentials from {source}: {_one_line(e)}; "
            "check the user and cluster entries and the files they name"
        ) from e


def environment_proxy(url: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The proxy for a URL and the variable that names it, both empty where there is none. As kubectl chooses it (Go's
    golang.org/x/net/http/httpproxy): upper case comes first, ALL_PROXY does not count, loopback addresses need no proxy."""
    server = urlsplit(url)
    host, port = server.hostname or "", str(server.port or {"http": 80}.get(server.scheme, 443))
    variables = (f"{server.scheme.upper()}_PROXY", f"{server.scheme}_proxy")
    variable = next((name for name in variables if environ.get(name)), "")
    excluded = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    if not variable or is_excluded(host, port, excluded):
        return "", ""
    proxy = environ[variable].strip()
    return proxy if "://" in proxy else f"http://{proxy}", variable


def is_excluded(host: str, port: str, excluded: str) -> bool:
    """Whether a host in lower case is one of this machine, or NO_PROXY (`excluded`) names it."""
    address = _ip(ip_address, host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for entry in map(str.strip, excluded.lower().split(",")):
        name, its_port = entry, ""
        if entry.startswith("["):
            name, _, its_port = entry[1:].partition("]")
        elif entry.count(":") == 1:  # more are an IPv6 address
            name, _, its_port = entry.partition(":")
        # A network has no port.
        if (network := _ip(partial(ip_network, strict=False), entry if "/" in entry else "")) is not None:
            is_named = address is not None and address in network
        elif (one := _ip(ip_address, name)) is not None:
            is_named = address == one
        else:
            suffix = name.removeprefix("*.").removeprefix(".")
            is_named = entry == "*" or name == host or (suffix != "" and host.endswith(f".{suffix}"))
        if is_named and its_port.removeprefix(":") in ("", port):
            return True
    return False


def _ip(read: Callable[[str], Any], text: str) -> Any:
    """An address or a network; None where the text is none. An IPv4 address in IPv6's form is the IPv4 address."""
    try:
        found = read(text)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


KEPT_S = 75.0
"""How long an idle connection is kept. The API server closes it after 90 s, aiohttp after 15; most nodes admit a pod less
often, and each of its patches would begin with a TLS handshake, which takes twice as long as the patch."""
_PROBES = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2))
"""Seconds, seconds and number. macOS, where the plugin may run, has other names."""


def _probed_socket(address: Any) -> socket.socket:
    """The system asks whether the other end is there. Else, where a machine is gone without a word, an admission that asks
    through a kept connection gets no answer in its time, and its pod is refused."""
    found = socket.socket(*address[:3])
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if (option := getattr(socket, name, None)) is not None:
            found.setsockopt(socket.IPPROTO_TCP, option, value)
    return found


class _WithoutRedirects:
    """A session of aiohttp. The API server redirects nobody; a pod behind its proxy may, to wherever it likes, with this
    program's network and, on the API server's own address, its credentials."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.close = session.close

    def request(self, **given: Any) -> Any:
        return self._session.request(**given, allow_redirects=False)


def _checked_proxy(proxy: str, origin: str) -> tuple[str, str]:
    """The proxy's URL, and the part of a message about a request that failed: which proxy it took, without its password,
    and why that one. Raises StartupError: it is no URL of a proxy; a later error would show it with its password."""
    from yarl import URL  # by which aiohttp reads it

    if not (proxy := proxy.strip()):
        return "", ""
    try:
        url = URL(proxy)
        if url.password:  # sent as Latin-1, where kubectl sends UTF-8
            url = url.with_password(url.password.encode().decode("latin-1"))
    except ValueError:
        url = URL()
    # `@` behind the host: the password has a character that ends it.
    if url.scheme not in ("http", "https") or not url.host or "@" in url.raw_path_qs + url.raw_fragment:
        raise StartupError(
            f"cannot use the proxy (from {origin}): it is no URL such as http://USER:PASSWORD@proxy.example:3128, http or"
            " https alone, with % codes for the special characters of a password"
        )
    return str(url), f" through the proxy {url.host_port_subcomponent} (from {origin})"


def _own_requests(client: Any, through: str) -> Any:
    """Before each request aiohttp would look for a proxy in the environment, and for credentials in ~/.netrc, each in a
    thread. The proxy is known by now, and kubectl reads no ~/.netrc either. Idle connections stay as long as KEPT_S
    while they are probed: the library has no way to say so."""
    client.through = through
    client.rest_client.pool_manager._trust_env = False
    connector = client.rest_client.pool_manager.connector
    connector._keepalive_timeout, connector._socket_factory = KEPT_S, _probed_socket
    client.rest_client.pool_manager = _WithoutRedirects(client.rest_client.pool_manager)
    return client


def _read_kubeconfig(library: KubeLibrary, paths: str, context: str) -> Any:
    """The library's loader for the context, else the current one; never writes the file back (load_kube_config would)."""
    # Imported here: in a pod no kubeconfig is read, and PyYAML is not needed.
    yaml_error = importlib.import_module("yaml").YAMLError
    try:
        merged = library.kube_config.KubeConfigMerger(paths).config
        known = [str(one["name"]) for one in merged.value["contexts"]]
        if context and context not in known:
            raise StartupError(f"kubeconfig {paths} has no context {context}; it has: {', '.join(known) or 'none'}")
        loader = library.kube_config.KubeConfigLoader(merged, active_context=context or None, config_base_path=None)
    except (library.config.ConfigException, yaml_error, KeyError) as e:
        why = _one_line(e)
    except (TypeError, AttributeError, AssertionError, ValueError, OverflowError, RecursionError):
        why = "it is no kubeconfig"  # for anything but a mapping of lists the library has only Python's words
    else:
        return loader
    raise StartupError(f"cannot use kubeconfig {paths}: {why}; check it with `kubectl config view`")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
