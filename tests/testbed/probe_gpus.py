"""The probe service of a node with simulated GPUs: `python probe_gpus.py FIGURES probe --serve FOLDER`.

Service, runner, the probe's process, its protocol and the probes' own code are real and run on the CPU; only what this
machine cannot have is not: NVML is the stand-in of `testbed.nvml`, each figure is replaced by that of the simulated GPU
(FIGURES, written by `write`), so that what would be timed is called once, and collectives and the training step, which
need a process for each GPU, are not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from drover_agent.probes import PROBES, Level, base, plan, runner
from drover_proto import telemetry_pb2 as pb

SECONDS = 0.1  # of a whole level: the figures are not the CPU's anyway


def write(file: Path, prober: Any, node: str) -> None:
    """What the GPUs of `node` give, by a `drover_simulator.probing.Prober`."""
    answers = [r for r in prober.answer(node, pb.ProbeRequest(id="figures", level="standard")) if not r.end]
    rows = [{"probe": r.probe, "gpu": r.gpu, "peer": r.peer, "value": r.value, "ok": r.ok} for r in answers]
    file.write_text(json.dumps({"model": answers[0].device, "figures": rows}))


def _process(file: Path) -> int:
    import torch

    from drover_agent.probes import child, collectives, gemm, hbm, launch, p2p, pcie, sdc, timing, train_step

    given = json.loads(file.read_text())
    figures = {(f["probe"], f["gpu"], f["peer"]): f for f in given["figures"]}

    def devices(_torch: Any, gpus: Any, _cpus: int) -> tuple[base.Device, ...]:
        return tuple(base.Device(gpu["slot"], "cpu", given["model"], 0) for gpu in gpus)

    def answered(_: base.Context, name: str) -> Iterator[base.Result]:
        for probe, gpu, peer in figures:
            if probe == name:
                yield base.Result(name, gpu, None, PROBES[name].unit, peer=peer)

    def plain(result: base.Result) -> dict[str, Any]:
        if (figure := figures.get((result.probe, result.gpu, result.peer))) is not None:
            spread = None if figure["ok"] is not None else 0.002
            result = replace(result, value=figure["value"], ok=figure["ok"], spread=spread, repeats=5)
        return own(result)

    def once(_torch: Any, _device: base.Device, call: Callable[[], object], *_: object) -> timing.Timing:
        call()
        return timing.Timing(1.0, 0.0, 1)

    gemm.time_calls = hbm.time_calls = pcie.time_calls = p2p.time_calls = once
    hbm.CPU_BYTES = pcie.CPU_BYTES = p2p.CPU_BYTES = 1 << 16
    sdc.CPU_SIZES = (64,)
    launch.LEAST_REPEATS = sdc.LEAST_PRODUCTS = 1
    own = child._plain
    child._plain, child.devices = plain, devices
    child.unfit = lambda _torch, uvm="": ""  # type: ignore[assignment]  # a simpler one
    torch.cuda.device_count = lambda: 256
    collectives.run = train_step.run = answered
    return child.main()


if __name__ == "__main__":
    if sys.argv[1] == "child":
        sys.exit(_process(Path(sys.argv[2])))
    runner.CHILD = (sys.executable, str(Path(__file__).resolve()), "child", sys.argv[1])
    plan.LEVEL_S = dict.fromkeys(Level, SECONDS)
    from drover_agent.main import main

    sys.exit(main(sys.argv[2:]))
