"""Builds the cluster's programs from their Go modules, once a version, into the cache.

Each module under tests/kubernetes/tools pins its programs by go.mod and go.sum; the folder of what
was built is keyed by these two, so another version never meets an old program.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from embedded.command import run
from embedded.errors import ToolError
from embedded.lock import locked
from embedded.places import TOOL_MODULES, cache_dir
from embedded.progress import step

BUILD_TIMEOUT_S = 3600.0
MODULE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Module:
    """One folder under tests/kubernetes/tools."""

    name: str
    # The upstream module that the folder's go.mod pins; None if the programs are our own.
    upstream: str | None
    # Folders of the upstream module that are needed at run time, copied beside the programs.
    data: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        return TOOL_MODULES / self.name

    @property
    def built(self) -> Path:
        digest = hashlib.sha256()
        for path in sorted(self.source.rglob("*")):
            if path.suffix in (".go", ".mod", ".sum"):
                digest.update(path.relative_to(self.source).as_posix().encode() + b"\0")
                digest.update(path.read_bytes() + b"\0")
        return cache_dir() / "tools" / f"{self.name}-{digest.hexdigest()[:16]}"

    def data_dir(self, name: str) -> Path:
        return self.built / "data" / name


@dataclass(frozen=True)
class Tool:
    """One program."""

    name: str
    module: Module
    package: str
    linker_flags: str = "-s -w"

    @property
    def path(self) -> Path:
        return self.module.built / "bin" / self.name


# Without these a program built outside its own repository says that it is version v0.0.0.
_KUBERNETES_VERSION = "-s -w " + " ".join(
    f"-X {package}.{name}={value}"
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name, value in (("gitVersion", "v1.34.4"), ("gitMajor", "1"), ("gitMinor", "34"))
)

ETCD = Module("etcd", "go.etcd.io/etcd/server/v3")
KUBERNETES = Module("kubernetes", "k8s.io/kubernetes")
KUBERAY = Module(
    "kuberay",
    "github.com/ray-project/kuberay/ray-operator",
    data=("config",),
)
KWOK = Module(
    "kwok",
    "sigs.k8s.io/kwok",
    data=(
        "kustomize/stage/node/fast",
        "kustomize/stage/node/heartbeat-with-lease",
        "kustomize/stage/pod/fast",
    ),
)
HELM = Module("helm", "helm.sh/helm/v3")
NODE = Module("node", None)

CONTROL_PLANE_TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_TOOLS = ("kubelet", "kube-proxy", "coredns", "pause")

TOOLS = {
    tool.name: tool
    for tool in (
        Tool("etcd", ETCD, "go.etcd.io/etcd/server/v3"),
        *(
            Tool(name, KUBERNETES, f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_VERSION)
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubectl",
                "kubelet",
                "kube-proxy",
            )
        ),
        Tool("kuberay-operator", KUBERAY, "github.com/ray-project/kuberay/ray-operator"),
        Tool("kwok", KWOK, "sigs.k8s.io/kwok/cmd/kwok"),
        Tool("helm", HELM, "helm.sh/helm/v3/cmd/helm"),
        Tool("coredns", NODE, "./coredns"),
        Tool("pause", NODE, "./pause"),
    )
}


def missing_reason(names: Iterable[str]) -> str | None:
    """Why these programs can be neither found nor built here; None if they can."""
    if all(TOOLS[name].path.exists() for name in names) or shutil.which("go"):
        return None
    return "Go is not installed, so the cluster's programs can't be built"


def ensure_tools(names: Iterable[str] = tuple(TOOLS)) -> None:
    """Builds what is missing. Two runs at once wait for each other."""
    wanted = [TOOLS[name] for name in names]
    if all(tool.path.exists() and _has_data(tool.module) for tool in wanted):
        return
    with locked(cache_dir() / "tools"):
        for tool in wanted:
            if not _has_data(tool.module):
                with step(f"copy the manifests of {tool.module.name}"):
                    _copy_data(tool.module)
            if not tool.path.exists():
                with step(f"build {tool.name}"):
                    _build(tool)


def tool_path(name: str) -> Path:
    """The program's file, which `ensure_tools` has made."""
    return TOOLS[name].path


def _has_data(module: Module) -> bool:
    return all(module.data_dir(name).is_dir() for name in module.data)


def _build(tool: Tool) -> None:
    tool.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = tool.path.with_name(f".{tool.name}.unfinished")
    # -mod=readonly: the pinned go.sum decides, and a build never edits it.
    argv = ["build", "-mod=readonly", "-trimpath", "-buildvcs=false"]
    argv += ["-ldflags", tool.linker_flags, "-o", str(unfinished), tool.package]
    _run_go(tool.module, argv, BUILD_TIMEOUT_S)
    unfinished.rename(tool.path)


def _copy_data(module: Module) -> None:
    if module.upstream is None:
        raise ToolError(f"{module.name} names data but no upstream module")
    _run_go(module, ["mod", "download", module.upstream], MODULE_TIMEOUT_S)
    listed = _run_go(module, ["list", "-m", "-f", "{{.Dir}}", module.upstream], MODULE_TIMEOUT_S)
    for name in module.data:
        target = module.data_dir(name)
        unfinished = target.with_name(f".{target.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(Path(listed.strip()) / name, unfinished, copy_function=shutil.copyfile)
        _make_writable(unfinished)
        unfinished.rename(target)


def _make_writable(folder: Path) -> None:
    """Go's module cache is read-only, and a copied folder would be so too."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _run_go(module: Module, argv: list[str], timeout_s: float) -> str:
    if shutil.which("go") is None:
        raise ToolError("Go is not installed: it builds the programs of the embedded cluster")
    # GOFLAGS of the machine stay, GOWORK does not: each folder is a module of its own.
    env = {"CGO_ENABLED": "0", "GOWORK": "off", "GOTOOLCHAIN": "local"}
    return run(["nice", "go", *argv], cwd=module.source, env=env, timeout_s=timeout_s)
