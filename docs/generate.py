"""Write the reference pages that follow from tables in the code; tests/test_docs.py checks that it was done.

.venv/bin/python docs/generate.py
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from drover_agent.config import AgentConfig
from drover_agent.probes import GROUP, PROBES
from drover_agent.sources.facts import FACTS
from drover_agent.sources.nvml.fields import RARE_METRICS, SLOW_METRICS
from drover_cli.forms import WATCHED
from drover_cli.main import build_parser
from drover_collector.config import CollectorConfig
from drover_collector.detectors.conditions.rules import ROWS as CONDITIONS
from drover_collector.rest.idempotency import KEPT_S
from drover_collector.rest.openapi import VERSION
from drover_collector.rest.requests import PAGE, PAGE_MOST, offered
from drover_collector.rest.routes import LEFT_OUT, ROOT, ROUTES
from drover_collector.rest.server import BODY_BYTES, CALLS_EACH, STREAM_S, STREAMS_EACH, STREAMS_MOST
from drover_collector.rest.shapes import public_name
from drover_core.metrics.catalog import BY_NAME, Scope, of_scope
from drover_core.metrics.dcgm_names import LESS, NOT_GIVEN, ROWS
from drover_core.model.events import KERNEL_CODES, LIFECYCLE_CODES, RANK_CODES, EventKind
from drover_core.settings import list_settings
from drover_core.xid.codes import ADVICE, XIDS
from drover_proto.fleet_methods import EXPORT, METHODS, SERVICE

HERE = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- written by docs/generate.py; change the table in the code instead -->\n"


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def prose(*paragraphs: str) -> str:
    """Paragraphs wrapped as all pages are, with an empty line between."""
    return "\n\n".join(textwrap.fill(p, 100, break_long_words=False, break_on_hyphens=False) for p in paragraphs) + "\n"


def table(headers: list[str], lines: list[list[object]]) -> str:
    out = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    out += ["| " + " | ".join(cell(c) for c in line) + " |" for line in lines]
    return "\n".join(out) + "\n"


def names(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in found)


def metrics() -> str:
    parts = [
        f"# Metrics\n\n{NOTE}\n"
        + prose(
            "Every metric of the catalog. A value that could not be read is absent with a reason, never 0: "
            "unsupported, lost, timeout, no-permission, error, out-of-range."
        )
    ]
    for scope in Scope:
        lines: list[list[object]] = []
        for m in of_scope(scope):
            sources = "; ".join(
                f"{r}: `{s.key}`" + (f" x {s.scale:g}" if s.scale != 1 else "") for r, s in m.sources.items()
            )
            lines.append([m.id, f"`{m.name}`", m.unit, m.kind.value, m.step or "float64", m.help, sources])
        parts.append(f"## {scope.value}\n\n" + table(["id", "name", "unit", "kind", "step", "what", "from"], lines))
    gpu = [m.name for m in of_scope(Scope.GPU)]
    parts.append(
        "## Pace\n\n"
        + prose(
            "What a source reads and how often: [sources](sources.md). NVML is asked once in 10 s, each GPU in a "
            f"second of its own of the bucket that detectors see, for: {names(n for n in gpu if n in SLOW_METRICS)} "
            "(`memory_util_ratio` each second where GPM does not say how busy the memory is); and, where the GPU has "
            "no GPM, for PCIe traffic.",
            f"Of these once in 30 s: {names(n for n in gpu if n in RARE_METRICS)}.",
            "For these a bucket holds one moment: what came and went between two is not seen. Clocks held down for "
            "less than 10 s still show in the counters `throttle_*`.",
        )
    )
    return "\n".join(parts)


def settings() -> str:
    parts = [
        f"# Settings\n\n{NOTE}\n"
        + prose("`drover-agent config` and `drover-collector config` print commented files of these.")
    ]
    for title, kind in (("Agent (`/etc/drover/agent.toml`)", AgentConfig), ("Collector", CollectorConfig)):
        lines: list[list[object]] = [[f"`{r.key}`", r.type, f"`{r.default!r}`", r.help] for r in list_settings(kind)]
        parts.append(f"## {title}\n\n" + table(["key", "type", "default", "what"], lines))
    return "\n".join(parts)


EVERYWHERE = ("form", "watch")  # options of many commands, described once


def commands() -> str:
    found = list(_parsers(build_parser()))
    about = [
        [f"[`drover {name}`](#drover-{name})", str(parser.description).rstrip(".")]
        for name, parser in found
        if " " not in name
    ]
    exits = [
        ["0", "done"],
        ["1", "refused (the guard, the mode or the role), or done and the answer is no"],
        ["2", "bad input"],
        ["3", "the collector does not answer, or cannot now"],
        ["4", "nothing has this name"],
        ["130", "interrupted"],
    ]
    parts = [
        f"# The command `drover`\n\n{NOTE}\n" + table(["command", "what"], [list(row) for row in about]),
        table(["exit code", "meaning"], [list(row) for row in exits]),
        prose(
            "`--json`: one object a line, and no line where a list is empty. Times are numbers, milliseconds UTC, in "
            "fields that end with `_ms`; incidents and `explain` have them in ISO 8601 too. What is not known is "
            "`null`. A node is `node` in each command; `nodes --json` keeps `name` until the next release. Where rows "
            "are of several kinds, as of `fabric` and `thermals`, `type` says which."
        ),
        prose(
            "`-o wide|json|csv` of every command that has `--json`: lists with each row on one line however long, as "
            "`--json`, or as CSV with the notes on stderr. `--watch [SECONDS]` of "
            f"{', '.join(f'`{name}`' for name in sorted(WATCHED))}: again and again until Ctrl-C. Colours are off "
            "where stdout is no terminal and with `NO_COLOR`. `--cluster NAME` of every command that asks a collector, "
            "also before the command's name: [many clusters](../how-to/clusters.md)."
        ),
    ]
    for name, parser in found:
        lines: list[list[object]] = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction | argparse._SubParsersAction) or action.dest in (
                "form",
                "watch",
            ):
                continue
            flag = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            lines.append([f"`{flag}`", action.help or ""])
        text = f"## drover {name}\n\n{str(parser.description).rstrip('.')}.\n"
        parts.append(text + ("\n" + table(["argument", "what"], lines) if lines else ""))
    return "\n".join(parts)


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
        f"# Events\n\n{NOTE}\n"
        + prose(
            "What agents send at once, apart from telemetry. The same error of the same device is sent when it comes, "
            "and then summed for 10 s at a time. The codes of kind `xid` are in [XID codes](xids.md); those of kind "
            "`sxid` are NVIDIA's numbers of NVSwitch errors."
        ),
        "## What is never acted on\n\n"
        + prose("These are recorded and shown, and cause no action:")
        + "\n"
        + "- a line that user space could have written (forgeable);\n"
        + "- backlog: what the kernel log held when an agent began to watch this boot (its first start, or a\n"
        + "  reboot);\n"
        + "- an error that is judged over an hour after it happened, or after its node has booted again;\n"
        + "- an error judged over a minute late, when its node came back into service since, or when a GPU\n"
        + "  that was gone gives values since.\n\n"
        + prose(
            "What the same boot wrote while the agent was stopped or updated is news: sent late with its own time, "
            "once. Over an hour later it is backlog.",
            "Age and boot go by the node's time since boot, which no clock step changes. An older agent has only its "
            "wall clock; a wrong one makes an error as old as its receipt.",
        ),
    ]
    for kind, what, codes in (
        (EventKind.KERNEL, "from the kernel log", KERNEL_CODES),
        (EventKind.LIFECYCLE, "about agents, drivers and GPUs as such", LIFECYCLE_CODES),
        (EventKind.RANK, "what ranks of jobs leave", RANK_CODES),
    ):
        lines: list[list[object]] = [[f"`{code}`", meaning] for code, meaning in codes.items()]
        parts.append(f"## {kind.value}: {what}\n\n" + table(["code", "meaning"], lines))
    parts.append(
        prose(
            "An agent sends them where its setting `rank_dumps` names paths. The message is one JSON object of version "
            "1 with the sentence `text`, `job` (as the path gives it), `rank`, `written` (ms) and `groups`: of each "
            "process group its name, its members as runs of first, last and step, the newest number, and the "
            "operations around the first that is not done (number, kind, sizes sent and received, types, done, age in "
            "ms, place in the program). Users write the dumps, so these events are forgeable: they are compared, name "
            "a rank in a hang's incident, and cause no action. `gpu` is set where the agent knows the rank's process."
        )
    )
    parts.append(conditions())
    return "\n".join(parts)


def conditions() -> str:
    words = {"True": "`True`", "False": "`False`"}
    lines: list[list[object]] = [
        [f"`{r.type}`", words[r.bad], r.kind.value, r.severity.value, r.what, f"{r.hold_s} s", r.source]
        for r in CONDITIONS
    ]
    return (
        f"## {EventKind.CONDITION.value}: what others write on a Kubernetes node\n\n"
        + prose(
            "No agent sends these: the collector reads them ([conditions](../how-to/conditions.md)). The code is the "
            "condition's type. The message is one JSON object of version 1 with `type`, `status`, `reason`, `message`, "
            "`since_ms`, `standing` (fault, well, unknown, shown, gone), `place` of the node (closed, new; absent: in "
            "service), `every_s` and the sentence `text`. A type that is not in this table is shown and not judged, "
            "unless a setting names it."
        )
        + "\n"
        + table(["type", "bad when", "kind", "severity", "meaning", "must last", "documented by"], lines)
    )


def sources() -> str:
    parts = [
        f"# Sources of the agent\n\n{NOTE}\n"
        + prose(
            "What `drover-agent` reads on a node. `drover-agent sources` says which sources are on and measures what a "
            "reading costs there; `drover-agent check` says what is missing and how to mend it; `drover-agent once` "
            "prints one reading. A source that is not there gives nothing and costs next to nothing; a value that "
            "cannot be read is absent with its reason.",
            "Every source is read behind a limit of 3 s. One that does not return is reported (`driver_hung` for the "
            "driver, within 5 s at intervals of up to 2 s), its values are absent (`timeout`), and the others go on.",
            "What the agent costs a node: [measured](../evidence/agent.md).",
        )
    ]
    parts.append(table(["source", "turned on by"], [[f"[`{n}`](#{n})", f.setting] for n, f in FACTS.items()]))
    for name, facts in FACTS.items():
        lines = [
            f"- from: {facts.reads}",
            f"- pace: {facts.pace}",
            f"- rights: {facts.rights}",
            f"- when it gives nothing: {facts.missing}",
            f"- setting: {facts.setting}",
        ]
        listed = "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
        parts.append(f"## {name}\n\n" + prose(f"{facts.what[0].upper()}{facts.what[1:]}.") + f"\n{listed}\n")
    return "\n".join(parts)


def fleet_api() -> str:
    methods: list[list[object]] = []
    asked: dict[str, Descriptor] = {}
    for method in METHODS.values():
        request, reply = method.request.DESCRIPTOR, method.reply.DESCRIPTOR
        asked[request.name] = request
        stream = "stream of " if method is EXPORT else ""
        led = f"[`{request.name}`](#{request.name.lower()})"
        roles = ", ".join(sorted(method.roles))
        methods.append([f"`{method.name}`", method.summary, led, f"{stream}`{reply.name}`", roles])
    parts = [
        f"# The Fleet API\n\n{NOTE}\n"
        + prose(
            f"gRPC service `{SERVICE}` of the collector (port 7302). The console and the command `drover` "
            "use nothing else. `proto/drover_proto/fleet.proto` has all messages with their comments.",
            "Between machines it needs mutual TLS, and the certificate's role decides "
            "([roles](../how-to/tls.md#roles)). A request has 64 KiB at most, unpacked.",
        ),
        table(["method", "what", "request", "answer", "roles"], methods),
        "## Requests\n",
    ]
    for name, message in asked.items():
        fields: list[list[object]] = [[f"`{field.name}`", _type_of(field)] for field in message.fields]
        parts.append(f"### {name}\n\n" + (table(["field", "type"], fields) if fields else "No fields.\n"))
    return "\n".join(parts)


def _type_of(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = kind.name if kind else _SCALARS[field.type]
    return f"list of {name}" if field.is_repeated else name


_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def probes() -> str:
    """The page is written by hand, but for its table."""
    lines: list[list[object]] = [
        [
            f"`{p.name}`",
            p.level.value if p.level else "of a group" if p.name.endswith(GROUP) else "by name",
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
    assert begin and end, "docs/reference/probes.md has lost the marks around its table"
    return f"{before}{NOTE}\n{made}\n{end}{after}"


def dcgm_names_page() -> str:
    rows: list[list[object]] = []
    for name, kind, unit, metric, _, doubt in ROWS:
        known = BY_NAME.get(metric)
        factor = "" if known is None else f"{1 / known.sources['dcgm'].scale:g}"
        own = f"`{metric}`" if known is not None else "the newest XID event"
        less = f" less `{LESS[name]}`" if name in LESS else ""
        rows.append([f"`{name}`", kind, unit, own + less, known.unit if known else "", factor, doubt])
    return (
        f"# Names of dcgm-exporter\n\n{NOTE}\n"
        + prose(
            "What the pages and exporters with the naming `dcgm` give ([Standards](../how-to/standards.md)): a metric "
            "of [the catalog](metrics.md) times a factor. The agent reads pages of dcgm-exporter by the "
            "same factors. Names, types and units: `etc/default-counters.csv` and `etc/dcp-metrics-included.csv` of "
            "NVIDIA/dcgm-exporter, `dcgm_fields.h` of NVIDIA/DCGM."
        )
        + "\n"
        + table(["Name", "Type", "Unit", "Metric", "Its unit", "Times", "Doubt"], rows)
        + "\n## Not given\n\n"
        + table(["Name", "Why"], [[f"`{name}`", why] for name, why in NOT_GIVEN.items()])
    )


def rest() -> str:
    lines: list[list[object]] = []
    for route in ROUTES:
        options = [f"`{public_name(each.name)}`" for each in offered(route)] + (
            ["`limit`", "`cursor`"] if route.paging else []
        )
        roles = ", ".join(sorted(route.method.roles))
        lines.append([route.verb, f"`{route.path}`", route.method.summary, ", ".join(options), roles])
    lines.append(["GET", "`/incidents/stream`", "Incidents as they change (server-sent events).",
                  "`min_severity`, `node`, `kind`", "admin, operator, viewer"])  # fmt: skip
    lines.append(["GET", "`/annotations`", "Incidents of a time, as annotations of Grafana.",
                  "`min_severity`, `node`, `kind`, `from`, `to`", "admin, operator, viewer"])  # fmt: skip
    lines.append(["GET", "`/openapi.json`", "The OpenAPI 3.1 document.", "", "admin, operator, viewer"])
    return "\n".join([
        f"# REST\n\n{NOTE}\n"
        + prose(
            f"Addresses below `{ROOT}` at `rest.listen` ([how to use it](../how-to/rest.md)). The version of the "
            f"schema is {VERSION}.",
        ),
        table(["verb", "address", "what", "parameters, or keys of the body", "roles"], lines),
        "Not by REST:\n",
        "\n".join(f"- {name}: {why}" for name, why in LEFT_OUT.items()) + "\n",
        REST_RULES.format(page=PAGE, most=PAGE_MOST, body=BODY_BYTES // 1024, each=CALLS_EACH, streams=STREAMS_MOST,
                          streams_each=STREAMS_EACH, hours=round(STREAM_S / 3600), kept=round(KEPT_S / 3600)),
    ])  # fmt: skip


REST_RULES = """## Forms

