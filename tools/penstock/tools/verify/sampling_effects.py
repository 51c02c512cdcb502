"""Checks of options that change which tokens are chosen: top-k, top-p, min-p, penalties, adapters.

The output with each option is compared with that without it, or with the likeliest tokens, to
detect an engine that silently ignores the option.
"""

from collections.abc import Awaitable, Callable, Sequence

from penstock.client import Adapter, GenerationOptions, TokenRecord
from penstock.tools.verify.check import Check
from penstock.tools.verify.check_result import (
    CheckFailed,
    CheckSkipped,
    require,
)
from penstock.tools.verify.subject import PROMPT, Subject

_NUM_TOKENS = 32
# A temperature high enough that unlikely tokens are sampled even from a peaked distribution.
_HOT = 2.0
_NUM_HOT_RUNS = 3
_SEED = 17
_NUM_ADAPTERS = 4
# Log probabilities that differ by less tie: an executor may round before it truncates.
_TIE = 1e-4
_REPETITIVE = "ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha"
# Each option keeps only the most likely token and those that tie with it.
_CUTS: tuple[tuple[str, GenerationOptions], ...] = (
    ("top_k", {"top_k": 1}),
    ("top_p", {"top_p": 1e-6}),
    ("min_p", {"min_p": 1.0}),
)
_PENALTIES: tuple[tuple[str, GenerationOptions], ...] = (
    ("repetition_penalty", {"repetition_penalty": 1.9}),
    ("presence_penalty", {"presence_penalty": 2.0}),
    ("frequency_penalty", {"frequency_penalty": 2.0}),
)
# A model's generation config may contain penalties; the reference run has none.
_FREE: GenerationOptions = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _cut(name: str, cut: GenerationOptions) -> Callable[[Subject], Awaitable[str]]:
    """Return the function of a check for a truncation option. `cut` has the option with its
    strictest value, at which sampling must give only likeliest tokens, even at a high temperature.
    """

    async def run(subject: Subject) -> str:
        greedy = (await subject.greedy(_NUM_TOKENS)).ids()
        wide: GenerationOptions = {"temperature": _HOT, **_best_logprob(subject)}
        for _ in range(_NUM_HOT_RUNS):
            records = (await subject.greedy(_NUM_TOKENS, **wide)).records()
            if first_unlikely(records, greedy) is not None:
                break
        else:
            raise CheckSkipped(
                f"temperature {_HOT:g} does not change the output, so truncation cannot be observed"
            )
        narrow: GenerationOptions = {**wide, **cut}
        records = (await subject.greedy(_NUM_TOKENS, **narrow)).records()
        [value] = cut.values()
        require(len(records) == len(greedy), f"{len(records)} tokens instead of {len(greedy)}")
        at = first_unlikely(records, greedy)
        require(at is None, f"{name} {value} permitted another token at token {at}")
        return f"{name} {value} keeps only likeliest tokens at temperature {_HOT:g}"

    return run


def _best_logprob(subject: Subject) -> GenerationOptions:
    """Return options that request the likeliest token at each position; empty if the service does
    not offer it.
    """
    is_offered = subject.offers("logprobs") and (subject.model.limits.max_logprobs or 0) > 0
    return {"logprobs": 1} if is_offered else {}


def first_unlikely(records: Sequence[TokenRecord], greedy: Sequence[int]) -> int | None:
    """Return the index of the first token that is less likely than the likeliest one at its
    position, or None. A record without log probabilities is compared with the token in `greedy`.

    Tokens may tie, often in half precision. Truncation keeps all of them, and after a tied token
    that greedy decoding does not choose, the following tokens may differ too.
    """
    for at, (record, best_id) in enumerate(zip(records, greedy, strict=False)):
        if record.logprob is not None and record.top_logprobs:
            is_likeliest = record.top_logprobs[0].logprob - record.logprob < _TIE
        else:
            is_likeliest = record.id == best_id
        if not is_likeliest:
            return at
    return None


async def _penalties(subject: Subject) -> str:
    ways = _repetitive_prompts(subject)
    free = [await _drawn(subject, text, way) for text, way in ways]
    repeated = [len(ids) - len(set(ids)) for ids in free]
    if not any(repeated):
        raise CheckSkipped("the model does not repeat itself; nothing to penalise")
    unchanged = [
        name for name, penalty in _PENALTIES if not await _is_changed(subject, ways, free, penalty)
    ]
    if unchanged and all(num <= len(ids) // 2 for num, ids in zip(repeated, free, strict=True)):
        raise CheckSkipped(f"too little repetition to judge {' and '.join(unchanged)}")
    require(not unchanged, f"{' and '.join(unchanged)} changed nothing")
    return f"up to {max(repeated)} of {len(free[0])} tokens repeated, each penalty changes that"


def _repetitive_prompts(subject: Subject) -> list[tuple[str, GenerationOptions]]:
    """Return pairs of prompt and sampling options whose output probably repeats tokens, to test
    penalties.

    There are several pairs, because with a very peaked distribution a penalty changes nothing.
    """
    greedy: GenerationOptions = {"temperature": 0.0}
    drawn: GenerationOptions = {"temperature": 1.0, "seed": _SEED}
    ways = [greedy, drawn] if subject.offers("seed") else [greedy]
    return [(text, way) for text in (_REPETITIVE, PROMPT) for way in ways]


async def _drawn(
    subject: Subject, text: str, way: GenerationOptions, penalty: GenerationOptions | None = None
) -> list[int]:
    wanted: GenerationOptions = {**_FREE, **way, **(penalty or {})}
    return (await subject.greedy(_NUM_TOKENS, subject.prompt(text), **wanted)).ids()


async def _is_changed(
    subject: Subject,
    ways: list[tuple[str, GenerationOptions]],
    free: list[list[int]],
    penalty: GenerationOptions,
) -> bool:
    for (text, way), without in zip(ways, free, strict=True):
        if await _drawn(subject, text, way, penalty) != without:
            return True
    return False


async def _adapters(subject: Subject) -> str:
    names = subject.model.adapters
    if not names:
        raise CheckSkipped("the model has no adapters")
    bare = (await subject.greedy(_NUM_TOKENS)).ids()
    same: list[str] = []
    for name in names[:_NUM_ADAPTERS]:
        ids = (await subject.greedy(_NUM_TOKENS, adapter=Adapter(name=name))).ids()
        require(bool(ids), f"no tokens with adapter {name}")
        if ids == bare:
            same.append(name)
    used = min(len(names), _NUM_ADAPTERS)
    if same:
        raise CheckFailed(
            f"{', '.join(same)}: the same {len(bare)} greedy tokens as without an adapter; either"
            " the engine ignores it, or it changes too little to be seen in this text"
        )
    return f"{used} of {len(names)} adapters used, each changes the output"


CHECKS = (
    *(
        Check(
            name=name.replace("_", "-"),
            run=_cut(name, cut),
            feature="min_p" if name == "min_p" else "truncated_sampling",
        )
        for name, cut in _CUTS
    ),
    Check(name="penalties", run=_penalties, feature="penalties"),
    Check(name="adapters", run=_adapters, feature="adapters"),
)
