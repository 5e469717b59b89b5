"""What inference servers call their metrics.

Sources: vllm/v1/metrics/loggers.py (v1) and vllm/engine/metrics.py (v0); sglang's srt/metrics/collector.py; Triton's
docs/user_guide/metrics.md; README and src/custom_metrics_reporter of triton-inference-server/tensorrtllm_backend; the
router of huggingface/text-generation-inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Series:
    """The samples of one name, and of those the ones with these labels. `scale`: the factor to our unit."""

    name: str
    only: tuple[tuple[str, str], ...] = ()
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """How one kind of server names things. Where several series are given, the first that is on the page counts.

    `per_model`: one process serves many models as a rule, so that each always has a row of its own.
    """

    name: str
    model: str
    running: tuple[Series, ...]
    waiting: tuple[Series, ...]
    tokens: tuple[Series, ...]
    ttft: tuple[Series, ...] = ()
    per_model: bool = False

    def names(self) -> Iterable[str]:
        return (s.name for s in (*self.running, *self.waiting, *self.tokens, *self.ttft))


ENGINES: tuple[Engine, ...] = (
    Engine(
        "vllm",
        "model_name",
        running=(Series("vllm:num_requests_running"),),
        waiting=(Series("vllm:num_requests_waiting"),),
        tokens=(Series("vllm:generation_tokens_total"),),
        ttft=(Series("vllm:time_to_first_token_seconds_bucket"),),
    ),
    Engine(
        "sglang",
        "model_name",
        running=(Series("sglang:num_running_reqs"),),
        waiting=(Series("sglang:num_queue_reqs"),),
        tokens=(Series("sglang:generation_tokens_total"),),
        ttft=(Series("sglang:time_to_first_token_seconds_bucket"),),
    ),
    Engine(
        "triton",
        "model",
        # Of the batch manager's counts "active" also holds those that wait for their first iteration.
        running=(Series("nv_trt_llm_request_metrics", (("request_type", "scheduled"),)),),
        waiting=(
            Series("nv_trt_llm_request_metrics", (("request_type", "waiting"),)),
            Series("nv_inference_pending_request_count"),
        ),
        tokens=(Series("nv_llm_output_token_len_sum", (("response_metric_type", "total_output_tokens"),)),),
        ttft=(Series("nv_inference_first_response_histogram_ms_bucket", scale=1e-3),),
        per_model=True,
    ),
    Engine(
        "tgi",
        "",
        running=(Series("tgi_batch_current_size"),),
        waiting=(Series("tgi_queue_size"),),
        tokens=(Series("tgi_request_generated_tokens_sum"),),
    ),
)
# Labels whose other values count the same again: SGLang's ranks can each report, and break their queues down.
TOTALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp_rank": ("0",),
        "pp_rank": ("0",),
        "moe_ep_rank": ("0",),
        "priority": ("",),
    }
)
