"""Whatever happens to requests, in whatever order: the engine over a strict simulated device.

Hypothesis plays clients, time and faults; after every step the invariants of the core hold, the
device finds every key and value where it looks for it, and what each request was told fits the
reference generation. A failing game prints its trace: `engine_player.replay(trace)` plays it again.
"""

from __future__ import annotations

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from penstock.executor.fault import Fault, FaultKind
from penstock.scheduler.config import AdmissionPolicy, SchedulingOrder
from penstock.scheduler.request import NO_TIME, FinishReason
from support.engine_player import MAX_NUM_SEQS, STEMS, VOCAB, EnginePlayer, replay


@st.composite
def fault_scripts(draw: st.DrawFn, *, depth: int) -> tuple[Fault, ...]:
    kinds = [FaultKind.REQUEST_FAILS]
    if depth == 1:
        kinds += [FaultKind.NO_TOKENS, FaultKind.EXTRA_TOKENS]
    return tuple(
        draw(
            st.lists(
                st.builds(
                    Fault,
                    kind=st.sampled_from(kinds),
                    at_step=st.integers(1, 30),
                    at_output=st.none() | st.integers(0, 4),
                    at_request=st.none() | st.integers(1, 6),
                    max_times=st.integers(1, 3),
                    num_extra=st.integers(1, 3),
                ),
                max_size=3,
            )
        )
    )


FAIR = st.fixed_dictionaries(
    {
        "aging_s": st.sampled_from([3.0, 20.0, NO_TIME]),
        "aging_stride": st.sampled_from([1, 3, 8]),
        "max_lookahead": st.sampled_from([0, 2, 16]),
        "max_num_overtakes": st.sampled_from([0, 2, 32]),
        "max_overtake_s": st.sampled_from([1.0, 1e6]),
        "max_prefill_share": st.sampled_from([0.5, 1.0]),
        "tenant_weights": st.sampled_from([{}, {"a": 3.0, "b": 0.5}]),
        "max_num_running_per_tenant": st.sampled_from([None, None, 1, 2]),
        "max_num_waiting_per_tenant": st.sampled_from([None, None, 4]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Clients, clock and faults against one engine."""

    live = Bundle("live")

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        depth = data.draw(st.sampled_from([1, 2]), label="depth")
        order = data.draw(st.sampled_from(SchedulingOrder), label="order")
        self.player = EnginePlayer(
            depth=depth,
            faults=data.draw(fault_scripts(depth=depth), label="faults"),
            block_size=data.draw(st.sampled_from([1, 2, 4]), label="block_size"),
            pool_tokens=data.draw(st.integers(16, 48), label="pool_tokens"),
            budget=data.draw(st.integers(MAX_NUM_SEQS, 24), label="budget"),
            policy=data.draw(st.sampled_from(AdmissionPolicy), label="policy").value,
            watermark=data.draw(st.sampled_from([0.0, 0.1, 0.3]), label="watermark"),
            order=order.value,
            fair=data.draw(FAIR, label="fair") if order is SchedulingOrder.FAIR else {},
        )

    @rule(
        target=live,
        stem=st.sampled_from(STEMS),
        stem_length=st.sampled_from([0, 5, 8, 10]),
        tail=st.lists(st.integers(5, VOCAB - 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        num_outputs=st.integers(1, 3),
        salt=st.sampled_from(["one", "one", "", "two"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        patience_s=st.tuples(*[st.sampled_from([*[NO_TIME] * 6, 0.0, 3.0, 10.0])] * 3),
        num_replayed=st.integers(0, 3),
        has_stops=st.booleans(),
        is_key_reused=st.booleans(),
    )
    def submit(
        self,
        stem: tuple[int, ...],
        stem_length: int,
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        num_outputs: int,
        salt: str,
        priority: int,
        tenant: str,
        patience_s: tuple[float, float, float],
        num_replayed: int,
        has_stops: bool,
        is_key_reused: bool,
    ) -> object:
        keys = self.player.submit(
            prompt_ids=[*stem[:stem_length], *tail],
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            num_outputs=num_outputs,
            salt=salt,
            priority=priority,
            tenant=tenant,
            patience_s=list(patience_s),
            num_replayed=num_replayed,
            has_stops=has_stops,
            is_key_reused=is_key_reused,
        )
        return multiple(*keys)

    @precondition(lambda self: self.player.engine.has_work)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        self.player.step(count=count)

    @rule(key=consumes(live), reason=st.sampled_from([*FinishReason, None]))
    def cancel(self, key: int, reason: FinishReason | None) -> None:
        self.player.cancel(key=key, reason=None if reason is None else int(reason))

    @rule(key=live)
    def submit_a_live_id_again(self, key: int) -> None:
        self.player.submit_again(key=key)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.player.pass_time(seconds=seconds)

    @invariant()
    def account_adds_up(self) -> None:
        self.player.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "player"):
            return
        note(f"replay({self.player.dumped()!r})")
        self.player.finish()
        # The same calls, the same batches.
        assert replay(self.player.dumped()).executor.log == self.player.executor.log


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=40)
