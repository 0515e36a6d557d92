"""How the kernels follow one another on the device, and what is known of it. No tensor, no model.

Programmatic dependent launch lets a kernel's programs start while its predecessor ends. The rule
that keeps it right, for every kernel of this package and every path through it: nothing that a
kernel of the same pass wrote is read, and nothing is written, before `gdc_wait`; and no program
ends without having waited, or its successors would believe that everything before it is done. What
was there before the pass (weights, block tables, positions, the cache of earlier steps) may be read
at once: a pass begins with plain kernels of torch, which start when all before them is done.
"""

from __future__ import annotations

import functools

import torch

PDL_CAPABILITY = (9, 0)
INTERPRETED_MULTIPROCESSORS = 16
"""Triton's interpreter has none; with some, it takes the paths of a real one."""


@functools.cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest one that is not below `number` nor `least`."""
    return max(least, 1 << max(0, number - 1).bit_length())
