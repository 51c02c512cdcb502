"""What deploy/kubernetes/README.md and docs/balancing.md say is there and is so."""

from __future__ import annotations

import re
import shlex

import pytest

from penstock.client import Client, MultiplexConfig
from penstock.client.service_config import default_service_config
from penstock.server.front.config import TransportConfig
from penstock.server.observe.metrics.catalogue import CATALOGUE
from penstock.tools.command_line import build_parser
from support.kubernetes import COMPONENTS, FOLDER, OVERLAYS, build, settings_of

PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
BALANCING = (FOLDER.parents[1] / "docs" / "balancing.md").read_text(encoding="utf-8")


def test_the_page_lists_every_folder() -> None:
    (listing,) = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)
    listed = [line.split()[0].rstrip("/") for line in listing.splitlines()]
    folders = [f"components/{name}" for name in COMPONENTS]
    folders += [f"overlays/{name}" for name in OVERLAYS]
    assert sorted(listed) == sorted(["base", *folders])


def test_its_commands_name_what_there_is() -> None:
    for body in re.findall(r"^ *```sh\n(.*?)^ *```$", PAGE, re.M | re.S):
        for command in body.splitlines():
            program, *arguments = shlex.split(command.strip(), comments=True) or [""]
            if program == "penstock":
                build_parser().parse_args(arguments)
            for folder in re.findall(r"deploy/kubernetes/\S+", command):
                assert (FOLDER.parents[1] / folder / "kustomization.yaml").is_file()


@pytest.mark.parametrize("text", [PAGE, BALANCING], ids=["kubernetes", "balancing"])
def test_links_lead_somewhere_and_names_are_ours(text: str) -> None:
    folder = FOLDER if text is PAGE else FOLDER.parents[1] / "docs"
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (folder / target).exists(), target
    made = {"penstock_load_ratio", "penstock_queue_seconds"}
    ours = {spec.name for spec in CATALOGUE} | made
    assert set(re.findall(r"`(penstock_[a-z_]+)`", text)) <= ours


def test_figures_of_the_balancing_page() -> None:
    assert f"({TransportConfig().max_connection_age_s:,.0f} s, give or take" in BALANCING
    assert f"({MultiplexConfig().max_call_age_s:,.0f} s)" in BALANCING
    own = float(settings_of(build("base"))["PENSTOCK_MAX_CONNECTION_AGE_S"])
    assert f"`deploy/kubernetes` has {own:.0f} s" in BALANCING
    (shown,) = re.findall(r"^```json\n(.*?)\n```$", BALANCING, re.M | re.S)
    (name,) = re.findall(r'Client\("(dns:\S+?)"\)', BALANCING)
    assert shown == default_service_config(name)


async def test_the_balancing_pages_clients_can_be_made() -> None:
    (body,) = re.findall(r"^```python\n(.*?)^```$", BALANCING, re.M | re.S)
    for expression in re.findall(r"^(Client\(.*\))  #", body, re.M):
        client: Client = eval(expression, {"Client": Client})
        await client.close()
