"""The operator's settings: flags, else environment, else defaults; read here and nowhere else.

Every setting is a flag `--name` and a variable TPINFERENCE_OPERATOR_NAME. A bad value names both,
what was given and what is allowed.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tpinference_operator.lease import LeaseTimes

ENV_PREFIX = "TPINFERENCE_OPERATOR_"
POD_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

NAMESPACE_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LOG_LEVELS = ("debug", "info", "warning", "error")

Parse = Callable[[str], Any]


class InvalidSetting(ValueError):
    """A flag or a variable that can't be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may differ between two installations of one version."""

    default_engine_image: str
    default_ray_version: str
    namespaces: tuple[str, ...]
    """Empty = all namespaces."""
    lease_namespace: str
    lease_name: str
    lease_duration_seconds: float
    lease_renew_deadline_seconds: float
    lease_retry_seconds: float
    identity: str
    resync_seconds: float
    workers: int
    api_timeout_seconds: float
    discovery_seconds: float
    engine_status_seconds: float
    engine_timeout_seconds: float
    bind_address: str
    port: int
    log_level: str
    follow_proxy_env: bool

    @property
    def lease_times(self) -> LeaseTimes:
        return LeaseTimes(
            duration_s=self.lease_duration_seconds,
            renew_deadline_s=self.lease_renew_deadline_seconds,
            retry_s=self.lease_retry_seconds,
        )


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: how it is read, what it defaults to, what --help says."""

    field: str
    default: str
    parse: Parse
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.field.upper()


def _text(text: str) -> str:
    return text.strip()


def _name(text: str) -> str:
    if not NAMESPACE_PATTERN.fullmatch(text):
        raise ValueError("allowed are lower case letters, digits and '-', at most 63")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_name(part.strip()) for part in text.split(",") if part.strip()))


def _seconds(text: str) -> float:
    seconds = float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0
    if not 0.05 <= seconds <= 86400:
        raise ValueError("allowed is a number of seconds from 0.05 to 86400")
    return seconds


def _whole(low: int, high: int) -> Parse:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"allowed is a whole number from {low} to {high}")
        return int(text)

    return parse


def _level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"allowed are {', '.join(LOG_LEVELS)}")
    return text.lower()


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("allowed are true and false")
    return text.lower() == "true"


def own_namespace() -> str:
    """Where this pod runs; `default` outside of a cluster."""
    try:
        return POD_NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


def own_identity() -> str:
    """Unique to this process: a restarted pod is another holder of the Lease."""
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


OPTIONS = (
    Option(
        "default_engine_image", "", _text, "image of engines whose spec names none; empty: all must"
    ),
    Option("default_ray_version", "2.60.0", _text, "Ray version inside the default engine image"),
    Option("namespaces", "", _names, "namespaces to watch, comma-separated; empty: all of them"),
    Option("lease_namespace", "", _text, "namespace of the Lease; empty: this pod's own"),
    Option("lease_name", "tpinference-operator", _name, "name of the Lease"),
    Option("lease_duration_seconds", "10", _seconds, "after which another replica takes over"),
    Option("lease_renew_deadline_seconds", "7", _seconds, "after which the holder ends itself"),
    Option("lease_retry_seconds", "2", _seconds, "between two renewals"),
    Option("identity", "", _text, "holder of the Lease; empty: host name and a random suffix"),
    Option("resync_seconds", "300", _seconds, "between two looks at everything, from memory"),
    Option("workers", "4", _whole(1, 64), "TPInferences worked on at the same time"),
    Option("api_timeout_seconds", "10", _seconds, "longest wait for the API server's answer"),
    Option("discovery_seconds", "5", _seconds, "between two looks at which CRDs are served"),
    Option("engine_status_seconds", "15", _seconds, "between two looks at an engine's status"),
    Option("engine_timeout_seconds", "2", _seconds, "longest wait for an engine's answer"),
    Option("bind_address", "0.0.0.0", _text, "address of /livez, /readyz and /metrics"),
    Option("port", "8080", _whole(1, 65535), "port of /livez, /readyz and /metrics"),
    Option("log_level", "info", _level, f"one of {', '.join(LOG_LEVELS)}"),
    Option("follow_proxy_env", "false", _switch, "reach the API server through HTTPS_PROXY"),
)


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Raises InvalidSetting. `--help` and unknown flags end the process, as argparse does."""
    given = vars(_parser().parse_args(arguments))
    values = {option.field: _read(option, given[option.field], environment) for option in OPTIONS}
    values["lease_namespace"] = values["lease_namespace"] or own_namespace()
    values["identity"] = values["identity"] or own_identity()
    settings = Settings(**values)
    try:
        _ = settings.lease_times
    except ValueError as error:
        raise InvalidSetting(str(error)) from error
    return settings


def read_process_settings(arguments: Sequence[str]) -> Settings:
    return read_settings(arguments, os.environ)


def _read(option: Option, flag: str | None, environment: Mapping[str, str]) -> Any:
    text, source = option.default, "the default"
    if option.variable in environment:
        text, source = environment[option.variable], option.variable
    if flag is not None:
        text, source = flag, option.flag
    try:
        return option.parse(text)
    except ValueError as error:
        raise InvalidSetting(f"{option.field} ({source}): {text!r}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpinference-operator",
        description="Turns TPInference objects into RayClusters and Services. "
        "Each flag can be given as a variable instead: --port is TPINFERENCE_OPERATOR_PORT.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        default = f" (default: {option.default})" if option.default else ""
        parser.add_argument(option.flag, help=option.help + default, metavar="VALUE")
    return parser


def field_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Settings))
