"""A scraped fleet is judged with care: silence of pages drains nothing, and AMD's columns raise nothing of NVIDIA's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from drover_cli.doctor.finding import FindingState
from drover_cli.doctor.running import scraping
from drover_collector.detectors import DETECTORS
from drover_collector.detectors._lib.examples import START_MS, play, small_fleet
from drover_collector.detectors.liveness import detector as liveness
from drover_collector.fleet.buckets import Floats
from drover_collector.incidents.incident import opened
from drover_collector.scrape.blind import XID_EVENTS, blindness
from drover_collector.scrape.tables import ALL_NAMES, table
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Event, EventKind, Finding, RecommendedAction, Severity
from drover_core.model.scraped import blind_of, origin_of
from drover_proto import fleet_pb2 as pb

Columns = dict[str, Floats]
DRAINS = (RecommendedAction.DRAIN, RecommendedAction.ISOLATE)


def _findings(
    buckets: int, change: Callable[[int, Columns, Columns], None], silent: Callable[[int], list[int]] = lambda _: []
) -> list[Finding]:
    state, found = None, []
    for window, now_ms in play(small_fleet(), buckets, change, silent):
        new, state = liveness.detect(window, state, now_ms)
        found += new
    return found


def _scraped(_number: int, _gpu: Columns, node: Columns) -> None:
    node["exporters_up"], node["exporters_down"] = np.full(8, 2.0), np.zeros(8)


def test_a_scraped_node_that_stops_answering_is_unknown_and_never_drained() -> None:
    def stops(number: int, gpu: Columns, _node: Columns) -> None:
        if number >= 8:  # its job stops with it, as if the node were dead
            gpu["power_w"][:] = 100

    def scraped(number: int, gpu: Columns, node: Columns) -> None:
        stops(number, gpu, node)
        _scraped(number, gpu, node)

    found = _findings(45, scraped, lambda number: [2] if number >= 8 else [])  # six minutes
    assert {(f.cause, f.node, f.action) for f in found} == {("pages_silent", "n02", RecommendedAction.ADVISE)}
    assert found[0].ts_ms - found[0].since_ms < 60_000  # its job stopped with it
    by_agents = _findings(45, stops, lambda number: [2] if number >= 8 else [])
    assert any(f.action in DRAINS for f in by_agents)  # the same silence of an agent


def test_a_scraped_node_that_was_taken_off_the_list_is_not_monitored_and_not_silent() -> None:
    def played(number: int, gpu: Columns, node: Columns) -> None:
        del gpu["power_w"]
        _scraped(number, gpu, node)

    stop = Event("e1", START_MS + 90_000, "n02", None, EventKind.LIFECYCLE, "agent_stopped", "", source="scrape")
    state, found = None, []
    for window, now_ms in play(small_fleet(), 45, played, lambda n: [2] if n >= 8 else [], events={9: [stop]}):
        new, state = liveness.detect(window, state, now_ms)
        found += new
    assert {(f.cause, f.node, f.severity) for f in found} == {("agent_stopped", "n02", Severity.INFO)}
    assert {f.summary for f in found} == {"Node n02 is not monitored: it was taken off the list of exporters' pages."}


@pytest.mark.parametrize(("buckets_away", "reported"), [(13, False), (20, True)])
def test_pages_that_fail_for_two_minutes_are_waited_for(buckets_away: int, reported: bool) -> None:
    """An exporter that restarts, or a network that blinks, is waited for as an agent is."""

    def without_jobs(number: int, gpu: Columns, node: Columns) -> None:
        del gpu["power_w"]  # nothing says whether the job goes on
        _scraped(number, gpu, node)

    found = _findings(40, without_jobs, lambda number: [2] if 8 <= number < 8 + buckets_away else [])
    assert {f.cause for f in found} == ({"pages_silent"} if reported else set())


def test_a_node_whose_pages_were_silent_before_a_restart_is_not_drained_after_it() -> None:
    played = list(play(small_fleet(), 90, _scraped, lambda number: [2] if number >= 8 else []))
    state, found, book = None, [], []
    for window, now_ms in played[:40]:
        new, state = liveness.detect(window, state, now_ms)
        book = [f for f in new if not f.cleared]
    (open_,) = (f for f in book if f.cause == "pages_silent")
    window = played[40][0]
    state = liveness.restored(
        [opened(open_, ("node", "n02", None), open_.ts_ms).incident], window.index, window.newest.start_ms
    )
    for window, now_ms in played[40:]:
        new, state = liveness.detect(window, state, now_ms)
        found += new
    assert {(f.cause, f.action) for f in found} == {("pages_silent", RecommendedAction.ADVISE)}


def test_a_target_of_gpus_that_is_taken_off_the_list_drains_nobody() -> None:
    def only_host(number: int, gpu: Columns, node: Columns) -> None:
        _scraped(number, gpu, node)
        if number >= 8:  # node_exporter goes on; no page of GPUs fails: none is asked for
            node["exporters_up"][2] = 1.0
            for column in gpu.values():
                column[16:24] = np.nan

    found = _findings(40, only_host)
    assert {(f.cause, f.node, f.action) for f in found} == {("pages_without_gpus", "n02", RecommendedAction.ADVISE)}


def test_a_page_of_gpus_that_cannot_be_read_loses_no_gpu() -> None:
    def without_page(number: int, gpu: Columns, node: Columns) -> None:
        _scraped(number, gpu, node)
        if 8 <= number < 30:  # node_exporter answers, dcgm-exporter does not
            node["exporters_up"][2], node["exporters_down"][2] = 1.0, 1.0
            for column in gpu.values():
                column[16:24] = np.nan

    assert _findings(40, without_page) == []


def _many(buckets: int, away: Callable[[int], list[int]], all_pages: bool, restart_at: int = 0) -> list[list[Finding]]:
    """Play 40 scraped nodes.

    Args:
        away: whose pages are not read in a bucket: all of them, or that of the GPUs alone.
        restart_at: the bucket before which the collector starts again, with what was open; 0: it does not.
    """

    def played(number: int, gpu: Columns, node: Columns) -> None:
        node["exporters_up"], node["exporters_down"] = np.full(40, 2.0), np.zeros(40)
        del gpu["power_w"]
        if not all_pages:
            for n in away(number):
                node["exporters_up"][n] = node["exporters_down"][n] = 1.0
                for column in gpu.values():
                    column[8 * n : 8 * n + 8] = np.nan

    found: list[list[Finding]] = []
    state = None
    windows = play(small_fleet(40), buckets, played, away if all_pages else lambda _: [])
    for number, (window, now_ms) in enumerate(windows):
        if number and number == restart_at:
            open_ = [opened(f, (f.scope, f.node or "", None), f.ts_ms).incident for f in found[-1]]
            state = liveness.restored(open_, window.index, window.newest.start_ms)
        new, state = liveness.detect(window, state, now_ms)
        found.append(new)
    return found


@pytest.mark.parametrize(("all_pages", "cause"), [(True, "pages_silent"), (False, "gpu_page_silent")])
def test_pages_of_many_nodes_that_fall_silent_at_once_are_one_finding_and_no_drain(all_pages: bool, cause: str) -> None:
    """A new version of an exporter, or a network that breaks."""
    found = _many(60, lambda n: [2, *range(10, 22)] if n >= 8 else [], all_pages)
    (many,) = {(f.cause, f.scope, f.node, len(f.members)) for new in found for f in new}
    assert many == (f"{cause}_common", "rack", None, 13)
    assert not [f for new in found for f in new if f.action in DRAINS or f.cleared]
    assert len(found[-1]) == 1 and found[-1][0].severity is Severity.WARNING
    few = _many(60, lambda n: [2, 10, 20] if n >= 8 else [], all_pages)
    assert {(f.cause, f.node) for new in few for f in new} == {(cause, f"n{n}") for n in ("02", "10", "20")}


@pytest.mark.parametrize(("all_pages", "cause"), [(True, "pages_silent"), (False, "gpu_page_silent")])
def test_nodes_whose_pages_fall_silent_one_by_one_stay_apart_and_join_those_of_their_time(
    all_pages: bool, cause: str
) -> None:
    def away(number: int) -> list[int]:
        alone = [2] if number >= 8 else []
        upgraded = [10 + n for n in range(12) if 90 + 6 * n <= number < 230 + 6 * n]  # one a minute, and back
        return alone + upgraded

    found = _many(330, away, all_pages)
    newest = {(f.cause, f.node) for f in found[-1]}
    assert newest == {(cause, "n02")}  # what began before them is a fault of its own, and goes on
    ever = {f.cause for new in found for f in new}
    assert ever == {cause, f"{cause}_common"}
    largest = max(len(f.members) for new in found for f in new)
    assert 8 <= largest <= 12
    whose = {name for new in found for f in new for name, _ in f.members if f.cause == f"{cause}_common"}
    assert "n02" not in whose
    ends = [f for new in found for f in new if f.cleared and f.cause == f"{cause}_common"]
    assert len(ends) == 1
    at = next(number for number, new in enumerate(found) if any(f.cause == f"{cause}_common" for f in new))
    assert {f.node for f in found[at] if f.cause == cause and not f.cleared} == {"n02"}  # none is said twice


@pytest.mark.parametrize("all_pages", [True, False])
def test_many_silent_pages_are_still_that_after_a_restart(all_pages: bool) -> None:
    """Else their silence would be that of agents, which asks for drains."""
    found = _many(110, lambda n: list(range(10, 22)) if n >= 8 else [], all_pages, restart_at=60)
    assert len(found[59]) == 1
    assert {(f.cause, f.action, f.cleared, len(f.members)) for new in found[59:] for f in new} == {
        (found[59][0].cause, RecommendedAction.ADVISE, False, 12)
    }
    assert all(found[59:])  # it does not end in between


def test_a_node_that_got_an_agent_while_pages_are_silent_is_drained_if_it_dies_and_the_collector_starts_again() -> None:
    """The incident of the pages keeps its members: it says nothing of a node whose agent has spoken since."""

    def played(number: int, gpu: Columns, node: Columns) -> None:
        node["exporters_up"], node["exporters_down"] = np.full(40, 2.0), np.zeros(40)
        del gpu["power_w"]
        if number >= 40:  # n10 has an agent since
            node["exporters_up"][10] = node["exporters_down"][10] = np.nan

    def away(number: int) -> list[int]:
        silent = list(range(11, 22)) if number >= 8 else []
        return [10, *silent] if 8 <= number < 40 or number >= 70 else silent

    state, found, incidents = None, [], {}
    for number, (window, now_ms) in enumerate(play(small_fleet(40), 150, played, away)):
        if number == 92:  # between the warning and the drain
            state = liveness.restored(list(incidents.values()), window.index, window.newest.start_ms)
        found, state = liveness.detect(window, state, now_ms)
        for f in found:
            if (f.cause, f.node) not in incidents:
                incidents[f.cause, f.node] = opened(f, (f.scope, f.node or "", None), f.ts_ms).incident
        if number == 91:
            assert {(f.cause, f.node, f.action) for f in found} == {
                ("pages_silent_common", None, RecommendedAction.ADVISE),
                ("silent", "n10", RecommendedAction.ADVISE),
            }
            assert list(incidents) == [("pages_silent_common", None), ("silent", "n10")]
            incidents = dict(reversed(incidents.items()))  # whichever is the first
    (silent,) = (f for f in found if f.cause == "silent")
    assert (silent.node, silent.action) == ("n10", RecommendedAction.DRAIN)
    (many,) = (f for f in found if f.cause == "pages_silent_common")
    assert [name for name, _ in many.members] == [f"n{n}" for n in range(11, 22)]


def test_gpus_of_a_whole_fleet_whose_pages_are_silent_are_not_all_clear_after_a_restart() -> None:
    """An upgrade breaks the exporter of the GPUs on each node: no GPU has answered since the collector began again."""
    found = _many(110, lambda n: list(range(40)) if 8 <= n < 90 else [], False, restart_at=60)
    assert [(f.cause, len(f.members)) for f in found[59]] == [("gpu_page_silent_common", 40)]
    assert {(f.cause, f.cleared, len(f.members)) for new in found[59:90] for f in new} == {
        ("gpu_page_silent_common", False, 40)
    }
    assert all(found[59:90])  # it does not end before they answer
    assert [f.cleared for new in found[90:] for f in new] == [True]


def test_a_gpu_that_a_page_no_longer_has_is_lost() -> None:
    def without_gpu(number: int, gpu: Columns, node: Columns) -> None:
        _scraped(number, gpu, node)
        if number >= 8:
            for column in gpu.values():
                column[19] = np.nan

    found = _findings(24, without_gpu)
    assert ("gpu_lost", "n02", 3) in {(f.cause, f.node, f.gpu) for f in found}
    assert not [f for f in found if f.action in DRAINS]  # the exporter may be set to leave it out


def test_a_gpu_that_a_page_no_longer_has_is_lost_also_while_another_page_is_down_for_good() -> None:
    def without_gpu(number: int, gpu: Columns, node: Columns) -> None:
        _scraped(number, gpu, node)
        node["exporters_up"][2], node["exporters_down"][2] = 1.0, 1.0  # node_exporter
        if number >= 8:
            for column in gpu.values():
                column[19] = np.nan

    found = _findings(24, without_gpu)
    assert ("gpu_lost", "n02", 3) in {(f.cause, f.node, f.gpu) for f in found}
    assert {(f.node, f.gpu) for f in found} == {("n02", 3)}
    assert not [f for f in found if f.action in DRAINS]


@pytest.mark.parametrize(("unread", "found_it"), [(20, False), (40, True)])
def test_a_gpu_exporter_that_hangs_while_the_node_answers_is_reported_without_a_drain(
    unread: int, found_it: bool
) -> None:
    """So a driver that hangs shows where there is no agent: its exporter hangs with it."""

    def hung(number: int, gpu: Columns, node: Columns) -> None:
        _scraped(number, gpu, node)
        if 8 <= number < 8 + unread:
            node["exporters_up"][2], node["exporters_down"][2] = 1.0, 1.0
            for column in gpu.values():
                column[16:24] = np.nan

    found = [f for f in _findings(60, hung) if not f.cleared]
    wanted = {("gpu_page_silent", "n02", RecommendedAction.ADVISE)} if found_it else set()
    assert {(f.cause, f.node, f.action) for f in found} == wanted
    ended = [f.cause for f in _findings(60, hung) if f.cleared]
    assert ended == (["gpu_page_silent"] if found_it else [])  # the page is read again


AMD = {m.name for m in table("amd").metrics()}


def _as_amd(number: int, gpu: Columns, node: Columns) -> None:
    """A healthy fleet as AMD's page gives it: its columns alone, at work."""
    steady = np.random.default_rng(number).normal(0, 1, len(gpu["power_w"]))
    for name in [name for name in gpu if name not in AMD]:
        del gpu[name]
    for name in AMD - gpu.keys():
        gpu[name] = np.zeros(len(steady))
    gpu["nvlink_tx_bytes_per_s"] = gpu["nvlink_rx_bytes_per_s"] = 1e11 + 1e9 * steady
    gpu["energy_j"] = np.full(len(steady), 1e6 + 7000.0 * number)
    node.clear()
    _scraped(number, gpu, node)


