"""Kernels timed inside CUDA graphs, where a launch costs the device a microsecond and the host nothing."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP_S = 0.02


def graph_us(launch: Callable[[int, int], None], launches: int, repeats: int = 7) -> float:
    """Microseconds of launch(stream, i), for i < launches, inside one CUDA graph: the median of the replays.

    The device is busy for WARM_UP_S before: in the first milliseconds after a pause some graphs take a tenth longer.
    """
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        launch(warm.cuda_stream, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        for i in range(launches):
            launch(stream, i)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)
