"""Compute power, clock and heat of G GPUs over time.

power = static(temperature) + dynamic * activity * g(clock),  g(x) = x * v(x)^2  with the voltage v falling with x
clock = the highest that keeps power under the limit and the core under its operating temperature
core  -> inlet + resistance * power, exponentially with time constant resistance * heat capacity (exact for any dt)
HBM   -> core + a few degrees by its own traffic
"""

from __future__ import annotations

import numpy as np

from drover_simulator.hardware import (
    Bools,
    Floats,
    Hardware,
    Ints,
)
from drover_simulator.modifiers import Modifiers

# Bits of clock_event_reasons (nvml.h nvmlClocksEventReason*).
IDLE, APPLICATION_CLOCKS, POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL = 0x1, 0x2, 0x4, 0x8, 0x20, 0x40

LEAKAGE_PER_K = 0.004  # static power grows with the core's temperature
LEAKAGE_AT_C = 50.0
LOWEST_CLOCK = 0.105  # share of the highest clock: 210 of 1,980 MHz
THERMAL_RESPONSE_S = 8.0  # in which the driver brings the core to its operating temperature
THERMAL_FALL_PER_S = 0.03  # how fast the thermal governor moves, in shares of the highest clock
THERMAL_RISE_PER_S = 0.015
HBM_OVER_CORE_C = 4.0
HBM_TRAFFIC_C = 10.0  # more at full memory traffic
HBM_TIME_CONSTANT_S = 6.0

_CLOCKS: Floats = np.linspace(LOWEST_CLOCK, 1.0, 512)
_DRAW: Floats = _CLOCKS * (0.55 + 0.45 * _CLOCKS) ** 2


def draw(clock: Floats) -> Floats:
    """Return g(x): dynamic power at a clock ratio, over that at the highest clock."""
    return np.asarray(clock * (0.55 + 0.45 * clock) ** 2)


def clock_at(power: Floats) -> Floats:
    """Return the clock ratio whose g(x) is `power`, within the range of clocks."""
    return np.interp(power, _DRAW, _CLOCKS)


