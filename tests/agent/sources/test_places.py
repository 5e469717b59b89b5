"""Where ranks stand in parallel groups: by what the frameworks' command lines, titles and loops say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drover_agent.client.training_steps import Reporter
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.owners import OwnersSource
from drover_agent.sources.workloads.places import AGAIN_MS, EVERY_MS, PlaceReader
from drover_agent.sources.workloads.rank_arguments import by_arguments, by_title
from drover_core.jobs.place import PlaceError, RankPlace, by_order, key, pack, unpack, words, wrong_sizes
from testbed.job_processes import T, node, process
from testbed.steps_listening import Listening

MEGATRON = "python pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --secret hunter2"


def place_of(command: str, rank: int = 43, world: int = 64) -> dict[str, tuple[int, int]]:
    found = by_arguments(command.split(), rank, world, "7")
    return {} if found is None else dict(found.axes)


def test_megatrons_order_is_tensor_context_data_pipeline() -> None:
    # Rank 43 of tp 8, pp 4: stage 2 has ranks 32 to 47; within it data rank 1 has 40 to 47.
    assert place_of(MEGATRON) == {"tp": (3, 8), "cp": (0, 1), "dp": (1, 2), "pp": (2, 4)}
    assert place_of(f"{MEGATRON} --use-tp-pp-dp-mapping") == {"tp": (3, 8), "cp": (0, 1), "pp": (1, 4), "dp": (1, 2)}
    assert place_of("p --tensor-model-parallel-size=2 --context-parallel-size=2 --pipeline-model-parallel-size=4") == {
        "tp": (1, 2), "cp": (1, 2), "dp": (2, 4), "pp": (2, 4),
    }  # fmt: skip
    experts = place_of(f"{MEGATRON} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1")
    assert experts["ep"] == (3, 4)
    ranks = [by_order(rank, 64, {"tp": 8, "pp": 4}, ("tp", "cp", "dp", "pp")) for rank in range(64)]
    assert len({tuple(sorted(each.items())) for each in ranks}) == 64  # each rank has a place of its own


@pytest.mark.parametrize(
    ("command", "axes"),
    [
        ("python train.py ++model.tensor_model_parallel_size=8 model.pipeline_model_parallel_size=4",
         {"tp": (3, 8), "pp": (2, 4)}),
        ("train.py --parallelism.tensor_parallel_degree 8 --parallelism.pipeline-parallel-degree=4",
         {"tp": (3, 8), "pp": (2, 4)}),
        ("train.py model.tensor_model_parallel_size=8", {}),  # its YAML may have a pipeline
        ("train.py --parallelism.tensor_parallel_degree 8", {}),
        (f"{MEGATRON} --yaml-cfg a.yaml", {}),
        (f"{MEGATRON} --encoder-pipeline-model-parallel-size 1", {}),
        ("train.py --expert-model-parallel-size 4", {}),
        ("train.py --deepspeed ds.json", {}),  # it says nothing; its loop can
    ],
)  # fmt: skip
def test_what_other_command_lines_say(command: str, axes: dict[str, tuple[int, int]]) -> None:
    assert place_of(command) == axes


def test_sizes_that_do_not_fit_are_no_place() -> None:
    with pytest.raises(PlaceError, match="does not fit"):
        place_of(MEGATRON, world=60)
    with pytest.raises(PlaceError, match="no size"):
        place_of(MEGATRON.replace("size 8", "size many"))
    assert wrong_sizes({"tp": 8, "pp": 4}, 64) == ""
    said = "tensor 8 x data 3 x pipeline 4 is 96, and the job has 64 ranks"
    assert wrong_sizes({"tp": 8, "pp": 4, "dp": 3}, 64) == said
    assert wrong_sizes({"tp": 8, "pp": 3}, 64)


def test_what_a_command_line_says_instead_of_a_size_is_not_logged() -> None:
    """It may be a secret that somebody put into the wrong place; errors are logged."""
    with pytest.raises(PlaceError) as error:
        place_of(MEGATRON.replace("size 8", "size hunter2"))
    assert "hunter2" not in str(error.value)


def test_a_number_too_long_to_read_stops_no_source() -> None:
    """Python refuses more than 4,300 digits: one user's command line ended the owners of all jobs of the node."""
    long = "1" * 5_000
    experts = f"--expert-model-parallel-size 4 --expert-tensor-parallel-size {long}"
    with pytest.raises(PlaceError, match="no size"):
        place_of(f"{MEGATRON} {experts}")


def test_workers_of_servers_are_named_by_their_title_and_sized_by_their_servers_arguments() -> None:
    def servers() -> list[list[str]]:
        return [["VLLM::EngineCore"], ["vllm", "serve", "m", "-tp", "4", "--pipeline-parallel-size", "2"]]

    assert by_title("VLLM::Worker_PP1_TP3", servers, "a/b") == RankPlace(
        "a/b", 7, 8, {"tp": (3, 4), "pp": (1, 2)}, "title"
    )
    assert by_title("VLLM::Worker_DP1_TP3", servers, "a/b") is None  # nobody says how many replicas there are
    sglang = by_title("sglang::scheduler_DP1_TP3", lambda: [["x", "--tp-size", "4", "--dp-size", "2"]], "a/b")
    assert sglang is not None and sglang.axes == {"tp": (3, 4)}
    assert by_title("VLLM::Worker", servers, "") is None and by_title("python", servers, "") is None


