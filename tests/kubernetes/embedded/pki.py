"""Makes a cluster's certificates, tokens and kubeconfig files, all of them new each time."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from embedded.command import run

VALID_DAYS = "30"
SERVER_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True)
class Identity:
    """Who a program is to the API server."""

    file_name: str
    user: str
    groups: tuple[str, ...] = ()


ADMIN = Identity("admin", "kubernetes-admin", ("system:masters",))
CONTROLLER_MANAGER = Identity("controller-manager", "system:kube-controller-manager")
SCHEDULER = Identity("scheduler", "system:kube-scheduler")
PROXY = Identity("proxy", "system:kube-proxy", ("system:node-proxier",))


def node_identity(name: str) -> Identity:
    return Identity(f"node-{name}", f"system:node:{name}", ("system:nodes",))


@dataclass(frozen=True)
class Pki:
    """The files of one cluster, in one folder."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def tokens_file(self) -> Path:
        return self.folder / "tokens.csv"

    @property
    def service_account_key(self) -> Path:
        return self.folder / "service-account.key"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def kubeconfig(self, identity: Identity) -> Path:
        return self.folder / f"{identity.file_name}.kubeconfig"

    def token(self, identity: Identity) -> str:
        document = json.loads(self.kubeconfig(identity).read_text())
        return str(document["users"][0]["user"]["token"])


def make_pki(
    folder: Path, *, url: str, addresses: tuple[str, ...], identities: tuple[Identity, ...]
) -> Pki:
    """Everything that the control plane and its clients need to know each other by."""
    pki = Pki(folder)
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    _make_key(pki.key("ca"))
    run(
        ("openssl", "req", "-x509", "-new", "-key", pki.key("ca"), "-out", pki.ca_file)
        + ("-subj", "/CN=embedded-ca", "-days", VALID_DAYS)
    )
    _make_key(pki.service_account_key)
    sign(pki, "apiserver", "/CN=kube-apiserver", addresses)
    sign(pki, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", addresses)
    rows = []
    for identity in identities:
        token = secrets.token_hex(16)
        groups = ",".join(identity.groups)
        rows.append(f'{token},{identity.user},{identity.user},"{groups}"\n')
        _write_kubeconfig(pki, identity, url, token)
    pki.tokens_file.write_text("".join(rows))
    return pki


def sign(pki: Pki, name: str, subject: str, addresses: tuple[str, ...]) -> None:
    """A certificate for servers and clients, valid for the cluster's names and these addresses."""
    request, extensions = pki.folder / f"{name}.csr", pki.folder / f"{name}.ext"
    _make_key(pki.key(name))
    run(["openssl", "req", "-new", "-key", pki.key(name), "-out", request, "-subj", subject])
    names = [f"DNS:{server}" for server in SERVER_NAMES]
    names += [f"IP:{address}" for address in addresses]
    extensions.write_text(
        f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    run(
        ("openssl", "x509", "-req", "-in", request, "-out", pki.certificate(name))
        + ("-CA", pki.ca_file, "-CAkey", pki.key("ca"), "-CAcreateserial")
        + ("-days", VALID_DAYS, "-extfile", extensions)
    )


def _make_key(path: Path) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path])


def _write_kubeconfig(pki: Pki, identity: Identity, url: str, token: str) -> None:
    cluster = {"server": url, "certificate-authority": str(pki.ca_file)}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "embedded", "cluster": cluster}],
        "users": [{"name": identity.user, "user": {"token": token}}],
        "contexts": [
            {"name": "embedded", "context": {"cluster": "embedded", "user": identity.user}}
        ],
        "current-context": "embedded",
    }
    # JSON is YAML, and needs no library.
    path = pki.kubeconfig(identity)
    path.write_text(json.dumps(document, indent=2) + "\n")
    path.chmod(0o600)
