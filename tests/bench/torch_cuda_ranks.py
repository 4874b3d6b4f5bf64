"""The figures of cuda_ranks_bench in PyTorch: FSDP2 over NCCL, one process a GPU.
torchrun --nproc-per-node N torch_cuda_ranks.py [calls] [small] [d12 BATCH] [d48 BATCH] [g67 BATCH]"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_cuda

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
SIZES = {"d12": (12, 768, 12, 1024), "d48": (48, 1600, 25, 1024), "g67": (32, 4096, 32, 2048)}


def say(text):
    if rank == 0:
        print(text, flush=True)


def time_of(body, calls):
    """Microseconds a call, and until the host is free again."""
    for _ in range(3):
        body()
    whole, host = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            body()
        host.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(whole)[2], sorted(host)[2]


def calls():
    say(f"{'bytes':>14} {'all_gather':>24} {'reduce_scatter':>24} {'all_reduce':>24}   us (host), bf16, {world} ranks")
    size = 4 << 10
    while size <= 1 << 30:
        part = size // 2 // world
        whole = torch.randn(part * world, device=device, dtype=torch.bfloat16)
        one = torch.randn(part, device=device, dtype=torch.bfloat16)
        count = min(max((1 << 30) // size, 4), 100)
        times = [
            time_of(lambda: dist.all_gather_into_tensor(whole, one), count),
            time_of(lambda: dist.reduce_scatter_tensor(one, whole), count),
            time_of(lambda: dist.all_reduce(whole, op=dist.ReduceOp.AVG), count),
        ]
        say(f"{size:14d}" + "".join(f" {us:13.1f} ({host:8.1f})" for us, host in times))
        size *= 4


def gpt(name, batch):
    layers, width, heads, length = SIZES[name]
    torch_cuda.LENGTH = length
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    with device:
        model = torch_cuda.Gpt(layers, width, heads)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    torch.manual_seed(100 + rank)
    tokens, targets = (torch.randint(0, 50257, (batch, length), device=device) for _ in range(2))

    def step():
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.cuda.reset_peak_memory_stats()
    us, host = time_of(step, 4)
    say(f"{name} step, batch {batch}, {world} ranks, FSDP2 compiled: {us / 1e3:.3f} ms (host {host / 1e3:.3f}), "
        f"{world * batch * length / us * 1e3:.1f} k tokens/s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return F.relu(self.down(F.relu(self.up(x))))


def small():
    mlps = nn.Sequential(Mlp(), Mlp(), Mlp())
    transformer = nn.Transformer(32, 8, 2, 2, 128, dropout=0.0)
    for what, model, groups, inputs in (
        ("three MLP(16)", mlps, list(mlps), (torch.randn(4, 16),)),
        ("Transformer(32)", transformer, [*transformer.encoder.layers, *transformer.decoder.layers],
         (torch.rand(20, 8, 32), torch.rand(10, 8, 32))),
    ):
        model.to(device)
        inputs = [x.to(device) for x in inputs]
        for module in [*groups, model]:
            fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step():
            model(*inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        us, host = time_of(step, 50)
        say(f"{what}, AdamW, {world} ranks, FSDP2: {us / 1e3:.3f} ms (host {host / 1e3:.3f})")


torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
words = sys.argv[1:]
while words:
    word = words.pop(0)
    if word == "calls":
        calls()
    elif word == "small":
        small()
    else:
        gpt(word, int(words.pop(0)))
dist.destroy_process_group()
