"""Write the reference pages that follow from tables in the code; tests/test_docs.py checks that it was done.

.venv/bin/python docs/generate.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from drover_agent.config import AgentConfig
from drover_agent.probes import PROBES
from drover_agent.sources.facts import FACTS
from drover_agent.sources.nvml.fields import RARE_METRICS, SLOW_METRICS
from drover_cli.main import build_parser
from drover_collector.config import CollectorConfig
from drover_core.metrics.catalog import Scope, of_scope
from drover_core.model.events import KERNEL_CODES, LIFECYCLE_CODES, EventKind
from drover_core.settings import rows
from drover_core.xid.codes import ADVICE, XIDS
from drover_proto.fleet_methods import METHODS

HERE = Path(__file__).resolve().parent
NOTE = "<!-- written by docs/generate.py; change the table in the code instead -->\n"


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def table(headers: list[str], lines: list[list[object]]) -> str:
    out = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    out += ["| " + " | ".join(cell(c) for c in line) + " |" for line in lines]
    return "\n".join(out) + "\n"


def metrics() -> str:
    parts = [
        f"# Metrics\n\n{NOTE}\nEvery metric of the catalog (`core/drover_core/metrics/catalog_rows.py`). A value that "
        "could not be read is absent with a reason, never 0: unsupported, lost, timeout, no-permission, error, "
        "out-of-range.\n"
    ]
    for scope in Scope:
        lines: list[list[object]] = []
        for m in of_scope(scope):
            sources = "; ".join(
                f"{r}: `{s.key}`" + (f" x {s.scale:g}" if s.scale != 1 else "") for r, s in m.sources.items()
            )
            lines.append([m.id, f"`{m.name}`", m.unit, m.kind.value, m.step or "float64", m.help, sources])
        parts.append(f"## {scope.value}\n\n" + table(["id", "name", "unit", "kind", "step", "what", "from"], lines))
    parts.append(
        "## Pace\n\nWhat a source reads and how often: [sources.md](sources.md). NVML is asked once in 10 s, each "
        "GPU in a second of its own of the bucket that detectors see, for: "
        + ", ".join(f"`{m.name}`" for m in of_scope(Scope.GPU) if m.name in SLOW_METRICS)
        + " (`memory_util_ratio` each second where no GPM tells how busy the memory is); and, where the GPU has no "
        "GPM, for PCIe traffic; of these once in 30 s for "
        + ", ".join(f"`{m.name}`" for m in of_scope(Scope.GPU) if m.name in RARE_METRICS)
        + ". For these a bucket holds one moment: what came and went "
        "between two is not seen. Clocks held down for less than 10 s still show in the counters `throttle_*`.\n"
    )
    return "\n".join(parts)


def settings() -> str:
    parts = [
        f"# Settings\n\n{NOTE}\n`drover-agent config` and `drover-collector config` print commented files of these.\n"
    ]
    for title, kind in (("Agent (`/etc/drover/agent.toml`)", AgentConfig), ("Collector", CollectorConfig)):
        lines: list[list[object]] = [[f"`{r.key}`", r.type, f"`{r.default!r}`", r.help] for r in rows(kind)]
        parts.append(f"## {title}\n\n" + table(["key", "type", "default", "what"], lines))
    return "\n".join(parts)


def commands() -> str:
    parts = [
        f"# The command `drover`\n\n{NOTE}\nExit codes: 0 done; 1 refused (the guard, the mode or the role), or done "
        "and the answer is no; 2 bad input; 3 the collector does not answer, or cannot now; 4 nothing has this name; "
        "130 interrupted.\n\n`--json`: one object a line, and no line where a list is empty. Times are numbers, "
        "milliseconds UTC, in fields that end with `_ms`; incidents and `explain` have them in ISO 8601 too. What is "
        "not known is `null`. A node is `node` in each command; `nodes --json` keeps `name` until the next release. "
        "Where rows are of several kinds, as of `fabric` and `thermals`, `type` says which.\n"
    ]
    for name, parser in _parsers(build_parser()):
        lines: list[list[object]] = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                continue
            flag = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            lines.append([f"`{flag}`", action.help or ""])
        text = f"## drover {name}\n\n{str(parser.description).rstrip('.')}.\n"
        parts.append(text + ("\n" + table(["argument", "what"], lines) if lines else ""))
    return "\n".join(parts)


def fleet_api() -> str:
    lines: list[list[object]] = [
        [
            f"`{m.name}`", f"`{m.request.DESCRIPTOR.name}`", f"`{m.reply.DESCRIPTOR.name}`",
            ", ".join(sorted(m.roles)), "none" if math.isinf(m.limit_s) else f"{m.limit_s:g} s", m.summary,
        ]
        for m in METHODS.values()
    ]  # fmt: skip
    return (
        f"# The Fleet API\n\n{NOTE}\nThe gRPC service that the console and `drover` call (`api.listen`). Messages:\n"
        "`proto/drover_proto/fleet.proto`. A caller's own deadline counts where it is shorter than the limit.\n"
        "Without TLS, which is possible on loopback only, every local user may call everything.\n\n"
        + table(["method", "request", "reply", "roles", "limit", "what"], lines)
    )


def _parsers(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of every subcommand, and of theirs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{prefix}{name}", inner
                yield from _parsers(inner, f"{prefix}{name} ")


def xids() -> str:
    points_to_hardware = {True: "yes", False: "no", None: "?"}
    lines: list[list[object]] = []
    for x in XIDS.values():
        asked = ADVICE.get(x.action, x.action.value)
        hardware = points_to_hardware[x.hardware]
        lines.append([x.code, x.mnemonic, x.meaning, x.category.value, x.severity.value, hardware, asked])
    headers = ["code", "NVIDIA's name", "meaning", "about", "severity", "hardware", "NVIDIA asks first"]
    return f"# XID codes\n\n{NOTE}\nThe default policy follows NVIDIA's catalog.\n\n" + table(headers, lines)


def events() -> str:
    parts = [
        f"# Events\n\n{NOTE}\nWhat agents tell at once, beside telemetry. The same error of the same device is told "
        "when it comes and then summed for 10 s at a time. A line that user space could have written is kept as "
        "forgeable and never acted on. So is backlog: what the kernel log held when an agent began to watch this boot "
        "(its first start, or a reboot). What the same boot wrote while the agent was stopped or updated is news, told "
        "late with its own time, once; over an hour later it is backlog. The collector keeps the same limit: an error "
        "that it judges over an hour after it happened, or after its node has booted again, is recorded and shown, "
        "and never acted on. So is one that it judges over a minute late when its node came back into service since, "
        "or when a GPU that was gone gives values since. Age and boot go by the node's time since boot, which no step "
        "of a clock changes; of an older agent by its wall clock, and a wrong one makes an error as old as its "
        "receipt.\n\n"
        "The codes of kind `xid` are in [xids.md](xids.md); those of kind `sxid` are NVIDIA's numbers of NVSwitch "
        "errors.\n"
    ]
    for kind, what, codes in (
        (EventKind.KERNEL, "from the kernel log (`agent/drover_agent/sources/kmsg/lines.py`)", KERNEL_CODES),
        (EventKind.LIFECYCLE, "about agents, drivers and GPUs as such", LIFECYCLE_CODES),
    ):
        lines: list[list[object]] = [[f"`{code}`", meaning] for code, meaning in codes.items()]
        parts.append(f"## {kind.value}: {what}\n\n" + table(["code", "meaning"], lines))
    return "\n".join(parts)


COST = """## What the agent costs

