"""Checks whether the engine can enforce a constraint, before the request is submitted.

xgrammar, which is part of TensorRT-LLM, compiles the constraint to a grammar. A constraint is
rejected here if xgrammar rejects it, or if it has a dead end (a point from which no output can be
completed): in the engine, a dead end would end every request (see `dead_ends`).
`constraint_process` runs the checks in separate processes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Final
from weakref import WeakValueDictionary

from penstock.executor.trtllm.dead_ends import has_dead_end
from penstock.executor.trtllm.loop_thread import in_worker
from penstock.scheduler.request import Constraint, ConstraintKind

# xgrammar reads an ECMAScript dialect and llguidance Rust's. All other characters are literals in
# both, and neither accepts a backslash before every character. No groups: older versions of
# xgrammar reject non-capturing groups.
_ESCAPES: Final = str.maketrans({char: f"\\{char}" for char in "\\^$.|?*+()[]{}"})

logger = logging.getLogger(__name__)

NOT_COMPILED: Final = "constraint: cannot be compiled"
NO_OUTPUT: Final = "constraint: reaches a point from which no output can be completed"
TOO_LARGE: Final = "constraint: takes too much time or memory to compile"
NOT_CHECKED: Final = "constraint: cannot be checked"

_BUILDERS: Final[Mapping[ConstraintKind, str]] = {
    ConstraintKind.JSON_SCHEMA: "from_json_schema",
    ConstraintKind.REGEX: "from_regex",
    ConstraintKind.GRAMMAR: "from_ebnf",
    ConstraintKind.CHOICE: "from_regex",
}
_NUM_AT_ONCE: Final = 2


def guide_text(constraint: Constraint) -> str:
    """Return the text of a constraint for the engine; for a choice, a regular expression that
    matches the given texts.
    """
    is_choice = constraint.kind is ConstraintKind.CHOICE
    return choice_regex(constraint.texts) if is_choice else constraint.texts[0]


def installed_grammar() -> Any:
    """Return `xgrammar.Grammar`; log a warning and return None if it cannot be loaded."""
    try:
        return import_module("xgrammar").Grammar
    except (ImportError, AttributeError) as error:
        logger.warning("xgrammar cannot be loaded: %s", error)
        return None


def fault_of(grammar_class: Any, constraint: Constraint) -> str:
    """Return why a constraint is rejected, "" if it is accepted. `grammar_class`:
    `xgrammar.Grammar`. Blocks.
    """
    build: Callable[[str], object] = getattr(grammar_class, _BUILDERS[constraint.kind])
    try:
        text = str(build(guide_text(constraint)))
    except Exception:
        # The message quotes the client's text, and the exception classes differ between versions.
        return NOT_COMPILED
    return NO_OUTPUT if has_dead_end(text) else ""


class ConstraintCheck:
    """Runs at most two checks concurrently, and at most one per tenant.

    `check` returns why a constraint is rejected, or ""; it is called on a worker thread and may
    block. Use an instance on one event loop only.
    """

    def __init__(self, check: Callable[[Constraint], str]) -> None:
        self._check = check
        self._permits = asyncio.Semaphore(_NUM_AT_ONCE)
        self._permit_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fault(self, constraint: Constraint, tenant: str) -> str:
        """Return why the constraint is rejected, "" if it is accepted; see `fault_of`.

        With one check per tenant at a time, a tenant waits for at most one check of every other
        tenant. If the call is cancelled, a check that has started continues, and the tenant's next
        check waits for its end.
        """
        own = self._permit_of.setdefault(tenant, asyncio.Lock())
        await own.acquire()
        try:
            await self._permits.acquire()
        except asyncio.CancelledError:
            own.release()
            raise

        def release(_: object) -> None:
            self._permits.release()
            own.release()

        checking = asyncio.ensure_future(
            in_worker(lambda: self._check(constraint), "trtllm constraint")
        )
        checking.add_done_callback(release)
        # When the caller is cancelled, the check continues and keeps its permit until it is done.
        await asyncio.wait([checking])
        return checking.result()


def choice_regex(texts: Iterable[str]) -> str:
    """Return a regular expression that matches, as a whole, exactly the given texts."""
    return "|".join(text.translate(_ESCAPES) for text in texts)
