"""List all faults that the simulation can inject: scope, severity, duration, and whether hardware is at fault.

Durations and rates serve scoring (a case needs many faults in few hours). In the field repairs take 0.85 days in the
median (InfiniteHBD), and a thousand H100 have about half an interruption a day (Llama 3). Compute slow-downs of about
10 minutes and slow communication of about 24 minutes are Greyhound's figures; in MegaScale 0.5 % of the machines run
about 10 % slow: severities start there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind and cause.

    Attributes:
        scope: gpu, node, rack or job (the job that holds the node at the start).
        needs_job: without a running job the fault does not happen.
        ends_job: the job crashes; the scheduler starts it again without the node.
        severity: range (low, high); the comment at each row says what it means.
        ramp_s: usual time to full severity. duration_s: range.
        weight: how often `draw_faults` takes it; 0: only if a file of faults contains it.
        cured_by: the least that ends it: a "reset" of the GPU, a "reboot" of the node, or neither ("").
    """

    scope: str
    hardware: bool = True
    needs_job: bool = True
    ends_job: bool = False
    severity: tuple[float, float] = (1.0, 1.0)
    ramp_s: float = 0.0
    duration_s: tuple[float, float] = (600.0, 1500.0)
    weight: int = 1
    cured_by: str = ""


_LONG = (900.0, 1800.0)
_SHORT = (240.0, 480.0)

KINDS: Mapping[tuple[str, str], FaultKind] = MappingProxyType(
    {
        # severity: share of the clock that is lost
        ("straggler", "power_cap"): FaultKind("gpu", severity=(0.10, 0.32), weight=2),
        ("straggler", "clock"): FaultKind("gpu", severity=(0.08, 0.35), weight=2, cured_by="reset"),
        # severity: growth of the thermal resistance
        ("straggler", "thermal"): FaultKind("gpu", severity=(1.0, 1.8), ramp_s=120.0, weight=2),
        # severity: share of the bandwidth that is lost
        ("straggler", "hbm"): FaultKind("gpu", severity=(0.45, 0.70)),
        ("straggler", "pcie"): FaultKind("gpu", severity=(0.75, 0.94)),
        ("straggler", "nvlink"): FaultKind("gpu", severity=(0.40, 0.70), duration_s=_LONG),
        ("straggler", "nic"): FaultKind("node", severity=(0.50, 0.75), duration_s=_LONG),
        # severity: time that the host adds to a step, over the step's
        ("straggler", "host"): FaultKind("node", severity=(0.12, 0.35), duration_s=_LONG, cured_by="reboot"),
        # one rank stops, the others wait for it; ends when someone ends the job
        ("hang", "rank_stopped"): FaultKind("gpu", ends_job=True, duration_s=(420.0, 900.0), cured_by="reset"),
        # severity: growth of the thermal resistance
        ("thermal", "cooling"): FaultKind("gpu", severity=(1.2, 2.0), ramp_s=90.0, weight=2),
        ("thermal", "fan"): FaultKind("node", severity=(0.9, 1.4), ramp_s=60.0),
        ("memory", "row_remap_failure"): FaultKind("gpu", needs_job=False),
        ("memory", "uncorrectable"): FaultKind("gpu", ends_job=True, cured_by="reset"),
        # severity: corrected errors per second
        ("memory", "ecc_storm"): FaultKind("gpu", needs_job=False, severity=(200.0, 5000.0)),
        # severity: share of the NVLinks that are lost
        ("link", "nvlink"): FaultKind("gpu", severity=(0.06, 0.20)),
        ("link", "ib_flap"): FaultKind("node", needs_job=False, severity=(1.0, 1.0), duration_s=(300.0, 600.0)),
        ("xid", "fallen_off_bus"): FaultKind("gpu", ends_job=True, needs_job=False, cured_by="reboot"),
        ("xid", "gsp_timeout"): FaultKind("gpu", ends_job=True, needs_job=False, cured_by="reset"),
        ("xid", "uncontained_ecc"): FaultKind("gpu", ends_job=True, cured_by="reset"),
        ("liveness", "silent"): FaultKind("node", needs_job=False, ends_job=True, duration_s=_SHORT, cured_by="reboot"),
        ("liveness", "gpu_lost"): FaultKind(
            "gpu", needs_job=False, ends_job=True, duration_s=_SHORT, cured_by="reboot"
        ),
        ("liveness", "driver_hung"): FaultKind("node", needs_job=False, duration_s=_SHORT, cured_by="reboot"),
        # Only a probe finds it, no sensor, so it is never drawn.
        ("sdc", "wrong_results"): FaultKind("gpu", needs_job=False, duration_s=_LONG, weight=0),
        # Hard negatives: only in 1.7 % of straggling jobs workers cause most of the delay; the others have uneven
        # sequences and stages, garbage collection, data loading.
        ("xid", "application"): FaultKind("job", hardware=False, ends_job=True, duration_s=(120.0, 120.0), weight=2),
        # severity: work of the heaviest stage over that of the lightest, less one
        ("straggler", "workload"): FaultKind("job", hardware=False, severity=(0.12, 0.35), duration_s=_LONG, weight=2),
        # severity: share of time without data
        ("hang", "data_stall"): FaultKind("job", hardware=False, severity=(0.6, 0.95), duration_s=_SHORT, weight=2),
        # severity: share of the power limit that is taken away
        ("straggler", "planned_power_cap"): FaultKind("rack", hardware=False, severity=(0.2, 0.4), duration_s=_LONG),
        # severity: degrees
        ("thermal", "inlet"): FaultKind("rack", hardware=False, needs_job=False, severity=(6.0, 12.0), ramp_s=240.0),
    }
)