`benchmarks/bench_agent.py` on 2 cores: 8 GPUs, 8 InfiniBand ports, 1 Hz, with everything on but DCGM's page (with which
NVML leaves profiling alone): NVML, GPM, kernel log, host, ports, a Slurm job with a process on each GPU, the page of a
vLLM server; values that move as in training, on the C stand-in for NVML; beside node_exporter scraped at 1 Hz. On a
quiet machine (load 0.3, `--seconds 40`):

| | agent | node_exporter | goal |
| --- | --- | --- | --- |
| CPU, calls that sleep 140 us (lists 4.5 ms) | 5.5 ms a second | 16.3 ms | 0.35: 0.338 |
| CPU, NVML calls that spin as long | 18.8 ms a second | 20.0 ms | none: 0.94 of it |
| resident memory | 43.2 MiB, of which 27.2 anonymous; 32.0 in proportion to who shares it | 20.4 MiB | 45 MiB |
| CPU of imports: `drover_agent.main` / all 349 modules that it ever loads, for pages too | 0.07 s / 0.18 s | | 0.2 s |
| on the wire to a collector, or in a scrape | 0.68 kB a second | 12.3 kB | |

- Earlier runs of the same code: 0.350 of node_exporter's CPU on a quiet machine (`--seconds 30`: 7.1 ms a second, all
  imports 0.24 s), 0.316 and 0.345 at loads of 13 and 22 (7.0 and 7.8 ms a second). At the goal, not far below it.
