"""The CPU kernels, with every instruction set of this machine and in plain torch, compared with
float64.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.executor.config import INSTRUCTION_SETS
from penstock.executor.torch.cpu_kernels import kernels as kernels_module
from penstock.executor.torch.cpu_kernels import native
from penstock.executor.torch.cpu_kernels.kernels import (
    AUTO,
    PLAIN,
    choose,
    load,
    warn_without_kernels,
)
from penstock.executor.torch.cpu_kernels.step_rows import StepRows
from support.kernel_steps import DECODES_AND_CHUNKS, Case, Step

REPOSITORY = Path(__file__).resolve().parents[3]
SETS = [*filter(native.is_supported, INSTRUCTION_SETS), PLAIN]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
each_set = pytest.mark.parametrize("instructions", SETS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])

CASES = {
    "plain": Case(),
    "two queries a key head": Case(group=2),
    "seven queries a key head": Case(group=7, dim=32),
    "forty queries a key head": Case(heads=1, group=40, dim=32),
    "window": Case(window=20, group=2),
    "window of one key": Case(window=1),
    "softcap": Case(softcap=2.0, group=4),
    "sinks": Case(has_sinks=True, group=3),
    "all at once": Case(has_sinks=True, softcap=3.0, window=33, group=4, dim=96, block_size=8),
    "32 elements": Case(dim=32, block_size=8),
    "80 elements": Case(dim=80, block_size=32),
    "96 elements": Case(dim=96),
    "128 elements": Case(dim=128, group=4, block_size=32),
    "256 elements": Case(dim=256, block_size=8, heads=1, group=4),
    "12 elements": Case(dim=12, group=2),
    "blocks of one token": Case(block_size=1),
    "long contexts": Case(rows=((1100, 1), (1024, 2), (511, 1), (512, 1), (30, 1)), heads=1),
    "long contexts, a group": Case(rows=((1100, 1), (1500, 3)), heads=1, group=6, has_sinks=True),
    "long contexts, a window": Case(rows=((1700, 1), (1500, 3)), heads=1, window=700),
}


@each_set
@each_dtype
@pytest.mark.parametrize("name", CASES)
def test_rows_attend_as_float64_does(name: str, dtype: torch.dtype, instructions: str) -> None:
    step = Step(CASES[name], dtype)
    step.fill()
    # Slices of a fused row: strides of tokens and heads are the caller's.
    wide = torch.randn(step.num_tokens, step.num_heads + 3, step.case.dim).to(dtype)
    query = wide[:, 2:-1]
    out = torch.full_like(wide, 7.0)

    step.layer(instructions).attend(step.rows, query, out[:, 1:-2])

    torch.testing.assert_close(
        out[:, 1:-2].double(), step.expected(query), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert (out[:, 0] == 7.0).all()
    assert (out[:, -2:] == 7.0).all()


@each_set
@each_dtype
def test_attention_of_a_row_depends_on_no_other_row_or_number_of_threads(
    dtype: torch.dtype, instructions: str
) -> None:
    case = replace(CASES["long contexts"], heads=2, group=2, rows=(*DECODES_AND_CHUNKS, (1100, 1)))
    step = Step(case, dtype)
    step.fill()
    query = step.query()
    layer = step.layer(instructions)
    threads = torch.get_num_threads()
    seen = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            seen.append(torch.empty_like(query))
            layer.attend(step.rows, query, seen[-1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    for row in range(len(case.rows)):
        first, count = int(step.rows.first_tokens[row]), int(step.rows.counts[row])
        alone = StepRows()
        alone.set(
            first_tokens=np.zeros(1, dtype=np.int32),
            num_tokens=step.rows.counts[row : row + 1],
            starts=step.rows.starts[row : row + 1],
            slots=step.rows.slots[row : row + 1],
            block_table=step.table,
        )
        out = torch.empty_like(query[first : first + count])
        layer.attend(alone, query[first : first + count], out)
        assert torch.equal(out, seen[0][first : first + count])


@pytest.mark.skipif(SETS == [PLAIN], reason="no compiled kernels here")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_the_kernels_run_on_the_threads_of_torch() -> None:
    threads = torch.get_num_threads()
    step = Step(Case(rows=((300, 1),) * 40), torch.bfloat16)
    step.fill()
    query = torch.randn(40, 2, 64).bfloat16()
    try:
        torch.set_num_threads(4)
        torch.randn(1 << 20).exp()
        before = len([*Path("/proc/self/task").iterdir()])
        step.layer().attend(step.rows, query, torch.empty_like(query))
        # Fewer, if threads of an earlier, larger team were still exiting.
        assert len([*Path("/proc/self/task").iterdir()]) <= before
    finally:
        torch.set_num_threads(threads)


@each_set
def test_values_that_are_not_finite_are_kept_in_the_attention_output(instructions: str) -> None:
    step = Step(Case(group=2), torch.float32)
    step.fill()
    query = torch.randn(step.num_tokens, step.num_heads, 64)
    query[3, 1, 5] = float("nan")
    query[40, 0, 5] = float("inf")
    out = torch.empty_like(query)

    step.layer(instructions).attend(step.rows, query, out)

    is_bad = ~torch.isfinite(out).all(-1)
    assert is_bad.nonzero().tolist() == [[3, 1], [40, 0]]


@each_set
@each_dtype
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("has_norm", [False, True], ids=["rotated", "normed and rotated"])
def test_keys_and_values_reach_their_pages(
    has_norm: bool, block_size: int, dtype: torch.dtype, instructions: str
) -> None:
    size, rotated = 40, 24
    case = Case(dim=size, group=3, block_size=block_size)
    positions = torch.cat([torch.arange(start, start + n) for start, n in case.rows])
    angles = torch.rand(200, rotated // 2) * 6
    written = []
    for name in (instructions, PLAIN):
        step = Step(case, dtype)
        qkv = torch.randn(step.num_tokens, step.num_heads + 2 * case.heads, size).to(dtype)
        rows = torch.full((step.num_tokens, qkv[0].numel() + 5), 9.0, dtype=dtype)
        rows[:, :-5] = qkv.flatten(1)
        norms = torch.rand(2, size).to(dtype) if has_norm else (None, None)
        step.layer(name).rotate_and_write(
            step.rows,
            rows[:, :-5],
            angles.cos(),
            angles.sin(),
            query_norm=norms[0],
            key_norm=norms[1],
            eps=1e-5,
        )
        assert (rows[:, -5:] == 9.0).all()
        written.append((rows, step.pages))
        if not has_norm:
            turn = torch.polar(torch.ones(()).double(), angles[positions, None].double())
            heads = qkv[:, : -case.heads].double()
            pairs = torch.complex(heads[..., : rotated // 2], heads[..., rotated // 2 : rotated])
            expected = pairs * turn
            got = rows[:, :-5].view(qkv.shape)[:, : step.num_heads, :rotated]
            expected = torch.cat([expected.real, expected.imag], -1)[:, : step.num_heads]
            torch.testing.assert_close(
                got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    for one, plain in zip(*written, strict=True):
        torch.testing.assert_close(
            one, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True
        )


@each_set
@each_dtype
def test_keys_written_without_rotation_are_the_same_bits(
    dtype: torch.dtype, instructions: str
) -> None:
    step = Step(Case(dim=20), dtype)
    wide = torch.randn(2, step.case.heads, step.num_tokens, 20).to(dtype)
    key, value = wide.transpose(1, 2)
    step.layer(instructions).write(step.rows, key, value)
    for row, (start, count) in enumerate(step.case.rows):
        first = int(step.rows.first_tokens[row])
        for token in range(count):
            column, offset = divmod(start + token, 16)
            block = step.table[step.slots[row], column]
            assert torch.equal(step.pages[block, 0, :, offset], key[first + token])
            assert torch.equal(step.pages[block, 1, :, offset], value[first + token])
    assert int(torch.isfinite(step.pages).sum()) == key.numel() + value.numel()


@each_set
@each_dtype
@pytest.mark.parametrize("size", [64, 77, 1000])
def test_small_operators_agree_with_torch(size: int, dtype: torch.dtype, instructions: str) -> None:
    kernels, plain = load(instructions), load(PLAIN)
    torch.manual_seed(1)
    for num_rows in (1, 50):
        x, added = torch.randn(2, num_rows, size + 3).to(dtype)[..., 1 : size + 1]
        weight, outs, residuals = torch.rand(size).to(dtype), [], []
        for one in (kernels, plain):
            residuals.append(x.clone())
            outs.append(torch.empty_like(x))
            one.add_rms_norm(residuals[-1], added, weight, 1e-6, outs[-1])
        assert torch.equal(*residuals)
        torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=1e-6)
        gate_up, outs = torch.randn(num_rows, 2 * size).to(dtype) * 30, []
        for one in (kernels, plain):
            outs.append(torch.empty(num_rows, size, dtype=dtype))
            one.silu_mul(gate_up, outs[-1])
        torch.testing.assert_close(*outs, rtol=TOLERANCE[dtype], atol=1e-6)


@each_set
@each_dtype
@pytest.mark.parametrize("size", [3, 77, 5000])
def test_the_greatest_logit_is_returned_and_an_invalid_row_reported(
    size: int, dtype: torch.dtype, instructions: str
) -> None:
    nan, inf = float("nan"), float("inf")
    torch.manual_seed(2)
    logits = torch.randn(9, size).to(dtype)
    for row, column in enumerate((0, size - 1, size // 2)):
        logits[row, column] = 50.0
    logits[3, :2] = 50.0  # the lowest of equals
    logits[4, 1:] = -inf
    logits[5, size - 1] = nan
    logits[6, 0] = nan
    logits[7, 1] = inf
    logits[8] = -inf
    out, is_finite = np.zeros(9, dtype=np.int32), np.zeros(9, dtype=np.bool_)

    load(instructions).argmax_rows(logits, out, is_finite)

    assert out.tolist() == [0, size - 1, size // 2, 0, 0, 0, 0, 0, 0]
    assert is_finite.tolist() == [True] * 5 + [False] * 4


def test_the_chosen_kernels_are_loaded_and_missing_ones_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels_module, "_chosen", AUTO)
    assert load().instructions == SETS[0]
    choose(PLAIN)
    assert not load().is_native
    monkeypatch.setattr(native, "load_library", lambda: None)
    with pytest.raises(ValueError, match="cpu_kernels baseline does not run here"):
        load("baseline")


def test_without_a_shared_object_plain_torch_runs_with_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "load_library", lambda: None)
    warn_without_kernels.cache_clear()
    assert [load().instructions for _ in range(2)] == [PLAIN, PLAIN]
    assert [record.message for record in caplog.records] == [
        "no compiled CPU kernels: attention runs in PyTorch's operators"
    ]


HOOK = REPOSITORY / "hatch_build.py"


@pytest.fixture
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shared_object_is_of_these_sources(hook: Any) -> None:
    if shutil.which("gcc") is None and native.source_digest() is None:
        pytest.skip("no gcc")
    assert native.source_digest() == hook.source_digest(), "run: python hatch_build.py"
    assert native.source_digest() == native.digest_of_sources(HOOK)


@pytest.mark.skipif(SETS == [PLAIN], reason="no compiled kernels here")
def test_kernels_of_other_sources_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_afresh = native.load_library.__wrapped__
    load_afresh()
    assert caplog.messages == []

    monkeypatch.setattr(native, "digest_of_sources", lambda _hook: "0" * 16)
    load_afresh()

    (message,) = caplog.messages
    assert message.startswith("the compiled CPU kernels are older than their sources")
    assert message.endswith(f"run `python {HOOK}`")


def test_a_failed_compilation_leaves_the_old_shared_object(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kernels.so"
    target.write_text("old")
    monkeypatch.setenv("CC", "false")

    with pytest.raises(subprocess.CalledProcessError):
        hook.compile_kernels(target)

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


_FAKE_COMPILER = """\
#!/bin/sh
test "$1" = --version && { cat VERSION; exit; }
echo >>CALLS
for out; do :; done
if test "$1" = -shared; then cat ./*.o; else echo "$@"; fi >"$out"
"""


def test_an_editable_install_compiles_only_what_has_changed_and_a_wheel_always(
    hook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, calls, compiler = (tmp_path / name for name in ("version", "calls", "cc"))
    script = _FAKE_COMPILER.replace("VERSION", str(version)).replace("CALLS", str(calls))
    compiler.write_text(script)
    compiler.chmod(0o755)
    version.write_text("cc 1")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(hook, "_TARGET", tmp_path / "kernels.so")

    def compiles(kind: str) -> bool:
        calls.write_text("")
        build_data: dict[str, Any] = {}
        hook.CustomBuildHook("", {}, None, None, "", "wheel").initialize(kind, build_data)
        assert not build_data["pure_python"]
        return bool(calls.read_text())

    assert compiles("editable")
    assert not compiles("editable")
    assert compiles("standard")

    version.write_text("cc 2")
    assert compiles("editable")

    monkeypatch.setattr(hook, "source_digest", lambda: "0" * 16)
    assert compiles("editable")
    assert not compiles("editable")
