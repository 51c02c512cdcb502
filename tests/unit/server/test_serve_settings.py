"""Where the settings of `penstock serve` come from, and how child processes get them."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from penstock.executor.config import (
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    ExecutorConfig,
    ExecutorKind,
    SimulatedConfig,
)
from penstock.executor.fault import Fault, FaultKind
from penstock.executor.trtllm.config import DTYPES
from penstock.scheduler.config import (
    AdmissionPolicy,
    EvictionPolicy,
    SchedulerConfig,
    SchedulingOrder,
)
from penstock.scheduler.cost_model import CostModel
from penstock.server.cli.serve import with_setting_flags
from penstock.server.cli.variables import unknown_variables
from penstock.server.config import (
    SETTINGS,
    ServerConfig,
)
from penstock.server.front.config import FrontConfig
from penstock.server.observe.config import ObserverConfig
from penstock.server.observe.logs import LOG_LEVELS
from penstock.server.processes.spawn_context import engine_environment
from penstock.server.settings.json_values import to_json_value
from penstock.server.settings.sources import BadSetting
from support.serve_config import check_launches, serve_config

COST = '{"step_s": 0.005, "prefill_token_s": 1e-5, "decode_slot_s": 2e-5, "context_token_s": 0}'


def test_the_defaults_serve_the_demo_model() -> None:
    config = serve_config()
    assert (config.model, config.model_path.name) == ("demo", "demo")
    assert (config.host, config.port) == ("127.0.0.1", 50051)
    assert config.executor == ExecutorConfig(model_path=config.model_path)
    assert config.scheduler == SchedulerConfig()
    assert config.num_fronts >= 1


def test_a_record_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    config = serve_config("--record", str(tmp_path / "a" / "b"), PENSTOCK_RECORD_MAX_MIB="3")

    assert config.record_path is not None
    assert config.record_path == tmp_path.resolve() / "a" / "b"
    assert config.record_max_bytes == 3 * 1024 * 1024
    assert config.record_path.stat().st_mode & 0o077 == 0
    assert serve_config().record_path is None


def test_session_limits_reach_the_engine_and_fronts_share_them() -> None:
    config = serve_config(
        *("--session-ttl-s", "20", "--session-retention-level", "77"),
        *("--max-session-share", "0.125", "--max-session-tokens", "640"),
        *("--share-prefixes-across-tenants", "on", "--eviction", "lru"),
        *("--max-retention-share", "0.75", "--max-tenant-retention-share", "0.5"),
        *("--max-retention-s", "90"),
    )
    assert config.scheduler == SchedulerConfig(
        session_ttl_s=20.0,
        session_retention_level=77,
        max_session_share=0.125,
        max_session_tokens=640,
        max_retention_share=0.75,
        max_tenant_retention_share=0.5,
        max_retention_s=90.0,
        eviction=EvictionPolicy.LRU,
    )
    assert config.front == FrontConfig(shares_prefixes_across_tenants=True)
    assert serve_config("--share-prefixes-across-tenants", "off").front == FrontConfig()
    check_launches(config)


FAULT = '{"kind": "slow_step", "at_step": 3, "seconds": 0.5}'
EVERY_OPTION = (
    *("--model-name", "mine", "--executor", "simulated"),
    *("--host", "::1", "--port", "7", "--fronts", "3", "--max-num-seqs", "5"),
    *("--max-num-batched-tokens", "99", "--max-seq-len", "77", "--max-num-waiting", "11"),
    *("--admission-policy", "guaranteed_no_evict", "--block-size", "8"),
    *("--kv-cache-mib", "2", "--dtype", "float32", "--device", "cuda:1", "--threads", "2"),
    *("--quantization", "none", "--kv-cache-dtype", "auto"),
    *("--pipeline-depth", "2", "--drain-timeout-s", "1.5", "--log-level", "debug"),
    *("--log-format", "json", "--log-exception-messages", "on"),
    *("--simulated-config", f'{{"is_strict": true, "faults": [{FAULT}]}}'),
    *("--max-num-waiting-tokens", "5000", "--watermark", "0.2", "--prefix-caching", "off"),
    *("--model-aliases", "a,b", "--default-max-tokens", "9", "--max-output-tokens", "50"),
    *("--default-deadline-s", "5", "--max-deadline-s", "60"),
    *("--max-backlog-tokens", "33", "--max-reader-stall-s", "2"),
    *("--max-text-bytes-per-tenant", "4000"),
    *("--order", "fair", "--target-itl-ms", "40", "--tenant-metadata-key", "x-tenant"),
    *("--tenant-weights", "a=2,b=0.5,=3", "--aging-s", "inf", "--max-prefill-share", "0.25"),
    *("--max-num-waiting-per-tenant", "6", "--max-num-running-per-tenant", "3"),
    *("--deadline-admission", "off", "--step-cost", COST),
)


def test_every_option_reaches_its_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = serve_config("--model", str(tmp_path), *EVERY_OPTION)
    assert config == ServerConfig(
        model="mine",
        model_path=tmp_path.resolve(),
        executor=ExecutorConfig(
            kind=ExecutorKind.SIMULATED,
            model_path=tmp_path.resolve(),
            device="cuda:1",
            dtype="float32",
            kv_cache_dtype="auto",
            block_size=8,
            kv_cache_bytes=2 * 1024 * 1024,
            max_num_seqs=5,
            max_num_batched_tokens=99,
            max_seq_len=77,
            num_threads=2,
            pipeline_depth=2,
            simulated=SimulatedConfig(
                is_strict=True,
                is_real_time=True,
                faults=(Fault(kind=FaultKind.SLOW_STEP, at_step=3, seconds=0.5),),
            ),
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=99,
            max_num_waiting=11,
            max_num_waiting_tokens=5000,
            watermark=0.2,
            admission_policy=AdmissionPolicy.GUARANTEED_NO_EVICT,
            max_num_waiting_per_tenant=6,
            max_num_running_per_tenant=3,
            deadline_admission=False,
            target_itl_s=0.04,
            known_cost=CostModel(
                step_s=0.005, prefill_token_s=1e-5, decode_slot_s=2e-5, context_token_s=0.0
            ),
            tenant_weights={"a": 2.0, "b": 0.5, "": 3.0},
            aging_s=math.inf,
            max_prefill_share=0.25,
        ),
        observer=ObserverConfig(metrics_port=9, operations_port=8),
        front=FrontConfig(
            model_aliases=("a", "b"),
            is_prefix_caching=False,
            default_max_tokens=9,
            max_output_tokens=50,
            default_deadline_s=5.0,
            max_deadline_s=60.0,
            max_backlog_tokens=33,
            max_text_bytes_per_tenant=4000,
            max_reader_stall_s=2.0,
            tenant_metadata_key="x-tenant",
        ),
        host="::1",
        port=7,
        num_fronts=3,
        drain_timeout_s=1.5,
        log_level="debug",
        log_format="json",
        log_exception_messages=True,
    )
    check_launches(config)


@pytest.mark.parametrize(
    ("arguments", "num_seqs", "budget"),
    [
        ([], 256, 3584),
        (["--max-num-seqs", "9000"], 9000, 9000),
        (["--max-num-batched-tokens", "100"], 100, 100),
        (["--max-num-seqs", "16", "--max-num-batched-tokens", "512"], 16, 512),
    ],
)
def test_a_gpu_has_its_own_slots_and_budget(
    arguments: list[str], num_seqs: int, budget: int
) -> None:
    config = serve_config("--device", "cuda", "--kv-memory-fraction", "0.5", *arguments)

    executor = config.executor
    assert (executor.max_num_seqs, config.scheduler.max_num_batched_tokens) == (num_seqs, budget)
    assert executor.max_num_batched_tokens == budget
    assert (executor.kv_memory_fraction, executor.kv_cache_bytes) == (0.5, None)


def test_the_number_of_blocks_reaches_its_setting() -> None:
    assert serve_config("--num-blocks", "31").executor.num_blocks == 31


def test_the_size_of_the_cache_is_set_once() -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(
            BadSetting, match=r"^PENSTOCK_NUM_BLOCKS and --kv-cache-mib exclude each other: set one"
        ):
            serve_config("--device", device, "--kv-cache-mib", "9", PENSTOCK_NUM_BLOCKS="31")
    for name in ("--kv-cache-mib", "--num-blocks"):
        with pytest.raises(
            BadSetting, match=f"^{name} and --kv-memory-fraction exclude each other: set one"
        ):
            serve_config("--device", "cuda", "--kv-memory-fraction", "0.5", name, "100")


def test_the_order_is_one_of_two() -> None:
    assert serve_config().scheduler.order is SchedulingOrder.FAIR
    assert serve_config("--order", "fcfs").scheduler.order is SchedulingOrder.FCFS
    assert serve_config(PENSTOCK_ORDER="fcfs").scheduler.order is SchedulingOrder.FCFS
    assert serve_config("--deadline-admission", "on").scheduler.deadline_admission


def test_the_smallest_chance_reaches_its_setting_and_needs_prediction() -> None:
    assert serve_config("--min-deadline-chance", "0.3").scheduler.min_deadline_chance == 0.3
    with pytest.raises(
        BadSetting, match="--min-deadline-chance must be at least 0 and below 1, not 1"
    ):
        serve_config("--min-deadline-chance", "1")
    with pytest.raises(BadSetting, match="min-deadline-chance requires --deadline-admission on"):
        serve_config("--min-deadline-chance", "0.3", "--deadline-admission", "off")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-itl-ms", "0"], "target-itl-ms must be above 0, not 0.0"),
        (["--target-itl-ms", "nan"], "target-itl-ms must be finite and above 0, not nan"),
        (["--aging-s", "0"], "aging-s must be above 0"),
        (
            ["--max-prefill-share", "1.5"],
            "--max-prefill-share must be above 0 and at most 1, not 1.5",
        ),
        (["--max-num-waiting-per-tenant", "0"], "max-num-waiting-per-tenant must be at least 1"),
        (["--max-num-running-per-tenant", "0"], "max-num-running-per-tenant must be at least 1"),
        (["--tenant-metadata-key", "X-Tenant"], "tenant-metadata-key must be 1 to 128 of a-z"),
        (["--tenant-metadata-key", "grpc-tenant"], "tenant-metadata-key must not be one of gRPC"),
        (["--tenant-metadata-key", "tenant-bin"], "tenant-metadata-key must not be one of gRPC"),
        (["--tenant-weights", "a=2"], "--tenant-weights requires --tenant-metadata-key"),
        (["--order", "fcfs", "--aging-s", "3"], "aging-s has no effect with the order fcfs"),
        (
            ["--order", "fcfs", "--max-num-running-per-tenant", "3"],
            "max-num-running-per-tenant has no effect with the order fcfs",
        ),
        (["--step-cost", "{"], "step-cost is not valid JSON"),
        (["--step-cost", "[1"], "step-cost is not valid JSON"),
        (["--session-ttl-s", "0"], "session-ttl-s must be above 0"),
        (["--max-num-waiting", "0"], "max-num-waiting must be at least 1"),
        (["--record", "r", "--record-max-mib", "0"], "record-max-mib must be at least 1, not 0"),
        (["--record-max-mib", "9"], "record-max-mib requires --record"),
        (["--kv-cache-mib", "0"], "kv-cache-mib must be at least 1, not 0"),
        (["--kv-memory-fraction", "0.5"], "kv-memory-fraction requires a GPU"),
        (
            ["--device", "cuda", "--kv-memory-fraction", "1.5"],
            "kv-memory-fraction must be above 0 and at most 1, not 1.5",
        ),
        (["--fronts", "0"], "fronts must be in 1.."),
        (["--threads", "100000"], "--threads must be at most "),
        (["--quantization", "fp8"], "--quantization fp8 requires a GPU"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 requires a GPU"),
        (["--pipeline-depth", "2"], "--pipeline-depth must be 1 for the torch executor on a CPU"),
        (
            ["--prefix-caching", "off", "--session-ttl-s", "9"],
            "session-ttl-s requires prefix caching",
        ),
        (
            ["--prefix-caching", "off", "--eviction", "lru"],
            "eviction requires prefix caching",
        ),
        (["--step-cost", "none.json"], "step-cost: none.json cannot be read"),
        (["--step-cost", '{"step": 1}'], "step-cost.step is unknown"),
        (["--step-cost", '{"step_s": -1}'], "step-cost.step_s must be in 0..3600"),
        (
            ["--step-cost", '{"step_s": 1}'],
            "prefill_token_s, decode_slot_s, context_token_s miss",
        ),
    ],
)
def test_an_invalid_flag_of_the_scheduler_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(message)):
        serve_config(*arguments)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("", "must be NAME=WEIGHT"),
        ("a", "must be NAME=WEIGHT"),
        ("a=", "must be NAME=WEIGHT"),
        ("a=2,", "must be NAME=WEIGHT"),
        ("a=b", "must be NAME=WEIGHT,... with numbers, not 'a=b'"),
        ("a=1,a=2", "'a' occurs twice"),
        ("é=1", "is not a valid tenant name: it must be printable ASCII"),
        ("a=0", "tenant-weights['a'] must be in 1e-06..1000000, not 0.0"),
        ("a=inf", "tenant-weights['a'] must be in 1e-06..1000000, not inf"),
    ],
)
def test_weights_are_names_and_numbers(weights: str, message: str) -> None:
    with pytest.raises(BadSetting, match=re.escape(message)):
        serve_config("--tenant-metadata-key", "x-tenant", "--tenant-weights", weights)


def test_replays_are_switched_off_by_none_of_them() -> None:
    config = serve_config("--max-replays", "0", "--max-replay-wait-s", "7.5")
    assert (config.front.max_replays, config.front.max_replay_wait_s) == (0, 7.5)
    with pytest.raises(BadSetting, match="max-replays must be at least 0"):
        serve_config("--max-replays", "-1")


def test_a_name_may_hold_what_separates_it_from_its_weight() -> None:
    config = serve_config("--tenant-metadata-key", "k", "--tenant-weights", "a=b=2")
    assert config.scheduler.tenant_weights == {"a=b": 2.0}


def test_cost_comes_from_a_file_as_calibration_prints_them(tmp_path: Path) -> None:
    cost = CostModel(step_s=0.004, prefill_token_s=3e-5, decode_slot_s=0.0, context_token_s=1e-8)
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(to_json_value(cost)) + "\n", encoding="utf-8")
    assert serve_config("--step-cost", str(path)).scheduler.known_cost == cost


def test_arguments_win_over_the_environment_and_it_over_defaults() -> None:
    environment = {"PENSTOCK_PORT": "7001", "PENSTOCK_HOST": "0.0.0.0"}
    environment["PENSTOCK_ALLOW_ANONYMOUS_NETWORK"] = "on"
    config = serve_config("--port", "7002", **environment)
    assert (config.port, config.host) == (7002, "0.0.0.0")


def test_threads_of_the_environment_have_the_bound_of_the_flag_that_overrides_them() -> None:
    with pytest.raises(BadSetting, match=r"OMP_NUM_THREADS must be at most \d+, .* not 100000"):
        serve_config(OMP_NUM_THREADS="100000,1")
    assert serve_config("--threads", "2", OMP_NUM_THREADS="100000").executor.num_threads == 2
    assert (
        serve_config("--executor", "simulated", OMP_NUM_THREADS="100000").executor.num_threads
        is None
    )
    assert serve_config(OMP_NUM_THREADS="1").executor.num_threads is None


@pytest.mark.parametrize("value", ["", " ", "4"])
def test_torch_reads_the_number_of_threads_that_the_plan_has(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    executor = serve_config(OMP_NUM_THREADS=value).executor

    environment = os.environ | engine_environment(executor, num_cores=2, num_fronts=1)

    assert environment["OMP_NUM_THREADS"] == (value.strip() or "1")


@pytest.mark.parametrize("value", ["auto", "0", "-1", ",2"])
def test_threads_of_the_environment_are_a_number_above_0(value: str) -> None:
    message = f"OMP_NUM_THREADS must be a whole number from 1, not '{value}'"
    with pytest.raises(BadSetting, match=message):
        serve_config(OMP_NUM_THREADS=value)
    assert serve_config("--threads", "2", OMP_NUM_THREADS=value).executor.num_threads == 2
    assert (
        serve_config("--executor", "simulated", OMP_NUM_THREADS=value).executor.num_threads is None
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("PENSTOCK_PORT", "many", "an integer, not 'many'"),
        ("PENSTOCK_EXECUTOR", "magic", "one of torch, simulated"),
        ("PENSTOCK_DRAIN_TIMEOUT_S", "", "a number, not ''"),
    ],
)
def test_a_bad_variable_is_named_with_what_it_must_be(name: str, value: str, wanted: str) -> None:
    with pytest.raises(BadSetting, match=f"{name} must be {wanted}"):
        serve_config(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "is_real_time"),
    [
        ([], True),
        (["--simulated-config", '{"is_strict": true}'], True),
        (["--simulated-config", '{"is_real_time": false}'], False),
    ],
)
def test_simulated_steps_take_their_time_by_default(
    arguments: list[str], is_real_time: bool
) -> None:
    config = serve_config("--executor", "simulated", *arguments)
    assert config.executor.simulated.is_real_time is is_real_time


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--simulated-config", "{}"], "--simulated-config has no effect with the torch executor"),
        (
            ["--executor", "simulated", "--cpu-kernels", "avx2"],
            "--cpu-kernels has no effect with the simulated executor",
        ),
        (
            ["--device", "cuda:1", "--cpu-kernels", "none"],
            "--cpu-kernels has no effect with the device cuda:1",
        ),
    ],
)
def test_settings_of_another_executor_or_device_are_rejected(
    arguments: list[str], line: str
) -> None:
    with pytest.raises(BadSetting, match=f"^{line}$"):
        serve_config(*arguments)


def test_a_budget_below_one_token_per_slot_is_rejected() -> None:
    with pytest.raises(BadSetting, match=r"batched-tokens must .* --max-num-seqs \(40\), not 32"):
        serve_config("--max-num-batched-tokens", "32", "--max-num-seqs", "40")
    serve_config("--max-num-batched-tokens", "40", "--max-num-seqs", "40")


def test_variables_of_a_service_named_penstock_are_no_settings() -> None:
    environment = {
        "PENSTOCK_PORT": "tcp://10.0.0.1:50051",
        "PENSTOCK_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
    }
    assert serve_config(**environment).port == 50051
    assert unknown_variables(environment) == []


def test_misspelt_variables_are_detected() -> None:
    environment = {"PENSTOCK_MAX_NUM_SEQ": "3", "PENSTOCK_MAX_NUM_SEQS": "3", "HOME": "/"}
    environment["PENSTOCK_ADDRESS"] = "127.0.0.1:1"  # what the client's commands read
    assert unknown_variables(environment) == ["PENSTOCK_MAX_NUM_SEQ"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("kv_cache_bytes asks for 9 GiB", "--kv-cache-mib asks for 9 GiB"),
        (
            "quantization int8, kv_cache_dtype int8: the eager path serves this model",
            "--quantization int8, --kv-cache-dtype int8: the eager path serves this model",
        ),
        (
            "device cuda requires CUDA: use device cpu",
            "--device cuda requires CUDA: use --device cpu",
        ),
        ("quantization_config.num_blocks: quantization of 4 bits", None),
    ],
)
def test_fields_in_a_message_are_named_by_their_flags(message: str, expected: str | None) -> None:
    assert with_setting_flags(message) == (expected or message)


def test_choices_are_those_of_the_settings() -> None:
    choices = {option.flag: option.choices for option in SETTINGS}
    assert choices["dtype"] == DTYPES
    assert choices["quantization"] == QUANTIZATIONS
    assert choices["kv-cache-dtype"] == KV_CACHE_DTYPES
    assert choices["log-level"] == LOG_LEVELS
    assert set(choices["executor"] or ()) == {kind.value for kind in ExecutorKind}
    assert set(choices["order"] or ()) == {order.value for order in SchedulingOrder}
    assert set(choices["admission-policy"] or ()) == {policy.value for policy in AdmissionPolicy}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("host", ""),
        ("port", 65536),
        ("port", -1),
        ("num_fronts", 0),
        ("num_fronts", 1000),
        ("drain_timeout_s", float("nan")),
        ("drain_timeout_s", -1.0),
        ("log_level", "loud"),
        ("log_format", "xml"),
    ],
)
def test_a_setting_out_of_range_is_named(field: str, value: object) -> None:
    config = serve_config("--executor", "simulated")
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(config, **{field: value})  # type: ignore[arg-type]  # wrong on purpose
