"""settings.py: flags over environment over defaults; a bad value names its field."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tpinference_operator.settings import OPTIONS, InvalidSetting, field_names, read_settings


def test_defaults_are_complete_and_usable() -> None:
    settings = read_settings([], {})
    assert (settings.namespaces, settings.port, settings.workers) == ((), 8080, 4)
    assert settings.lease_times.renew_deadline_s == 7.0
    assert settings.identity


def test_every_setting_has_one_option() -> None:
    assert [option.field for option in OPTIONS] == list(dict.fromkeys(o.field for o in OPTIONS))
    assert set(field_names()) == {option.field for option in OPTIONS}


def test_a_flag_beats_a_variable_and_a_variable_the_default() -> None:
    environment = {"TPINFERENCE_OPERATOR_PORT": "9000", "TPINFERENCE_OPERATOR_WORKERS": "8"}
    settings = read_settings(["--port", "9001"], environment)
    assert (settings.port, settings.workers) == (9001, 8)


def test_namespaces_are_a_list_without_doubles() -> None:
    assert read_settings(["--namespaces", "a, b,a"], {}).namespaces == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--port", "0"], {}, r"port \(--port\): '0': allowed is a whole number from 1 to 65535"),
        ([], {"TPINFERENCE_OPERATOR_WORKERS": "x"}, r"workers \(TPINFERENCE_OPERATOR_WORKERS\)"),
        (["--namespaces", "Bad_Name"], {}, r"namespaces \(--namespaces\): 'Bad_Name'"),
        (["--resync-seconds", "-1"], {}, "resync_seconds .*'-1': allowed is a number of seconds"),
        (["--log-level", "loud"], {}, "log_level .*'loud': allowed are debug, info"),
        (["--follow-proxy-env", "maybe"], {}, "follow_proxy_env .*'maybe'"),
        (["--lease-duration-seconds", "5"], {}, "lease times: duration 5.0"),
    ],
)
def test_a_bad_value_names_field_source_value_and_what_is_allowed(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        read_settings(arguments, environment)


def test_help_names_every_flag_and_a_bad_setting_ends_the_program_with_one_line() -> None:
    command = [sys.executable, "-m", "tpinference_operator"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert all(option.flag in shown.stdout for option in OPTIONS)
    failed = subprocess.run([*command, "--port=x"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == (
        "tpinference-operator: port (--port): 'x': allowed is a whole number from 1 to 65535\n"
    )
