"""Whose values a node's are is said by the rows and events that are judged, whichever collector took them."""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.pipeline.value_origins import KEPT_MS, ValueOrigins
from drover_collector.scrape.forgeable import ForgeablePages
from drover_collector.scrape.settings import ScrapeConfig
from drover_core.model.events import Event
from testbed.fleets import T0, index_of

INDEX = index_of()
ALL = {"n0", "n1", "n2"}


def _origins(
    forgeable: Container[str] = ALL,
    has_agent: Callable[[str], bool] = lambda _: False,
    others_take: Callable[[str], bool] = lambda _: False,
) -> ValueOrigins:
    return ValueOrigins(INDEX, lambda node: node in forgeable, has_agent, others_take)


def _bucket(at_ms: int, agents: set[str], pages: set[str]) -> Bucket:
    up = np.full(INDEX.node_count, np.nan)
    up[[INDEX.node_number[node] for node in pages]] = 1.0
    rows = np.array([node.name in agents | pages for node in INDEX.nodes], np.int32)
    none = np.full(INDEX.gpu_count, -1, np.int32)
    return Bucket(at_ms, BUCKET_MS, {}, {"exporters_up": up} if pages else {}, none + 1, rows, none)


def _xid(node: str, spool: str) -> Event:
    return Event(f"{node}/{spool}/64", T0, node, 1, "xid", "79", "fallen off the bus", "dcgm-exporter")


def test_before_anything_is_judged_the_stream_here_counts() -> None:
    origins = _origins(has_agent=lambda node: node == "n0")
    assert [origins.is_unproven(node) for node in ("n0", "n1")] == [False, True]
    assert not _origins(forgeable=()).is_unproven("n1")


def test_an_agent_that_reports_to_another_collector_proves_its_node() -> None:
    origins = _origins()
    origins.take_bucket(_bucket(T0, {"n0"}, {"n1"}))
    assert [origins.is_unproven(node) for node in ("n0", "n1", "n2")] == [False, True, True]


def test_what_is_written_to_another_collector_is_asked_about_though_the_agent_was_here() -> None:
    """Attack: the agent's node boots, and a writer speaks for it at the other collector."""
    origins = _origins(has_agent=lambda _: True)
    origins.take_bucket(_bucket(T0, ALL, set()))
    assert not origins.is_unproven("n1")
    origins.take_events([_xid("n1", "scrape")], T0 + 12_000)  # judged at once, before any bucket
    assert origins.is_unproven("n1") and not origins.is_unproven("n0")
    origins.take_events([_xid("n0", "7f3a")], T0 + 12_000)
    assert not origins.is_unproven("n0"), "an agent's own"


def test_an_agent_that_comes_back_does_not_answer_for_what_was_written_just_before() -> None:
    origins = _origins(has_agent=lambda _: True)
    origins.take_bucket(_bucket(T0, set(), {"n1"}))
    origins.take_bucket(_bucket(T0 + 10_000, {"n1"}, set()))
    assert origins.is_unproven("n1")
    origins.take_bucket(_bucket(T0 + KEPT_MS, {"n1"}, set()))
    assert not origins.is_unproven("n1")


def test_a_node_whose_pages_fell_silent_stays_unproven() -> None:
    origins = _origins()
    origins.take_bucket(_bucket(T0, set(), {"n1"}))
    origins.take_bucket(_bucket(T0 + 10 * KEPT_MS, {"n0"}, set()))
    assert origins.is_unproven("n1")


def test_what_an_agent_said_before_the_clock_went_back_is_not_newer_than_a_page() -> None:
    """A clock that was a day ahead: else what is written counts for a day as what the agent said."""
    origins = _origins()
    origins.take_bucket(_bucket(T0 + 86_400_000, {"n1"}, set()))
    origins.take_bucket(_bucket(T0, set(), {"n1"}))
    assert origins.is_unproven("n1")
    origins.take_bucket(_bucket(T0 + KEPT_MS, {"n1"}, set()))
    assert not origins.is_unproven("n1")


def test_a_collector_without_the_tables_asks_about_what_others_take() -> None:
    """A standby that takes over without `[rest.remote_write]` knows nothing of `ask_first`."""
    origins = _origins(forgeable=(), others_take=lambda _: True)
    origins.take_bucket(_bucket(T0, {"n0"}, {"n1"}))
    assert [origins.is_unproven(node) for node in ("n0", "n1", "n2")] == [False, True, False]
    proven = _origins(forgeable=(), others_take=lambda _: False)  # its own tables say: read over TLS
    proven.take_bucket(_bucket(T0, {"n0"}, {"n1"}))
    assert not proven.is_unproven("n1")


def test_its_own_tables_say_nothing_of_pages_that_another_collector_reads() -> None:
    """Each table `[[scrape]]` is given to one collector. The active one reads n1 over TLS, another n2 without."""
    pages = ForgeablePages([ScrapeConfig("here", "dcgm", ("n1=n1:9400",), tls=True)])
    origins = _origins(forgeable=pages, others_take=lambda node: not pages.vouches(node))
    origins.take_bucket(_bucket(T0, {"n0"}, {"n1", "n2"}))
    assert [origins.is_unproven(node) for node in ("n0", "n1", "n2")] == [False, False, True]


def test_ids_of_other_forms_and_unknown_nodes_are_passed_over() -> None:
    origins = _origins(forgeable=())
    origins.take_events([_xid("n9", "scrape"), Event("x", T0, "n0", None, "job", "", "", "slurm")], T0)
    assert not origins.is_unproven("n9") and not origins.is_unproven("n0")
