"""List the adversary's faults and hard negatives, with frequency, severity and duration.

The severity of a straggler is the share of its speed that the unit loses in its job, by any cause (0.10: its step takes
11 % longer), so that curves over severity are comparable between causes. Field rates (Llama 3: 0.474 interruptions per
1,000 GPU-days) would need years: the mix is for scoring, and precision at the field's prevalence is computed from it.
Comments name the sources; "assumed" if there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SUDDEN, CREEPING, INTERMITTENT = "sudden", "creeping", "intermittent"
ANY_ONSET = (SUDDEN, SUDDEN, CREEPING, INTERMITTENT)
GROWING = (SUDDEN, CREEPING, CREEPING)
RAMP_S = (20.0, 172_800.0)  # seconds to two days, log-uniform; cut to the fault's own length in short cases

# Published chains (facts with their sources: docs/explanation/simulation.md).
NVLINK_RECURS, NVLINK_SPREADS, NVLINK_ENDS_GPU = 0.66, 0.14, 0.20  # Delta
PCIE_WITH_79 = (0.43, 0.63)  # RSC-1, RSC-2: drawn between
REMAP_SUCCEEDS = {"A100-SXM": 0.50}  # Delta: Ampere
REMAP_SUCCEEDS_ELSE = 0.92  # Delta: DBE survived on H100
CONTAINED = 0.43  # Delta: after a failed remap
GSP_TO_ERROR = 0.99  # Delta: 119 -> GPU error state
SPI_TO_MMU = 0.85  # Delta: 122 -> 31 with .82-.88 within 0.05 s
FAILS_AGAIN = 0.22  # InfiniteHBD: a new fault within a day of the repair


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind and cause.

    Attributes:
        scope: gpu, node, job, rack, leaf, pool or fleet. hardware: must be found; False: must not lead to a drain.
        needs: train (a training job), many (one on several nodes), any (any job), serve (inference), free (nothing).
        ends_job: it ends the target's job, which starts again without the node.
        severity, duration_s: log-uniform ranges. onsets: one is drawn. boards: if not empty, only these.
    """

    scope: str
    hardware: bool = True
    needs: str = "free"
    weight: int = 1
    severity: tuple[float, float] = (1.0, 1.0)
    duration_s: tuple[float, float] = (600.0, 5400.0)
    onsets: tuple[str, ...] = (SUDDEN,)
    ends_job: bool = False
    boards: tuple[str, ...] = ()


_SLOW = (0.03, 0.35)  # down to 3 %; MegaScale's machines are about 10 % slow
_GRAY = (600.0, 10_800.0)  # Greyhound: compute about 10 min, communication about 24 min; unrepaired faults last
_TALK = (900.0, 10_800.0)
_DEAD = (300.0, 7200.0)  # until the repair: in the field 0.85 d in the median (InfiniteHBD), here cut