- A time is RFC 3339 in UTC with milliseconds: `2026-11-21T06:17:00.250Z`. A time that you send
  needs a zone. A name that ends in `_ms` is a duration in milliseconds.
- A value that is not known, and a time that has not come, is `null`, never 0. Empty text is none.
- Every field of the schema is in every answer.
- **Pages.** A list has `limit` (default {page}, at most {most}) and `cursor`; `next_cursor` leads
  to the next page and is null on the last. A page begins behind the last item of the one before
  it, also when the list has changed meanwhile or that item has left it: no item that stays is left
  out, and one may come twice. Lists end at 10,000 items (jobs and leafs at
  5,000, probe orders at 1,000): narrow them by a filter or by time.
- **Conditions.** Each GET has an `ETag`; with `If-None-Match` an answer that is the same is a
  304.
- **Errors** are `application/problem+json` (RFC 9457): `type` ends in a word for programs,
  `detail` says what to do. 409: the state of the node, decision or silence is against it, or this
  collector stands by. 429 and 503 have `Retry-After`.
- **Acts** need `Content-Type: application/json` and a new `Idempotency-Key`. The same key with
  the same request gives the first answer again for {kept} hours, also while the act goes on; with
  another request it is a 422. What was refused may be sent again with its key. Keys are in the
  memory of one collector: after its restart, look into `/actions` before you repeat an act.
