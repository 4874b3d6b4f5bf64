#!/usr/bin/env python3
"""Makes tests/golden/tokenizers: small tokenizers of each kind, and what `tokenizers` and `sentencepiece` do with them.

    python3 tests/golden/make_tokenizers.py [FOLDER [TOKENS]]

Needs both from PyPI and nothing else. With a number of tokens it makes larger vocabularies, for compare_tokenizers.py.
A second run gives the same files.
"""
import io
import json
import pathlib
import random
import sys

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPACE = "\u2581"
# The rules by which GPT-4's successors, Llama 3 and Qwen 2 split a text.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

SENTENCES = """The quick brown fox doesn't jump over the lazy dog; it's asleep, and they've gone.
In 1998 and 2024 there were 12,345 shards of 3.14 kilograms, weren't there?
for (int i = 0; i < n; ++i) total += values[i] * weights[i];  // a loop
def forward(self, x):
    return self.linear(x) + self.bias
Die Würfel sind gefallen, und größere Straßen führen überall hin.
Où est la bibliothèque? Elle était fermée à Noël, naïvement.
El niño comió una manzana en la montaña; ¿qué pasó después?
Съешь же ещё этих мягких французских булок, да выпей чаю.
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία κάθε μέρα.
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر
דג סקרן שט בים מאוכזב ולפתע מצא חברה
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा
いろはにほへと ちりぬるを 我が世たれぞ 常ならむ
天地玄黄 宇宙洪荒 日月盈昃 辰宿列张
다람쥐 헌 쳇바퀴에 타고파 그리고 집으로 갔다
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า
Zażółć gęślą jaźń, příliš žluťoučký kůň úpěl ďábelské ódy.
Tiếng Việt có nhiều dấu, rất đẹp và khó viết.
🙂 👍🏽 👩‍👩‍👧 🇩🇪 ❤️ emoji are characters too 🏳️‍🌈""".split("\n")

TEXTS = [
    "", " ", "  ", "a", "Hello world", " Hello  world ", "\n", "\n\n\n", "\t tabs\tand\r\nlines\n  of  \n text   ",
    "it's they'RE we'll I'D don't 's 'T", "1 12 123 1234 12345678 3.14 1,000,000 ½ ² Ⅷ ٣", "naïve café e\u0301 \u1e9b\u0323 \u212b",
    "\u1100\u1161\u11a8 \u0041\u030a \u0915\u093c \ufb01 \u2126", "a\u00a0b\u2003c\u3000d\u2028e\u0085f\u180eg\u200bh\ufeffi",
    "<|endoftext|> <s> </s> <unk> [MASK] x[MASK]y  [MASK]  z", "a<|begin_of_text|>b <tool_call> {} </tool_call>",
    "lstrip  <L>  right <R>  both <B>  word<W> <W>word <W> é<W>", SPACE + "under" + SPACE + SPACE + "score", " " + SPACE + " x",
    "<0x41><0x0A> <0xE4>", "\x00\x01\x7f null", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff \ufffd", "x" * 300, "ab" * 200, " " * 130, "\n \n  \n   \n",
    "!!!??? ... --- === ((())) [[]] {{}} <<>> //// \\\\", "user@example.com https://example.com/?q=1&r=2#f", "ﬁ ﬂ ß ẞ ſ K 'ſ",
] + SENTENCES


def corpus(lines):
    """Lines of words of the sentences above, so that the training has words of different frequency."""
    draw = random.Random(1)
    words = [s.split(" ") for s in SENTENCES]
    made = list(SENTENCES) * 3
    for _ in range(lines):
        sentence = draw.choice(words)
        made.append(" ".join(draw.choice(sentence) for _ in range(draw.randint(2, 12))))
    return made


def byte_level(name, folder, lines, size, pre_tokenizer, *, normalizer=None, ignore_merges=False, post=None, special=(),
               added=(), prefix=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    tokenizer.post_processor = post(tokenizer) if post else processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(folder / (name + ".json")), pretty=False)


def template(tokenizer):
    begin = "<|begin_of_text|>"
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single=begin + " $A", pair=None, special_tokens=[(begin, tokenizer.token_to_id(begin))])])


