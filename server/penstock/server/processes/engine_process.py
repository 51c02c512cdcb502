"""The engine process: scheduler and executor on one thread, no asyncio.

Owns its composition and the way it ends. Run by the supervisor as
`python -m penstock.server.processes.engine_process <control fd>`.
"""

import functools
import gc
import logging
import os
import socket
import sys
import time
import traceback
from typing import NoReturn

from penstock.executor.config import ExecutorConfig
from penstock.executor.create import create_executor
from penstock.scheduler.cache_book import CacheBook
from penstock.scheduler.engine import Engine
from penstock.scheduler.executor import Executor, ExecutorInfo
from penstock.scheduler.integrity import IntegrityError
from penstock.server.config import EngineLaunch, ServerConfig, decode_launch
from penstock.server.facades import NO_FACADE
from penstock.server.flight.facts import facts_of
from penstock.server.flight.flight_listener import FlightListener
from penstock.server.flight.geometry import FlightError
from penstock.server.flight.writer import FlightWriter
from penstock.server.link.board import EngineBoard, create_board
from penstock.server.link.dispatch import Dispatcher
from penstock.server.link.engine_loop import EngineLoop
from penstock.server.link.engine_status import StatusBoardExecutor, StatusPublisher
from penstock.server.link.front_connections import FrontConnections
from penstock.server.link.kept_streams import KeptLimits
from penstock.server.link.ports import EngineHello
from penstock.server.link.quarantine import Quarantine
from penstock.server.processes.control import ChildControl, die_with_parent
from penstock.server.processes.engine_policy import EnginePolicy
from penstock.server.processes.exit_codes import (
    EXIT_BOOKS_WRONG,
    EXIT_CANNOT_START,
    EXIT_ENGINE_DIED,
    EXIT_OK,
)
from penstock.server.processes.failure import in_one_line
from penstock.server.processes.logging_start import start_logging
from penstock.server.processes.orders import Orders
from penstock.server.recording.recorder import Recorder
from penstock.server.recording.recording_engine import RecordingEngine
from penstock.server.security.policy_file import PolicyFile

# Run as a program, its own name would be __main__.
log = logging.getLogger("penstock.server.processes.engine_process")

_EXECUTORS = "penstock.executor."


def main(arguments: list[str]) -> int:
    """Serve one engine until told to finish; the exit code."""
    # Loading torch and a model makes hundreds of thousands of objects that stay: looking through
    # them for garbage meanwhile costs a fifth of the start.
    gc.disable()
    control = ChildControl(int(arguments[0]))
    launch = decode_launch(EngineLaunch, control.read_launch())
    control.hold_lifeline(launch.socket_path)
    die_with_parent()
    start_logging("engine", launch.server)
    listener = socket.socket(fileno=launch.listener_fd)
    listener.set_inheritable(False)  # not for programs that the executor starts
    if launch.flight_fd >= 0:
        os.set_inheritable(launch.flight_fd, False)
    try:
        executor = create_executor(launch.server.executor)
        warn_of_limits(launch.server.executor, executor.info)
        board = _board(launch, executor)
        recorder = _recorder(launch.server, executor)
        engine = _engine(launch, StatusBoardExecutor(executor, board), recorder)
        book = _cache_book(launch, engine)
        dispatcher = Dispatcher(
            engine,
            _hello(launch, executor, publishes_cache=book is not None),
            carry_out=Orders("engine").carry_out,
            quarantine=Quarantine(launch.suspects, board.mark_probation),
            mark_submitting=board.mark_submitting,
            cache_book=book,
            kept_limits=KeptLimits(
                max_bytes=launch.server.front.max_resume_bytes,
                max_unread=launch.server.front.max_parked_requests,
            ),
        )
        hub = FrontConnections(listener, dispatcher)
        display = StatusPublisher(
            board,
            dispatcher,
            lambda: engine.queue_size,
            lambda: engine.occupancy,
            lambda: engine.retention_cuts,
        )
        loop = EngineLoop(dispatcher, hub, time.monotonic, display)
        loop.add_chore(dispatcher.sweep)
        policy = _policy(launch, engine)
        if policy is not None:
            loop.add_chore(policy.poll)
    except (Exception, SystemExit) as error:
        # Whatever a model folder, a library or the memory has against starting: one line for the
        # operator, the rest for who debugs. Libraries of launchers are known to call sys.exit.
        log.debug("cannot start", exc_info=True)
        control.report_failure(in_one_line(error))
        return EXIT_CANNOT_START
    try:
        return _serve(control, executor, loop)
    finally:
        if recorder is not None:
            recorder.close()


