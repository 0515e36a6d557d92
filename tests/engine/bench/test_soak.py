"""benchmarks/soak.py: packets meet the fates of their profile, tokens are known, growth is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from soak_benchmark.keeper import processes_beside
from soak_benchmark.link import CLEAN, CUT, PROFILES, Link, Profile, decide, is_cut
from soak_benchmark.network import Network
from soak_benchmark.parts import make_phases, steps_left
from soak_benchmark.resource_use import (
    MAX_GROWTH,
    Sample,
    find_growth,
    observe_process,
    observe_shared_memory,
)
from soak_benchmark.soak_report import describe_failure, render_growth, render_phases
from soak_benchmark.traffic import SHAPE, known_steps
from soak_benchmark.watched_run import Phase, WatchedRun

from tpinference_engine.config import EngineConfig
from tpinference_engine.runner.echo import EchoRunner
from tpinference_engine.step import decode_output, encode_input
from tpinference_engine.worker import Worker

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "soak.py"
PACKETS = [str(number).encode() for number in range(2000)]


def carry(profile: Profile, seed: int = 0, gap_s: float = 0.0001) -> list[bytes]:
    """PACKETS, sent at a steady pace, in the order in which they come out."""
    link = Link(seed)
    link.change(profile, 0.0)
    out: list[bytes] = []
    for number, packet in enumerate(PACKETS):
        link.admit(packet, number * gap_s)
        out += link.take_due(number * gap_s)
    return out + link.take_due(float("inf"))


def test_a_clean_link_gives_out_what_comes_in_at_once() -> None:
    link = Link(0)
    link.admit(b"packet", 5.0)
    assert link.next_due_s == 5.0
    assert link.take_due(5.0) == [b"packet"]
    assert link.next_due_s is None


def test_a_packet_waits_for_its_delay() -> None:
    link = Link(0)
    link.change(Profile(name="slow", delay_s=0.5), 0.0)
    link.admit(b"packet", 1.0)
    assert link.take_due(1.49) == []
    assert link.take_due(1.5) == [b"packet"]


def test_jitter_moves_packets_but_keeps_their_order() -> None:
    profile = Profile(name="jitter", delay_s=0.01, jitter_s=0.01)
    delays = {decide(profile, 0.0, Random(seed)).delay_s for seed in range(200)}
    assert len(delays) > 100 and 0.0 <= min(delays) < 0.002 and 0.018 < max(delays) <= 0.02
    assert carry(profile) == PACKETS


def test_reordering_loses_nothing_and_lets_packets_overtake() -> None:
    out = carry(Profile(name="reorder", reorder=0.1, reorder_s=0.001))
    assert sorted(out) == sorted(PACKETS)
    assert out != PACKETS


def test_loss_takes_about_its_share_and_keeps_the_order() -> None:
    out = carry(Profile(name="loss", loss=0.1))
    assert 1700 < len(out) < 1900
    assert out == sorted(out, key=PACKETS.index)


def test_the_same_seed_repeats_every_fate_and_another_does_not() -> None:
    profile = Profile(name="loss", loss=0.1, reorder=0.1, reorder_s=0.001)
    assert carry(profile, seed=1) == carry(profile, seed=1) != carry(profile, seed=2)


def test_a_cut_lasts_as_long_as_it_should_and_comes_again() -> None:
    profile = Profile(name="cut", cut_every_s=20.0, cut_after_s=3.0, cut_s=1.0)
    times = [0.0, 2.99, 3.0, 3.99, 4.0, 22.99, 23.5, 24.0]
    assert [is_cut(profile, t) for t in times] == [
        False,
        False,
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert all(is_cut(CUT, t) for t in (0.0, 0.5, 1.0, 12345.6))
    assert not is_cut(CLEAN, 3.5)


def test_a_link_counts_fates_by_profile() -> None:
    link = Link(0)
    link.admit(b"packet", 0.0)
    assert link.change(CUT, 1.0) == {"sent": 1}
    link.admit(b"packet", 1.0)
    link.admit(b"packet", 2.0)
    assert link.change(CLEAN, 3.0) == {"cut": 2}
    assert link.take_due(3.0) == [b"packet"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": 1.5}, "loss is 1.5, must be between 0 and 1"),
        ({"jitter_s": 0.1}, "jitter_s is 0.1, delay_s allows 0.0"),
    ],
)
def test_a_profile_that_can_not_be_is_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Profile(name="wrong", **fields)


def test_an_echo_returns_the_tokens_that_are_known(
    make_config: Callable[..., EngineConfig],
) -> None:
    config = make_config(
        max_num_seqs=SHAPE.batch_size,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        max_model_len=SHAPE.max_model_len,
        block_size=SHAPE.block_size,
        distributed_executor_backend="uni",
        epoch=1,
    )
    worker = Worker(config, EchoRunner)
    worker.initialize(0, 1)
    worker.allocate_cache(SHAPE.batch_size * SHAPE.blocks_per_slot)
    seen: set[tuple[int, ...]] = set()
    for known, _ in zip(known_steps(1, seed=7), range(3 * SHAPE.output_len), strict=False):
        output = decode_output(worker.step(encode_input(known.step)))
        assert output.tokens == known.tokens
        seen.add(tuple(token.token for token in known.tokens))
    # Answers differ from step to step, so one that is late would be noticed.
    assert len(seen) > 2.8 * SHAPE.output_len


def test_phases_have_every_profile_in_every_round_and_all_steps() -> None:
    phases = make_phases(PROFILES, 203, 4)
    assert [phase.profile for phase in phases] == [*PROFILES] * 4
    assert [phase.round for phase in phases][::5] == [0, 1, 2, 3]
    assert sum(phase.num_steps for phase in phases) == 203
    assert {phase.num_steps for phase in phases} == {10, 11}


@pytest.mark.parametrize(
    ("num_done", "left"), [(0, [9, 5]), (3, [6, 5]), (9, [5]), (10, [4]), (14, []), (20, [])]
)
def test_steps_left_go_on_behind_the_one_that_failed(num_done: int, left: list[int]) -> None:
    phases = [Phase(CLEAN, 10), Phase(CUT, 5)]
    assert [phase.num_steps for phase in steps_left(phases, num_done)] == left


def sample(round: int, **held: float) -> Sample:
    return Sample(round, {"driver": {what.replace("_", " "): n for what, n in held.items()}})


def test_growth_is_from_the_second_round_to_the_last() -> None:
    samples = [sample(0, fds=1), sample(1, fds=9), sample(1, fds=10), sample(1, fds=11)]
    samples += [sample(2, fds=99), sample(3, fds=13), sample(3, fds=15), sample(3, fds=14)]
    (growth,) = find_growth(samples, 3)
    assert (growth.owner, growth.what, growth.early, growth.late) == ("driver", "fds", 10, 14)
    assert growth.holds
    assert not replace(growth, late=10 + MAX_GROWTH["fds"] + 1).holds
    assert "TOO MUCH" in next(render_growth([replace(growth, late=99.0)]))


def test_too_few_rounds_show_no_growth() -> None:
    assert find_growth([sample(0, fds=1), sample(1, fds=9)], 1) == ()
    assert list(render_growth(())) == ["too few rounds to see growth"]


def test_a_process_is_seen_until_it_ends_even_if_nobody_waits_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=-1, stdout=-1)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    held = observe_process(process.pid)
    assert held["threads"] == 1 and held["fds"] >= 3 and 1 < held["memory MiB"] < 100
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert observe_process(process.pid) == {}
    process.wait()
    assert observe_process(process.pid) == {}
    process.stdout.close()


def test_shared_memory_has_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    held = observe_shared_memory(tmp_path)
    assert held["/dev/shm names"] == 1 and held["/dev/shm MiB"] > 0


def test_processes_of_a_place_are_those_in_its_network(tmp_path: Path) -> None:
    for pid, network in ((10, "net:[1]"), (11, "net:[1]"), (12, "net:[2]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "ns" / "net").symlink_to(network)
    (tmp_path / "13").mkdir()
    assert processes_beside(10, tmp_path) == [11]


class NoNetwork:
    """In place of a network: remembers what it was told."""

    def __init__(self, folder: Path) -> None:
        self.shared_memory = folder
        self.head = self.ranks = self
        self.profiles: list[str] = []

    def command(self, command: list[str]) -> list[str]:
        return command

    def change(self, profile: Profile) -> dict[str, int]:
        self.profiles.append(profile.name)
        return {"sent": 3}


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Any]:
    def run(program: str, silence_s: float = 60.0) -> Any:
        network = NoNetwork(tmp_path)
        phases = [Phase(CLEAN, 10), Phase(CUT, 10)]
        said: list[str] = []
        watched = WatchedRun(network, phases, silence_s, said.append)  # type: ignore[arg-type]
        prelude = "from soak_benchmark.driver_report import Reports\nimport os\nr = Reports()\n"
        command = [sys.executable, "-c", prelude + textwrap.dedent(program)]
        environ = {**os.environ, "PYTHONPATH": str(PROGRAM.parent)}
        return watched.run(command, environ, {}), network, said

    return run


def test_a_run_changes_the_network_before_each_phase_and_counts(watch: Callable[..., Any]) -> None:
    found, network, said = watch(
        """
        print("not an event")
        r.send("started", pids={"driver": os.getpid()})
        for number in range(2):
            r.wait_for_network(number)
            r.send("passed", number=number, steps=10, seconds=1.0, total=10 + 10 * number, wrong=0)
        r.send("ended", shutdown_s=0.5)
        """
    )
    assert found.is_good and found.num_steps == 20 and found.shutdown_s == 0.5
    assert network.profiles == ["clean", "clean", "cut for good", "cut for good", "clean"]
    assert [event["profile"] for event in found.passed] == ["clean", "cut for good"]
    assert found.samples[0].held["driver"]["threads"] >= 1
    assert "round 1, clean: 10 steps, 0 wrong tokens" in said[0]
    lines = render_phases(found.passed)
    assert lines[1].split() == ["clean", "10", "100.00", "-", "-", "-", "-", "3", "0", "0", "0"]


def test_a_driver_that_says_nothing_is_given_up(watch: Callable[..., Any]) -> None:
    found, _, _ = watch("input()", silence_s=1.0)
    assert found.failure["kind"] == "Silence"
    assert not found.is_good


def test_wrong_tokens_and_a_failed_driver_are_not_good(watch: Callable[..., Any]) -> None:
    found, _, _ = watch("r.send('progress', total=5, wrong=1); r.send('ended', shutdown_s=0.1)")
    assert found.num_wrong == 1 and not found.is_good
    found, _, _ = watch("raise SystemExit(3)")
    assert found.exit_code == 3 and not found.is_good


@pytest.mark.parametrize(
    ("kind", "message", "name"),
    [
        ("RayTaskError", "step 12 follows step 10, must be its successor", "out of order"),
        ("GroupDiverged", "step 5: rank 1 acknowledged step id 6, expected 5", "out of order"),
        ("RayChannelTimeoutError", "System error: Timed out waiting", "nothing came"),
        ("ActorDiedError", "The actor died", "ActorDiedError"),
    ],
)
def test_a_failure_of_two_calls_in_flight_has_a_name(kind: str, message: str, name: str) -> None:
    assert describe_failure({"kind": kind, "message": message}) == name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--parts model", "part model needs --model MODEL_DIR"),
        ("--parts rain", "choose from"),
        ("--parts cut --steps 0", "is '0', must be a whole number, at least 1"),
        ("--parts echo --steps 19", "must be a step or more for each phase"),
    ],
)
def test_wrong_input_is_refused(line: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *line.split()], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr


TALK = """
import socket, sys
with socket.create_server(("192.0.2.2", 5000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as peer:
        peer.sendall(peer.recv(5))
"""
ASK = """
import socket
with socket.create_connection(("192.0.2.2", 5000), timeout=30) as peer:
    peer.sendall(b"hello")
    print(peer.recv(5).decode())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="needs root and /dev/net/tun"
)
def test_two_places_talk_through_the_relay_and_leave_nothing() -> None:
    with Network(seed=0) as network:
        folder = network.head.folder.parent
        network.change(Profile(name="delay", delay_s=0.01))
        server = network.ranks.command([sys.executable, "-c", TALK])
        with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as talker:
            assert talker.stdout is not None and talker.stdout.readline() == "ready\n"
            ask = network.head.command([sys.executable, "-c", ASK])
            done = subprocess.run(ask, capture_output=True, text=True, check=True)
        assert done.stdout == "hello\n"
        assert network.change(CLEAN)["sent"] >= 8
        assert list(network.head.shared_memory.iterdir()) == []
        left = subprocess.Popen(network.head.command(["sleep", "1000"]))
        pids = [network.relay_pid, left.pid]
    assert left.wait(10) == -9
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not folder.exists()
