"""Draws the pictures of docs/gpu.md from the results of benchmarks/gpu.py.

Also maintains docs/pictures/gpu.json: rounded figures and timelines of the last runs. The figures
of vLLM are constants of this module, from an earlier run.

    python docs/tools/gpu_pictures.py [RESULTS.json ...]     add new results, then draw
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picture_svg import BLUE, GREEN, GREY, INK, LINE, ORANGE, QUIET, VIOLET, Drawing, ticks

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
SOURCE = FOLDER / "gpu.json"
COPY_TB_S, PRODUCT_TFLOP_S = 4.26, 788.0
"""Measured on an H200: copy bandwidth (reads plus writes), and speed of an 8192 x 8192 x 8192
bfloat16 product.
"""
CONTEXT = 640
WIDTH, LEFT, TOP = 760, 64, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model, from which the work of a step is computed."""

    num_weights: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def work(self, num_rows: int) -> tuple[float, float]:
        """Return the number of floating-point operations, and of bytes read, of a bfloat16 decode
        step with `num_rows` rows of CONTEXT tokens each.
        """
        of_attention = 4 * self.num_heads * self.head_dim * self.num_layers * CONTEXT
        of_keys = 2 * self.num_kv_heads * self.head_dim * self.num_layers * CONTEXT
        num_flops = num_rows * (2 * self.num_weights + of_attention)
        return num_flops, 2 * (self.num_weights + num_rows * of_keys)


SHAPES = {
    "1B": Shape(num_weights=1.236e9, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64),
    "8B": Shape(num_weights=7.505e9, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
}
COLOURS = {"1B": BLUE, "8B": ORANGE}
VLLM = "vLLM 0.20.2, 2026-11-20"
VLLM_STEP_MS = {"1B": {1: 3.05, 32: 2.28, 256: 5.81}, "8B": {1: 6.05, 32: 5.90, 128: 9.05}}
VLLM_SERVED = {
    "1B": {32: (12_752, 1.99), 256: (22_360, 8.25)},
    "8B": {32: (4_309, 5.86), 128: (8_640, 8.87), 256: (9_869, 14.2)},
}
"""Tokens/s and ITL p50 in ms, by number of streams."""
# The first part found in a kernel's name determines its kind.
KINDS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("attention", GREEN, ("attention", "rotate")),
    ("matrix products", BLUE, ("gemm", "nvjet", "cutlass", "projection", "splitk", "cublas")),
    ("norms, activation, embedding", ORANGE, ("norm", "silu", "embed")),
    ("sampling", VIOLET, ("score", "choose", "plain", "sampl", "bound", "list", "penal")),
    ("copies and the rest", GREY, ("",)),
)


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind of the kernel `name`, and the colour of that kind in the pictures."""
    lower = name.lower()
    return next(
        (kind, colour) for kind, colour, parts in KINDS if any(part in lower for part in parts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Maps values to positions in a picture; `is_log`: both axes are logarithmic."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float
    width: float
    height: float
    is_log: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel position of a point."""
        across, up = self._share(x, self.x), self._share(y, self.y)
        return self.left + across * self.width, TOP + (1 - up) * self.height

    def _share(self, value: float, ends: tuple[float, float]) -> float:
        low, high = ends
        if self.is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def roofline(source: dict[str, Any]) -> str:
    """Return a roofline plot of the decode steps as SVG; the roof is the measured speed of a copy
    and of a matrix product. `source`: the content of gpu.json.
    """
    drawing = Drawing(WIDTH)
    axes = Axes(x=(0.7, 400), y=(0.5, 1200), left=LEFT, width=660, height=340, is_log=True)
    drawing.text(LEFT, 24, "Decode steps under the roofline of an H200", size=15, is_bold=True)
    for power in (1, 10, 100, 1000):
        _, y = axes.at(1, power)
        drawing.line(LEFT, y, LEFT + axes.width, y)
        drawing.text(LEFT - 6, y + 4, f"{power:,}", anchor="end", fill=QUIET)
    for value in (1, 3, 10, 30, 100, 300):
        x, _ = axes.at(value, 1)
        drawing.text(x, TOP + axes.height + 18, f"{value}", anchor="middle", fill=QUIET)
    ridge = PRODUCT_TFLOP_S / COPY_TB_S
    roof = [(0.7, 0.7 * COPY_TB_S), (ridge, PRODUCT_TFLOP_S), (400, PRODUCT_TFLOP_S)]
    points = " L".join("{:.1f},{:.1f}".format(*axes.at(*point)) for point in roof)
    drawing.path(f"M{points}", stroke=INK)
    drawing.text(*_moved(axes.at(9, 62), 0, 0), f"copy {COPY_TB_S} TB/s", anchor="end")
    drawing.text(*_moved(axes.at(400, PRODUCT_TFLOP_S), 0, 18), "product 788 TFLOP/s", anchor="end")
    for shape, work in SHAPES.items():
        for num_rows, vllm_ms in VLLM_STEP_MS[shape].items():
            num_flops, num_bytes = work.work(num_rows)
            intensity = num_flops / num_bytes
            for taken_ms, is_ours in (
                (source["figures"][f"{shape} turn, {num_rows} running"], True),
                (vllm_ms, False),
            ):
                place = axes.at(intensity, num_flops / taken_ms / 1e9)
                _dot(drawing, place, COLOURS[shape] if is_ours else GREY)
                if is_ours:
                    label = f"{shape}, {num_rows}: {taken_ms:.2f} ms"
                    drawing.text(*_moved(place, 8, 12 if shape == "1B" else -6), label, size=11)
    _legend(drawing, [("1B", BLUE), ("8B", ORANGE), (VLLM, GREY)])
    foot = f"x: operations per byte read; y: TFLOP/s of the whole step, context {CONTEXT}, bfloat16"
    drawing.text(LEFT, TOP + axes.height + 40, foot, fill=QUIET)
    return drawing.svg(TOP + axes.height + 54, "Roofline of the decode step")


