"""Collectors of one store whose settings differ say so."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from drover_collector.config import CollectorConfig, RestConfig
from drover_collector.exporters.settings import ExportConfig, RemoteWriteConfig
from drover_collector.pipeline import settings_of_others
from drover_collector.pipeline.settings_of_others import FRESH_MS, SettingsOfOthers, differences, settings_of
from drover_collector.scrape.settings import OtlpInConfig, ScrapeConfig, WriteInConfig
from drover_collector.store import Store
from testbed.fleets import T0
from testbed.loop import in_loop
from testbed.waiting import until


def _settings(remote_write: WriteInConfig | None = None, otlp: OtlpInConfig | None = None) -> dict[str, str]:
    rest = RestConfig(remote_write=remote_write or WriteInConfig(), otlp=otlp or OtlpInConfig())
    return settings_of(CollectorConfig(rest=rest))


def test_equal_settings_are_no_difference_and_each_other_one_is_named_with_both_values() -> None:
    asks = _settings(remote_write=WriteInConfig(enabled=True))
    assert differences(asks, {"c2:7301": dict(asks)}) == ""
    assert differences(asks, {}) == ""
    acts = _settings(remote_write=WriteInConfig(enabled=True, ask_first=False), otlp=OtlpInConfig(grpc=True))
    text = differences(asks, {"c2:7301": acts, "c3:7301": dict(asks)})
    assert "rest.remote_write.ask_first is true here and false on c2:7301" in text
    assert "rest.otlp.grpc is false here and true on c2:7301" in text
    assert "c3" not in text
    assert text.endswith("acts otherwise.")


def test_a_collector_without_the_table_differs_from_one_that_takes_values() -> None:
    text = differences(_settings(), {"c2:7301": _settings(remote_write=WriteInConfig(enabled=True))})
    assert "rest.remote_write.enabled is false here and true on c2:7301" in text


def test_exporters_that_one_lacks_are_named_without_their_addresses() -> None:
    entry = RemoteWriteConfig("mimir", "https://mimir.example/secret/push")
    exports = settings_of(CollectorConfig(export=ExportConfig(remote_write=(entry,))))
    text = differences(_settings(), {"c2:7301": exports})
    assert 'export.remote_write is [] here and ["mimir"] on c2:7301' in text
    assert "secret" not in str(exports)


def test_many_differences_are_counted() -> None:
    other = _settings(
        remote_write=WriteInConfig(True, ("node",), ("host",), True, False, ("x",)), otlp=OtlpInConfig(True, True)
    )
    assert "; and 4 more." in differences(_settings(), {"c2:7301": other})


def test_a_key_of_another_version_is_not_compared() -> None:
    own = _settings()
    assert differences(own, {"c2:7301": {**own, "rest.new.key": "true"}}) == ""
    assert differences({**own, "rest.new.key": "true"}, {"c2:7301": own}) == ""


def test_pages_belong_to_one_collector_and_twice_is_named() -> None:
    mine = settings_of(CollectorConfig(scrape=(ScrapeConfig("gpus", "dcgm", ("n01:9400",)),)))
    same = settings_of(CollectorConfig(scrape=(ScrapeConfig("gpu-pages", "dcgm", ("n01:9400",)),)))
    others = settings_of(CollectorConfig(scrape=(ScrapeConfig("gpus", "dcgm", ("n02:9400",)),)))
    assert differences(mine, {"c2:7301": settings_of(CollectorConfig())}) == ""
    assert differences(mine, {"c2:7301": others}) == "", "each reads its own part of the fleet"
    assert "[[scrape]] 'gpus' are read by c2:7301 too" in differences(mine, {"c2:7301": same})


def test_no_secret_is_stored() -> None:
    scrape = ScrapeConfig("gpus", "dcgm", ("n01:9400",), tls=True, token_file="/etc/drover/token")
    assert "token" not in str(settings_of(CollectorConfig(scrape=(scrape,))))


def test_a_collector_that_is_gone_is_not_compared(store: Store) -> None:
    now_ms = [T0]
    own = SettingsOfOthers(store, "c1:7301", _settings(), {}, lambda: now_ms[0])
    other = SettingsOfOthers(
        store, "c2:7301", _settings(otlp=OtlpInConfig(grpc=True)), {}, lambda: now_ms[0]
    )  # fmt: skip
    assert own.compare() == ""
    assert "rest.otlp.grpc is true here and false on c1:7301" in other.compare()
    assert "rest.otlp.grpc is false here and true on c2:7301" in own.compare()
    now_ms[0] += FRESH_MS + 1
    assert own.compare() == ""


@pytest.mark.parametrize("off_ms", [-90_000, 0, 1_500, 7_000, 90_000])
def test_a_clock_that_differs_is_named(store: Store, off_ms: int) -> None:
    now_ms = [T0]
    own = SettingsOfOthers(store, "c1:7301", _settings(), {}, lambda: now_ms[0])
    other = SettingsOfOthers(store, "c2:7301", _settings(), {}, lambda: now_ms[0] + off_ms)
    texts = []
    for _ in range(4):
        other.compare()
        texts.append(own.compare())
        now_ms[0] += 60_000
    assert texts[0] == ""  # who has written before the first look may be gone
    if abs(off_ms) < 5_000:
        assert set(texts) == {""}
    elif off_ms > 0:
        assert all(
            text.startswith(f"The clock of c2:7301 is {off_ms // 1000} s or more ahead of the clock here.")
            for text in texts[1:]
        )
    else:  # it wrote right before this look, and may have done so right after the last
        assert all(text.startswith("The clock of c2:7301 is 30 s or more behind the clock here.") for text in texts[1:])
    now_ms[0] += 2 * FRESH_MS
    own.compare()
    assert own.compare() == ""  # it has written nothing for long


def test_a_store_that_is_slow_to_write_is_no_clock_that_differs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other collector writes while this one waits for its own row to be written."""
    now_ms = [T0]
    own, other = (SettingsOfOthers(store, name, _settings(), {}, lambda: now_ms[0]) for name in ("c1:1", "c2:1"))
    other.compare()
    own.compare()
    write = store.collectors.write

    def slowly(name: str, at_ms: int, settings: dict[str, str]) -> None:
        write(name, at_ms, settings)
        if name == "c1:1":
            now_ms[0] += 20_000
            other.compare()

    monkeypatch.setattr(store.collectors, "write", slowly)
    now_ms[0] += 60_000
    assert own.compare() == ""


@in_loop
async def test_the_difference_is_shown_until_the_settings_are_equal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "shared", True)
    monkeypatch.setattr(settings_of_others, "EVERY_S", 0.02)
    troubles: dict[str, str] = {}
    own = SettingsOfOthers(store, "c1:7301", _settings(), troubles, lambda: T0)
    store.collectors.write("c2:7301", T0, _settings(otlp=OtlpInConfig(grpc=True)))
    task = asyncio.create_task(own.run())
    try:
        await until(lambda: "c2:7301" in troubles.get("settings", ""))
        store.collectors.write("c2:7301", T0 + 1, _settings())
        await until(lambda: "settings" not in troubles)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@in_loop
async def test_a_collector_that_is_alone_writes_nothing(store: Store) -> None:
    await SettingsOfOthers(store, "c1:7301", _settings(), {}).run()  # returns
    assert store.collectors.newest(0) == {}
