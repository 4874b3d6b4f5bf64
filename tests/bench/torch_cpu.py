#!/usr/bin/env python3
"""PyTorch's CPU figures for the shapes that the bench programs measure: one JSON line each, medians of repeats.

    python3 tests/bench/torch_cpu.py [--threads 2] [--only gpt,mlp,kernels] [--compile] [--data FILE]

Times are comparable only within one run on one machine: start this script and ours in turn. Every training step runs
in a process of its own, so that `peak_mb` is what it needed above the bare process (PyTorch imported, nothing built).
Without PyTorch the script says so in one line and ends with success.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    print(json.dumps({"what": "skipped", "reason": "PyTorch is not installed"}))
    sys.exit(0)

GPT_SHAPES = [  # width, heads, context, batch; four layers, 256 bytes
    (128, 4, 64, 12),
    (128, 4, 128, 16),
    (384, 6, 256, 16),
]
VOCAB = 256


def emit(what, **fields):
    print(json.dumps({"what": what, **fields}), flush=True)


def median(call, seconds=1.0, least=5, warm=3):
    """Median seconds of `call` over at least `least` repeats and `seconds` of them."""
    for _ in range(warm):
        call()
    took, end = [], time.perf_counter() + seconds
    while len(took) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def memory(key):
    """A line of /proc/self/status in MB: VmRSS is now, VmHWM the peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(key))


