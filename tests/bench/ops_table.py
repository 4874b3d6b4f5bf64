#!/usr/bin/env python3
"""A table of every op: Sherd's time, PyTorch's, and the first divided by the second, in one run.

    python3 tests/bench/ops_table.py build/check/tests/bench/ops_bench [--threads 2] [--only NAME] [--above 1.1]

For each op the program and PyTorch run in turn, with the same shapes, and the least time of many calls counts. The rows
are sorted by the ratio; those above `--above` are counted at the end. Needs PyTorch; without it one line says so.
"""

import argparse
import json
import math
import subprocess
import sys
import time

try:
    import torch
    from torch.nn import functional as F
except ImportError:
    print("ops_table: PyTorch is not installed")
    sys.exit(0)


def least_us(call):
    for _ in range(3):
        call()
    least, start, i = 1e9, time.perf_counter(), 0
    while i < 7 or (time.perf_counter() - start < 0.06 and i < 20000):
        t = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - t)
        i += 1
    return least * 1e6


def normal(*shape, d):
    return torch.randn(shape).to(d)


def positive(*shape, d):
    return (torch.rand(shape) * 1.9 + 0.1).to(d)


def rows(n):
    return max(1, n // 256), min(n, 256)


def side(n):
    return math.isqrt(n)


def images(n):
    return max(1, n // (16 * 32 * 32)), 16, 32, 32


def one(n, d):
    return [normal(n, d=d)]


def one_positive(n, d):
    return [positive(n, d=d)]


def two(n, d):
    return [normal(n, d=d), normal(n, d=d)]


def two_positive(n, d):
    return [positive(n, d=d), positive(n, d=d)]


def table(n, d):
    return [normal(*rows(n), d=d)]


def square(n, d):
    return [normal(side(n), side(n), d=d)]


def square_pair(n, d):
    return square(n, d) + square(n, d)


def normalised(n, d):
    return [normal(*rows(n), d=d), normal(256, d=d), normal(256, d=d)]


def heads(n, d):
    t = 8 if n <= 1024 else 128
    shape = max(1, n // (4 * t * 32)), 4, t, 32
    return [normal(*shape, d=d) for _ in range(3)]


def classes(n, d):
    return [normal(*rows(n), d=d), torch.randint(0, 256, (rows(n)[0],))]


def picks(n, d):
    return [normal(*rows(n), d=d), torch.randint(0, rows(n)[0], (rows(n)[0],))]


def image(n, d):
    return [normal(*images(n), d=d)]


def line(n, d):
    return [normal(n, d=d), torch.randint(0, n, (n,)), normal(n, d=d)]


def square_at(n, d):
    s = side(n)
    return [normal(s, s, d=d), torch.randint(0, s, (s, s)), normal(s, s, d=d)]


def without_values(make):
    return lambda n, d: make(n, d)[:-1]


def masked(n, d):
    return [normal(n, d=d), torch.randn(n) > 0]


def mask_write(x, mask):
    x[mask] = 0
    return x


def channels(n, d):
    return [normal(*images(n), d=d), normal(16, d=d), normal(16, d=d)]


def convolution(c, k, groups):
    return lambda n, d: [normal(max(1, n // (c * 256)), c, 16, 16, d=d), normal(c, c // groups, k, k, d=d)]


def products(n, d):
    return [normal(*rows(n), d=d), normal(256, 256, d=d), normal(256, d=d)]


def batches(n, d):
    s = min(64, side(n))
    return [normal(max(1, n // 4096), s, s, d=d) for _ in range(2)]


def sequences(gates):
    def make(n, d):
        b = max(1, n // (64 * 128))
        return [normal(64, b, 128, d=d), normal(gates * 128, 128, d=d), normal(gates * 128, 128, d=d),
                normal(gates * 128, d=d), normal(gates * 128, d=d)]
    return make


def recurrent(layer, cells):
    def call(x, *weights):
        start = [torch.zeros(1, x.shape[1], 128, dtype=x.dtype)] * cells
        # Gradients need what only training keeps.
        return layer(x, start if cells > 1 else start[0], weights, True, 1, 0.0, torch.is_grad_enabled(), False,
                     False)[0]
    return call


OPS = {
    **{name: (one, getattr(torch, name)) for name in
       "neg abs exp sin cos tanh sigmoid erf relu square floor isfinite".split()},
    **{name: (one_positive, getattr(torch, name)) for name in "log log1p sqrt rsqrt reciprocal".split()},
    "silu": (one, F.silu),
    "gelu": (one, F.gelu),
    "gelu_tanh": (one, lambda x: F.gelu(x, approximate="tanh")),
    "leaky_relu": (one, F.leaky_relu),
    "clamp": (one, lambda x: x.clamp(-1, 1)),
    "pow2": (one, lambda x: x.pow(2)),
    "pow3": (one, lambda x: x.pow(3)),
    "pow_half": (one_positive, lambda x: x.pow(0.5)),
    "pow_tensor": (two_positive, torch.pow),
    "add": (two, torch.add),
    "sub": (two, torch.sub),
    "mul": (two, torch.mul),
    "div": (two_positive, torch.div),
    "maximum": (two, torch.maximum),
    "add_number": (one, lambda x: x + 2),
    "mul_number": (one, lambda x: x * 2),
    "add_row": (lambda n, d: [normal(*rows(n), d=d), normal(256, d=d)], torch.add),
    "add_column": (lambda n, d: [normal(*rows(n), d=d), normal(rows(n)[0], 1, d=d)], torch.add),
    "less": (two, torch.lt),
    "equal_number": (one, lambda x: x == 0),
    "where": (two, lambda a, b: torch.where(a > 0, a, b)),
    "masked_fill": (two, lambda a, b: a.masked_fill(b > 0, 0)),
    "to_other": (one, lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32)),
    "clone": (one, torch.clone),
    "transpose_copy": (square, lambda x: x.t().contiguous()),
    "cat": (table, lambda x: torch.cat([x, x], 1)),
    "flip": (table, lambda x: x.flip(1)),
    "roll": (table, lambda x: x.roll(3, 1)),
    "pad": (table, lambda x: F.pad(x, (1, 2))),
    "repeat": (table, lambda x: x.repeat(2, 1)),
    "tril": (square, torch.tril),
    "embedding": (picks, lambda x, i: F.embedding(i, x)),
    "index_select": (picks, lambda x, i: x.index_select(0, i)),
    "gather": (classes, lambda x, i: x.gather(1, i.unsqueeze(1))),
    "one_hot": (lambda n, d: [torch.randint(0, 16, (max(1, n // 16),))], lambda i: F.one_hot(i, 16)),
    "gather_line": (without_values(line), lambda x, i: x.gather(0, i)),
    "gather_axis0": (without_values(square_at), lambda x, i: x.gather(0, i)),
    "gather_axis1": (without_values(square_at), lambda x, i: x.gather(1, i)),
    "scatter_line": (line, lambda x, i, v: x.scatter(0, i, v)),
    "scatter_axis0": (square_at, lambda x, i, v: x.scatter(0, i, v)),
    "scatter_add_line": (line, lambda x, i, v: x.scatter_add(0, i, v)),
    "scatter_add_axis1": (square_at, lambda x, i, v: x.scatter_add(1, i, v)),
    "mask_read": (masked, torch.masked_select),
    "mask_write": (masked, mask_write),
    "multinomial": (lambda n, d: [positive(256, d=d), torch.ones(n)],
                    lambda p, like: torch.multinomial(p, len(like), replacement=True)),
    "topk": (table, lambda x: x.topk(8).values),
    "sort": (table, lambda x: x.sort().values),
    "argmax": (table, lambda x: x.argmax(1)),
    "max_axis": (table, lambda x: x.max(1).values),
    "sum_all": (one, torch.sum),
    "sum_rows": (table, lambda x: x.sum(1)),
    "sum_columns": (table, lambda x: x.sum(0)),
    "mean": (one, torch.mean),
    "amax": (table, lambda x: x.amax(1)),
    "var": (table, lambda x: x.var(1)),
    "std": (table, lambda x: x.std(1)),
    "norm": (one, torch.linalg.vector_norm),
    "prod": (lambda n, d: [positive(*rows(n), d=d)], lambda x: x.prod(1)),
    "cumsum": (table, lambda x: x.cumsum(1)),
    "logsumexp": (table, lambda x: x.logsumexp(1)),
    "any": (lambda n, d: [torch.randn(rows(n)) > 0], lambda x: x.any(1)),
    "amax_all": (one, torch.amax),
    "norm_1": (one, lambda x: torch.linalg.vector_norm(x, 1)),
    "prod_all": (lambda n, d: [(normal(n, d=d) * 1e-4 + 1)], torch.prod),
    "softmax": (table, lambda x: x.softmax(-1)),
    "log_softmax": (table, lambda x: x.log_softmax(-1)),
    "layer_norm": (normalised, lambda x, w, b: F.layer_norm(x, (x.shape[1],), w[: x.shape[1]], b[: x.shape[1]])),
    "rms_norm": (lambda n, d: normalised(n, d)[:2], lambda x, w: F.rms_norm(x, (x.shape[1],), w)),
    "group_norm": (channels, lambda x, w, b: F.group_norm(x, 4, w, b)),
    "dropout": (one, lambda x: F.dropout(x, 0.5)),
    "cross_entropy": (classes, F.cross_entropy),
    "nll_loss": (classes, F.nll_loss),
    "mse_loss": (two, F.mse_loss),
    "mse_loss_none": (two, lambda a, b: F.mse_loss(a, b, reduction="none")),
    "l1_loss": (two, F.l1_loss),
    "huber_loss": (two, F.huber_loss),
    "bce_with_logits": (lambda n, d: [normal(n, d=d), torch.rand(n).to(d)], F.binary_cross_entropy_with_logits),
    "matmul": (square_pair, torch.matmul),
    "matmul_batch": (batches, torch.matmul),
    "linear": (products, F.linear),
    "linear_gelu": (products, lambda x, w, b: F.gelu(F.linear(x, w, b))),
    "attention": (heads, F.scaled_dot_product_attention),
    "attention_causal": (heads, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "conv2d_3x3": (convolution(64, 3, 1), lambda x, w: F.conv2d(x, w, padding=1)),
    "conv2d_1x1": (convolution(64, 1, 1), F.conv2d),
    "conv2d_groups": (convolution(64, 3, 4), lambda x, w: F.conv2d(x, w, padding=1, groups=4)),
    "conv2d_depthwise": (convolution(64, 3, 64), lambda x, w: F.conv2d(x, w, padding=1, groups=64)),
    "conv2d_stride2": (convolution(64, 3, 1), lambda x, w: F.conv2d(x, w, stride=2, padding=1)),
    "lstm": (sequences(4), recurrent(torch.lstm, 2)),
    "gru": (sequences(3), recurrent(torch.gru, 1)),
    "rnn": (sequences(1), recurrent(torch.rnn_tanh, 1)),
    "max_pool2d": (image, lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": (image, lambda x: F.avg_pool2d(x, 2)),
    "batch_norm": (channels, lambda x, w, b: F.batch_norm(x, torch.zeros(16, dtype=x.dtype),
                                                          torch.ones(16, dtype=x.dtype), w, b, True)),
}


def torch_us(name, dtype, n, gradient):
    make, call = OPS[name]
    torch.manual_seed(0)
    inputs = make(n, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    with torch.no_grad():
        forward = least_us(lambda: call(*inputs))
        upstream = torch.ones_like(call(*inputs))
    if not gradient:
        return {"forward": forward}
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]
    return {"forward": forward, "both": least_us(lambda: torch.autograd.grad(
        call(*leaves), wanted, upstream, allow_unused=True))}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--only")
    arguments.add_argument("--above", type=float, default=1.1)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)

    def ours(*words):
        done = subprocess.run([given.program, "--threads", str(given.threads), *words], check=True, text=True,
                              stdout=subprocess.PIPE)
        return done.stdout.splitlines()

    names = [given.only] if given.only else ours("--list")
    missing = [name for name in names if name not in OPS]
    if missing:
        sys.exit(f"ops_table: no PyTorch form of {', '.join(missing)}; add it to OPS")
    found = []
    for name in names:
        for line in map(json.loads, ours("--only", name)):
            theirs = torch_us(name, line["dtype"], line["n"], "both" in line)
            found += [(line[what] / theirs[what], name, line["dtype"], line["n"], what, line[what], theirs[what])
                      for what in theirs]
    print(f"{'op':18}{'dtype':6}{'elements':>9}  {'what':8}{'Sherd us':>11}{'PyTorch us':>12}{'ratio':>8}")
    for ratio, name, dtype, n, what, mine, theirs in sorted(found, reverse=True):
        print(f"{name:18}{dtype:6}{n:9}  {what:8}{mine:11.2f}{theirs:12.2f}{ratio:8.2f}")
    above = sum(row[0] > given.above for row in found)
    middle = sorted(row[0] for row in found)[len(found) // 2]
    print(f"{len(found)} rows, {above} above {given.above}, the median ratio is {middle:.2f}")


if __name__ == "__main__":
    main()
