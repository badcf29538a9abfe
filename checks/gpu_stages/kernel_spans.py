"""The times at which a GPU computed, according to torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def kernel_spans(step: Callable[[], object], num_steps: int) -> list[tuple[float, float, str]]:
    """Returns the start and end in microseconds, and the name, of each kernel and copy of `num_steps` steps."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps):
            step()
    return [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def busy_and_pauses(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Returns the total time in which any kernel ran, and the pauses. `spans` are (start, end) and may overlap."""
    busy, pauses, until = 0.0, [], float("-inf")
    for start, end in sorted(spans):
        if start > until > float("-inf"):
            pauses.append(start - until)
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy, pauses
