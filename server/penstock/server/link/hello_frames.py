"""How an engine's greeting is written and read."""

from penstock.scheduler.executor import ExecutorInfo, Feature
from penstock.server.link.ports import EngineHello
from penstock.server.link.wire import Reader, Writer


def write_engine_hello(out: Writer, hello: EngineHello) -> None:
    """The body of a greeting."""
    info = hello.executor
    out.u64(hello.epoch)
    out.text(hello.model)
    out.u64(hello.max_num_waiting)
    out.u64(hello.max_num_waiting_tokens)
    out.u8(hello.tells_cache)
    out.text(info.name)
    for value in (info.vocab_size, info.block_size, info.num_blocks, info.max_seq_len):
        out.u64(value)
    out.u64(info.max_num_seqs)
    out.u64(info.pipeline_depth)
    out.u8(len(info.features))
    for feature in sorted(info.features, key=lambda feature: feature.value):
        out.text(feature.value)
    out.u64(info.max_prompt_tokens or 0)
    out.u8(info.is_self_paced)
    out.u32(len(info.adapters))
    for adapter in info.adapters:
        out.text(adapter)


def read_engine_hello(data: Reader) -> EngineHello:
    """The greeting again. Raises ValueError for a feature that there is not."""
    epoch, model = data.u64(), data.text()
    max_num_waiting, max_num_waiting_tokens = data.u64(), data.u64()
    tells_cache = data.u8() != 0
    info = ExecutorInfo(
        name=data.text(),
        vocab_size=data.u64(),
        block_size=data.u64(),
        num_blocks=data.u64(),
        max_seq_len=data.u64(),
        max_num_seqs=data.u64(),
        pipeline_depth=data.u64(),
        features=frozenset(Feature(data.text()) for _ in range(data.u8())),
        max_prompt_tokens=data.u64() or None,
        is_self_paced=data.u8() != 0,
        adapters=tuple(data.text() for _ in range(data.u32())),
    )
    return EngineHello(
        epoch=epoch,
        model=model,
        executor=info,
        max_num_waiting=max_num_waiting,
        max_num_waiting_tokens=max_num_waiting_tokens,
        tells_cache=tells_cache,
    )
