"""The number of KV cache blocks on a device: it is computed from free memory or set by the user,
and rejected if the memory is too small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.executor.config import ExecutorConfig
from penstock.executor.torch import num_blocks as num_blocks_module
from penstock.executor.torch.health_probe import NUM_PROBE_BLOCKS
from penstock.executor.torch.loading import load_model
from penstock.executor.torch.num_blocks import available_bytes, num_device_blocks, num_host_blocks
from penstock.executor.torch.resources import describe_resources
from support.torch_models import save_tiny_model

MIB = 1 << 20


def blocks(free_mib: int, step_mib: int = 0, max_seq_len: int = 100_000, **fields: Any) -> int:
    """Return the number of 1 MiB blocks on a device. Its free memory is `free_mib` MiB more than
    the health probe's blocks and the margin of 1 GiB.
    """
    config = ExecutorConfig(model_path=Path("/m"), device="cuda", **fields)
    return num_device_blocks(
        config,
        bytes_each=MIB,
        max_seq_len=max_seq_len,
        free_bytes=(free_mib + NUM_PROBE_BLOCKS + 1024) * MIB,
        step_bytes=step_mib * MIB,
    )


def test_pages_take_their_share_of_what_weights_and_the_largest_step_leave() -> None:
    assert blocks(1000, 200) == 720
    assert blocks(1000, 200, kv_memory_fraction=0.5) == 400


def test_no_more_pages_than_all_slots_can_fill() -> None:
    assert blocks(1000, max_num_seqs=4, max_seq_len=33, block_size=16) == 12
    assert blocks(1000, max_num_seqs=4, max_seq_len=33, kv_cache_bytes=90 * MIB) == 12


def test_a_setting_beyond_what_can_be_used_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_seq_len": 33, "block_size": 16}
    config = ExecutorConfig(
        model_path=Path("/m"), kv_cache_bytes=90 * MIB, max_num_seqs=4, block_size=16
    )

    assert blocks(1000, **limits) == 12
    assert caplog.messages == []

    assert blocks(1000, kv_cache_bytes=90 * MIB, **limits) == 12
    assert num_host_blocks(config, bytes_each=MIB, max_seq_len=33) == 12
    assert (
        caplog.messages
        == ["--kv-cache-mib is 90; 12 are used: 4 sequences of 33 tokens do not need more"] * 2
    )


def test_the_configured_number_of_blocks_is_used() -> None:
    assert blocks(1000, 200, num_blocks=17) == 17
    assert blocks(1000, 200, kv_cache_bytes=17 * MIB + 5) == 17


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_blocks": 900},
            r"^num_blocks asks for 0.9 GiB of pages; 0.8 GiB are free on cuda"
            r" next to the weights and 1.2 GiB reserved for steps$",
        ),
        ({"kv_cache_bytes": 900 * MIB}, r"^kv_cache_mib asks for 0.9 GiB of pages; 0.8 GiB"),
        ({"kv_cache_bytes": 5}, r"^kv_cache_mib leaves no room for a block of 1048576 bytes"),
        ({"kv_memory_fraction": 0.001}, r"^kv_memory_fraction leaves no room for a block"),
    ],
)
def test_settings_that_do_not_fit_in_memory_are_rejected_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        blocks(1000, 200, **fields)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"num_blocks": 2_000_000_000}, "num_blocks asks for 1953125.0 GiB"),
        ({"num_blocks": 901}, "num_blocks asks for 0.9 GiB"),
        ({"kv_cache_bytes": 901 * MIB}, "kv_cache_mib asks for 0.9 GiB"),
    ],
)
def test_pages_beyond_the_memory_of_the_machine_are_rejected_by_their_setting(
    fields: dict[str, Any], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(num_blocks_module, "available_bytes", lambda: 900 * MIB)

    def host_blocks(**fields: Any) -> int:
        config = ExecutorConfig(model_path=Path("/m"), **fields)
        return num_host_blocks(config, bytes_each=MIB, max_seq_len=100_000)

    with pytest.raises(ValueError, match=f"^{asked} of pages; 0.9 GiB of memory are available"):
        host_blocks(**fields)
    assert host_blocks(num_blocks=900) == host_blocks(kv_cache_bytes=900 * MIB) == 900
    monkeypatch.setattr(num_blocks_module, "available_bytes", lambda: None)
    assert host_blocks(num_blocks=901) == 901


MACHINE = "MemTotal:        4000 kB\nMemFree:    100 kB\nMemAvailable:    3000 kB\n"
STAT = "anon 7\ninactive_file 1000\nactive_file 500\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 3000 * 1024),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "77\n"}, 3000 * 1024),
        ("0::/\n", {"memory.max": "50000\n", "memory.current": "20000\n"}, 30_000),
        # The page cache can be dropped.
        (
            "0::/pods/one\n",
            {
                "pods/memory.max": "50000",
                "pods/memory.current": "20000",
                "pods/memory.stat": STAT,
                "pods/one/memory.max": "max",
            },
            31_500,
        ),
        ("0::/\n", {"memory.max": "50", "memory.current": "60"}, 0),
        (
            "2:cpu:/\n4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "50000",
                "memory/memory.usage_in_bytes": "20000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
            },
            30_200,
        ),
    ],
)
def test_a_control_group_limits_the_memory(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in {"meminfo": MACHINE, "groups": groups}.items():
        (tmp_path / name).write_text(text)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    found = available_bytes(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "mount")

    assert found == expected


def test_a_system_that_reports_none_has_no_bound(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none", tmp_path) is None


def test_eight_bits_are_reported_with_what_they_take(tmp_path: Path) -> None:
    model = load_model(save_tiny_model("llama", tmp_path), device="cpu", dtype="float32")

    plain = describe_resources(model, page_bytes=1 << 20, path="fused", num_weight_bytes=3 << 20)
    eight_bit = describe_resources(
        model,
        page_bytes=1 << 20,
        path="fused",
        num_weight_bytes=3 << 20,
        quantization="int8",
        page_dtype=torch.float8_e4m3fn,
    )

    assert plain.endswith("float32, fused path, weights 3 MiB, KV cache 1 MiB")
    assert eight_bit.endswith("weights 3 MiB in int8, KV cache 1 MiB in float8_e4m3fn")