class Physics:
    """State of the boards. All arrays float64 [G] unless said otherwise.

    Attributes:
        power_w (mean of the last step), clock (mean ratio of the highest), core_c, hbm_c, energy_j;
        reasons: int64 [G], clock_event_reasons of the last step;
        held_power_us, held_thermal_sw_us, held_thermal_hw_us: throttle counters.
    """

    def __init__(self, hardware: Hardware, seed: int) -> None:
        rng = np.random.default_rng([seed, 2])
        self._hw = hardware
        count = hardware.gpus
        self.power_w: Floats = hardware.idle_w.copy()
        self.clock: Floats = hardware.idle_clock_ratio.copy()
        self.core_c: Floats = np.full(count, 30.0)
        self.hbm_c: Floats = np.full(count, 34.0)
        self.energy_j: Floats = rng.uniform(1e7, 3e9, count)  # the driver has been loaded for a while
        self.reasons: Ints = np.full(count, IDLE, np.int64)
        self.held_power_us: Floats = rng.uniform(0, 5e9, count)
        self.held_thermal_sw_us: Floats = np.zeros(count)
        self.held_thermal_hw_us: Floats = np.zeros(count)
        self._thermal_cap: Floats = np.ones(count)
        self._hot: Bools = np.zeros(count, np.bool_)

    def static_w(self, held: Bools) -> Floats:
        """Return the power without switching, of a GPU with a context (`held`) or of an idle one."""
        base = np.where(held, self._hw.static_w, self._hw.idle_w)
        return np.asarray(base * (1 + LEAKAGE_PER_K * (self.core_c - LEAKAGE_AT_C)))

    def inlet_of_gpus(self, inlet_c: Floats) -> Floats:
        return inlet_c[self._hw.gpu_node]

    def ceiling(self, modifiers: Modifiers) -> Floats:
        """Return the highest clock ratio that temperature and clock settings allow now."""
        cap = np.minimum(modifiers.clock_cap, self._thermal_cap)
        return np.where(self._hot, np.minimum(cap, 0.5), cap)  # hardware slowdown halves the clock

    def clock_for(self, activity: Floats, held: Bools, modifiers: Modifiers) -> Floats:
        """Return the clock ratio at which `activity` stays within the power limit and the ceiling."""
        room = (modifiers.limit_w - self.static_w(held)) / (self._hw.dynamic_w * np.maximum(activity, 0.02))
        return np.minimum(clock_at(room), self.ceiling(modifiers))

    def coolable_clock(self, inlet_c: float, modifiers: Modifiers) -> Floats:
        """Return the clock ratio at which a GPU under full load stays at its operating temperature, float64 [G]."""
        hw = self._hw
        allowed_w = (hw.operating_temp_c - inlet_c) / (hw.resistance * modifiers.resistance)
        static_w = hw.static_w * (1 + LEAKAGE_PER_K * (hw.operating_temp_c - LEAKAGE_AT_C))
        return clock_at((allowed_w - static_w) / hw.dynamic_w)

    def advance(
        self,
        dt_s: float,
        held: Bools,
        share: Floats,
        activity: Floats,
        rest_activity: Floats,
        hbm_traffic: Floats,
        inlet_c: Floats,
        modifiers: Modifiers,
    ) -> None:
        """Advance by one step of at most a few seconds.

        Args:
            held: bool [G], a process holds the GPU. share: part of the step at `activity`; the rest is at
                `rest_activity`. hbm_traffic: 0..1. inlet_c: float64 [N].
        """
        hw = self._hw
        ceiling = self.ceiling(modifiers)
        clock = self.clock_for(activity, held, modifiers)
        rest_clock = np.where(held, self.clock_for(rest_activity, held, modifiers), hw.idle_clock_ratio)
        static = self.static_w(held)
        busy_w = static + hw.dynamic_w * activity * draw(clock)
        rest_w = static + hw.dynamic_w * rest_activity * draw(rest_clock)
        self.power_w = share * busy_w + (1 - share) * rest_w
        self.clock = share * clock + (1 - share) * rest_clock
        self.energy_j += self.power_w * dt_s
        self._explain(dt_s, held, share, clock, ceiling, modifiers)

        inlet = self.inlet_of_gpus(inlet_c)
        resistance = hw.resistance * modifiers.resistance
        steady = inlet + resistance * self.power_w
        self.core_c += (steady - self.core_c) * -np.expm1(-dt_s / (resistance * hw.heat_capacity))
        hbm_steady = self.core_c + HBM_OVER_CORE_C + HBM_TRAFFIC_C * hbm_traffic
        self.hbm_c += (hbm_steady - self.hbm_c) * -np.expm1(-dt_s / HBM_TIME_CONSTANT_S)
        self._govern(dt_s, inlet, resistance, np.maximum(activity, 0.02), static)

    def _govern(self, dt_s: float, inlet: Floats, resistance: Floats, activity: Floats, static: Floats) -> None:
        """Move the thermal cap towards the clock whose heat brings the core to its operating temperature."""
        hw = self._hw
        missing = hw.operating_temp_c - self.core_c
        allowed = (hw.operating_temp_c - inlet) / resistance + missing * hw.heat_capacity / THERMAL_RESPONSE_S
        wanted = clock_at((allowed - static) / (hw.dynamic_w * activity))
        self._thermal_cap = np.clip(
            wanted, self._thermal_cap - THERMAL_FALL_PER_S * dt_s, self._thermal_cap + THERMAL_RISE_PER_S * dt_s
        )
        self._hot = (self._hot & (missing < 1)) | (self.core_c >= hw.slowdown_temp_c)

    def _explain(
        self, dt_s: float, held: Bools, share: Floats, clock: Floats, ceiling: Floats, modifiers: Modifiers
    ) -> None:
        """Set event reasons and throttle counters by the limits that held the clock in this step."""
        working = held & (share > 0.05)
        by_heat = working & (self._thermal_cap < np.minimum(1.0, modifiers.clock_cap)) & (clock >= ceiling - 1e-9)
        by_power = working & (clock < ceiling - 1e-3)
        by_setting = working & (modifiers.clock_cap < 1) & (clock >= modifiers.clock_cap - 1e-9)
        self.held_power_us += by_power * share * (dt_s * 1e6)
        self.held_thermal_sw_us += (by_heat & ~self._hot) * share * (dt_s * 1e6)
        self.held_thermal_hw_us += self._hot * (dt_s * 1e6)
        self.reasons = (
            ~held * IDLE
            + by_power * POWER_CAP
            + by_setting * APPLICATION_CLOCKS
            + by_heat * SW_THERMAL
            + self._hot * (HW_SLOWDOWN + HW_THERMAL)
        )

    def forget(self, gpu: int) -> None:
        """Restart the counters of a GPU, as its driver was loaded again."""
        for counter in (self.energy_j, self.held_power_us, self.held_thermal_sw_us, self.held_thermal_hw_us):
            counter[gpu] = 0.0