def warn_of_limits(config: ExecutorConfig, info: ExecutorInfo) -> None:
    """Log where the model or the KV cache falls short of the context that was asked for."""
    if config.max_seq_len is not None and info.max_seq_len < config.max_seq_len:
        log.warning(
            "max_seq_len is %d, the model's, not %d as asked for",
            info.max_seq_len,
            config.max_seq_len,
        )
    num_tokens = info.num_blocks * info.block_size
    if num_tokens < info.max_seq_len:
        log.warning(
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
    # What lives now lives to the end: the collector need not look at it again and again.
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
        log.critical("the books are wrong", exc_info=True)
        return EXIT_BOOKS_WRONG
    except Exception as error:
        is_its = comes_from_executor(error)
        log.critical(
            "the executor died"
            if is_its
            else "a step failed outside the executor: a fault of ours",
            exc_info=True,
        )
        return EXIT_ENGINE_DIED
    executor.close()
    return EXIT_OK


def comes_from_executor(error: Exception) -> bool:
    """Whether an executor raised it, or passed it on: whoever operates the service asks first."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__", "")).startswith(_EXECUTORS) for frame in frames)


def _board(launch: EngineLaunch, executor: Executor) -> EngineBoard:
    """The memory that the supervisor gave. Without one (by hand) nobody looks: one of our own."""
    fd = launch.board_fd
    if fd < 0:
        fd = create_board(executor.info.max_num_seqs)
    try:
        return EngineBoard(fd, launch.epoch, executor.info.pipeline_depth)
    finally:
        os.close(fd)  # it is mapped, and not for programs that the executor starts


def _recorder(server: ServerConfig, executor: Executor) -> Recorder | None:
    """Where to write down what is served; None where nothing is asked for, or it cannot be."""
    if server.record_path is None:
        return None
    try:
        recorder = Recorder(
            server.record_path,
            block_size=executor.info.block_size,
            max_bytes=server.record_max_bytes,
        )
    except OSError as error:
        # The command line has tried it: now there are requests to be served, also without.
        log.warning("nothing is recorded: %s", error)
        return None
    recorder.start()
    return recorder


def _engine(
    launch: EngineLaunch, executor: Executor, recorder: Recorder | None
) -> Engine | RecordingEngine:
    server = launch.server
    writer = _flight_writer(launch, executor)
    listener = None if writer is None else FlightListener(writer)
    if recorder is not None:
        return RecordingEngine(executor, server.scheduler, time.monotonic, recorder, listener)
    return Engine(executor, server.scheduler, time.monotonic, listener=listener)


def _cache_book(launch: EngineLaunch, engine: Engine | RecordingEngine) -> CacheBook | None:
    """What is cached, for gateways to follow; None where none is served, or it cannot be known."""
    if launch.server.facade == NO_FACADE or engine.ready_fd is not None:
        return None
    return engine.keep_cache_book()


def _policy(launch: EngineLaunch, engine: Engine | RecordingEngine) -> EnginePolicy | None:
    """What keeps the tenants' limits up to date; None where there is no policy."""
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
    """The flight recorder; None where there is no memory for it."""
    if launch.flight_fd < 0:
        return None
    server = launch.server
    facts = facts_of(server.model, launch.epoch, executor.info, server.scheduler)
    try:
        return FlightWriter(launch.flight_fd, facts)
    except (OSError, FlightError) as error:
        log.warning("there is no flight recorder: %s", error)
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


def _exit(code: int) -> NoReturn:
    # The kernel gives everything back faster than torch takes itself apart, and a library's
    # shutdown must not keep a dead engine's fronts waiting.
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
