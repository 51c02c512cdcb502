"""The model's limits and features, as published by ModelService.

Features that are not built are published as false here and refused in `mapping_in.prompt` and
`model_service`; a test compares the three. Features of the executor are published once they are
known.
"""

from google.protobuf.timestamp_pb2 import Timestamp

from penstock.scheduler.executor import Feature
from penstock.server.front.front import Front
from penstock.server.front.limits import Limits
from penstock.server.rpc.mapping_in.generation import MAX_ID_CHARS
from penstock.server.rpc.mapping_out import duration_of
from penstock.server.rpc.options import (
    MAX_CONCURRENT_STREAMS,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    KeepaliveConfig,
)
from penstock.v1 import model_pb2 as pb


def model_of(
    front: Front, keepalive: KeepaliveConfig, *, has_operations: bool = False
) -> pb.ModelInfo:
    """The one model of a front. `has_operations`: OperationsService is served on its own port."""
    return pb.ModelInfo(
        name=front.model,
        aliases=front.config.model_aliases,
        is_default=True,
        state=_state_of(front),
        limits=_limits_of(front, keepalive),
        features=_features_of(front, has_operations=has_operations),
        adapters=front.limits.adapters if front.limits is not None else (),
        executor=front.hello.executor.name if front.hello else "",
        ready_time=_time_of(front.ready_time_s),
        quantization=front.hello.executor.quantization if front.hello else "",
        kv_cache_dtype=front.hello.executor.kv_cache_dtype if front.hello else "",
    )


def _state_of(front: Front) -> pb.ModelState.ValueType:
    if front.is_draining:
        return pb.MODEL_STATE_DRAINING
    if front.is_engine_up:
        return pb.MODEL_STATE_READY
    return pb.MODEL_STATE_LOADING if front.hello is None else pb.MODEL_STATE_RECOVERING


def _time_of(time_s: float | None) -> Timestamp | None:
    if time_s is None:
        return None
    time = Timestamp()
    time.FromMilliseconds(round(time_s * 1000))
    return time


def _limits_of(front: Front, keepalive: KeepaliveConfig) -> pb.ModelLimits:
    config = front.config
    limits = pb.ModelLimits(
        max_prompt_bytes=config.max_prompt_bytes,
        max_chat_messages=config.max_chat_messages,
        max_stop_strings=config.max_stop_strings,
        max_stop_string_chars=config.max_stop_string_chars,
        max_stop_string_bytes=config.max_stop_string_bytes,
        max_stop_token_ids=config.max_stop_token_ids,
        max_num_outputs=config.max_num_outputs,
        max_logprobs=config.max_logprobs,
        max_logit_bias=config.max_logit_bias,
        max_identifier_chars=MAX_ID_CHARS,
        max_images=0,
        max_image_bytes=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_metadata_bytes=MAX_METADATA_BYTES,
        max_concurrent_streams=MAX_CONCURRENT_STREAMS,
        max_resume_timeout=duration_of(config.max_resume_grace_s),
        reader_stall_timeout=duration_of(config.max_reader_stall_s),
        default_timeout=duration_of(config.default_deadline_s),
        max_timeout=duration_of(config.max_deadline_s),
        keepalive=pb.KeepalivePolicy(
            min_client_ping_interval=duration_of(keepalive.min_client_ping_interval_s),
            server_ping_interval=duration_of(keepalive.server_ping_interval_s),
            server_ping_timeout=duration_of(keepalive.server_ping_timeout_s),
            max_connection_age=duration_of(keepalive.max_connection_age_s),
            max_connection_age_grace=duration_of(keepalive.max_connection_age_grace_s),
        ),
    )
    if front.limits is not None and front.hello is not None:
        _add_engine_limits(limits, front.limits)
        limits.max_pending_requests = front.hello.max_num_waiting
        limits.max_pending_tokens = min(front.hello.max_num_waiting_tokens, 2**32 - 1)
    return limits


def _add_engine_limits(message: pb.ModelLimits, limits: Limits) -> None:
    message.max_prompt_tokens = limits.max_prompt_tokens
    message.max_output_tokens = limits.max_output_tokens
    message.max_total_tokens = limits.max_total_tokens
    message.default_max_tokens = limits.default_max_tokens
    message.vocab_size = limits.vocab_size
    message.max_chunk_tokens = limits.max_chunk_tokens
    message.max_constraint_bytes = limits.max_constraint_bytes


def _features_of(front: Front, *, has_operations: bool) -> pb.ModelFeatures:
    features = pb.ModelFeatures(
        text_prompt=True,
        token_prompt=True,
        chat_prompt=front.text.tokenizer.has_chat_template,
        truncated_sampling=True,
        multiple_outputs=True,
        echo=True,
        priority=True,
        timeouts=True,
        time_limit=True,
        cache_salt=True,
        images=False,
        chunk_limits=True,
        multiplex=True,
        resume=front.config.max_resume_grace_s > 0,
        model_loading=False,
        tools=front.text.tokenizer.has_tools,
        adapter_loading=False,
        flight_record=has_operations,
        request_listing=has_operations,
        stats=has_operations,
        drain=has_operations,
    )
    if front.limits is not None:
        features.sessions = front.limits.has_sessions
        for feature in Feature:  # with the contract's names
            setattr(features, feature.value, feature in front.limits.features)
    return features
