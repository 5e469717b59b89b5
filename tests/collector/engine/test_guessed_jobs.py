"""Jobs that nobody names: GPUs that begin and pause together are taken as one, and what is found by it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from drover_collector.detectors._lib.examples import LAG_MS, small_fleet, training_bucket
from drover_collector.engine.engine import Engine
from drover_collector.engine.guessed_jobs import GuessedJobs
from drover_collector.policy.policy import Policy
from drover_core.model.events import Incident
from testbed.detecting import only

NODES = 8
Columns = dict[str, np.ndarray]


def groups(util: Callable[[int], np.ndarray], buckets: int, named: int | np.ndarray = -1) -> np.ndarray:
    """Return each GPU's guessed job after some buckets. `named`: the job of all GPUs, if one is known."""
    index = small_fleet(NODES)
    guesses = GuessedJobs(index)
    for number in range(buckets):
        bucket = training_bucket(index, number)
        bucket.gpu["gpu_util_ratio"] = util(number)
        bucket = replace(bucket, jobs=np.broadcast_to(named, 64).astype(np.int32), job_names=("812",))
        guesses.add_bucket(bucket)
    return np.asarray(guesses.filled(bucket).jobs)


def phases(*jobs: tuple[slice, tuple[int, ...]]) -> Callable[[int], np.ndarray]:
    """Return utilisation at each bucket: GPUs of a job pause in its buckets, and work in all others."""

    def util(number: int) -> np.ndarray:
        result = np.full(64, 0.98)
        for gpus, pauses in jobs:
            result[gpus] = 0.05 if number in pauses else 0.98
        return result

    return util


def test_gpus_that_begin_together_are_one_job_and_others_are_not() -> None:
    found = groups(phases((slice(0, 32), (3, 4)), (slice(32, 48), (9,))), 20)
    assert len(set(found[:32])) == len(set(found[32:48])) == 1
    assert found[0] != found[32] and min(found[0], found[32]) >= 0
    assert set(found[48:]) == {-1}, "nothing says which of them belong together"


def test_two_jobs_that_began_together_are_separated_by_their_next_pause() -> None:
    found = groups(phases((slice(0, 32), (3,)), (slice(32, 64), (3, 12))), 20)
    assert len(set(found[:32])) == len(set(found[32:])) == 1 and found[0] != found[63]


def test_a_gpu_that_pauses_by_itself_leaves_and_one_stopped_rank_splits_no_job() -> None:
    util = phases((slice(0, 64), (3,)))

    def alone(number: int) -> np.ndarray:
        result = util(number)
        result[5] = 0.0 if number in (3, 8, 12) else 0.98
        result[9] = 0.0 if number >= 10 else result[9]
        return result

    found = groups(alone, 20)
    assert found[5] == -1 and found[9] == found[0] >= 0
    assert len(set(np.delete(found, 5))) == 1


def test_replicas_that_come_and_go_are_no_job() -> None:
    rng = np.random.default_rng(1)
    assert set(groups(lambda _: rng.choice([0.1, 0.9], 64), 100)) == {-1}


def test_a_long_pause_ends_a_job_and_named_jobs_are_never_guessed() -> None:
    assert set(groups(phases((slice(0, 64), (3, *range(10, 50)))), 45)) == {-1}
    assert set(groups(phases((slice(0, 32), (3, 4))), 20, named=0)) == {0}


def test_gpus_without_a_job_are_guessed_next_to_named_jobs() -> None:
    util = phases((slice(0, 64), (3,)))
    found = groups(util, 20, named=np.where(np.arange(64) < 16, 0, -1))
    assert set(found[:16]) == {0} and len(set(found[16:])) == 1 and found[16] > 0


