"""Trains the demo model: a small Llama that writes plays, with its own byte-level BPE tokenizer.

Runs the training loop, selects the checkpoint, and writes a Hugging Face folder.

Usage: python executors/training/train_demo_model.py --text plays.txt --out DIR --device cuda
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from play_corpus import (
    ASSISTANT_HEADING,
    BOS_ID,
    BOS_TOKEN,
    EOS_ID,
    EOS_TOKEN,
    USER_HEADING,
    EvaluationText,
    Mix,
    SequenceSampler,
    SubwordSampler,
    evaluation_text,
    parse_speeches,
    split_speeches,
    train_tokenizer,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

IGNORED = -100
EVALUATION_TOKENS = 1024
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
SAMPLE_PROMPTS = (
    "O gentle night,",
    "ROMEO:\n",
    f"{USER_HEADING}What news of the war, good sir?\n\n{ASSISTANT_HEADING}",
    "2+2=",
    "def main() -> int:\n    return 0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLine:
    """One line of the loss log. Losses are in nats; the training loss is the mean since the
    previous line. Time is in seconds since training began.
    """

    step: int
    train_per_token: float
    validation_per_token: float
    validation_per_char: float
    elapsed_s: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, required=True, help="plays, as NAME: and lines")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--start", type=Path, help="folder of a model to continue training from")
    parser.add_argument(
        "--start-share", type=float, default=0.0, help="of the weights of --start in the result"
    )
    parser.add_argument("--log", type=Path, help="JSON file for settings, losses and samples")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch-sequences", type=int, default=16)
    parser.add_argument("--sequence-tokens", type=int, default=1024)
    parser.add_argument(
        "--holdout", type=float, default=0.1, help="share for validation, at the end"
    )
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--mlp-size", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--bpe-dropout", type=float, default=0.15)
    parser.add_argument("--dropped-share", type=float, default=0.95, help="of documents")
    parser.add_argument(
        "--plain-after", type=float, default=0.85, help="this share of the steps, no BPE dropout"
    )
    parser.add_argument(
        "--other-prompts",
        type=float,
        default=0.0,
        help="share of sequences with prompts of other kinds",
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=4.0)
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument("--average-decay", type=float, default=0.998, help="of the weights")
    parser.add_argument("--evaluate-every", type=int, default=100)
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    if args.start:
        return LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.mlp_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden_size // args.heads,
        max_position_embeddings=args.sequence_tokens,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Add dropout after the embedding and before each residual sum; Llama has none.

    Uses hooks, so that the weights keep the names that they have in `LlamaForCausalLM`.
    """

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


class AveragedWeights:
    """Exponential moving average of a model's weights, held in a copy of the model."""

    def __init__(self, model: LlamaForCausalLM, *, decay: float) -> None:
        self.model = LlamaForCausalLM(model.config).eval()
        nn.Module.to(self.model, model.device)
        self.model.load_state_dict(model.state_dict())
        self._decay = decay
        self._num_updates = 0

    @torch.no_grad()
    def update(self, model: LlamaForCausalLM) -> None:
        self._num_updates += 1
        # The decay ramps up, so that the random initial weights do not stay in the average.
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        mine: list[Tensor] = list(self.model.parameters())
        theirs: list[Tensor] = list(model.parameters())
        torch._foreach_lerp_(mine, theirs, 1.0 - decay)


def loss_of(model: LlamaForCausalLM, ids: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the cross entropy in nats, mean or sum, of the next tokens of `ids` int64 [B, T].

    Begin tokens, padding and negative ids are excluded: `~id` is an input whose prediction does not
    count. Padding is `IGNORED`, at the right, so no real token attends to it.
    """
    inputs = torch.where(ids < 0, ~ids, ids)[:, :-1]
    targets = ids[:, 1:].masked_fill((ids[:, 1:] == BOS_ID) | (ids[:, 1:] < 0), IGNORED)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, text: EvaluationText) -> tuple[float, float]:
    """Return (nats per token, nats per character) of `text`."""
    total, num_tokens = 0.0, 0
    for start in range(0, len(text.documents), 8):
        documents = text.documents[start : start + 8]
        width = max(map(len, documents))
        ids = torch.tensor([row + [IGNORED] * (width - len(row)) for row in documents])
        total += loss_of(model, ids.to(model.device), reduction="sum").item()
        num_tokens += sum(len(row) - 1 for row in documents)
    return total / num_tokens, total / text.num_chars


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate: linear warm-up, then cosine decay to 2 % of the peak."""
    if step < args.warmup_steps:
        return float(args.learning_rate * (step + 1) / args.warmup_steps)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return float(args.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))))


def build_optimizer(model: LlamaForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    is_cuda = args.device.startswith("cuda")
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), fused=is_cuda)


class LossLog:
    """Evaluates the averaged weights during training, and keeps the best of them or, with
    `keeps_last`, the last.
    """

    def __init__(
        self, model: LlamaForCausalLM, validation: EvaluationText, *, keeps_last: bool
    ) -> None:
        self.lines: list[LossLine] = []
        self._model = model
        self._validation = validation
        self._keeps_last = keeps_last
        self._best = model.state_dict()
        self._began = time.perf_counter()

    def measure(self, *, step: int, train_per_token: float) -> None:
        per_token, per_char = evaluate(self._model, self._validation)
        line = LossLine(
            step=step,
            train_per_token=round(train_per_token, 4),
            validation_per_token=round(per_token, 4),
            validation_per_char=round(per_char, 4),
            elapsed_s=round(time.perf_counter() - self._began, 1),
        )
        if self._keeps_last or all(per_token < past.validation_per_token for past in self.lines):
            self._best = {name: w.clone() for name, w in self._model.state_dict().items()}
        self.lines.append(line)
        print(json.dumps(asdict(line)), flush=True)

    def restore_best(self) -> LlamaForCausalLM:
        self._model.load_state_dict(self._best)
        return self._model


