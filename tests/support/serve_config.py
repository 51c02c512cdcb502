"""The configuration of `penstock serve` for given arguments and environment variables."""

from pathlib import Path

from penstock.server.cli.serve import build_config, merge_settings
from penstock.server.config import (
    EngineLaunch,
    FrontLaunch,
    ServerConfig,
    decode_launch,
    encode_launch,
)
from penstock.tools.command_line import build_parser


def serve_config(*words: object, **environment: str) -> ServerConfig:
    arguments = build_parser().parse_args(["serve", *map(str, words)])
    return build_config(merge_settings(vars(arguments), environment))


def check_launches(config: ServerConfig) -> None:
    """Check that encoding and decoding the launch messages does not change this configuration."""
    socket_path = Path("/s")
    engine = EngineLaunch(server=config, socket_path=socket_path, listener_fd=5, epoch=2)
    front = FrontLaunch(server=config, socket_path=socket_path, front_id=4, port=1)
    assert decode_launch(EngineLaunch, encode_launch(engine)) == engine
    assert decode_launch(FrontLaunch, encode_launch(front)) == front
