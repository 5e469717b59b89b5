"""Judge what a validation measured: the nodes against each other, and a group against an earlier report. Pure.

What the collector judges (a node's own figures against the fleet) is taken as it judged it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from drover_cli.validation.model import Answer, Finding, Judgement, Mark, Member, Row
from drover_cli.validation.network import BANDWIDTH, CPU, LATENCY, judge_pairs, pairs_of
from drover_core.model.events import ProbeResult
from drover_core.model.pair_rounds import pair_rounds

SOLO = "fsdp_group_solo"
TRAINING = ("fsdp_group", "tp_group")
LEAST = 3  # devices: of two nobody knows which is the slow one
# SuperBench (USENIX ATC'24; microsoft/superbenchmark ships 5 %) calls what is 5 % off another result.
MATERIAL = 0.05
CPU_MATERIAL = 2.0  # as in network.py
ERRORS, SPREADS = 4.0, 2.0  # as in network.py
STEADY = 0.90  # of the median: the slowest tenth of a minute of a steady run lies above
OPEN = ("asked", "sent")
TOGETHER = ("network", "training")

Reference = Mapping[tuple[str, str, str], float]  # (figure, node or "", device) -> value of an earlier report


def judge(
    answers: Sequence[Answer],
    members: Sequence[Member],
    not_run: Iterable[str] = (),
    reference: Reference | None = None,
) -> Judgement:
    """
    Args:
        not_run: stages that were left out. reference: of an earlier report over as many nodes.
    """
    rows: list[Row] = [row for answer in answers for row in answer.rows]
    findings: list[Finding] = []
    for answer in answers:
        findings += _of_order(answer)
    together = [answer for answer in answers if answer.order.group]
    if together:
        figures = [result for answer in together for result in answer.figures]
        solo_rows, slow = _solo([f for f in figures if f.probe == SOLO and f.value])
        findings += slow
        leaf = {member.name: member.leaf for member in members}
        pair_rows, found = judge_pairs(
            pairs_of(figures, together[0].order.members), leaf, {finding.about.split(" ")[0] for finding in slow}
        )
        training_rows, unsteady = _training(figures, reference or {})
        rows += [*pair_rows, *training_rows, *solo_rows]
        findings += [*found, *unsteady, *_stood_still(together), *_missing(together, figures)]
    left_out = tuple(not_run)
    mark = _mark(answers, rows, findings, complete=not left_out)
    return Judgement(rows, findings, mark, _doubts(answers, rows, left_out))


def _of_order(answer: Answer) -> list[Finding]:
    """Return what the collector judged, and that an order gave no answer. Of a group only what failed: it is judged
    here."""
    order, stage = answer.order, answer.stage
    failed = [v for v in answer.verdicts if v.passed is False]
    found = [Finding(stage, v.node if v.gpu is None else f"{v.node} GPU {v.gpu}", Mark.FAILED, v.text) for v in failed]
    if answer.late or order.state in OPEN:
        text = f"{order.node}: no answer in time; the others had ended" if order.group else f"{order.node}: no answer"
        found.append(Finding(stage, order.node, Mark.UNKNOWN, text))
    elif order.state == "failed" and not failed:
        found.append(Finding(stage, order.node, Mark.UNKNOWN, f"{order.node}: not measured: {order.detail}"))
    elif not order.group and not failed:
        unsure = next((v for v in answer.verdicts if v.passed is None), None)
        if unsure is not None:
            found.append(Finding(stage, order.node, Mark.UNKNOWN, unsure.text))
    return found


def _stood_still(together: Sequence[Answer]) -> list[Finding]:
    """Name the nodes that others saw standing still, once each; and why a stage gave no figure where nobody is.

    A node that lives and names another, or nobody, is only a doubt: perhaps it had left earlier. So is one that gave
    a figure of its own.
    """
    own: dict[tuple[str, str], set[str]] = {}
    for answer in together:
        for r in answer.figures:
            if r.value is None:
                said = own.setdefault((answer.order.node, r.probe), set())
                said.add(answer.order.members[r.peer] if r.peer is not None else "")
    gave = {(r.node, r.probe) for answer in together for r in answer.figures if r.value is not None}
    found: dict[tuple[str, str], Finding] = {}
    for answer in together:
        for result in answer.figures:
            if result.value is not None:
                continue
            node = answer.order.members[result.peer] if result.peer is not None else ""
            said = own.get((node, result.probe), set() if (node, result.probe) in gave else {node})
            mark = Mark.FAILED if node and node in said else Mark.UNKNOWN
            about = node or "all nodes"
            found.setdefault(
                (result.probe, about), Finding("together", about, mark, f"{result.probe}: {result.detail}")
            )
    return list(found.values())


def _missing(together: Sequence[Answer], figures: Sequence[ProbeResult]) -> list[Finding]:
    """Return a doubt for each figure that nodes, devices or pairs should have given and did not: no pass then.

    Where an order did not end well, or gives the reason itself, there is a finding already.
    """
    members = together[0].order.members
    if any(f.value is None for f in figures) or any(a.late or a.order.state != "done" for a in together):
        return []
    has = {(f.node, f.gpu, f.probe) for f in figures}
    slots: dict[str, set[int | None]] = {}
    for f in figures:
        if f.probe in (SOLO, BANDWIDTH, LATENCY):
            slots.setdefault(f.node, set()).add(f.gpu)
    lacking: dict[str, list[str]] = {}
    for answer in together:
        node, asked = answer.order.node, answer.order.probes or (BANDWIDTH, *TRAINING)
        for probe in asked:
            whole = [(None, name) for name in (probe, f"{probe}_slowest")] if probe in TRAINING else []
            of_each = [SOLO] if probe == TRAINING[0] else [BANDWIDTH, LATENCY] if probe == BANDWIDTH else []
            devices = sorted(slots.get(node, {None}), key=str)
            for gpu, name in [*whole, *((gpu, name) for name in of_each for gpu in devices)]:
                if (node, gpu, name) not in has:
                    lacking.setdefault(name, []).append(node if gpu is None else f"{node} GPU {gpu}")
    met = {frozenset((f.node, members[f.peer])) for f in figures if f.probe == BANDWIDTH and f.peer is not None}
    if BANDWIDTH not in lacking and met:
        wanted = {frozenset((members[a], members[b])) for pairs in pair_rounds(len(members)) for a, b in pairs}
        left = sorted(" - ".join(sorted(pair)) for pair in wanted - met)
        lacking |= {BANDWIDTH: left} if left else {}
    return [
        Finding("together", "all nodes", Mark.UNKNOWN, f"{name}: no figure of {', '.join(of[:5])} ({len(of)} in all)")
        for name, of in lacking.items()
    ]


def _solo(figures: Sequence[ProbeResult]) -> tuple[list[Row], list[Finding]]:
    """Judge each device alone against the fast quarter of the group's."""
    if not figures:
        return [], []
    values = [f.value or 0.0 for f in figures]
    centre = statistics.quantiles(values, n=4, method="inclusive")[2] if len(values) > 1 else values[0]
    wide = max(values) / centre - 1
    error = statistics.median(1.25 * (f.spread or 0.0) / max(f.repeats, 1) ** 0.5 for f in figures)
    material = CPU_MATERIAL if any(f.device == CPU for f in figures) else MATERIAL
    tolerance = max(material, SPREADS * wide, ERRORS * error)
    rows, found = [], []
    for figure, value in zip(figures, values, strict=True):
        on = "" if figure.gpu is None else f"GPU {figure.gpu}"
        worse = centre / value - 1
        mark = Mark.UNKNOWN if len(values) < LEAST else Mark.FAILED if worse > tolerance else Mark.PASSED
        of = f"{centre:.4g}, the fast quarter of {len(values)} devices"
        why = f"{worse:+.0%} off, {tolerance:.0%} allowed" if len(values) >= LEAST else "too few devices to compare"
        rows.append(Row("training", figure.node, on, SOLO, value, figure.unit, of, mark, why, figure.device))
        if mark is Mark.FAILED:
            about = f"{figure.node} {on}".strip()
            text = f"{about}: slow by itself, {value:.4g} {figure.unit} against {of} ({why})"
            found.append(Finding("training", about, mark, text))
    return rows, found


