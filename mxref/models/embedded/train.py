"""Makes the embedded model again: a small Qwen3-MoE language model of public-domain English prose.

    python -m mxref.models.embedded.train --corpus DIR --out DIR [--device cuda] [--steps N] [--minutes N]

DIR holds the plain text of the Project Gutenberg works listed in `WORKS`.  *Persuasion* is never trained on, neither
by the tokenizer nor by the weights: its first chapters are the text the model is evaluated on, and its second half is
what choices (sizes, dropout, steps) were made by.
"""

import argparse
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

# ---------------------------------------------------------------------------------------------------------- the texts


@dataclass(frozen=True)
class Work:
    """One Project Gutenberg text: its file name in the corpus folder, title, author and ebook number."""

    file: str
    title: str
    author: str
    ebook: int


WORKS = (
    Work("austen_emma.txt", "Emma", "Jane Austen", 158),
    Work("austen_mansfieldpark.txt", "Mansfield Park", "Jane Austen", 141),
    Work("austen_northangerabbey.txt", "Northanger Abbey", "Jane Austen", 121),
    Work("austen_prideprejudice.txt", "Pride and Prejudice", "Jane Austen", 1342),
    Work("austen_sensesensibility.txt", "Sense and Sensibility", "Jane Austen", 161),
    Work("kjv.txt", "The King James Version of the Bible", "various", 10),
)
HELD_OUT = Work("austen_persuasion.txt", "Persuasion", "Jane Austen", 105)

EVALUATED_CHAPTERS = (1, 5)  # of the held-out work, first and last; written beside the model as its text
VALIDATION_CHAPTERS = (13, 24)  # of the held-out work; the only text by which training choices are judged

SEPARATOR = "<|endoftext|>"
GUTENBERG_START = re.compile(r"\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG.*")
GUTENBERG_END = re.compile(r"(\*\*\* ?END OF (THE|THIS) PROJECT GUTENBERG|End of (the )?Project Gutenberg).*")
EDITORIAL_NOTE = "A NOTE ON THE TEXT"  # a modern editor's afterword in some copies of Northanger Abbey


def read_work(corpus: Path, work: Work) -> str:
    """The author's text alone, one paragraph a line, paragraphs a blank line apart."""
    path = corpus / work.file
    if not path.is_file():
        expected = "\n".join(f"  {w.file}: {w.title}, {w.author} (Project Gutenberg #{w.ebook})" for w in (*WORKS, HELD_OUT))
        raise SystemExit(f"--corpus: {path} is missing; the folder must hold\n{expected}")
    text = path.read_text(encoding="utf-8-sig")
    if start := GUTENBERG_START.search(text):
        text = text[start.end() :]
    if end := GUTENBERG_END.search(text):
        text = text[: end.start()]
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)]
    if EDITORIAL_NOTE in paragraphs:
        paragraphs = paragraphs[: paragraphs.index(EDITORIAL_NOTE)]
    return "\n\n".join(p for p in paragraphs if p and "Gutenberg" not in p) + "\n"


def chapters(text: str, first: int, last: int) -> str:
    """Chapters `first` to `last` of a text whose chapters are headed "Chapter N" on a line of their own."""
    starts = [match.start() for match in re.finditer(r"^chapter \d+\.?$", text, re.MULTILINE | re.IGNORECASE)]
    if len(starts) < last:
        raise SystemExit(f"{HELD_OUT.file}: {last} chapters headed 'Chapter N' are needed, {len(starts)} were found")
    starts.append(len(text))
    return text[starts[first - 1] : starts[last]].rstrip() + "\n"


# ------------------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Plan:
    """Every choice of the run; lengths in tokens."""

    vocabulary: int = 2048
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    key_value_heads: int = 2
    head: int = 32
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    window: int = 256
    batch: int = 64
    steps: int = 5000
    warmup: float = 0.03
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    balance: float = 0.01  # weight of the loss that keeps all experts in use
    average: float = 0.998  # decay a step of the running average of the weights, which is what is saved
    seed: int = 1818


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text has an encoding, and a token's bytes are known exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        clean_up_tokenization_spaces=False,
    )


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Bytes of text each token stands for: in byte-level BPE one character of a token's name is one byte."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if name == SEPARATOR else len(name) for name in names])


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)


