"""The connection between a rank and the engine core: each end learns of the other's."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tpinference_engine.executor.lifeline import (
    SILENCE_S,
    LifelineAddress,
    LifelineListener,
    hold_lifeline,
)

RANK = """
import sys, threading
from tpinference_engine.executor.lifeline import LifelineAddress, hold_lifeline
hold_lifeline(LifelineAddress(sys.argv[1], int(sys.argv[2]), sys.argv[3]), int(sys.argv[4]))
threading.Event().wait()
"""
DEADLINE_S = 20.0


@pytest.fixture
def listener() -> Iterator[LifelineListener]:
    listener = LifelineListener("127.0.0.1")
    yield listener
    listener.close()


def start_rank(address: LifelineAddress, rank: int) -> subprocess.Popen[bytes]:
    arguments = [address.host, str(address.port), address.token, str(rank)]
    return subprocess.Popen([sys.executable, "-c", RANK, *arguments], stderr=subprocess.PIPE)


def poll_until(listener: LifelineListener, wanted: list[int]) -> None:
    lost: list[int] = []
    end = time.monotonic() + DEADLINE_S
    while lost != wanted:
        assert time.monotonic() < end, f"lost {lost}, wanted {wanted}"
        lost += listener.poll(0.05)


def wait_for_connection(listener: LifelineListener, number: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while len(listener._rank_of) < number:
        assert time.monotonic() < end, "no rank connected"
        assert listener.poll(0.05) == []


def was_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True  # It was closed with something of ours unread.


def test_killed_rank_is_noticed(listener: LifelineListener) -> None:
    with start_rank(listener.address, 5) as rank:
        wait_for_connection(listener, 1)
        rank.kill()
        poll_until(listener, [5])


def test_rank_ends_when_the_engine_core_is_gone() -> None:
    listener = LifelineListener("127.0.0.1")
    with start_rank(listener.address, 0) as rank:
        wait_for_connection(listener, 1)
        listener.close()
        assert rank.wait(DEADLINE_S) == 75
        assert rank.stderr is not None
        assert b"the engine core is gone" in rank.stderr.read()


def test_silent_peer_is_given_up_by_the_kernel(listener: LifelineListener) -> None:
    lost = threading.Event()
    hold_lifeline(listener.address, 0, on_lost=lost.set)
    wait_for_connection(listener, 1)
    (connection,) = listener._rank_of
    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
    idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, o) for o in options)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + interval * count == SILENCE_S
    assert not lost.is_set()


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: anything-at-all\r\n\r\n", id="a stranger"),
        pytest.param(b"", id="one that says nothing"),
        pytest.param(b"\xff" * 40, id="one that speaks no text"),
    ],
)
def test_strangers_are_not_ranks(listener: LifelineListener, hello: bytes) -> None:
    address = listener.address
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
        assert listener.poll(5) == []
        assert was_closed(stranger)
    assert listener.poll(0) == []


def test_rank_of_another_group_is_not_listened_to(listener: LifelineListener) -> None:
    lost = threading.Event()
    hold_lifeline(replace(listener.address, token="0" * 32), 0, on_lost=lost.set)
    assert listener.poll(5) == []
    assert lost.wait(DEADLINE_S)
