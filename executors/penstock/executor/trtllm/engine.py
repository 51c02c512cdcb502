"""Creates the TensorRT-LLM engine (an `LLM` object), reads its limits, monitors it and shuts it
down.

Owns the thread with the asyncio event loop ("the loop") on which the engine is used, and determines
the order of start and shutdown.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from penstock.executor.config import ExecutorConfig
from penstock.executor.trtllm.api import Llm
from penstock.executor.trtllm.constraint_check import ConstraintCheck
from penstock.executor.trtllm.constraint_process import CheckProcesses, installed_checker
from penstock.executor.trtllm.limits import engine_info, probe_limits, try_adapter
from penstock.executor.trtllm.llm_args import llm_arguments
from penstock.executor.trtllm.loop_thread import LoopThread, in_worker
from penstock.executor.trtllm.model_kind import ModelFolder, recognise
from penstock.executor.trtllm.package import Package, load_package
from penstock.executor.trtllm.request_mapping import RequestMapping
from penstock.executor.trtllm.response_queue import ResponseQueue
from penstock.executor.trtllm.stats import EngineStats, StatsPoller
from penstock.executor.trtllm.streams import Streams, is_healthy
from penstock.executor.trtllm.submitted_request import SubmittedRequest
from penstock.scheduler.executor import ExecutorDied, ExecutorInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEALTH_INTERVAL_S = 1.0
_REPORT_INTERVAL_S = 30.0
_STOP_S = 5.0


class EngineHandle:
    """A running engine. `info`: its limits, reported by the engine and restricted by the settings.

    The constructor loads the model, which may take minutes. It raises the errors listed at
    `TrtllmExecutor`.
    """

    def __init__(self, config: ExecutorConfig, responses: ResponseQueue) -> None:
        if config.model_path is None:
            raise ValueError("model_path must be given for the trtllm executor")
        self._watch = config.trtllm.watch
        self._responses = responses
        folder = recognise(config.model_path)
        package = load_package(is_engine=folder.is_engine)
        build = _builder(config, folder, package)
        mapping = _mapping(config, folder, package)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_probing = True
        self._thread = LoopThread("trtllm loop")
        try:
            self._llm: Llm = self._thread.run(_build_within(build, self._watch.load_timeout_s))
        except BaseException:
            self._thread.stop(_STOP_S)
            raise
        try:
            self._thread.run(self._start(config, folder, package, mapping))
        except BaseException:
            # Release the loaded engine, including its processes.
            self.close()
            raise

    info: ExecutorInfo
    streams: Streams
    _checker: CheckProcesses | None = None

    def abort_and_submit(
        self, aborts: Sequence[SubmittedRequest], submits: Sequence[SubmittedRequest]
    ) -> None:
        """Schedule the aborts, then the submissions on the loop, without waiting for them."""
        self._thread.post(self.streams.abort_and_submit, aborts, submits)

    def close(self) -> None:
        """Abort all requests and shut the engine down; takes at most `watch.shutdown_timeout_s`
        plus about 10 s. Errors are only logged.
        """
        try:
            self._thread.run(self._shut_down(), self._watch.shutdown_timeout_s + _STOP_S)
        except TimeoutError:
            logger.exception("the engine did not shut down in %g s", self._watch.shutdown_timeout_s)
        except Exception:
            logger.exception("the engine failed to shut down")
        self._thread.stop(_STOP_S)

    async def _start(
        self,
        config: ExecutorConfig,
        folder: ModelFolder,
        package: Package,
        mapping: RequestMapping,
    ) -> None:
        """Start the background tasks, read the engine's limits and test the adapters.

        Sets `streams` and `info`.
        """
        self._first_stats: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._poller = poller = StatsPoller(
            self._llm, self._on_stats, lambda: self._is_probing or len(self.streams) > 0
        )
        if config.trtllm.guided_decoding_backend is not None:
            self._checker = installed_checker()
        self.streams = Streams(
            llm=self._llm,
            loop=asyncio.get_running_loop(),
            responses=self._responses,
            make_arguments=lambda submitted: mapping.arguments(submitted.spec, submitted.tokens),
            request_error=package.request_error,
            abort_timeout_s=self._watch.abort_timeout_s,
            on_submit=poller.on_submit,
            constraint_fault=(
                None if self._checker is None else ConstraintCheck(self._checker.fault).fault
            ),
        )
        self._tasks = [
            asyncio.ensure_future(self._guarded(self._poll_stats)),
            asyncio.ensure_future(self._guarded(self._watch_health)),
        ]
        limits = probe_limits(
            self._llm, mapping, self._first_stats, poller.on_submit, self._watch.limits_timeout_s
        )
        stats = await _await_unless_failed(limits, self._tasks)
        for adapter in config.trtllm.lora_config.adapters:
            trial = try_adapter(self._llm, mapping, adapter.name, self._watch.limits_timeout_s)
            await _await_unless_failed(trial, self._tasks)
        self._is_probing = False
        self.info = engine_info(config.trtllm, folder, package, stats)

    async def _guarded(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a background task; if it raises, record that the engine has died."""
        try:
            await run()
        except Exception as error:
            self._responses.fail(error)
            raise

    async def _poll_stats(self) -> None:
        try:
            await self._poller.run()
        except Exception:
            if not self._first_stats.done():
                raise
            # After the first statistics, only the page audit needs them, so a failure is not fatal.
            logger.exception("the engine's statistics cannot be read any more")

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if not is_healthy(self._llm):
                raise ExecutorDied("the engine reports that it is not healthy")

    def _on_stats(self, stats: EngineStats) -> None:
        self._responses.put_stats(stats, asyncio.get_running_loop())
        if not self._first_stats.done():
            self._first_stats.set_result(stats)

    async def _shut_down(self) -> None:
        self._poller.stop()
        if self._checker is not None:
            self._checker.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.streams.close()
        finally:
            await asyncio.wait_for(
                in_worker(self._end_engine, "trtllm shutdown"), self._watch.shutdown_timeout_s
            )

    def _end_engine(self) -> None:
        try:
            self._llm.shutdown()
        except Exception as error:
            # After the engine has died, `shutdown` raises the cause again and does not clean up.
            logger.warning(
                "the engine's shutdown raised %r; its processes are ended separately", error
            )
            session = getattr(self._llm, "mpi_session", None)
            if session is not None:
                session.shutdown()


