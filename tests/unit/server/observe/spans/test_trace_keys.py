from __future__ import annotations

from penstock.server.observe.request_record import Content, RequestOptions
from penstock.server.observe.spans import keys
from penstock.server.observe.spans.attributes import start_attributes
from penstock.server.observe.spans.keys import KEYS, SpanOfKey
from support.reports import preempted_record, rejected_record, request_record
from support.span_trees import tree_of

EVERYTHING = {"has_content": True, "has_next_rpc_keys": True}
ALL_OPTIONS = RequestOptions(
    is_chat=True, num_outputs=2, max_tokens=1, temperature=1.0, top_p=1.0, top_k=1,
    frequency_penalty=0.1, presence_penalty=0.1, seed=1, priority=1,
)  # fmt: skip

RECORDS = (
    request_record(
        options=ALL_OPTIONS, content=Content("prompt", ("output",)), num_stalls=1, stalled_s=0.1,
        num_replays=1, num_preemptions=1,
    ),
    preempted_record(),
    rejected_record(4, "DEADLINE_UNREACHABLE"),
)  # fmt: skip


def test_attribute_keys_are_unique() -> None:
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))


def test_every_attribute_is_in_the_table_and_on_its_span() -> None:
    places = {key.name: key.place for key in KEYS}
    for record in RECORDS:
        tree = tree_of(record, **EVERYTHING)
        for name in (*start_attributes(record), *tree.attributes):
            assert places[name] is SpanOfKey.ROOT
        for child in tree.children:
            for name in child.attributes:
                allowed = (
                    {SpanOfKey.RESIDENCY}
                    if child.name in ("prefill", "decode")
                    else set[SpanOfKey]()
                )
                assert places[name] in allowed | {SpanOfKey(child.name)}


def test_every_key_of_the_table_is_used() -> None:
    used = {keys.SAMPLING_REASON, keys.QUEUE_FAIRNESS}
    for record in RECORDS:
        tree = tree_of(record, **EVERYTHING)
        used |= {*start_attributes(record), *tree.attributes}
        used |= {name for child in tree.children for name in child.attributes}
    assert used == {key.name for key in KEYS}


def test_usage_is_only_on_the_root_span() -> None:
    for record in RECORDS:
        for child in tree_of(record, **EVERYTHING).children:
            assert not [name for name in child.attributes if name.startswith("gen_ai.")]