def timeline(source: dict[str, Any]) -> str:
    """Return a timeline of the profiled decode steps of each model as SVG: host activity in the
    upper row, device activity below it. `source`: the content of gpu.json.
    """
    drawing = Drawing(WIDTH)
    drawing.text(LEFT, 24, "Two decode steps in the profiler", size=15, is_bold=True)
    top = TOP + 20
    for shape, found in sorted(source["timelines"].items()):
        end = max(begun + took for _, begun, took in found["turns"])
        scale = 660 / end
        drawing.text(LEFT, top, f"{shape}, {found['num_rows']} running", is_bold=True)
        for row, words in enumerate(("host", "device")):
            drawing.text(LEFT - 6, top + 24 + 30 * row, words, anchor="end", fill=QUIET)
        for turn, begun, took in found["turns"]:
            x = LEFT + begun * scale
            drawing.rect(x, top + 10, took * scale - 1, 20, LINE, title=f"step {turn}: {took} µs")
        sums: dict[str, float] = {}
        boxes: dict[str, list[str]] = {}
        for index, begun, took in found["kernels"]:
            kind, colour = kind_of(found["names"][index])
            sums[kind] = sums.get(kind, 0.0) + took
            x, width = LEFT + begun * scale, max(min(took, end - begun) * scale, 0.2)
            box = f"M{x:.1f},{top + 40}h{width:.1f}v20h{-width:.1f}z"
            boxes.setdefault(colour, []).append(box)
        for colour, some in boxes.items():
            drawing.path("".join(some), fill=colour)
        for place in ticks(end, 6):
            x = LEFT + place * scale
            drawing.line(x, top + 60, x, top + 65)
            drawing.text(x, top + 78, f"{place / 1e3:g} ms", anchor="middle", fill=QUIET, size=11)
        busy = sum(sums.values()) / end
        shares = ", ".join(
            f"{kind} {took / end:.0%}" for kind, took in _descending(sums) if took > end / 200
        )
        drawing.text(LEFT, top + 98, f"device busy {busy:.0%}: {shares}", fill=QUIET, size=11)
        top += 136
    _legend(drawing, [(kind, colour) for kind, colour, _ in KINDS])
    return drawing.svg(top, "Timeline of decode steps")


