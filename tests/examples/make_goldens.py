#!/usr/bin/env python3
"""Makes the goldens beside this script: what the programs in examples/ print, by PyTorch.

    python3 tests/examples/make_goldens.py [NAME ...]

Each function here is an example's twin. It draws the same numbers, by the generator of runtime/random.h, so that first values
and data are those of the example. README.md describes the files. Needs PyTorch, NumPy and, for llama, transformers.
"""

import math
import pathlib
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HERE = pathlib.Path(__file__).parent
TAU = 2 * math.pi
LOW = np.uint64(0xFFFFFFFF)


# ---- the generator ---------------------------------------------------------------------------------------------------


def philox(seed, counters, stream=0):
    """Philox 4x32-10 (runtime/random.h): four words a counter."""
    half = np.uint64(32)
    counters = np.asarray(counters, dtype=np.uint64)
    c0, c1 = counters & LOW, counters >> half
    c2, c3 = (np.full_like(counters, word) for word in (stream & 0xFFFFFFFF, stream >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ np.uint64(k0), p1 & LOW, (p0 >> half) ^ c3 ^ np.uint64(k1), p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1)


class Generator:
    """A rank's generator after `manual_seed(seed)`; draws are in f32, and given in `dtype`."""

    def __init__(self, seed, dtype):
        self.seed, self.dtype, self.offset = seed, dtype, 0

    def words(self, count):
        steps = -(-count // 4)
        words = philox(self.seed, self.offset + np.arange(steps)).reshape(-1)
        self.offset += steps
        return words

    def given(self, values, shape):
        values = values.reshape(-1)[: math.prod(shape)].astype(np.float32)
        return torch.from_numpy(values.copy()).reshape(shape).to(self.dtype)

    def rand(self, *shape, low=0.0, high=1.0):
        u = (self.words(math.prod(shape)) >> np.uint64(8)) * 2.0**-24
        return self.given(u * np.float64(np.float32(high - low)) + np.float64(np.float32(low)), shape)

    def randn(self, *shape, deviation=1.0):
        u = ((self.words(math.prod(shape)) >> np.uint64(8)) * 2.0**-24).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log(1 - u[:, 0])), TAU * u[:, 1]
        return self.given(deviation * np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1), shape)

    def randint(self, low, high, *shape):
        words = self.words(math.prod(shape))[: math.prod(shape)]
        return torch.from_numpy((low + (words * np.uint64(high - low) >> np.uint64(32))).astype(np.int64)).reshape(shape)


SAMPLES = 0x73616D706C657273  # the stream of nn/batch_sampler.cpp


def below(words, n):
    return [int((int(w[0]) | int(w[1]) << 32) * n >> 64) for w in words]


def batch_sampler(items, batch, step):
    return below(philox(0, step * batch + np.arange(batch), SAMPLES), items)


def epoch_order(items, epoch):
    order = list(range(items))
    words = philox(0, np.arange(items), SAMPLES + 1 + epoch)
    for i in range(items - 1, 0, -1):
        j = below(words[i : i + 1], i + 1)[0]
        order[i], order[j] = order[j], order[i]
    return order


def begin(generator, module):
    """First values, drawn in the order of members; layers without random ones keep PyTorch's."""
    module.to(generator.dtype)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                bound = 1 / math.sqrt(layer.weight[0].numel())
            elif isinstance(layer, nn.GRU):
                bound = 1 / math.sqrt(layer.hidden_size)
            else:
                continue
            for p in layer.parameters():
                p.copy_(generator.rand(*p.shape, low=-bound, high=bound))
    return module


# ---- the examples ----------------------------------------------------------------------------------------------------


