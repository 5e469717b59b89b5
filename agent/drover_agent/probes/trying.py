"""A run of probes, and, where one hung or crashed on a GPU, a second try of that one on it alone, by a new process.

Once may be chance, another program's doing or what ran before; twice is a finding about the GPU. Where the driver does
not answer for it any more there is no second try: that is the finding. A driver that answers for none of them is lost
as a whole: a finding about the node, and about none of its GPUs. What a second try does not repeat is reported too,
and clears nothing: the run was cut short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from drover_agent.probes import eligible
from drover_agent.probes.eligible import Gpu, Guard
from drover_agent.probes.runner import End, Report, Request, Runner

LEAST_S = 60.0  # for a second try, however long the first took

Start = Callable[[Runner], None]  # receives each runner before it begins, to stop it


def run(
    request: Request,
    gpus: Sequence[Gpu],
    started: Start,
    show_progress: Callable[[str], None],
    tolerated: Sequence[int] = (),
    look: Callable[[], eligible.Found] = eligible.look,
    wanted: Callable[[], str] = str,
) -> Report:
    """`tolerated`: processes that a person forced the probes upon. `wanted`: why the node is given back, else ""."""
    report = _once(request, gpus, started, show_progress, tolerated, wanted)
    silent = report.end is End.LOST or report.silent
    if not silent and (report.end not in (End.HUNG, End.CRASHED) or report.gpu is None or not report.probe):
        return report
    if report.stuck:
        report.detail += "; its process cannot be killed: it stands in a call into the driver"
    found, why = _asked(look)
    if why:  # no word against the GPU that was under test just then
        return dataclasses.replace(report, end=End.LOST, gpu=None, detail=f"{report.detail}; {why}")
    if silent:
        return report
    if report.stuck:
        return _ended(report, End.LOST, report.detail)
    gpu = next(gpu for gpu in gpus if gpu.slot == report.gpu)
    now = next((one for one in found if one.uuid == gpu.uuid), None)
    if now is None or now.refusal:
        why = now.refusal if now is not None else "the driver does not list it any more"
        return _ended(report, End.LOST, f"{report.detail}; {why}")
    if [pid for pid in now.pids if pid not in tolerated] or (now.unseen_bytes and not tolerated):
        return _ended(report, report.end, f"{report.detail}; no second try: {now.why_not()}")
    show_progress(f"{report.probe} on GPU {report.gpu} once more: it {report.end.value}")
    refs = tuple(ref for ref in request.gpus if ref.slot == report.gpu)
    left_s = max(LEAST_S, request.timeout_s - report.seconds)
    alone = dataclasses.replace(request, probes=(report.probe,), gpus=refs, timeout_s=left_s)
    again = _once(alone, [now], started, show_progress, tolerated, wanted)
    report.seconds += again.seconds
    if again.end in (End.HUNG, End.CRASHED, End.LOST):
        report.tries = 2
        end = End.LOST if again.stuck or again.end is End.LOST else report.end
        return _ended(report, end, f"{report.detail}; in a second try on it alone: {again.detail}")
    if again.end is End.DONE:
        return _ended(report, report.end, f"{report.detail}; a second try on it alone went well")
    return _ended(report, report.end, f"{report.detail}; a second try failed: {again.detail}")


def _asked(look: Callable[[], eligible.Found]) -> tuple[Sequence[Gpu], str]:
    """The node's GPUs; and, where the driver answers for none of several, why: then it is the driver of the node."""
    try:
        found = look().gpus
    except eligible.DriverError as error:
        return (), str(error)
    silent = len(found) != 1 and not any(gpu.uuid for gpu in found)
    return found, "the driver answers for no GPU of this node any more" if silent else ""


def _ended(report: Report, end: End, detail: str) -> Report:
    return dataclasses.replace(report, end=end, detail=detail)


def _once(
    request: Request,
    gpus: Sequence[Gpu],
    started: Start,
    show_progress: Callable[[str], None],
    tolerated: Sequence[int],
    wanted: Callable[[], str],
) -> Report:
    with Guard(gpus, tolerated) as guard:
        runner = Runner(request, lambda session: wanted() or guard.needed(session), show_progress)
        started(runner)
        return _with_silence(runner.run(), guard)


def _with_silence(report: Report, guard: Guard) -> Report:
    """That the driver lost a GPU under the probe is its finding, and no giving way."""
    report.silent = guard.silent and report.end is End.STOPPED
    if guard.lost is None or report.end is not End.STOPPED:
        return report
    detail = f"the driver lost GPU {guard.lost} under the probe; it {report.detail}"
    return dataclasses.replace(report, end=End.LOST, gpu=guard.lost, detail=detail)
