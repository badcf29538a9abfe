"""Secrets as files that change as the kubelet changes them: names are links, and one rename replaces all files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.cluster.authority import Authority
from outrider.rpc.tls import TlsConfig


class MountedSecret:
    """The folder of a mounted Secret."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def set(self, files: dict[str, bytes]) -> None:
        """Replaces all files at once."""
        fresh = Path(tempfile.mkdtemp(prefix="..", dir=self.folder))
        for name, content in files.items():
            (fresh / name).write_bytes(content)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..data_new"
        link.symlink_to(fresh.name)
        link.replace(self.folder / "..data")


class Certificates:
    """The files that cert-manager keeps in the chart's Secret; `renew` issues them again, by the same authority."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """`names`: names in the certificate besides outrider-node: addresses of pods, since clients dial these here."""
        self.secret = MountedSecret(folder)
        self._names = names
        self._authority = Authority()
        self.renew()

    def renew(self) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            self._authority.write(folder)
            self._authority.issue(folder, "node", "outrider-node", *self._names)
            parts = {"tls.crt": "node.pem", "tls.key": "node-key.pem", "ca.crt": "ca.pem"}
            self.secret.set({name: (folder / file).read_bytes() for name, file in parts.items()})

    @property
    def client_tls(self) -> TlsConfig:
        """The TLS settings of a client with the same Secret."""
        folder = self.secret.folder
        return TlsConfig(certificate=folder / "tls.crt", private_key=folder / "tls.key", authority=folder / "ca.crt")


def token_line(name: str, token: str) -> bytes:
    """Returns a line of `router.token_file`."""
    return f"{name} sha256:{hashlib.sha256(token.encode()).hexdigest()}\n".encode()