- **The stream** begins with the open incidents, or behind `Last-Event-ID`. It sends the newest
  version of each incident that changes, some twice: `id` and `version` identify them. An event
  `gap` says that the id is older than 7 days. It ends after {hours} h; go on behind the last
  event.

## Limits

A body has {body} KiB. A certificate has {each} requests under way and {streams_each} streams; all
together have {streams} streams. A request has 10 s to arrive, an answer 10 s for each piece that
its reader takes; then the connection is closed. REST has as many connections as the metrics page,
and the worker threads of the Fleet API: a slow reader holds a thread of its own and nothing else.

## What may change

Within `/api/v1`:

- A patch of the schema's version changes texts.
- A minor one adds: addresses, parameters that may be left out, fields of answers, words of a
  field such as `kind`, events of the stream. Clients must accept these.
- A field, parameter or address is not removed, renamed or given another type or meaning, and an
  error does not get another status. That needs `/api/v2`; then `/api/v1` stays for two minor
  releases of Drover.
- `drover_client` has a version of its own by the same rules. Its `SCHEMA_VERSION` says for which
  schema it was made. An older client works with a newer collector.

Sentences (`summary`, `advice`, `detail`, `text`) are for people: they may change at any time.
"""

PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metrics,
    "settings.md": settings,
    "commands.md": commands,
    "xids.md": xids,
    "sources.md": sources,
    "probes.md": probes,
    "events.md": events,
    "fleet-api.md": fleet_api,
    "rest.md": rest,
    "dcgm-names.md": dcgm_names_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), "utf-8")
    sys.exit(0)