def test_a_text_is_checked() -> None:
    place = RankPlace("7", 43, 64, {"tp": (3, 8), "pp": (2, 4)})
    assert unpack(pack(place)) == place
    assert words([place]) == "pipeline stage 2 of 4, tensor rank 3"
    assert words([place, RankPlace("7", 42, 64, {"tp": (2, 8), "pp": (2, 4)})]) == "pipeline stage 2 of 4"
    for text in (
        "",
        "job=7 rank=9 world=8 by=client tp=1/8",
        "job=7 rank=1 world=8 by=me tp=1/8",
        "x" * 700,
        "job=7 rank=1 world=8 by=client",
        "job=7 rank=1 world=8 by=client tp=8/8",
        pack(place) + " pp=²/8",
    ):
        with pytest.raises(PlaceError):
            unpack(text)  # fmt: skip


def ranks(proc: Path, count: int = 2, command: str = MEGATRON) -> Gpus:
    gpus = node(count)
    for slot in range(count):
        variables = f"SECRET=x\0RANK={40 + slot}\0WORLD_SIZE=64\0"
        process(proc, 70 + slot, "python", 1, cmdline=command.replace(" ", "\0") + "\0", environ=variables)
        gpus.set_pids(slot, (70 + slot,))
    gpus.set_jobs({"7": tuple(range(70, 70 + count))})
    return gpus


def test_the_inventory_has_each_ranks_place_and_none_of_its_secrets(tmp_path: Path) -> None:
    gpus = ranks(tmp_path)
    source = OwnersSource(tmp_path, gpus, lambda uid: "alice")
    assert not source.read(T).inventory  # others may come within seconds
    found = source.read(T + 10_000).inventory
    assert {name: unpack(text) for name, text in found.items()} == {
        key(slot): RankPlace("7", 40 + slot, 64, {"tp": (slot, 8), "cp": (0, 1), "dp": (1, 2), "pp": (2, 4)})
        for slot in range(2)
    }
    assert "hunter2" not in repr(found)
    assert not source.read(T + 20_000).inventory
    gpus.set_pids(1, ())
    at = T + EVERY_MS + 10_000
    assert [source.read(at + ms).inventory for ms in (0, 10_000)] == [{}, {key(1): ""}]


def test_a_process_that_names_itself_later_is_asked_again_and_two_that_differ_say_nothing(tmp_path: Path) -> None:
    gpus = ranks(tmp_path, 1, "bash")
    reader = PlaceReader(tmp_path, gpus)
    assert [reader.read(T + ms) for ms in (0, 10_000)] == [{}, {}]
    (tmp_path / "70/cmdline").write_text(MEGATRON.replace(" ", "\0") + "\0")
    assert [bool(reader.read(T + AGAIN_MS + ms)) for ms in (0, 10_000)] == [False, True]
    process(tmp_path, 71, "python", 1, cmdline=MEGATRON.replace(" ", "\0") + "\0", environ="RANK=1\0WORLD_SIZE=64\0")
    gpus.set_pids(0, (70, 71))
    later = T + 3 * AGAIN_MS
    assert [reader.read(later + ms) for ms in (0, 10_000)] == [{}, {key(0): ""}]


def test_a_loops_own_word_counts_before_its_command_line(tmp_path: Path) -> None:
    pid = os.getpid()
    gpus = ranks(tmp_path, 1)
    process(tmp_path, pid, "python", 1, cmdline=MEGATRON.replace(" ", "\0") + "\0", environ="RANK=0\0WORLD_SIZE=64\0")
    gpus.set_pids(0, (pid,))
    gpus.set_jobs({"7": (pid,)})
    listening = Listening(tmp_path / "steps.sock", gpus)
    try:
        reporter = Reporter("a", world_size=8, rank=5, socket_path=str(listening.path))
        reporter.parallel(tp=(0, 2))
        reporter.parallel(tp=(1, 2), pp=(2, 4))
        listening.after(lambda: reporter.step(0.5))
        before = listening.source.junk
        for wrong in ({"tp": [2, 2]}, {"tp": 3}, [], {"tp": ["x", 2]}, {"tp": [1]}, {}, {"pp": [0, 10**30]}):
            listening.after(lambda wrong=wrong: listening.send(name="b", parallel=wrong))
        assert listening.source.junk == before + 7
    finally:
        listening.source.close()
    reader = PlaceReader(tmp_path, gpus)
    texts = [reader.read(T + ms) for ms in (0, 10_000)][1]
    assert unpack(texts[key(0)]) == RankPlace("7", 5, 8, {"tp": (1, 2), "pp": (2, 4)}, "client")
    with pytest.raises(ValueError, match="'xx'"):
        reporter.parallel(xx=(1, 2))
    with pytest.raises(ValueError, match="below the size"):
        reporter.parallel(tp=(2, 2))
    longest = {axis: [9_999_998, 9_999_999] for axis in ("tp", "pp", "dp", "cp", "ep")}
    assert len(json.dumps({"parallel": longest})) < 200  # of the 1,024 bytes of a report
