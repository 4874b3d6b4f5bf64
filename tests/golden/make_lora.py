#!/usr/bin/env python3
"""Makes the folders `lora/*` beside this script with PEFT: adapters of the models in `hugging_face` as
`save_pretrained` writes them, and beside each `expected.safetensors`, what PEFT computes with both in f32.

    python3 tests/golden/make_lora.py

`check FOLDER` lets PEFT load a folder of adapters that Sherd wrote and compares it with the one that it came from:

    python3 tests/golden/make_lora.py check WRITTEN llama
"""

import json
import pathlib
import shutil
import sys

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
# The name, the model in hugging_face, the adapter.
CASES = [
    ("llama", "llama_linear", dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"])),
    ("gpt2", "gpt2", dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)),
    ("all", "llama_linear", dict(r=2, lora_alpha=4, target_modules="all-linear")),
]


def base(name):
    return AutoModelForCausalLM.from_pretrained(HERE / "hugging_face" / name, dtype=torch.float32,
                                                attn_implementation="eager")


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def plain(name):
    """As in the file."""
    return name.replace(".default", "")


def expected(model, tokens):
    logits = model(tokens).logits
    loss_of(logits, tokens).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = {"grad." + plain(n): p.grad.clone() for n, p in trained.items()}
    torch.optim.SGD(trained.values(), lr=0.1).step()
    stepped = model(tokens).logits.detach()
    merged = model.merge_and_unload()(tokens).logits.detach()
    return {"tokens": tokens, "logits": logits.detach(), "stepped": stepped, "merged": merged, **gradients}


def make():
    for name, model_name, config in CASES:
        torch.manual_seed(3)
        folder = HERE / "lora" / name
        shutil.rmtree(folder, ignore_errors=True)
        model = get_peft_model(base(model_name), LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n:
                    p.add_(torch.randn(p.shape) * 0.3)
        model.eval()
        model.peft_config["default"].base_model_name_or_path = model_name  # no folder of this machine
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(6))
        numbers = expected(model, tokens)
        save_file({k: v.contiguous() for k, v in numbers.items()}, folder / "expected.safetensors")
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes, logits up to",
              numbers["logits"].abs().max().item())


def check(written, name):
    ours, theirs = (load_file(pathlib.Path(f) / "adapter_model.safetensors") for f in (written, HERE / "lora" / name))
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for key in ours:
        assert ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]), key
    expected = load_file(HERE / "lora" / name / "expected.safetensors")
    model = PeftModel.from_pretrained(base(next(m for n, m, _ in CASES if n == name)), written)
    difference = (model(expected["tokens"]).logits - expected["logits"]).abs().max().item()
    assert difference < 1e-5, difference
    print(written, "is", name, "to the bit; logits within", difference,
          json.dumps(json.loads((pathlib.Path(written) / "adapter_config.json").read_text())["target_modules"]))


if __name__ == "__main__":
    print("peft", peft.__version__, "torch", torch.__version__)
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else make()
