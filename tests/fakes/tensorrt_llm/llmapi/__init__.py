"""The public names of the package, in the module where the real one has them."""

from penstock.executor.trtllm.source_check import load_facts
from tensorrt_llm import sampling_params
from tensorrt_llm.executor import request, result
from tensorrt_llm.llmapi import llm_configs
from tensorrt_llm.recorded import recorded

for _name in load_facts()["modules"]["tensorrt_llm.llmapi"]["names"]:
    _owners = (sampling_params, request, result, llm_configs)
    _found = next((vars(owner)[_name] for owner in _owners if _name in vars(owner)), None)
    # Of speculative decoding the engine uses `max_draft_len` only.
    globals()[_name] = _found or recorded(f"tensorrt_llm.llmapi.{_name}")
