"""helm against one cluster. Its own settings and caches are kept with the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embedded.command import flags, run
from embedded.errors import CommandFailed
from embedded.kubectl import Kubectl
from embedded.tools import ensure_tools, tool_path

TIMEOUT_S = 300.0
# What helm says of a release whose installation was interrupted; it never goes on by itself.
INTERRUPTED = "another operation (install/upgrade/rollback) is in progress"


@dataclass(frozen=True)
class Helm:
    """Installs charts from folders of this repository."""

    kubectl: Kubectl

    def install(
        self, release: str, chart: Path, namespace: str, values: Mapping[str, object] | None = None
    ) -> None:
        """Installs or upgrades. It does not wait: helm would not say why something is not ready."""
        settings = [f"--set-string={name}={value}" for name, value in (values or {}).items()]
        options = {"namespace": namespace, "create-namespace": True}
        command = ["upgrade", "--install", release, str(chart), *flags(options), *settings]
        try:
            self._run(*command)
        except CommandFailed as error:
            if INTERRUPTED not in str(error):
                raise
            self.uninstall(release, namespace)
            self._run(*command)

    def uninstall(self, release: str, namespace: str) -> None:
        options = {"namespace": namespace, "ignore-not-found": True, "wait": True}
        self._run("uninstall", release, *flags(options))

    def _run(self, *arguments: str | Path) -> str:
        ensure_tools(["helm"])
        home = self.kubectl.cache.with_name("helm")
        env = {
            "KUBECONFIG": str(self.kubectl.kubeconfig),
            "HELM_CACHE_HOME": str(home / "cache"),
            "HELM_CONFIG_HOME": str(home / "config"),
            "HELM_DATA_HOME": str(home / "data"),
        }
        return run([tool_path("helm"), *arguments], env=env, timeout_s=TIMEOUT_S)
