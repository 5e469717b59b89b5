"""GPU metrics as series of other systems: the catalog's own names, or those of dcgm-exporter.

The text is the exposition format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats/). The catalog's
names get the prefix `drover_gpu_`, and counters the suffix `_total` that Prometheus asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drover_core.metrics import dcgm_names
from drover_core.metrics.catalog import BY_NAME, Kind, Metric, Scope, of_scope

DROVER, DCGM = "drover", "dcgm"  # the namings
NAMINGS = (DROVER, DCGM)
GPU_METRICS = tuple(metric.name for metric in of_scope(Scope.GPU))
# What boards and rules mostly ask for. All of the catalog would be 51 series of each GPU.
USUAL = (
    "power_w", "gpu_temp_c", "memory_temp_c", "gpu_util_ratio", "memory_util_ratio", "framebuffer_used_bytes",
    "framebuffer_total_bytes", "sm_clock_mhz", "memory_clock_mhz", "clock_event_reasons", "energy_j",
    "tensor_active_ratio", "dram_active_ratio", "pcie_replays", "ecc_dram_corrected", "ecc_dram_uncorrected",
    "remapped_rows_corrected", "remapped_rows_uncorrected", "row_remap_pending", "row_remap_failed",
)  # fmt: skip
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Series:
    """A family. Its value is that of `metric`, less that of `less`, times `factor`, rounded to `digits`.

    Attributes:
        metric: a name of the catalog, or `dcgm_names.LAST_XID`.
        type: gauge or counter. unit: of the value there.
        less: "": nothing is taken off. digits: None: not rounded.
    """

    name: str
    type: str
    help: str
    unit: str
    metric: str
    less: str = ""
    factor: float = 1.0
    digits: int | None = None

    @property
    def header(self) -> str:
        """The lines of the page that come before the values."""
        return f"# HELP {self.name} {escaped_help(self.help)}\n# TYPE {self.name} {self.type}\n"

    def value(self, values: Mapping[str, float]) -> float | None:
        """Return the value out of those of one GPU; None: it is not known."""
        found, off = values.get(self.metric), values.get(self.less) if self.less else 0.0
        if found is None or off is None:
            return None
        result = (found - off) * self.factor
        return result if self.digits is None else round(result, self.digits)


def series_of(naming: str, metrics: Iterable[str]) -> tuple[Series, ...]:
    """Return the families of a naming that these metrics of the catalog give, in their order."""
    wanted = dict.fromkeys(metrics)
    if naming == DROVER:
        return tuple(_own(BY_NAME[name]) for name in wanted)
    made = [_dcgm(row) for row in dcgm_names.ROWS]
    order = {name: at for at, name in enumerate(wanted)}
    given = [
        s for s in made
        if s.metric == dcgm_names.LAST_XID or (s.metric in wanted and (s.less or s.metric) in wanted)
    ]  # fmt: skip
    return tuple(sorted(given, key=lambda s: order.get(s.metric, -1)))


def _own(metric: Metric) -> Series:
    counter = metric.kind is Kind.COUNTER
    name = f"drover_gpu_{metric.name.removeprefix('gpu_')}{'_total' if counter else ''}"
    help_ = f"{metric.help} ({metric.unit})"
    return Series(name, "counter" if counter else "gauge", help_, metric.unit, metric.name)


def _dcgm(row: dcgm_names.Row) -> Series:
    name, type_, unit, metric, digits, _ = row
    if metric == dcgm_names.LAST_XID:
        help_ = "Code of the newest XID since the collector started, 0 before the first."
        return Series(name, type_, help_, unit, metric, digits=digits)
    known, less = BY_NAME[metric], dcgm_names.LESS.get(name, "")
    factor = 1.0 / known.sources["dcgm"].scale
    help_ = f"{known.help}{f' less {BY_NAME[less].help}' if less else ''} (in {unit})."
    return Series(name, type_, help_, unit, metric, less, factor, digits)


def dcgm_pci(pci: str) -> str:
    """Return a PCI address as DCGM writes it, `00000000:1B:00.0`, of the kernel's form, `0000:1b:00.0`."""
    domain, colon, rest = pci.partition(":")
    return f"{domain.zfill(8)}:{rest}".upper() if colon else pci


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What labels say of one GPU; "": not known."""

    node: str
    gpu: int
    uuid: str = ""
    model: str = ""
    rack: str = ""
    pci: str = ""

    def labels(self, naming: str, job: str) -> dict[str, str]:
        """Return the labels of a GPU that this job holds ("": none), without those that are not known.

        `job` stands there also when it is empty: with `honor_labels` Prometheus would put the scrape's own job there.
        """
        if naming == DROVER:
            found = {"node": self.node, "gpu": str(self.gpu), "uuid": self.uuid, "model": self.model, "rack": self.rack}
            return {name: value for name, value in found.items() if value} | {"job": job}
        found = {
            "gpu": str(self.gpu), "UUID": self.uuid, "pci_bus_id": dcgm_pci(self.pci), "device": f"nvidia{self.gpu}",
            "modelName": self.model, "Hostname": self.node, "hpc_job": job,
        }  # fmt: skip
        return {name: value for name, value in found.items() if value}


def escaped(value: str) -> str:
    """Return a label's value as the text format has it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def label_text(labels: Mapping[str, str]) -> str:
    """Return `{name="value",...}`."""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
