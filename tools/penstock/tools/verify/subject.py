"""The verified service: a client for it, and its published description.

Owns the helpers with which checks generate. Contains no checks.
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
from penstock.tools.verify.transcript import Transcript
from penstock.tools.verify.verdict import CheckSkipped

if TYPE_CHECKING:
    import grpc.aio

    from penstock.client.call_settings import Pairs

PROMPT = "Once upon a time, in a valley between two rivers, there lived a miller who"
CALL_DEADLINE_S = 60.0
_PROMPT_ROOM_TOKENS = 64
_MAX_TEXT_PROMPT_TOKENS = 32


@dataclass(slots=True, kw_only=True)
class Subject:
    """A service under verification. `is_prefix_reuse_off`: prefix reuse is known to be disabled.

    `bare`: makes a channel and metadata for calls that the client does not have; None: plain text
    without metadata.
    """

    client: Client
    address: str
    concurrency: int
    is_prefix_reuse_off: bool = False
    bare: "Callable[[], tuple[grpc.aio.Channel, Pairs]] | None" = None
    found_model: Model | None = None
    figures: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def model(self) -> Model:
        """The response of GetModel; raises CheckSkipped without one."""
        if self.found_model is None:
            raise CheckSkipped("the model's limits are not known")
        return self.found_model

    def offers(self, feature: str) -> bool:
        """Return whether the model publishes the feature."""
        return self.model.supports(feature) is True

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.limits.vocab_size or 2

    def room(self, num_tokens: int) -> int:
        """Return `num_tokens`, or the number that fits after a short prompt if that is smaller."""
        limits = self.model.limits
        room = (limits.max_total_tokens or num_tokens + _PROMPT_ROOM_TOKENS) - _PROMPT_ROOM_TOKENS
        return max(1, min(num_tokens, limits.max_output_tokens or num_tokens, room))

    def prompt(self, text: str = PROMPT) -> PromptLike:
        """Return the text, or token ids in its place if the model has no tokenizer."""
        if self.model.supports("text_prompt") is False:
            return self.token_prompt(_MAX_TEXT_PROMPT_TOKENS, seed=text)
        return text

    def token_prompt(self, num_tokens: int, *, seed: str) -> list[int]:
        """Return tokens from the middle of the vocabulary, where few are special tokens."""
        draw = random.Random(seed)
        low, high = self.vocab_size // 4, max(self.vocab_size // 4 + 1, self.vocab_size * 3 // 4)
        return [draw.randrange(low, high) for _ in range(num_tokens)]

    def uncached(self) -> GenerationOptions:
        """Return options that keep a request from using cached prefixes of earlier ones.

        A prompt with a cached prefix uses other kernels, which may resolve a near tie differently.
        """
        return {"cache_salt": f"verify-{uuid.uuid4().hex}"} if self.offers("cache_salt") else {}

    async def greedy(
        self,
        num_tokens: int,
        prompt: PromptLike | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Transcript:
        """Generate the most likely `num_tokens` tokens, with their ids, past end-of-sequence."""
        wanted: GenerationOptions = {
            "temperature": 0.0,
            "max_tokens": self.room(num_tokens),
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
        """Generate to the end. Raises PenstockError as the client does."""
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
        """Yield the events, recorded in the transcript; leaving the block cancels the rest."""
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