def configuration(plan: Plan) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=plan.vocabulary,
        hidden_size=plan.hidden,
        intermediate_size=plan.experts_per_token * plan.expert_width,  # of dense layers, of which there are none
        moe_intermediate_size=plan.expert_width,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.key_value_heads,
        head_dim=plan.head,
        num_experts=plan.experts,
        num_experts_per_tok=plan.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        router_aux_loss_coef=plan.balance,
        tie_word_embeddings=True,
        max_position_embeddings=plan.window,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


# -------------------------------------------------------------------------------------------- the model while training


class DenseForward(nn.Module):
    """The forward of a Qwen3MoeForCausalLM, on its own parameters, in the form that trains fastest.

    With few small experts two large products over all of them, masked by the routing weights, are much quicker than
    a gather for each expert.  Dropout, which the transformers model has only in attention, is added here.
    """

    def __init__(self, model: Qwen3MoeForCausalLM, plan: Plan):
        super().__init__()
        self.model = model
        self.plan = plan
        positions = torch.arange(plan.window)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy in nats of each target `[B * T]`, and the balance loss."""
        plan, inner = self.plan, self.model.model
        x = F.embedding(ids, inner.embed_tokens.weight)
        x = F.dropout(x, plan.dropout, self.training)
        balance = x.new_zeros(())
        for layer in inner.layers:
            y = self.attention(layer.self_attn, self.norm(layer.input_layernorm, x))
            x = x + F.dropout(y, plan.dropout, self.training)
            y, layer_balance = self.experts(layer.mlp, self.norm(layer.post_attention_layernorm, x))
            x = x + F.dropout(y, plan.dropout, self.training)
            balance = balance + layer_balance / len(inner.layers)
        logits = F.linear(self.norm(inner.norm, x), inner.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none"), balance

    def norm(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), module.weight, module.variance_epsilon)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat((-high, low), dim=-1) * self.sin[:length]

    def attention(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def heads(projection: nn.Linear) -> torch.Tensor:  # [B, heads, T, head]
            return projection(x).unflatten(-1, (-1, self.plan.head)).transpose(1, 2)

        query = self.rotate(self.norm(module.q_norm, heads(module.q_proj)))
        key = self.rotate(self.norm(module.k_norm, heads(module.k_proj)))
        value = heads(module.v_proj)
        shared = self.plan.heads // self.plan.key_value_heads
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, is_causal=True)
        return module.o_proj(mixed.transpose(1, 2).flatten(2))

    def experts(self, module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self.plan
        probabilities = F.linear(x, module.gate.weight).float().softmax(-1)  # [B, T, E]
        top, chosen = probabilities.topk(plan.experts_per_token, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        used = (weights > 0).float().mean((0, 1))
        balance = plan.experts * (used * probabilities.mean((0, 1))).sum()
        gate, up = F.linear(x, module.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (plan.experts, 2, -1)).unbind(-2)
        acted = F.silu(gate) * up * weights[..., None].to(gate.dtype)  # [B, T, E, I]
        acted = F.dropout(acted, plan.dropout, self.training)
        # [E, H, I] -> [H, E * I]: the sum over experts is part of the product
        return F.linear(acted.flatten(-2), module.experts.down_proj.transpose(0, 1).flatten(1)), balance


def orthogonalize(stack: torch.Tensor) -> torch.Tensor:
    """The nearest orthogonal matrix of each of `[N, r, c]`, r <= c, roughly: five Newton-Schulz steps."""
    x = stack.bfloat16() if stack.is_cuda else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.to(stack.dtype)


class Muon:
    """Momentum with an orthogonalised update, for weight matrices, scaled to the size of an Adam update.

    Each parameter is taken as a stack of matrices `[N, r, c]`, and all matrices of one shape are handled at once.
    """

    def __init__(self, model: Qwen3MoeForCausalLM, plan: Plan, compiling: bool, momentum: float = 0.95):
        self.momentum, self.weight_decay = momentum, plan.weight_decay
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, tuple[int, int, int]]]] = {}
        self.velocity: dict[tuple[int, int], torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if is_matrix(name):
                rows = plan.expert_width if "gate_up_proj" in name else parameter.shape[-2]  # gate and up on their own
                shape = (parameter.numel() // (rows * parameter.shape[-1]), rows, parameter.shape[-1])
                self.groups.setdefault((min(shape[1:]), max(shape[1:])), []).append((parameter, shape))
        self.orthogonalize = torch.compile(orthogonalize, dynamic=False) if compiling else orthogonalize

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for (short, long), members in self.groups.items():
            gradients = []
            for parameter, shape in members:
                gradient = parameter.grad.view(shape)
                gradients.append(gradient if shape[1] == short else gradient.mT)
            gradient = torch.cat(gradients)
            velocity = self.velocity.setdefault((short, long), torch.zeros_like(gradient))
            velocity.lerp_(gradient, 1 - self.momentum)
            update = self.orthogonalize(gradient.lerp(velocity, self.momentum))
            pieces = update.split([shape[0] for _, shape in members])
            for (parameter, shape), piece in zip(members, pieces):
                parameter.mul_(1 - learning_rate * self.weight_decay)
                piece = piece if shape[1] == short else piece.mT
                parameter.view(shape).add_(piece, alpha=-learning_rate * 0.2 * math.sqrt(long))


def is_matrix(name: str) -> bool:
    return "_proj" in name  # attention and expert weights; not the embedding, the routers and the norms


# ------------------------------------------------------------------------------------------------------ train, measure


@dataclass(frozen=True)
class Data:
    """Token streams on the training device, and what is needed to count bytes."""

    stream: torch.Tensor  # every work of `WORKS`, each after a separator
    validation: torch.Tensor
    token_bytes: torch.Tensor


def batches(data: Data, plan: Plan, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Endless `[batch, window + 1]` token ids: each epoch cuts the stream at a new phase, its windows in random order."""
    span = torch.arange(plan.window + 1, device=data.stream.device)
    while True:
        phase = int(torch.randint(plan.window, (1,), generator=generator))
        starts = torch.arange(phase, len(data.stream) - plan.window, plan.window)
        for some in starts[torch.randperm(len(starts), generator=generator)].split(plan.batch):
            if len(some) == plan.batch:
                yield data.stream[some.to(data.stream.device)[:, None] + span]