def _training(figures: Sequence[ProbeResult], reference: Reference) -> tuple[list[Row], list[Finding]]:
    """Judge throughput against an earlier report and its slowest window against the median.

    All nodes step together, so one node's figure stands for all: the lowest.
    """
    rows, found = [], []
    for name in TRAINING:
        whole = [f for f in figures if f.probe == name and f.value]
        slowest = [f for f in figures if f.probe == f"{name}_slowest" and f.value]
        if not whole or not slowest:
            continue
        lowest = min(whole, key=lambda f: f.value or 0.0)
        value, device = lowest.value or 0.0, lowest.device
        before = reference.get((name, "", device))
        mark, why, of = Mark.UNKNOWN, "no earlier report to hold it against", ""
        if before:
            mark = Mark.PASSED if value >= (1 - MATERIAL) * before else Mark.FAILED
            why, of = f"{value / before - 1:+.1%} of it, -{MATERIAL:.0%} allowed", f"{before:.4g}, the earlier report"
        rows.append(Row("training", "all", "", name, value, lowest.unit, of, mark, f"{lowest.detail}; {why}", device))
        if mark is Mark.FAILED:
            found.append(Finding("training", "all nodes", mark, f"{name}: {value:.4g} {lowest.unit}, {why} ({of})"))
        least = min(f.value or 0.0 for f in slowest)
        steady = Mark.PASSED if least >= STEADY * value else Mark.UNKNOWN
        spread = f"variation of its windows {lowest.spread or 0.0:.1%}"
        why, of = f"{least / value:.0%} of the median; {spread}", f"{STEADY:.0%} of the median"
        rows.append(
            Row(
                "training", "all", "", f"{name}_slowest", least, lowest.unit, of, steady, why,
                device,
            )
        )  # fmt: skip
        if steady is not Mark.PASSED:
            found.append(
                Finding("training", "all nodes", steady, f"{name} is not steady: its slowest window has {why}")
            )
    return rows, found


