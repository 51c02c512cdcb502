"""Every trace format is read and written, and errors name the line."""

import gzip
import math
from pathlib import Path

import pytest

from penstock.server.observe.recording.trace import TraceError, TraceRequest, json_line
from penstock.tools.simulation.trace_files import read_trace
from penstock.tools.simulation.trace_formats import TraceFormat

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

2023-11-16 18:16:46.6805900,879,55
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 2500, "input_length": 512, "output_length": 9, "hash_ids": [0]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_times_of_azure_rows_count_from_the_first_row(tmp_path: Path, name: str) -> None:
    requests = list(read_trace(written(tmp_path, name, AZURE)))

    assert [r.num_prompt_tokens for r in requests] == [374, 396, 879]
    assert [r.num_output_tokens for r in requests] == [44, 109, 55]
    assert requests[0].arrival_s == 0.0
    assert requests[1].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert requests[2].arrival_s == 60.0


def test_mooncake_lines_carry_prefix_ids(tmp_path: Path) -> None:
    requests = list(read_trace(written(tmp_path, "trace.jsonl", MOONCAKE)))

    assert requests == [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=700, num_output_tokens=5, prefix_ids=(0, 1)),
        TraceRequest(arrival_s=2.5, num_prompt_tokens=512, num_output_tokens=9, prefix_ids=(0,)),
    ]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_written_trace_is_read_unchanged(tmp_path: Path, name: str) -> None:
    requests = [
        TraceRequest(arrival_s=0.25, num_prompt_tokens=3, num_output_tokens=4),
        TraceRequest(
            arrival_s=1.5,
            num_prompt_tokens=40,
            num_output_tokens=1,
            tenant="b",
            priority=-2,
            ttft_deadline_s=2.0,
            deadline_s=30.0,
            prefix_ids=(7, 9, 11),
            prefix_block_tokens=16,
        ),
    ]
    text = "".join(f"{json_line(request)}\n" for request in requests).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)

    assert list(read_trace(tmp_path / name)) == requests
    assert requests[0].deadline_s == math.inf


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", AZURE + "2023-11-16 18:17:00,12,x\n", ":6: GeneratedTokens must be a whole"),
        ("a.csv", AZURE + "2023-11-16 18:17:00,12\n", ":6: 2 columns are too few"),
        ("a.csv", AZURE + "2023-11-16 18:16:00,12,1\n", ":6: arrives before the request above"),
        ("a.csv", AZURE + "2023-11-16 18:17:00,12,0\n", ":6: GeneratedTokens must be at least"),
        ("a.csv", AZURE + "yesterday,12,3\n", ":6: Invalid isoformat"),
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", ":1: the first line is of none of the"),
        ("m.jsonl", MOONCAKE + "{\n", ":3: not JSON"),
        ("m.jsonl", MOONCAKE + "[]\n", ":3: Expected `object`"),
        (
            "m.jsonl",
            MOONCAKE + '{"timestamp": 3000}\n',
            ":3: Object missing required field `input_length`",
        ),
        (
            "m.jsonl",
            MOONCAKE
            + '{"timestamp": 3000, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n',
            ":3: hash_ids must hold 2 ids",
        ),
        (
            "m.jsonl",
            MOONCAKE + '{"timestamp": 3000, "input_length": 513, "output_length": 1}\n',
            ":3: Object missing required field `hash_ids`",
        ),
        (
            "r.jsonl",
            '{"arrival_s": 0, "prompt_tokens": 1, "outputs": 2}\n',
            ":1: Object contains unknown field `outputs`",
        ),
        (
            "r.jsonl",
            '{"arrival_s": true, "prompt_tokens": 1}\n',
            ":1: Expected `float`, got `bool` - at `$.arrival_s`",
        ),
        ("e.csv", "\n\n", "contains no requests"),
        ("h.csv", AZURE.splitlines()[0] + "\n", "contains no requests"),
    ],
)
def test_an_error_in_a_trace_is_reported_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = written(tmp_path, name, text)

    with pytest.raises(TraceError) as caught:
        list(read_trace(path))

    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_of_another_format_than_specified(tmp_path: Path) -> None:
    path = written(tmp_path, "trace.jsonl", MOONCAKE)

    with pytest.raises(TraceError, match=":1: Object contains unknown field `timestamp`"):
        list(read_trace(path, TraceFormat.RECORDED))


def test_a_truncated_compressed_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode())[:-12])

    with pytest.raises(TraceError, match="the compressed file is cut off"):
        list(read_trace(path))


def test_a_trace_is_read_as_it_is_needed(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "trace.jsonl", MOONCAKE + "broken\n"))

    assert next(requests).num_output_tokens == 5
    assert next(requests).num_output_tokens == 9
    with pytest.raises(TraceError, match=":3:"):
        next(requests)