FAULTS: Mapping[tuple[str, str], Kind] = MappingProxyType(
    {
        ("straggler", "power_cap"): Kind("gpu", True, "train", 3, _SLOW, _GRAY, ANY_ONSET),
        ("straggler", "clock"): Kind("gpu", True, "train", 3, _SLOW, _GRAY, ANY_ONSET),
        ("straggler", "thermal"): Kind("gpu", True, "train", 3, _SLOW, _GRAY, GROWING),
        ("straggler", "hbm"): Kind("gpu", True, "train", 2, _SLOW, _GRAY, ANY_ONSET),
        ("straggler", "pcie"): Kind("gpu", True, "train", 2, (0.03, 0.30), _GRAY, (SUDDEN,)),
        ("straggler", "nvlink"): Kind("gpu", True, "train", 2, (0.03, 0.30), _TALK, (SUDDEN,)),
        ("straggler", "nic"): Kind("node", True, "many", 2, (0.03, 0.30), _TALK, (SUDDEN, INTERMITTENT)),
        ("straggler", "host"): Kind("node", True, "many", 2, _SLOW, _GRAY, ANY_ONSET),
        ("hang", "rank_stopped"): Kind("gpu", True, "train", 2, (1.0, 1.0), (420.0, 1800.0), ends_job=True),
        # severity: growth of the thermal resistance; Titan, Theta: heat sinks and fans that fail (size assumed)
        ("thermal", "cooling"): Kind("gpu", True, "any", 3, (0.3, 1.8), _GRAY, GROWING),
        ("thermal", "fan"): Kind("node", True, "any", 2, (0.25, 1.2), _GRAY, GROWING),
        ("memory", "uncorrectable"): Kind("gpu", True, "any", 2, (1.0, 1.0), _DEAD, ends_job=True),
        ("memory", "remap_failed"): Kind("gpu", True, "free", 1, (1.0, 1.0), _DEAD),
        # severity: corrected errors per second; Azure rejects at 20 million, gcm at 50 million
        ("memory", "ecc_storm"): Kind("gpu", True, "free", 1, (60.0, 5000.0), _GRAY, ANY_ONSET),
        # one GPU reached 254 corrected remaps without any XID, then vanished; severity: rows per minute
        ("memory", "remaps_pile_up"): Kind("gpu", True, "free", 1, (0.5, 6.0), (1800.0, 10_800.0)),
        ("memory", "sram_threshold"): Kind("gpu", True, "free", 1, (1.0, 1.0), _DEAD),
        # severity: share of the NVLinks that are lost
        ("link", "nvlink"): Kind("gpu", True, "any", 2, (0.05, 0.20), _DEAD),
        ("link", "ib_flap"): Kind("node", True, "free", 1, (1.0, 1.0), (400.0, 1800.0)),
        ("link", "ib_errors"): Kind("node", True, "free", 1, (1.0, 8.0), _GRAY, (SUDDEN, CREEPING)),
        ("link", "port_down"): Kind("node", True, "free", 1, (1.0, 1.0), _DEAD),
        ("link", "pcie_replays"): Kind("gpu", True, "free", 1, (2.0, 40.0), _GRAY, ANY_ONSET),
        ("xid", "fallen_off_bus"): Kind("gpu", True, "any", 2, (1.0, 1.0), _DEAD, ends_job=True),
        ("xid", "gsp_timeout"): Kind("gpu", True, "any", 2, (1.0, 1.0), _DEAD, ends_job=True),
        ("xid", "uncontained_ecc"): Kind("gpu", True, "any", 1, (1.0, 1.0), _DEAD, ends_job=True),
        ("xid", "spi_failure"): Kind("gpu", True, "any", 1, (1.0, 1.0), _DEAD, ends_job=True),
        ("xid", "nvlink5"): Kind("gpu", True, "any", 1, (1.0, 1.0), _DEAD, ends_job=True, boards=("B200-SXM",)),
        ("liveness", "silent"): Kind("node", True, "free", 2, (1.0, 1.0), _DEAD, ends_job=True),
        ("liveness", "gpu_lost"): Kind("gpu", True, "free", 1, (1.0, 1.0), _DEAD, ends_job=True),
        ("liveness", "driver_hung"): Kind("node", True, "free", 1, (1.0, 1.0), _DEAD),
        # up to 14 faults start together (InfiniteHBD): power or cooling of one rack
        ("liveness", "rack_power"): Kind("rack", True, "free", 1, (1.0, 1.0), (600.0, 3600.0), ends_job=True),
        # severity: seconds
        ("liveness", "clock_wrong"): Kind("node", True, "free", 1, (6.0, 60.0), _GRAY),
        ("drift", "driver"): Kind("node"),
        ("drift", "vbios"): Kind("gpu"),
        ("drift", "ecc_mode"): Kind("gpu"),
        # severity: share of the limit or clock that was left removed
        ("drift", "power_limit"): Kind("node", severity=(0.07, 0.35)),
        ("drift", "clock_limit"): Kind("node", severity=(0.07, 0.35)),
        # a job that holds its GPUs idle
        ("idle", "held"): Kind("job", True, "any", 2, (1.0, 1.0), (2700.0, 14_400.0)),
    }
)

