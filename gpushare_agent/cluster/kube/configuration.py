"""Where the API server is and how to prove who we are: in-cluster service account or kubeconfig.

kubernetes-asyncio reads both (tokens, client certificates, exec plugins); this module chooses the source, keeps the
library's import in a thread (never before the agent has registered with the kubelet) and renames its errors. No state.
What can never work by waiting is a StartupError; what may appear later (a projected token, a plugin's answer) is
Unavailable.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpushare_agent.cluster.kube.library import KubeLibrary, load_library
from gpushare_agent.model.errors import StartupError, Unavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOAD_TIMEOUT_S = 30.0
"""An exec credential plugin may ask a cloud's service; longer than this is a hang."""


class ConfigurationSource(Struct, frozen=True, kw_only=True):
    """`kubeconfig` is a path list as in $KUBECONFIG; empty means the pod's service account. `context`: empty means the
    current one of the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    service_account: Path = SERVICE_ACCOUNT

    def __str__(self) -> str:
        return f"kubeconfig {self.kubeconfig}" if self.kubeconfig else f"service account {self.service_account}"


def find_configuration(kubeconfig: Path | None, environ: Mapping[str, str], context: str = "") -> ConfigurationSource:
    """The explicit kubeconfig, else in-cluster, else $KUBECONFIG, else ~/.kube/config. A context is one of a kubeconfig:
    with it the pod's own cluster is passed over.

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
        StartupError: the kubeconfig is malformed.
        Unavailable: credentials cannot be had at present.
    """
    library = await asyncio.to_thread(load_library)
    client, config = library.client, library.config
    configuration = client.Configuration()
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            if source.kubeconfig:
                loader = await asyncio.to_thread(_read_kubeconfig, library, source.kubeconfig, source.context)
                await loader.load_and_set(configuration)
            else:
                config.load_incluster_config(
                    configuration,
                    token_filename=str(source.service_account / "token"),
                    cert_filename=str(source.service_account / "ca.crt"),
                )
        return client.ApiClient(configuration)
    # a malformed user entry surfaces in the library as TypeError or AssertionError
    except (config.ConfigException, OSError, ValueError, TypeError, AssertionError) as e:
        raise Unavailable(
            f"cannot load the API server's credentials from {source}: {_one_line(e)}; will be tried again; "
            "check the user and cluster entries and the files they name"
        ) from e


def _read_kubeconfig(library: KubeLibrary, paths: str, context: str) -> Any:
    """The library's loader for the context, else the current one; never writes the file back (load_kube_config would)."""
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
        why = "it is no kubeconfig"  # of what is no mapping of lists the library has Python's words alone
    else:
        return loader
    raise StartupError(f"cannot use kubeconfig {paths}: {why}; check it with `kubectl config view`")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
