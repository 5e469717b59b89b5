"""Steady full load until temperature settles: what clock, power and temperature a device comes to, and its cooling.

Thermal resistance = (core - inlet) / power, in degC/W: it depends on neither load nor room, so that a heat sink that
lost contact or a dead fan shows against the other boards of its slot and model. It needs an inlet sensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.gemm import CPU_SIZE, SIZE, product

LOOK_S = 1.0
IN_A_ROW = 8  # products of 8192: about 10 ms of a large GPU
UNDER_LOOK = 64  # queued while the sensors are read
SETTLED_S = 15.0  # without a change beyond SETTLED_C
SETTLED_C = 1.0
UNITS = {"sm_clock_mhz": "MHz", "power_w": "W", "gpu_temp_c": "degC"}

Sensors = Callable[[Device], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class SoakSample:
    at_s: float
    values: Mapping[str, float]


def run(context: Context, name: str, sensors: Sensors | None = None) -> Iterator[Result]:
    """All devices at once: a node's devices warm each other, as they do in use."""
    read = sensors or nvml
    calls = {
        device: product(
            context.torch,
            device,
            "bf16" if device.is_cuda else "fp32",
            SIZE if device.is_cuda else CPU_SIZE,
            context.seed,
        )
        for device in context.devices
    }
    looks: dict[Device, list[SoakSample]] = {device: [] for device in context.devices}
    began = time.monotonic()
    while True:
        _load(context, calls)
        at_s = time.monotonic() - began
        _queue(calls, UNDER_LOOK)  # power falls as soon as there is nothing to do
        for device, seen in looks.items():
            if values := read(device):
                seen.append(SoakSample(at_s, values))
        context.show_progress(f"soak: {at_s:.0f} s")
        if at_s >= context.seconds or (all(looks.values()) and all(settled(seen) for seen in looks.values())):
            break
    for device, seen in looks.items():
        yield from _results(context, name, device, seen)


def settled(seen: list[SoakSample]) -> bool:
    """Whether the temperature has not moved for SETTLED_S."""
    last_s = seen[-1].at_s
    temps = [
        look.values["gpu_temp_c"] for look in seen if look.at_s >= last_s - SETTLED_S and "gpu_temp_c" in look.values
    ]
    return last_s >= 2 * SETTLED_S and len(temps) >= 3 and max(temps) - min(temps) <= SETTLED_C


def _load(context: Context, calls: Mapping[Device, Callable[[], Any]]) -> None:
    """About LOOK_S of products on every device."""
    until = time.monotonic() + LOOK_S
    while time.monotonic() < until:
        if context.stopping():
            raise InterruptedError("asked to stop")
        _queue(calls, IN_A_ROW)
        for device in calls:
            if device.is_cuda:
                context.torch.cuda.synchronize(device.name)


def _queue(calls: Mapping[Device, Callable[[], Any]], count: int) -> None:
    """On a GPU without waiting for it."""
    for device, call in calls.items():
        for _ in range(count if device.is_cuda else 1):
            call()


def _results(context: Context, name: str, device: Device, seen: list[SoakSample]) -> Iterator[Result]:
    last_s = seen[-1].at_s if seen else 0.0
    end = [look.values for look in seen if look.at_s >= last_s - SETTLED_S]
    means = {k: sum(v[k] for v in end) / len(end) for k in UNITS if end and all(k in v for v in end)}
    rests = "" if seen and settled(seen) else "; not settled yet"
    for metric, unit in UNITS.items():
        if metric in means:
            yield Result(f"{name}_{metric}", device.slot, means[metric], unit, f"after {last_s:.0f} s of load{rests}")
    power, temp = means.get("power_w"), means.get("gpu_temp_c")
    if power is None or temp is None:
        yield Result(name, device.slot, None, "degC/W", "no sensors of power and temperature on this device")
    elif context.inlet_c is None:
        yield Result(name, device.slot, None, "degC/W", "no inlet temperature is known")
    else:
        value = (temp - context.inlet_c) / power
        yield Result(name, device.slot, value, "degC/W", f"inlet {context.inlet_c:g} degC{rests}")


def nvml(device: Device) -> dict[str, float]:
    """What the driver's sensors say; empty for what is no NVIDIA GPU."""
    if device.slot is None or not device.is_cuda:
        return {}
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(device.slot)
        return {
            "sm_clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temp_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        }
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()
