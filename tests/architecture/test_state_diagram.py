import re
from pathlib import Path

from penstock.scheduler.state import TRANSITIONS

README = Path(__file__).parents[2] / "scheduler" / "README.md"


def test_the_diagram_equals_the_transition_table() -> None:
    drawn = set(re.findall(r"^ +(\w+) --> (\w+): (\w+)$", README.read_text("utf-8"), re.M))
    table = {
        (state.name, target.name, event.name)
        for state, row in TRANSITIONS.items()
        for event, target in row.items()
    }
    assert drawn == table
