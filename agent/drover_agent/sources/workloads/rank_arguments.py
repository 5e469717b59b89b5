"""Where a rank stands in its job's parallel groups, by its command line, its environment or the name of its process.

Each is the frameworks' own word; where a configuration file may say otherwise, nothing is said:

    Megatron-LM, Megatron-DeepSpeed  --tensor-model-parallel-size, --pipeline-model-parallel-size, ... (1 unless given):
        megatron/training/arguments.py, and megatron/core/parallel_state.py for the order of ranks. DeepSpeed's own
        topology (deepspeed/runtime/pipe/topology.py, axes pipe, data, model) has the same order.
    NeMo  model.tensor_model_parallel_size=8 (Hydra's overrides; Megatron's order). Its YAML may set what the command
        line does not, so that both tensor and pipeline must be there.
    torchtitan  --parallelism.tensor_parallel_degree, ...: torchtitan/config and distributed/parallel_dims.py, whose
        mesh is (pp, dp_replicate, dp_shard, cp, tp). Its configuration file may, too.
    vLLM, SGLang  processes are called VLLM::Worker_DP0_PP1_TP3 (vllm/v1/executor/multiproc_executor.py,
        setup_proc_title_and_log_prefix) and sglang::scheduler_DP0_TP3_PP1 (sglang/srt/managers/scheduler.py,
        run_scheduler_process); the sizes are arguments of the server that started them.

Rank and world: torchrun, srun, Open MPI, Hydra.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from drover_core.jobs.place import ARGUMENTS, TITLE, PlaceError, RankPlace, by_order, checked

RANKS = (
    ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)  # fmt: skip
MEGATRON: Mapping[str, str] = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
}  # fmt: skip
# With these, Megatron's ranks are in another order, or come from elsewhere.
MEGATRON_OTHER = frozenset({
    "yaml-cfg", "encoder-tensor-model-parallel-size", "encoder-pipeline-model-parallel-size",
    "ds-sequence-parallel-size", "hierarchical-context-parallel-sizes",
})  # fmt: skip
NEMO: Mapping[str, str] = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp"}
TITAN: Mapping[str, str] = {"tensor_parallel_degree": "tp", "pipeline_parallel_degree": "pp"}
SERVERS: Mapping[str, str] = {
    "tensor-parallel-size": "tp", "tp": "tp", "tp-size": "tp", "pipeline-parallel-size": "pp", "pp": "pp",
    "pp-size": "pp", "data-parallel-size": "dp", "dp": "dp", "dp-size": "dp",
}  # fmt: skip
ORDER, ORDER_PP_DP = ("tp", "cp", "dp", "pp"), ("tp", "cp", "pp", "dp")
_TITLE = re.compile(r"(VLLM::Worker|sglang::scheduler)((?:_(?:DP|PP|TP|EP|PCP|DCP)\d{1,5})+)")
_PART = re.compile(r"_([A-Z]+)(\d+)")
MAX_ARGUMENTS = 4_000


def rank_and_world(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return what a launcher says; None: nothing does."""
    for rank, world in RANKS:
        numbers = environment.get(rank, ""), environment.get(world, "")
        if all(text.isdecimal() and len(text) < 8 for text in numbers):
            return int(numbers[0]), int(numbers[1])
    return None


def by_arguments(arguments: Sequence[str], rank: int, world: int, job: str) -> RankPlace | None:
    """Return the place of a rank by its command line; None: it does not say.

    Raises:
        PlaceError: its sizes do not fit its world.
    """
    options = dict(_options(arguments))
    if sizes := _chosen(options, MEGATRON):
        if MEGATRON_OTHER & options.keys() or not {"tp", "pp"} & sizes.keys():
            return None
        order = ORDER_PP_DP if "use-tp-pp-dp-mapping" in options else ORDER
        axes = by_order(rank, world, {axis: size for axis, size in sizes.items() if axis != "ep"}, order)
        return checked(RankPlace(job, rank, world, axes | _experts(sizes, options, axes, rank), ARGUMENTS))
    for names, prefix in ((NEMO, "model."), (TITAN, "parallelism.")):
        found = {name.rpartition(".")[2]: value for name, value in options.items() if name.startswith(prefix)}
        sizes = _chosen({name.replace("-", "_"): value for name, value in found.items()}, names)
        if sizes.keys() == {"tp", "pp"} and "use_tp_pp_dp_mapping" not in found:
            axes = by_order(rank, world, sizes, ORDER)
            known = {axis: axes[axis] for axis in ("tp", "pp")}  # what is left is data and context, in unknown shares
            return checked(RankPlace(job, rank, world, known, ARGUMENTS))
    return None


def by_title(title: str, ancestors: Callable[[], Iterable[Sequence[str]]], job: str) -> RankPlace | None:
    """Return the place of a process of an inference server; None: its name says none, or no size is known.

    Args:
        ancestors: the command lines of the processes that started it, the nearest first.
    """
    match = _TITLE.match(title)
    if match is None:
        return None
    said = {axis.lower(): int(number) for axis, number in _PART.findall(match[2])}
    ranks = {axis: said[axis] for axis in ("tp", "pp", "dp") if axis in said}
    for arguments in ancestors():
        sizes = _chosen(dict(_options(arguments)), SERVERS)
        if not ranks.keys() <= sizes.keys():
            continue
        if match[1].startswith("sglang"):  # its dp may be a part of its tp (--enable-dp-attention)
            ranks.pop("dp", None)
        axes = {axis: (rank, sizes[axis]) for axis, rank in ranks.items()}
        rank, world = 0, math.prod(size for _, size in axes.values())
        for axis in ("dp", "pp", "tp"):  # tensor ranks are the fastest: vllm/distributed/parallel_state.py
            number, size = axes.get(axis, (0, 1))
            rank = rank * size + number
        return checked(RankPlace(job, rank, world, axes, TITLE)) if axes else None
    return None


def _experts(
    sizes: Mapping[str, int], options: Mapping[str, str], axes: Mapping[str, tuple[int, int]], rank: int
) -> dict[str, tuple[int, int]]:
    """Return the expert rank: RankGenerator of the experts has tp of its own size, then ep, then dp, then pp."""
    size = sizes.get("ep", 1)
    own = _chosen(options, {"expert-tensor-parallel-size": "tp"})
    tensor = own.get("tp", axes["tp"][1])
    return {"ep": (rank // tensor % size, size)} if size > 1 else {}


def _options(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Return the name and value of each option, as `--name value`, `--name=value`, `-tp 8` and Hydra's `name=value`."""
    for at, text in enumerate(arguments[:MAX_ARGUMENTS]):
        name, equals, value = text.partition("=")
        if text.startswith("-"):
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            yield name.lstrip("-"), value if equals else following
        elif equals:
            yield name.lstrip("+~"), value


def _chosen(options: Mapping[str, str], names: Mapping[str, str]) -> dict[str, int]:
    """
    Raises:
        PlaceError: a size is no number.
    """
    found = {}
    for name, axis in names.items():
        text = options.get(name, options.get(name.replace("-", "_")))
        if text is None:
            continue
        if not (text.isdecimal() and text.isascii() and 0 < len(text) < 8 and int(text)):
            raise PlaceError(f"what {name} says is no size")  # not what it is: it may be a secret
        found[axis] = int(text)
    return found
