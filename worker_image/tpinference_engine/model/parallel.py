"""The ranks' collectives. The only module that imports torch.distributed.

The process group is an object that its rank owns, never torch's process-wide default: nothing
global, so several ranks can live in one process (tests do). A group of one needs no peers and does
nothing. Collectives are called from the device queue alone, in the same order on all ranks.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

from tpinference_engine.errors import GroupFailed, InvalidConfig

Kind = Literal["gloo", "nccl"]
STORE_PREFIX = "tpinference"


class _Group(Protocol):
    """What gloo's and NCCL's process groups have in common."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work: ...

    def abort(self) -> None: ...


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

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, the same bits on every rank."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x_RV: torch.Tensor) -> torch.Tensor:
        """The ranks' equal parts side by side along the last dimension."""
        if self._group is None:
            return x_RV
        parts = [torch.empty_like(x_RV) for _ in range(self.size)]
        self._group.allgather([parts], [x_RV.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        """Leaves without asking the peers, who may be gone; they see a closed connection.

        A collective that waits for a dead peer ends NCCL's; gloo's ends with that peer's process.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()


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
    # One thread runs the collectives; more would let two of them overtake each other.
    options._threads = 1
    return cast(_Group, dist.ProcessGroupGloo(store, setup.rank, setup.size, options))


def _nccl(store: Store, setup: GroupSetup, timeout: datetime.timedelta) -> _Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(_Group, dist.ProcessGroupNCCL(store, setup.rank, setup.size, options))