def _all_findings(buckets: int, change: Callable[[int, Columns, Columns], None], only: str = "") -> list[Finding]:
    states: dict[str, object] = {}
    found = []
    for window, now_ms in play(small_fleet(), buckets, change):
        for detector in (d for d in DETECTORS if only in ("", d.name)):
            new, states[detector.name] = detector.detect(window, states.get(detector.name), now_ms)
            found += new
    return found


def test_a_healthy_amd_fleet_raises_nothing() -> None:
    assert _all_findings(24, _as_amd) == []


@pytest.mark.parametrize(
    ("metric", "kind", "cause"),
    [
        ("exporter_unhealthy", "memory", "exporter_unhealthy"),
        ("xgmi_uncorrected", "link", "xgmi_errors"),
        ("ecc_dram_uncorrected", "memory", "uncorrected_errors"),
    ],
)
def test_what_amds_page_says_of_one_gpu_is_found_without_a_drain(metric: str, kind: str, cause: str) -> None:
    def sick(number: int, gpu: Columns, node: Columns) -> None:
        _as_amd(number, gpu, node)
        gpu[metric][11] = float(number >= 6)

    found = _all_findings(12, sick, "memory")
    assert {(f.kind, f.cause, f.node, f.gpu) for f in found} == {(kind, cause, "n01", 3)}
    assert not [f for f in found if f.action in DRAINS]


