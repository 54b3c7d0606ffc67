"""Where a GPU's time goes: the kernels that ran in a span of time, by torch's profiler."""

import time
from collections import Counter
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class KernelTime(NamedTuple):
    """All runs of the kernels of one name; copies have names, too."""

    name: str
    calls: int
    seconds: float


def kernel_times(seconds: float) -> list[KernelTime]:
    """Of this process, whatever thread launches them, from now on: those that take most first.

    Blocks for that time and for what it takes to read the records, 10 to 20 us each. Steps are slower meanwhile, and
    launches cost a little more as long as the process lives: the profiler is never quite detached.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        time.sleep(seconds)
    calls: Counter[str] = Counter()
    used_us: Counter[str] = Counter()
    for event in recorded.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            used_us[event.name] += event.time_range.elapsed_us()
    return [KernelTime(name, calls[name], us / 1e6) for name, us in used_us.most_common()]