NEGATIVES: Mapping[tuple[str, str], Kind] = MappingProxyType(
    {
        # 42.5 % of jobs straggle, in only 1.7 % of them do workers explain more than half of it (What-if study)
        # severity: work of the heaviest part over the lightest, less one
        ("straggler", "stage_imbalance"): Kind("job", False, "many", 3, (0.05, 0.40), _GRAY),
        ("straggler", "sequence_length"): Kind("job", False, "train", 3, (0.03, 0.15), _GRAY),
        ("straggler", "expert_imbalance"): Kind("job", False, "many", 2, (0.05, 0.30), _GRAY),
        ("straggler", "garbage_collection"): Kind("job", False, "train", 2, (0.02, 0.20), _GRAY),
        ("straggler", "planned_power_cap"): Kind("rack", False, "free", 2, (0.10, 0.40), (1800.0, 10_800.0)),
        ("straggler", "clock_policy"): Kind("job", False, "train", 1, (0.10, 0.35), (1800.0, 10_800.0)),
        # Greyhound: 40 % of jobs see slow communication, about 24 min, mostly congestion
        ("straggler", "congestion"): Kind(
            "leaf", False, "free", 2, (0.2, 2.0), (600.0, 3600.0), (SUDDEN, INTERMITTENT)
        ),
        ("hang", "data_stall"): Kind("job", False, "train", 3, (0.4, 1.0), (60.0, 900.0)),
        ("hang", "checkpoint"): Kind("job", False, "train", 3, (1.0, 1.0), (30.0, 480.0)),
        ("hang", "evaluation"): Kind("job", False, "train", 2, (0.3, 0.8), (120.0, 1200.0)),
        # a bug of the job: all ranks spin in a collective that never ends; no unit is at fault
        ("hang", "deadlock"): Kind("job", False, "many", 1, (1.0, 1.0), (420.0, 1800.0), ends_job=True),
        ("xid", "application"): Kind("job", False, "train", 3, (1.0, 1.0), (120.0, 120.0), ends_job=True),
        ("xid", "preempted"): Kind("job", False, "any", 2, (1.0, 1.0), (60.0, 60.0), ends_job=True),
        ("xid", "solo_45"): Kind("gpu", False, "any", 2, (1.0, 1.0), (60.0, 60.0)),
        ("thermal", "inlet_rack"): Kind("rack", False, "free", 1, (3.0, 9.0), (1800.0, 7200.0), (CREEPING,)),
        ("thermal", "inlet_all"): Kind("fleet", False, "free", 1, (3.0, 9.0), (1800.0, 10_800.0), (CREEPING,)),
        ("drift", "rollout"): Kind("pool", False, "free", 1, (1.0, 1.0), (1800.0, 7200.0)),
        ("link", "leaf_down"): Kind("leaf", False, "free", 1, (1.0, 1.0), (300.0, 3600.0), ends_job=True),
        ("liveness", "maintenance"): Kind("node", False, "free", 2, (1.0, 1.0), (600.0, 5400.0), ends_job=True),
        ("liveness", "telemetry_gap"): Kind("rack", False, "free", 2, (1.0, 1.0), (20.0, 25.0)),
        ("memory", "corrected_background"): Kind("gpu", False, "free", 2, (0.01, 2.0), _GRAY),
        ("idle", "low_load"): Kind("job", False, "serve", 2, (0.5, 0.95), (1800.0, 14_400.0)),
    }
)
KINDS: Mapping[tuple[str, str], Kind] = MappingProxyType({**FAULTS, **NEGATIVES})


def weights(table: Mapping[tuple[str, str], Kind]) -> list[tuple[str, str]]:
    """Return every kind as often as its weight."""
    return [name for name, kind in table.items() for _ in range(kind.weight)]
