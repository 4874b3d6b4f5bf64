#!/usr/bin/env python3
"""Makes the folder `tuning` beside this script with transformers and PEFT: a small random Llama and a GPT-2 with a
tokenizer, data of both forms, and `expected.json`: what a plain loop of PyTorch makes of them, document by document,
in f32. Every step takes all of the data, so that the order of rows says nothing.

    python3 tests/golden/make_tuning.py

`check WRITTEN` lets transformers load a folder that `sherd train` left and says its loss on the validation part:

    python3 tests/golden/make_tuning.py check runs/1/tuned
"""

import json
import math
import pathlib
import shutil
import sys

import peft
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

HERE = pathlib.Path(__file__).parent / "tuning"
DESIGN = HERE.parents[2] / "docs" / "design.md"
CONTEXT, STEPS, LR, MIN_LR, WARMUP = 24, 6, 1e-2, 1e-3, 2
TOKENS = 300
QUESTIONS = [("What is a leaf?", " It decides where its gradient goes."), ("Who runs an op?", " apply does."),
             ("Wo liegt Grüße?", " Über dem Fluß, 世界 ✓"), ("2 + 2 =", " 4")]


def tokenizer(text):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|end|>", eos_token="<|end|>")


def write_models(tokens):
    size = dict(vocab_size=TOKENS, bos_token_id=0, eos_token_id=0)
    built = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=CONTEXT, **size)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(
            n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)),
    }
    for name, build in built.items():
        torch.manual_seed(1)
        build().save_pretrained(HERE / name)
        tokens.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
    torch.manual_seed(2)
    adapted = peft.get_peft_model(read("llama"), peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=24, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.add_(torch.randn(p.shape) * 0.1)
    adapted.peft_config["default"].base_model_name_or_path = "llama"  # no folder of this machine
    adapted.save_pretrained(HERE / "adapter")
    (HERE / "adapter" / "README.md").unlink(missing_ok=True)


def rows_of(data):
    """How many rows best-fit packing makes."""
    pieces = [min(CONTEXT, len(ids) - begin) for ids, _ in data for begin in range(0, len(ids), CONTEXT)]
    room = []
    for piece in sorted(pieces, reverse=True):
        fits = [r for r in room if r >= piece]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else CONTEXT) - piece)
    return len(room)


def write_data(tokens):
    """As much of it as makes rows for four ranks."""
    design = DESIGN.read_text()
    lines = [{"prompt": p, "completion": c} for p, c in QUESTIONS]
    lines += [{"text": part.strip(), "from": "design"} for part in design.split("\n\n")[3:9]]
    sizes = {"text.txt": lambda n: design[: 900 + n],
             "lines.jsonl": lambda n: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in
                                              [{"text": design[: 7 * n + 5]}] + lines)}
    for file, content in sizes.items():
        for n in range(400):
            (HERE / file).write_text(content(n))
            if rows_of(documents(tokens, file)[0]) % 4 == 0:
                break
        print(file, "makes", rows_of(documents(tokens, file)[0]), "rows")


def read(name):
    return AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32, attn_implementation="eager")


def documents(tokens, file):
    """Of training and of validation: ids, and how many of the first are given."""
    def ended(ids):
        return ids + [tokens.eos_token_id]
    if file == "text.txt":
        whole = (HERE / file).read_bytes()
        cut = len(whole) * 9 // 10
        while whole[cut] & 0xC0 == 0x80:
            cut -= 1
        return [[(ended(tokens.encode(part.decode())), 0)] for part in (whole[:cut], whole[cut:])]
    found = []
    for line in map(json.loads, (HERE / file).read_text().splitlines()):
        if "text" in line:
            found.append((ended(tokens.encode(line["text"])), 0))
            continue
        given, both = tokens.encode(line["prompt"]), ended(tokens.encode(line["prompt"] + line["completion"]))
        found.append((both, next(i for i in range(len(both)) if i == len(given) or given[i] != both[i])))
    held = len(found) // 10
    return found[: len(found) - held], found[len(found) - held:]


def summed_loss(model, data):
    """Of every piece of `CONTEXT` tokens alone, and the number of targets."""
    total, learnt = 0, 0
    for ids, prompt in data:
        for begin in range(0, len(ids), CONTEXT):
            piece = ids[begin: begin + CONTEXT]
            targets = [ids[i + 1] if i + 1 < len(ids) and i + 1 >= prompt else -100
                       for i in range(begin, begin + len(piece))]
            logits = model(torch.tensor([piece])).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum")
            learnt += sum(t != -100 for t in targets)
    return total, learnt


def rate(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def tune(model, train, validation):
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), weight_decay=0)
    losses = []
    for step in range(STEPS):
        total, learnt = summed_loss(model, train)
        loss = total / learnt
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1)
        for group in adam.param_groups:
            group["lr"] = rate(step)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        total, held = summed_loss(model, validation)
    return {"losses": losses, "validation": (total / held).item(), "learnt": learnt, "held": held,
            "tokens": sum(len(ids) for ids, _ in train)}


def make():
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    tokens = tokenizer(DESIGN.read_text())
    write_data(tokens)
    write_models(tokens)
    expected = {"context": CONTEXT, "lr": LR, "min-lr": MIN_LR, "warmup": WARMUP, "steps": STEPS}
    for file in ("text.txt", "lines.jsonl"):
        train, validation = documents(tokens, file)
        for name in ("llama", "gpt2", "adapter"):
            model = read("llama" if name == "adapter" else name)
            if name == "adapter":
                model = peft.PeftModel.from_pretrained(model, HERE / "adapter", is_trainable=True)
            expected[f"{name} {file}"] = tune(model, train, validation)
            print(name, file, expected[f"{name} {file}"])
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(sum(f.stat().st_size for f in HERE.rglob("*") if f.is_file()), "bytes")


def check(written):
    model, info = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    for file in ("text.txt", "lines.jsonl"):
        _, validation = documents(AutoTokenizer.from_pretrained(written), file)
        with torch.no_grad():
            total, held = summed_loss(model, validation)
        print(written, file, "validation", (total / held).item())


if __name__ == "__main__":
    print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else make()
