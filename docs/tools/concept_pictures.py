"""Draws the pictures of the concept pages, in docs/pictures.

Usage: `python docs/tools/concept_pictures.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from svg_canvas import BLUE, GREEN, GREY, ORANGE, RED, Canvas

FOLDER = Path(__file__).resolve().parents[1] / "pictures"

# (from, to, events). A test compares them with the scheduler's table.
TRANSITIONS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("PENDING", "PROCESSING"): ("ADMIT",),
    ("PROCESSING", "PENDING"): ("PREEMPT",),
    ("PENDING", "COMPLETED"): ("CANCEL",),
    ("PENDING", "ERROR"): ("FAIL",),
    ("PROCESSING", "COMPLETED"): ("FINISH", "CANCEL"),
    ("PROCESSING", "ERROR"): ("FAIL",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A request of the picture of in-flight batching, and the tokens that it computes in each step.
    `first_step` is counted from 0.
    """

    slot: int
    name: str
    first_step: int
    prefills: Sequence[int]  # number of prompt tokens in each step
    num_decodes: int  # number of decode steps after that


STEP_BUDGET_TOKENS = 16
NUM_SLOTS, NUM_STEPS = 3, 9
# Three slots, a budget of 16 tokens per step. D waits for a slot and gets that of C when C ends.
REQUESTS = (
    ScheduledRequest(slot=0, name="A", first_step=0, prefills=(6,), num_decodes=8),
    ScheduledRequest(slot=1, name="B", first_step=0, prefills=(10, 8, 14, 14), num_decodes=5),
    ScheduledRequest(slot=2, name="C", first_step=1, prefills=(7,), num_decodes=3),
    ScheduledRequest(slot=2, name="D", first_step=5, prefills=(14, 6), num_decodes=2),
)


def tokens_of_step(step: int) -> int:
    """Return the number of tokens that all requests of the picture compute in step number `step`,
    from 0.
    """
    total = 0
    for request in REQUESTS:
        age = step - request.first_step
        if 0 <= age < len(request.prefills):
            total += request.prefills[age]
        elif len(request.prefills) <= age < len(request.prefills) + request.num_decodes:
            total += 1
    return total


def life() -> Canvas:
    """Draw the path of a request through the processes: one row for each arrow. The numbers of the
    rows refer to the list next to the picture in docs/architecture.md.
    """
    lanes = ("client", "front", "engine\nprocess", "scheduler", "executor", "observer")
    steps = (
        (0, 1, "1", "Generate(request), deadline in metadata", False),
        (1, 1, "2", "parse, validate, tokenise, hash blocks", False),
        (1, 2, "3", "one frame over a Unix socket", False),
        (2, 3, "", "step: drain the inbox", False),
        (3, 3, "4", "schedule(now): admit, page, choose", False),
        (3, 4, "", "launch(batch), collect()", False),
        (4, 3, "", "update(result): advance, finish, free", False),
        (2, 1, "5", "one frame per front and step", False),
        (1, 0, "", "text, stop strings, coalesce, write", False),
        (1, 5, "6", "the ended request, as one record: its trace", True),
        (2, 5, "", "each step, in shared memory: metrics, flight recorder", True),
    )
    width, gap, top, pitch = 960, 98, 12, 36
    bottom = top + 40 + pitch * len(steps) + 16
    canvas = Canvas("The life of a request", width, bottom + 8)
    centres = [418 + gap * number for number in range(len(lanes))]
    for centre, lane in zip(centres, lanes, strict=True):
        canvas.line((centre, top + 40), (centre, bottom), faint=True)
        canvas.box(centre - 44, top, 88, 40, lane, GREY if lane == "observer" else BLUE)
    for row, (source, target, number, words, dashed) in enumerate(steps):
        y = top + 40 + pitch * (row + 0.7)
        start, end = centres[source], centres[target]
        canvas.text(12, y + 4, number)
        canvas.text(30, y + 4, words)
        if source == target:
            canvas.arrow(
                (start, y - 7), (start + 26, y - 7), (start + 26, y + 7), (start + 2, y + 7)
            )
        else:
            canvas.arrow((start, y), (end, y), dashed=dashed)
    return canvas


