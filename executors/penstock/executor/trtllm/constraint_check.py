"""Whether the engine can hold an output to a constraint, found out before the engine gets it.

Owns the check: xgrammar, which comes with TensorRT-LLM, builds the grammar; what it refuses and
what has a dead end is refused here. Inside the engine the first fails in words of its own, and the
second ends every request there (see `dead_ends`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final
from weakref import WeakValueDictionary

from penstock.executor.trtllm.choice_regex import choice_regex
from penstock.executor.trtllm.dead_ends import has_dead_end
from penstock.executor.trtllm.loop_thread import in_worker
from penstock.scheduler.request_options import Constraint, ConstraintKind

log = logging.getLogger(__name__)

NOT_COMPILED: Final = "constraint: cannot be compiled"
NO_OUTPUT: Final = "constraint: reaches a point from which no output can be completed"
TOO_SLOW: Final = "constraint: takes too long to compile"

_BUILDERS: Final[Mapping[ConstraintKind, str]] = {
    ConstraintKind.JSON_SCHEMA: "from_json_schema",
    ConstraintKind.REGEX: "from_regex",
    ConstraintKind.GRAMMAR: "from_ebnf",
    ConstraintKind.CHOICE: "from_regex",
}
_NUM_THREADS: Final = 2
_TIMEOUT_S: Final = 10.0


def guide_text(constraint: Constraint) -> str:
    """What the engine is given: the text, or a regular expression of the choices."""
    is_choice = constraint.kind is ConstraintKind.CHOICE
    return choice_regex(constraint.texts) if is_choice else constraint.texts[0]


def installed_grammar() -> Any:
    """`xgrammar.Grammar`; None, and a warning, where it is missing."""
    try:
        return import_module("xgrammar").Grammar
    except (ImportError, AttributeError) as error:
        log.warning("constraints are not checked before they reach the engine: %s", error)
        return None


def fault_of(grammar_class: Any, constraint: Constraint) -> str:
    """Why the engine must not get this constraint; empty when it may. Blocks."""
    build: Callable[[str], object] = getattr(grammar_class, _BUILDERS[constraint.kind])
    try:
        text = str(build(guide_text(constraint)))
    except Exception as error:
        # Its message quotes the client, and its classes differ between versions.
        log.debug("xgrammar refused a constraint", extra={"foreign_text": str(error)[:500]})
        return NOT_COMPILED
    return NO_OUTPUT if has_dead_end(text) else ""


class ConstraintCheck:
    """Checks on threads: a few at a time, one of each tenant, each for a bounded time.

    Belongs to one event loop.
    """

    def __init__(self, grammar_class: Any) -> None:
        self._grammar_class = grammar_class
        self._permits = asyncio.Semaphore(_NUM_THREADS)
        self._permit_of: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fault(self, constraint: Constraint, tenant: str) -> str:
        """As `fault_of`. A check that takes too long keeps its thread until it ends.

        With one check of each tenant at a time, a tenant waits for one check of every other tenant
        at most. Cancelling gives the place up.
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
            in_worker(lambda: fault_of(self._grammar_class, constraint), "trtllm constraint")
        )
        checking.add_done_callback(release)
        done, _ = await asyncio.wait([checking], timeout=_TIMEOUT_S)
        return checking.result() if done else TOO_SLOW
