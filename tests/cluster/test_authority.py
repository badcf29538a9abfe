"""The folder of `outrider up --tls`."""

from __future__ import annotations

import stat

import pytest

from outrider.errors import ConfigError
from outrider.rpc.tls import SecurityConfig

authority = pytest.importorskip("outrider.cluster.authority", reason="needs cryptography")

CONFIG = SecurityConfig()


def test_a_folder_is_filled_once_and_its_keys_are_for_its_owner(tmp_path):
    folder = tmp_path / "new" / "tls"
    shown = authority.prepare_tls_folder(folder, CONFIG)
    assert shown.certificate == folder / "node.pem"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {"ca.pem", "node.pem", "node-key.pem", "client.pem", "client-key.pem"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert authority.prepare_tls_folder(folder, CONFIG) == shown
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_folder_that_lacks_something_is_left_as_it_is(tmp_path):
    authority.prepare_tls_folder(tmp_path, CONFIG)
    (tmp_path / "node-key.pem").unlink()
    with pytest.raises(ConfigError, match=r"has ca\.pem, .* but not node-key\.pem"):
        authority.prepare_tls_folder(tmp_path, CONFIG)
    assert not (tmp_path / "node-key.pem").exists()


def test_expired_files_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(authority, "VALID_DAYS", -1)
    authority.prepare_tls_folder(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match=r"node\.pem expired on .*; remove the folder"):
        authority.prepare_tls_folder(tmp_path, CONFIG)


def test_a_machine_whose_name_dns_cannot_have_is_left_out_and_a_service_with_such_a_name_is_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(authority.socket, "gethostname", lambda: "my_host")
    authority.prepare_tls_folder(tmp_path / "made", CONFIG)
    with pytest.raises(ConfigError, match=r"security\.peer_name my_node: .* DNS names in lower case"):
        authority.prepare_tls_folder(tmp_path / "refused", SecurityConfig(peer_name="my_node"))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("name", ["Outrider-Node", "bücher"])
def test_a_service_whose_name_would_be_another_in_its_certificate_is_an_error(tmp_path, name):
    """Peers would reject the certificate, because they look for the configured name."""
    with pytest.raises(ConfigError, match=rf"security\.peer_name {name}: .* DNS names in lower case"):
        authority.prepare_tls_folder(tmp_path, SecurityConfig(peer_name=name))


def test_a_machine_whose_name_has_capitals_is_in_the_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr(authority.socket, "gethostname", lambda: "My-Host")
    pem = authority.prepare_tls_folder(tmp_path, CONFIG).certificate.read_bytes()
    names = authority.x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        authority.x509.SubjectAlternativeName
    )
    assert "my-host" in names.value.get_values_for_type(authority.x509.DNSName)