- Most of the CPU is the thread that reads, and most of that NVML's calls. A GPU with GPM takes 4 calls a second
  (fields, SM clock, temperature, GPM's sample; how busy it is GPM tells) and some 15 more once in 10 s, in a second of
  its own: about 44 a second for 8. A call that only sleeps costs this machine 27
  to 39 us of CPU (`sleep_cpu_us`), 1.2 to 1.7 ms a second.
- Where the time goes, as `bench_agent.py --parts` counts it, which itself costs some (without job and page, at a load
  of 14):

| part | ms of CPU a second |
| --- | --- |
| NVML, calls of a tick (32) / answers taken | 1.58 / 0.31 |
| NVML, slow reads (0.8 GPUs a second) | 0.92 |
| InfiniBand / host / Ethernet / who holds which GPU | 0.25 / 0.30 / 0.05 / 0.28 |
| event loop: ticks and packing / waking / stream | 0.53 / 0.30 / 0.17 |
| gRPC's threads | 0.45 |
| threads for XIDs / spool / kernel log / requests | 0.10 / 0.04 / 0.03 / 0.03 |

- A processor that slept in a call comes back with cold caches. So a tick makes the calls of all GPUs in a row, and
  takes what they brought afterwards.
- A real driver is not measured: `benchmarks/bench_gpu.py` does it, where there is one. Calls that keep the CPU busy
  cost what they take: that is the row with spinning.
- gRPC keeps as many threads as the machine has cores, 2 to 16. After each message they look for work in growing
  pauses: 0.5 to 0.7 ms a second here, 1.1 with 16 of them.
- Resident memory counts pages of program files too. The agent unmaps those that only its start needed, after 10 s and
  every 10 minutes (`lean.py`): without that it was 51.6 MiB, with the same 26 MiB anonymous. Such pages are page cache,
  which the kernel takes back by itself where it needs room: the smaller figure spares others less than it looks. What
  is needed again is mapped again at some faults, from the disk if it left the page cache meanwhile.
"""


def sources() -> str:
    parts = [
        f"# Sources of the agent\n\n{NOTE}\nWhat `drover-agent` reads on a node, by the table in "
        "`agent/drover_agent/sources/facts.py`. `drover-agent sources` says which are on, and measures what a reading "
        "costs there; `drover-agent check` says what is missing and how to mend it; `drover-agent once` prints one "
        "reading. A source that is not there on a node gives nothing and costs next to nothing; a value that cannot "
        "be read is absent with its reason.\n\n"
        "Every source is read behind a limit of 3 s. One that does not return is told (`driver_hung` for the driver, "
        "within 5 s at intervals of up to 2 s), "
        "its values are absent (`timeout`), and the others go on.\n"
    ]
    parts.append(table(["source", "pace", "turned on by"], [[f"`{n}`", f.pace, f.setting] for n, f in FACTS.items()]))
    for name, facts in FACTS.items():
        lines = [
            f"- from: {facts.reads}",
            f"- pace: {facts.pace}",
            f"- rights: {facts.rights}",
            f"- when it gives nothing: {facts.missing}",
            f"- setting: {facts.setting}",
        ]
        parts.append(f"## {name}\n\n{facts.what[0].upper()}{facts.what[1:]}.\n\n" + "\n".join(lines) + "\n")
    parts.append(COST)
    return "\n".join(parts)


def probes() -> str:
    """The page is written by hand, but for its table."""
    lines: list[list[object]] = [
        [
            f"`{p.name}`",
            p.level.value if p.level else "of a group",
            p.unit,
            p.better,
            f"{p.seconds[0]:g}, {p.seconds[1]:g}",
            p.what,
        ]
        for p in PROBES.values()
    ]
    made = table(["probe", "from level", "unit", "better", "seconds at quick, later", "what"], lines)
    before, begin, rest = (HERE / "probes.md").read_text("utf-8").partition(NOTE)
    _, end, after = rest.partition("<!-- end of the table -->")
    assert begin and end, "docs/probes.md has lost the marks around its table"
    return f"{before}{NOTE}\n{made}\n{end}{after}"


PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics,
    "settings.md": settings,
    "commands.md": commands,
    "fleet_api.md": fleet_api,
    "xids.md": xids,
    "sources.md": sources,
    "probes.md": probes,
    "events.md": events,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), "utf-8")
    sys.exit(0)
