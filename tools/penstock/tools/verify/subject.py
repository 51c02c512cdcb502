"""The service under test: a client, the model's published description, and helper methods for
checks.
"""

import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from penstock.client import (
    Client,
    Event,
    GenerationOptions,
    Model,
    PromptLike,
)
from penstock.tools.verify.check_result import CheckSkipped
from penstock.tools.verify.transcript import Transcript

if TYPE_CHECKING:
    import grpc.aio

    from penstock.client.call_settings import Pairs

PROMPT = "Once upon a time, in a valley between two rivers, there lived a miller who"
CALL_DEADLINE_S = 60.0
_RESERVED_PROMPT_TOKENS = 64
_MAX_TEXT_PROMPT_TOKENS = 32


@dataclass(slots=True, kw_only=True)
class Subject:
    """A service under verification. `concurrency`: number of streams in the checks under load.
    These checks write their results to `figures`. `is_prefix_reuse_off`: prefix caching is disabled
    by the service's options.

    `open_channel`: opens a channel and returns it with the metadata to send, for methods that the
    client does not support; None: a plain-text channel without metadata is to be used.
    `found_model`: the response of GetModel, None until a check has called it.
    """

    client: Client
    address: str
    concurrency: int
    is_prefix_reuse_off: bool = False
    open_channel: "Callable[[], tuple[grpc.aio.Channel, Pairs]] | None" = None
    found_model: Model | None = None
    figures: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def model(self) -> Model:
        """The service's description of its model. Raises CheckSkipped if it is not known."""
        if self.found_model is None:
            raise CheckSkipped("the model's limits are not known")
        return self.found_model

    def offers(self, feature: str) -> bool:
        """Return whether the model offers the feature, by its description."""
        return self.model.supports(feature) is True

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; all token ids are lower. 2 if the size is not published."""
        return self.model.limits.vocab_size or 2

    def clamp_output_tokens(self, num_tokens: int) -> int:
        """Return `num_tokens`, but at least 1 and at most the output length that fits after a
        prompt of 64 tokens.
        """
        limits = self.model.limits
        max_fitting = (
            limits.max_total_tokens or num_tokens + _RESERVED_PROMPT_TOKENS
        ) - _RESERVED_PROMPT_TOKENS
        return max(1, min(num_tokens, limits.max_output_tokens or num_tokens, max_fitting))

    def prompt(self, text: str = PROMPT) -> PromptLike:
        """Return the text as prompt or, if the model accepts no text, random token ids that depend
        on it.
        """
        if self.model.supports("text_prompt") is False:
            return self.token_prompt(_MAX_TEXT_PROMPT_TOKENS, seed=text)
        return text

    def token_prompt(self, num_tokens: int, *, seed: str) -> list[int]:
        """Return random token ids from the middle of the vocabulary, where few are special tokens;
        the same for the same `seed`.
        """
        rng = random.Random(seed)
        low, high = self.vocab_size // 4, max(self.vocab_size // 4 + 1, self.vocab_size * 3 // 4)
        return [rng.randrange(low, high) for _ in range(num_tokens)]

    def uncached(self) -> GenerationOptions:
        """Return options that prevent a request from using cached prefixes of earlier requests;
        empty if the model does not offer cache salts.

        A prompt with a cached prefix is computed by other kernels, and rounding may change the
        choice between two almost equally likely tokens.
        """
        return {"cache_salt": f"verify-{uuid.uuid4().hex}"} if self.offers("cache_salt") else {}

    async def greedy(
        self,
        num_tokens: int,
        prompt: PromptLike | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Transcript:
        """Generate `num_tokens` tokens (fewer if they do not fit) with greedy decoding, ignoring
        the end-of-sequence token and without cached prefixes; return the transcript with token ids.
        `options` override these settings.
        """
        wanted: GenerationOptions = {
            "temperature": 0.0,
            "max_tokens": self.clamp_output_tokens(num_tokens),
            "ignore_eos": True,
            "return_token_ids": True,
            **self.uncached(),
            **options,
        }
        return await self.generate(prompt, **wanted)

    async def generate(
        self,
        prompt: PromptLike | None = None,
        *,
        on_event: Callable[[Event, Transcript], None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Transcript:
        """Send a request, read its stream to the end, and return the transcript. `prompt` None: a
        default one. `on_event` is called with every event and the transcript so far.

        Raises PenstockError as the client does.
        """
        transcript = Transcript()
        async with self.streaming(prompt, transcript, **options) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event, transcript)
        return transcript

    @contextlib.asynccontextmanager
    async def streaming(
        self,
        prompt: PromptLike | None,
        transcript: Transcript,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[AsyncGenerator[Event, None], None]:
        """Provide the events of a request, and add them to `transcript`. Leaving the block cancels
        the request.
        """
        events = self.client.generate(
            self.prompt() if prompt is None else prompt, deadline_s=CALL_DEADLINE_S, **options
        )
        started_s = time.monotonic()

        async def noted() -> AsyncGenerator[Event, None]:
            async for event in events:
                transcript.add(event, time.monotonic() - started_s)
                yield event

        async with contextlib.aclosing(events), contextlib.aclosing(noted()) as noting:
            yield noting
