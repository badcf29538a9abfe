"""One cluster with mutual TLS on every connection, as `outrider up --tls` starts it."""

from __future__ import annotations

import argparse
import hashlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cli.main import main
from outrider.cli.up import add_arguments, make_cluster
from outrider.client import Client, TlsConfig
from outrider.errors import PeerLostError, UnauthenticatedError
from outrider.rpc.channels import open_sync_channel
from outrider.rpc.tls import client_credentials
from tests.conftest import START_SECONDS

WAIT_SECONDS = 60.0
ALICE, BOB = "a-long-random-token", "another-long-random-token"
PROMPT = "A prompt that is long enough to be computed by a prefill node. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("secured") / "tls"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    """The file of the router's clients: Alice may make 100 calls a minute, Bob has the common limits."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    lines = (("alice", ALICE, "rate=100"), ("bob", BOB, ""))
    path.write_text(
        "".join(f"{name} sha256:{hashlib.sha256(token.encode()).hexdigest()} {limit}\n" for name, token, limit in lines)
    )
    return path


@pytest.fixture(scope="module")
def cluster(folder, token_file, tiny_model, tmp_path_factory):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = (
        "model.num_threads=1",
        "kv_cache.memory=3MiB",
        "decode_node.draft_rows=all",
        "server.drain_seconds=60",
    )
    arguments = parser.parse_args(
        [
            *(f"--tls={folder}", f"--token-hashes={token_file}", f"--model={tiny_model}", "--port=0"),
            f"--log-dir={tmp_path_factory.mktemp('secured-logs')}",
            *(f"--set={setting}" for setting in settings),
        ]
    )
    with make_cluster(arguments, tls=arguments.tls) as cluster:
        cluster.wait_serving(START_SECONDS)
        yield cluster
    assert set(cluster.exit_statuses.values()) == {0}, cluster.exit_statuses


@pytest.fixture(scope="module")
def tls(folder):
    return TlsConfig(
        authority=folder / "ca.pem", certificate=folder / "client.pem", private_key=folder / "client-key.pem"
    )


def test_kv_and_drafts_travel_by_tls(cluster, tls):
    with Client(cluster.router_address, tls=tls, token=ALICE) as client:
        summary = client.complete(PROMPT, temperature=0.0, max_tokens=24).summary
        statuses = client.watch_cluster()
        assert {node.state.name for node in next(statuses).nodes} == {"SERVING"}
        statuses.close()
    assert summary.metrics.kv_transfer.bytes > 0
    assert summary.metrics.speculation.num_draft_tokens > 0
    log = cluster.node("decode-0").log_path.read_text(encoding="utf-8")
    assert "draft node connected" in log


def test_no_port_answers_without_a_certificate(cluster, folder):
    for stranger in (None, TlsConfig(authority=folder / "ca.pem")):
        with Client(cluster.router_address, tls=stranger) as client, pytest.raises(PeerLostError):
            client.model()
        for node in cluster.nodes:
            credentials = client_credentials(stranger, None)
            with open_sync_channel(node.address, credentials=credentials) as channel:
                with pytest.raises(grpc.RpcError) as refused:
                    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, node.name


def test_a_client_opens_no_work_on_nodes(cluster, tls):
    """The client's certificate is from the same authority as the nodes', so the handshake succeeds."""
    methods = {
        "decode-0": "/outrider.v1.DecodeService/Session",
        "prefill-0": "/outrider.v1.PrefillService/Prefill",
        "draft-0": "/outrider.v1.DraftService/Draft",
    }
    for name, method in methods.items():
        with open_sync_channel(cluster.node(name).address, credentials=client_credentials(tls, None)) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                next(channel.stream_stream(method)(iter([b""]), timeout=WAIT_SECONDS))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, name
            assert "outrider-node; yours has outrider-operator" in refused.value.details()


def test_tokens_are_asked_for_and_keep_tenants_apart(cluster, tls):
    for token in (None, "guessed"):
        with Client(cluster.router_address, tls=tls, token=token) as stranger, pytest.raises(UnauthenticatedError):
            stranger.complete(PROMPT, max_tokens=1)
    prompt = "A secret that only one of the two tenants has ever asked about, long enough for some blocks. " * 2
    cached = {}
    with (
        Client(cluster.router_address, tls=tls, token=ALICE) as alice,
        Client(cluster.router_address, tls=tls, token=BOB) as bob,
    ):
        for name, client in (("first", alice), ("other", bob), ("again", alice)):
            result = client.complete(prompt, temperature=0.0, max_tokens=4)
            cached[name] = result.summary.usage.num_cached_tokens
    assert cached["first"] == cached["other"] == 0
    assert cached["again"] > 0


def test_operators_probe_and_profile_nodes(cluster, folder, tls, capsys):
    flags = [f"--authority={tls.authority}", f"--certificate={tls.certificate}", f"--private-key={tls.private_key}"]
    for node in cluster.nodes:
        assert main(["probe", f"--target={node.address}", *flags]) == 0
    # An idle node has no steps, which gives status 1. The test checks that the node was reached.
    decode = f"--node={cluster.node('decode-0').address}"
    assert main(["profile", decode, "--seconds=0.1", "--server-name=outrider-node", *flags]) == 1
    assert ": 0 steps, " in capsys.readouterr().out
