#!/usr/bin/env python3
"""The layers of fused_bench in PyTorch, eager and compiled: median microseconds forward, and forward and backward.
  tests/bench/torch_fused.py [--threads 2] [--rows 512] [--columns 1024] [--bf16] [--device cuda]"""
import argparse
import statistics
import time

import torch

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--threads", type=int, default=2)
options.add_argument("--rows", type=int, default=512)
options.add_argument("--columns", type=int, default=1024)
options.add_argument("--bf16", action="store_true")
options.add_argument("--device", default="cpu")
arguments = options.parse_args()
torch.set_default_device(arguments.device)
on_gpu = arguments.device != "cpu"
torch.set_num_threads(arguments.threads)
rows, columns = arguments.rows, arguments.columns
dtype = torch.bfloat16 if arguments.bf16 else torch.float32
gain = torch.randn(columns, dtype=dtype, requires_grad=True)
cosine, sine = torch.randn(rows, 1, 64, dtype=dtype), torch.randn(rows, 1, 64, dtype=dtype)


def chain(a, b):
    y = a
    for _ in range(4):
        y = torch.tanh((y * b + a) * 0.5)
    return y


def rms_norm(a, b):
    x = a.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(a.dtype) * gain


def swiglu(a, b):
    return a * torch.sigmoid(a) * b


def rotary(a, b):
    x = a.reshape(rows, columns // 64, 64)
    return x * cosine + torch.cat([-x[..., 32:], x[..., :32]], -1) * sine


def gelu(a, b):
    return a * 0.5 * (torch.tanh((a + a * a * a * 0.044715) * 0.79788456) + 1.0)


def time_of(call, warm=5, calls=60):
    times, each = [], 10 if on_gpu else 1
    for i in range(warm + calls):
        begin = time.perf_counter()
        for _ in range(each):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        if i >= warm:
            times.append((time.perf_counter() - begin) / each * 1e6)
    return statistics.median(times)


def measure(name, layer):
    a, b, upstream = (torch.randn(rows, columns, dtype=dtype) for _ in range(3))

    def times(call):
        with torch.no_grad():
            forward = time_of(lambda: call(a, b))

        def both():
            y = call(a, b)
            y.backward(upstream.reshape(y.shape))
            a.grad = b.grad = gain.grad = None

        for x in (a, b):
            x.requires_grad_(True)
        result = forward, time_of(both)
        for x in (a, b):
            x.requires_grad_(False)
        return result

    torch._dynamo.reset()
    eager, compiled = times(layer), times(torch.compile(layer))
    print(f"{name:12} | eager {eager[0]:8.1f} {eager[1]:8.1f} | compiled {compiled[0]:8.1f} {compiled[1]:8.1f}", flush=True)


for name, layer in (("chain of 16", chain), ("rms_norm", rms_norm), ("swiglu", swiglu), ("rotary", rotary),
                    ("gelu, tanh", gelu)):
    measure(name, layer)