def test_jobs_that_are_no_longer_named_do_not_become_one() -> None:
    index, found = small_fleet(NODES), None
    guesses = GuessedJobs(index)
    for number in range(60):
        bucket = training_bucket(index, number)
        bucket.gpu["gpu_util_ratio"] = phases((slice(0, 64), (1, 2)))(number)
        bucket = replace(bucket, jobs=np.full(64, 0 if 3 <= number < 40 else -1, np.int32))
        guesses.add_bucket(bucket)
        found = guesses.filled(bucket).jobs
    assert found is not None and set(found.tolist()) == {-1}


def incidents_of(
    change: Callable[[int, Columns], None], buckets: int, pauses: tuple[int, ...] = (3, 4)
) -> list[Incident]:
    engine = Engine(small_fleet(NODES), Policy.named("nvidia"), 0, only("hang", "straggler", "liveness"))
    for number in range(buckets):
        bucket = training_bucket(engine.index, number)
        util = phases((slice(0, 64), pauses))(number)
        bucket.gpu["gpu_util_ratio"] = util
        change(number, bucket.gpu)
        engine.on_bucket(replace(bucket, jobs=np.full(64, -1, np.int32), job_names=()), bucket.end_ms + LAG_MS)
        assert not engine.errors
    return [i for i in engine.incidents.values() if i.kind.value in ("straggler", "hang")]


def test_a_slow_gpu_of_a_guessed_job_is_reported_with_the_doubt_and_without_a_job() -> None:
    def slow(number: int, gpu: Columns) -> None:
        if number >= 40:
            gpu["sm_clock_mhz"][21] *= 0.8
            gpu["power_limit_w"][21] = 500
            for metric in ("sm_active_ratio", "tensor_active_ratio"):
                gpu[metric][21] *= 1.2

    assert [(i.node, i.gpu) for i in incidents_of(slow, 80, pauses=())] == [("n02", 5)], "by its node's other GPUs"
    (incident,) = incidents_of(slow, 80)
    assert (incident.cause, incident.node, incident.gpu, incident.job) == ("power_cap", "n02", 5, None)
    assert any("No scheduler names this job" in e.text for e in incident.evidence)
    assert "peers of a job that nobody names have" in incident.summary


def test_a_guessed_job_that_hangs_asks_for_no_drain() -> None:
    def hang(number: int, gpu: Columns) -> None:
        if number >= 40:
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
                gpu[metric][:] = 0.005
            gpu["power_w"][:] = 250
            gpu["gpu_util_ratio"][:] = 1.0
            gpu["gpu_util_ratio"][21] = 0.0
            gpu["power_w"][21] = 90

    def barrier(number: int, gpu: Columns) -> None:
        hang(number, gpu)
        if number >= 40:
            gpu["gpu_util_ratio"][21], gpu["power_w"][21] = 1.0, 250

    for pauses in ((), (20, 21)):
        (incident,) = incidents_of(hang, 130, pauses=pauses)
        assert (incident.kind.value, incident.node, incident.gpu, incident.job) == ("hang", "n02", 5, None)
        assert incident.action.value in ("none", "watch", "advise", "probe")
    assert incidents_of(barrier, 130, pauses=()) == [], "all spin alike, and nobody says that they are one job"


def test_a_stop_is_forgotten_when_its_job_was_ended() -> None:
    """Killed, idle for a while, and the next job's ranks wait four minutes for one that loads."""

    def change(number: int, gpu: Columns) -> None:
        stopped, idle, waits = 40 <= number < 80, 80 <= number < 260, 280 <= number < 304
        if stopped or waits:
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
                gpu[metric][:] = 0.005
            gpu["power_w"][:], gpu["gpu_util_ratio"][:] = 250, 1.0
            gpu["gpu_util_ratio"][21 if stopped else 30], gpu["power_w"][21 if stopped else 30] = 0.0, 90
        if idle:
            for metric in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio", "gpu_util_ratio"):
                gpu[metric][:] = 0.0
            gpu["power_w"][:] = 90

    assert [(i.node, i.gpu) for i in incidents_of(change, 320, pauses=())] == [("n02", 5)]
