"""Runs the engine process: scheduler and executor on one thread, without asyncio.

Creates the components of the process and shuts them down. At the start and after each change of the
policy file (the operator's settings per tenant), applies the tenants' limits and weights in the
file. The supervisor runs this module as
`python -m penstock.server.processes.engine_process <control fd>`.
"""

import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

from penstock.executor.config import ExecutorConfig
from penstock.executor.create import create_executor
from penstock.executor.parent_death import die_with_parent
from penstock.scheduler.cache_index import CacheIndex
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.integrity import IntegrityError
from penstock.server.config import EngineLaunch, ServerConfig
from penstock.server.engine.dispatch import Dispatcher
from penstock.server.engine.front_connections import MAX_OUTPUT_BYTES, FrontConnections
from penstock.server.engine.kept_streams import KeptLimits
from penstock.server.engine.loop import EngineLoop, StatusBoardExecutor, StatusPublisher
from penstock.server.engine.quarantine import Quarantine
from penstock.server.gateways import NO_GATEWAY
from penstock.server.ipc.board import EngineBoard, create_board
from penstock.server.ipc.frames import EngineHello
from penstock.server.observe.flight.layout import FlightError, facts_of
from penstock.server.observe.flight.writer import FlightWriter
from penstock.server.observe.listeners import EngineListeners
from penstock.server.observe.recording.recorder import Recorder
from penstock.server.processes.command_runner import CommandRunner
from penstock.server.processes.control import ChildControl, begin, exit_at_once
from penstock.server.processes.exit_codes import (
    EXIT_CANNOT_START,
    EXIT_ENGINE_DIED,
    EXIT_INTEGRITY_FAILED,
    EXIT_OK,
)
from penstock.server.security.policy_file import PolicyFile

# When run as a program, `__name__` would be `__main__`.
logger = logging.getLogger("penstock.server.processes.engine_process")

_EXECUTORS = "penstock.executor."


class EnginePolicy:
    """Applies the tenants' limits and weights of a policy file to an engine.

    The constructor raises the error of `open_file` (ValueError or OSError) if the file is invalid.
    With `can_wait`, it logs the error instead, and `poll` reads the file again, so that a restarted
    engine does not fail while the file is being written. Until the file is valid, no tenant is
    limited.
    """

    def __init__(
        self, engine: Engine, open_file: Callable[[], PolicyFile], *, can_wait: bool = False
    ) -> None:
        self._engine = engine
        self._open_file = open_file
        self._file: PolicyFile | None = None
        try:
            self._open()
        except (ValueError, OSError) as error:
            if not can_wait:
                raise
            # The message names the fault in the file; a traceback would not help.
            logger.error("the policy file cannot be read, so no tenant is limited: %s", error)  # noqa: TRY400

    def poll(self) -> None:
        """Read and apply the policy file if it has changed. Call this on the engine's thread,
        between two steps."""
        if self._file is None:
            with contextlib.suppress(ValueError, OSError):
                self._open()
        elif self._file.poll():
            self._apply(self._file)

    def _open(self) -> None:
        file = self._open_file()
        self._apply(file)
        self._file = file

    def _apply(self, file: PolicyFile) -> None:
        policy = file.policy
        self._engine.set_quotas(policy.quotas, policy.default.quota)
        self._engine.set_weights(policy.weights, policy.default.weight)


def main(arguments: list[str]) -> int:
    """Run one engine until the supervisor stops it or it fails, and return the exit code."""
    # Loading torch and a model creates hundreds of thousands of permanent objects. Garbage
    # collection meanwhile would take a fifth of the start time.
    gc.disable()
    control, launch = begin(arguments, EngineLaunch, "engine")
    # The thread that watches the control connection cannot run while native code holds the GIL.
    die_with_parent()
    listener = socket.socket(fileno=launch.listener_fd)
    listener.set_inheritable(False)  # Programs that the executor starts must not inherit it.
    if launch.flight_fd >= 0:
        os.set_inheritable(launch.flight_fd, False)
    try:
        executor = create_executor(launch.server.executor)
        warn_of_limits(launch.server.executor, executor.info)
        board = _board(launch, executor)
        recorder = _recorder(launch.server, executor)
        engine = _engine(launch, StatusBoardExecutor(executor, board), recorder)
        cache_index = _cache_index(launch, engine)
        dispatcher = Dispatcher(
            engine,
            _hello(launch, executor, publishes_cache=cache_index is not None),
            execute=CommandRunner("engine").execute,
            quarantine=Quarantine(launch.suspects, board.mark_probation),
            mark_submitting=board.mark_submitting,
            cache_index=cache_index,
            kept_limits=KeptLimits(
                max_bytes=launch.server.front.max_resume_bytes,
                max_unread=launch.server.front.max_detached_requests,
            ),
        )
        # A front that attaches all kept streams at once must not be treated as a slow reader.
        max_output_bytes = MAX_OUTPUT_BYTES + launch.server.front.max_resume_bytes
        connections = FrontConnections(listener, dispatcher, max_output_bytes=max_output_bytes)
        loop = EngineLoop(connections, time.monotonic, StatusPublisher(board, dispatcher))
        loop.add_task(dispatcher.sweep)
        policy = _policy(launch, engine)
        if policy is not None:
            loop.add_task(policy.poll)
    except (Exception, SystemExit) as error:
        # Reports any failure to start, of a model folder, a library or memory, as one line for the
        # operator. Details are logged at debug level. Libraries that start processes may call
        # sys.exit.
        logger.debug("cannot start", exc_info=True)
        control.report_failure(error)
        return EXIT_CANNOT_START
    try:
        return _serve(control, executor, loop)
    finally:
        if recorder is not None:
            recorder.close()


