"""The figures of cuda_bench in PyTorch: python3 torch_cuda.py [kernels] [tf32] [eager BATCH] [compile BATCH] [d48 BATCH] [parity FILE]

parity writes first weights and batches to FILE (safetensors) and the losses of 100 steps, in bf16 and in f32, to
FILE.losses; cuda_bench parity FILE trains the same."""
import json
import struct
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

device, half = torch.device("cuda"), torch.bfloat16
ROWS, VOCAB, LENGTH = 65536, 50304, 1024


def microseconds(body, calls=10):
    for _ in range(3):
        body()
    torch.cuda.synchronize()
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            body()
        torch.cuda.synchronize()
        runs.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(runs)[2]


def report(what, gigabytes, body, calls=10):
    us = microseconds(body, calls)
    print(f"{what:44s} {us:10.1f} us  {gigabytes / us * 1e3:7.2f} TB/s", flush=True)


def random(*shape):
    return torch.randn(*shape, device=device, dtype=half)


def both(what, gb_forward, gb_backward, forward, inputs, calls=10):
    inputs = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        report(what + " forward", gb_forward, lambda: forward(*inputs), calls)
    y = forward(*inputs)
    gy = torch.randn_like(y)
    report(what + " backward", gb_backward, lambda: torch.autograd.grad(y, inputs, gy, retain_graph=True), calls)


def attention(b, h, t, d):
    q, k, v = (random(b, h, t, d).requires_grad_() for _ in range(3))
    tera = 4 * b * h * t * t * d / 2 / 1e12
    with torch.no_grad():
        us = microseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    print(f"attention {b} {h} {t} {d} causal forward {us:10.1f} us {tera / us * 1e6:7.1f} TFLOP/s", flush=True)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    go = torch.randn_like(y)
    us = microseconds(lambda: torch.autograd.grad(y, (q, k, v), go, retain_graph=True))
    print(f"attention {b} {h} {t} {d} causal backward {us:10.1f} us {2.5 * tera / us * 1e6:7.1f} TFLOP/s", flush=True)


def kernels():
    x = random(1 << 29)
    report("copy 1 GB", 4 * (1 << 29) / 1e9, lambda: x.clone())
    for d in (768, 1600, 4096):
        gb = 2 * ROWS * d / 1e9
        both(f"layer_norm {d}", 2 * gb, 3 * gb, lambda x, w, b: F.layer_norm(x, (d,), w, b), [random(ROWS, d), random(d), random(d)])
        both(f"gelu {d}", 2 * gb, 3 * gb, F.gelu, [random(ROWS, d)])
    gb = 2 * ROWS * 1024 / 1e9
    both("softmax 1024", 2 * gb, 3 * gb, lambda x: F.softmax(x, -1), [random(ROWS, 1024)])
    target = torch.randint(0, VOCAB, (ROWS,), device=device)
    gb = 2 * ROWS * VOCAB / 1e9
    both("cross_entropy 50304", gb, 2 * gb, lambda x: F.cross_entropy(x, target), [random(ROWS, VOCAB)], 3)
    index = torch.randint(0, 50257, (ROWS,), device=device)
    gb = 2 * ROWS * 768 / 1e9
    both("embedding 768", 2 * gb, gb + 2 * VOCAB * 768 / 1e9, lambda t: F.embedding(index, t), [random(VOCAB, 768)])
    attention(64, 12, 1024, 64)
    attention(16, 25, 1024, 64)
    attention(4, 32, 2048, 128)
    p = torch.full((1 << 29,), 1e-3, device=device, requires_grad=True)
    p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW([p], fused=True)
    report("adamw 512 M", 28 * (1 << 29) / 1e9, optimizer.step, 3)


def precision(what, multiplications, a, b, f):
    magnitude = lambda t: (t.norm() / t.numel() ** 0.5).item()
    exact = f(a.double(), b.double())
    for name, allowed in (("highest", False), ("high", True)):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        off, unit = f(a, b).double() - exact, magnitude(exact)
        us = microseconds(lambda: f(a, b))
        print(f"{what:34s} {name:8s} off by {off.abs().max().item() / unit:.1e} at most, {magnitude(off) / unit:.1e} typically "
              f"{us:10.1f} us {2 * multiplications / us / 1e6:7.1f} TFLOP/s", flush=True)


@torch.no_grad()
def tf32(n=4096):
    single = lambda *shape: torch.randn(*shape, device=device)
    precision("matmul 4096 x 4096 x 4096", n**3, single(n, n), single(n, n), torch.matmul)
    precision("linear 1024 to 4096, 8192 rows", 8192 * 1024 * n, single(8192, 1024), single(n, 1024), F.linear)
    precision("conv2d 3x3, 64 channels, 32 x 56^2", 32 * 56 * 56 * 64 * 64 * 9, single(32, 64, 56, 56), single(64, 64, 3, 3),
              lambda x, w: F.conv2d(x, w, padding=1))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p.transpose(1, 2) for p in self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, layers=12, width=768, heads=12):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens, targets):
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln(x)).view(-1, VOCAB), targets.view(-1))


def step(batch, compiled, name="d12", **sizes):
    torch.set_float32_matmul_precision("high")
    torch.cuda.reset_peak_memory_stats()
    with device:
        model = Gpt(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model
    tokens, targets = (torch.randint(0, 50257, (batch, LENGTH), device=device) for _ in range(2))

    def once():
        with torch.autocast("cuda", half):
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    us = microseconds(once, 4)
    print(f"{name} step {'compiled' if compiled else 'eager'}, batch {batch}: {us / 1e3:.2f} ms, "
          f"{batch * LENGTH / us * 1e3:.1f} k tokens/s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GB", flush=True)


def write_safetensors(path, tensors):
    names = {torch.float32: "F32", torch.int64: "I64"}
    header, end = {}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": names[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            file.write(t.detach().cpu().contiguous().numpy().tobytes())


def parity(path, steps=100, batches=10, batch=8):
    """Words that follow one another by a fixed table four times in five, so that there is something to learn."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    with device:
        first = Gpt()
        for p in first.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.02)
        after = torch.randperm(50257)
        words = [torch.randint(0, 50257, (batches, batch))]
        for _ in range(LENGTH):
            words.append(torch.where(torch.rand(batches, batch) < 0.8, after[words[-1]], torch.randint(0, 50257, (batches, batch))))
        words = torch.stack(words, 2)
    weights = {name: p for name, p in first.state_dict().items() if name != "head.weight"}
    write_safetensors(path, {**weights, "words": words})
    columns = []
    for narrow in (True, False):
        model = Gpt().to(device)
        model.load_state_dict(first.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        losses = []
        for i in range(steps):
            w = words[i % batches]
            with torch.autocast("cuda", half, enabled=narrow):
                loss = model(w[:, :-1].contiguous(), w[:, 1:].contiguous())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        columns.append(torch.stack(losses).tolist())
    with open(path + ".losses", "w") as file:
        file.writelines(f"{a} {b}\n" for a, b in zip(*columns))


arguments = sys.argv[1:] if __name__ == "__main__" else []
while arguments:
    word = arguments.pop(0)
    if word == "kernels":
        kernels()
    elif word == "tf32":
        tf32()
    elif word == "parity":
        parity(arguments.pop(0))
    elif word == "d48":
        step(int(arguments.pop(0)), True, "d48", layers=48, width=1600, heads=25)
    else:
        step(int(arguments.pop(0)), word == "compile")
