"""Draws one frame of `penstock top` with the package `rich`. Imported only when needed."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.client import ModelState, RequestState, WaitReason
from penstock.server.cli.report import printable
from penstock.server.cli.top_state import SORT_KEYS, TopState

if TYPE_CHECKING:
    from penstock.client import LiveRequest, ModelStats, Percentiles, ServerStats


MAX_POOL_LINES = 4
MAX_TENANTS = 6
"""Maximum number of tenants that are displayed separately in the KV cache."""
_TENANT_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")
_USED, _CACHED, _FREE = "█", "▒", "·"
_STATE_STYLES = {
    ModelState.READY: "bold green",
    ModelState.LOADING: "bold yellow",
    ModelState.RECOVERING: "bold yellow",
    ModelState.DRAINING: "bold magenta",
}
_NUM_TABLE_EXTRAS = 2
"""Number of lines of the request table besides the requests."""
_COLUMNS = (
    ("REQUEST", False, 36),
    ("TENANT", False, 16),
    ("PHASE", False, 10),
    ("WAITS FOR", False, 16),
    ("AGE", True, 8),
    ("PROMPT", True, 20),
    ("OUT", True, 8),
    ("BLOCKS", True, 8),
    ("PREEMPTED", True, 9),
    ("UNREAD", True, 8),
    ("LEFT", True, 8),
)
"""Name, whether it is numeric, and maximum width. LEFT displays the time until the deadline."""
_WIDE = 110
_DEFAULT_WIDTH = 120
"""Width in characters for output that is not a terminal."""
_NUM_NARROW_COLUMNS = 8
_SPARKS = "▁▂▃▄▅▆▇█"


def frame_of(state: TopState, *, width: int | None, height: int | None = None) -> RenderableType:
    """Return one frame of `width` columns and `height` lines.

    If `height` is None, all requests are listed; if `width` is None, no column is truncated. Both
    are for output that is not a terminal.
    """
    if state.stats is None:
        problem = state.problem or "no response yet"
        place = "" if state.address in problem else f"{state.address}: "
        return Text(f"{place}{problem}", style="bold red")
    head: list[RenderableType] = []
    if state.problem:
        problem = f"no response since {_clock(state.stats.time_s)}, trying again: {state.problem}"
        head.append(Text(problem, style="bold red", no_wrap=True, overflow="ellipsis"))
    for model in state.stats.models:
        head += _model_lines(state, model, state.stats, width or _DEFAULT_WIDTH)
    requests = state.sorted_requests
    if height is None:
        num_rows = len(requests)
    else:
        num_head = sum(_num_lines(part) for part in head)
        num_rows = max(0, height - num_head - _NUM_TABLE_EXTRAS)
    caption = _requests_caption(state, num_rows, has_keys=height is not None)
    return Group(*head, caption, _requests_table(requests[:num_rows], width))


def _model_lines(
    state: TopState, model: "ModelStats", stats: "ServerStats", width: int
) -> list[RenderableType]:
    return [
        _title(state, model, stats),
        _load_line(model),
        _totals_line(model),
        _latency_table(state, model, width),
        *_pool_lines(state, model, width),
    ]


def _title(state: TopState, model: "ModelStats", stats: "ServerStats") -> Text:
    status = "DRAINING" if stats.is_draining else model.state.name
    num_backlog = sum(front.num_backlog_tokens for front in stats.fronts)
    return _line(
        (f"penstock {state.address} ", "bold"),
        (f"{printable(model.model)} ", "bold cyan"),
        (status, _STATE_STYLES.get(model.state, "bold red")),
        f"  up {span(stats.uptime_s)}  engine {model.engine_epoch}",
        f" ({model.num_engine_restarts} restarts)" if model.num_engine_restarts else "",
        f"  fronts {len(stats.fronts)}  backlog {count(num_backlog)} tokens",
        f"  {_clock(stats.time_s)}",
    )


def _load_line(model: "ModelStats") -> Text:
    waits = ""
    if model.wait_reason > WaitReason.UNSPECIFIED:
        waits = f" for {_words(model.wait_reason.name)}"
    if model.estimated_queue_s is not None:
        waits += f" (~{short_duration(model.estimated_queue_s)})"
    return _line(
        "running ",
        (f"{model.num_processing}/{model.max_num_seqs}", "bold"),
        "  waiting ",
        (f"{model.num_pending}", "bold yellow" if model.num_pending else "bold"),
        waits,
        "  tokens/s ",
        (count(model.decode_tokens_per_s), "bold"),
        " out, ",
        (count(model.prefill_tokens_per_s), "bold"),
        " in",
    )


def _totals_line(model: "ModelStats") -> Text:
    totals = model.totals
    parts = {
        "completed": totals.num_completed,
        "cancelled": totals.num_cancelled,
        "failed": totals.num_failed,
        "rejected": totals.num_rejected,
        "preempted": totals.num_preemptions,
    }
    text = "  ".join(f"{name} {count(value)}" for name, value in parts.items())
    hits = totals.num_cached_prompt_tokens / max(1, totals.num_prompt_tokens)
    return _line((f"{text}  prefix hits {hits:.0%}", "dim"))


def _latency_table(state: TopState, model: "ModelStats", width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("last minute", no_wrap=True)
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    max_width = max(0, min(60, width - 66))
    sparklines = {
        "TTFT": f"step     {short_duration(model.mean_step_s):>8}"
        f" {sparkline(state.step_s, max_width)}",
        "ITL": f"tokens/s {count(model.decode_tokens_per_s):>8}"
        f" {sparkline(state.tokens_per_s, max_width)}",
    }
    rows = {"TTFT": model.ttft, "ITL": model.itl, "queue": model.queue, "total": model.total}
    for name, values in rows.items():
        table.add_row(name, *_percentiles(values), Text(sparklines.get(name, ""), style="cyan"))
    return table


def _percentiles(values: "Percentiles") -> tuple[str, str, str]:
    return short_duration(values.p50_s), short_duration(values.p90_s), short_duration(values.p99_s)


def _pool_lines(state: TopState, model: "ModelStats", width: int) -> list[RenderableType]:
    """Return the KV cache as a grid: first the used blocks of each tenant, then the cached blocks,
    then the free blocks."""
    cache = model.cache
    caption = _line(
        f"KV cache  {count(cache.num_total_blocks)} blocks of {cache.block_size_tokens} tokens: ",
        (f"{count(cache.num_used_blocks)} used", "bold"),
        f", {count(cache.num_cached_blocks)} cached, {count(cache.num_free_blocks)} free",
    )
    if not cache.num_total_blocks:
        return [caption]
    blocks_by_tenant = _blocks_by_tenant(state.requests, model.model, cache.num_used_blocks)
    parts = [*blocks_by_tenant.values(), cache.num_cached_blocks, cache.num_free_blocks]
    cells = cells_of(parts, MAX_POOL_LINES * width)
    grid = Text()
    for index, num_cells in enumerate(cells[:-2]):
        grid.append(_USED * num_cells, style=_TENANT_STYLES[index % len(_TENANT_STYLES)])
    grid.append(_CACHED * cells[-2], style="bright_black")
    grid.append(_FREE * cells[-1], style="bright_black")
    lines = list(grid.divide(range(width, len(grid), width)))
    legend = Text("  ")
    for index, (name, num_blocks) in enumerate(blocks_by_tenant.items()):
        style = _TENANT_STYLES[index % len(_TENANT_STYLES)]
        legend.append(f"{_USED} {name} {count(num_blocks)}  ", style=style)
    legend.append(f"{_CACHED} cached  {_FREE} free", style="bright_black")
    legend.no_wrap = True
    return [caption, *lines, legend]


def _blocks_by_tenant(
    requests: "tuple[LiveRequest, ...]", model: str, num_used_blocks: int
) -> dict[str, int]:
    """Return the number of used blocks of each tenant, the largest first. The remaining used blocks
    are counted as "other".

    A block that several outputs share is counted for each of them, and the list of requests is
    newer than the totals. Therefore the numbers are scaled down if they exceed the total.
    """
    held: Counter[str] = Counter()
    for request in requests:
        if request.model == model and request.num_blocks:
            held[printable(request.tenant) or "requests"] += request.num_blocks
    blocks_by_tenant = dict(held.most_common(MAX_TENANTS - 1))
    total = sum(held.values())
    if total > num_used_blocks:
        blocks_by_tenant = {
            name: num * num_used_blocks // total for name, num in blocks_by_tenant.items()
        }
    num_other = num_used_blocks - sum(blocks_by_tenant.values())
    if num_other > 0:
        blocks_by_tenant["other"] = num_other
    return blocks_by_tenant


def _requests_caption(state: TopState, num_rows: int, *, has_keys: bool) -> Text:
    num_known = len(state.requests)
    num = f"{num_known} of {state.num_requests}" if state.num_requests > num_known else num_known
    num_hidden = num_known - num_rows
    more = f", {num_hidden} more" if num_hidden > 0 else ""
    keys = f"   q quit, s sort ({'/'.join(SORT_KEYS)})" if has_keys else ""
    return _line((f"{num} requests by {state.sort_key}{more}{keys}", "dim"))


def _requests_table(requests: "list[LiveRequest]", width: int | None) -> Table:
    columns = _COLUMNS if width is None or width >= _WIDE else _COLUMNS[:_NUM_NARROW_COLUMNS]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, is_number, max_width in columns:
        table.add_column(
            name,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=None if width is None else max_width,
        )
    for request in requests:
        is_running = request.state is RequestState.PROCESSING
        cells = _request_cells(request)[: len(columns)]
        table.add_row(*cells, style="" if is_running else "yellow")
    return table


def _request_cells(request: "LiveRequest") -> list[Text]:
    waits = _words(request.wait_reason.name) if request.wait_reason > 0 else ""
    if request.queue_position is not None:
        waits = f"#{request.queue_position} {waits}".rstrip()
    prompt = count(request.usage.num_prompt_tokens)
    if request.usage.num_cached_prompt_tokens:
        prompt += f" ({count(request.usage.num_cached_prompt_tokens)} hit)"
    cells = (
        printable(request.request_id),
        printable(request.tenant) or "-",
        _words(request.phase.name) if request.phase > 0 else _words(request.state.name),
        waits,
        span(request.timings.total_s),
        prompt,
        count(request.usage.num_completion_tokens),
        count(request.num_blocks),
        str(request.num_preemptions),
        count(request.num_backlog_tokens),
        "-" if request.time_to_deadline_s is None else span(max(0.0, request.time_to_deadline_s)),
    )
    # As Text, because rich would interpret brackets in an id as markup.
    return [Text(cell) for cell in cells]


def _num_lines(part: RenderableType) -> int:
    return part.row_count + 1 if isinstance(part, Table) else 1


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def short_duration(value_s: float | None) -> str:
    """Format a duration with its unit, to about three digits; "-" for None."""
    if value_s is None:
        return "-"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} µs"
    if value_s < 0.01:
        return f"{value_s * 1e3:.2f} ms"
    if value_s < 1:
        return f"{value_s * 1e3:.0f} ms"
    if value_s < 10:
        return f"{value_s:.2f} s"
    return span(value_s)


def span(value_s: float) -> str:
    """Format a duration in its two largest units, or in tenths of a second below a minute."""
    whole = int(value_s)
    if whole < 60:
        return f"{value_s:.1f} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def count(value: float) -> str:
    """Format a number with thousands separators, and with one decimal if it is below 10 and not
    whole."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last `width` values as bars, scaled from 0 to their maximum, one character each.
    Returns "" for fewer than two values."""
    shown = list(values)[-width:] if width > 0 and len(values) > 1 else []
    top = max(shown, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(shown)
    last = len(_SPARKS) - 1
    return "".join(_SPARKS[round(max(0.0, value) / top * last)] for value in shown)


def cells_of(parts: Sequence[int], num_cells: int) -> list[int]:
    """Return the number of cells for each of `parts`, in proportion to its value, out of
    `num_cells`.

    Each number is rounded by at most one cell. If the sum of `parts` is at most `num_cells`, the
    number of cells of each part is its value.
    """
    total = sum(parts)
    num_cells = min(num_cells, total)
    if not total:
        return [0] * len(parts)
    cells: list[int] = []
    num_before = seen = 0
    for part in parts:
        seen += part
        num_until = round(seen * num_cells / total)
        cells.append(num_until - num_before)
        num_before = num_until
    return cells
