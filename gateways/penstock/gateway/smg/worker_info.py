"""Builds the messages that describe a worker's model, engine and load to a gateway.

The messages have only the fields that the gateway defines; GetModel of `penstock.v1` reports all
properties.

Also creates the archive of the model's tokenizer, for a gateway that has no copy of the model. The
same files give the same bytes on all machines, so that a digest identifies a tokenizer.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.loads import EngineLoad
from penstock.scheduler.executor import ExecutorInfo
from penstock.server.front.errors import ErrorReason, request_error
from penstock.server.front.limits import Limits
from penstock.server.text.model_files import ModelFiles

SERVER_TYPE: Final = "penstock"
NOWHERE: Final = "/nonexistent/penstock/"
"""Prefix of the paths that are reported to a gateway.

A gateway looks for a tokenizer at such a path, then for a public model, and only then requests the
tokenizer from the worker. No file and no model may have such a name, because another tokenizer
could count tokens differently.
"""
CHUNK_BYTES: Final = 64 << 10
MAX_FILES: Final = 50
MAX_BUNDLE_BYTES: Final = 200 << 20
MAX_UNPACKED_BYTES: Final = 500 << 20
"""The maximum values that gateways accept for an archive: number of files, bytes of the archive,
and bytes of the files. The tokenizers of models need about a tenth of these."""
_NAMES: Final = frozenset(
    {
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE: Final = 0o100644 << 16


def model_info_of(files: ModelFiles, limits: Limits) -> vllm.GetModelInfoResponse:
    """Return the name, architecture, token limits and special token ids of the model."""
    return vllm.GetModelInfoResponse(
        model_path=NOWHERE + files.name,
        is_generation=True,
        max_context_length=limits.max_total_tokens,
        vocab_size=limits.vocab_size,
        supports_vision=False,
        served_model_name=files.name,
        tokenizer_path=NOWHERE + files.name,
        architectures=[files.architecture] if files.architecture else (),
        eos_token_ids=files.eos_ids,
        bos_token_id=files.bos_id or 0,
        max_req_input_len=limits.max_prompt_tokens,
    )


def server_info_of(info: ExecutorInfo, uptime_s: float) -> vllm.GetServerInfoResponse:
    """Return the block size and the number of slots of the engine. `uptime_s`: seconds since the
    front started."""
    return vllm.GetServerInfoResponse(
        is_paused=False,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        constrained_decoding_start="first_token",
    )


def load_of(load: EngineLoad) -> vllm.SchedulerLoad:
    """Return the load of the engine as the load of rank 0, the only rank."""
    return vllm.SchedulerLoad(
        dp_rank=0,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.num_total_tokens,
        token_usage=load.usage,
        gen_throughput=load.output_tokens_per_s,
        cache_hit_rate=load.cache_hit_share,
        utilization=load.usage,
        max_running_requests=load.max_num_running,
        num_waiting_uncached_tokens=load.num_waiting_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBundle:
    """A zip archive and the SHA-256 of its bytes, in hexadecimal."""

    data: bytes
    sha256: str


def make_bundle(folder: Path) -> TokenizerBundle:
    """Return the tokenizer in `folder` as an archive.

    Reads and compresses files, so it must not run on an event loop. Raises RequestError
    (NOT_POSSIBLE_NOW) if it is too large or has too many files, and OSError if it cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.name in _NAMES and path.is_file())
    if len(files) > MAX_FILES or sum(path.stat().st_size for path in files) > MAX_UNPACKED_BYTES:
        raise _too_large()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.name, date_time=_LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = _PLAIN_FILE
            entry.create_system = 3
            archive.writestr(entry, path.read_bytes(), compresslevel=6)
    data = packed.getvalue()
    if len(data) > MAX_BUNDLE_BYTES:
        raise _too_large()
    return TokenizerBundle(data=data, sha256=hashlib.sha256(data).hexdigest())


def _too_large() -> Exception:
    return request_error(ErrorReason.NOT_POSSIBLE_NOW, "the tokenizer is too large to be sent")
