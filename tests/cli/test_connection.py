"""TLS and tokens from the command line."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from outrider.cli.main import main
from outrider.rpc.tls import TlsFiles
from outrider.v1 import router_pb2_grpc

WAIT_SECONDS = 60.0
TOKEN = "s3cret"


class GuardedRouter(router_pb2_grpc.RouterServiceServicer):
    """Rejects every call; the error says whether the call had the token."""

    def refuse(self, request, context):
        known = dict(context.invocation_metadata()).get("authorization") == f"Bearer {TOKEN}"
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "the token is right" if known else "no such token")

    Generate = GetModel = WatchCluster = refuse


@pytest.fixture(scope="module")
def address(certificate):
    server = grpc.server(futures.ThreadPoolExecutor(4))
    router_pb2_grpc.add_RouterServiceServicer_to_server(GuardedRouter(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", TlsFiles(certificate).server_credentials())
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(WAIT_SECONDS)


@pytest.fixture
def authority(tls_folder):
    return f"--authority={tls_folder / 'ca.pem'}"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    return path


def commands(address):
    return {
        "generate": ["generate", "Hello", f"--target={address}"],
        "chat": ["chat", f"--target={address}"],
        "bench": ["bench", "load", "--limit=1", "--concurrency=1", f"--target={address}"],
        "profile": ["profile", "--role=decode_node", f"--target={address}"],
    }


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "profile"])
def test_a_command_speaks_tls_and_shows_its_token(capsys, address, authority, token_file, command):
    arguments = [*commands(address)[command], authority]
    assert main([*arguments, f"--token-file={token_file}"]) == 1
    assert "the token is right" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "no such token" in capsys.readouterr().err


def test_a_probe_speaks_tls(capsys, address, authority):
    probe = ["probe", f"--target={address}"]
    assert main([*probe, authority]) == 0
    assert main([*probe, authority, "--server-name=localhost"]) == 0
    assert main([*probe, authority, "--server-name=elsewhere"]) == 1  # the certificate is for another name
    assert main([*probe, "--authority=system"]) == 1  # the system trusts no authority that signed it
    assert main(probe) == 1  # plaintext
    assert "cannot be reached" in capsys.readouterr().err


def test_a_token_needs_tls(capsys, address, token_file):
    assert main([*commands(address)["generate"], f"--token-file={token_file}"]) == 1
    assert "--token-file needs --tls or --authority" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "must contain exactly one token"),
        (b"two words", "must contain exactly one token"),
        (b"\xff", "is not ASCII"),
    ],
    ids=["missing", "empty", "two", "binary"],
)
def test_a_token_file_that_is_none_is_named(capsys, tmp_path, address, authority, content, message):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    assert main([*commands(address)["generate"], authority, f"--token-file={path}"]) == 1
    shown = capsys.readouterr().err
    assert str(path) in shown
    assert message in shown


def test_a_certificate_and_its_key_go_together(capsys, address, certificate):
    assert main([*commands(address)["generate"], f"--certificate={certificate.certificate}"]) == 1
    assert "--certificate and --private-key must be given together" in capsys.readouterr().err


def test_the_folder_of_up_stands_for_its_files_and_goes_with_no_other(capsys, address, tls_folder, authority):
    assert main(["probe", f"--target={address}", f"--tls={tls_folder}"]) == 0
    assert main(["probe", f"--target={address}", f"--tls={tls_folder}", authority]) == 1
    assert "omit --authority" in capsys.readouterr().err


def test_the_target_may_come_from_the_environment(monkeypatch, capsys, address, authority):
    monkeypatch.setenv("OUTRIDER_TARGET", address)
    assert main(["generate", "Hello", authority]) == 1
    assert "no such token" in capsys.readouterr().err
