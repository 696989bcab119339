"""The guide's openssl lines make certificates with which scheduler and extender accept each other, and nobody else."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gpushare_agent.extender.http import tls_context
from tests.manifests.support_manifests import documents

GUIDE = Path(__file__).parents[2] / "docs/how-to/schedule-with-the-extender.md"
NAME = documents("extender/default-scheduler/scheduler.yaml")[0]["extenders"][0]["tlsConfig"]["serverName"]

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the guide's block has run, word for word."""
    text = GUIDE.read_text(encoding="utf-8")
    (block,) = [found for found in re.findall(r"^```\n(.*?)^```$", text, flags=re.M | re.S) if "openssl" in found]
    directory = tmp_path_factory.mktemp("certificates")
    subprocess.run(["sh", "-e", "-c", block], cwd=directory, capture_output=True, check=True, timeout=60)
    return directory


def extender(made: Path) -> ssl.SSLContext:
    """As the extender serves, with the files as its Secret has them; as strict as newer versions of Python are."""
    context = tls_context(made / "server.crt", made / "server.key", made / "ca.crt")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def scheduler(made: Path, certificate: str = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=made / "ca.crt")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if certificate:
        context.load_cert_chain(made / f"{certificate}.crt", made / f"{certificate}.key")
    return context


def shown_to_server(server: ssl.SSLContext, client: ssl.SSLContext, name: str = NAME) -> object:
    """The client's certificate, as the extender sees it after a handshake. Raises ssl.SSLError where one refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asked = server.wrap_bio(to_server, to_client, server_side=True)
    asking = client.wrap_bio(to_client, to_server, server_hostname=name)
    for _ in range(10):
        for side in (asking, asked):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    asked.write(b"answer")
    assert asking.read(6) == b"answer"
    return asked.getpeercert()


def test_scheduler_and_extender_accept_each_other(made: Path) -> None:
    """By the Service's name, with the certificates of both Secrets."""
    assert shown_to_server(extender(made), scheduler(made))


def test_who_has_no_certificate_shows_none(made: Path) -> None:
    """It gets as far as health and metrics: the extender refuses its verbs."""
    assert not shown_to_server(extender(made), scheduler(made, certificate=""))


def test_the_extenders_own_certificate_is_none_of_a_client(made: Path) -> None:
    """Who reads the extender's Secret cannot ask other extenders with it."""
    with pytest.raises(ssl.SSLError):
        shown_to_server(extender(made), scheduler(made, certificate="server"))


def test_the_certificate_holds_for_no_other_name(made: Path) -> None:
    """kube-scheduler finds out when it has reached another program."""
    with pytest.raises(ssl.SSLCertVerificationError):
        shown_to_server(extender(made), scheduler(made), "another.gpushare-system.svc")


def test_the_secrets_get_the_files_that_the_pods_look_for(made: Path) -> None:
    """The names in `kubectl create secret` are those of the settings, and the files exist."""
    text = GUIDE.read_text(encoding="utf-8").replace("\\\n", " ")
    for path, file in (("extender/deployment.yaml", "server"), ("extender/second-scheduler/deployment.yaml", "client")):
        spec = documents(path)[0]["spec"]["template"]["spec"]
        (secret,) = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
        (line,) = re.findall(rf"^kubectl .*create secret generic {secret} .*$", text, flags=re.M)
        files = dict(re.findall(r"--from-file=([a-z.]+)=([a-z.]+)", line))
        assert files == {"tls.crt": f"{file}.crt", "tls.key": f"{file}.key", "ca.crt": "ca.crt"}
        assert all((made / name).exists() for name in files.values())
