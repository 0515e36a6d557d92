"""Where kernels are tested: on an accelerator, or with Triton's interpreter on the CPU.

`TRITON_INTERPRET=1 pytest -m gpu tests/engine/kernels` needs Triton and no accelerator; it is slow
and sees neither races nor the order of kernels.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> torch.device:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("needs an accelerator")
    return torch.device("cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(7)
