"""Temperature of the air that enters this node now, for its thermal resistance: hwmon's, else the BMC's."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from drover_agent.sources.host.ipmi import Ipmi
from drover_agent.sources.host.sensors import SensorsSource

SETTLE_S = 20.0  # a BMC takes seconds to answer; then it is done without
LOOK_S = 0.5


def inlet_c(sys: Path = Path("/sys"), ipmi: Ipmi | None = None, wait_s: float = SETTLE_S) -> tuple[float | None, str]:
    """(degC or None, why none)."""
    bmc = ipmi or Ipmi()
    until = time.monotonic() + wait_s
    with contextlib.closing(SensorsSource("", sys, bmc)) as source:
        while True:
            reading = source.read(time.time_ns() // 1_000_000)
            for _, values in reading.rows:
                if "inlet_temp_c" in values:
                    return float(values["inlet_temp_c"]), ""
            why = next((absent.value for _, name, absent in reading.absent if name == "inlet_temp_c"), "")
            if not bmc.running or time.monotonic() >= until:
                return None, f"no inlet temperature can be read here ({bmc.trouble or why})"
            time.sleep(LOOK_S)