def convnet(dtype, say):
    class ConvNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
            self.norm1 = nn.BatchNorm2d(8)
            self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
            self.norm2 = nn.BatchNorm2d(16)
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            half = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
            return self.head(F.adaptive_avg_pool2d(F.relu(self.norm2(self.conv2(half))), 1).flatten(1))

    def stripes(count):
        labels = g.randint(0, 4, count)
        phase = g.rand(count, 1, 1, 1, high=TAU)
        noise = g.randn(count, 1, 16, 16)
        angle = (labels.to(dtype) * (math.pi / 4)).reshape(-1, 1, 1, 1)
        across = torch.arange(16, dtype=dtype)
        return (angle.cos() * across + angle.sin() * across[:, None] + phase).sin() + noise * 0.5, labels

    g = Generator(0, dtype)
    net = begin(g, ConvNet())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.3)
    for step in range(40):
        pixels, labels = stripes(32)
        loss = F.cross_entropy(net(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            say(f"loss.{step}", loss)
    net.eval()
    with torch.no_grad():
        pixels, labels = stripes(256)
        logits = net(pixels)
        say("test.loss", F.cross_entropy(logits, labels))
        say("test.accuracy", (logits.argmax(1) == labels).to(dtype).mean())


def vae(dtype, say):
    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.mean, self.log_variance = nn.Linear(64, 32), nn.Linear(32, 2), nn.Linear(32, 2)
            self.decoder = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 64))

        def forward(self, x):
            hidden = F.relu(self.encoder(x))
            m, v = self.mean(hidden), self.log_variance(hidden)
            return self.decoder(m + (v * 0.5).exp() * g.randn(*m.shape)), m, v

    def bars(count):
        place = g.randint(0, 8, count).reshape(-1, 1, 1)
        upright = g.rand(count, 1, 1) < 0.5
        column = torch.arange(8)
        return ((upright & (column == place)) | (~upright & (column[:, None] == place))).to(dtype).flatten(1)

    g = Generator(0, dtype)
    model = begin(g, Vae())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        x = bars(64)
        logits, m, v = model(x)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / 64
        loss = reconstruction + (v.exp() + m.square() - 1 - v).sum() * (0.5 / 64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            say(f"loss.{step}", loss)
    with torch.no_grad():
        say("samples.mean", model.decoder(g.randn(1000, 2)).sigmoid().mean())


def gan(dtype, say):
    def circle(count):
        angle, noise = g.rand(count, high=TAU), g.randn(count, 2)
        return torch.stack([angle.cos(), angle.sin()], 1) + noise * 0.05

    g = Generator(0, dtype)
    generator = begin(g, nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    discriminator = begin(g, nn.Sequential(
        nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optimizers = [torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.5, 0.999)) for net in (generator, discriminator)]
    yes, no = torch.ones(64, 1, dtype=dtype), torch.zeros(64, 1, dtype=dtype)
    judge = F.binary_cross_entropy_with_logits
    for step in range(200):
        real, made = circle(64), generator(g.randn(64, 4))
        against = judge(discriminator(real), yes) + judge(discriminator(made.detach()), no)
        optimizers[1].zero_grad()
        against.backward()
        optimizers[1].step()
        for_it = judge(discriminator(made), yes)
        optimizers[0].zero_grad()
        for_it.backward()
        optimizers[0].step()
        if step % 40 == 0:
            say(f"discriminator.{step}", against)
            say(f"generator.{step}", for_it)
    with torch.no_grad():
        radius = torch.linalg.vector_norm(generator(g.randn(1000, 4)), dim=1)
        say("radius.mean", radius.mean())
        say("radius.deviation", radius.std())


def gradient_penalty(dtype, say):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(1, 16, batch_first=True)
            self.score = nn.Linear(16, 1)

        def forward(self, x):
            return self.score(self.gru(x)[1][0]).squeeze(1)

    g = Generator(0, dtype)
    critic = begin(g, Critic())
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3)
    for step in range(40):
        phase = g.rand(16, 1, high=TAU)
        real = (torch.arange(12, dtype=dtype) * 0.5 + phase).sin().unsqueeze(-1)
        made = g.randn(16, 12, 1)
        distance = critic(real).mean() - critic(made).mean()
        t = g.rand(16, 1, 1)
        between = (t * real + (1 - t) * made).requires_grad_()
        slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
        penalty = (torch.linalg.vector_norm(slope, dim=(1, 2)) - 1).square().mean()
        optimizer.zero_grad()
        (10 * penalty - distance).backward()
        optimizer.step()
        if step % 10 == 9:
            say(f"distance.{step}", distance)
            say(f"penalty.{step}", penalty)


def llama(dtype, say):
    from transformers import LlamaConfig, LlamaForCausalLM

    text = b"Of all the sherds that lay about, one had a line of writing; of all the lines, one could be read. "
    context = 24
    g = Generator(0, dtype)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, attn_implementation="eager")).to(dtype)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    for p in matrices:
        g.words(p.numel())  # the layers' own first values, which the model's replace
    with torch.no_grad():
        for p in matrices:
            p.copy_(g.randn(*p.shape, deviation=0.02))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    warm_up, steps, high, low = 10, 120, 1e-2, 1e-3
    for step in range(steps):
        through = (step - warm_up) / (steps - warm_up)
        rate = high * (step + 1) / warm_up if step < warm_up else low + (high - low) * (1 + math.cos(math.pi * through)) / 2
        optimizer.param_groups[0]["lr"] = rate
        starts = batch_sampler(len(text) - context, 16, step)
        windows = torch.tensor([list(text[s : s + context + 1]) for s in starts])
        logits = model(windows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            say(f"loss.{step}", loss)
            say(f"norm.{step}", norm)
    prompt = torch.tensor([list(text[:12])])
    written = model.generate(prompt, max_new_tokens=context, do_sample=False, pad_token_id=0)[0, 12:]
    say("written", '"' + bytes(written.tolist()).decode() + '"')


def own_parts(dtype, say):
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p -= group["lr"] * (m * 0.9 + p.grad * 0.1).sign()
                    m.mul_(0.99).add_(p.grad * 0.01)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.ingoing, self.out, self.norm = nn.Linear(6, 16), nn.Linear(16, 6), nn.LayerNorm(16)

        def forward(self, x):
            return self.out(self.norm(self.ingoing(x)).cummax(1).values)

    g = Generator(0, dtype)
    net = begin(g, Net())
    optimizer = Lion(net.parameters(), 3e-3)
    x = g.randn(64, 6)
    y = x.cumsum(1)
    for step in range(100):
        loss = ((1 + (net(x) - y).square()).sqrt() - 1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            say(f"loss.{step}", loss)


def data(dtype, say):
    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            self.gap = nn.Parameter(torch.zeros(4))
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            whole, gaps = x.clone(), ~x.isfinite()
            whole[gaps] = self.gap.expand(x.shape)[gaps]
            return self.net(whole)[:, 0]

    torch.manual_seed(0)
    model = Regression()
    save_file(model.state_dict(), HERE / "pytorch.safetensors")
    model.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    rows = Generator(0, dtype).randn(200, 5)
    rows[:, -1] = rows[:, 0] * 2 - rows[:, 1] + rows[:, -1] * 0.1
    rows[::9, -1] = math.nan
    rows[1::5, 1] = math.nan
    rows[7, 1:3] += 50
    rows = rows[rows[..., -1].isfinite()]
    x, y = rows[:, :-1], rows[:, -1]
    x[x.abs() > 10] = math.nan
    say("rows", len(rows))
    say("known.sum", x[x.isfinite()].sum())

    def train(order):
        losses = []
        for samples in torch.tensor(order).split(32):
            loss = F.mse_loss(model(x[samples]), y[samples])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    for epoch in range(8):
        say(f"loss.{epoch}", train(epoch_order(len(rows), epoch)))
    order = epoch_order(len(rows), 8)
    train(order[:64])
    say("loss.last", train(order[64:]))
    say("gap.norm", model.gap.norm())


def labelled(seed, count, width, dtype):
    batch = Generator(seed, dtype).randn(count, width)
    return batch, batch[:, :4].argmax(1)


def part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def average(loss):
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 4)
        self.hidden = nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 32)])

    def forward(self, x):
        for layer in self.hidden:
            x = F.gelu(layer(x))
        return self.out(x)


