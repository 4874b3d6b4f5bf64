#!/usr/bin/env python3
"""Tokens a second of `generate` in transformers, for the Llama of `generate_bench`; start both in turn.

    python3 tests/bench/torch_generate.py [--threads 2] [--layers 8] [--width 512] [--prompt 32] [--tokens 64]
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
for name, value in (("threads", 2), ("layers", 8), ("width", 512), ("prompt", 32), ("tokens", 64)):
    parser.add_argument("--" + name, type=int, default=value)
s = parser.parse_args()
torch.set_num_threads(s.threads)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=8000, hidden_size=s.width, intermediate_size=s.width * 43 // 16, num_hidden_layers=s.layers,
    num_attention_heads=s.width // 64, num_key_value_heads=s.width // 128, max_position_embeddings=4096)).eval()
for batch in (1, 8):
    ids = torch.tensor([[(row * 131 + i * 17 + 5) % 8000 for i in range(s.prompt)] for row in range(batch)])
    best = 0
    for _ in range(3):
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=s.tokens, min_new_tokens=s.tokens,
                       do_sample=False, pad_token_id=0)
        best = max(best, batch * s.tokens / (time.perf_counter() - start))
    print(f"PyTorch batch {batch}: {best:.1f} tokens/s")
