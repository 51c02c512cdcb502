"""The meaning of the engine's error messages."""

from __future__ import annotations

import pytest

from penstock.executor.trtllm.refusals import is_fatal, is_refusal


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Token ID out of range", True),
        ("The prompt length (900) should not be larger than max_seq_len (512)", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("", False),
        ("`default_max_tokens` (-3) must be greater than 0, `max_seq_len` 512", True),
        ("Assertion failed: prompt length (9) exceeds max_seq_len (8)", True),
        ("Failed to compile the JSON schema", True),
        (
            'Guided decoding error: [09:11:02] /project/cpp/x.cc:902: Unsupported type "strnig"',
            True,
        ),
        ('Guided decoding error: Unsupported type "internal forward kernel CUDA"', False),
        ("Guided decoding error: [TensorRT-LLM][ERROR] CUDA runtime error in cudaMemcpy", False),
        ("Guided decoding error: CUDA error: device-side assert triggered", False),
        ("Guided decoding error: CUDA out of memory", False),
        ("mpi: failed to compile the grammar", False),
    ],
)
def test_the_engines_words_tell_whose_fault_it_was(message: str, expected: bool) -> None:
    assert is_refusal(message) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("cudaErrorIllegalAddress: an illegal memory access was encountered", True),
        ("unspecified launch failure", True),
        ("Guided decoding error: CUDA error: device-side assert triggered", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("forward failed", False),
    ],
)
def test_errors_that_no_cuda_context_survives_are_known(message: str, expected: bool) -> None:
    assert is_fatal(message) is expected


def test_words_of_the_request_itself_are_not_the_engines() -> None:
    form = '{"type": "internal forward kernel CUDA device-side assert"}'
    text = f"Guided decoding error: Unsupported type {form}"

    assert is_refusal(text, form)
    assert not is_fatal(text, form)
    assert is_fatal(f"{text}: an illegal memory access was encountered", form)
    assert not is_refusal(f"{text}: an illegal memory access, cublasSgemm", form)
