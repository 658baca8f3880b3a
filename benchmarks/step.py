"""One process, one dense model of about 14M parameters: a training step of ours against its peers.

    python benchmarks/step.py                 both precisions, two threads
    python benchmarks/step.py --precision bf16 --rounds 20

Peers compute the same function from the same weights on the same data: a hand-written eager PyTorch loop, its
torch.compile twin, and the same model under Hugging Face accelerate. Rounds are interleaved (every variant once a
round), times are medians, ratios are medians of the rounds' ratios. The limit is what the step's matrix products
alone would take at the measured matmul ceiling.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lanewise import config
from lanewise.lanes.vote import Ballot
from lanewise.models.build import build
from lanewise.parallel.mesh import Mesh
from lanewise.replica import Replica

VOCAB, HIDDEN, LAYERS, HEADS, FFN, BATCH, LENGTH = 4096, 384, 6, 6, 1024, 8, 256
LR, CLIP = 1e-3, 1.0


# ------------------------------------------------------------------------------------------- the hand-written peer


class PlainNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.weight, 1e-6)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = PlainNorm(), PlainNorm()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = PlainNorm()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        d = HIDDEN // HEADS
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(0, d, 2) / d))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB).float(), labels.view(-1))


def plain_from(ours: nn.Module) -> PlainModel:
    """The peer's model with the weights of ours."""
    names = {
        "attention_norm": "norm1", "ffn_norm": "norm2", "attention.": "", "ffn.": "", "layers.": "blocks.",
    }  # fmt: skip
    state = {}
    for name, parameter in ours.named_parameters():
        for old, new in names.items():
            name = name.replace(old, new)  # noqa: PLW2901
        state[name] = parameter.detach().clone().float()
    model = PlainModel()
    model.load_state_dict(state)
    return model


# ------------------------------------------------------------------------------------------------------ the variants

Step = Callable[[Tensor, Tensor], float]


def plain_step(model: nn.Module, precision: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def step(tokens: Tensor, labels: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def accelerate_step(model: nn.Module, precision: str) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16" else "no")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = model(tokens, labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_run(precision: str, compiled: bool) -> config.Run:
    settings = [
        "model.preset=tiny-dense", f"model.vocab_size={VOCAB}", f"model.hidden={HIDDEN}", f"model.layers={LAYERS}",
        f"model.heads={HEADS}", f"model.kv_heads={HEADS}", f"model.ffn_hidden={FFN}", "batch.lanes=1",
        f"batch.size={BATCH}", f"batch.sequence_length={LENGTH}", f"train.precision={precision}",
        f"train.compile={str(compiled).lower()}", f"optimizer.clip={CLIP}", "optimizer.no_decay=[]",
    ]  # fmt: skip
    return config.load(None, settings)


def our_replica(run: config.Run) -> Replica:
    return Replica(run, build(run.model), Mesh.alone(torch.device("cpu")))


def our_step(replica: Replica) -> Step:
    """The trainer's step without its data, records and checkpoints."""
    updates = itertools.count()

    def step(tokens: Tensor, labels: Tensor) -> float:
        ballot = Ballot(1, torch.device("cpu"))
        replica.reducer.begin(0, 0)
        output = replica.model(tokens, labels)
        output.loss_sum.backward()
        replica.reducer.end()
        ballot.add(0, output.nll_sum, labels.numel(), output.expert_counts)
        verdict, chunks = replica.voter.vote(ballot, replica.reducer.finish(), stop=False)
        shrink = min(1.0, CLIP / (verdict.gradient_norm + 1e-6))
        replica.optimizer.step(chunks, verdict.tokens / shrink, LR, next(updates))
        return verdict.loss

    return step


def variants(precision: str) -> dict[str, Step]:
    replicas = {name: our_replica(our_run(precision, name == "ours, compiled")) for name in ("ours", "ours, compiled")}
    first = replicas["ours"].model
    return {
        "eager loop": plain_step(plain_from(first), precision),
        "torch.compile": plain_step(torch.compile(plain_from(first)), precision),
        "accelerate": accelerate_step(plain_from(first), precision),
        **{name: our_step(replica) for name, replica in replicas.items()},
    }


# ---------------------------------------------------------------------------------------------------- the measuring


def ceiling(precision: str) -> float:
    """Best measured matmul rate, in FLOP/s, at the model's own shapes."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    best = 0.0
    for n, k in ((HIDDEN, HIDDEN), (FFN, HIDDEN), (VOCAB, HIDDEN), (1024, 1024)):
        a, b = torch.randn(BATCH * LENGTH, k).to(dtype), torch.randn(n, k).to(dtype)
        for _ in range(10):
            start = time.perf_counter()
            F.linear(a, b)
            best = max(best, 2 * a.shape[0] * n * k / (time.perf_counter() - start))
    return best


def matmul_flops() -> float:
    """FLOPs of a step's matrix products: 6 per weight and token, and attention's two products (causal half)."""
    weights = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) + HIDDEN * VOCAB
    attention = LAYERS * 2 * LENGTH * HIDDEN / 2
    return 6 * BATCH * LENGTH * (weights + attention)


def measure(precision: str, rounds: int) -> None:
    steps = variants(precision)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses = {name: [step(tokens, labels) for _ in range(3)] for name, step in steps.items()}  # compiles, warms up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step(tokens, labels))
            times[name].append(time.perf_counter() - start)
    rate = ceiling(precision)
    limit = matmul_flops() / rate
    print(f"\n{precision}, {torch.get_num_threads()} threads, {rounds} interleaved rounds")
    print(f"matmul ceiling {rate / 1e9:,.0f} GFLOP/s: the products of a step alone take {limit * 1e3:.1f} ms")
    head = f"{'':16}{'ms/step':>9}{'tokens/s':>10}{'of ceiling':>12}{'x eager':>9}{'x compile':>11}{'last loss':>11}"
    print(head)
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        against = {
            peer: statistics.median(p / s for p, s in zip(times[peer], seconds, strict=True))
            for peer in ("eager loop", "torch.compile")
        }
        print(
            f"{name:16}{middle * 1e3:9.1f}{BATCH * LENGTH / middle:10,.0f}{limit / middle:12.0%}"
            f"{against['eager loop']:9.2f}{against['torch.compile']:11.2f}{losses[name][-1]:11.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="*", default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if len(arguments.precision) == 1:
        measure(arguments.precision[0], arguments.rounds)
        return
    for precision in arguments.precision:  # a process each: accelerate keeps one precision per process
        rest = ["--rounds", str(arguments.rounds), "--threads", str(arguments.threads)]
        subprocess.run([sys.executable, __file__, "--precision", precision, *rest], check=True)


if __name__ == "__main__":
    main()
