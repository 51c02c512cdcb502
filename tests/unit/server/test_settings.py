"""Settings are read from a file, errors name invalid ones, and the page and the help of settings
are generated.
"""

import re
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest

from object_keys import keys_of, keys_of_table
from penstock.scheduler.config import SchedulingOrder
from penstock.scheduler.setting import Setting, SettingError
from penstock.server.cli.serve import merge_settings
from penstock.server.config import GROUPS, SETTINGS, ServerConfig
from penstock.server.settings.sources import BadSetting
from penstock.server.settings.table import Declared
from penstock.tools.command_line import build_parser
from penstock.tools.plan.candidates import KEYS
from penstock.tools.simulation.scheduler_keys import SCHEDULER_KEYS
from settings_page import PAGE, settings_page
from support.serve_config import serve_config


def configured(file: Path, text: str, *words: str, **environment: str) -> ServerConfig:
    file.write_text(text, encoding="utf-8")
    return serve_config("--config", file, *words, **environment)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.toml"


TEXT = """
[model]
executor = "simulated"
model_aliases = ["a", "b"]
[network]
port = 7001
host = "::1"
[executor.simulated_config]
is_strict = true
[cache]
kv_cache_mib = 3
prefix_caching = true
[queue]
order = "fcfs"
[tenants]
tenant_metadata_key = "x-tenant"
[batching]
target_itl_ms = 40
[observability]
metrics_port = "off"
operations_port = 9100
"""


def test_a_file_has_every_kind_of_value_and_gives_way_to_variables_and_flags(file: Path) -> None:
    config = configured(file, TEXT, "--host", "127.0.0.1", PENSTOCK_PORT="7002")

    assert (config.host, config.port) == ("127.0.0.1", 7002)
    assert config.front.model_aliases == ("a", "b")
    assert config.executor.simulated.is_strict
    assert config.executor.simulated.is_real_time
    assert config.executor.kv_cache_bytes == 3 * 1024 * 1024
    assert config.scheduler.order is SchedulingOrder.FCFS
    assert config.scheduler.target_itl_s == 0.04
    assert (config.observer.metrics_port, config.observer.operations_port) == (None, 9100)


