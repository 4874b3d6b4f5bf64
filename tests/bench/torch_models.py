"""The steps of models_bench in PyTorch, eager and compiled: python3 torch_models.py [resnet] [unet] [vit] [lstm]
[transformer] [llama] [lora] [lora_f32]. Images are channels_last; adapters compute as PEFT's do."""
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

device, half = torch.device("cuda"), torch.bfloat16


class Bottleneck(nn.Module):
    def __init__(self, into, middle, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(into, middle, 1, bias=False)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(middle, 4 * middle, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(middle), nn.BatchNorm2d(middle), nn.BatchNorm2d(4 * middle)
        self.down = None
        if stride != 1 or into != 4 * middle:
            self.down = nn.Sequential(nn.Conv2d(into, 4 * middle, 1, stride, bias=False), nn.BatchNorm2d(4 * middle))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(y)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet50(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks, into = [], 64
        for middle, count in (64, 3), (128, 4), (256, 6), (512, 3):
            for i in range(count):
                blocks.append(Bottleneck(into, middle, 2 if i == 0 and middle > 64 else 1))
                into = 4 * middle
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(2048, 1000)

    def forward(self, x):
        y = self.blocks(F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, 1))
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class TwoConvs(nn.Sequential):
    def __init__(self, into, out):
        super().__init__(nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
                         nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 64, 128, 256, 512, 1024]
        self.down = nn.ModuleList(TwoConvs(a, b) for a, b in zip(widths, widths[1:]))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in (512, 256, 128, 64))
        self.up = nn.ModuleList(TwoConvs(2 * w, w) for w in (512, 256, 128, 64))
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x):
        levels = []
        for convs in self.down:
            x = convs(F.max_pool2d(x, 2) if levels else x)
            levels.append(x)
        levels.pop()
        for widen, up in zip(self.widen, self.up):
            x = up(torch.cat((levels.pop(), widen(x)), 1))
        return self.head(x)


class VitBlock(nn.Module):
    def __init__(self, width=768, heads=12):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VitB(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.blocks = nn.Sequential(*(VitBlock() for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat((self.first.expand(len(x), -1, -1), tokens), 1) + self.positions
        return self.head(self.norm(self.blocks(y))[:, 0])


class LstmModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(10000, 1024), nn.LSTM(1024, 1024, 2), nn.Linear(1024, 10000)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0])


class Transformer(nn.Transformer):
    def __init__(self):
        super().__init__(batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(256, dtype=half)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, source, target):
        return super().forward(source, target, tgt_mask=self.mask, tgt_is_causal=True)


class LlamaBlock(nn.Module):
    def __init__(self, width=2048, between=5632, heads=32, shared=4):
        super().__init__()
        self.heads, self.shared, self.each = heads, shared, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, n * self.each, bias=False)
                                          for n in (heads, shared, shared, heads))
        self.gate, self.up = nn.Linear(width, between, bias=False), nn.Linear(width, between, bias=False)
        self.down = nn.Linear(between, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(b, t, -1, self.each).transpose(1, 2) for p in (self.q, self.k, self.v))

        def turned(a):
            low, high = a.chunk(2, -1)
            return a * cos + torch.cat((-high, low), -1) * sin

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary=32000, width=2048, layers=22, length=2048):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks, self.norm = nn.ModuleList(LlamaBlock() for _ in range(layers)), nn.RMSNorm(width, 1e-6)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        turns = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
        self.register_buffer("cos", turns.cos().to(half), persistent=False)
        self.register_buffer("sin", turns.sin().to(half), persistent=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """As PEFT's `Linear` with an adapter: its products in its own dtype, the sum in the wider one."""

    def __init__(self, base, dtype, rank=16, alpha=32):
        super().__init__()
        self.base, self.scale, self.dtype = base.requires_grad_(False), alpha / rank, dtype
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        y = self.base(x)
        return (y + self.b(self.a(x.to(self.dtype))) * self.scale).to(y.dtype)


def with_adapters(dtype):
    def make():
        model = Llama().requires_grad_(False)
        for block in model.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, Adapted(layer, dtype))
        return model
    return make


def place(model):
    model = model.to(device, half)
    for layer in model.modules():
        if isinstance(layer, Adapted):
            layer.a.to(layer.dtype), layer.b.to(layer.dtype)
    return model


def images(*shape):
    return torch.randn(*shape, device=device, dtype=half).to(memory_format=torch.channels_last)


def classes(most, *shape):
    return torch.randint(0, most, shape, device=device)


def tokens():
    return classes(32000, 4, 2048), classes(32000, 4 * 2048)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def of_classes(logits, target):
    return F.cross_entropy(logits.flatten(0, -2).float(), target)


def of_squares(y):
    return y.float().square().mean()


# name: title, model, optimizer, batch, how many of it the model takes, loss of what it gives and the rest
MODELS = {
    "resnet": ("resnet50 256", ResNet50, momentum, lambda: (images(256, 3, 224, 224), classes(1000, 256)), 1, of_classes),
    "unet": ("unet 16", UNet, momentum, lambda: (images(16, 3, 256, 256),), 1, of_squares),
    "vit": ("vit_b_16 128", VitB, adamw, lambda: (images(128, 3, 224, 224), classes(1000, 128)), 1, of_classes),
    "lstm": ("lstm 128 x 64", LstmModel, adamw, lambda: (classes(10000, 128, 64), classes(10000, 128 * 64)), 1, of_classes),
    "transformer": ("transformer 64 x 256", Transformer, adamw,
                    lambda: tuple(torch.randn(64, 256, 512, device=device, dtype=half) for _ in range(2)), 2, of_squares),
    "llama": ("llama_1b 4 x 2048", Llama, adamw, tokens, 1, of_classes),
    "lora": ("lora_1b 4 x 2048", with_adapters(half), adamw, tokens, 1, of_classes),
    "lora_f32": ("lora_1b_f32 4 x 2048", with_adapters(torch.float32), adamw, tokens, 1, of_classes),
}


def report(what, step):
    """Milliseconds a step: the median of five runs of five, of which each ends with its loss on the host."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        step().item()
    runs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            last = step()
        loss = last.item()
        runs.append((time.perf_counter() - start) / 5 * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{what:24s} {sorted(runs)[2]:9.2f} ms {peak:7.1f} GiB   loss {loss:.3f}", flush=True)


def time_both_ways(title, make, optimizer_of, batch_of, taken, loss_of):
    model = place(make())
    if any(p.dim() == 4 for p in model.parameters()):
        model = model.to(memory_format=torch.channels_last)
    optimizer, batch = optimizer_of([p for p in model.parameters() if p.requires_grad]), batch_of()
    for how in "eager", "compiled":
        if how == "compiled" and make is LstmModel:
            continue  # its layers are one call of cuDNN's, which is not compiled
        run = torch.compile(model) if how == "compiled" else model

        def step():
            loss = loss_of(run(*batch[:taken]), *batch[taken:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        report(f"{title} {how}", step)
    torch._dynamo.reset()


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    for name in sys.argv[1:] or MODELS:
        time_both_ways(*MODELS[name])
        torch.cuda.empty_cache()
