"""What a step costs, as people hand it to a command: JSON, or a file with it.

Owns the one form: the fields of `CostModel`, in seconds, as `penstock simulate --calibrate-from`
prints them.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.executor.config_json import from_json_value, parse_json
from penstock.scheduler.cost_model import CostModel


def read_step_prices(option: str, text: str, *, needs_all: bool = False) -> CostModel:
    """From a JSON object, or from a file with one. Raises ValueError naming option and field.

    `needs_all`: prices that are left out are an error, not the defaults of a made-up machine.
    """
    where = option
    if not text.lstrip().startswith(("{", "[")):
        path = Path(text).expanduser()
        where = f"{option}: {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is no JSON: it is not UTF-8") from error
    try:
        data: Any = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    prices = from_json_value(CostModel, data, where)
    if needs_all:
        given = cast("Mapping[str, Any]", data)
        missing = [item.name for item in dataclasses.fields(CostModel) if item.name not in given]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing")
    return prices