async def _build_within(build: Callable[[], Llm], timeout_s: float) -> Llm:
    """Run `build` on a worker thread, log the time elapsed every 30 s, and return the result.
    Raises ExecutorDied after `timeout_s`.
    """
    began_s = time.monotonic()
    building = asyncio.ensure_future(in_worker(build, "trtllm build"))
    while True:
        left_s = timeout_s - (time.monotonic() - began_s)
        if left_s <= 0:
            building.cancel()
            raise ExecutorDied(f"the engine was not built within {timeout_s:g} s")
        await asyncio.wait([building], timeout=min(_REPORT_INTERVAL_S, left_s))
        if building.done():
            return building.result()
        logger.info("the engine is being built for %.0f s", time.monotonic() - began_s)


async def _await_unless_failed(
    wanted: Coroutine[Any, Any, T], tasks: Sequence["asyncio.Task[None]"]
) -> T:
    """Await `wanted` and return its result; if one of `tasks` fails first, cancel `wanted` and
    raise the error of that task.
    """
    waiting = asyncio.ensure_future(wanted)
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await asyncio.wait([waiting])
        for task in tasks:
            if task.done():
                task.result()
    return await waiting


def _builder(config: ExecutorConfig, folder: ModelFolder, package: Package) -> Callable[[], Llm]:
    """Check the settings against the installed version; return a function that creates the
    engine.
    """
    arguments = llm_arguments(config.trtllm, folder, package, tokenizer_path=config.tokenizer_path)
    return lambda: package.build(**arguments)


def _mapping(config: ExecutorConfig, folder: ModelFolder, package: Package) -> RequestMapping:
    """Create the request mapping. Called before the model is loaded, because it raises ValueError
    if the model has no vocabulary size or the installed version lacks an argument.
    """
    if folder.vocab_size is None:
        raise ValueError(f"{folder.path} has no vocabulary size")
    return RequestMapping(config.trtllm, package, folder.vocab_size)
