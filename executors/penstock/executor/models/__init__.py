"""Finds model folders, and defines the names of packaged models. Reads no weights."""

from pathlib import Path

_PACKAGED = Path(__file__).parent
_DEMO = "demo"
_CONFIG_FILE = "config.json"


class ModelNotFound(Exception):
    """The model folder does not exist or contains no model; the message contains the name or
    path.
    """

    def __init__(self, name_or_path: str, detail: str) -> None:
        super().__init__(f"model {name_or_path!r} not found: {detail}")
        self.name_or_path = name_or_path


def resolve_model(name_or_path: str) -> Path:
    """Return the absolute folder of a model: "demo" (packaged) or a Hugging Face folder's path.

    Nothing is downloaded. A folder named "demo" in the working directory is addressed as "./demo".
    Raises ModelNotFound when there is no such folder, or when it has no config.json.
    """
    if not name_or_path:
        raise ModelNotFound(name_or_path, f"give {_DEMO!r} or the path of a Hugging Face folder")
    is_packaged = name_or_path == _DEMO
    folder = _PACKAGED / _DEMO if is_packaged else Path(name_or_path).expanduser()
    if not folder.is_dir():
        detail = (
            f"the packaged folder {folder} is missing from this installation"
            if is_packaged
            else f"{folder} is not a folder; give {_DEMO!r} or the path of a downloaded model's"
            " Hugging Face folder"
        )
        raise ModelNotFound(name_or_path, detail)
    if not (folder / _CONFIG_FILE).is_file():
        raise ModelNotFound(name_or_path, f"{folder} contains no {_CONFIG_FILE}")
    return folder.resolve()