# ---- who is blind


def _gives(name: str) -> set[str]:
    return {m.name for m in table(name).metrics()} | {XID_EVENTS for row in table(name).rows if row.event}


def test_each_detector_that_lacks_something_says_so_and_why() -> None:
    everything = set().union(*map(_gives, ALL_NAMES))
    nvidia = blindness(_gives("dcgm") | _gives("node"), {"nvidia"})
    assert "nvlink_active_links missing" in nvidia["links"] and "uncorrected HBM" not in nvidia.get("memory", "")
    amd = blindness(_gives("amd") | _gives("node"), {"amd"})
    assert amd["xid"] == "XIDs: NVIDIA's own, quiet on other GPUs"
    assert "row remaps: NVIDIA's own" in amd["memory"]
    assert "sm_active_ratio missing; AMD's exporter has no such field" in amd["hang"]
    assert "collect gpu_ecc_uncorrect_umc" in blindness(set(), {"amd"})["memory"]
    assert "DCGM" not in " ".join(blindness(set(), {"amd"}).values())
    nothing = blindness(set(), {"nvidia"})
    assert {"memory", "thermal", "straggler", "hang", "links", "xid", "kernel", "liveness"} <= nothing.keys()
    assert "kernel log" in blindness(everything, {"nvidia"})["kernel"]  # whatever is collected


