"""kubernetes-asyncio is loaded without the generated modules that nobody here uses."""

from __future__ import annotations

import json
import subprocess
import sys

_REPORT = """
import json, sys
from gpushare_agent.core.kube import configuration
{before}
loaded = configuration.load_library()
again = configuration.load_library()
loader = loaded.kube_config.KubeConfigLoader(
    config_dict={{
        "current-context": "c", "contexts": [{{"name": "c", "context": {{"cluster": "k", "user": "u"}}}}],
        "clusters": [{{"name": "k", "cluster": {{"server": "http://127.0.0.1:1"}}}}],
        "users": [{{"name": "u", "user": {{}}}}],
    }},
    config_base_path=None,
)
unneeded = [name for name in ("urllib3", "urllib3.util", "dateutil.parser", "multiprocessing.pool") if name in sys.modules]
print(json.dumps({{
    "unneeded": unneeded,
    "basic": loaded.client.Configuration(username="u", password="p").get_basic_auth_token(),
    "modules": sum(name.startswith("kubernetes_asyncio") for name in sys.modules),
    "is_same": again.client is loaded.client,
    "host": loaded.client.Configuration(host="http://127.0.0.1:1").host,
    "client": loaded.client.ApiClient.__module__,
    "in_cluster": callable(loaded.config.load_incluster_config),
    "context": loader.current_context["name"],
    "has_all": hasattr(loaded.client, "CoreV1Api"),
}}))
"""


def _report(before: str = "") -> dict[str, object]:
    """Each case needs a process of its own: modules are loaded once."""
    script = _REPORT.format(before=before)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return report


def test_the_library_is_loaded_without_its_generated_modules() -> None:
    """What reads credentials and sends requests is there; the 900 models and API classes are not."""
    report = _report()
    assert report.pop("modules") in range(1, 60)
    assert report == {
        "unneeded": [],
        "basic": "Basic dTpw",
        "is_same": True,
        "host": "http://127.0.0.1:1",
        "client": "kubernetes_asyncio.client.api_client",
        "in_cluster": True,
        "context": "c",
        "has_all": False,
    }


def test_an_unknown_layout_is_loaded_whole() -> None:
    """A release of the library that lays its modules out differently costs memory, not the connection."""
    report = _report("configuration._OFFERED['ApiClient'] = 'kubernetes_asyncio.client.moved_elsewhere'")
    assert report["has_all"] is True
    assert report["basic"] == "Basic dTpw"
    assert (report["client"], report["context"]) == ("kubernetes_asyncio.client.api_client", "c")


_WITHOUT_DESCRIPTORS = """
imported = configuration.import_module
def refuse(name):
    raise OSError(24, name)
configuration.import_module = refuse
try:
    configuration.load_library()
    raise AssertionError("loaded")
except OSError:
    configuration.import_module = imported
"""


def test_a_load_without_a_free_descriptor_is_made_again() -> None:
    """As lean as the first one would have been."""
    report = _report(_WITHOUT_DESCRIPTORS)
    assert (report["has_all"], report["basic"]) == (False, "Basic dTpw")


def test_a_library_that_is_there_already_is_left_alone() -> None:
    """Whoever imported all of it before goes on having all of it."""
    report = _report("import kubernetes_asyncio.client")
    assert report["has_all"] is True and report["is_same"] is True