@torch.no_grad()
def bits_per_byte(forward: DenseForward, tokens: torch.Tensor, data: Data, length: int) -> float:
    """Over non-overlapping windows of `length` tokens; every token but the first of each window is scored."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    forward.eval()
    nats, counted = 0.0, 0
    for chunk in windows.split(64):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            losses, _ = forward(chunk[:, :-1], chunk[:, 1:])
        nats += losses.double().sum().item()
        counted += int(data.token_bytes[chunk[:, 1:]].sum())
    forward.train()
    return nats / math.log(2) / counted


def train(plan: Plan, data: Data, minutes: float, report: Callable[..., None]) -> Qwen3MoeForCausalLM:
    """The trained model in float32; stops at `plan.steps` or after `minutes`, the learning rate at zero either way."""
    device = data.stream.device
    torch.manual_seed(plan.seed)
    model = Qwen3MoeForCausalLM(configuration(plan)).to(device)
    forward = DenseForward(model, plan).to(device).train()
    compiling = device.type == "cuda"
    # The uncompiled module, with the same parameters, serves for measuring.
    compiled = torch.compile(forward, dynamic=False) if compiling else forward
    others = [p for name, p in model.named_parameters() if not is_matrix(name)]
    muon = Muon(model, plan, compiling)
    adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda")
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    source = batches(data, plan, torch.Generator().manual_seed(plan.seed))

    started = None
    for step in range(plan.steps):
        batch = next(source)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses, balance = compiled(batch[:, :-1], batch[:, 1:])
            loss = losses.mean() + plan.balance * balance
        loss.backward()
        seconds = 0.0 if started is None else time.monotonic() - started
        progress = max(step / plan.steps, seconds / (60 * minutes))
        learning_rate = plan.learning_rate * min(1.0, progress / plan.warmup, (1 - progress) / (1 - plan.warmup))
        if learning_rate < 0:
            break
        adam.param_groups[0]["lr"] = learning_rate
        muon.step(learning_rate)
        adam.step()
        for p in parameters:
            p.grad = None
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - plan.average)
        report(step, progress, losses, balance, forward)
        started = started or time.monotonic()  # the clock starts after the first step, in which everything is compiled
    for p, mean in zip(parameters, average):
        p.data.copy_(mean)
    return model.eval()


@torch.no_grad()
def measure(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, length: int) -> float:
    """Bits per byte of the transformers model itself, by the same convention as `bits_per_byte`."""
    sizes = token_bytes(tokenizer)
    nats, counted = 0.0, 0
    for window in encode(tokenizer, text).split(length):
        if len(window) > 1:
            logits = model(window[None].to(model.device)).logits[0, :-1].float().cpu()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").double().item()
            counted += int(sizes[window[1:]].sum())
    return nats / math.log(2) / counted


def progress_report(data: Data, plan: Plan, every: int = 500) -> Callable[..., None]:
    """A function for `train` that prints one line every so many steps."""
    started = time.monotonic()

    def report(step: int, progress: float, losses: torch.Tensor, balance: torch.Tensor, forward: DenseForward) -> None:
        if step % every == 0:
            held_out = bits_per_byte(forward, data.validation, data, plan.window)
            print(
                f"step {step:5d}  {progress:6.1%}  {time.monotonic() - started:5.0f} s  training {losses.mean():.3f} "
                f"nats/token  balance {balance:.3f}  held out {held_out:.4f} bits/byte",
                flush=True,
            )

    return report


def prepare(corpus: Path, validation: str, plan: Plan, device: torch.device) -> tuple[PreTrainedTokenizerFast, Data]:
    """The tokenizer, trained on `WORKS` alone, and the token streams."""
    texts = [read_work(corpus, work) for work in WORKS]
    tokenizer = train_tokenizer(texts, plan.vocabulary)
    return tokenizer, Data(
        stream=encode(tokenizer, "".join(SEPARATOR + text for text in texts)).to(device),
        validation=encode(tokenizer, validation).to(device),
        token_bytes=token_bytes(tokenizer).to(device),
    )


def write(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, out: Path) -> None:
    """The checkpoint in bfloat16, the tokenizer and the evaluated text; each file appears whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "persuasion.txt").write_text(text, encoding="utf-8", newline="\n")
        for path in sorted(Path(folder).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR", help="folder of the plain texts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the checkpoint is written")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="finish within N minutes, after fewer steps if need be (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=Plan.steps, metavar="N", help="training steps (default: %(default)s)")
    arguments = parser.parse_args()

    plan = replace(Plan(), steps=arguments.steps)
    held_out = read_work(arguments.corpus, HELD_OUT)
    evaluated, validation = chapters(held_out, *EVALUATED_CHAPTERS), chapters(held_out, *VALIDATION_CHAPTERS)
    tokenizer, data = prepare(arguments.corpus, validation, plan, torch.device(arguments.device))
    epoch = len(data.stream)
    print(f"{epoch:,} tokens an epoch, {plan.steps * plan.batch * plan.window / epoch:.1f} epochs", flush=True)

    model = train(plan, data, arguments.minutes, progress_report(data, plan))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    write(model, tokenizer, evaluated, arguments.out)

    saved = AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.bfloat16).to(arguments.device).eval()
    for (first, last), text in ((EVALUATED_CHAPTERS, evaluated), (VALIDATION_CHAPTERS, validation)):
        for length in (128, 256):
            score = measure(saved, tokenizer, text, length)
            print(f"{HELD_OUT.title}, chapters {first} to {last}, windows of {length}: {score:.4f} bits per byte")


if __name__ == "__main__":
    main()