def mark_bare():
    """Resets the peak where the kernel allows it; the bare process's size in MB."""
    try:
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
    except OSError:
        pass
    return memory("VmRSS")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x):
        batch, time_steps, width = x.shape
        parts = self.qkv(x).view(batch, time_steps, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time_steps, width))

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.tok.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw_for(model, lr):
    """Weight decay on matrices only, as nanoGPT does."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def train_step(model, run, optimizer, tokens, targets):
    run(tokens, targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def gpt_step(shape, compiled):
    width, heads, context, batch = shape
    bare = mark_bare()
    torch.manual_seed(0)
    model = Gpt(4, heads, width, context, VOCAB)
    optimizer = adamw_for(model, 1e-3)
    run = torch.compile(model) if compiled else model
    tokens, targets = torch.randint(0, VOCAB, (2, batch, context)).unbind()
    took = median(lambda: train_step(model, run, optimizer, tokens, targets), seconds=6.0)
    emit("gpt_step", compiled=compiled, layers=4, width=width, heads=heads, context=context, batch=batch,
         ms=round(took * 1e3, 2), tokens_per_s=round(batch * context / took),
         peak_mb=round(memory("VmHWM") - bare, 1), bare_mb=round(bare, 1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return F.relu(self.down(F.relu(self.up(x))))


def mlp_step(fused, compiled):
    bare = mark_bare()
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp(), Mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    run = torch.compile(model) if compiled else model
    x = torch.rand(2, 16)

    def step():
        run(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    took = median(step, seconds=2.0)
    emit("mlp_step", compiled=compiled, fused_adam=fused, us=round(took * 1e6, 1),
         peak_mb=round(memory("VmHWM") - bare, 1), bare_mb=round(bare, 1))


def bench_small_adds():
    a, b = torch.rand(16), torch.rand(16)

    def adds():
        for _ in range(1000):
            a + b

    with torch.no_grad():
        emit("add16", grad=False, us=round(median(adds) * 1e3, 3))
    a.requires_grad_()
    emit("add16", grad=True, us=round(median(adds) * 1e3, 3))


def bench_matmul():
    with torch.no_grad():
        for n in (256, 512, 1024, 2048):
            for dtype in (torch.float32, torch.bfloat16):
                a, b = torch.rand(n, n).to(dtype), torch.rand(n, n).to(dtype)
                took = median(lambda: a @ b)
                emit("matmul", n=n, dtype=str(dtype).removeprefix("torch."), gflops=round(2 * n**3 / took / 1e9))


def bench_copy():
    a = torch.rand(1 << 24)
    emit("copy", bytes=a.nbytes, gb_per_s=round(2 * a.nbytes / median(a.clone) / 1e9, 1))


def grad_time(y, inputs, gy, seconds=0.5):
    return median(lambda: torch.autograd.grad(y, inputs, gy, retain_graph=True), seconds)


def bench_rows():
    for rows, width in ((4096, 128), (4096, 384), (4096, 1536)):
        x = torch.rand(rows, width, requires_grad=True)
        weight, bias = (torch.rand(width, requires_grad=True) for _ in range(2))
        ops = {
            "layer_norm": lambda: F.layer_norm(x, (width,), weight, bias),
            "gelu": lambda: F.gelu(x),
            "softmax": lambda: F.softmax(x, -1),
        }
        for name, op in ops.items():
            y = op()
            emit(name, rows=rows, width=width, forward_us=round(median(op, 0.5) * 1e6),
                 backward_us=round(grad_time(y, x, torch.rand_like(y)) * 1e6))


def bench_cross_entropy():
    for rows, vocab in ((4096, 256), (512, 50304)):
        x = torch.rand(rows, vocab, requires_grad=True)
        target = torch.randint(0, vocab, (rows,))
        took = median(lambda: torch.autograd.grad(F.cross_entropy(x, target), x))
        emit("cross_entropy", rows=rows, vocab=vocab, both_us=round(took * 1e6))


def bench_attention():
    """Counts the causal half only, and five products for the backward against two."""
    for shape in ((16, 4, 128, 32), (16, 6, 256, 64), (4, 12, 1024, 64)):
        q, k, v = (torch.rand(shape, requires_grad=True) for _ in range(3))
        op = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = op()
        flops = 2 * shape[0] * shape[1] * shape[2] ** 2 * shape[3]
        emit("attention", shape=shape, forward_gflops=round(flops / median(op) / 1e9),
             backward_gflops=round(2.5 * flops / grad_time(y, (q, k, v), torch.rand_like(y), 1.0) / 1e9))


def bench_adamw():
    params = [torch.rand(1 << 20, requires_grad=True) for _ in range(16)]
    for p in params:
        p.grad = torch.rand_like(p)
    optimizer = torch.optim.AdamW(params, fused=True)
    emit("adamw", elements=sum(p.numel() for p in params), ms=round(median(optimizer.step) * 1e3, 2))


def bench_kernels():
    for bench in (bench_small_adds, bench_matmul, bench_copy, bench_rows, bench_cross_entropy, bench_attention,
                  bench_adamw):
        bench()


def train_text(path, compiled):
    """nanoGPT's CPU setting on bytes: 2000 steps, then the loss over the whole last tenth of the file."""
    steps, warmup, context, batch = 2000, 100, 64, 12
    with open(path, "rb") as file:
        text = torch.tensor(list(file.read()))
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    bare = mark_bare()
    torch.manual_seed(1337)
    model = Gpt(4, 4, 128, context, VOCAB)
    optimizer = adamw_for(model, 1e-3)
    run = torch.compile(model) if compiled else model
    start = time.perf_counter()
    for step in range(steps):
        angle = math.pi * (step - warmup) / (steps - warmup)
        lr = 1e-3 * (step + 1) / warmup if step < warmup else 1e-4 + 0.45e-3 * (1 + math.cos(angle))
        for group in optimizer.param_groups:
            group["lr"] = lr
        windows = torch.stack([train[i : i + context + 1] for i in torch.randint(0, len(train) - context, (batch,))])
        train_step(model, run, optimizer, windows[:, :-1], windows[:, 1:])
    seconds = time.perf_counter() - start
    peak = memory("VmHWM") - bare
    windows = (len(held_out) - 1) // context
    tokens, targets = (held_out[i : i + windows * context].view(windows, context) for i in (0, 1))
    with torch.no_grad():
        pairs = zip(tokens.split(256), targets.split(256))
        loss = sum(model(x, y).item() * len(x) for x, y in pairs) / windows
    emit("train_text", compiled=compiled, steps=steps, seconds=round(seconds, 1), val_loss=round(loss, 4),
         tokens_per_s=round(steps * batch * context / seconds), peak_mb=round(peak, 1))


def cases(args):
    """Everything to measure: the name of a part, and the call that measures it."""
    compiled = [False, True] if args.compile else [False]
    for mode in compiled:
        for shape in GPT_SHAPES:
            yield "gpt", lambda shape=shape, mode=mode: gpt_step(shape, mode)
    for mode in compiled:
        for fused in (False, True):
            yield "mlp", lambda fused=fused, mode=mode: mlp_step(fused, mode)
    yield "kernels", bench_kernels
    if args.data:
        for mode in compiled:
            yield "train", lambda mode=mode: train_text(args.data, mode)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads inside an op (default 2)")
    parser.add_argument("--only", default="gpt,mlp,kernels,train", help="parts, separated by commas")
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    parser.add_argument("--data", help="a text file; with it the part `train` runs")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wanted = list(cases(args))
    if args.case is not None:
        return wanted[args.case][1]()
    emit("machine", torch=torch.__version__, threads=args.threads, cores=os.cpu_count())
    parts = args.only.split(",")
    for index, (part, _) in enumerate(wanted):
        if part in parts:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--case", str(index)], check=True)


if __name__ == "__main__":
    main()