def test_a_variable_names_the_file(file: Path) -> None:
    file.write_text('[network]\nhost = "::1"\n')
    assert merge_settings({}, {"PENSTOCK_CONFIG": str(file)}).get("host") == "::1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[network]\nprt = 1", "network.prt is unknown; did you mean network.port?"),
        ("[cache]\nport = 1", "cache.port is unknown; did you mean network.port?"),
        ("port = 1", "port is unknown; did you mean network.port?"),
        ("[netwrk]\nport = 1", "[netwrk] is unknown; did you mean network?"),
        ("[network]\nzzzqq = 1", "network.zzzqq is unknown; known are network."),
        ("[[network]]\nport = 1", "network is not a table; write [network]"),
        ("[network]\nport = 'x'", "network.port must be an integer, not 'x'"),
        ("[network]\nport = 65536", "network.port must be in 0..65535, not 65536"),
        ("[cache]\nprefix_caching = 'on'", "cache.prefix_caching must be true or false, not 'on'"),
        ("[queue]\norder = 'lifo'", "queue.order must be one of 'fair', 'fcfs', not 'lifo'"),
        ("[queue]\norder = 'fcfs'\naging_s = 3", "queue.aging_s has no effect with the order fcfs"),
        (
            "[executor.simulated_config]\nstrict = true\n[model]\nexecutor = 'simulated'",
            "executor.simulated_config.strict is unknown; did you mean is_strict?",
        ),
        (
            "[executor.simulated_config]\ncost = []\n[model]\nexecutor = 'simulated'",
            "executor.simulated_config.cost must be a table, not an array",
        ),
        (
            "[batching]\nmax_num_seqs = 40\nmax_num_batched_tokens = 32",
            "batching.max_num_batched_tokens must be at least",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_file(file: Path, text: str, message: str) -> None:
    with pytest.raises(BadSetting, match=f"^{re.escape(f'{file}: {message}')}"):
        configured(file, text)


def test_a_file_that_is_no_toml_is_rejected(file: Path) -> None:
    with pytest.raises(BadSetting, match=f"--config: {file} is not valid TOML"):
        configured(file, "[network")
    with pytest.raises(BadSetting, match=r"--config: nowhere\.toml cannot be read: No such file"):
        merge_settings({"config": "nowhere.toml"}, {})
    with pytest.raises(BadSetting, match=r"^PENSTOCK_CONFIG: nowhere\.toml cannot be read"):
        merge_settings({}, {"PENSTOCK_CONFIG": "nowhere.toml"})


def test_one_message_names_each_setting_by_its_source(file: Path) -> None:
    with pytest.raises(BadSetting) as caught:
        configured(
            file,
            "[batching]\nmax_num_seqs = 40",
            *("--max-deadline-s", "5"),
            PENSTOCK_MAX_NUM_BATCHED_TOKENS="32",
            PENSTOCK_DEFAULT_DEADLINE_S="5",
        )
    assert str(caught.value) == (
        f"PENSTOCK_MAX_NUM_BATCHED_TOKENS must be at least {file}: batching.max_num_seqs (40),"
        " not 32"
    )


def test_every_setting_has_one_name_a_known_group_a_help_and_a_default() -> None:
    names = [item.name for item in SETTINGS]
    assert len(set(names)) == len(names) >= 90
    assert {item.setting.group for item in SETTINGS} == set(GROUPS)
    for item in SETTINGS:
        assert item.setting.help, item.name
        assert item.shown_default not in ("", "None"), item.name
        assert "MISSING" not in item.shown_default, item.name


def test_the_help_begins_with_everyday_flags_and_shows_every_default_and_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.index("common:") < text.index("--model ") < text.index("KV cache, sessions")
    assert text.count("default: ") == len(SETTINGS) + 1  # and of --config
    for bounds in {item.setting.bounds for item in SETTINGS if not item.choices} - {""}:
        assert f"({bounds}; default: " in text


def test_the_page_of_settings_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_page(), "docs/tools/settings_page.py"


def key_paths(kind: type[Any], prefix: str = "") -> list[str]:
    """Return the path of each key of a nested JSON object. A dot separates keys, and `[]` follows
    the key of a list.
    """
    paths: list[str] = []
    for name, hint in get_type_hints(kind).items():
        inner = [item for item in (hint, *get_args(hint)) if is_dataclass(item)]
        mark = "[]" if get_origin(hint) is tuple else ""
        if inner:
            paths += key_paths(cast(type[Any], inner[0]), f"{prefix}{name}{mark}.")
        else:
            paths.append(prefix + name)
    return paths


@pytest.mark.parametrize("name", ["simulated_config", "trtllm_config", "step_cost"])
def test_the_page_has_every_key_of_an_object_with_its_help_and_default(name: str) -> None:
    [item] = [item for item in SETTINGS if item.name == name]
    section = PAGE.read_text(encoding="utf-8").split(f"## Keys of `{name}`")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    assert first_cells == key_paths(item.kind)
    for key in keys_of(item):
        assert key.text, key
        assert key.default not in ("", "None", "()"), key


@pytest.mark.parametrize("table", [SCHEDULER_KEYS, KEYS], ids=["scheduler", "candidate"])
def test_every_key_of_a_simulation_has_one_name_a_help_and_a_default(
    table: tuple[Declared, ...],
) -> None:
    keys = keys_of_table(table)
    assert len({key.path for key in keys}) == len(keys)
    for key in keys:
        assert key.text, key
        assert key.default not in ("", "None"), key


def test_the_page_has_the_default_of_the_command_line_not_of_python() -> None:
    [item] = [item for item in SETTINGS if item.name == "simulated_config"]
    assert {key.path: key.default for key in keys_of(item)}["is_real_time"] == "true"


def test_a_key_without_a_declaration_is_an_error() -> None:
    @dataclass
    class Bare:
        size: int = 1

    item = Declared(path="bare", setting=Setting("executor"), kind=Bare, default=None)
    with pytest.raises(TypeError, match=r"Bare\.size is not declared with `setting`"):
        keys_of(item)


@pytest.mark.parametrize(
    ("setting", "value", "fault"),
    [
        (Setting(at_least=1), 0, "must be at least 1, not 0"),
        (Setting(above=0, at_most=1), 0.0, "must be above 0 and at most 1, not 0.0"),
        (Setting(at_least=0, at_most=3), 4, "must be in 0..3, not 4"),
        (Setting(above=0), float("nan"), "must be finite and above 0, not nan"),
        (Setting(above=0), float("inf"), "must be finite and above 0, not inf"),
        (Setting(above=0, at_most=1), float("inf"), "must be above 0 and at most 1, not inf"),
        (Setting(above=0, may_be_infinite=True), float("inf"), ""),
        (Setting(), float("inf"), "must be finite, not inf"),
        (Setting(may_be_zero=True, at_least=2), 0, ""),
        (Setting(may_be_zero=True, at_least=2), 1, "must be 0 or at least 2, not 1"),
        (Setting(choices=("a", "b")), "c", "must be one of a, b, not 'c'"),
        (Setting(at_least=1), None, ""),
    ],
)
def test_bounds_are_stated_in_full(setting: Setting, value: object, fault: str) -> None:
    assert setting.fault(value) == fault


def test_names_in_an_error_are_replaced_and_nothing_else_of_it() -> None:
    error = SettingError("{} must not hold '{}' as {} does", "a_b", "c")
    assert str(error) == "a_b must not hold 'c' as {} does"
    assert error.spelled(str.upper) == "A_B must not hold 'C' as {} does"
