"""What a worker reports to a gateway: model, engine, load.

Owns the foreign messages for it. It has only the gateway's fields; GetModel of `penstock.v1`
has everything.
"""

from typing import Final

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.gateway.smg.loads import Load
from penstock.scheduler.executor import ExecutorInfo
from penstock.server.front.limits import Limits
from penstock.server.text.model_files import ModelFiles

SERVER_TYPE: Final = "penstock"
NOWHERE: Final = "/nonexistent/penstock/"
"""Where a gateway looks for the tokenizer first. It looks there, and for a public model of that
name, and then asks the worker. So the name must be that of no file and of no model: one that
happened to be there would count tokens otherwise than we do."""


def model_info_of(files: ModelFiles, limits: Limits) -> vllm.GetModelInfoResponse:
    """The one model."""
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
    """The one engine behind this port."""
    return vllm.GetServerInfoResponse(
        is_paused=False,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        constrained_decoding_start="first_token",
    )


def load_of(load: Load) -> vllm.SchedulerLoad:
    """The load of the only rank."""
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
