"""Three nodes as network namespaces measure together, and one link is delayed: the report names it and nobody else.

Real probe processes and torch's gloo through a real network stack. `benchmarks/bench_validate.py` slows a node too,
with four agents, their probe services, a collector and the command (docs/evidence/validate.md): on a machine that does
other work, how slow a node is cannot be a test.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from drover_agent.probes.base import Group
from drover_agent.probes.runner import CHILD, End, Report, Request, Runner
from drover_cli.report.forms import page_markdown
from drover_cli.validation.judge import judge
from drover_cli.validation.model import Answer, Mark, Member
from drover_cli.validation.page import LEGEND, Validation, page
from drover_core.model.events import ProbeOrder, ProbeReason, ProbeResult
from testbed.namespaces import can, inside, switched

pytestmark = pytest.mark.system

PORT = 29_611
PROBES = ("pairs_group",)
SCALE = 0.02  # of the seconds at quick; the least number of repeats takes longer


def test_a_delayed_link_is_named_in_the_report(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="probes need torch: pip install 'drover[probe]'")
    if why := can():
        pytest.skip(why)
    nodes = tuple(f"dv{os.getpid()}n{number}" for number in range(3))
    addresses = {node: f"10.213.{os.getpid() % 200}.{number}" for number, node in enumerate(nodes, 1)}
    with switched(addresses) as switch:
        switch.delays[nodes[0], nodes[1]] = 0.02

        def measured(number: int) -> Report:
            group = Group(addresses[nodes[0]], PORT, number, 3, nodes, tuple(addresses.values()), "k", 90)
            command = inside(nodes[number], *CHILD)
            request = Request(PROBES, scale=SCALE, folder=str(tmp_path), group=asdict(group))
            return Runner(request, command=command).run()

        with ThreadPoolExecutor(3) as pool:
            reports = list(pool.map(measured, range(3)))
    assert [(report.end, report.detail) for report in reports] == [(End.DONE, "")] * 3
    answers = [_answer(nodes, number, report) for number, report in enumerate(reports)]
    members = [Member(node, "new", "l1", "drained", "1.0") for node in nodes]
    judged = judge(answers, members)
    named = {finding.about for finding in judged.findings if finding.mark is Mark.FAILED}
    assert named == {f"{nodes[0]} - {nodes[1]}"}, judged.rows
    assert judged.mark is Mark.FAILED
    made = Validation(1, 2, "", "anna", "", "quick", ("network",), {}, members, answers, judged)
    text = page_markdown(page(made), LEGEND)
    for about in named:
        assert f"| FAIL | {about} |" in text


def _answer(nodes: tuple[str, ...], number: int, report: Report) -> Answer:
    """Return what the collector has of a node's report."""
    order = ProbeOrder(
        f"p{number}", nodes[number], (), "quick", PROBES, ProbeReason.PERSON, "done", 1, group="g", members=nodes
    )
    results = [
        ProbeResult(
            f"p{number}/{k}", nodes[number], r.gpu, r.probe, 1, r.ok, r.value, r.unit, r.detail, order.id, r.peer,
            r.spread, r.repeats, "quick", device="cpu",
        )
        for k, r in enumerate(report.results)
    ]  # fmt: skip
    return Answer("network", order, results, ())
