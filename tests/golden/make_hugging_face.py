#!/usr/bin/env python3
"""Makes the folders `hugging_face/*` beside this script with transformers: small random models as `save_pretrained`
writes them, and beside each `expected.safetensors`, what transformers computes with it in f32.

    python3 tests/golden/make_hugging_face.py

`check FOLDER` loads a folder that Sherd wrote with transformers and compares it with the one that it came from:

    python3 tests/golden/make_hugging_face.py check WRITTEN tests/golden/hugging_face/llama
"""

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config)

HERE = pathlib.Path(__file__).parent / "hugging_face"
VOCAB, CONTEXT = 64, 24
ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}

# The name, the model, the dtype that it is stored in, the bytes of a file.
CASES = [
    ("gpt2", lambda: GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, layer_norm_epsilon=1e-4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)), torch.float32, "12KB"),
    ("llama", lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_parameters=ROPE)),
     torch.bfloat16, "16KB"),
    ("llama_tied", lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=12,
        max_position_embeddings=CONTEXT, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
     torch.float16, "5GB"),
]

# The families of Llama's module and the kinds of rotary scaling, in f32. Windows, caps and contexts of scaling are so
# small that all bear on the numbers of 20 tokens, and a continuation goes beyond every window.
SIZES = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=40, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def rope(kind, **more):
    return {"rope_type": kind, "rope_theta": 50.0, "factor": 4.0, **more}


FAMILIES = [
    ("llama_linear", LlamaConfig(**SIZES, rope_parameters=rope("linear"))),
    ("llama_dynamic", LlamaConfig(**SIZES | {"max_position_embeddings": 12, "num_attention_heads": 2},
                                  rope_parameters=rope("dynamic"))),
    ("llama_yarn", LlamaConfig(**SIZES, head_dim=16, rope_parameters=rope(
        "yarn", original_max_position_embeddings=24, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.5,
        truncate=False))),
    ("mistral", MistralConfig(**SIZES, head_dim=8, sliding_window=6)),
    ("qwen2", Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1,
                          tie_word_embeddings=True)),
    ("qwen3", Qwen3Config(**SIZES, head_dim=16, rope_parameters=rope(
        "yarn", original_max_position_embeddings=24, beta_fast=4.0, beta_slow=0.5))),
    ("gemma2", Gemma2Config(**SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=24,
                            attn_logit_softcapping=1.0, final_logit_softcapping=3.0)),
    ("gemma3", Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6, sliding_window_pattern=3,
                                tie_word_embeddings=False, query_pre_attn_scalar=24, rope_parameters={
                                    "full_attention": rope("linear"),
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}})),
    ("phi3", Phi3Config(**SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1}, sliding_window=6,
                        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5})),
]
# Seeds, and sizes of embeddings, with which the likeliest token is not the same one for ever.
LIVELY = {"llama_yarn": (11,), "gemma2": (29, 0.12), "gemma3": (34,)}


