"""Converts a validated request and its token ids to the specs for the engine, one per output.

Makes the checks that need the number of prompt tokens, derives the seeds of the outputs and the
block hashes of the prompt, and converts durations to times. The functions have no side effects and
may run on any thread: clock readings and random numbers are arguments.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.block_hash import chain_root, hash_blocks
from penstock.scheduler.executor import Feature
from penstock.scheduler.request import NO_TIME, RequestSpec, SamplingParams
from penstock.server.front.errors import ErrorReason, RequestError, invalid_field
from penstock.server.front.generation import GenerationSpec
from penstock.server.front.limits import Limits
from penstock.server.tenants import engine_request_id


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival time and gRPC deadline of a call (NO_TIME without one), in seconds on the engine's
    clock."""

    arrival_s: float
    call_deadline_s: float = NO_TIME


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The specs for the engine, one per output in order, and data for events and errors.

    Attributes:
        deadline_kind: What sets the deadline: `total` (a field of the request), `grpc` (the call)
            or `server` (the settings).
        seed: The seed reported to the client; 0 if the executor does not support seeds.
        block_size: Tokens per hashed block.
        num_dropped_messages: Number of chat messages that the chat window has removed.
    """

    specs: tuple[RequestSpec, ...]
    seed: int
    deadline_kind: str
    block_size: int
    num_dropped_messages: int = 0


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ids of a prompt, int32 [n], with its block hashes and the salt from which the hashes
    start."""

    ids: NDArray[np.int32]
    block_hashes: tuple[bytes, ...] = ()
    hash_salt: bytes = b""
    num_dropped_messages: int = 0


def output_seed(seed: int, output_index: int) -> int:
    """Return the seed of an output: the seed of the request for output 0, otherwise a 64-bit hash
    of that seed and the index."""
    if output_index == 0:
        return seed
    data = seed.to_bytes(8, "little") + output_index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, person=b"penstock-seed").digest(), "little")


def prompt_too_long(
    path: str, num_tokens: int, limits: Limits, qualifier: str = ""
) -> RequestError:
    """Return the error for a prompt that exceeds the maximum length.

    `qualifier` is "at least " if `num_tokens` is a lower bound.
    """
    return invalid_field(
        path,
        f"has {qualifier}{num_tokens} tokens, a prompt may have {limits.max_prompt_tokens}",
        ErrorReason.PROMPT_TOO_LONG,
        num_prompt_tokens=str(num_tokens),
        max_total_tokens=str(limits.max_total_tokens),
        max_prompt_tokens=str(limits.max_prompt_tokens),
    )


def check_prompt_fits(generation: GenerationSpec, num_prompt_tokens: int, limits: Limits) -> int:
    """Return `max_tokens`; if it is not set, its default, limited to the space after the prompt.

    Raises RequestError if the request can never fit the context or the KV cache, if the prompt is
    empty, or if `min_tokens` is above `max_tokens`.
    """
    if num_prompt_tokens < 1:
        raise invalid_field(generation.prompt_path, "has no tokens")
    requested = generation.stopping.max_tokens
    max_total = limits.max_context_tokens
    space = max_total - num_prompt_tokens
    # If no output token fits after the prompt, the prompt is too long; otherwise max_tokens is too
    # large.
    if space < 1 or num_prompt_tokens > limits.max_context_prompt_tokens:
        raise prompt_too_long(generation.prompt_path, num_prompt_tokens, limits)
    if requested is not None and requested > space:
        raise invalid_field(
            "stopping.max_tokens",
            f"must be at most {space} after a prompt of {num_prompt_tokens} tokens,"
            f" not {requested}",
            ErrorReason.PROMPT_TOO_LONG,
            num_prompt_tokens=str(num_prompt_tokens),
            max_total_tokens=str(limits.max_total_tokens),
        )
    space = limits.max_total_tokens - num_prompt_tokens
    if space < 1 or (requested is not None and requested > space):
        needed = limits.num_blocks_for(num_prompt_tokens + (requested or 1))
        raise invalid_field(
            generation.prompt_path if space < 1 else "stopping.max_tokens",
            f"would not fit the KV cache of {limits.num_blocks} blocks even if it were alone",
            ErrorReason.EXCEEDS_KV_CACHE,
            num_blocks_needed=str(needed),
            num_blocks=str(limits.num_blocks),
        )
    max_tokens = requested if requested is not None else min(limits.default_max_tokens, space)
    if generation.stopping.min_tokens > max_tokens:
        raise invalid_field("stopping.min_tokens", f"must be at most max_tokens, {max_tokens}")
    return max_tokens


