#!/usr/bin/env python3
"""Makes `generation/` beside this script with transformers: two small random models that go with tokenizers of
`tokenizers/`, and `expected.json`, what transformers generates with them and with those of `hugging_face/`, and how
well they predict a text.

    python3 tests/golden/make_generation.py
"""

import json
import pathlib
import shutil

import torch
import transformers
from make_hugging_face import FAMILIES, randomise
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# Models with a tokenizer: its name, the configuration.
WRITERS = {
    "gpt2": ("gpt2", lambda vocab: GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=vocab - 1,
        eos_token_id=vocab - 1)),
    "llama": ("llama2", lambda vocab: LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=[2, 7])),
}
BEAMS = [dict(num_beams=2, length_penalty=1.0, early_stopping=False, eos_token_id=[5]),
         dict(num_beams=3, length_penalty=0.0, early_stopping=False, eos_token_id=[5, 17]),
         dict(num_beams=4, length_penalty=2.0, early_stopping=True, eos_token_id=[3, 9]),
         dict(num_beams=4, length_penalty=-1.0, early_stopping=False, eos_token_id=[11]),
         dict(num_beams=5, length_penalty=1.0, early_stopping=True, eos_token_id=None)]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(folder, prompt, count):
    """With a model of its own, since `dynamic` scaling remembers the length that it was last made for."""
    ids = torch.tensor([prompt])
    return load(folder).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)[0, len(prompt):].tolist()


def beams(folder, prompt, count, **settings):
    ids = torch.tensor([prompt])
    out = load(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
        num_return_sequences=settings["num_beams"], return_dict_in_generate=True, output_scores=True, **settings)
    # Behind the end of a text stands the padding; what did not end has a score of -1e9.
    found = []
    for tokens, score in zip(out.sequences[:, len(prompt):].tolist(), out.sequences_scores.tolist()):
        ends = [i for i, token in enumerate(tokens) if token in (settings["eos_token_id"] or [])]
        if score > -1e8:
            found.append({"tokens": tokens[:ends[0] + 1] if ends else tokens, "score": score})
    return found


def perplexity(model, tokens, context, stride):
    """The windows of transformers' page on the perplexity of models of fixed length, summed exactly."""
    nats, count, before = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        ids = torch.tensor([tokens[begin:end]])
        labels = ids.clone()
        labels[:, :-(end - before)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            nats += model(ids, labels=labels).loss.double().item() * scored
        count += scored
        before = end
        if end == len(tokens):
            break
    return {"context": context, "stride": stride, "tokens": count, "nats": nats}


def make():
    folder = HERE / "generation"
    shutil.rmtree(folder, ignore_errors=True)
    expected = {"greedy": {}, "beams": {}, "perplexity": {}}
    generator = torch.Generator().manual_seed(9)
    for name, config in FAMILIES:
        most = config.max_position_embeddings * (4 if name == "llama_dynamic" else 1)
        prompts = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (3, 9, 1, 9, 14)]
        expected["greedy"][name] = [
            {"prompt": p, "tokens": greedy(HERE / "hugging_face" / name, p, min(24, most - 14))} for p in prompts]
        if "dynamic" in name:  # its turns follow the longest call
            continue
        expected["beams"][name] = [
            {"prompt": prompt, **settings, "found": beams(HERE / "hugging_face" / name, prompt, 10, **settings)}
            for settings, prompt in zip(BEAMS, prompts)]
    text = (ROOT / "LICENSE").read_text()
    for name, (tokenizer, config) in WRITERS.items():
        coder = Tokenizer.from_file(str(HERE / "tokenizers" / (tokenizer + ".json")))
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config(coder.get_vocab_size()), dtype=torch.float32)
        randomise(model)
        model.save_pretrained(folder / name)
        model = load(folder / name)
        tokens = coder.encode(text).ids
        with torch.no_grad():
            expected["perplexity"][name] = [perplexity(model, tokens, *sizes) for sizes in ((64, 32), (48, 48), (9, 1))]
        print(name, coder.get_vocab_size(), len(tokens), expected["perplexity"][name],
              sum(f.stat().st_size for f in (folder / name).iterdir()))
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    print("transformers", transformers.__version__, "torch", torch.__version__)
    make()
