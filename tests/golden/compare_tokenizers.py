#!/usr/bin/env python3
"""Compares tokens and texts with those of PyPI's `tokenizers` and `sentencepiece`, and the processor time of both on one core.

    ninja -C build/check tests/nn/tokenize_file
    python3 tests/golden/compare_tokenizers.py build/check/tests/nn/tokenize_file [--tokens 16000] [--only NAME] [FILE ...]

FILEs are text to compare; without any, what the repository and Python's own library hold. Words of many scripts, emoji,
white space and random bytes are added. Vocabularies are trained by make_tokenizers.py, of the size of the goldens and of
--tokens. Prints the first differences, and for each tokenizer how many times as fast as PyPI's it is; exits with 1 where
anything differs.
"""
import argparse
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import sentencepiece  # noqa: E402
import tokenizers  # noqa: E402

import make_tokenizers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST = 3_000_000  # characters of real text
SCRIPTS = [(0x400, 0x4FF), (0x370, 0x3FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x4E00, 0x9FFF),
           (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x1200, 0x137F), (0x10A0, 0x10FF), (0xC0, 0x24F), (0x300, 0x36F), (0x1F300, 0x1F6FF),
           (0x2000, 0x206F), (0x2190, 0x2BFF), (0xB80, 0xBFF), (0x1D400, 0x1D7FF), (0xA000, 0xA48C), (0x530, 0x58F), (0x1100, 0x11FF),
           (0xF900, 0xFAFF), (0x1E00, 0x1FFF), (0x2F00, 0x2FDF), (0xFE00, 0xFFEF)]
SPACES = list(" \t\n\r\u00a0\u2003\u3000\u2028\u0085\u180e\u200b\ufeff\x0b\x0c\x1c") + ["  ", "\r\n", "\n\n"]
EMOJI = ["👩\u200d👩\u200d👧", "👍🏽", "🇩🇪", "❤️", "☺", "🏳️\u200d🌈", "1️⃣", "🙂"]
SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<L>", " <R> ", "<B>", "<W>", "[MASK]", "<tool_call>", "<b>", "<0x0A>", "quick brown", "'s", "'LL"]


def real_text(files):
    """Text of the files, or of the repository and Python's library, as (name, text)."""
    if not files:
        files = [p for p in subprocess.run(["git", "-C", ROOT, "ls-files", "*.md", "*.cpp", "*.h", "*.py"], capture_output=True, text=True,
                                           check=True).stdout.split("\n") if p]
        files = [ROOT / p for p in files] + sorted(pathlib.Path(os.__file__).parent.glob("**/*.py"))
    draw = random.Random(2)
    draw.shuffle(files)
    texts = []
    for file in files:
        if sum(map(len, texts)) > MOST:
            break
        try:
            texts.append(pathlib.Path(file).read_text("utf-8"))
        except (UnicodeDecodeError, FileNotFoundError):
            pass
    return texts


def made_text(draw):
    """Words of many scripts, emoji, white space, random characters: those that Unicode had when libpcre2 got its tables, since
    a letter that is newer is none to an older library."""
    records = []
    for _ in range(6000):
        script = draw.choice(SCRIPTS)
        word = lambda: "".join(chr(draw.randint(*script)) for _ in range(draw.randint(1, 9)))
        records.append(draw.choice([" ", "  ", "\n", "\t", "\r\n", ", "]).join(word() for _ in range(draw.randint(3, 40))))
    for _ in range(4000):
        records.append("".join(draw.choice(SPACES) if draw.random() < 0.6 else draw.choice("aZ09.,!'s't'LL're\"-_") for _ in range(draw.randint(5, 120))))
    for _ in range(1000):
        records.append("".join(draw.choice(EMOJI + [" ", "ok"]) for _ in range(draw.randint(1, 30))))
    for _ in range(3000):
        records.append("".join(chr(draw.choice([draw.randint(0, 0x2FF), draw.randint(0, 0xD7FF), draw.randint(0xE000, 0x1FFFF)]))
                               for _ in range(draw.randint(1, 100))))
    for _ in range(2000):
        records.append("".join(draw.choice(SPECIAL + SPACES + ["word", "é"]) for _ in range(draw.randint(1, 20))))
    newer = lambda c: unicodedata.category(c) == "Cn"
    return ["".join(c for c in r if not newer(c)) for r in records]


