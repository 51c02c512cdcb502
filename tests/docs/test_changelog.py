import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_latest_version_of_the_changelog_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)

    version = re.escape(project["version"])
    assert re.fullmatch(rf"{version}(, unreleased| - \d{{4}}-\d\d-\d\d)", headings[0])
