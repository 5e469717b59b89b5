"""Links from the console's pages to Grafana's boards: of the right nodes and time, and none where no Grafana is set."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from drover_core.grafana import MOST_VALUES, Grafana, wrong_address, wrong_board
from drover_core.settings import SettingsError
from drover_dashboard import main
from drover_dashboard.client import ClientError, FleetClient
from drover_dashboard.widgets import charts, grafana
from drover_proto import fleet_pb2 as pb

from .conftest import NOW_MS, Chosen
from .test_pages import opened

HERE = Grafana("https://grafana.example/sub/")
BOARDS = Path(__file__).parents[2] / "docs/monitoring"


class WithJob(Chosen):
    """Also answers for a job; "over" has ended."""

    def GetJob(self, request: pb.JobRequest, context: object) -> pb.JobDetail:
        row = pb.JobRow(job=request.job, gpus=2, nodes=1, since_ms=NOW_MS - 7_200_000)
        if request.job == "over":
            row.ended_ms = NOW_MS
        return pb.JobDetail(row=row)


@pytest.fixture
def chosen() -> Chosen:
    return WithJob()


@pytest.fixture
def linked() -> Iterator[None]:
    grafana.share({"": HERE})
    yield
    grafana.share({})


def links(app: AppTest) -> list[tuple[str, dict[str, list[str]]]]:
    """Address without its query, and the query, of each button that leads to Grafana."""
    found = [each.proto.url for each in app.get("link_button") if each.proto.label == "Grafana"]
    return [(url.partition("?")[0], parse_qs(urlsplit(url).query)) for url in found]


PAGES = [("node", {"node": "n2"}), ("node", {"node": "n2", "gpu": "1"}), ("job", {"job": "job1"}),
         ("incidents", {"id": "i1"})]  # fmt: skip


@pytest.mark.parametrize(("page", "query"), PAGES)
def test_without_a_grafana_there_is_no_link(shared: FleetClient, page: str, query: dict[str, str]) -> None:
    assert links(opened(page, **query)) == []


@pytest.mark.parametrize(("page", "query"), PAGES)
@pytest.mark.usefixtures("linked")
def test_pages_lead_to_the_board_of_their_nodes_and_time(shared: FleetClient, page: str, query: dict[str, str]) -> None:
    [(address, asked)] = links(opened(page, **query))
    assert address == "https://grafana.example/sub/d/drover-gpus"
    if page == "job":
        assert asked["var-job_name"] == ["job1"] and "var-node" not in asked
    else:
        assert asked["var-node"] == ["n2"] and "var-job_name" not in asked
    usual = {"node": "now-900s", "job": "now-3600s"}
    if page in usual:
        assert (asked["from"], asked["to"]) == ([usual[page]], ["now"])
    else:  # from some minutes before its onset on; it is open
        assert int(asked["from"][0]) < NOW_MS and asked["to"] == ["now"]


@pytest.mark.usefixtures("linked")
def test_a_time_that_was_drawn_goes_along(shared: FleetClient) -> None:
    at_s = NOW_MS // 1000
    [(_, asked)] = links(opened("node", node="n2", **{charts.OPEN: f"{at_s - 600}-{at_s}"}))
    assert (asked["from"], asked["to"]) == ([str(NOW_MS - 600_000)], [str(NOW_MS)])


@pytest.mark.usefixtures("linked")
def test_the_charts_of_an_ended_job_end_with_it(shared: FleetClient) -> None:
    [(_, asked)] = links(opened("job", job="over"))
    assert (asked["from"], asked["to"]) == ([str(NOW_MS - 3_600_000)], [str(NOW_MS)])


def test_names_are_escaped_and_very_many_nodes_are_left_out() -> None:
    evil = "a&var-node=b#<script>"
    link = HERE.link("1", "2", [evil], "jö b")
    assert parse_qs(urlsplit(link).query) == {
        "var-node": [evil], "var-job_name": ["jö b"], "from": ["1"], "to": ["2"],
    }  # fmt: skip
    assert not re.search(r"[<># ]", link)
    assert "var-node" not in HERE.link("1", "2", [f"n{n}" for n in range(MOST_VALUES + 1)])
    assert HERE.link("1", "2", ["a", "b"]).count("var-node=") == 2


@pytest.mark.parametrize("address", ["https://g.example", "http://g:3000/grafana", "https://[::1]:3000", ""])
def test_addresses_of_the_web_are_taken(address: str) -> None:
    assert wrong_address(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)", "ftp://g", "g.example", "https://", "https://u:p@g.example", "https://u@g.example",
        "https://g.example/?x=1", "https://g.example/#x", "https://g example", "https://g\n", 'https://g"onclick',
        "https://g:99999", "https://gräfana.example",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(address: str) -> None:
    assert wrong_address(address) is not None


def test_boards_are_named_by_their_uid() -> None:
    for name in ("drover-gpus", "drover-gpus-dcgm"):
        board = json.loads((BOARDS / f"{name}-grafana.json").read_text("utf-8"))
        assert board["uid"] == name and wrong_board(name) is None
        assert {"node", "job_name"} <= {each["name"] for each in board["templating"]["list"]}
    assert wrong_board("../x") is not None and wrong_board("") is not None


def options(*words: str) -> argparse.Namespace:
    return main._parser().parse_args(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grafana", "javascript:alert(1)"), "--grafana: must be an http"),
        (("--grafana", "https://u:p@g.example"), "no user and no password"),
        (("--grafana", "https://g", "--grafana-board", "a/b"), "--grafana-board: must be a board's uid"),
        (("--grafana", "https://g", "--settings", "x.toml"), "leave out --grafana"),
    ],
)
def test_options_are_checked(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ClientError, match=said):
        main._share_grafana(options(*words))


def test_each_cluster_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clusters.toml"
    two = '[[clusters]]\nname = "west"\ncollector = "w:1"\ngrafana = "https://g"\ngrafana_board = "own"\n'
    path.write_text(f'{two}[[clusters]]\nname = "east"\ncollector = "e:1"\n', "utf-8")
    path.chmod(0o600)
    shared: list[object] = []
    monkeypatch.setattr(grafana, "share", shared.append)
    main._share_grafana(options("--settings", str(path)))
    main._share_grafana(options("--grafana", "https://g", "--grafana-board", "drover-gpus-dcgm"))
    main._share_grafana(options())
    assert shared == [{"west": Grafana("https://g", "own")}, {"": Grafana("https://g", "drover-gpus-dcgm")}, {}]
    path.write_text(two.replace("https://g", "ftp://g"), "utf-8")
    with pytest.raises(SettingsError, match="clusters"):
        main._share_grafana(options("--settings", str(path)))