def latency(source: dict[str, Any]) -> str:
    """Return a plot of the service's throughput against its median ITL as SVG, with one point for
    each number of streams. `source`: the content of gpu.json.
    """
    drawing = Drawing(WIDTH)
    title = "Served: tokens/s over the median time between tokens"
    drawing.text(LEFT, 24, title, size=15, is_bold=True)
    for number, shape in enumerate(SHAPES):
        ours = _curve(source["figures"], shape)
        every = [*ours.values(), *VLLM_SERVED[shape].values()]
        most = (max(itl for _, itl in every) * 1.15, max(rate for rate, _ in every) * 1.1)
        left = LEFT + number * 366
        axes = Axes(x=(0, most[0]), y=(0, most[1]), left=left, width=300, height=250)
        drawing.text(left + 6, TOP + 14, shape, is_bold=True)
        for value in ticks(most[1], 5):
            _, y = axes.at(0, value)
            drawing.line(left, y, left + axes.width, y)
            drawing.text(left - 5, y + 4, f"{value / 1e3:g}k", anchor="end", fill=QUIET, size=11)
        for value in ticks(most[0], 6):
            x, y = axes.at(value, 0)
            drawing.text(x, y + 16, f"{value:g}", anchor="middle", fill=QUIET, size=11)
        places = [axes.at(itl, rate) for rate, itl in ours.values()]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawing.path(f"M{path}", stroke=COLOURS[shape])
        for found, colour, x, anchor in (
            (ours, COLOURS[shape], -8, "end"),
            (VLLM_SERVED[shape], GREY, 7, "start"),
        ):
            for streams, (rate, itl) in found.items():
                place = axes.at(itl, rate)
                _dot(drawing, place, colour)
                words = _moved(place, x, 12 if x > 0 else -3)
                drawing.text(*words, str(streams), size=11, fill=QUIET, anchor=anchor)
    _legend(drawing, [("1B here", BLUE), ("8B here", ORANGE), (VLLM, GREY)])
    foot = "x: ITL p50, ms; numbers: streams at once, prompts of 512 and answers of 256 tokens"
    drawing.text(LEFT, 340, foot, fill=QUIET)
    return drawing.svg(356, title)


PICTURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "gpu-roofline.svg": roofline,
    "gpu-timeline.svg": timeline,
    "gpu-curve.svg": latency,
}


def _curve(figures: dict[str, float], shape: str) -> dict[int, tuple[float, float]]:
    prefix = f"{shape} curve, "
    counts = [int(name.split()[2]) for name in figures if name.startswith(prefix)]
    return {
        count: (
            figures[f"{shape} curve, {count} streams"],
            figures[f"{shape} curve ITL p50, {count} streams"],
        )
        for count in sorted(counts)
    }


def _descending(sums: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(sums.items(), key=lambda item: -item[1])


def _moved(place: tuple[float, float], x: float, y: float) -> tuple[float, float]:
    return place[0] + x, place[1] + y


def _dot(drawing: Drawing, place: tuple[float, float], colour: str) -> None:
    drawing.rect(place[0] - 4, place[1] - 4, 8, 8, colour, radius=4)


def _legend(drawing: Drawing, entries: Sequence[tuple[str, str]]) -> None:
    x = float(LEFT)
    for words, colour in entries:
        drawing.rect(x, 31, 10, 10, colour, radius=2)
        drawing.text(x + 14, 40, words, size=11, fill=QUIET)
        x += 26 + 6.2 * len(words)


def add_results(source: dict[str, Any], results: dict[str, Any]) -> None:
    """Add the results of a run of benchmarks/gpu.py to `source`; figures are rounded to five
    digits.
    """
    for found in results["figures"]:
        source["figures"][found["name"]] = float(f"{found['value']:.5g}")
    source["timelines"] |= results["timelines"]


def main() -> None:
    """Add the results of the given files, then draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="result files of benchmarks/gpu.py")
    source: dict[str, Any] = {"figures": {}, "timelines": {}}
    if SOURCE.exists():
        source = json.loads(SOURCE.read_text(encoding="utf-8"))
    for path in parser.parse_args().results:
        add_results(source, json.loads(path.read_text(encoding="utf-8"))["results"])
    parts = [f'"figures": {json.dumps(source["figures"], indent=1)}']
    parts.append(f'"timelines": {json.dumps(source["timelines"], separators=(",", ":"))}')
    SOURCE.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(source), encoding="utf-8")
        print(f"written: {FOLDER / name}")


if __name__ == "__main__":
    main()
