"""The settings of `penstock serve`, one table: flag, environment variable, default, help.

Does not know what they mean together; `serve` puts them into the settings of the service.
"""

from penstock.server.cli.facade_options import FACADE_OPTIONS
from penstock.server.cli.flag_names import flag_names
from penstock.server.cli.life_options import LIFE_OPTIONS
from penstock.server.cli.observer_options import OBSERVER_OPTIONS
from penstock.server.cli.option import Option
from penstock.server.cli.quota_options import QUOTA_FLAGS, QUOTA_OPTIONS
from penstock.server.cli.replay_options import REPLAY_OPTIONS
from penstock.server.cli.resume_options import RESUME_OPTIONS
from penstock.server.cli.security_options import SECURITY_OPTIONS
from penstock.server.cli.transport_options import TRANSPORT_OPTIONS

OPTIONS = (
    Option(
        flag="model",
        parse=str,
        default="demo",
        help="model folder (Hugging Face layout), or demo for the one in the package",
    ),
    Option(
        flag="tokenizer",
        parse=str,
        default=None,
        metavar="FOLDER",
        help="Hugging Face folder with tokenizer and chat template (default: the model's)",
    ),
    Option(flag="model-name", parse=str, default=None, help="name that clients use"),
    Option(
        flag="model-aliases",
        parse=str,
        default=None,
        metavar="NAME,...",
        help="other names it answers to",
    ),
    Option(
        flag="executor",
        parse=str,
        default="torch",
        choices=("torch", "simulated", "trtllm"),
        help="what computes tokens",
    ),
    Option(flag="host", parse=str, default="127.0.0.1", help="address to listen on"),
    Option(flag="port", parse=int, default=50051, help="port to listen on, 0 for any free one"),
    Option(flag="fronts", parse=int, default=None, help="front processes (default: cores / 2)"),
    Option(
        flag="max-num-seqs",
        parse=int,
        default=None,
        help="requests that run at once (default: 64, on a GPU 256)",
    ),
    Option(
        flag="max-num-batched-tokens",
        parse=int,
        default=None,
        help="token budget of one step (default: 2048, on a GPU 4096)",
    ),
    Option(flag="max-seq-len", parse=int, default=None, help="prompt and output, in tokens"),
    Option(flag="max-num-waiting", parse=int, default=None, help="requests that may wait"),
    Option(
        flag="max-num-waiting-tokens",
        parse=int,
        default=None,
        help="prompt tokens that may wait, all requests together",
    ),
    Option(
        flag="max-num-waiting-per-tenant",
        parse=int,
        default=None,
        help="requests of one tenant that may wait (default: no bound of its own)",
    ),
    Option(
        flag="max-num-running-per-tenant",
        parse=int,
        default=None,
        help="requests of one tenant that may run at once (default: no bound of its own)",
    ),
    Option(
        flag="order",
        parse=str,
        default=None,
        choices=("fair", "fcfs"),
        help="who goes next: tenants by their share and the earliest deadline, or first come, first"
        " served (default: fair)",
    ),
    Option(
        flag="tenant-metadata-key",
        parse=str,
        default=None,
        metavar="KEY",
        help="metadata key that names the tenant of a call; only behind a proxy that sets it and"
        " removes it from what clients send (default: everybody is one tenant)",
    ),
    Option(
        flag="tenant-weights",
        parse=str,
        default=None,
        metavar="NAME=WEIGHT,...",
        help="shares of tenants, 1e-6 to 1e6; who is not named has 1",
    ),
    *QUOTA_OPTIONS,
    Option(
        flag="aging-s",
        parse=float,
        default=None,
        help="seconds after which a request that others passed counts as more urgent, inf for"
        " never (default: 30)",
    ),
    Option(
        flag="max-prefill-share",
        parse=float,
        default=None,
        help="share of a step's prefill that one prompt may take while others wait for some"
        " (default: 0.5)",
    ),
    Option(
        flag="target-itl-ms",
        parse=float,
        default=None,
        help="milliseconds between two tokens of a running request, which prefill must leave it"
        " (default: no target)",
    ),
    Option(
        flag="foresee-deadlines",
        parse=str,
        default=None,
        choices=("on", "off"),
        help="whether a request that cannot meet its deadline is refused before it passes"
        " (default: on)",
    ),
    Option(
        flag="min-deadline-chance",
        parse=float,
        default=None,
        help="smallest probability, 0 to below 1, of a whole answer before its deadline, by the"
        " lengths of earlier outputs: a request with less is rejected or given up; 0 judges by"
        " min_tokens alone (default: 0.1)",
    ),
    Option(
        flag="step-prices",
        parse=str,
        default=None,
        metavar="JSON|FILE",
        help="what a step costs here, four prices of 0 to 3600 seconds, as penstock simulate"
        " --calibrate-from prints it (default: learnt from the first steps)",
    ),
    Option(
        flag="admission-policy",
        parse=str,
        default=None,
        choices=("max_utilization", "guaranteed_no_evict"),
        help="when a waiting request may run",
    ),
    Option(
        flag="watermark",
        parse=float,
        default=None,
        help="share of the KV cache that admission under max_utilization leaves free",
    ),
    Option(
        flag="prefix-caching",
        parse=str,
        default=None,
        choices=("on", "off"),
        help="whether requests share the blocks of equal prefixes (default: on)",
    ),
    Option(
        flag="eviction",
        parse=str,
        default=None,
        choices=("hit_density", "lru"),
        help="which cached block makes room: the one likely to bring the fewest hits for its time,"
        " or the one used longest ago (default: hit_density)",
    ),
    Option(flag="block-size", parse=int, default=None, help="tokens per KV cache block"),
    Option(flag="num-blocks", parse=int, default=None, help="blocks in the KV cache"),
    Option(
        flag="kv-cache-mib",
        parse=int,
        default=None,
        help="KV cache size in MiB, where num-blocks is not given (default: 512; on a GPU what"
        " kv-memory-fraction gives)",
    ),
    Option(
        flag="kv-memory-fraction",
        parse=float,
        default=None,
        help="share of the GPU's memory beside weights and the largest step that the KV cache"
        " takes (default: 0.9)",
    ),
    Option(
        flag="dtype",
        parse=str,
        default=None,
        choices=("auto", "float32", "bfloat16", "float16"),
        help="number format of weights and KV cache",
    ),
    Option(
        flag="quantization",
        parse=str,
        default=None,
        choices=("none", "fp8", "int8"),
        help="number format of the layers' weights: fp8 and int8 on CUDA, int8 on a CPU with the"
        " fused path (default: none)",
    ),
    Option(
        flag="kv-cache-dtype",
        parse=str,
        default=None,
        choices=("auto", "fp8", "int8"),
        help="number format of the KV cache: fp8 on CUDA, int8 on a CPU with the fused path"
        " (default: auto, the model's)",
    ),
    Option(flag="device", parse=str, default=None, help="cpu, cuda or cuda:<index>"),
    Option(flag="threads", parse=int, default=None, help="threads that compute, on a CPU"),
    Option(flag="pipeline-depth", parse=int, default=None, help="steps in flight, 1 or 2"),
    Option(
        flag="default-max-tokens",
        parse=int,
        default=None,
        help="output tokens of a request that does not say (default: 256)",
    ),
    Option(
        flag="max-output-tokens",
        parse=int,
        default=None,
        help="most output tokens that a request may ask for",
    ),
    Option(
        flag="default-deadline-s",
        parse=float,
        default=None,
        help="deadline of a call that brings none (default: 600)",
    ),
    Option(
        flag="max-deadline-s",
        parse=float,
        default=None,
        help="longest deadline that is honoured (default: 3600)",
    ),
    Option(
        flag="max-text-bytes-per-tenant",
        parse=int,
        default=None,
        help="text that one tenant may have waiting to be tokenised at one front, in bytes"
        " (default: 8388608)",
    ),
    Option(
        flag="max-backlog-tokens",
        parse=int,
        default=None,
        help="output that a client may leave unread before it is cut (default: 4096)",
    ),
    Option(
        flag="max-reader-stall-s",
        parse=float,
        default=None,
        help="seconds that one write may be blocked before its reader is cut (default: 30)",
    ),
    *TRANSPORT_OPTIONS,
    *FACADE_OPTIONS,
    *LIFE_OPTIONS,
    *REPLAY_OPTIONS,
    *RESUME_OPTIONS,
    Option(
        flag="drain-grace-s",
        parse=float,
        default=None,
        help="seconds that streams may go on after the first signal (default: 30)",
    ),
    Option(
        flag="simulated-config",
        parse=str,
        default=None,
        metavar="JSON",
        help="settings of the simulated executor; executors/README.md lists the keys",
    ),
    Option(
        flag="trtllm-config",
        parse=str,
        default=None,
        metavar="JSON|FILE",
        help="settings of the trtllm executor: JSON, or a .json or .toml file;"
        " executors/README.md lists the keys",
    ),
    Option(
        flag="record",
        parse=str,
        default=None,
        metavar="DIR",
        help="write down steps and requests (lengths and times, no text) for penstock simulate",
    ),
    Option(
        flag="record-max-mib",
        parse=int,
        default=None,
        help="most MiB of each of the two recorded files (default: 256)",
    ),
    *OBSERVER_OPTIONS,
    *SECURITY_OPTIONS,
    Option(
        flag="session-ttl-s",
        parse=float,
        default=None,
        help="seconds after its last turn that a session's blocks are kept (default: 300)",
    ),
    Option(
        flag="session-retention-priority",
        parse=int,
        default=None,
        help="36 to 100, higher keeps blocks of sessions longer against requests with a retention"
        " of their own (default: 60)",
    ),
    Option(
        flag="max-session-share",
        parse=float,
        default=None,
        help="share of the KV cache that all sessions may keep (default: 0.5)",
    ),
    Option(
        flag="max-session-tokens",
        parse=int,
        default=None,
        help="tokens of one dialogue that its session may keep (default: 32768)",
    ),
    Option(
        flag="max-retention-share",
        parse=float,
        default=None,
        help="share of the KV cache that requests may keep above the default retention priority"
        " (default: 0.5)",
    ),
    Option(
        flag="max-tenant-retention-share",
        parse=float,
        default=None,
        help="the same of one tenant (default: 0.25)",
    ),
    Option(
        flag="max-retention-s",
        parse=float,
        default=None,
        help="longest time that such a retention lasts, seconds (default: 3600)",
    ),
    Option(
        flag="share-prefixes-across-tenants",
        parse=str,
        default=None,
        choices=("on", "off"),
        help="whether tenants share the blocks of equal prefixes (default: off)",
    ),
    Option(
        flag="log-level",
        parse=str,
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least level that is logged",
    ),
    Option(
        flag="log-format",
        parse=str,
        default="auto",
        choices=("auto", "short", "text", "json"),
        help="a line of the log: short text, text with process id and module, or one JSON object;"
        " auto: short where stderr is a terminal, text elsewhere",
    ),
    Option(
        flag="log-foreign-text",
        parse=str,
        default="off",
        choices=("on", "off"),
        help="whether the log has the words of exceptions of libraries, which may quote what"
        " clients sent",
    ),
)

_RENAMED = {
    "num_fronts": "fronts",
    "num_threads": "threads",
    "kv_cache_bytes": "kv-cache-mib",
    "record_max_bytes": "record-max-mib",
    "target_itl_s": "target-itl-ms",
    "slow_ttft_s": "trace-slow-ttft-s",
    "slow_s": "trace-slow-s",
    "num_steps": "flight-steps",
}
_FLAGS = {
    **{option.name: option.flag for option in OPTIONS if "-" in option.flag},
    **_RENAMED,
    **QUOTA_FLAGS,
}
told_by_flag = flag_names(_FLAGS, before=r"(?<![\w.'\"/-])", after=r"(?![\w./'\"-])")