def sentence_pieces(name, folder, lines, size, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type="bpe", hard_vocab_limit=False,
        character_coverage=0.98, num_threads=1, minloglevel=2, normalization_rule_name="identity",
        **{"byte_fallback": True, "remove_extra_whitespaces": False, **options})
    (folder / (name + ".model")).write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def converted(name, folder, model, **parts):
    """A tokenizer.json of a SentencePiece model, as those of the Hub are."""
    ids = range(model.get_piece_size())
    vocabulary = {model.id_to_piece(i): i for i in ids}
    normal = {model.id_to_piece(i): i for i in ids
              if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))}
    merges = []
    for piece, i in normal.items():
        cuts = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in normal and piece[k:] in normal]
        merges += [(-model.get_score(i), normal[a], normal[b], a, b) for a, b in cuts]
    merges = [(a, b) for *_, a, b in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", vocabulary["<s>"])])
    for key, part in parts.items():
        if key == "added":
            tokenizer.add_tokens(part)
        else:
            setattr(tokenizer, key, part)
    tokenizer.save(str(folder / (name + ".json")), pretty=False)


def make(folder, size=None, lines=None):
    folder.mkdir(parents=True, exist_ok=True)
    lines = lines or corpus(2000)
    n = size or 640
    byte = lambda **o: pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **o})
    split = lambda rule: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"), byte(use_regex=False)])
    mark = lambda text, **o: AddedToken(text, **{"normalized": False, "special": True, **o})
    byte_level("gpt2", folder, lines, n, byte(), special=[mark("<|endoftext|>")])
    byte_level("llama3", folder, lines, n, split(LLAMA3), ignore_merges=True, post=template,
               special=[mark("<|begin_of_text|>"), mark("<|endoftext|>")])
    byte_level("qwen2", folder, lines, n, split(QWEN2), normalizer=normalizers.NFC(), special=[mark("<|endoftext|>")],
               added=[mark("<tool_call>", special=False), mark("</tool_call>", special=False)])
    byte_level("o200k", folder, lines, n, split(O200K), special=[mark("<|endoftext|>")])
    byte_level("added", folder, lines, n, pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte(add_prefix_space=True)]), special=[mark("<|endoftext|>")],
        added=[AddedToken("<L>", lstrip=True), AddedToken("<R>", rstrip=True, normalized=False),
               AddedToken("<B>", lstrip=True, rstrip=True), AddedToken("<W>", single_word=True),
               AddedToken("[MASK]", lstrip=True, special=True, normalized=False), AddedToken("quick brown")])
    byte_level("behaviors", folder, lines, n, pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.Split(Regex(r"[.,;]+"), "merged_with_previous"),
         pre_tokenizers.Split(Regex(r"\p{Lu}"), "contiguous"), pre_tokenizers.Split(Regex(r"[^\s\d\p{Han}]+|\n"), "isolated", invert=True),
         pre_tokenizers.Split("-", "removed"), pre_tokenizers.Digits(), byte(use_regex=False)]))
    m = size or 700
    llama2 = sentence_pieces("llama2", folder, lines, m, allow_whitespace_only_pieces=True, split_digits=True)
    gemma = sentence_pieces("gemma", folder, lines, m, allow_whitespace_only_pieces=True, split_digits=True,
                            add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n", SPACE * 2, SPACE * 4, "<b>", "</b>"])
    sentence_pieces("unknown", folder, lines, m, byte_fallback=False, remove_extra_whitespaces=True)
    sentence_pieces("suffix", folder, lines, m, treat_whitespace_as_suffix=True, remove_extra_whitespaces=True)
    fallback = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    converted("llama2", folder, llama2,
              normalizer=normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
              decoder=decoders.Sequence(fallback + [decoders.Strip(" ", 1, 0)]),
              added=[AddedToken("<L>", lstrip=True, rstrip=True), AddedToken("[MASK]", special=True)])
    for scheme in ("first", "always", "never"):
        converted("metaspace_" + scheme, folder, llama2,
                  pre_tokenizer=pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=scheme == "always"),
                  decoder=decoders.Metaspace(SPACE, prepend_scheme=scheme) if scheme != "first" else
                  decoders.Sequence(fallback + [decoders.Strip(" ", 1, 0)]))
    converted("gemma", folder, gemma, normalizer=normalizers.Replace(" ", SPACE), decoder=decoders.Sequence(fallback),
              pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
              added=[AddedToken(t, normalized=False) for t in ("\n", "\n\n", SPACE * 2, SPACE * 4, "<b>", "</b>")])


def random_ids(count, draw):
    return [[draw.randrange(count) for _ in range(draw.randint(1, 30))] for _ in range(20)]


def expected(file):
    """Tokens of the texts, without and with what stands around them, and texts of tokens, with and without special ones."""
    draw = random.Random(file.name)
    if file.suffix == ".model":
        model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        ids = [model.encode(t) for t in TEXTS]
        some = random_ids(model.get_piece_size(), draw)
        return {"size": model.get_piece_size(), "ids": ids, "around": [[model.bos_id()], []], "decoded": [model.decode(i) for i in ids], "random": some,
                "random_decoded": [model.decode(i) for i in some], "random_plain": [model.decode(i) for i in some]}
    tokenizer = Tokenizer.from_file(str(file))
    ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in TEXTS]
    some = random_ids(tokenizer.get_vocab_size(), draw)
    whole = tokenizer.encode("a").ids
    at = whole.index(tokenizer.encode("a", add_special_tokens=False).ids[0])
    return {"size": tokenizer.get_vocab_size(), "ids": ids, "around": [whole[:at], whole[at + len(tokenizer.encode("a", add_special_tokens=False).ids):]],
            "decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in ids], "random": some,
            "random_decoded": [tokenizer.decode(i, skip_special_tokens=False) for i in some],
            "random_plain": [tokenizer.decode(i, skip_special_tokens=True) for i in some]}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "tokenizers")
    make(folder, int(sys.argv[2]) if len(sys.argv) > 2 else None)
    if len(sys.argv) > 2:
        return
    files = sorted(f for f in folder.iterdir() if f.suffix == ".model" or (f.suffix == ".json" and f.name != "expected.json"))
    everything = {"texts": TEXTS, **{f.name: expected(f) for f in files}}
    (folder / "expected.json").write_text(json.dumps(everything, ensure_ascii=True, separators=(",", ":")))


if __name__ == "__main__":
    main()