def randomise(model, seed=5, embeddings=0.3):
    """Away from zeros and ones, so that every parameter matters, and far enough apart for a clear likeliest token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            size = embeddings if "embed_tokens" in name else 0.3 if p.dim() == 2 else 0.1
            p.add_(torch.randn(p.shape, generator=generator) * size)


def expected(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(6))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    prompt = tokens[:1, :4]
    continuation = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=CONTEXT - 4,
                                  do_sample=False, eos_token_id=None, pad_token_id=0)[0, 4:]
    return {"tokens": tokens, "logits": logits.detach(), "loss": loss.detach(), "grad_norm": norm,
            "continuation": continuation}


def make():
    for name, build, dtype, shard in CASES:
        torch.manual_seed(1)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build()
        randomise(model)
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        save_file({k: v.contiguous() for k, v in expected(folder).items()}, folder / "expected.safetensors")
        print(name, sum(f.stat().st_size for f in folder.iterdir()), sorted(f.name for f in folder.iterdir()))


def expected_of_family(folder):
    """As `expected`, with the gradient of each parameter and the logits behind a step of SGD."""
    # Two, since the one that generates remembers the length that `dynamic` scaling was last made for.
    model, writer = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
                     for _ in range(2))
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(6))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {"grad." + name: p.grad.clone() for name, p in model.named_parameters()}
    prompt = tokens[:1, :4]
    all_tokens = writer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)
    best = torch.topk(writer(all_tokens).logits[0, 3:-1].detach(), 2).values
    margin = (best[:, 0] - best[:, 1]).min().item()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"tokens": tokens, "logits": logits.detach(), "loss": loss.detach(), "stepped": model(tokens).logits.detach(),
            "continuation": all_tokens[0, 4:], **gradients}, margin


def make_families():
    for name, config in FAMILIES:
        torch.manual_seed(1)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model, *LIVELY.get(name, ()))
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        numbers, margin = expected_of_family(folder)
        save_file({k: v.contiguous() for k, v in numbers.items()}, folder / "expected.safetensors")
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes, logits up to",
              numbers["logits"].abs().max().item(), "least margin", margin, numbers["continuation"].tolist())


def make_eight_bits():
    """A Llama with weights of 8 bits under every form of scale; `expected` holds the weights as f32."""
    torch.manual_seed(2)
    folder = HERE / "llama_eight_bits"
    shutil.rmtree(folder, ignore_errors=True)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=CONTEXT))
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [5, 8]}
    model.config.save_pretrained(folder)
    tensors, wide = {}, {}
    codes = torch.arange(VOCAB * 16).to(torch.uint8).reshape(VOCAB, 16)  # every code, four times
    for name, p in model.state_dict().items():
        part = name.removeprefix("model.layers.0.")
        dtype = torch.float8_e5m2 if "lm_head" in name or "o_proj" in name else torch.float8_e4m3fn
        if p.dim() < 2:
            tensors[name] = p.to(torch.bfloat16)
            wide[name] = tensors[name].float()
            continue
        tensors[name] = codes.clone().view(dtype) if p.shape[0] == VOCAB else (p * 50).to(dtype)
        wide[name] = tensors[name].float()
        rows, columns = p.shape
        if part in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
            scale = torch.tensor(0.02) if "q_proj" in part else torch.tensor([0.03], dtype=torch.bfloat16)
            tensors[name + "_scale"], wide[name] = scale, wide[name] * scale.float()
            tensors[name.replace("weight", "input_scale")] = torch.tensor(3.0)
        elif part == "self_attn.k_proj.weight":
            tensors[name + "_scale"] = torch.rand(rows, 1) + 0.01
            wide[name] = wide[name] * tensors[name + "_scale"]
        elif part in ("self_attn.v_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"):
            scale = torch.rand(-(-rows // 5), -(-columns // 8)) + 0.01
            tensors[name + "_scale_inv"] = scale
            wide[name] = wide[name] * scale.repeat_interleave(5, 0)[:rows].repeat_interleave(8, 1)[:, :columns]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, folder / "expected.safetensors")
    print("llama_eight_bits", sum(f.stat().st_size for f in folder.iterdir()))


def state(folder):
    return {k: v for file in pathlib.Path(folder).glob("model*.safetensors") for k, v in load_file(file).items()}


def check(written, original):
    ours, theirs = state(written), state(original)
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name
    model, info = AutoModelForCausalLM.from_pretrained(written, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == next(iter(ours.values())).dtype, model.dtype
    tokens = load_file(pathlib.Path(original) / "expected.safetensors")["tokens"]
    logits = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(tokens).logits for f in (written, original)]
    assert torch.equal(*logits)
    print(written, "is", original, "to the bit;", type(model).__name__, model.dtype, json.dumps(info, default=list))


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else (make(), make_families(), make_eight_bits())
