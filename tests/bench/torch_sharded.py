"""Training steps of sharded models in two processes over gloo, one thread each, the models of shard_bench: one
JSON line each, medians. Plain, DDP and FSDP2.

Start: python tests/bench/torch_sharded.py (needs PyTorch)."""
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.out_proj(self.in_proj(x).relu()).relu()


def three_mlps():
    x = torch.rand(2, 16)
    return nn.Sequential(Mlp(), Mlp(), Mlp()), list, (x,), 1e-2


def transformer():
    model = nn.Transformer(32, 8, 2, 2, 128)
    return model, lambda m: [*m.encoder.layers, *m.decoder.layers], (torch.rand(20, 8, 32), torch.rand(10, 8, 32)), 1e-3


def prepare(how, model, groups):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in [*groups(model), model]:
            fully_shard(module, mesh=mesh)
    return model


def median_us(step, count):
    for _ in range(20):
        step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def run(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for what, make, count in (("three MLP(16), Adam", three_mlps, 200), ("Transformer(32), Adam", transformer, 50)):
        for how in ("plain", "ddp", "fsdp2"):
            torch.manual_seed(0)
            model, groups, inputs, rate = make()
            model = prepare(how, model, groups)
            optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=how != "fsdp2")

            def step():
                model(*inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            us = median_us(step, count)
            if rank == 0:
                print(json.dumps(dict(what=what, how=how, us=round(us, 1))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (2,), nprocs=2)