def warn_of_limits(config: ExecutorConfig, info: ExecutorInfo) -> None:
    """Log a warning if the model limits the context to less than the requested `max_seq_len`
    tokens, and one if the KV cache cannot hold a single request of the resulting length."""
    if config.max_seq_len is not None and info.max_seq_len < config.max_seq_len:
        logger.warning(
            "max_seq_len is %d, the model's limit, not the requested %d",
            info.max_seq_len,
            config.max_seq_len,
        )
    num_tokens = info.num_blocks * info.block_size
    if num_tokens < info.max_seq_len:
        logger.warning(
            "the KV cache holds %d tokens (num_blocks=%d, block_size=%d): no request can reach"
            " max_seq_len, %d",
            num_tokens,
            info.num_blocks,
            info.block_size,
            info.max_seq_len,
        )


def _serve(control: ChildControl, executor: Executor, loop: EngineLoop) -> int:
    info = executor.info
    control.on_stop(loop.stop)
    # The objects that exist now are permanent, so exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.enable()
    control.report_ready(
        executor=info.name,
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        max_seq_len=info.max_seq_len,
        **({"resources": info.resources} if info.resources else {}),
    )
    try:
        loop.run()
    except IntegrityError:
        logger.critical("integrity check failed", exc_info=True)
        return EXIT_INTEGRITY_FAILED
    except Exception as error:
        is_from_executor = comes_from_executor(error)
        logger.critical(
            "the executor failed"
            if is_from_executor
            else "internal error: a step failed outside the executor",
            exc_info=True,
        )
        return EXIT_ENGINE_DIED
    executor.close()
    return EXIT_OK


def comes_from_executor(error: Exception) -> bool:
    """Return True if the executor raised the error, according to the traceback."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__", "")).startswith(_EXECUTORS) for frame in frames)


def _board(launch: EngineLaunch, executor: Executor) -> EngineBoard:
    """Return the status board from the supervisor, or a private one if the engine was started
    manually."""
    fd = launch.board_fd
    if fd < 0:
        fd = create_board(executor.info.max_num_seqs)
    try:
        return EngineBoard(fd, launch.epoch, executor.info.pipeline_depth)
    finally:
        os.close(fd)  # It is mapped already. Programs that the executor starts must not inherit it.


def _recorder(server: ServerConfig, executor: Executor) -> Recorder | None:
    """Start and return the recorder of steps and requests; None if recording is disabled or the
    files cannot be written."""
    if server.record_path is None:
        return None
    try:
        recorder = Recorder(
            server.record_path,
            block_size=executor.info.block_size,
            is_self_paced=executor.info.is_self_paced,
            max_bytes=server.record_max_bytes,
        )
    except OSError as error:
        # The command line has checked the file. If it fails now, serve without recording.
        logger.warning("recording is disabled: %s", error)
        return None
    recorder.start()
    return recorder


def _engine(launch: EngineLaunch, executor: Executor, recorder: Recorder | None) -> Engine:
    wanted = (_flight_writer(launch, executor), recorder)
    listeners = [listener for listener in wanted if listener is not None]
    return Engine(
        executor,
        launch.server.scheduler,
        time.monotonic,
        EngineListeners(*listeners) if listeners else None,
    )


def _cache_index(launch: EngineLaunch, engine: Engine) -> CacheIndex | None:
    """Return the index of cached blocks for gateways; None without a gateway, or if the executor
    manages its own cache."""
    if launch.server.gateway == NO_GATEWAY or engine.ready_fd is not None:
        return None
    return engine.enable_cache_index()


def _policy(launch: EngineLaunch, engine: Engine) -> EnginePolicy | None:
    """Return the object that applies the policy file's limits and weights; None without a file."""
    path = launch.server.security.policy_file
    if path is None:
        return None
    is_first = launch.epoch == 1
    open_file = functools.partial(
        PolicyFile,
        path,
        is_behind_proxy=bool(launch.server.front.tenant_metadata_key),
        has_client_certificates=launch.server.security.tls_client_ca is not None,
        needs_keys=is_first,
    )
    return EnginePolicy(engine, open_file, can_wait=not is_first)


def _flight_writer(launch: EngineLaunch, executor: Executor) -> FlightWriter | None:
    """Return the writer of the flight recorder; None if the recorder is disabled or unavailable."""
    if launch.flight_fd < 0:
        return None
    server = launch.server
    facts = facts_of(server.model, launch.epoch, executor.info, server.scheduler)
    try:
        return FlightWriter(launch.flight_fd, facts)
    except (OSError, FlightError) as error:
        logger.warning("flight recorder unavailable: %s", error)
        return None


def _hello(launch: EngineLaunch, executor: Executor, *, publishes_cache: bool) -> EngineHello:
    scheduler = launch.server.scheduler
    return EngineHello(
        epoch=launch.epoch,
        model=launch.server.model,
        executor=executor.info,
        max_num_waiting=scheduler.max_num_waiting,
        max_num_waiting_tokens=scheduler.max_num_waiting_tokens,
        publishes_cache=publishes_cache,
    )


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