def train(
    args: argparse.Namespace, sampler: SequenceSampler, validation: EvaluationText
) -> tuple[LlamaForCausalLM, list[LossLine]]:
    """Return a model with the averaged (EMA) weights, and the loss log.

    The weights are those of the evaluation with the lowest validation loss, or of the last one if
    `args.other_prompts` is above 0.
    """
    model = build_model(args).to(args.device)
    add_dropout(model, args.dropout)
    averaged = AveragedWeights(model, decay=args.average_decay)
    optimizer = build_optimizer(model, args)
    # If the training data contains other text, the loss on held-out plays is not a criterion for
    # selection.
    log = LossLog(averaged.model, validation, keeps_last=args.other_prompts > 0)
    recent = torch.zeros((), device=args.device)
    num_recent = 0
    model.train()
    for step in range(args.steps):
        if step == int(args.plain_after * args.steps):
            sampler.dropped_share = 0.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        batch = sampler.batch(
            num_sequences=args.batch_sequences, num_tokens=args.sequence_tokens + 1
        )
        loss = loss_of(model, torch.from_numpy(batch).to(args.device, non_blocking=True))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        averaged.update(model)
        recent += loss.detach()
        num_recent += 1
        if num_recent == args.evaluate_every or step + 1 == args.steps:
            log.measure(step=step + 1, train_per_token=recent.item() / num_recent)
            recent.zero_()
            num_recent = 0
    return log.restore_best(), log.lines


@torch.no_grad()
def mix_with_start(model: LlamaForCausalLM, start: LlamaForCausalLM, *, share: float) -> None:
    """Interpolate linearly between the trained weights and the weights of `start`, in place.

    `share`: the fraction of the weights of `start`. Interpolated weights have learnt the new data
    and forgotten little of the old (Wortsman et al., 2022).
    """
    ours: list[Tensor] = list(model.parameters())
    nn.Module.to(start, model.device)
    theirs: list[Tensor] = list(start.parameters())
    torch._foreach_lerp_(ours, theirs, share)


def write_folder(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder; keep an existing model card."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    model.save_pretrained(out)
    # Stored in half precision but computed in float32, so that a seed gives the same text in any
    # batch. On a CPU this is not slower for a model of this size.
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # The weights are written with owner-only permissions; a package needs them readable by all.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS_TOKEN,
        "chat_template": TEMPLATE_FILE.read_text(encoding="utf-8").rstrip("\n"),
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TOKEN,
        "model_max_length": model.config.max_position_embeddings,
        "pad_token": EOS_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(tokenizer_config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int = 300
) -> str:
    """Return a continuation of `prompt` sampled at temperature 0.8, with the end token if it was
    sampled.
    """
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    num_prompt_tokens = ids.shape[1]
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        token = torch.multinomial(torch.softmax(logits / 0.8, -1), 1)
        ids = torch.cat([ids, token[None]], 1)
        if int(token) == EOS_ID:
            break
    return tokenizer.decode(ids[0, num_prompt_tokens:].tolist(), skip_special_tokens=False)


def report(
    model: LlamaForCausalLM, tokenizer: Tokenizer, texts: dict[str, EvaluationText]
) -> dict[str, Any]:
    """Return the losses of the weights as shipped (rounded to bfloat16), and a few samples."""
    losses: dict[str, float] = {}
    for name, text in texts.items():
        per_token, per_char = evaluate(model, text)
        num_tokens = sum(len(ids) - 1 for ids in text.documents)
        losses[f"{name}_per_token"] = round(per_token, 4)
        losses[f"{name}_per_char"] = round(per_char, 4)
        losses[f"{name}_chars_per_token"] = round(text.num_chars / num_tokens, 3)
    samples = [
        {"prompt": prompt, "text": sample(model, tokenizer, prompt)} for prompt in SAMPLE_PROMPTS
    ]
    return {"losses": losses, "samples": samples}


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    generator = np.random.default_rng(args.seed)
    speeches = parse_speeches(args.text.read_text(encoding="utf-8"))
    training, held_out = split_speeches(speeches, holdout=args.holdout)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(training, vocab_size=args.vocab_size)
    subwords = SubwordSampler(tokenizer, drop_probability=args.bpe_dropout, generator=generator)
    sampler = SequenceSampler(
        training,
        subwords,
        mix=Mix(other_prompts=args.other_prompts),
        dropped_share=args.dropped_share,
        generator=generator,
    )
    validation = evaluation_text(held_out, tokenizer, max_tokens=EVALUATION_TOKENS)
    seen = evaluation_text(training[: len(held_out)], tokenizer, max_tokens=EVALUATION_TOKENS)
    model, log = train(args, sampler, validation)
    if args.start:
        mix_with_start(model, build_model(args), share=args.start_share)
    shipped = model.bfloat16()
    write_folder(shipped, tokenizer, args.out)
    outcome = report(shipped.float(), tokenizer, {"validation": validation, "training": seen})
    outcome["num_parameters"] = sum(p.numel() for p in model.parameters())
    outcome["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    outcome["log"] = [asdict(line) for line in log]
    print(json.dumps({k: outcome[k] for k in ("losses", "samples", "num_parameters")}, indent=2))
    if args.log:
        args.log.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