def states() -> Canvas:
    """Draw the states of a request and their transitions."""
    canvas = Canvas("The states of a request", 720, 300)
    canvas.box(60, 60, 150, 50, "PENDING", GREY)
    canvas.box(450, 60, 150, 50, "PROCESSING", ORANGE)
    canvas.box(60, 220, 150, 50, "ERROR", RED)
    canvas.box(450, 220, 150, 50, "COMPLETED", GREEN)
    canvas.arrow((20, 85), (58, 85))
    ways: Mapping[tuple[str, str], tuple[tuple[float, float], ...]] = {
        ("PENDING", "PROCESSING"): ((210, 74), (448, 74)),
        ("PROCESSING", "PENDING"): ((450, 98), (212, 98)),
        ("PENDING", "COMPLETED"): ((180, 110), (470, 218)),
        ("PENDING", "ERROR"): ((90, 110), (90, 218)),
        ("PROCESSING", "COMPLETED"): ((560, 110), (560, 218)),
        ("PROCESSING", "ERROR"): ((480, 110), (190, 218)),
    }
    places: Mapping[tuple[str, str], tuple[float, float]] = {
        ("PENDING", "PROCESSING"): (305, 66),
        ("PROCESSING", "PENDING"): (296, 116),
        ("PENDING", "COMPLETED"): (356, 166),
        ("PENDING", "ERROR"): (98, 168),
        ("PROCESSING", "COMPLETED"): (568, 168),
        ("PROCESSING", "ERROR"): (212, 186),
    }
    for edge, events in TRANSITIONS.items():
        canvas.arrow(*ways[edge])
        canvas.text(*places[edge], " or ".join(events))
    canvas.text(60, 48, "waits; owns no blocks")
    canvas.text(450, 48, "in the batch; owns a slot and blocks")
    return canvas


def step() -> Canvas:
    """Draw in-flight batching: the work of each slot, step by step."""
    left, top, wide, high = 90, 56, 76, 44
    canvas = Canvas("In-flight batching", left + wide * NUM_STEPS + 20, top + high * 3 + 150)
    for number in range(NUM_STEPS):
        canvas.text(left + wide * (number + 0.5), top - 12, f"step {number + 1}", anchor="middle")
    for slot in range(NUM_SLOTS):
        canvas.text(left - 12, top + high * (slot + 0.5) + 4, f"slot {slot}", anchor="end")
    for request in REQUESTS:
        work = [*((f"{request.name}: {size}", BLUE) for size in request.prefills)]
        work += [(f"{request.name}: 1", ORANGE)] * request.num_decodes
        for age, (words, fill) in enumerate(work):
            x = left + wide * (request.first_step + age)
            canvas.box(x + 2, top + high * request.slot + 2, wide - 4, high - 4, words, fill)
    floor = top + high * 3 + 104
    for number in range(NUM_STEPS):
        size = tokens_of_step(number)
        canvas.box(
            left + wide * number + 16, floor - size * 4, wide - 32, size * 4, str(size), GREEN
        )
    line = floor - STEP_BUDGET_TOKENS * 4
    canvas.line((left, line), (left + wide * NUM_STEPS, line), dashed=True)
    canvas.text(left - 12, line + 4, "budget 16", anchor="end")
    canvas.text(left - 12, floor, "tokens", anchor="end")
    canvas.text(
        left,
        floor + 28,
        "B's long prompt is split into chunks that fit the budget; A and C keep decoding.",
    )
    canvas.text(
        left,
        20,
        "Blue: tokens of a prompt. Orange: a token of the output. D waits for a slot until C ends.",
    )
    return canvas


