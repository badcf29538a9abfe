"""compose.tls.yaml over compose.yaml: mutual TLS on every connection between containers and with clients."""

from __future__ import annotations

import os

import pytest

from outrider.client import Client
from outrider.cluster.authority import prepare_tls_folder
from outrider.errors import PeerLostError
from outrider.rpc.tls import SecurityConfig, TlsConfig
from tests.compose.project import Project, with_models
from tests.compose.story import PROMPT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]

CONTAINER_USER = 10001


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """The certificates of `outrider up --tls`, readable by the containers' user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give the certificates to the user of the containers")
    folder = tmp_path_factory.mktemp("certificates")
    prepare_tls_folder(folder, SecurityConfig())
    for path in (folder, *folder.iterdir()):
        os.chown(path, CONTAINER_USER, CONTAINER_USER)
    return folder


@pytest.fixture(scope="module")
def secured(models, certificates, tmp_path_factory):
    files = ("compose.yaml", "compose.tls.yaml")
    with Project(tmp_path_factory.mktemp("secured"), files=files, override=with_models(models)) as project:
        project.environ["OUTRIDER_TLS_DIR"] = str(certificates)
        project.up()
        yield project


def test_a_client_with_a_certificate_is_answered(secured, certificates):
    tls = TlsConfig(
        authority=certificates / "ca.pem",
        certificate=certificates / "client.pem",
        private_key=certificates / "client-key.pem",
    )
    with Client(secured.target, tls=tls) as client:
        result = client.complete(PROMPT, max_tokens=16, temperature=0, ignore_eos=True, timeout_seconds=60)
    assert len(result.completions[0].token_ids) == 16


@pytest.mark.parametrize("tls", [None, "authority"], ids=["plaintext", "no-certificate"])
def test_a_client_without_one_is_refused(secured, certificates, tls):
    tls = tls and TlsConfig(authority=certificates / "ca.pem")
    with Client(secured.target, tls=tls) as client, pytest.raises(PeerLostError):
        client.complete(PROMPT, max_tokens=1, timeout_seconds=20)


def test_no_service_warns_that_anybody_can_use_it(secured):
    events = [line["event"] for line in secured.logs(is_json=True)]
    assert events
    assert not [event for event in events if event.startswith("ANYBODY")]