class ShardedRun:
    def __init__(self, dtype, mesh):
        self.dtype, self.model = dtype, begin(Generator(0, dtype), Mlp())
        for layer in self.model.hidden:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, first, last, say):
        for step in range(first, last):
            x, y = labelled(100 + step, 32, 8, self.dtype)
            loss = F.cross_entropy(self.model(part(x)), part(y))
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).full_tensor()
            self.optimizer.step()
            whole = average(loss)
            if step % 5 == 4:
                say(f"loss.{step}", whole)
                say(f"norm.{step}", norm)


def sharded_begin(dtype, say, folder):
    run = ShardedRun(dtype, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    run.train(0, 10, say)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def sharded_go_on(dtype, say, folder):
    run = ShardedRun(dtype, init_device_mesh("cpu", (2,)))
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    run.train(10, 20, say)
    say("weights", run.model.out.weight.full_tensor().norm())


def sharded(dtype, say):
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(4, sharded_begin, dtype, say, folder)
        on_ranks(2, sharded_go_on, dtype, say, folder)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """All of it on one rank."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 4)
        self.own = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        best = self.gate(x).softmax(1).max(1)
        done = torch.stack([expert(x) for expert in self.own], 1)
        y = done[torch.arange(len(x)), best.indices]
        return self.out(x + y * best.values[:, None])


def experts(dtype, say):
    model = begin(Generator(0, dtype), Mixture())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        x, y = labelled(100 + step, 32, 8, dtype)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            say(f"loss.{step}", loss.detach())


def mixed_rank(dtype, say, skipped):
    """In f64 every recipe computes in that, and f16 leaves out the steps `skipped`; else in dtypes of its own."""
    full = dtype == f64
    for name, computed in ("bf16", bf16), ("f16", f16), ("masters", bf16):
        model = begin(Generator(0, dtype), nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)))
        if name == "masters":  # PyTorch's optimizers have none: f32 parameters that begin rounded
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.to(bf16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy() if full else MixedPrecisionPolicy(computed, f32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.5e6, enabled=name == "f16" and not full)
        for step in range(30):
            x, y = labelled(100 + step, 64, 16, dtype)
            logits = model(part(x.to(bf16).to(dtype) if name == "masters" else x))
            loss = F.cross_entropy(logits if full else logits.to(f32), part(y))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not (full and name == "f16" and step in skipped):
                scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < before:
                say("skipped", step)
            whole = average(loss)
            if step % 10 == 9:
                say(f"{name}.loss.{step}", whole)
        if name == "f16":
            say("f16.scale", 1.5e6 / 2 ** len(skipped) if full else scaler.get_scale())


def mixed_precision(dtype, say):
    lines = []
    on_ranks(4, mixed_rank, f32, lambda *line: lines.append(line), ())
    if dtype == f64:
        skipped = [step for name, step in lines if name == "skipped"]
        lines.clear()
        on_ranks(4, mixed_rank, f64, lambda *line: lines.append(line), skipped)
    for name, value in lines:
        if name != "skipped":
            say(name, value)


# ---- ranks, and the files --------------------------------------------------------------------------------------------


def one_rank(rank, count, body, dtype, told, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    lines = []
    body(dtype, lambda name, value: lines.append((name, number(value))), *args)
    if rank == 0:
        told.put(lines)
    dist.destroy_process_group()


def on_ranks(count, body, dtype, say, *args):
    """Runs `body` on processes; what the first says is said here."""
    told = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (count, body, dtype, told, folder + "/store", args), count)
    for name, value in told.get():
        say(name, value)


def number(value):
    return value.item() if isinstance(value, torch.Tensor) else value


def lines_of(example, dtype):
    lines = []
    example(dtype, lambda name, value: lines.append((name, number(value))))
    return lines


def write(example):
    """The numbers in f64, each with what it may be off: see README.md."""
    text, worst, recipe = [], 0.0, None
    for (name, right), (_, rounded) in zip(lines_of(example, f64), lines_of(example, f32), strict=True):
        if isinstance(right, str):
            assert right == rounded, (name, right, rounded)
            text.append(f"{name} {right}")
        else:
            if example is mixed_precision and name.split(".")[0] != recipe:
                worst, recipe = 0.0, name.split(".")[0]  # another training begins
            worst = max(worst, abs(rounded - right) / abs(right))
            text.append(f"{name} {right:.9g} {max(16 * worst, 32 * 2.0**-24):.2g}")
    (HERE / f"{example.__name__}.txt").write_text("\n".join(text) + "\n")


EXAMPLES = [convnet, llama, vae, gan, gradient_penalty, own_parts, sharded, experts, mixed_precision, data]

if __name__ == "__main__":
    torch.set_num_threads(1)
    for example in EXAMPLES:
        if not sys.argv[1:] or example.__name__ in sys.argv[1:]:
            write(example)
