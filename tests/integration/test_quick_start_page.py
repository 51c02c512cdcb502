from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from markdown_source import Block, blocks
from page_commands import commands
from support.pages import REPOSITORY
from support.service import Service, simulated, started
from support.timeout import TEST_TIMEOUT_S

PAGE = (REPOSITORY / "docs" / "quick-start.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:50051"
# The blocks that run here; the others need another program, a GPU or a terminal.
TYPED = [block for block in blocks(PAGE) if block.info.endswith(" test")]


async def typed(service: Service, words: list[str], text: str, folder: Path) -> str:
    """Run a program with the service's address in its environment and `text` as its input; return
    its output.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment["PENSTOCK_ADDRESS"] = service.address
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            out, err = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


def test_the_page_has_blocks_of_both_kinds() -> None:
    assert {block.language for block in TYPED} == {"sh", "python"}


async def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    async with started(*simulated()) as service:
        printed = {
            block.line: output
            for block in TYPED
            for output in [await run_block(service, block, tmp_path)]
        }

    assert all(output.strip() for output in printed.values())
    assert "SERVING" in "".join(printed.values())
    assert "num_completion_tokens=16" in "".join(printed.values())


async def run_block(service: Service, block: Block, folder: Path) -> str:
    if block.language == "python":
        assert ADDRESS in block.text
        text = block.text.replace(ADDRESS, service.address)
        return await typed(service, [sys.executable, "-W", "error", "-"], text, folder)
    program = [sys.executable, "-m", "penstock.tools"]
    lines = [command.words for command in commands(f"```sh\n{block.text}```\n")]
    assert {words[0] for words in lines} == {"penstock"}
    return "".join([await typed(service, [*program, *words[1:]], "", folder) for words in lines])
