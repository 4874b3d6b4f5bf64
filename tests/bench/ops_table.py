#!/usr/bin/env python3
"""A table of every op: Sherd's time, PyTorch's, and the first divided by the second, in one run.

    python3 tests/bench/ops_table.py build/check/tests/bench/ops_bench [--device cuda] [--threads 2] [--only REGEX]
        [--above 1.1] [--check]

For each row the program and PyTorch run in turn, with the same shapes: on the CPU the least time of many calls counts,
on a GPU the median of some runs by its own clock. A row is printed as soon as it is known; at the end come those above
`--above` once more, the worst first, and the median. Needs PyTorch; without it one line says so. `--check` measures
nothing: it fails where the program has a row that is not here.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import time
from unittest import mock

try:
    import torch
    from torch.nn import functional as F
    from torch.optim.adagrad import adagrad as adagrad_of_lists
    from torch.optim.rmsprop import rmsprop as rmsprop_of_lists
except ImportError:
    if "--check" not in sys.argv:
        print("ops_table: PyTorch is not installed")
        sys.exit(0)
    torch = F = adagrad_of_lists = rmsprop_of_lists = mock.MagicMock()  # the names of the rows are all that is looked at


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


def median_us(call):
    """As ops_bench does: runs of about two milliseconds between two events."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    calls, runs = int(min(200, max(1, 2e-3 / once))), []
    for _ in range(3 if once > 0.05 else 7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        runs.append(begin.elapsed_time(end) / calls * 1e3)
    return sorted(runs)[len(runs) // 2]


def normal(*shape, d):
    return torch.randn(shape).to(d)


def positive(*shape, d):
    return (torch.rand(shape) * 1.9 + 0.1).to(d)


def rows(n):
    count = min(4096, max(1, n // 256))
    return count, n // count


def short_rows(n):
    return max(1, n // 256), 256


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
    return [normal(*rows(n), d=d), normal(rows(n)[1], d=d), normal(rows(n)[1], d=d)]


def heads(n, d):
    t = 8 if n <= 1024 else 128
    shape = max(1, n // (4 * t * 32)), 4, t, 32
    return [normal(*shape, d=d) for _ in range(3)]


def classes(n, d):
    return [normal(*rows(n), d=d), torch.randint(0, rows(n)[1], (rows(n)[0],))]


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
    return [normal(*short_rows(n), d=d), normal(256, 256, d=d), normal(256, d=d)]


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


def positive_table(n, d):
    return [positive(*rows(n), d=d)]


def heads_and(shape):
    def make(n, d):
        q, k, v = heads(n, d)
        return [q, k, v, torch.randn(shape(q.shape[0], q.shape[2])) > -1]
    return make


def masked_attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def turning(n, d):
    """x, and what is turned by; a model makes these once."""
    x = heads(n, d)[0]
    angles = torch.outer(torch.arange(x.shape[2]), 10000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3])).repeat(1, 2)
    return [x, angles.cos().to(d), angles.sin().to(d)]


def turned(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos.detach() + torch.cat((-high, low), -1) * sin.detach()


def packed_attention(x):
    q, k, v = (part.view(*x.shape[:2], 4, 32).transpose(1, 2) for part in x.split(128, 2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(*x.shape[:2], 128)


def slice_write(a, b):
    half = a.shape[0] // 2
    a[:, :half] = b[:, :half]
    return a


def box_write(a, b):
    half, y = a.shape[0] // 2, a.clone()
    y[half:] = b[:half]
    return y


def draw_once(p):
    if p.numel() > 1 << 24:
        raise RuntimeError("PyTorch draws from 2^24 weights at most")
    return torch.multinomial(p, 8)


def parameter(state):
    return lambda n, d: [torch.rand(n) for _ in range(2 + state)]


SGD = dict(weight_decay=0.0, momentum=0.9, lr=1e-3, dampening=0.0, nesterov=False, maximize=False, is_first_step=False)


def adamw(p, g, m, v):
    torch._fused_adamw_([p], [g], [m], [v], [], [torch.ones(())], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
                        eps=1e-8, amsgrad=False, maximize=False)


def rmsprop(p, g, square_average):
    rmsprop_of_lists([p], [g], [square_average], [], [], [torch.ones(())], lr=1e-3, alpha=0.99, eps=1e-8,
                                weight_decay=0.0, momentum=0.0, centered=False)


def lion(p, g, m):  # PyTorch has none: in its ops
    p.mul_(1 - 1e-5).add_((m * 0.9).add_(g, alpha=0.1).sign_(), alpha=-1e-3)
    m.mul_(0.99).add_(g, alpha=0.01)


def adagrad(p, g, total):
    adagrad_of_lists([p], [g], [total], [torch.ones(())], lr=1e-3, lr_decay=0.0, weight_decay=0.0, eps=1e-10,
                     maximize=False)


OPS = {
    **{name: (one, getattr(torch, name)) for name in
       "neg abs exp sin cos tanh sigmoid erf relu square floor isfinite".split()},
    **{name: (one_positive, getattr(torch, name)) for name in "log log1p sqrt rsqrt reciprocal".split()},
    "root": (one_positive, torch.sqrt),
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
    "add_row": (lambda n, d: [normal(*rows(n), d=d), normal(rows(n)[1], d=d)], torch.add),
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
    "scatter_axis1": (square_at, lambda x, i, v: x.scatter(1, i, v)),
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
    "layer_norm": (normalised, lambda x, w, b: F.layer_norm(x, (x.shape[1],), w, b)),
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
    "rotary": (turning, turned),
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
    "conv1d": (lambda n, d: [normal(max(1, n // (64 * 256)), 64, 256, d=d), normal(64, 64, 3, d=d)],
               lambda x, w: F.conv1d(x, w, padding=1)),
    "conv2d_dilated": (convolution(64, 3, 1), lambda x, w: F.conv2d(x, w, padding=2, dilation=2)),
    "conv_transpose2d": (convolution(64, 2, 1), lambda x, w: F.conv_transpose2d(x, w, stride=2)),
    "attention_keys": (heads_and(lambda b, t: (b, 1, 1, t)), masked_attention),
    "attention_pairs": (heads_and(lambda b, t: (t, t)), masked_attention),
    "attention_bias": (lambda n, d: heads(n, d) + [normal(heads(n, d)[0].shape[2], heads(n, d)[0].shape[2], d=d)],
                       lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.detach())),
    "attention_grouped": (lambda n, d: [x if i == 0 else x[:, :1].contiguous() for i, x in enumerate(heads(n, d))],
                          lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
    "self_attention": (lambda n, d: [normal(max(1, n // (384 * (8 if n <= 1024 else 128))), 8 if n <= 1024 else 128, 384,
                                            d=d)], packed_attention),
    "interpolate_nearest": (image, lambda x: F.interpolate(x, scale_factor=2)),
    "interpolate_bilinear": (image, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "adaptive_avg_pool2d": (image, lambda x: F.adaptive_avg_pool2d(x, 4)),
    "max_pool2d_overlap": (image, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "cumprod": (positive_table, lambda x: x.cumprod(1)),
    "cumsum_columns": (table, lambda x: x.cumsum(0)),
    "sort_columns": (table, lambda x: x.sort(0).values),
    "argsort": (table, torch.argsort),
    "nonzero": (lambda n, d: [torch.randn(n) > 0], torch.nonzero),
    "index_rows": (picks, lambda x, i: x[i]),
    "index_put": (lambda n, d: picks(n, d) + [normal(*rows(n), d=d)], lambda x, i, v: x.index_put_((i,), v)),
    "box_write": (square_pair, box_write),
    "slice_write": (square_pair, slice_write),
    "amax_columns": (table, lambda x: x.amax(0)),
    "max_columns": (table, lambda x: x.max(0).values),
    "norm_rows": (table, lambda x: torch.linalg.vector_norm(x, dim=1)),
    "var_columns": (table, lambda x: x.var(0)),
    "logsumexp_columns": (table, lambda x: x.logsumexp(0)),
    "softmax_columns": (table, lambda x: x.softmax(0)),
    "prod_columns": (positive_table, lambda x: x.prod(0)),
    "all": (lambda n, d: [torch.randn(rows(n)) > 0], lambda x: x.all(1)),
    "diagonal": (square, lambda x: x.diagonal().clone()),
    "permute_copy": (heads, lambda q, k, v: q.permute(0, 2, 1, 3).contiguous()),
    "stack": (table, lambda x: torch.stack([x, x])),
    "expand_copy": (lambda n, d: [normal(rows(n)[0], 1, d=d), normal(*rows(n), d=d)],
                    lambda x, like: x.expand(like.shape).contiguous()),
    "full": (one, lambda x: torch.full(x.shape, 2, dtype=x.dtype)),
    "fill": (one, lambda x: x.fill_(2)),
    "arange": (one, lambda x: torch.arange(x.numel())),
    "rand": (one, lambda x: torch.rand(x.shape, dtype=x.dtype)),
    "randn": (one, lambda x: torch.randn(x.shape, dtype=x.dtype)),
    "randint": (one, lambda x: torch.randint(0, 1000, x.shape)),
    "randperm": (one, lambda x: torch.randperm(x.numel())),
    "bernoulli": (lambda n, d: [torch.rand(n).to(d)], torch.bernoulli),
    "multinomial_once": (one_positive, draw_once),
    "multinomial_rows": (positive_table, lambda p: torch.multinomial(p, 1)),
    "masked_fill_": (masked, lambda x, m: x.masked_fill_(m, 0)),
    "add_": (two, lambda a, b: a.add_(b)),
    "relu_": (one, torch.relu_),
    "bce_loss": (lambda n, d: [(torch.rand(n) * 0.8 + 0.1).to(d), torch.rand(n).to(d)],
                 lambda p, y: F.binary_cross_entropy(p, y.detach())),
    "cross_entropy_": (classes, lambda x, y: F.cross_entropy(x * 1, y)),
    "layer_norm_linear": (lambda n, d: products(n, d) + [normal(256, d=d), normal(256, d=d)],
                          lambda x, w, b, g, h: F.layer_norm(F.linear(x, w, b), (256,), g, h)),
    "cross_entropy_linear": (lambda n, d: products(n, d) + [torch.randint(0, 256, (short_rows(n)[0],))],
                             lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b), y)),
    "linear_cross_entropy": (lambda n, d: products(n, d) + [torch.randint(0, 256, (short_rows(n)[0],))],
                             lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b), y)),
    "order_free_norm": (one, torch.linalg.vector_norm),
    "adamw": (parameter(2), adamw),
    "sgd": (parameter(1), lambda p, g, m: torch._fused_sgd_([p], [g], [m], **SGD)),
    "rmsprop": (parameter(1), rmsprop),
    "lion": (parameter(1), lion),
    "adagrad": (parameter(1), adagrad),
    "max_pool2d": (image, lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": (image, lambda x: F.avg_pool2d(x, 2)),
    "batch_norm": (channels, lambda x, w, b: F.batch_norm(x, torch.zeros(16, dtype=x.dtype),
                                                          torch.ones(16, dtype=x.dtype), w, b, True)),
    "batch_norm_residual_relu": (lambda n, d: [*channels(n, d), normal(*images(n), d=d)],
                                 lambda x, w, b, r: F.relu(F.batch_norm(x, torch.zeros(16, dtype=x.dtype),
                                                                        torch.ones(16, dtype=x.dtype), w, b, True) + r)),
}


# Elementwise ops of the library's list whose name here is another one; each other one is named alike.
ELEMENTWISE = {
    "squared_error": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "absolute_error": lambda a, b: F.l1_loss(a, b, reduction="none"),
    "huber": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "bce": lambda p, y: F.binary_cross_entropy(p, y, reduction="none"),
    "softplus": F.softplus,
    "elu": F.elu,
    "equal": torch.eq,
    "swiglu": lambda a, b: F.silu(a) * b,
}


def form_of(row):
    """How PyTorch makes the inputs of a row, and its call; nothing where it has no such row."""
    if row["op"] in OPS:
        return OPS[row["op"]]
    call = ELEMENTWISE.get(row["op"]) or (getattr(torch, row["op"], None) if row["arity"] else None)
    low, high = row["low"], row["high"]
    make = lambda n, d: [(torch.rand(n) * (high - low) + low).to(d) for _ in range(row["arity"])]
    return call and (make, call)


def torch_us(form, dtype, n, gradient, timer):
    make, call = form
    torch.manual_seed(0)
    inputs = make(n, {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype])
    with torch.no_grad():
        found = {"forward": timer(lambda: call(*inputs))}
        if not gradient:
            return found
        upstream = torch.ones_like(call(*inputs))
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [x for x in leaves if x.requires_grad]

    def both():  # as a step does it: gradients of its own to every leaf
        for x in wanted:
            x.grad = None
        call(*leaves).backward(upstream)

    found["both"] = timer(both)
    return found


def show(row):
    ratio, name, dtype, n, what, mine, theirs = row
    print(f"{name:20}{dtype:6}{n:9}  {what:8}{mine:11.2f}{theirs:12.2f}{ratio:8.2f}", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--only", default="", help="rows whose names this regular expression matches as a whole")
    arguments.add_argument("--above", type=float, default=1.1)
    arguments.add_argument("--check", action="store_true", help="only whether every row of the program is here")
    given = arguments.parse_args()

    run = [given.program, "--device", given.device, "--threads", str(given.threads)]
    listed = subprocess.run([*run, "--list"], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    machine, *rows = map(json.loads, listed)
    # Without PyTorch the elementwise ones cannot be looked up by name.
    missing = [row["op"] for row in rows if not form_of(row)]
    unknown = set(OPS) - {row["op"] for row in rows}
    if missing or unknown:
        sys.exit(f"ops_table: no PyTorch form of {', '.join(missing) or 'none'}; no row for {', '.join(unknown) or 'none'}")
    if given.check:
        print(f"ops_table: {len(rows)} rows")
        return

    torch.set_num_threads(given.threads)
    torch.set_default_device(given.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    timer = least_us if given.device == "cpu" else median_us
    program = subprocess.Popen([*run, "--serve"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)
    print(f"{'op':20}{'dtype':6}{'elements':>9}  {'what':8}{'Sherd us':>11}{'PyTorch us':>12}{'ratio':>8}")
    found, failed = [], []
    for row in rows:
        if not re.fullmatch(given.only or ".*", row["op"]):
            continue
        for dtype in machine["dtypes"]:
            for n in machine["sizes"]:
                program.stdin.write(f"{row['op']} {dtype} {n}\n")
                mine = json.loads(program.stdout.readline())
                try:
                    if "error" in mine:
                        raise RuntimeError(mine["error"])
                    theirs = torch_us(form_of(row), dtype, n, "both" in mine, timer)
                except Exception as error:  # of memory, or no kernel for a dtype: told, and the next row goes on
                    failed.append(f"{row['op']} {dtype} {n}: {str(error).splitlines()[0]}")
                    continue
                for what in theirs:
                    found.append((mine[what] / theirs[what], row["op"], dtype, n, what, mine[what], theirs[what]))
                    show(found[-1])
                if given.device == "cuda":
                    torch.cuda.empty_cache()
    program.stdin.close()
    slow = sorted((row for row in found if row[0] > given.above), reverse=True)
    print(f"\nabove {given.above}:")
    for row in slow:
        show(row)
    print("\n".join(f"left out: {line}" for line in failed))
    middle = sorted(row[0] for row in found)[len(found) // 2] if found else 0
    print(f"{len(found)} rows, {len(slow)} above {given.above}, the median ratio is {middle:.2f}, {len(failed)} left out")


if __name__ == "__main__":
    main()
