"""Imports and inspects the installed TensorRT-LLM.

Determines which arguments its functions have and which classes exist. Features of later releases
are detected by inspection, not by the version number.
"""

import inspect
import logging
import os
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

from penstock.conventions.extras import requires_extra
from penstock.executor.trtllm.api import Llm
from penstock.executor.unavailable import ExecutorUnavailable

logger = logging.getLogger(__name__)

RECORDED_RELEASE = "1.2"
"""The release (major and minor version) that this package was written for."""
MISSING = (
    f"the trtllm executor {requires_extra('trtllm', 'tensorrt_llm')}, or run in"
    " NVIDIA's release container, nvidia/tensorrt-llm/release, which has it with the libraries it"
    " was built for"
)

_JOB_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
# Variables that do not belong to a job: transport tuning, and the permission to run as root.
_KEPT = re.compile(
    r"OMPI_ALLOW_RUN_AS_ROOT.*|OMPI_MCA_(btl|coll|io|mtl|osc|pml)(_.*)?|PMIX_MCA_gds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The parts of the installed TensorRT-LLM that the executor uses.

    Attributes:
        generate_arguments: Parameter names of `LLM.generate_async`.
        llm_arguments: Names of the parameters of the LLM constructor.
        build: The LLM class of the PyTorch backend or, with `runs_engines`, of the TensorRT
            backend.
        honours_penalties: Whether the default sampler, TorchSampler, implements penalties.
        modules: The modules in which settings classes are looked up.
        runs_engines: Whether `build` runs engines that were built ahead of time.
    """

    version: str
    sampling_params: Callable[..., Any]
    request_error: type[Exception]
    guided_decoding_params: Callable[..., Any]
    lora_request: Callable[..., Any]
    retention_config: Callable[..., Any]
    token_range_retention_config: Callable[..., Any]
    generate_arguments: frozenset[str]
    llm_arguments: frozenset[str]
    build: Callable[..., Llm]
    honours_penalties: bool
    modules: tuple[ModuleType, ...] = ()
    runs_engines: bool = False

    @property
    def is_later(self) -> bool:
        """True if the installed release is later than RECORDED_RELEASE; False if its version cannot
        be parsed.
        """
        found = re.match(r"(\d+)\.(\d+)", self.version)
        line = tuple(map(int, RECORDED_RELEASE.split(".")))
        return found is not None and tuple(map(int, found.groups())) > line

    def named(self, name: str) -> Any:
        """Return the class with that name from `modules`. Raises ExecutorUnavailable if there is
        none.
        """
        for module in self.modules:
            if (found := getattr(module, name, None)) is not None:
                return found
        raise _lacks(self.version, name)


def load_package(*, is_engine: bool = False) -> Package:
    """Import TensorRT-LLM and inspect it; takes seconds and needs CUDA.

    `is_engine`: the model is an engine built ahead of time, so `build` and `llm_arguments` belong
    to the TensorRT backend.

    Before the import, the variables of an MPI job are removed from this process's environment, as
    NVIDIA's Triton backend does: the package starts its workers through MPI, and if this process
    runs under mpirun or a Slurm step, the workers would join that job and wait for it forever.

    Raises ExecutorUnavailable if the package is missing, cannot be loaded, or lacks a function or
    class that every known version has; with `is_engine`, also if it lacks the TensorRT backend.
    Logs a warning for a release other than RECORDED_RELEASE.
    """
    remove_mpi_variables(os.environ)
    # Later versions send usage reports to the vendor unless this variable is set.
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")
    try:
        root = import_module("tensorrt_llm")
        llmapi = import_module("tensorrt_llm.llmapi")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt_llm":
            raise ExecutorUnavailable(MISSING) from error
        raise _broken(error) from error
    except (ImportError, OSError) as error:
        # A library of CUDA, TensorRT or MPI is missing or has another version.
        raise _broken(error) from error
    version = str(getattr(root, "__version__", "of unknown version"))
    _warn_of_another_line(version)
    try:
        package = _inspect(root, llmapi, version)
        return _with_engine_backend(package, llmapi) if is_engine else package
    except AttributeError as error:
        raise _lacks(version, str(error.name)) from error


def remove_mpi_variables(environment: MutableMapping[str, str]) -> None:
    """Remove the variables of an MPI job from `environment`; variables that only tune MPI are
    kept.
    """
    for name in list(environment):
        if name.startswith(_JOB_PREFIXES) and not _KEPT.fullmatch(name):
            del environment[name]


def _inspect(root: ModuleType, llmapi: ModuleType, version: str) -> Package:
    llm_class: Any = root.LLM
    retention: Any = llmapi.KvCacheRetentionConfig
    lora_helper = _optional_module("tensorrt_llm.lora_helper")
    return Package(
        version=version,
        sampling_params=root.SamplingParams,
        request_error=llmapi.RequestError,
        guided_decoding_params=llmapi.GuidedDecodingParams,
        lora_request=llmapi.LoRARequest,
        retention_config=retention,
        token_range_retention_config=retention.TokenRangeRetentionConfig,
        generate_arguments=frozenset(inspect.signature(llm_class.generate_async).parameters)
        - {"self"},
        llm_arguments=_constructor_arguments(llm_class, llmapi.TorchLlmArgs),
        build=llm_class,
        honours_penalties=_default_sampler_has_penalties(),
        # LoraConfig is in lora_helper, in some versions in llmapi.
        modules=(llmapi, lora_helper) if lora_helper is not None else (llmapi,),
    )


def _with_engine_backend(package: Package, llmapi: ModuleType) -> Package:
    engine_class = _optional("tensorrt_llm._tensorrt_engine", "LLM")
    if engine_class is None:
        raise ExecutorUnavailable(
            f"tensorrt_llm {package.version} has no backend for engines built ahead"
            " (tensorrt_llm._tensorrt_engine): serve the Hugging Face model instead"
        )
    return replace(
        package,
        build=engine_class,
        llm_arguments=_constructor_arguments(engine_class, llmapi.TrtLlmArgs),
        runs_engines=True,
    )


def _constructor_arguments(llm_class: Any, model: Any) -> frozenset[str]:
    """Return the names of the constructor's parameters and of the fields of `model`, the pydantic
    class to which the constructor passes its other keyword arguments.
    """
    own = inspect.signature(llm_class).parameters.values()
    named = {item.name for item in own if item.kind is not item.VAR_KEYWORD}
    return frozenset(model.model_fields) | named


def _default_sampler_has_penalties() -> bool:
    # Nested in the class since NVIDIA PR #16485; earlier versions silently ignore penalties.
    sampler = _optional("tensorrt_llm._torch.pyexecutor.sampler", "TorchSampler")
    return hasattr(sampler, "PenaltyHandler")


def _optional(module: str, name: str) -> Any:
    return getattr(_optional_module(module), name, None)


def _optional_module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def _warn_of_another_line(version: str) -> None:
    if not re.match(rf"{re.escape(RECORDED_RELEASE)}(\D|$)", version):
        logger.warning(
            "tensorrt_llm is %s; the trtllm executor was written for release %s: run"
            " `penstock verify` before you rely on it",
            version,
            RECORDED_RELEASE,
        )


def _broken(error: Exception) -> ExecutorUnavailable:
    return ExecutorUnavailable(
        f"tensorrt_llm is installed but cannot be loaded: {error}; NVIDIA's release container,"
        " nvidia/tensorrt-llm/release, has the libraries it was built for"
    )


def _lacks(version: str, name: str) -> ExecutorUnavailable:
    return ExecutorUnavailable(
        f"tensorrt_llm {version} has no {name}; the trtllm executor was written for"
        f" release {RECORDED_RELEASE}"
    )
