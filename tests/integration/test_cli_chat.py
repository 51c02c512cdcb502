"""Runs `penstock chat` in a pipe and at a terminal, against a scripted server."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from support.cli_process import PROGRAM, Terminal, environment, penstock
from support.scripted_server import (
    ScriptedServer,
    ServedCall,
    error_info,
    send_hello,
    send_tokens_and_wait,
)
from support.timeout import TEST_TIMEOUT_S


async def test_chat_in_a_pipe_keeps_the_history(server: ScriptedServer) -> None:
    talk = "Hi\n\n/help\n/what\nAnd then?\n/reset\nAgain\n/quit\nnever sent\n"

    result = await penstock(server, "chat", "--system", "Be brief.", "--stats", stdin=talk)

    assert result.code == 0
    assert result.out == "Hello, world\n" * 3
    turns = [
        [(m.role, m.parts[0].text) for m in call.request.chat_prompt.messages]
        for call in server.requests
    ]
    system, first, answer = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello, world")
    assert turns == [
        [system, first],
        [system, first, answer, ("user", "And then?")],
        [system, ("user", "Again")],
    ]
    assert result.err.count("tokens/s") == 3
    assert "/what: no such command" in result.err
    assert "/help: no such command" not in result.err


async def test_chat_in_a_pipe_ends_with_the_first_failure(server: ScriptedServer) -> None:
    async def reject(call: ServedCall) -> None:
        await call.fail(grpc.StatusCode.INTERNAL, "oh", error_info("INTERNAL"))

    server.scripts.append(reject)

    result = await penstock(server, "chat", stdin="Hi\nAnd then?\n")

    assert result.code == 1
    assert "penstock chat: INTERNAL: oh" in result.err
    assert len(server.requests) == 1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
async def processes() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Provide a list for processes, which are killed at the end of the test."""
    processes: list[asyncio.subprocess.Process] = []
    yield processes
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def chat(
    server: ScriptedServer, terminal: Terminal, processes: list[asyncio.subprocess.Process]
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        "chat",
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env=environment(PENSTOCK_ADDRESS=server.address, TERM="dumb"),
    )
    processes.append(process)
    return process


async def expect_answer(terminal: Terminal, line: bytes, answer: bytes) -> None:
    await terminal.wait_for(b"> ")
    terminal.type(line + b"\n")
    await terminal.wait_for(answer)


async def test_chat_at_a_terminal_survives_ctrl_c_and_failures(
    server: ScriptedServer, terminal: Terminal, chat: asyncio.subprocess.Process
) -> None:
    async def reject(call: ServedCall) -> None:
        await call.fail(grpc.StatusCode.INTERNAL, "oh", error_info("INTERNAL"))

    server.scripts.extend([send_tokens_and_wait, reject, send_hello])
    await expect_answer(terminal, b"one", b"begun")
    chat.send_signal(signal.SIGINT)
    await terminal.wait_for(b"cancelled")
    await expect_answer(terminal, b"two", b"INTERNAL: oh")
    await expect_answer(terminal, b"three", b"Hello, world")
    await terminal.wait_for(b"> ")
    terminal.type(b"/quit\n")

    assert await asyncio.wait_for(chat.wait(), TEST_TIMEOUT_S) == 0
    await asyncio.wait_for(server.requests[0].cancelled.wait(), TEST_TIMEOUT_S)
    # What was cancelled or failed is not part of the conversation.
    assert [turn.parts[0].text for turn in server.requests[2].request.chat_prompt.messages] == [
        "three"
    ]


async def test_chat_at_a_terminal_shows_how_to_leave_a_full_context(
    server: ScriptedServer, terminal: Terminal, chat: asyncio.subprocess.Process
) -> None:
    async def reject(call: ServedCall) -> None:
        code = grpc.StatusCode.INVALID_ARGUMENT
        await call.fail(code, "513 tokens", error_info("PROMPT_TOO_LONG"))

    server.scripts.extend([reject, send_hello, reject])
    await terminal.wait_for(b"/reset clears the chat, /quit exits")
    # /reset is not suggested if there is no conversation to clear.
    await expect_answer(terminal, b"one", b"(PROMPT_TOO_LONG): 513 tokens\r\n")
    await expect_answer(terminal, b"two", b"Hello, world")
    await expect_answer(
        terminal, b"three", b"(PROMPT_TOO_LONG): 513 tokens; /reset clears the chat\r\n"
    )
    await terminal.wait_for(b"> ")
    terminal.type(b"/quit\n")

    assert await asyncio.wait_for(chat.wait(), TEST_TIMEOUT_S) == 0


async def test_chat_at_a_terminal_reports_an_absent_service_before_the_first_turn(
    terminal: Terminal, processes: list[asyncio.subprocess.Process]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        "chat",
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env=environment(PENSTOCK_ADDRESS="127.0.0.1:9", TERM="dumb"),
    )
    processes.append(process)

    await terminal.wait_for(b"penstock chat: no service at 127.0.0.1:9: is `penstock serve`")
    assert await asyncio.wait_for(process.wait(), TEST_TIMEOUT_S) == 3


async def test_chat_help_lists_its_commands(server: ScriptedServer) -> None:
    result = await penstock(server, "chat", "--help")

    lines = [line.split() for line in result.out.splitlines()]
    assert [line[0] for line in lines if line and line[0].startswith("/")] == ["/reset", "/quit"]


async def test_control_characters_are_not_printed_to_a_terminal(
    server: ScriptedServer, terminal: Terminal, processes: list[asyncio.subprocess.Process]
) -> None:
    async def attack(call: ServedCall) -> None:
        await call.accepted()
        await call.tokens("a\x1b[2Jb\x07c")
        await call.finished()

    server.scripts.append(attack)
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("generate", "Hi"),
        stdout=terminal.slave,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(PENSTOCK_ADDRESS=server.address),
    )
    processes.append(process)
    await terminal.wait_for("a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c".encode())
    await asyncio.wait_for(process.wait(), TEST_TIMEOUT_S)
