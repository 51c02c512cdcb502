"""Generates training prompts of kinds that do not occur in plays: code, addresses, numbers, words
in capitals, arbitrary Unicode characters, small sums, and consecutive numbers.
"""

from __future__ import annotations

import string
from collections.abc import Callable

import numpy as np

TEMPLATES = (
    "{w} {n}",
    "The year {n} was",
    "Chapter {n}: {W}",
    "{W}",
    "{U}",
    "{U} {U}!",
    "{n} {n} {n}",
    "{n}.{n} {w}",
    "${n}.{n} ({n}% off)",
    "{n}:{n} - {n}:{n}",
    "{n}/{n}/{n}",
    "{w}@{w}.{w}",
    "https://{w}.{w}/{w}?{w}={n}&{w}={w}",
    "/{w}/{w}/{w}.{w}",
    "def {w}({w}, {w}={n}):\n    return {w}[{n}]\n",
    "    if ({w} <= {n}) {\n\t{w}->{w} = {n};\n    }\n",
    "#include <{w}.h>\n",
    "import {w}\n{w} = {w}.{w}()\n",
    '{"{w}": [{n}, {n}], "{w}": {"{w}": true}}',
    "<{w} {w}='{n}'>{w}</{w}>",
    "SELECT {w}, * FROM {w} WHERE {w} = '{w}';",
    "[{n}] {w}_{w}: {w} -> {w}",
    "```{w}\n{w} += {n}\n```",
    "# {W}\n\n- {w}\n- {w} **{w}**\n",
    "{w} | {w} > {w}~ && ./{w} --{w}={n} $?",
    "What is {n} {p} {n}?",
    "{p}{p}{p}",
    "{p}",
)


def other_prompt(generator: np.random.Generator) -> str:
    """Return a filled template, printable ASCII noise or, one time in ten, random characters below
    U+3000.
    """
    kind = generator.random()
    if kind < 0.1:
        return _noise(generator, 1, 0x3000)
    if kind < 0.35:
        return _noise(generator, 32, 127)
    template = TEMPLATES[int(generator.integers(len(TEMPLATES)))]
    for mark, fill in FILLS.items():
        while mark in template:
            template = template.replace(mark, fill(generator), 1)
    return template


def sums(generator: np.random.Generator) -> list[tuple[str, str]]:
    """Return (question, answer) pairs.

    Usually a question is a sum or difference of two one-digit numbers, and the answer is the
    result. One time in five there is a single pair instead: three consecutive numbers, and the
    numbers that follow them.
    """
    space = " " if generator.random() < 0.3 else ""
    if generator.random() < 0.2:
        first = int(generator.integers(1, 90))
        numbers = [str(first + step) for step in range(int(generator.integers(5, 12)))]
        return [(" ".join(numbers[:3]), " " + " ".join(numbers[3:]) + "\n")]
    lines: list[tuple[str, str]] = []
    for _ in range(int(generator.integers(1, 9))):
        left, right = (int(number) for number in generator.integers(0, 10, size=2))
        sign = "+" if generator.random() < 0.7 else "-"
        left, right = (left, right) if sign == "+" else (max(left, right), min(left, right))
        answer = left + right if sign == "+" else left - right
        question = f"{left}{space}{sign}{space}{right}{space}="
        lines.append((question, f"{space}{answer}\n"))
    return lines


def _noise(generator: np.random.Generator, first: int, end: int) -> str:
    length = int(generator.geometric(1 / 12))
    return "".join(chr(code) for code in generator.integers(first, end, size=length))


def _word(generator: np.random.Generator) -> str:
    letters = generator.integers(26, size=int(generator.integers(1, 9)))
    return "".join(string.ascii_lowercase[letter] for letter in letters)


def _number(generator: np.random.Generator) -> str:
    return str(generator.integers(10 ** int(generator.integers(1, 5))))


def _mark(generator: np.random.Generator) -> str:
    return string.punctuation[int(generator.integers(len(string.punctuation)))]


FILLS: dict[str, Callable[[np.random.Generator], str]] = {
    "{w}": _word,
    "{W}": lambda generator: _word(generator).capitalize(),
    "{U}": lambda generator: _word(generator).upper(),
    "{n}": _number,
    "{p}": _mark,
}
