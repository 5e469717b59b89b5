"""On the cores next to a GPU: across the link between two sockets, copies from and to the host are slower.

A process that is not bound lands on either socket by chance, so that half of a node's GPUs would read less, others in
each run. nvbandwidth binds itself the same way (nvmlDeviceSetCpuAffinity). Memory that is pinned meanwhile is near too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drover_agent.probes.base import Device

SYS = Path("/sys")


@contextlib.contextmanager
def near(device: Device, sys: Path = SYS) -> Iterator[bool]:
    """This thread on the device's cores, where they are known and it may run there; whether it is."""
    before = os.sched_getaffinity(0)
    cores = cores_of(device, sys) & before
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield bool(cores)
    finally:
        os.sched_setaffinity(0, before)


def cores_of(device: Device, sys: Path = SYS) -> set[int]:
    """By sysfs, of the address that NVML gives of the slot; none for a CPU, and where it is not known."""
    if not device.is_cuda or device.slot is None:
        return set()
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            address: Any = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(device.slot)).busId
        finally:
            pynvml.nvmlShutdown()
        text = address if isinstance(address, str) else address.decode()
        # NVML writes eight digits of the domain, sysfs four: 00000000:1B:00.0 and 0000:1b:00.0
        return cpu_list((sys / "bus/pci/devices" / text.lower()[-12:] / "local_cpulist").read_text("ascii"))
    except (pynvml.NVMLError, OSError, ValueError):
        return set()


def cpu_list(text: str) -> set[int]:
    """ "0-3,8": {0, 1, 2, 3, 8}.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
