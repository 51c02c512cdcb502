"""The `buf generate` templates are in the format of version 2, and run if their plugins
are installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "protos" / "templates"
# A file that has both messages and a service, by language.
WRITTEN = {
    "typescript": "penstock/v1/generation_service_pb.ts",
    "cpp": "penstock/v1/generation_service.grpc.pb.cc",
    "go": "penstock/v1/generation_service_grpc.pb.go",
    "java": "dev/penstock/v1/GenerationServiceGrpc.java",
}
REMOTE = ("csharp", "rust", "swift")
KINDS = {"local", "remote", "protoc_builtin"}
NODE_BIN = REPOSITORY / "clients" / "typescript" / "node_modules" / ".bin"
PATH = os.pathsep.join((os.environ.get("PATH", ""), str(NODE_BIN)))
GENERATING_S = 60.0


def template(language: str) -> Path:
    return TEMPLATES / f"buf.gen.{language}.yaml"


def plugins(language: str) -> list[dict[str, Any]]:
    document = yaml.safe_load(template(language).read_text(encoding="utf-8"))
    return cast("list[dict[str, Any]]", document["plugins"])


def missing_programs(language: str) -> list[str]:
    needed = [plugin.get("local", "protoc") for plugin in plugins(language)]
    return [program for program in needed if shutil.which(program, path=PATH) is None]


def test_each_language_has_a_template_and_a_line_in_the_readme() -> None:
    languages = {path.name.split(".")[2] for path in TEMPLATES.glob("*.yaml")}
    assert languages == {*WRITTEN, *REMOTE}
    readme = (TEMPLATES / "README.md").read_text(encoding="utf-8")
    for language in languages:
        row = next(line for line in readme.splitlines() if f"`buf.gen.{language}.yaml`" in line)
        assert row.split("|")[3].strip() == ("no" if language in REMOTE else "yes")


@pytest.mark.parametrize("language", [*WRITTEN, *REMOTE])
def test_a_template_has_the_fields_of_version_2(language: str) -> None:
    text = template(language).read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    assert document["version"] == "v2"
    (source,) = document["inputs"]
    assert source["directory"] == "protos"
    assert source.get("exclude_paths", ["protos/google"]) == ["protos/google"]
    assert set(document) <= {"version", "inputs", "managed", "plugins"}
    for plugin in document["plugins"]:
        assert len(KINDS & set(plugin)) == 1
        assert set(plugin) <= {*KINDS, "out", "opt"}
        assert plugin["out"] == "."
    is_remote = any("remote" in plugin for plugin in document["plugins"])
    assert is_remote == (language in REMOTE)
    assert ("Not run by the project's tests" in text) == is_remote


@pytest.mark.parametrize(("language", "written"), WRITTEN.items())
def test_local_plugins_write_stubs(language: str, written: str, tmp_path: Path) -> None:
    buf = shutil.which("buf", path=os.pathsep.join((str(Path(sys.executable).parent), PATH)))
    missing = missing_programs(language)
    if buf is None or missing:
        pytest.skip(f"not on this machine: {', '.join(missing) or 'buf'}")
    relative = template(language).relative_to(REPOSITORY)
    done = subprocess.run(
        [buf, "generate", "--template", str(relative), "--output", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        timeout=GENERATING_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "GenerationService" in (tmp_path / written).read_text(encoding="utf-8")