def _doubts(answers: Sequence[Answer], rows: Sequence[Row], not_run: Iterable[str]) -> list[str]:
    found = [f"Not run: the stage {stage}." for stage in not_run]
    devices = {f.device for answer in answers for f in answer.figures if f.device}
    if CPU in devices:
        found.append("CPUs were measured, since no NVIDIA driver is there: nothing here speaks for a GPU.")
    for answer in answers:
        for result in answer.figures:
            if result.value is None and not answer.order.group:
                on = "" if result.gpu is None else f" GPU {result.gpu}"
                found.append(f"{result.node}{on}: {result.probe} was not measured: {result.detail}")
    if any(row.figure in TRAINING and not row.reference for row in rows):
        found.append("The training steps had no earlier report (--reference): their throughput is not judged.")
    return list(dict.fromkeys(found))


def _mark(
    answers: Sequence[Answer], rows: Sequence[Row], findings: Sequence[Finding], *, complete: bool
) -> Mark:  # fmt: skip
    """A pass is proved: each order ended well, the collector passed each node, and no comparison is open."""
    if any(finding.mark is Mark.FAILED for finding in findings):
        return Mark.FAILED
    devices = {f.device for answer in answers for f in answer.figures}
    alone = [answer for answer in answers if not answer.order.group]
    proved = (
        bool(answers)
        and complete
        and not findings
        and CPU not in devices
        and all(answer.verdicts and all(v.passed for v in answer.verdicts) for answer in alone)
        and all(row.mark is Mark.PASSED for row in rows if row.stage in TOGETHER and row.figure not in TRAINING)
    )  # fmt: skip
    return Mark.PASSED if proved else Mark.UNKNOWN