def test_every_metric_of_a_table_has_a_column_of_its_scope() -> None:
    assert all(m.scope in (Scope.GPU, Scope.NODE, Scope.LINK) for name in ALL_NAMES for m in table(name).metrics())


def test_a_node_says_where_its_values_come_from_only_while_they_do() -> None:
    inventory = {"scrape.exporters": "dcgm-exporter", "scrape.blind.xid": "XIDs: missing", "driver": "550"}
    assert origin_of(inventory, "0.3.0 (scraped)") == "No agent: its values come from dcgm-exporter."
    assert origin_of(inventory, "0.3.0") == "" == origin_of({}, "0.3.0 (scraped)")
    assert blind_of(inventory) == {"xid": "XIDs: missing"}


def test_the_doctor_reports_pages_that_fail_and_detectors_that_are_blind() -> None:
    assert scraping(pb.System()) == []
    state = pb.ScrapingState(
        nodes=3, pages=6, failing=1, failing_pages=["n01, dcgm-exporter: it answers 404"], blind={"xid: XIDs": 3}
    )
    warned, blind = scraping(pb.System(scraping=state))
    assert warned.state is FindingState.WARN and "n01, dcgm-exporter: it answers 404" in warned.text
    assert (blind.state, blind.text) == (FindingState.UNKNOWN, "3 nodes: xid: XIDs")
    (healthy,) = scraping(pb.System(scraping=pb.ScrapingState(nodes=3, pages=6)))
    assert healthy.state is FindingState.OK
    (empty,) = scraping(pb.System(scraping=pb.ScrapingState()))
    assert empty.state is FindingState.UNKNOWN


def test_what_was_sent_and_was_not_used_is_a_finding() -> None:
    state = pb.ScrapingState(nodes=1, pages=1, unused={"no label names the node": 7})
    (found,) = [f for f in scraping(pb.System(scraping=state)) if f.name == "received"]
    assert (found.state, found.text) == (
        FindingState.WARN, "7 samples were not used since the start: no label names the node"
    )  # fmt: skip
    state.ClearField("unused")
    assert not [f for f in scraping(pb.System(scraping=state)) if f.name == "received"]