def corpora(files):
    draw = random.Random(3)
    text = real_text(files)
    lines = [line + "\n" for t in text[:len(text) // 3] for line in t.split("\n")]
    yield "documents", [t.encode() for t in text]
    yield "lines", [line.encode() for line in lines]
    yield "made", [t.encode() for t in made_text(draw)]
    yield "bytes", [draw.randbytes(draw.randint(1, 400)) for _ in range(4000)]
    yield "mostly ASCII bytes", [bytes(draw.randrange(256) if draw.random() < 0.1 else draw.randrange(32, 127) for _ in range(draw.randint(1, 400)))
                                 for _ in range(2000)]


def packed(records):
    return b"".join(struct.pack("<I", len(r)) + r for r in records)


def unpacked(data):
    records, at = [], 0
    while at < len(data):
        size, = struct.unpack_from("<I", data, at)
        records.append(data[at + 4:at + 4 + size])
        at += 4 + size
    return records


def numbers(record):
    return list(struct.unpack(f"<{len(record) // 4}I", record))


class Ours:
    def __init__(self, program, file):
        self.program, self.file, self.folder = program, file, tempfile.TemporaryDirectory()

    def run(self, what, records):
        given, made = pathlib.Path(self.folder.name, "in"), pathlib.Path(self.folder.name, "out")
        given.write_bytes(packed(records))
        best = 1e9
        for _ in range(2):
            done = subprocess.run([self.program, what, self.file, given, made], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            best = min(best, float(done.stdout))
        return unpacked(made.read_bytes()), best

    def encode(self, records):
        found, seconds = self.run("encode", records)
        return [numbers(r) for r in found], seconds

    def decode(self, ids):
        found, seconds = self.run("decode", [struct.pack(f"<{len(i)}I", *i) for i in ids])
        return [r.decode() for r in found], seconds


class Theirs:
    def __init__(self, file):
        self.pieces = file.suffix == ".model"
        if self.pieces:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        else:
            self.model = tokenizers.Tokenizer.from_file(str(file))

    @staticmethod
    def best(calls):
        """The answer, and the least time of a way to get it."""
        answer, best = None, 1e9
        for call in calls:
            start = time.process_time()
            found = call()
            best = min(best, time.process_time() - start)
            answer = answer or found
        return answer, best

    def encode(self, records):
        if self.pieces:
            return self.best([lambda: [self.model.encode(r) for r in records], lambda: self.model.encode(records, num_threads=1)])
        texts = [r.decode("utf-8", "replace") for r in records]
        found, seconds = self.best([lambda: [self.model.encode(t, add_special_tokens=False) for t in texts],
                                    lambda: self.model.encode_batch_fast(texts, add_special_tokens=False)])
        return [e.ids for e in found], seconds  # without the time of `ids`

    def decode(self, ids):
        if self.pieces:
            return self.best([lambda: [self.model.decode(i) for i in ids]])
        return self.best([lambda: [self.model.decode(i, skip_special_tokens=False) for i in ids],
                          lambda: self.model.decode_batch(ids, skip_special_tokens=False)])


def compare(program, file, texts):
    differences, theirs, ours = 0, Theirs(file), Ours(program, file)
    for name, records in texts:
        size = sum(map(len, records)) / 1e6
        expected, their_time = theirs.encode(records)
        found, our_time = ours.encode(records)
        bad = [i for i in range(len(records)) if found[i] != expected[i]]
        back, their_back = theirs.decode(expected)
        our_back, our_back_time = ours.decode(expected)
        bad_back = [i for i in range(len(records)) if back[i] != our_back[i]]
        print(f"{file.parent.name}/{file.name:24} {name:18} {size:6.2f} MB  encode {size / our_time:6.1f} MB/s, {their_time / our_time:5.1f} times theirs; "
              f"decode {their_back / our_back_time:5.1f} times; {len(bad)} and {len(bad_back)} of {len(records)} differ", flush=True)
        for i in bad[:2]:
            at = next((k for k, (a, b) in enumerate(zip(found[i], expected[i])) if a != b), min(len(found[i]), len(expected[i])))
            print(f"  {records[i][:200]!r}: token {at}: {found[i][at:at + 8]}, theirs {expected[i][at:at + 8]}")
        for i in bad_back[:2]:
            print(f"  {expected[i][:40]}: {our_back[i][:100]!r}, theirs {back[i][:100]!r}")
        differences += len(bad) + len(bad_back)
    return differences


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    texts = list(corpora(options.files))
    print(f"{sum(len(r) for _, t in texts for r in t) / 1e6:.1f} MB; tokenizers {tokenizers.__version__}, sentencepiece "
          f"{sentencepiece.__version__}, Unicode {unicodedata.unidata_version}")
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("small", None), ("large", options.tokens)):
            draw = random.Random(5)
            lines = None if size is None else draw.sample([l for t in real_text(options.files) for l in t.split("\n") if 0 < len(l) < 2000], 30000) + make_tokenizers.corpus(3000)
            make_tokenizers.make(pathlib.Path(folder, name), size, lines)
            for file in sorted(pathlib.Path(folder, name).iterdir()):
                if options.only in file.name:
                    differences += compare(options.program, file, texts)
    print(f"{differences} differences")
    return differences > 0


if __name__ == "__main__":
    sys.exit(main())
