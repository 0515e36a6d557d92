"""Offers the cached model directory to pods as a PersistentVolumeClaim on this machine's disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from embedded.errors import CommandFailed
from embedded.kubectl import Kubectl
from embedded.places import REPOSITORY

SIZE = "10Gi"


def make_model() -> Path:
    """The model's directory. Its maker says what it is doing, so its words are let through."""
    program = REPOSITORY / "tests" / "models" / "smollm2.py"
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"{program.name} ended with {done.returncode}")
    return Path(done.stdout.strip())


def offer(kubectl: Kubectl, folder: Path, *, claim: str, namespace: str) -> None:
    """A claim whose content is `folder`."""
    volume = f"{namespace}-{claim}"
    if kubectl.get("pv", volume).get("status", {}).get("phase") == "Released":
        # It remembers a claim that is gone, perhaps with its namespace, and binds to no other.
        kubectl("delete", "pv", volume)
    kubectl.apply(*render(folder, claim=claim, namespace=namespace))
    kubectl(
        *("wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{claim}"),
        *("-n", namespace, "--timeout=60s"),
    )


def withdraw(kubectl: Kubectl, *, claim: str, namespace: str) -> None:
    kubectl("delete", "pvc", claim, "-n", namespace, "--ignore-not-found")
    kubectl("delete", "pv", f"{namespace}-{claim}", "--ignore-not-found")


def render(folder: Path, *, claim: str, namespace: str) -> list[dict[str, Any]]:
    volume_name = f"{namespace}-{claim}"
    common = {
        "accessModes": ["ReadWriteMany"],
        # No class: the claim is bound to this one volume and to no other.
        "storageClassName": "",
    }
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name},
        "spec": {
            **common,
            "capacity": {"storage": SIZE},
            "hostPath": {"path": str(folder), "type": "Directory"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"name": claim, "namespace": namespace},
        },
    }
    claimed = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": claim, "namespace": namespace},
        "spec": {
            **common,
            "volumeName": volume_name,
            "resources": {"requests": {"storage": SIZE}},
        },
    }
    return [volume, claimed]
