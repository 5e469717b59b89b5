"""A small transformer that trains on one device: tokens per second, and a loss that is the same in every run.

It uses what training uses together: products, attention, normalisation, softmax, an optimizer. With deterministic
algorithms and one seed the loss after STEPS steps is one number, so that devices of one model must agree on it.
Strictly deterministic ones: with `warn_only` PyTorch leaves flash attention's backward pass as it is, whose sums come
in any order (pytorch/pytorch#182551), and a healthy device would differ from itself. Where a build has no such
algorithm for a step, the tokens per second are measured and the loss is not judged.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drover_agent.probes.base import Context, Device, Result
from drover_agent.probes.timing import variation

UNIT = "tokens/s"
STEPS = 5


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    layers: int
    heads: int
    length: int
    batch: int
    words: int


GPU = Shape(2048, 8, 16, 2048, 4, 32_000)
CPU = Shape(32, 2, 2, 32, 2, 100)


def run(context: Context, name: str) -> Iterator[Result]:
    torch = context.torch
    torch.use_deterministic_algorithms(True)
    try:
        yield from _results(context, name, exact=True)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        torch.use_deterministic_algorithms(False)
        yield from _results(context, name, exact=False)
    finally:
        torch.use_deterministic_algorithms(False)


def _results(context: Context, name: str, *, exact: bool) -> Iterator[Result]:
    """All are made before the first is given."""
    losses: dict[Device, float] = {}
    found: dict[Device, list[float]] = defaultdict(list)
    for device in context.devices:
        context.tell(f"{device.name}: training steps")
        shape = GPU if device.is_cuda else CPU
        until = time.monotonic() + context.seconds
        for _ in range(2):  # twice from the start: the same device must agree with itself
            loss, seconds = _train(context, device, shape)
            found[device] += seconds
            if losses.setdefault(device, loss) != loss:
                losses[device] = float("nan")
            if time.monotonic() > until:
                break
    usual = {d.model: Counter(v for o, v in losses.items() if o.model == d.model).most_common(1)[0] for d in losses}
    for device in context.devices:
        shape = GPU if device.is_cuda else CPU
        tokens = shape.batch * shape.length
        step_s = statistics.median(found[device])
        loss, (most, votes) = losses[device], usual[device.model]
        alike = sum(other.model == device.model for other in losses)
        wrong = loss != loss or (loss != most and votes * 2 > alike)
        detail = f"loss {loss:.9g} after {STEPS} steps"
        if loss != loss:
            detail = "the loss differs from run to run on this device"
        elif wrong:
            detail += f"; {votes} devices of its model have {most:.9g}"
        if not exact:
            detail, wrong = (
                "the loss is not judged: this build of torch has no deterministic algorithm for a step",
                False,
            )
        yield Result(
            name, device.slot, tokens / step_s, UNIT, detail, ok=not wrong if exact else None,
            spread=variation(found[device]), repeats=len(found[device]),
        )  # fmt: skip


def _train(context: Context, device: Device, shape: Shape) -> tuple[float, list[float]]:
    """(loss after STEPS steps, seconds of each but the first)."""
    torch = context.torch
    torch.manual_seed(context.seed)  # the model is drawn on the CPU, then moved: alike on every device
    layer = torch.nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.Sequential(
        torch.nn.Embedding(shape.words, shape.width),
        torch.nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False),
        torch.nn.Linear(shape.width, shape.words),
    ).to(device.name)
    words = torch.randint(0, shape.words, (shape.batch, shape.length + 1)).to(device.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kind = torch.bfloat16 if device.is_cuda else torch.float32
    seconds: list[float] = []
    loss: Any = None
    for _ in range(STEPS):
        if context.stopping():
            raise InterruptedError("told to stop")
        began = time.perf_counter()
        with torch.autocast(device.name.partition(":")[0], dtype=kind, enabled=device.is_cuda):
            told = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(told.flatten(0, 1).float(), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.is_cuda:
            torch.cuda.synchronize(device.name)
        seconds.append(time.perf_counter() - began)
    return float(loss.item()), seconds[1:]
