"""Between what the store keeps of a result and what the judgement takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drover_collector.probes.judging.measurements import End, Measurement
from drover_collector.store import ProbeRow
from drover_collector.store.repositories.probes import Key
from drover_core.model.events import ProbeResult
from drover_core.model.probe_figures import FIGURES, GROUP_FIGURES, VALIDATION_FIGURES

CPU = "cpu"  # ProbeResult.device where there is no NVIDIA driver: no figure of a GPU then
_ENDS = {end.value: end for end in End}
_ON = {"on": True, "off": False}


def row_of(result: ProbeResult, inventory: Mapping[str, str], received_ms: int) -> ProbeRow:
    """A result with what its node's inventory says of the GPU. What it does not say is not known.

    NVLinks are not counted: the inventory has those that are up, and a lost one must not look like another design.
    """
    gpu = result.gpu
    if gpu is None:  # a figure of the node: its first GPU stands for the boards in it
        gpu = next((g for g in range(256) if f"gpu{g}.model" in inventory), 0)
    said = {key: value for key, value in inventory.items() if value}
    own = {part: said.get(f"gpu{gpu}.{part}", "") for part in ("model", "serial", "uuid", "ecc_mode", "mig_mode")}
    key = Key(
        sku=own["model"] or ("" if result.device in ("", CPU) else result.device),
        driver=said.get("driver_version") or said.get("driver", ""),
        power_limit_w=_number(said.get(f"gpu{gpu}.power_limit_set_w")),
        ecc=_ON.get(own["ecc_mode"]),
        pcie_gen=_whole(said.get(f"gpu{gpu}.pcie_generation_max")),
        pcie_width=_whole(said.get(f"gpu{gpu}.pcie_width_max")),
        mig=_ON.get(own["mig_mode"]),
        host=said.get("host.product") or said.get("cpu", ""),
    )
    if result.gpu is None:
        return ProbeRow(result, key, "", "", received_ms)
    return ProbeRow(result, key, own["serial"], own["uuid"], received_ms)


def firmware(inventory: Mapping[str, str]) -> str:
    """What a change of asks for new baselines: driver, and VBIOS of all GPUs. "" where nothing is known."""
    parts = {
        key: value
        for key, value in inventory.items()
        if value and (key in ("driver", "driver_version") or key.endswith((".vbios", ".gsp_firmware")))
    }
    return " ".join(sorted({f"{key.rpartition('.')[2]}={value}" for key, value in parts.items()}))


def measurement(row: ProbeRow) -> Measurement | None:
    """None: a closing result that names no figure, one of a CPU or of several nodes together (`judging_groups`), or a
    figure that this version does not know."""
    result = row.result
    if result.probe not in FIGURES or result.probe in (*GROUP_FIGURES, *VALIDATION_FIGURES) or result.device == CPU:
        return None
    end = _ENDS.get(result.end, End.UNSERVED) if result.end else End.DONE
    return Measurement(
        result.node, result.gpu, result.probe, result.value, replace(row.key, form=form_of(result)), result.ts_ms,
        result.peer, result.spread, result.repeats, result.ok, result.detail, end, result.tries,
    )  # fmt: skip


def form_of(result: ProbeResult) -> str:
    """What of the way it was measured changes a figure by design. Of old results too: all have their level.

    Standard and deep measure for as long as each other; quick for a fifth of that, in which a board hardly warms.
    """
    form = {"quick": "quick", "standard": "long", "deep": "long"}.get(result.level, "")
    return f"{form} sharded".strip() if result.probe == "train_step" and result.gpu is None else form


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