def cache() -> Canvas:
    """Draw the block tables of two requests with a shared prefix, and the block pool."""
    canvas = Canvas("The paged KV cache", 900, 330)
    canvas.text(20, 28, "Block tables: what each running request owns, in order", bold=True)
    tables = (("request 1", (3, 7, 1, 9)), ("request 2", (3, 7, 4)))
    pool = {
        1: ("used 1", ORANGE),
        3: ("used 2", RED),
        4: ("used 1", ORANGE),
        7: ("used 2", RED),
        9: ("used 1", ORANGE),
        2: ("cached", BLUE),
        6: ("cached", BLUE),
        10: ("cached", BLUE),
    }
    for row, (name, table) in enumerate(tables):
        y = 46 + 48 * row
        canvas.text(20, y + 22, name)
        for column, block in enumerate(table):
            canvas.box(110 + 64 * column, y, 60, 34, f"{block}", pool[block][1])
    canvas.text(390, 68, "3 and 7 hold the 32 tokens that both prompts begin with:")
    canvas.text(390, 86, "computed once, counted twice, and read-only.")
    canvas.text(390, 116, "The last block of each table is its own: the next token goes there.")
    canvas.text(20, 178, "The pool: blocks of 16 tokens, all allocated at the start", bold=True)
    for block in range(12):
        words, fill = pool.get(block, ("free", GREY))
        canvas.box(20 + 71 * block, 196, 66, 44, f"{block}\n{words}", fill)
    canvas.text(
        20, 268, "used n: in the tables of n requests.  cached: of ended requests, found by hash."
    )
    canvas.text(20, 288, "free: holds nothing.  used + cached + free = all, after every step.")
    canvas.text(
        20,
        312,
        "hash(block) = hash(hash of the block before, its tokens); "
        "the first begins with tenant and salt",
    )
    return canvas


def replay() -> Canvas:
    """Draw an engine that dies in the middle of an output; the next engine continues the output."""
    canvas = Canvas("Replay: the engine dies", 900, 300)
    for row, name in enumerate(("client", "front", "engine 1", "engine 2")):
        y = 60 + 60 * row
        canvas.text(20, y + 4, name)
        canvas.line((100, y), (880, y), faint=True)
    canvas.box(110, 168, 230, 24, "prompt, tokens 1 to 5", ORANGE)
    canvas.box(342, 168, 90, 24, "dies", RED)
    canvas.box(470, 228, 120, 24, "starts", GREY)
    canvas.box(630, 228, 240, 24, "prompt + 1 to 5, then 6, 7, 8", GREEN)
    for number in range(5):
        x = 150 + 42 * number
        canvas.arrow((x, 168), (x, 122))
        canvas.arrow((x, 118), (x, 66))
        canvas.text(x, 52, str(number + 1), anchor="middle")
    canvas.arrow((400, 168), (400, 124), dashed=True)
    canvas.text(408, 152, "the connection ends")
    canvas.arrow((612, 122), (640, 226))
    canvas.text(452, 110, "submits again: prompt, seed, tokens 1 to 5")
    for number in range(3):
        x = 760 + 42 * number
        canvas.arrow((x, 228), (x, 122))
        canvas.arrow((x, 118), (x, 66))
        canvas.text(x, 52, str(number + 6), anchor="middle")
    canvas.text(480, 52, "a pause, no error", anchor="middle")
    canvas.text(
        20,
        286,
        "Token 6 is the one engine 1 would have drawn: "
        "its random number follows from seed and position.",
    )
    return canvas


def resume() -> Canvas:
    """Draw a front that dies, and a client that resumes its stream on another front."""
    canvas = Canvas("Resume: the connection or the front is lost", 900, 300)
    for row, name in enumerate(("client", "front 1", "front 2", "engine")):
        y = 60 + 60 * row
        canvas.text(20, y + 4, name)
        canvas.line((100, y), (880, y), faint=True)
    canvas.box(110, 108, 230, 24, "messages 0 to 5", ORANGE)
    canvas.box(342, 108, 90, 24, "lost", RED)
    canvas.box(110, 228, 760, 24, "the request keeps running for resume_timeout", GREEN)
    for number in range(3):
        x = 150 + 50 * number
        canvas.arrow((x, 228), (x, 134))
        canvas.arrow((x, 108), (x, 64))
    canvas.arrow((520, 60), (560, 166))
    canvas.text(518, 82, "Resume(request_id, next_sequence 6,", anchor="end")
    canvas.text(518, 100, "received_token_counts)", anchor="end")
    canvas.arrow((560, 180), (600, 226))
    canvas.text(440, 210, "gets the stream")
    canvas.box(640, 168, 230, 24, "messages 6, 7, 8 ...", ORANGE)
    for number in range(3):
        x = 690 + 70 * number
        canvas.arrow((x, 228), (x, 194))
        canvas.arrow((x, 168), (x, 64))
    canvas.text(20, 286, "No token is repeated or missing: the client counts its tokens.")
    return canvas


PICTURES: Mapping[str, Callable[[], Canvas]] = {
    "life": life,
    "states": states,
    "step": step,
    "cache": cache,
    "replay": replay,
    "resume": resume,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
