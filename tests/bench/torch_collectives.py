"""Calls between two processes over gloo, one thread each, the sizes of collectives_bench: one JSON line each, medians.

Start: python tests/bench/torch_collectives.py (needs PyTorch)."""
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def median_us(call, size):
    batch = max(1, min(200, (8 << 20) // max(size, 1)))
    times = []
    for _ in range(15):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times) * 1e6


def run(rank, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)

    def report(call, size, us):
        if rank == 0:
            print(json.dumps(dict(call=call, bytes=size, us=round(us, 2))), flush=True)

    report("barrier", 0, median_us(dist.barrier, 65536))
    for size in [4, 1024] + [4096 * 4**k for k in range(8)]:
        n = max(1, size // 4)
        full, shard = torch.rand(n), torch.rand(max(1, n // world))
        report("all_reduce", size, median_us(lambda: dist.all_reduce(full), size))
        if n >= world:
            report("all_gather", size, median_us(lambda: dist.all_gather_into_tensor(full, shard), size))
            report("reduce_scatter", size, median_us(lambda: dist.reduce_scatter_tensor(shard, full), size))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (2,), nprocs=2)
