"""What benchmarks share."""

import statistics
import time


def best(run, repeat):
    """The shortest of `repeat` runs and their median, in seconds; one more at the start touches memory for the first time."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)
