"""Builds engines ahead of time from a TensorRT-LLM checkpoint.

`build_engine` recognises the folder, looks for the engine in the cache, rejects flags that the
builder lacks, runs the builder, verifies its output and stores it. A running service never builds.
"""

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.executor.trtllm.builder_process import find_builder, known_flags, run_builder
from penstock.executor.trtllm.engine_cache import BuildLock, EngineCache
from penstock.executor.trtllm.engine_key import EngineKey, engine_key
from penstock.executor.trtllm.gpus import found_gpus
from penstock.executor.trtllm.model_kind import ModelFolder, ModelKind, recognise
from penstock.scheduler.setting import check, setting

_RESERVED_FLAGS = frozenset({"checkpoint_dir", "output_dir"})
_REPORT_INTERVAL_S = 10.0
_USUAL, _CHECKPOINTS = "the builder's", "the checkpoint's"


class BadBuild(Exception):
    """A setting or the model folder is invalid; the message names it."""


class BuildFailed(Exception):
    """The builder failed or produced no complete engine; the message contains the reason."""


def _size(text: str, shown: str = _USUAL) -> int | None:
    return setting(None, "build", text, at_least=1, shown=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """The settings of a build, with the names of `trtllm-build`'s flags; None: the builder's
    default.

    `tensor_parallel_size` and `pipeline_parallel_size` are not passed to the builder, only compared
    with the checkpoint's. `options`: values of other flags of the builder, by name without dashes.
    """

    max_batch_size: int | None = _size("requests that run at once")
    max_num_tokens: int | None = _size("tokens of one step")
    max_seq_len: int | None = _size("prompt and output, in tokens")
    max_input_len: int | None = _size("prompt, in tokens")
    max_beam_width: int | None = _size("beams")
    kv_cache_type: str | None = setting(
        None, "build", "kind of KV cache, as the builder names it", metavar="TYPE", shown=_USUAL
    )
    workers: int | None = _size("ranks that are built in parallel")
    tensor_parallel_size: int | None = _size("compared with the checkpoint", shown=_CHECKPOINTS)
    pipeline_parallel_size: int | None = _size("compared with the checkpoint", shown=_CHECKPOINTS)
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Raise SettingError for a value out of range, BadBuild for an option that has its own
        setting or is set by this module.
        """
        check(self)
        for name in self.options:
            if name in _RESERVED_FLAGS or name in {setting.name for setting in fields(self)}:
                raise BadBuild(f"option {name}: has its own setting")

    def flags(self) -> dict[str, str]:
        """Return the values to pass to the builder, by name of the flag without dashes."""
        aside = {"tensor_parallel_size", "pipeline_parallel_size", "options"}
        named = {
            setting.name: str(getattr(self, setting.name))
            for setting in fields(self)
            if setting.name not in aside and getattr(self, setting.name) is not None
        }
        return {**named, **self.options}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The result of `build_engine`. `path`: the folder to serve. `is_new`: whether the builder ran.
    `explanation`: one line for the user.
    """

    path: Path
    is_new: bool
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReporter:
    """Callbacks for the progress of a build: `log` gets this module's messages, `show` the
    builder's output.
    """

    log: Callable[[str], None]
    show: Callable[[bytes], None]


def build_engine(
    model: Path,
    settings: BuildSettings,
    cache: EngineCache,
    reporter: BuildReporter,
    *,
    max_wait_s: float | None = None,
) -> BuildResult:
    """Build the engine of a checkpoint into the cache, unless the cache has an intact one, and
    return its folder. If `model` is of another kind that can be served, return it unchanged.

    `max_wait_s`: how long to wait while another process builds the same engine; None: no limit.
    Raises BadBuild, BuilderUnusable, CacheUnusable, CacheBusy, BuildFailed; OSError if a file
    operation fails.
    """
    folder = recognise(model)
    if folder.kind is ModelKind.UNKNOWN:
        raise BadBuild(f"--model: {folder.explanation}")
    if folder.kind is not ModelKind.CHECKPOINT:
        # One sentence for the user; scripts use the path.
        return BuildResult(path=model, is_new=False, explanation=_nothing_to_build(folder))
    _check_parallel(settings, folder)
    reporter.log(f"{folder.path}: a TensorRT-LLM checkpoint; reading its files")
    flags = settings.flags()
    key = engine_key(model, flags, found_gpus(), _installed_version())
    place = cache.path_of(model, key)
    # Checked before the builder runs, because the builder imports the vendor's package, which is
    # slow.
    if _is_cached(cache, place, reporter):
        return BuildResult(path=place, is_new=False, explanation="cached: built before")
    builder = find_builder()
    lacking = sorted({*flags, *_RESERVED_FLAGS} - known_flags(builder))
    if lacking:
        raise BadBuild(f"{lacking[0]}: {builder.name} of this version has no --{lacking[0]}")
    with cache.locked(place, _wait_reporter(reporter), max_wait_s=max_wait_s) as lock:
        # The previous holder of the lock may have built the engine.
        if cache.exists(place) and not cache.damage(place):
            return BuildResult(path=place, is_new=False, explanation="cached: built meanwhile")
        _build(builder, folder, flags, cache, place, key, lock, reporter)
    return BuildResult(path=place, is_new=True, explanation="built")


def _is_cached(cache: EngineCache, place: Path, reporter: BuildReporter) -> bool:
    """Return whether the cache has an intact engine at `place`; report a damaged one."""
    if not cache.exists(place):
        return False
    damage = cache.damage(place)
    if damage:
        reporter.log(f"the cached engine is damaged ({damage}): building it again")
    return not damage


def _nothing_to_build(folder: ModelFolder) -> str:
    if folder.is_engine:
        return f"nothing to build: {folder.explanation}"
    return f"nothing to build: {folder.explanation}, and nothing is built ahead"


def _check_parallel(settings: BuildSettings, folder: ModelFolder) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        wanted, made_for = getattr(settings, name), getattr(folder, name) or 1
        if wanted is not None and wanted != made_for:
            raise BadBuild(
                f"{name}: the checkpoint was converted for {made_for}, not {wanted}; an engine"
                " has the parallel sizes of its checkpoint, so convert it again"
            )


def _installed_version() -> str:
    try:
        return metadata.version("tensorrt-llm")
    except metadata.PackageNotFoundError:
        return ""


def _build(
    builder: Path,
    folder: ModelFolder,
    flags: Mapping[str, str],
    cache: EngineCache,
    place: Path,
    key: EngineKey,
    lock: BuildLock,
    reporter: BuildReporter,
) -> None:
    with cache.building(place) as output:
        command = [
            *(str(builder), "--checkpoint_dir", str(folder.path), "--output_dir", str(output)),
            *(word for name, value in flags.items() for word in (f"--{name}", value)),
        ]
        started = datetime.datetime.now(datetime.UTC)
        reporter.log(f"building {place}")
        end = run_builder(
            command,
            lock=lock.descriptor,
            on_start=lambda pid: lock.write_holder(f"process {os.getpid()}, its builder {pid}"),
            show=reporter.show,
            on_heartbeat=lambda waited_s: reporter.log(f"... building for {waited_s:.0f} s"),
        )
        if end.exit_code != 0:
            lines = "".join(f"\n  | {line}" for line in end.last_lines)
            raise BuildFailed(f"{builder.name} ended with exit code {end.exit_code}{lines}")
        _check_output(builder, folder, output)
        manifest: dict[str, Any] = {
            "key": key.digest,
            "inputs": key.inputs,
            "command": command,
            "started_utc": started.isoformat(timespec="seconds"),
            "duration_s": round(end.duration_s, 3),
        }
        cache.store(output, place, manifest)


def _check_output(builder: Path, folder: ModelFolder, output: Path) -> None:
    """Raise BuildFailed unless `output` contains an engine file for each rank of the checkpoint."""
    made = recognise(output)
    if not made.is_engine:
        raise BuildFailed(f"{builder.name} succeeded but left no engine: {made.explanation}")
    num_ranks = (folder.tensor_parallel_size or 1) * (folder.pipeline_parallel_size or 1)
    for rank in range(num_ranks):
        if not (output / f"rank{rank}.engine").is_file():
            raise BuildFailed(
                f"{builder.name} succeeded but left no engine: rank{rank}.engine is missing, of"
                f" {num_ranks} ranks"
            )


def _wait_reporter(reporter: BuildReporter) -> Callable[[float, str], None]:
    """Return a callback for `EngineCache.locked` that reports the wait, immediately and then about
    every 10 s.
    """
    next_s = 0.0

    def report_wait(waited_s: float, holder: str) -> None:
        nonlocal next_s
        if waited_s >= next_s:
            holder_text = f" ({holder})" if holder else ""
            reporter.log(
                f"... another build of this engine runs{holder_text}; waited {waited_s:.0f} s"
            )
            next_s = waited_s + _REPORT_INTERVAL_S

    return report_wait
