from __future__ import annotations

import shutil
import subprocess

import pytest

from outrider.client import Client
from outrider.cluster import ClusterConfig

START_SECONDS = 60.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("node-tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=node"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return certificate, key


def test_a_router_reaches_its_nodes_over_tls_and_kv_is_pushed_in_plaintext(start_cluster, certificate):
    path, key = certificate
    nodes = ("prefill_node", "decode_node")
    overrides = [f"router.node_tls.authority={path}"]
    overrides += [f"{node}.server.tls.certificate={path}" for node in nodes]
    overrides += [f"{node}.server.tls.private_key={key}" for node in nodes]
    with start_cluster(ClusterConfig(port=0, draft="none"), *overrides) as cluster:
        cluster.wait_serving(START_SECONDS)
        with Client(cluster.router_address) as client:
            prompt = "A prompt that is long enough to be computed by a prefill node. " * 4
            result = client.complete(prompt, temperature=0.0, max_tokens=4)
    assert result.summary.metrics.kv_transfer.bytes > 0
    assert len(result.completions[0].token_ids) > 0
