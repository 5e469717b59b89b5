"""The real process of probes with one thing broken: `python probe_faults.py FAULT FILE`, in place of its module.

FAULT: flip (device 1 turns one bit of one of a million products, once), hang (a product never comes), oom (the kernel
takes its memory away: a cgroup's limit where FILE names one, to be made by the test), job (writes FILE once it
computes, and goes on for long). Devices are numbered CPUs; all else is as on a node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drover_agent.probes import child, gemm, sdc
from drover_agent.probes.base import Device

MILLION = 1024  # a matrix of 1024 x 1024 products of rows and columns


def flip(file: Path) -> None:
    made = 0

    def make(torch: Any, device: Device, kind: str, size: int, seed: int) -> Callable[[], Any]:
        right = gemm.product(torch, device, kind, size, seed)

        def multiply() -> Any:
            nonlocal made
            found = right()
            made += device.slot == 1
            if device.slot == 1 and made == 2:
                found = found.clone()
                sdc.bits(torch, found).view(-1)[777_777] ^= 1 << 12
            return found

        return multiply

    sdc.KINDS, sdc.CPU_SIZES = ("fp32",), (MILLION,)
    run = sdc.run
    sdc.run = lambda context, name: run(context, name, make)


def hang(file: Path) -> None:
    def product(*_: object) -> Callable[[], Any]:
        return lambda: time.sleep(1e6)

    gemm.product = product


def oom(file: Path) -> None:
    (file / "cgroup.procs").write_text(str(os.getpid()))
    eaten: list[bytearray] = []

    def product(*_: object) -> Callable[[], Any]:
        while True:
            eaten.append(bytearray(os.urandom(1 << 20)) * 16)

    gemm.product = product


def job(file: Path) -> None:
    right = gemm.product

    def product(*args: Any) -> Callable[[], Any]:
        call = right(*args)
        file.write_text(str(os.getpid()))
        return call

    gemm.product = product


if __name__ == "__main__":
    {"flip": flip, "hang": hang, "oom": oom, "job": job}[sys.argv[1]](Path(sys.argv[2]))
    sys.exit(child.main())
