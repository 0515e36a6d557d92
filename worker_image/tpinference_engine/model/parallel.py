"""The ranks' collectives. The only module that imports torch.distributed.

The process group is an object that its rank owns, never torch's process-wide default: nothing
global, so several ranks can live in one process (tests do). A group of one needs no peers and does
nothing. Collectives are called from the device queue alone, in the same order on all ranks.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tpinference_engine.errors import GroupFailed, InvalidConfig

Kind = Literal["gloo", "nccl"]
STORE_PREFIX = "tpinference"


class _Group(Protocol):
    def all_reduce(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    rank: int
    size: int
    store: tuple[str, int] | None
    address: str
    """Of this rank, as its peers reach it."""
    kind: Kind
    timeout_s: float


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Rank 0's store on a free port; it serves as long as the object lives."""
    return TCPStore(
        address,
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


class TensorParallel:
    """This rank's end of the group. Made on all ranks at once: it waits for the others."""

    def __init__(self, setup: GroupSetup) -> None:
        self.rank = setup.rank
        self.size = setup.size
        self._group = _join(setup) if setup.size > 1 else None

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold a pass. Of several ranks it has not been seen to."""
        return self.size == 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, the same bits on every rank."""
        if self._group is not None:
            self._group.all_reduce(x)
        return x

    def all_gather(self, x_RV: torch.Tensor) -> torch.Tensor:
        """The ranks' equal parts side by side along the last dimension."""
        if self._group is None:
            return x_RV
        return torch.cat(self._group.all_gather(x_RV.contiguous()), dim=-1)

    def close(self) -> None:
        """Leaves without asking the peers, who may be gone; they see a closed connection.

        A collective that waits for a dead peer ends NCCL's; gloo's ends with that peer's process.
        """
        group, self._group = self._group, None
        if group is not None:
            group.close()


class _Gloo:
    """CPU ranks exchange whole tensors, one message to each peer.

    gloo's own collectives are made of several messages and go through a thread pool: measured on
    idle cores, 0.3 to 0.45 ms for the sum of one token's hidden state over 2 ranks against 0.08.
    What it costs is bandwidth from 3 ranks on, which CPU ranks have.
    """

    def __init__(self, group: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        self._group: Any = group
        self._rank = rank
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> None:
        first, *others = self.all_gather(x)
        # In the order of ranks on all of them, so that all get the same bits.
        total = first + others[0]
        for part in others[1:]:
            total += part
        x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Past the host where `x` is on an accelerator: ranks that share one, in tests."""
        if x.device.type != "cpu":
            return [part.to(x.device) for part in self.all_gather(x.cpu())]
        parts = [x if rank == self._rank else torch.empty_like(x) for rank in range(self._size)]
        peers = [rank for rank in range(self._size) if rank != self._rank]
        works = [self._group.recv([parts[peer]], peer, 0) for peer in peers]
        works += [self._group.send([x], peer, 0) for peer in peers]
        for work in works:
            work.wait()
        return parts

    def close(self) -> None:
        self._group = None


class _Nccl:
    """On CUDA: collectives are queued, and waiting for one only orders the current stream."""

    def __init__(self, group: dist.ProcessGroupNCCL, size: int) -> None:
        self._group: Any = group
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._group.allgather([parts], [x]).wait()
        return parts

    def close(self) -> None:
        self._group.abort()


def _join(setup: GroupSetup) -> _Group:
    if setup.store is None:
        raise InvalidConfig(f"store is None, a group of {setup.size} ranks must have one")
    host, port = setup.store
    timeout = datetime.timedelta(seconds=setup.timeout_s)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        prefixed = PrefixStore(STORE_PREFIX, store)
        make = _nccl if setup.kind == "nccl" else _gloo
        return make(prefixed, setup, timeout)
    except RuntimeError as error:
        raise GroupFailed(
            f"rank {setup.rank} could not join its {setup.kind} group at {host}:{port}: {error}",
            rank=setup.rank,
        ) from error


def _gloo(store: Store, setup: GroupSetup, timeout: datetime.timedelta) -> _Group:
    # The address decides the network, since a pod's host name may resolve to another one.
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    device = (
        dist.ProcessGroupGloo.create_device(interface=named)
        if named
        else dist.ProcessGroupGloo.create_device(hostname=setup.address)
    )
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timeout
    return _Gloo(
        dist.ProcessGroupGloo(store, setup.rank, setup.size, options), setup.rank, setup.size
    )


def _nccl(store: Store, setup: GroupSetup, timeout: datetime.timedelta) -> _Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _Nccl(dist.ProcessGroupNCCL(store, setup.rank, setup.size, options), setup.size)