def hash_prompt(
    ids: NDArray[np.int32],
    generation: GenerationSpec,
    block_size: int,
    *,
    is_prefix_caching: bool,
    random_salt: Callable[[], bytes],
    shares_across_tenants: bool = False,
) -> TokenizedPrompt:
    """Return the prompt with the hashes of its full blocks.

    The hashes start from a salt, and only requests with the same salt share blocks (see
    `shared_salt`). If `shares_across_tenants`, the salt does not contain the tenant. The salt is
    random without prefix caching, and for prompt logprobs, because they need every position to be
    computed. Then only the outputs of this request share blocks; with a single output there are no
    hashes.
    """
    is_shared = is_prefix_caching and generation.output.num_prompt_logprobs < 0
    if not is_shared and generation.sampling.num_outputs == 1:
        return TokenizedPrompt(ids=ids)
    tenant = "" if shares_across_tenants else generation.tenant
    salt = b"r" + random_salt()
    if is_shared:
        salt = shared_salt(tenant, generation.adapter, generation.cache_salt)
    return TokenizedPrompt(
        ids=ids, block_hashes=hash_blocks(ids, block_size, chain_root(salt)), hash_salt=salt
    )


def shared_salt(tenant: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """Return the common salt of requests that may share blocks, made of tenant, adapter and client
    salt.

    The salt starts with t, a or c, and random salts start with r. The names of tenant and adapter
    are preceded by their lengths, so that different combinations have different salts.
    """
    parts: list[bytes] = []
    for kind, name in ((b"t", tenant), (b"a", adapter)):
        if name:
            data = name.encode()
            parts += [kind, len(data).to_bytes(4, "little"), data]
    # After an adapter no marker is needed, because only the client salt follows.
    if not adapter:
        parts.append(b"c")
    return b"".join((*parts, cache_salt.encode()))


def submission_for(
    generation: GenerationSpec,
    prompt: TokenizedPrompt,
    *,
    limits: Limits,
    times: CallTimes,
    request_id: str,
    keys: tuple[int, ...],
    seed: int,
    eos_ids: tuple[int, ...],
) -> Submission:
    """Return the submission of a request whose prompt is tokenised, with one spec per output.

    Raises the errors of `check_prompt_fits`.
    """
    max_tokens = check_prompt_fits(generation, len(prompt.ids), limits)
    stopping, urgency = generation.stopping, generation.urgency
    deadline_s, deadline_kind = _deadline(generation, times, limits)
    stop_ids = stopping.stop_token_ids + (() if stopping.ignore_eos else eos_ids)
    leader = RequestSpec(
        key=keys[0],
        request_id=engine_request_id(generation.tenant, request_id),
        prompt_ids=prompt.ids,
        max_tokens=max_tokens,
        min_tokens=_min_tokens(generation, stop_ids, max_tokens),
        sampling=replace(generation.sampling.params, seed=seed),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        block_hashes=prompt.block_hashes,
        hash_salt=prompt.hash_salt,
        priority=urgency.priority,
        arrival_s=times.arrival_s,
        ttft_deadline_s=_after(times.arrival_s, urgency.ttft_deadline_s),
        deadline_s=deadline_s,
        time_limit_s=_after(times.arrival_s, urgency.time_limit_s),
        adapter=generation.adapter,
        constraint=generation.constraint,
        retention=generation.retention,
        tenant=generation.tenant,
        session_id=generation.session_id,
        trace_id=generation.trace_id,
    )
    others = tuple(
        replace(
            leader,
            key=key,
            output_index=index,
            leader_key=keys[0],
            sampling=_follower_sampling(leader.sampling, output_seed(seed, index)),
            # Any output's first token satisfies the deadline, and the first token of the leader
            # comes first.
            ttft_deadline_s=NO_TIME,
        )
        for index, key in enumerate(keys[1:], start=1)
    )
    return Submission(
        specs=(leader, *others),
        seed=seed if Feature.SEED in limits.features else 0,
        deadline_kind=deadline_kind,
        block_size=limits.block_size,
        num_dropped_messages=prompt.num_dropped_messages,
    )


def _follower_sampling(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Return the sampling parameters of an output after the first: its seed, and no prompt
    logprobs."""
    return replace(sampling, seed=seed, num_prompt_logprobs=-1)


def _min_tokens(generation: GenerationSpec, stop_ids: tuple[int, ...], max_tokens: int) -> int:
    """Return the minimum number of tokens of an output: `max_tokens` if nothing else can end it.

    The engine predicts missed deadlines from this minimum, because it does not receive stop
    strings.
    """
    stopping = generation.stopping
    is_ended = stop_ids or stopping.stop_strings or generation.constraint is not None
    if is_ended or generation.urgency.time_limit_s is not None:
        return stopping.min_tokens
    return max_tokens


def _after(start_s: float, duration_s: float | None) -> float:
    return NO_TIME if duration_s is None else start_s + duration_s


def _deadline(generation: GenerationSpec, times: CallTimes, limits: Limits) -> tuple[float, str]:
    """Return the earliest deadline and its kind (see `Submission`).

    The deadline of the server is `max_deadline_s` after the arrival if the request or the call has
    a deadline, otherwise `default_deadline_s` after the arrival.
    """
    config = limits.config
    total_s = _after(times.arrival_s, generation.urgency.total_deadline_s)
    is_bounded = min(total_s, times.call_deadline_s) < NO_TIME
    server_s = times.arrival_s + (
        config.max_deadline_s if is_bounded else config.default_deadline_s
    )
    return min((total_s, "total"), (times.call_deadline_s, "grpc"), (server_s, "server"))
