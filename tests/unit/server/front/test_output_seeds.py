"""The seeds of a request's outputs: a replay of any of them needs the same numbers for ever."""

from __future__ import annotations

import pytest

from penstock.scheduler.request import SamplingParams
from penstock.server.front.config import FrontConfig
from penstock.server.front.generation import Generation, Sampling, TokenInput
from penstock.server.front.limits import Limits
from penstock.server.front.submission import (
    CallTimes,
    TokenisedPrompt,
    output_seed,
    submission_for,
)
from support.core import np_ids
from support.fronts import INFO
