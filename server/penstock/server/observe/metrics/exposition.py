"""Renders the metrics as Prometheus text; if requested, also under the names of other systems.

The Accept header selects the text format. Also contains the tables of aliases. An alias is the name
of one of Penstock's metrics in TensorRT-LLM or in the OpenTelemetry conventions. It has the same
values as the metric; metrics without a counterpart have no alias.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.server.observe.metrics import catalogue
from penstock.server.observe.metrics.catalogue import MetricSpec

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A second name under which a metric is exported.

    Attributes:
        where: Maps label names to the values that a series must have in order to be exported.
        keep: The labels that are exported besides the model, each mapped to its new name. Their
            values are exported in lower case. Series with equal exported labels are summed.
    """

    name: str
    spec: MetricSpec
    where: Labels = field(default_factory=dict[str, str])
    keep: Labels = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The metric names of another inference server or convention, exported as aliases.

    `model_labels` returns the labels that replace the label `model`, given its value.
    """

    aliases: tuple[Alias, ...]
    model_labels: Callable[[str], Labels]


def _state(name: str, state: str) -> Alias:
    return Alias(name=name, spec=catalogue.KV_BLOCKS, where={"state": state})


TENSORRT_LLM: Final = Dialect(
    model_labels=lambda model: {"model_name": model, "engine_type": "penstock"},
    aliases=(
        Alias(name="trtllm_num_requests_waiting", spec=catalogue.WAITING),
        Alias(name="trtllm_num_requests_running", spec=catalogue.RUNNING),
        Alias(name="trtllm_kv_cache_utilization", spec=catalogue.KV_USAGE),
        Alias(name="trtllm_kv_cache_tokens_per_block", spec=catalogue.KV_BLOCK_SIZE),
        Alias(name="trtllm_kv_cache_max_blocks", spec=catalogue.KV_TOTAL),
        _state("trtllm_kv_cache_free_blocks", "free"),
        _state("trtllm_kv_cache_used_blocks", "used"),
        Alias(name="trtllm_time_to_first_token_seconds", spec=catalogue.TTFT),
        Alias(name="trtllm_time_per_output_token_seconds", spec=catalogue.TPOT),
        Alias(name="trtllm_e2e_request_latency_seconds", spec=catalogue.REQUEST_SECONDS),
        Alias(name="trtllm_request_queue_time_seconds", spec=catalogue.QUEUE_SECONDS),
        Alias(name="trtllm_request_prefill_time_seconds", spec=catalogue.PREFILL_SECONDS),
        Alias(name="trtllm_request_decode_time_seconds", spec=catalogue.DECODE_SECONDS),
        Alias(name="trtllm_prompt_tokens_total", spec=catalogue.PROMPT_TOKENS),
        Alias(name="trtllm_generation_tokens_total", spec=catalogue.GENERATION_TOKENS),
        Alias(
            name="trtllm_request_success_total",
            spec=catalogue.REQUESTS,
            where={"code": "OK"},
            keep={"finish_reason": "finished_reason"},
        ),
        Alias(name="trtllm_request_error_total", spec=catalogue.REQUEST_ERRORS),
        Alias(name="trtllm_iteration_latency_seconds", spec=catalogue.STEP_SECONDS),
    ),
)
"""The names of `trtllm-serve`. Its cache hit rate has no alias: it is PREFIX_HITS divided by
PREFIX_QUERIES."""

GEN_AI: Final = Dialect(
    model_labels=lambda model: {"gen_ai_request_model": model},
    aliases=(
        Alias(name="gen_ai_server_request_duration_seconds", spec=catalogue.REQUEST_SECONDS),
        Alias(name="gen_ai_server_time_to_first_token_seconds", spec=catalogue.TTFT),
        Alias(name="gen_ai_server_time_per_output_token_seconds", spec=catalogue.TPOT),
    ),
)
"""The names of the OpenTelemetry conventions for generative AI, in Prometheus spelling."""

DIALECTS: Final[Mapping[str, Dialect]] = {"trtllm": TENSORRT_LLM, "gen_ai": GEN_AI}


def aliased(families: Iterable[Metric], dialect: Dialect) -> Iterator[Metric]:
    """Yield the metrics that have an alias in `dialect`, under the names of their aliases."""
    by_name = {family.name: family for family in families}
    for alias in dialect.aliases:
        # prometheus_client removes the suffix from the name of a counter.
        found = by_name.get(alias.spec.name.removesuffix("_total"))
        if found is not None:
            yield _renamed(found, alias, dialect)


def _renamed(family: Metric, alias: Alias, dialect: Dialect) -> Metric:
    renamed = Metric(alias.name.removesuffix("_total"), family.documentation, family.type)
    added: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in family.samples:
        if not alias.where.items() <= sample.labels.items():
            continue
        labels = {**dialect.model_labels(sample.labels["model"])}
        labels |= {theirs: sample.labels[ours].lower() for ours, theirs in alias.keep.items()}
        if "le" in sample.labels:
            labels["le"] = sample.labels["le"]
        name = renamed.name + sample.name.removeprefix(family.name)
        added[name, tuple(labels.items())] += sample.value
    renamed.samples = [Sample(name, dict(labels), value) for (name, labels), value in added.items()]
    return renamed


COMPAT_NAMES = tuple(DIALECTS)


class _WithAliases(Collector):
    def __init__(self, collector: Collector, dialect: Dialect) -> None:
        self._collector = collector
        self._dialect = dialect

    def collect(self) -> Iterator[Metric]:
        families = list(self._collector.collect())
        yield from families
        yield from aliased(families, self._dialect)


class Exposition:
    """Renders the metrics of a collector and of this process in a Prometheus or OpenMetrics text
    format."""

    def __init__(self, collector: Collector) -> None:
        self._plain = _registry(collector)
        self._compat = {
            name: _registry(_WithAliases(collector, dialect)) for name, dialect in DIALECTS.items()
        }

    def render(self, accept: str, compat: str = "") -> tuple[bytes, str]:
        """Return the text and its content type, for an `Accept` header.

        `compat` is empty, or one of COMPAT_NAMES to add its aliases. Raises ValueError for another
        name.
        """
        registry = self._compat.get(compat) if compat else self._plain
        if registry is None:
            raise ValueError(f"compat must be one of {', '.join(COMPAT_NAMES)}")
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type


def _registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
