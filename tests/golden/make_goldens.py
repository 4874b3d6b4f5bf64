#!/usr/bin/env python3
"""Makes the goldens beside this script with PyTorch: values and gradients of every op, layer and optimizer.

    python3 tests/golden/make_goldens.py [AREA ...]

Running it again gives the same bytes with the same PyTorch on the same processor: every case draws from a generator
seeded by its own name, so a new case leaves the others as they are. README.md describes the format.
"""

import itertools
import json
import math
import pathlib
import struct
import sys
import zlib

import torch
from torch import nn
from torch.nn import functional as F

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
i64, i32, u8, boolean = torch.int64, torch.int32, torch.uint8, torch.bool
NAMES = {f64: "f64", f32: "f32", f16: "f16", bf16: "bf16", i64: "i64", i32: "i32", u8: "u8", boolean: "bool"}
STORED = {f64: "F64", f32: "F32", f16: "F16", bf16: "BF16", i64: "I64", i32: "I32", u8: "U8", boolean: "BOOL"}
WIDE = (f32, f64)
FLOATS = (f32, f64, bf16, f16)
INTS = (i64, i32, u8)
nan, inf = math.nan, math.inf


def save(path, tensors, metadata):
    """A safetensors file with sorted names, so that the same tensors give the same bytes."""
    header, blobs, at = {"__metadata__": dict(sorted(metadata.items()))}, [], 0
    for name, tensor in sorted(tensors.items()):
        blob = bytes(tensor.detach().contiguous().reshape(-1).view(u8).tolist()) if tensor.numel() else b""
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


class Draw:
    """Random inputs of one case, seeded by its name."""

    def __init__(self, name):
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape, dtype=f32, scale=1.0):
        return (scale * torch.randn(shape, generator=self.generator, dtype=f64)).to(dtype)

    def uniform(self, *shape, dtype=f32, low=0.0, high=1.0):
        return (low + (high - low) * torch.rand(shape, generator=self.generator, dtype=f64)).to(dtype)

    def integers(self, *shape, low=0, high=10, dtype=i64):
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def bits(self, *shape):
        return torch.randint(0, 2, shape, generator=self.generator).to(boolean)

    def any(self, *shape, dtype=f32):
        """Values of any dtype: normal, small integers, or bits."""
        if dtype == boolean:
            return self.bits(*shape)
        if not dtype.is_floating_point:
            return self.integers(*shape, low=0 if dtype == u8 else -9, high=10, dtype=dtype)
        return self.normal(*shape, dtype=dtype)


class Area:
    """The cases of one file."""

    def __init__(self):
        self.tensors, self.metadata = {}, {"made with": f"PyTorch {torch.__version__}"}

    def note(self, name, op, args, tensors, tolerance=None):
        assert name not in self.metadata and "/" not in name, name
        about = {"op": op, "args": args}
        if tolerance is not None:
            about["tolerance"] = tolerance
        self.metadata[name] = json.dumps(about)
        self.tensors.update({f"{name}/{key}": tensor for key, tensor in tensors.items()})

    def case(self, name, op, run, inputs, args=None, grad=True, tolerance=None):
        """Runs `run` on the inputs; with `grad` also its gradient against a random upstream gradient.

        PyTorch computes in f64 and each result is rounded once to the dtype it would have, so what is stored is the right
        answer and not PyTorch's own rounding (which in 16 bits is far from it). Exact cases run in the inputs' dtypes.
        """
        widen = lambda t: t.double() if t.is_floating_point() and tolerance != 0 else t.clone()
        leaves = [widen(t).requires_grad_(grad and t.is_floating_point()) for t in inputs]
        outs = run(*leaves)
        outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
        floats = [t.dtype for t in inputs if t.is_floating_point()]
        narrow = lambda t: t.to(floats[0]) if t.dtype == f64 and tolerance != 0 else t
        tensors = {f"in{i}": t for i, t in enumerate(inputs)} | {f"out{i}": narrow(t) for i, t in enumerate(outs)}
        reached = [i for i, t in enumerate(outs) if t.requires_grad]
        if reached:
            draw = Draw(name + " upstream")
            upstream = {i: draw.normal(*outs[i].shape, dtype=narrow(outs[i]).dtype) for i in reached}
            wanted = [i for i, t in enumerate(leaves) if t.requires_grad]
            grads = torch.autograd.grad([outs[i] for i in reached], [leaves[i] for i in wanted],
                                        [upstream[i].to(outs[i].dtype) for i in reached], allow_unused=True)
            tensors |= {f"gy{i}": t for i, t in upstream.items()}
            tensors |= {f"gin{i}": narrow(t) for i, t in zip(wanted, grads) if t is not None}
        self.note(name, op, args or {}, tensors, tolerance)


def join(*parts):
    return ".".join(str(p) for p in parts)


def shape_name(*shapes):
    return "-".join("x".join(map(str, s)) if s else "scalar" for s in shapes)


# ---- elementwise -----------------------------------------------------------------------------------------------------

EDGES = [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-30, -1e-30]
POSITIVE_EDGES = [nan, inf, 0.0, 1.0, 0.25, 4.0, 1e-30, 1e30]

# name: function, low and high of the random inputs, edge inputs
UNARY = {
    "neg": (torch.neg, -2, 2, EDGES),
    "abs": (torch.abs, -2, 2, EDGES),
    "exp": (torch.exp, -4, 4, EDGES + [88.0, -87.0, 100.0, -110.0]),
    "log": (torch.log, 0.1, 4, POSITIVE_EDGES + [-1.0]),
    "log1p": (torch.log1p, -0.9, 4, EDGES + [1e-9, -1e-9]),
    "sqrt": (torch.sqrt, 0.1, 4, POSITIVE_EDGES + [-1.0]),
    "rsqrt": (torch.rsqrt, 0.1, 4, POSITIVE_EDGES + [-1.0]),
    "sin": (torch.sin, -6, 6, EDGES + [100.0, -1000.0]),
    "cos": (torch.cos, -6, 6, EDGES + [100.0, -1000.0]),
    "erf": (torch.erf, -3, 3, EDGES),
    "tanh": (torch.tanh, -3, 3, EDGES + [20.0, -20.0]),
    "sigmoid": (torch.sigmoid, -4, 4, EDGES + [50.0, -50.0, 100.0, -100.0]),
    "relu": (torch.relu, -2, 2, EDGES),
    "silu": (F.silu, -4, 4, [nan, 0.0, -0.0, 20.0, -20.0, 60.0, -60.0, 1e-30]),
    "square": (torch.square, -2, 2, EDGES),
    "reciprocal": (torch.reciprocal, 0.2, 3, EDGES),
    "floor": (torch.floor, -4, 4, EDGES + [1e10, -1e10]),
    "ceil": (torch.ceil, -4, 4, EDGES + [1e10, -1e10]),
    "trunc": (torch.trunc, -4, 4, EDGES + [1e10, -1e10]),
    "round": (torch.round, -4, 4, EDGES + [1e10, -1e10, 1.5, 2.5, -0.5]),
    "sign": (torch.sign, -2, 2, EDGES),
    "tan": (torch.tan, -1.4, 1.4, EDGES + [100.0, -1000.0]),
    "asin": (torch.asin, -0.9, 0.9, EDGES),
    "acos": (torch.acos, -0.9, 0.9, EDGES),
    "atan": (torch.atan, -4, 4, EDGES + [1e10, -1e10]),
    "sinh": (torch.sinh, -3, 3, EDGES + [80.0, -80.0]),
    "cosh": (torch.cosh, -3, 3, EDGES + [80.0, -80.0]),
    "asinh": (torch.asinh, -4, 4, EDGES + [1e10, -1e10]),
    "acosh": (torch.acosh, 1.1, 5, EDGES + [1e10]),
    "atanh": (torch.atanh, -0.9, 0.9, EDGES),
    "exp2": (torch.exp2, -4, 4, EDGES + [100.0, -130.0]),
    "expm1": (torch.expm1, -4, 4, EDGES + [80.0, -80.0, 1e-9]),
    "log2": (torch.log2, 0.1, 4, POSITIVE_EDGES + [-1.0, 8.0]),
    "log10": (torch.log10, 0.1, 4, POSITIVE_EDGES + [-1.0, 1000.0]),
    "softplus": (F.softplus, -5, 5, EDGES + [50.0, -50.0, 100.0, -100.0]),
    "selu": (F.selu, -3, 3, EDGES[1:] + [50.0, -50.0, 100.0, -100.0]),
}


def unary_family(area, op, run, low, high, edges, args=None, tag=()):
    for dtype in FLOATS:
        name = join(op, *tag, NAMES[dtype])
        area.case(name, op, run, [Draw(name).uniform(3, 7, dtype=dtype, low=low, high=high)], args)
    for dtype in WIDE:
        area.case(join(op, *tag, "edges", NAMES[dtype]), op, run, [torch.tensor(edges, dtype=dtype)], args)
    name = join(op, *tag, "scalar")
    area.case(name, op, run, [Draw(name).uniform(dtype=f32, low=low, high=high)], args)
    area.case(join(op, *tag, "empty"), op, run, [torch.zeros(0, 3)], args)


def make_unary(area):
    for op, (run, low, high, edges) in UNARY.items():
        unary_family(area, op, run, low, high, edges)
    gelu_edges = [nan, 0.0, -0.0, 1e-30, 5.0, -5.0, 20.0, -20.0]
    for approximate in ("none", "tanh"):
        run = lambda x, approximate=approximate: F.gelu(x, approximate=approximate)
        unary_family(area, "gelu", run, -4, 4, gelu_edges, {"approximate": approximate}, (approximate,))
    for slope in (0.01, 0.3):
        run = lambda x, slope=slope: F.leaky_relu(x, slope)
        unary_family(area, "leaky_relu", run, -2, 2, EDGES, {"slope": slope}, (slope,))
    for alpha in (1.0, 0.5):
        run = lambda x, alpha=alpha: F.elu(x, alpha)
        unary_family(area, "elu", run, -3, 3, EDGES + [100.0, -100.0], {"alpha": alpha}, (alpha,))
    for dtype in FLOATS:
        for run in (torch.isfinite, torch.isnan, torch.isinf):
            area.case(join(run.__name__, NAMES[dtype]), run.__name__, run, [torch.tensor(EDGES, dtype=dtype)])
    for dtype in (f32, i64, u8, boolean):
        values = torch.tensor([0, 1, 2, 0, 7]).to(dtype)
        area.case(join("logical_not", NAMES[dtype]), "logical_not", torch.logical_not, [values])
    area.case("logical_not.nan", "logical_not", torch.logical_not, [torch.tensor([nan, 0.0, -0.0])])
    for op in ("neg", "abs", "square", "sign"):
        for dtype in (i64, i32):
            name = join(op, NAMES[dtype])
            area.case(name, op, UNARY[op][0], [Draw(name).any(7, dtype=dtype)])


SHAPE_PAIRS = [((2, 3), (2, 3)), ((2, 1, 4), (3, 1)), ((), (3,)), ((3,), (1,)), ((0, 3), (1, 3)), ((1, 1), ()),
               ((4, 1, 2), (1, 3, 1))]
ARITHMETIC = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}
EXTREMES = {"maximum": torch.maximum, "minimum": torch.minimum}
COMPARISONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def pairs(values, dtype):
    """All ordered pairs of the values, as two vectors."""
    a, b = zip(*itertools.product(values, values))
    return [torch.tensor(a).to(dtype), torch.tensor(b).to(dtype)]


def make_binary(area):
    edge_values = [nan, inf, -inf, 0.0, -0.0, 1.0, -1.5]
    for op, run in (ARITHMETIC | EXTREMES).items():
        for a, b in SHAPE_PAIRS:
            name = join(op, shape_name(a, b))
            draw = Draw(name)
            area.case(name, op, run, [draw.normal(*a), draw.uniform(*b, low=0.5, high=2.0)])
        for dtype in FLOATS:
            name = join(op, NAMES[dtype])
            draw = Draw(name)
            area.case(name, op, run, [draw.normal(5, 3, dtype=dtype), draw.uniform(3, dtype=dtype, low=0.5, high=2.0)])
        for dtype in WIDE:
            area.case(join(op, "edges", NAMES[dtype]), op, run, pairs(edge_values, dtype))
        for dtype in INTS if op != "div" else ():
            name = join(op, NAMES[dtype])
            draw = Draw(name)
            area.case(name, op, run, [draw.any(4, 3, dtype=dtype), draw.any(3, dtype=dtype)])
    for op in EXTREMES:
        values = torch.tensor([1.0, 2.0, 3.0, 3.0])
        area.case(join(op, "ties"), op, EXTREMES[op], [values, torch.tensor([1.0, 3.0, 2.0, 3.0])])
    for dtype in FLOATS:
        name = join("pow", NAMES[dtype])
        draw = Draw(name)
        area.case(name, "pow", torch.pow,
                  [draw.uniform(4, 3, dtype=dtype, low=0.3, high=2.0), draw.uniform(3, dtype=dtype, low=-2, high=2)])
    for dtype in WIDE:
        area.case(join("pow.edges", NAMES[dtype]), "pow", torch.pow, pairs([0.0, 1.0, -2.0, 2.0, 3.0, 0.5, inf, nan], dtype))
    for op, run in {"atan2": torch.atan2, "remainder": torch.remainder, "floor_divide": lambda a, b: torch.floor_divide(a.detach(), b.detach())}.items():
        for dtype in FLOATS:
            name = join(op, NAMES[dtype])
            draw = Draw(name)
            sides = [draw.normal(4, 3, dtype=dtype), draw.normal(3, dtype=dtype)]
            area.case(name, op, run, sides)
        for dtype in WIDE:
            area.case(join(op, "edges", NAMES[dtype]), op, run, pairs(edge_values, dtype))
    for dtype in INTS:
        values = [1, 2, 3, 7, 200 if dtype == u8 else -7]
        area.case(join("remainder", NAMES[dtype]), "remainder", torch.remainder, pairs(values, dtype))
        area.case(join("floor_divide", NAMES[dtype]), "floor_divide", torch.floor_divide, pairs(values, dtype))
    for scalar in (0.75, -2.0):
        name = join("remainder", "number", scalar)
        area.case(name, "remainder", lambda x, scalar=scalar: torch.remainder(x, scalar), [Draw(name).normal(3, 4)],
                  {"scalar": scalar})
    for op, run in COMPARISONS.items():
        for dtype in FLOATS:
            area.case(join(op, NAMES[dtype]), op, run, pairs(edge_values, dtype))
        for dtype in INTS:
            area.case(join(op, NAMES[dtype]), op, run, pairs([0, 1, 2, 200 if dtype == u8 else -7], dtype))
        name = join(op, "broadcast")
        draw = Draw(name)
        area.case(name, op, run, [draw.integers(2, 1, 3, high=3, dtype=f32), draw.integers(2, 1, high=3, dtype=f32)])
    for op, run in {"logical_and": torch.logical_and, "logical_or": torch.logical_or}.items():
        area.case(op, op, run, pairs([False, True], boolean))
        area.case(join(op, "broadcast"), op, run, [torch.tensor([[True], [False]]), torch.tensor([True, False, True])])


def make_where(area):
    shapes = [((2, 3), (2, 3), (2, 3)), ((3,), (2, 1), (2, 3)), ((2, 1), (3,), ()), ((), (2,), (2,)), ((0,), (0,), (1,))]
    for condition, a, b in shapes:
        name = join("where", shape_name(condition, a, b))
        draw = Draw(name)
        area.case(name, "where", torch.where, [draw.bits(*condition), draw.normal(*a), draw.normal(*b)])
    for dtype in FLOATS + INTS:
        name = join("where", NAMES[dtype])
        draw = Draw(name)
        area.case(name, "where", torch.where, [draw.bits(2, 3), draw.any(2, 3, dtype=dtype), draw.any(3, dtype=dtype)])
    chosen = [torch.tensor([True, False, True]), torch.tensor([1.0, nan, inf]), torch.tensor([nan, 2.0, -inf])]
    area.case("where.nan", "where", torch.where, chosen)


def make_scalar_forms(area):
    """`x op s`, and `s op x` where `reverse` is set."""
    forms = ARITHMETIC | {"pow": torch.pow}
    for (op, run), dtype, scalar in itertools.product(forms.items(), FLOATS, (2.5, -3.0)):
        name = join(op, "with", scalar, NAMES[dtype])
        x = Draw(name).uniform(2, 3, dtype=dtype, low=0.3, high=2.0)
        area.case(name, op, lambda x: run(x, scalar), [x], {"scalar": scalar})
    for (op, run), dtype in itertools.product({"sub": torch.sub, "div": torch.div}.items(), FLOATS):
        name = join(op, "from", NAMES[dtype])
        x = Draw(name).uniform(2, 3, dtype=dtype, low=0.3, high=2.0)
        whole = lambda x: 2.5 - x if op == "sub" else 2.5 / x
        area.case(name, op, whole, [x], {"scalar": 2.5, "reverse": True})
    for exponent, dtype in itertools.product((0.0, 1.0, 2.0, 3.0, 0.5, -1.0), WIDE):
        x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0, inf, nan], dtype=dtype)
        area.case(join("pow.edges", exponent, NAMES[dtype]), "pow", lambda x: x**exponent, [x], {"scalar": exponent})
    for (op, run), dtype in itertools.product(COMPARISONS.items(), (f32, bf16, i64)):
        x = torch.tensor([-1, 0, 1, 2, 3]).to(dtype)
        area.case(join(op, "with", NAMES[dtype]), op, lambda x: run(x, 1), [x], {"scalar": 1})
    for op, dtype in itertools.product(("add", "sub", "mul"), (i64, i32)):
        x = torch.tensor([-4, 0, 7]).to(dtype)
        area.case(join(op, "with", NAMES[dtype]), op, lambda x: ARITHMETIC[op](x, 3), [x], {"scalar": 3})


def make_clamp(area):
    for low, high in ((-0.5, 0.5), (None, 0.5), (-0.5, None)):
        args = {k: v for k, v in (("min", low), ("max", high)) if v is not None}
        run = lambda x, low=low, high=high: torch.clamp(x, low, high)
        for dtype in FLOATS:
            name = join("clamp", low, high, NAMES[dtype])
            area.case(name, "clamp", run, [Draw(name).normal(3, 4, dtype=dtype)], args)
        # On an open side our bound is infinite itself, and whether the gradient passes there is no one's rule.
        edges = [nan, -inf if low else -9.0, inf if high else 9.0, 0.5, -0.5, 0.0, -0.0]
        area.case(join("clamp.edges", low, high), "clamp", run, [torch.tensor(edges)], args)


def make_masked_fill(area):
    for x, mask in (((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 2, 2), ()), ((0, 2), (2,))):
        for dtype in FLOATS if (x, mask) == ((2, 3), (2, 3)) else (f32,):
            name = join("masked_fill", shape_name(x, mask), NAMES[dtype])
            draw = Draw(name)
            area.case(name, "masked_fill", lambda x, m: x.masked_fill(m, -2.5),
                      [draw.normal(*x, dtype=dtype), draw.bits(*mask)], {"value": -2.5})
    name = "masked_fill.infinite"
    draw = Draw(name)
    area.case(name, "masked_fill", lambda x, m: x.masked_fill(m, -inf), [draw.normal(4), draw.bits(4)], {"value": "-inf"})


def make_elementwise():
    area = Area()
    make_unary(area)
    make_binary(area)
    make_where(area)
    make_scalar_forms(area)
    make_clamp(area)
    make_masked_fill(area)
    return area


# ---- creation, casts, views ------------------------------------------------------------------------------------------


def make_creation(area):
    for start, end, step, dtype in ((0, 5, 1, i64), (3, -4, -2, i64), (0, 5, 1, f32), (0.5, 2.0, 0.25, f64),
                                    (-1, 1, 0.3, f32), (2, 2, 1, i32), (0, 7, 2, i32), (1, 4, 1, bf16)):
        out = torch.arange(start, end, step, dtype=dtype)
        args = {"start": start, "end": end, "step": step, "dtype": NAMES[dtype]}
        area.note(join("arange", start, end, step, NAMES[dtype]), "arange", args, {"out0": out})
    for shape, dtype in itertools.product(([], [2, 3], [0, 2]), NAMES):
        about = {"shape": shape, "dtype": NAMES[dtype]}
        tag = join(shape_name(shape), NAMES[dtype])
        area.note(join("zeros", tag), "zeros", about, {"out0": torch.zeros(shape, dtype=dtype)})
        area.note(join("ones", tag), "ones", about, {"out0": torch.ones(shape, dtype=dtype)})
        value = 3 if dtype in INTS else 1 if dtype == boolean else 0.3
        area.note(join("full", tag), "full", about | {"value": value}, {"out0": torch.full(shape, value, dtype=dtype)})


def make_casts(area):
    for source, target in itertools.product(NAMES, NAMES):
        name = join("cast", NAMES[source], NAMES[target])
        draw = Draw(name)
        if source.is_floating_point and not target.is_floating_point and target != boolean:
            x = draw.uniform(9, dtype=source, low=0, high=9)  # a fraction is cut; a negative u8 has no defined value
        else:
            x = draw.any(9, dtype=source)
        area.case(name, "cast", lambda x: x.to(target), [x], {"dtype": NAMES[target]}, tolerance=0)
    # Halfway between neighbours, one bit off it, the largest values, subnormals, and what overflows.
    for target, fraction, largest, tiny in ((f16, 10, 65504.0, 2.0**-24), (bf16, 7, 3.3895313892515355e38, 2.0**-133)):
        ulp = 2.0**-fraction
        ties = [1 + k * ulp / 2 for k in range(8)] + [-(1 + k * ulp / 2) for k in range(4)]
        near = [1 + ulp / 2 + 2.0**-20, 1 + ulp / 2 - 2.0**-20]
        small = [tiny, tiny / 2, tiny * 1.5, tiny * 2.5, -tiny, tiny / 4]
        top = [largest, -largest, largest * (1 + ulp / 8), largest * (1 + ulp), nan, inf, -inf, 0.0, -0.0]
        for source in WIDE:
            x = torch.tensor(ties + near + small + top, dtype=source)
            area.case(join("cast.rounding", NAMES[source], NAMES[target]), "cast", lambda x: x.to(target), [x],
                      {"dtype": NAMES[target]}, tolerance=0)
    for source, target in itertools.product((f32, f64, f16, bf16), (f32, f64, f16, bf16, boolean)):
        x = torch.tensor([nan, inf, -inf, 0.0, -0.0], dtype=source)
        area.case(join("cast.edges", NAMES[source], NAMES[target]), "cast", lambda x: x.to(target), [x],
                  {"dtype": NAMES[target]}, tolerance=0)
    for source, values in ((i64, [-(2**40), 2**53 + 1, -7, 16777217]), (i32, [2**31 - 1, -(2**31), 16777217, -7])):
        for target in (f64, f32, bf16, boolean):
            area.case(join("cast.large", NAMES[source], NAMES[target]), "cast", lambda x: x.to(target),
                      [torch.tensor(values, dtype=source)], {"dtype": NAMES[target]}, tolerance=0)


VIEWS = [  # op, arguments, shape, function
    ("reshape", {"shape": [6, 4]}, (2, 3, 4), lambda x: x.reshape(6, 4)),
    ("reshape", {"shape": [-1]}, (2, 3), lambda x: x.reshape(-1)),
    ("reshape", {"shape": [3, -1, 2]}, (2, 3, 4), lambda x: x.reshape(3, -1, 2)),
    ("reshape", {"shape": []}, (1, 1), lambda x: x.reshape([])),
    ("reshape", {"shape": [1]}, (), lambda x: x.reshape(1)),
    ("reshape", {"shape": [3, 0]}, (0, 5), lambda x: x.reshape(3, 0)),
    ("flatten", {"start": 0, "end": -1}, (2, 3, 2), lambda x: x.flatten()),
    ("flatten", {"start": 1, "end": 2}, (2, 3, 2, 2), lambda x: x.flatten(1, 2)),
    ("transpose", {"dim0": 0, "dim1": 1}, (2, 3), lambda x: x.transpose(0, 1)),
    ("transpose", {"dim0": -1, "dim1": 0}, (2, 3, 4), lambda x: x.transpose(-1, 0)),
    ("transpose", {"dim0": 1, "dim1": 1}, (2, 3), lambda x: x.transpose(1, 1)),
    ("permute", {"dims": [2, 0, 1]}, (2, 3, 4), lambda x: x.permute(2, 0, 1)),
    ("permute", {"dims": [-1, 0]}, (2, 3), lambda x: x.permute(-1, 0)),
    ("permute", {"dims": []}, (), lambda x: x.permute([])),
    ("slice", {"dim": 0, "start": 1, "end": 4, "step": 1}, (5, 2), lambda x: x[1:4]),
    ("slice", {"dim": 1, "start": 0, "end": 7, "step": 3}, (2, 7), lambda x: x[:, 0:7:3]),
    ("slice", {"dim": 1, "start": 1, "end": 6, "step": 2}, (2, 6), lambda x: x[:, 1:6:2]),
    ("slice", {"dim": -1, "start": -3, "end": -1, "step": 1}, (2, 6), lambda x: x[..., -3:-1]),
    ("slice", {"dim": 0, "start": 2, "end": 2, "step": 1}, (3, 2), lambda x: x[2:2]),
    ("slice", {"dim": 0, "start": 1, "end": 100, "step": 1}, (3, 2), lambda x: x[1:100]),
    ("select", {"dim": 0, "index": 1}, (3, 2), lambda x: x.select(0, 1)),
    ("select", {"dim": -1, "index": -2}, (3, 4), lambda x: x.select(-1, -2)),
    ("select", {"dim": 0, "index": 2}, (3,), lambda x: x.select(0, 2)),
    ("narrow", {"dim": 1, "start": 1, "length": 2}, (2, 4), lambda x: x.narrow(1, 1, 2)),
    ("narrow", {"dim": 0, "start": 0, "length": 0}, (2, 4), lambda x: x.narrow(0, 0, 0)),
    ("expand", {"shape": [4, 3]}, (1, 3), lambda x: x.expand(4, 3)),
    ("expand", {"shape": [2, 4, 3]}, (4, 1), lambda x: x.expand(2, 4, 3)),
    ("expand", {"shape": [2, -1]}, (1, 3), lambda x: x.expand(2, -1)),
    ("expand", {"shape": [2, 3]}, (), lambda x: x.expand(2, 3)),
    ("expand", {"shape": [0, 3]}, (1, 3), lambda x: x.expand(0, 3)),
    ("squeeze", {"dim": 1}, (2, 1, 3), lambda x: x.squeeze(1)),
    ("squeeze", {"dim": -3}, (1, 2, 3), lambda x: x.squeeze(-3)),
    ("unsqueeze", {"dim": 1}, (2, 3), lambda x: x.unsqueeze(1)),
    ("unsqueeze", {"dim": -1}, (2, 3), lambda x: x.unsqueeze(-1)),
    ("unsqueeze", {"dim": 0}, (), lambda x: x.unsqueeze(0)),
    ("split", {"size": 2, "dim": 0}, (5, 2), lambda x: x.split(2)),
    ("split", {"size": 3, "dim": -1}, (2, 6), lambda x: x.split(3, -1)),
]

JOINS = [  # op, dim, shapes
    ("cat", 0, [(2, 3), (1, 3)]),
    ("cat", 1, [(2, 3), (2, 1), (2, 2)]),
    ("cat", -1, [(2, 0), (2, 2)]),
    ("cat", 0, [(3,)]),
    ("stack", 0, [(2, 3), (2, 3)]),
    ("stack", -1, [(2, 3), (2, 3), (2, 3)]),
    ("stack", 0, [(), ()]),
]


def make_views():
    area = Area()
    make_creation(area)
    make_casts(area)
    for number, (op, args, shape, run) in enumerate(VIEWS):
        for dtype in (f32, f64, i64, bf16) if number % 3 == 0 else (f32,):
            name = join(op, number, NAMES[dtype])
            # The gradient of expand is a sum, which may be taken in any order.
            tolerance = None if op == "expand" else 0
            area.case(name, op, run, [Draw(name).any(*shape, dtype=dtype)], args, tolerance=tolerance)
    for number, (op, dim, shapes) in enumerate(JOINS):
        for dtype in (f32, f64, bf16, i64):
            name = join(op, number, NAMES[dtype])
            draw = Draw(name)
            run = lambda *parts: (torch.cat if op == "cat" else torch.stack)(parts, dim)
            area.case(name, op, run, [draw.any(*s, dtype=dtype) for s in shapes], {"dim": dim}, tolerance=0)
    for dtype in (f32, f64, bf16):
        name = join("index_select", NAMES[dtype])
        index = torch.tensor([2, 0, 2, 2])
        area.case(name, "index_select", lambda x, i: x.index_select(0, i), [Draw(name).normal(3, 2, dtype=dtype), index],
                  {"dim": 0})
        for x, index in (((2, 4), [[0, 0, 3], [2, 1, 1]]), ((3,), [2, 2]), ((1, 2, 3), [[[0], [2]]])):
            name = join("gather", shape_name(x), NAMES[dtype])
            area.case(name, "gather", lambda x, i: x.gather(-1, i), [Draw(name).normal(*x, dtype=dtype), torch.tensor(index)])
    area.case("index_select.empty", "index_select", lambda x, i: x.index_select(1, i),
              [Draw("index_select.empty").normal(2, 3), torch.zeros(0, dtype=i64)], {"dim": 1})
    return area


# ---- reductions ------------------------------------------------------------------------------------------------------

DIMS = [((3, 4), [0]), ((3, 4), [1]), ((3, 4), [-1]), ((2, 3, 4), [0, 2]), ((2, 3, 4), [0, 1, 2]), ((2, 1, 3), [1]),
        ((5,), [0])]


def make_sums(area, op, run):
    """`run(x, dims, keepdim)`; without dims everything is reduced."""
    for (shape, dims), keepdim in itertools.product(DIMS, (False, True)):
        name = join(op, shape_name(shape), "over", *dims, *(["keep"] if keepdim else []))
        area.case(name, op, lambda x: run(x, dims, keepdim), [Draw(name).normal(*shape)], {"dims": dims, "keepdim": keepdim})
    for dtype in FLOATS:
        name = join(op, "all", NAMES[dtype])
        area.case(name, op, lambda x: run(x, None, False), [Draw(name).normal(3, 5, dtype=dtype)])
        name = join(op, "rows", NAMES[dtype])
        area.case(name, op, lambda x: run(x, [1], False), [Draw(name).normal(3, 37, dtype=dtype)],
                  {"dims": [1], "keepdim": False})
        name = join(op, "columns", NAMES[dtype])
        area.case(name, op, lambda x: run(x, [0], False), [Draw(name).normal(37, 3, dtype=dtype)],
                  {"dims": [0], "keepdim": False})
    area.case(join(op, "scalar"), op, lambda x: run(x, None, False), [torch.tensor(2.5)])
    rows = torch.tensor([[1.0, nan, 2.0], [inf, 1.0, 2.0], [inf, -inf, 0.0], [2.0, 2.0, 1.0], [-inf, -inf, -inf]])
    area.case(join(op, "edges"), op, lambda x: run(x, [1], False), [rows], {"dims": [1], "keepdim": False})


def make_reduce():
    area = Area()
    all_or = lambda reduce: lambda x, dims, keep: reduce(x) if dims is None else reduce(x, dims, keepdim=keep)
    for op, reduce in {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin}.items():
        make_sums(area, op, all_or(reduce))
        area.case(join(op, "of no rows"), op, lambda x: reduce(x, [1]), [torch.zeros(0, 3)], {"dims": [1], "keepdim": False})
    for op, reduce in {"sum": torch.sum, "mean": torch.mean}.items():
        area.case(join(op, "of nothing"), op, lambda x: reduce(x), [torch.zeros(0)])
        area.case(join(op, "of empty rows"), op, lambda x: reduce(x, [1]), [torch.zeros(2, 0)],
                  {"dims": [1], "keepdim": False})
    for dtype in (i64, i32, u8, boolean):
        name = join("sum", NAMES[dtype])
        area.case(name, "sum", lambda x: x.sum(), [Draw(name).any(4, 5, dtype=dtype)])
    ties = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 0.0]])
    for op, reduce in {"amax": torch.amax, "amin": torch.amin}.items():
        for dtype in FLOATS:
            area.case(join(op, "ties", NAMES[dtype]), op, lambda x: reduce(x, [1]), [ties.to(dtype)],
                      {"dims": [1], "keepdim": False})
        area.case(join(op, "ties of all"), op, reduce, [ties])
    edges = torch.tensor([[1.0, nan, 3.0], [nan, nan, 2.0], [inf, -inf, inf], [-inf, -inf, -inf]])
    # Which of several equal values argmax picks is left open by PyTorch; on the CPU it is the first.
    for (dim, keepdim), dtype in itertools.product(((0, False), (0, True), (-1, False), (1, True)), FLOATS + INTS):
        name = join("argmax", dim, *(["keep"] if keepdim else []), NAMES[dtype])
        area.case(name, "argmax", lambda x: x.argmax(dim, keepdim), [Draw(name).any(3, 4, dtype=dtype)],
                  {"dim": dim, "keepdim": keepdim})
    for tag, x in (("ties", ties), ("edges", edges)):
        area.case(join("argmax", tag), "argmax", lambda x: x.argmax(1), [x], {"dim": 1, "keepdim": False})
    make_topk(area)
    return area


def make_topk(area):
    """Without equal values: PyTorch leaves their order open."""
    for (shape, k), dtype in itertools.product((((4, 5), 3), ((4, 5), 5), ((2, 2, 7), 1), ((6,), 2)), FLOATS):
        name = join("topk", k, "of", shape_name(shape), NAMES[dtype])
        values = torch.randperm(math.prod(shape), generator=Draw(name).generator).reshape(shape)
        area.case(name, "topk", lambda x: tuple(torch.topk(x, k)), [values.to(dtype)], {"k": k})
    area.case("topk.edges", "topk", lambda x: tuple(torch.topk(x, 3)), [torch.tensor([1.0, nan, inf, -inf])], {"k": 3})


# ---- products --------------------------------------------------------------------------------------------------------

PRODUCTS = [((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 3)), ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)),
            ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((2, 3, 4), (4,)), ((4,), (2, 4, 3)), ((1, 1), (1, 1)),
            ((1, 3, 4), (2, 4, 5)), ((0, 4), (4, 3)), ((3, 0), (0, 2)), ((0, 2, 3), (0, 3, 2))]


def make_linalg():
    area = Area()
    for number, (a, b) in enumerate(PRODUCTS):
        for dtype in FLOATS if number % 3 == 0 else WIDE:
            name = join("matmul", shape_name(a, b), NAMES[dtype])
            draw = Draw(name)
            area.case(name, "matmul", torch.matmul, [draw.normal(*a, dtype=dtype), draw.normal(*b, dtype=dtype)])
    for dtype in WIDE:
        name = join("matmul.long", NAMES[dtype])
        draw = Draw(name)
        scale = 70**-0.5
        area.case(name, "matmul", torch.matmul,
                  [draw.normal(17, 70, dtype=dtype), draw.normal(70, 9, dtype=dtype, scale=scale)])
    area.case("matmul.edges", "matmul", torch.matmul,
              [torch.tensor([[1.0, nan], [inf, 1.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [2.0, -1.0]])])
    for shape, bias, dtype in itertools.product(((5,), (3, 5), (2, 3, 5), (0, 5)), (True, False), FLOATS):
        if dtype not in WIDE and len(shape) != 2:
            continue
        name = join("linear", shape_name(shape), "bias" if bias else "plain", NAMES[dtype])
        draw = Draw(name)
        inputs = [draw.normal(*shape, dtype=dtype), draw.normal(4, 5, dtype=dtype)]
        area.case(name, "linear", F.linear, inputs + ([draw.normal(4, dtype=dtype)] if bias else []))
    return area


# ---- what networks are made of ---------------------------------------------------------------------------------------


def make_softmax(area):
    for op, run in {"softmax": F.softmax, "log_softmax": F.log_softmax}.items():
        for (shape, dim), dtype in itertools.product((((3, 5), -1), ((3, 5), 0), ((2, 3, 4), 1)), FLOATS):
            name = join(op, shape_name(shape), "along", dim, NAMES[dtype])
            area.case(name, op, lambda x: run(x, dim), [Draw(name).normal(*shape, dtype=dtype, scale=2)], {"dim": dim})
        for tag, x in (("one", torch.tensor([[3.0], [nan]])), ("empty", torch.zeros(0, 3)), ("scalar", torch.tensor(1.5)),
                       ("edges", torch.tensor([[1.0, nan, 0.0], [-inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, 0.0, 1.0],
                                               [1e4, -1e4, 1e4]]))):
            area.case(join(op, tag), op, lambda x: run(x, -1), [x], {"dim": -1})


def make_cross_entropy(area):
    targets = torch.tensor([1, 4, 0, 2])
    for (reduction, ignore_index), dtype in itertools.product(itertools.product(("mean", "sum", "none"), (-100, 4)), FLOATS):
        name = join("cross_entropy", reduction, ignore_index, NAMES[dtype])
        run = lambda x, t: F.cross_entropy(x, t, reduction=reduction, ignore_index=ignore_index)
        area.case(name, "cross_entropy", run, [Draw(name).normal(4, 5, dtype=dtype, scale=2), targets],
                  {"reduction": reduction, "ignore_index": ignore_index})
    for reduction in ("mean", "sum", "none"):
        name = join("cross_entropy.all ignored", reduction)
        run = lambda x, t: F.cross_entropy(x, t, reduction=reduction)
        area.case(name, "cross_entropy", run, [Draw(name).normal(3, 4), torch.full((3,), -100)],
                  {"reduction": reduction, "ignore_index": -100})
        name = join("cross_entropy.extreme", reduction)
        x = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [50.0, 49.0, -50.0]])
        area.case(name, "cross_entropy", run, [x, torch.tensor([0, 1, 2])], {"reduction": reduction, "ignore_index": -100})


def make_layer_norm(area):
    for (shape, affine, eps), dtype in itertools.product(
            (((3, 8), "both", 1e-5), ((2, 3, 5), "both", 1e-5), ((3, 8), "weight", 1e-5), ((3, 8), "plain", 1e-5),
             ((3, 8), "both", 0.1), ((4, 1), "both", 1e-5), ((7,), "both", 1e-5), ((0, 4), "both", 1e-5)), FLOATS):
        if dtype not in WIDE and (affine, eps) != ("both", 1e-5):
            continue
        name = join("layer_norm", shape_name(shape), affine, eps, NAMES[dtype])
        draw, width = Draw(name), shape[-1:]
        inputs = [draw.normal(*shape, dtype=dtype, scale=2)]
        inputs += [draw.uniform(*width, dtype=dtype, low=0.5, high=1.5)] if affine != "plain" else []
        inputs += [draw.normal(*width, dtype=dtype)] if affine == "both" else []
        area.case(name, "layer_norm", lambda x, w=None, b=None: F.layer_norm(x, width, w, b, eps), inputs, {"eps": eps})
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, nan, 2.0, 3.0], [1e4, 1e4 + 1, 1e4 + 2, 1e4 - 3]])
    area.case("layer_norm.edges", "layer_norm", lambda x: F.layer_norm(x, (4,)), [rows], {"eps": 1e-5})


def make_embedding(area):
    for dtype in FLOATS:
        for tag, index in (("repeated", torch.tensor([3, 1, 3, 3, 0])), ("matrix", torch.tensor([[0, 4], [4, 2]])),
                           ("scalar", torch.tensor(2)), ("empty", torch.zeros(0, dtype=i64))):
            name = join("embedding", tag, NAMES[dtype])
            weight = Draw(name).normal(5, 3, dtype=dtype)
            area.case(name, "embedding", lambda w, i: F.embedding(i, w), [weight, index])


def packed_attention(qkv, heads, causal):
    """Attention on a projection (B, T, 3 * heads * D) that holds q, k and v side by side."""
    batch, steps, width = qkv.shape
    q, k, v = qkv.view(batch, steps, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return y.transpose(1, 2).reshape(batch, steps, width // 3)


def make_attention(area):
    """Causal means that the last query sees every key: what PyTorch calls lower right."""
    shapes = [(2, 2, 5, 5, 4), (1, 2, 3, 6, 4), (1, 2, 1, 7, 4), (1, 1, 1, 1, 2), (1, 1, 6, 3, 8)]  # B, H, Tq, Tk, D
    for (batch, heads, queries, keys, size), causal, dtype in itertools.product(shapes, (False, True), FLOATS):
        if dtype not in WIDE and size != 4 or causal and queries > keys:
            continue
        name = join("attention", shape_name((batch, heads, queries, keys, size)), "causal" if causal else "full",
                    NAMES[dtype])
        draw = Draw(name)
        inputs = [draw.normal(batch, heads, steps, size, dtype=dtype) for steps in (queries, keys, keys)]
        seen = torch.ones(queries, keys, dtype=boolean).tril(keys - queries) if causal else None
        # In 16 bits the backward starts from an output and probabilities that were rounded.
        area.case(name, "attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, seen), inputs,
                  {"causal": causal}, tolerance=None if dtype in WIDE else 2)
    for heads, causal, dtype in itertools.product((1, 2), (False, True), FLOATS):
        name = join("self_attention", heads, "causal" if causal else "full", NAMES[dtype])
        area.case(name, "self_attention", lambda qkv: packed_attention(qkv, heads, causal),
                  [Draw(name).normal(2, 3, 3 * 8, dtype=dtype)], {"heads": heads, "causal": causal},
                  tolerance=None if dtype in WIDE else 2)
    name = "attention.scale"
    draw = Draw(name)
    area.case(name, "attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
              [draw.normal(1, 2, 4, 4) for _ in range(3)], {"causal": False, "scale": 0.3})


def module_case(area, name, kind, options, module, x):
    """A layer with its parameters as inputs in1, in2, ... whose names stand in `params`; out1, out2, ... are its
    buffers after the call."""
    params = dict(module.named_parameters())
    buffers = {n: b.double() if b.is_floating_point() else b.clone() for n, b in module.named_buffers()}

    def run(x, *values):
        y = torch.func.functional_call(module, dict(zip(params, values)) | buffers, (x,))
        return [y, *buffers.values()]

    area.case(name, kind, run, [x] + [p.detach() for p in params.values()], {"options": options, "params": list(params)})


def make_layers(area):
    torch.manual_seed(1)
    for dtype in FLOATS:
        tag = NAMES[dtype]
        draw = Draw("layers" + tag)
        x = draw.normal(3, 6, dtype=dtype)
        for bias in (True, False):
            module_case(area, join("Linear", bias, tag), "nn.Linear", {"in": 6, "out": 4, "bias": bias},
                        nn.Linear(6, 4, bias=bias, dtype=dtype), x)
        module_case(area, join("Embedding", tag), "nn.Embedding", {"count": 5, "width": 3},
                    nn.Embedding(5, 3, dtype=dtype), torch.tensor([[1, 4], [1, 0]]))
        module_case(area, join("LayerNorm", tag), "nn.LayerNorm", {"width": 6, "eps": 1e-5}, nn.LayerNorm(6, dtype=dtype), x)
        module_case(area, join("GELU", tag), "nn.GELU", {}, nn.GELU(), x)
        module_case(area, join("Dropout", tag), "nn.Dropout", {"p": 0.5, "train": False}, nn.Dropout(0.5).eval(), x)
        network = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
        module_case(area, join("Sequential", tag), "nn.Sequential", {"sizes": [6, 8, 3]}, network, x)


def note_initialisation(area, layers):
    """Moments and bounds of freshly made parameters: the runner checks ours against the same numbers."""
    for kind, (layer, options) in layers.items():
        moments = {name: {"shape": list(p.shape), "mean": p.mean().item(), "std": p.std(correction=0).item(),
                          "min": p.min().item(), "max": p.max().item()} for name, p in layer.named_parameters()}
        area.note(join("initialisation", kind), "initialisation", {"layer": kind, "options": options, "moments": moments}, {})


def make_initialisation(area):
    torch.manual_seed(2)
    layers = {"nn.Linear": (nn.Linear(64, 512), {"in": 64, "out": 512, "bias": True}),
              "nn.Embedding": (nn.Embedding(512, 64), {"count": 512, "width": 64}),
              "nn.LayerNorm": (nn.LayerNorm(64), {"width": 64, "eps": 1e-5})}
    note_initialisation(area, layers)


def make_nn():
    area = Area()
    make_softmax(area)
    make_cross_entropy(area)
    make_layer_norm(area)
    make_embedding(area)
    make_attention(area)
    make_layers(area)
    make_initialisation(area)
    return area


# ---- layers of other networks ----------------------------------------------------------------------------------------


def make_batch_norm(area):
    """Outputs: y, and the running statistics after the call, which have the input's dtype."""
    for (shape, affine, eps), training, dtype in itertools.product(
            (((4, 3), "both", 1e-5), ((2, 3, 5), "both", 1e-5), ((3, 2, 4, 3), "both", 1e-5), ((40, 2, 3), "plain", 1e-5),
             ((2, 3, 5), "both", 0.1), ((5, 1), "both", 1e-5), ((3, 4, 1, 1), "both", 1e-5), ((1, 3, 4), "both", 1e-5)),
            (True, False), FLOATS):
        if dtype not in WIDE and (affine, eps) != ("both", 1e-5):
            continue
        name = join("batch_norm", shape_name(shape), affine, eps, "training" if training else "eval", NAMES[dtype])
        draw, width = Draw(name), shape[1]
        inputs = [draw.normal(*shape, dtype=dtype, scale=2)]
        if affine == "both":
            inputs += [draw.uniform(width, dtype=dtype, low=0.5, high=1.5), draw.normal(width, dtype=dtype)]
        mean, var = [0.5 * c for c in range(width)], [1.25 + c for c in range(width)]

        def run(x, w=None, b=None):
            running = [torch.tensor(v, dtype=x.dtype) for v in (mean, var)]
            return [F.batch_norm(x, *running, w, b, training, 0.25, eps), *running]

        area.case(name, "batch_norm", run, inputs, {"mean": mean, "var": var, "training": training, "momentum": 0.25, "eps": eps})


def make_conv2d(area):
    for (image, weight, bias, stride, padding), dtype in itertools.product(
            (((3, 1, 9, 9), (5, 1, 3, 3), True, 1, 0), ((2, 5, 7, 6), (4, 5, 3, 2), True, 1, 0),
             ((2, 2, 5, 7), (3, 2, 3, 3), False, 2, 1), ((1, 3, 4, 4), (2, 3, 1, 1), True, 3, 2),
             ((2, 2, 3, 3), (1, 2, 3, 3), True, 1, 0), ((0, 2, 4, 4), (3, 2, 3, 3), True, 1, 0)), FLOATS):
        if dtype not in WIDE and stride == 1 and image[0] != 2:
            continue
        name = join("conv2d", shape_name(image, weight), "bias" if bias else "plain", stride, padding, NAMES[dtype])
        draw = Draw(name)
        inputs = [draw.normal(*image, dtype=dtype), draw.normal(*weight, dtype=dtype)]
        inputs += [draw.normal(weight[0], dtype=dtype)] if bias else []
        area.case(name, "conv2d", lambda x, w, b=None: F.conv2d(x, w, b, stride, padding), inputs,
                  {"stride": stride, "padding": padding})


def make_conv_layers(area):
    torch.manual_seed(3)
    for dtype in WIDE:
        conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=dtype)
        name = join("Conv2d", NAMES[dtype])
        module_case(area, name, "nn.Conv2d", {"in": 2, "out": 3, "kernel": 3, "stride": 2, "padding": 1}, conv,
                    Draw(name).normal(2, 2, 5, 6, dtype=dtype))
    for dtype, training in itertools.product(WIDE, (True, False)):
        tag = join("training" if training else "eval", NAMES[dtype])
        draw = Draw("batch norm layers" + tag)
        for kind, layer, shape in (("nn.BatchNorm1d", nn.BatchNorm1d, (4, 3)), ("nn.BatchNorm1d", nn.BatchNorm1d, (4, 3, 2)),
                                   ("nn.BatchNorm2d", nn.BatchNorm2d, (2, 3, 4, 2))):
            norm = layer(3, eps=1e-4, momentum=0.3, dtype=dtype).train(training)
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias)
            module_case(area, join(kind[3:], len(shape), tag), kind,
                        {"channels": 3, "eps": 1e-4, "momentum": 0.3, "train": training}, norm,
                        draw.normal(*shape, dtype=dtype, scale=2))


def roles_case(area, name, kind, options, module, inputs, roles, **keywords):
    """A layer that takes several tensors: argument i is in{roles[i]}; the parameters follow the inputs."""
    params = dict(module.named_parameters())

    def run(*tensors):
        xs, values = tensors[:len(inputs)], tensors[len(inputs):]
        y = torch.func.functional_call(module, dict(zip(params, values)), tuple(xs[i] for i in roles), keywords)
        return y[0] if isinstance(y, tuple) else y

    area.case(name, kind, run, inputs + [p.detach() for p in params.values()],
              {"options": options, "roles": roles, "params": list(params)})


def causal_mask(steps):
    return torch.ones(steps, steps, dtype=boolean).triu(1)


def shake(module):
    """Moves biases and norms away from 0 and 1, so that every parameter matters."""
    for p in module.parameters():
        if p.dim() == 1:
            p.data += 0.2 * torch.randn(p.shape, dtype=p.dtype)
    return module


def make_multihead_attention(area):
    torch.manual_seed(5)
    # roles of query, key and value, whether batch first, whether causal
    for (tag, roles, batch_first, causal), dtype in itertools.product(
            (("self", [0, 0, 0], False, False), ("self causal", [0, 0, 0], False, True), ("cross", [0, 1, 1], False, False),
             ("three", [0, 1, 2], False, False), ("self batch first", [0, 0, 0], True, False),
             ("cross batch first", [0, 1, 1], True, False), ("query is value", [0, 1, 0], False, False)), WIDE):
        name = join("MultiheadAttention", tag, NAMES[dtype])
        draw = Draw(name)
        steps = [4, 4 if tag == "query is value" else 6, 6]
        inputs = [draw.normal(*((2, steps[i], 6) if batch_first else (steps[i], 2, 6)), dtype=dtype)
                  for i in range(max(roles) + 1)]
        layer = shake(nn.MultiheadAttention(6, 3, dropout=0.1, batch_first=batch_first, dtype=dtype).eval())
        options = {"width": 6, "heads": 3, "batch_first": batch_first, "causal": causal}
        mask = {"attn_mask": causal_mask(4), "is_causal": True} if causal else {}
        roles_case(area, name, "nn.MultiheadAttention", options, layer, inputs, roles, need_weights=False, **mask)
    make_attention_masks(area)


def make_attention_masks(area):
    """Masks of keys and of pairs, which are tensors of the case by PyTorch's names."""
    for (tag, keys, pairs, batch_first), dtype in itertools.product(
            (("padding", "bool", None, False), ("pairs", None, "bool", True), ("heads", None, "bool heads", False),
             ("added", None, "float", False), ("both", "bool", "bool", True), ("both added", "float", "float", False)),
            WIDE):
        name = join("MultiheadAttention", "masks", tag, NAMES[dtype])
        draw = Draw(name)
        inputs = [draw.normal(*((2, steps, 6) if batch_first else (steps, 2, 6)), dtype=dtype) for steps in (4, 5)]
        layer = shake(nn.MultiheadAttention(6, 3, dropout=0.1, batch_first=batch_first, dtype=dtype).eval())
        masks = {}
        if keys is not None:  # the first key of all is always there
            masks["key_padding_mask"] = draw.bits(2, 5) if keys == "bool" else draw.normal(2, 5, dtype=dtype)
        if pairs is not None:
            shape = (6, 4, 5) if pairs == "bool heads" else (4, 5)
            masks["attn_mask"] = draw.bits(*shape) if "bool" in pairs else draw.normal(*shape, dtype=dtype)
        for mask in masks.values():
            if mask.dtype == boolean:
                mask[..., 0] = False
        options = {"width": 6, "heads": 3, "batch_first": batch_first, "masks": list(masks)}
        roles_case(area, name, "nn.MultiheadAttention", options, layer, inputs, [0, 1, 1], need_weights=False, **masks)
        area.tensors.update({f"{name}/{key}": mask for key, mask in masks.items()})


def make_transformer(area):
    torch.manual_seed(6)
    size = {"dim_feedforward": 5, "dropout": 0.1}
    for batch_first, causal, dtype in ((False, False, f32), (True, True, f64)):
        tag = join("causal batch first" if causal else "full", NAMES[dtype])
        draw = Draw("transformer" + tag)
        src, tgt = (draw.normal(*((2, steps, 8) if batch_first else (steps, 2, 8)), dtype=dtype) for steps in (4, 3))
        more = {"batch_first": batch_first, "dtype": dtype}
        options = {"width": 8, "heads": 4, "feedforward": 5, "batch_first": batch_first, "causal": causal}
        keywords = lambda steps, *names: {name: causal_mask(steps) for name in names} if causal else {}
        roles_case(area, join("TransformerEncoderLayer", tag), "nn.TransformerEncoderLayer", options,
                   shake(nn.TransformerEncoderLayer(8, 4, **size, **more).eval()), [src], [0], **keywords(4, "src_mask"))
        roles_case(area, join("TransformerDecoderLayer", tag), "nn.TransformerDecoderLayer", options,
                   shake(nn.TransformerDecoderLayer(8, 4, **size, **more).eval()), [tgt, src], [0, 1],
                   **keywords(3, "tgt_mask"))
    for causal, dtype in ((False, f32), (True, f64)):  # smaller, since it has many parameters
        name = join("Transformer", "causal" if causal else "full", NAMES[dtype])
        draw = Draw(name)
        roles_case(area, name, "nn.Transformer",
                   {"width": 4, "heads": 2, "feedforward": 3, "layers": 2, "batch_first": False, "causal": causal},
                   shake(nn.Transformer(4, 2, 2, 2, 3, dtype=dtype).eval()),
                   [draw.normal(5, 2, 4, dtype=dtype), draw.normal(3, 2, 4, dtype=dtype)], [0, 1],
                   **({"tgt_mask": causal_mask(3)} if causal else {}))


def make_layers_area():
    area = Area()
    make_batch_norm(area)
    make_conv2d(area)
    make_conv_layers(area)
    make_multihead_attention(area)
    make_transformer(area)
    torch.manual_seed(4)
    note_initialisation(area, {
        "nn.Conv2d": (nn.Conv2d(8, 64, 5), {"in": 8, "out": 64, "kernel": 5, "stride": 1, "padding": 0}),
        "nn.MultiheadAttention": (nn.MultiheadAttention(64, 4), {"width": 64, "heads": 4, "batch_first": False})})
    return area


# ---- indexing, and elements in another order ------------------------------------------------------------------------

INDEX = [  # name, shape, entries; a list is a tensor of positions, a tuple a slice, "..." and None as they are
    ("position", (4, 3), [1]),
    ("last", (4, 3), [-1]),
    ("both", (4, 3), [2, -2]),
    ("slice", (5, 3), [(1, 4, None)]),
    ("steps", (7, 3), [(None, None, 3), (-2, None, None)]),
    ("rest", (2, 3, 4), ["...", 1]),
    ("rest in the middle", (2, 3, 4), [0, "...", (1, 3, None)]),
    ("new axes", (2, 3), [None, 1, None, "...", None]),
    ("nothing", (2, 3), []),
    ("none left", (4, 2), [(3, 1, None)]),
    ("rows", (4, 3), [[2, 0, 2, -1]]),
    ("row table", (4, 3), [[[0, 1], [3, -3]]]),
    ("columns", (4, 3), [(None, None, None), [2, 0]]),
    ("pairs", (4, 3), [[0, 3, -1], [2, 0, 1]]),
    ("broadcast pairs", (4, 3), [[[0], [2]], [1, 0, 2]]),
    ("neighbours", (2, 3, 4, 2), [(None, None, None), [[0, 2]], [1, 3]]),
    ("apart", (2, 3, 4, 2), [[1, 0, 1], (None, None, None), [3, 0, 2]]),
    ("position and tensor", (3, 4, 2), [1, [3, 0]]),
    ("tensor after new axis", (3, 4), [None, [2, 0]]),
    ("no rows", (3, 4), [[]]),
]
MASKS = [("mask", (4, 3), (4, 3)), ("row mask", (4, 3), (4,)), ("mask behind", (2, 3, 2), (3, 2))]


def entry_of(entry):
    if isinstance(entry, list):
        return torch.tensor(entry, dtype=i64)
    if isinstance(entry, tuple):
        return slice(*entry)
    return ... if entry == "..." else entry


def make_index(area):
    for (tag, shape, entries), dtype in itertools.product(INDEX, (f32, bf16)):
        name = join("index", tag, NAMES[dtype])
        at = tuple(entry_of(e) for e in entries)
        about = {"at": [{"slice": e} if isinstance(e, tuple) else {"positions": e, "shape": list(torch.tensor(e).shape)}
                        if isinstance(e, list) else e for e in entries]}
        for entry in about["at"]:
            if isinstance(entry, dict) and "positions" in entry:
                entry["positions"] = torch.tensor(entry["positions"], dtype=i64).flatten().tolist()
        area.case(name, "index", lambda x: x[at], [Draw(name).normal(*shape, dtype=dtype)], about)
        picked = Draw(name).normal(*shape, dtype=dtype)[at]
        for put in (False, True):
            if not put and tag in ("rows", "row table"):
                continue  # positions that come twice: PyTorch leaves open which value stays
            put_name = join("index_put", tag, "add" if put else "write", NAMES[dtype])
            draw = Draw(put_name)

            def run(x, values):
                y = x.clone()
                if put and any(isinstance(e, list) for e in entries):
                    full = [slice(None) if e is None else e for e in at]
                    if None in entries or any(not isinstance(e, torch.Tensor) for e in at):
                        grid = torch.arange(x.numel()).reshape(x.shape)[at].flatten()
                        return y.flatten().index_add(0, grid, values.expand(picked.shape).flatten()).reshape(x.shape)
                    return y.index_put(tuple(full), values, accumulate=True)
                y[at] = y[at] + values if put else values
                return y

            area.case(put_name, "index_put", run,
                      [draw.normal(*shape, dtype=dtype), draw.normal(*picked.shape[-1:], dtype=dtype)],
                      about | {"add": put})
    for (tag, shape, mask), dtype in itertools.product(MASKS, (f32, f64, bf16, i64)):
        name = join("index", tag, NAMES[dtype])
        draw = Draw(name)
        behind = (slice(None),) if tag == "mask behind" else ()
        inputs = [draw.any(*shape, dtype=dtype), draw.bits(*mask)]
        about = {"at": ([{"slice": [None, None, None]}] if behind else []) + [{"input": 1}]}
        area.case(name, "index", lambda x, m: x[behind + (m,)], inputs, about)
        if dtype.is_floating_point:

            def run(x, m, v):
                y = x.clone()
                y[behind + (m,)] = v
                return y

            area.case(join("index_put", tag, NAMES[dtype]), "index_put", run, inputs + [draw.normal(dtype=dtype)],
                      about | {"add": False, "values": 2})
    for dtype in FLOATS + INTS + (boolean,):
        name = join("nonzero", NAMES[dtype])
        area.case(name, "nonzero", torch.nonzero, [Draw(name).integers(3, 4, high=3).to(dtype)])
    area.case("nonzero.scalar", "nonzero", torch.nonzero, [torch.tensor(2.0)])
    for (x, mask), dtype in itertools.product((((2, 3), (2, 3)), ((2, 1, 3), (4, 1)), ((3,), ())), (f32, i64)):
        name = join("masked_select", shape_name(x, mask), NAMES[dtype])
        draw = Draw(name)
        area.case(name, "masked_select", torch.masked_select, [draw.any(*x, dtype=dtype), draw.bits(*mask)])


def make_along(area):
    """gather, scatter and scatter_add along every axis, with indices that are shorter than x elsewhere."""
    for (shape, dim, index), dtype in itertools.product(
            (((4, 5), 0, (2, 5)), ((4, 5), 1, (4, 7)), ((4, 5), -1, (3, 2)), ((2, 3, 4), 1, (2, 2, 3)), ((6,), 0, (3,))),
            (f32, f64, bf16)):
        tag = join(shape_name(shape, index), dim, NAMES[dtype])
        draw = Draw("along" + tag)
        x, size = draw.normal(*shape, dtype=dtype), shape[dim]
        at = draw.integers(*index, high=size)
        source = draw.normal(*index, dtype=dtype)
        area.case(join("gather", tag), "gather", lambda x, i: x.gather(dim, i), [x, at], {"dim": dim})
        area.case(join("scatter_add", tag), "scatter_add", lambda x, i, v: x.scatter_add(dim, i, v), [x, at, source],
                  {"dim": dim})
        # Each position once: PyTorch leaves open which of several values stays.
        if index[dim] > size:
            continue
        once = torch.rand([size if d == dim % len(shape) else n for d, n in enumerate(index)],
                          generator=draw.generator).argsort(dim).narrow(dim, 0, index[dim])
        area.case(join("scatter", tag), "scatter", lambda x, i, v: x.scatter(dim, i, v), [x, once, source], {"dim": dim})
        area.case(join("scatter.number", tag), "scatter", lambda x, i: x.scatter(dim, i, 1.5), [x, once],
                  {"dim": dim, "value": 1.5})


ARRANGED = [  # op, arguments, shape, function
    ("chunk", {"count": 3, "dim": 0}, (7, 2), lambda x: x.chunk(3)),
    ("chunk", {"count": 2, "dim": -1}, (2, 6), lambda x: x.chunk(2, -1)),
    ("unbind", {"dim": 1}, (2, 3), lambda x: x.unbind(1)),
    ("repeat", {"counts": [2, 3]}, (2, 3), lambda x: x.repeat(2, 3)),
    ("repeat", {"counts": [2, 1, 3]}, (2, 3), lambda x: x.repeat(2, 1, 3)),
    ("repeat", {"counts": [0, 2]}, (2, 3), lambda x: x.repeat(0, 2)),
    ("flip", {"dims": [0]}, (3, 2), lambda x: x.flip(0)),
    ("flip", {"dims": [-1, 0]}, (2, 3, 4), lambda x: x.flip(-1, 0)),
    ("roll", {"shift": 2, "dim": 1}, (2, 5), lambda x: x.roll(2, 1)),
    ("roll", {"shift": -7, "dim": 0}, (3, 2), lambda x: x.roll(-7, 0)),
    ("pad", {"counts": [1, 2], "mode": "constant", "value": 0.5}, (2, 3), lambda x: F.pad(x, (1, 2), value=0.5)),
    ("pad", {"counts": [-1, 2, 0, 1], "mode": "constant", "value": 0}, (2, 3), lambda x: F.pad(x, (-1, 2, 0, 1))),
    ("pad", {"counts": [2, 1], "mode": "reflect"}, (2, 4), lambda x: F.pad(x, (2, 1), "reflect")),
    ("pad", {"counts": [1, 2, 2, 0], "mode": "replicate"}, (2, 3, 3), lambda x: F.pad(x, (1, 2, 2, 0), "replicate")),
    ("pad", {"counts": [3, 1], "mode": "circular"}, (2, 3), lambda x: F.pad(x, (3, 1), "circular")),
    ("tril", {"offset": 0}, (3, 4), lambda x: x.tril()),
    ("tril", {"offset": -1}, (2, 3, 3), lambda x: x.tril(-1)),
    ("triu", {"offset": 1}, (4, 3), lambda x: x.triu(1)),
    ("triu", {"offset": -9}, (4, 3), lambda x: x.triu(-9)),
    ("diag", {"offset": 0}, (3,), lambda x: x.diag()),
    ("diag", {"offset": -2}, (3,), lambda x: x.diag(-2)),
    ("diag", {"offset": 1}, (3, 4), lambda x: x.diag(1)),
    ("diagonal", {"offset": 0, "dim1": 0, "dim2": 2}, (3, 2, 4), lambda x: x.diagonal(0, 0, 2)),
    ("diagonal", {"offset": -1, "dim1": -1, "dim2": 0}, (3, 2, 4), lambda x: x.diagonal(-1, -1, 0)),
]


def make_indexing():
    area = Area()
    make_index(area)
    make_along(area)
    for number, (op, args, shape, run) in enumerate(ARRANGED):
        for dtype in (f32, f64, bf16, i64) if op not in ("pad",) else (f32, f64, bf16):
            name = join(op, number, NAMES[dtype])
            area.case(name, op, run, [Draw(name).any(*shape, dtype=dtype)], args)
    for number, (shape, value, reverse) in enumerate((((2, 3), 0.5, False), ((3,), -1.0, True))):
        name = join("where.number", number)
        draw = Draw(name)
        run = lambda c, x: torch.where(c, value, x) if reverse else torch.where(c, x, value)
        area.case(name, "where_number", run, [draw.bits(*shape), draw.normal(*shape)], {"value": value, "reverse": reverse})
    for tag, args in (("eye.square", (3, 3)), ("eye.wide", (2, 4)), ("eye.tall", (3, 1))):
        for dtype in (f32, i64, boolean):
            area.note(join(tag, NAMES[dtype]), "eye", {"rows": args[0], "columns": args[1], "dtype": NAMES[dtype]},
                      {"out0": torch.eye(*args, dtype=dtype)})
    for start, end, count in ((0, 1, 5), (-2.5, 7, 12), (3, -3, 4), (1, 2, 1), (1, 2, 0)):
        for dtype in (f32, f64):
            area.note(join("linspace", start, end, count, NAMES[dtype]), "linspace",
                      {"start": start, "end": end, "count": count, "dtype": NAMES[dtype]},
                      {"out0": torch.linspace(start, end, count, dtype=f64).to(dtype)})
    for shape in ((), (4,), (2, 3)):
        name = join("one_hot", shape_name(shape))
        area.case(name, "one_hot", lambda i: F.one_hot(i, 6), [Draw(name).integers(*shape, high=6)], {"classes": 6})
    return area


# ---- statistics, order, sums of products -----------------------------------------------------------------------------


def make_statistics():
    area = Area()
    spread = lambda f: lambda x, dims, keep: f(x, tuple(range(x.dim())) if dims is None else dims, keepdim=keep)
    families = {
        "var": (spread(torch.var), {}), "stddev": (spread(torch.std), {}),
        "var.population": (spread(lambda x, d, keepdim: torch.var(x, d, correction=0, keepdim=keepdim)), {"correction": 0}),
        "logsumexp": (spread(torch.logsumexp), {}),
    }
    for p in (2, 1, 0, 3, 0.5, inf, -inf):
        families[join("norm", p)] = (spread(lambda x, d, keepdim, p=p: torch.linalg.vector_norm(x, p, d, keepdim)),
                                     {"p": p if math.isfinite(p) else str(p)})
    for name, (run, more) in families.items():
        op = name.split(".")[0]
        for (shape, dims), keepdim in itertools.product((((3, 4), [1]), ((2, 3, 4), [0, 2]), ((2, 3, 4), [-2])), (False, True)):
            case = join(name, shape_name(shape), "over", *dims, *(["keep"] if keepdim else []))
            area.case(case, op, lambda x: run(x, dims, keepdim), [Draw(case).normal(*shape)],
                      {"dims": dims, "keepdim": keepdim} | more, grad=name != "norm.0")  # ours has none, PyTorch's is 0
        for dtype in FLOATS:
            case = join(name, "all", NAMES[dtype])
            area.case(case, op, lambda x: run(x, None, False), [Draw(case).normal(3, 5, dtype=dtype)], more,
                      grad=name != "norm.0")
    area.case("logsumexp.edges", "logsumexp", lambda x: torch.logsumexp(x, 1),
              [torch.tensor([[-inf, -inf], [inf, 0.0], [1e4, -1e4], [nan, 0.0], [500.0, 500.0]])], {"dims": [1], "keepdim": False})
    area.case("norm.of zeros", "norm", lambda x: torch.linalg.vector_norm(x, 2, 1), [torch.tensor([[0.0, 0.0], [3.0, 4.0]])],
              {"dims": [1], "keepdim": False, "p": 2})
    for op, run in {"any": torch.any, "all": torch.all}.items():
        for dtype in FLOATS + INTS + (boolean,):
            x = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]).to(dtype)
            # PyTorch's u8 has u8 answers here, for a history of its own.
            area.case(join(op, NAMES[dtype]), op, lambda x: run(x, 1).to(boolean), [x], {"dims": [1], "keepdim": False})
        area.case(join(op, "of nothing"), op, lambda x: run(x, 1), [torch.zeros(2, 0)], {"dims": [1], "keepdim": False})
    values = {"plain": (2, 4), "one": (3, 1), "cube": (2, 3, 2)}
    for tag, dtype in itertools.product(values, FLOATS + (i64, i32)):
        for op, run in {"cumsum": torch.cumsum, "cumprod": torch.cumprod}.items():
            for dim in (0, -1):
                name = join(op, tag, dim, NAMES[dtype])
                area.case(name, op, lambda x: run(x, dim), [Draw(name).any(*values[tag], dtype=dtype)], {"dim": dim})
        name = join("prod", tag, NAMES[dtype])
        area.case(name, "prod", lambda x: x.prod(1), [Draw(name).any(*values[tag], dtype=dtype)], {"dims": [1], "keepdim": False})
    zeros = torch.tensor([[2.0, 0.0, 3.0, -1.0], [0.0, 0.0, 2.0, 5.0], [1.0, 2.0, 3.0, 0.0]])
    for op, run in {"cumprod": lambda x: x.cumprod(1), "prod": lambda x: x.prod(1)}.items():
        area.case(join(op, "with zeros"), op, run, [zeros], {"dim": 1} if op == "cumprod" else {"dims": [1], "keepdim": False})
    area.case("prod.all", "prod", lambda x: x.prod(), [Draw("prod.all").normal(2, 3)])
    ties = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 0.0]])
    for (op, run), dtype in itertools.product({"max": torch.max, "min": torch.min}.items(), FLOATS + INTS):
        for dim, keepdim in ((0, False), (1, True)):
            name = join(op, dim, NAMES[dtype])
            area.case(name, op, lambda x: tuple(run(x, dim, keepdim)), [Draw(name).uniform(3, 4, low=0, high=9).to(dtype)],
                      {"dim": dim, "keepdim": keepdim})
        area.case(join(op, "ties", NAMES[dtype]), op, lambda x: tuple(run(x, 1)), [ties.abs().to(dtype)],
                  {"dim": 1, "keepdim": False})
        if op == "min":
            name = join("argmin", NAMES[dtype])
            area.case(name, "argmin", lambda x: x.argmin(1), [Draw(name).any(3, 4, dtype=dtype)], {"dim": 1, "keepdim": False})
    for (dim, descending), dtype in itertools.product(((-1, False), (0, True), (1, False)), FLOATS + (i64, u8)):
        name = join("sort", dim, "down" if descending else "up", NAMES[dtype])
        x = Draw(name).integers(4, 6, high=9).to(dtype)
        area.case(name, "sort", lambda x: tuple(torch.sort(x, dim=dim, descending=descending, stable=True)), [x],
                  {"dim": dim, "descending": descending})
    for descending in (False, True):
        area.case(join("sort.edges", descending), "sort", lambda x: tuple(torch.sort(x, descending=descending, stable=True)),
                  [torch.tensor([1.0, nan, -inf, inf, 1.0, nan, 0.0])], {"dim": -1, "descending": descending})
    for dtype in FLOATS:
        name = join("outer", NAMES[dtype])
        draw = Draw(name)
        area.case(name, "outer", torch.outer, [draw.normal(3, dtype=dtype), draw.normal(4, dtype=dtype)])
    for number, (equation, shapes) in enumerate((
            ("ik,kj->ij", [(2, 3), (3, 4)]), ("bij,bjk->bik", [(2, 2, 3), (2, 3, 4)]), ("ij->ji", [(2, 3)]), ("ij->", [(2, 3)]),
            ("ii->i", [(3, 3)]), ("ii", [(3, 3)]), ("i,i->", [(4,), (4,)]), ("i,j->ij", [(2,), (3,)]), ("ij,j", [(2, 3), (3,)]),
            ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]), ("...ij,...jk->...ik", [(2, 1, 2, 3), (3, 3, 2)]),
            ("b...,b...->b", [(2, 3, 2), (2, 3, 2)]), ("ab,bc,cd->ad", [(2, 3), (3, 2), (2, 4)]), ("ij,ij->ij", [(2, 3), (2, 3)]),
            ("ijk,jil->kl", [(2, 3, 2), (3, 2, 4)]), ("bn,anm,bm->ba", [(2, 3), (4, 3, 5), (2, 5)]), ("iij->j", [(2, 2, 3)]),
            ("ij, kl -> ik", [(2, 3), (4, 2)]), ("i...->...", [(2, 3, 2)]))):
        for dtype in (f32, f64, bf16):
            name = join("einsum", number, NAMES[dtype])
            draw = Draw(name)
            area.case(name, "einsum", lambda *x: torch.einsum(equation, *x), [draw.normal(*s, dtype=dtype) for s in shapes],
                      {"equation": equation}, tolerance=None if dtype in WIDE or len(shapes) < 3 else 4)
    return area


# ---- functions made of other ops -------------------------------------------------------------------------------------


def make_windows(area):
    options = {"plain": {}, "strided": {"stride": [2, 1]}, "padded": {"padding": [1, 2]}, "dilated": {"dilation": [2, 1]},
               "all": {"stride": [1, 2], "padding": [2, 1], "dilation": [1, 2]}, "alike": {"stride": [2, 2], "padding": [1, 1]}}
    for (tag, more), kernel, dtype in itertools.product(options.items(), ([2, 2], [1, 3]), (f32, bf16)):
        name = join("unfold", tag, shape_name(kernel), NAMES[dtype])
        x = Draw(name).normal(2, 3, 6, 5, dtype=dtype)
        area.case(name, "unfold", lambda x: F.unfold(x, kernel, **more), [x], {"kernel": kernel} | more)
        columns = F.unfold(x.float(), kernel, **more)
        name = join("fold", tag, shape_name(kernel), NAMES[dtype])
        area.case(name, "fold", lambda x: F.fold(x, (6, 5), kernel, **more), [Draw(name).normal(*columns.shape, dtype=dtype)],
                  {"size": [6, 5], "kernel": kernel} | more)
    area.case("unfold.one image", "unfold", lambda x: F.unfold(x, 2), [Draw("unfold.one image").normal(3, 4, 4)], {"kernel": [2, 2]})
    area.case("fold.one image", "fold", lambda x: F.fold(x, (4, 4), 2), [Draw("fold.one image").normal(12, 9)],
              {"size": [4, 4], "kernel": [2, 2]})
    for factor, dtype in itertools.product((1, 2, 3), FLOATS + (i64,)):
        for shape in ((2, 2 * factor * factor, 2, 3), (factor * factor, 1, 2), (1, 2, factor * factor, 2, 2)):
            name = join("pixel_shuffle", factor, shape_name(shape), NAMES[dtype])
            area.case(name, "pixel_shuffle", lambda x: F.pixel_shuffle(x, factor), [Draw(name).any(*shape, dtype=dtype)],
                      {"factor": factor}, tolerance=0)
            back = shape[:-3] + (2, shape[-2] * factor, shape[-1] * factor)
            name = join("pixel_unshuffle", factor, shape_name(back), NAMES[dtype])
            area.case(name, "pixel_unshuffle", lambda x: F.pixel_unshuffle(x, factor), [Draw(name).any(*back, dtype=dtype)],
                      {"factor": factor}, tolerance=0)


def make_places(area):
    for corners, dtype in itertools.product((False, True), (f32, f64)):
        for size in ((3, 4), (1, 5), (1, 1)):
            name = join("affine_grid", shape_name(size), corners, NAMES[dtype])
            area.case(name, "affine_grid", lambda x: F.affine_grid(x, (2, 1, *size), align_corners=corners),
                      [Draw(name).normal(2, 2, 3, dtype=dtype)], {"size": size, "align_corners": corners})
        for mode, outside in itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection")):
            name = join("grid_sample", mode, outside, corners, NAMES[dtype])
            draw = Draw(name)
            area.case(name, "grid_sample",
                      lambda x, grid: F.grid_sample(x, grid if mode == "bilinear" else grid.detach(), mode, outside, corners),
                      [draw.normal(2, 3, 4, 5, dtype=dtype), draw.uniform(2, 3, 4, 2, dtype=dtype, low=-2.5, high=2.5)],
                      {"mode": mode, "padding_mode": outside, "align_corners": corners})
    for order, lengths in itertools.product(("ij", "xy"), ((3, 2), (3,), (2, 3, 2), (3, 0))):
        name = join("meshgrid", order, shape_name(lengths))
        draw = Draw(name)
        area.case(name, "meshgrid", lambda *x: torch.meshgrid(*x, indexing=order), [draw.normal(n) for n in lengths],
                  {"indexing": order})
    for shape, dtype in itertools.product(((2, 3, 5), (2, 2, 3, 4)), (f32, f64, bf16)):
        for affine in (False, True):
            name = join("instance_norm", shape_name(shape), affine, NAMES[dtype])
            draw = Draw(name)
            more = [draw.normal(shape[1], dtype=dtype) for _ in range(2)] if affine else []
            area.case(name, "instance_norm", lambda x, *w: F.instance_norm(x, None, None, *w), [draw.normal(*shape, dtype=dtype)] + more)


def make_order(area):
    for dtype in FLOATS + INTS:
        for shape in ((12,), (3, 5), (), (0,)):
            name = join(shape_name(shape), NAMES[dtype])
            x = Draw("unique." + name).integers(*shape, high=6).to(dtype)
            for op, run in {"unique": torch.unique, "unique_consecutive": torch.unique_consecutive}.items():
                area.case(join(op, name), op, lambda x: run(x, return_inverse=True, return_counts=True), [x], grad=False, tolerance=0)
    for dtype in INTS:
        x = Draw("bincount").integers(9, high=5).to(dtype)
        area.case(join("bincount", NAMES[dtype]), "bincount", torch.bincount, [x], {"minimum": 0}, tolerance=0)
        area.case(join("bincount.minimum", NAMES[dtype]), "bincount", lambda x: torch.bincount(x, minlength=9), [x], {"minimum": 9}, tolerance=0)
    area.case("bincount.nothing", "bincount", lambda x: torch.bincount(x, minlength=2), [torch.zeros(0, dtype=i64)], {"minimum": 2}, tolerance=0)
    for dtype in WIDE:
        draw = Draw(join("bincount.weights", NAMES[dtype]))
        area.case(join("bincount.weights", NAMES[dtype]), "bincount", torch.bincount,
                  [draw.integers(9, high=5), draw.normal(9, dtype=dtype)], {"minimum": 0}, grad=False)
    for right, dtype in itertools.product((False, True), (f32, f64, i64, i32)):
        for tag, sorted_shape, shape in (("line", (7,), (3, 4)), ("lines", (2, 6), (2, 5)), ("one", (1,), (4,)), ("none", (0,), (2,)),
                                         ("of nothing", (3,), (0,))):
            name = join("searchsorted", tag, "right" if right else "left", NAMES[dtype])
            draw = Draw(name)
            line = draw.integers(*sorted_shape, high=9).sort(-1).values.to(dtype)
            area.case(name, "searchsorted", lambda a, b: torch.searchsorted(a, b, right=right), [line, draw.integers(*shape, high=9).to(dtype)],
                      {"right": right}, grad=False, tolerance=0)
    for dtype in FLOATS + INTS:
        for dim, keepdim, shape in ((0, False, (3, 4)), (1, True, (3, 4)), (-2, False, (2, 5, 3))):
            name = join("median", shape_name(shape), dim, NAMES[dtype])
            size = math.prod(shape)
            x = torch.randperm(size, generator=Draw(name).generator).reshape(shape).to(dtype)  # no ties
            area.case(name, "median", lambda x: tuple(torch.median(x, dim, keepdim)), [x], {"dim": dim, "keepdim": keepdim})
    area.case("median.edges", "median", lambda x: tuple(torch.median(x, 1)),
              [torch.tensor([[1.0, nan, 2.0], [inf, 0.0, -inf], [-0.5, inf, inf]])], {"dim": 1, "keepdim": False})
    for between, q in itertools.product(("linear", "lower", "higher", "midpoint", "nearest"), (0.0, 0.3, 0.5, 0.81, 1.0)):
        for dim, keepdim, shape in ((0, False, (4, 3)), (-1, True, (3, 4)), (None, False, (2, 3)), (None, True, (2, 3))):
            name = join("quantile", between, q, dim, keepdim)
            area.case(name, "quantile", lambda x: torch.quantile(x, q, dim, keepdim, interpolation=between),
                      [Draw(name).normal(*shape)], {"q": [q], "interpolation": between, "keepdim": keepdim}
                      | ({} if dim is None else {"dim": dim}))
    for dtype in WIDE:
        name = join("quantile.several", NAMES[dtype])
        qs = [0.25, 0.5, 0.99]
        area.case(name, "quantile", lambda x: torch.quantile(x, torch.tensor(qs, dtype=f64), 1), [Draw(name).normal(3, 7, 2, dtype=dtype)],
                  {"q": qs, "interpolation": "linear", "keepdim": False, "dim": 1, "several": True})
    area.case("quantile.edges", "quantile", lambda x: torch.quantile(x, 0.5, 1), [torch.tensor([[1.0, nan], [inf, 0.0], [inf, inf]])],
              {"q": [0.5], "interpolation": "linear", "keepdim": False, "dim": 1}, grad=False)


def make_distances(area):
    for dtype in FLOATS:
        for tag, a, b, dim in (("plain", (3, 4), (3, 4), 1), ("broadcast", (3, 1, 4), (2, 4), -1), ("first", (4, 3), (4, 3), 0)):
            name = join("cosine_similarity", tag, NAMES[dtype])
            draw = Draw(name)
            area.case(name, "cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim), [draw.normal(*a, dtype=dtype), draw.normal(*b, dtype=dtype)],
                      {"dim": dim})
        for p, keepdim in itertools.product((1, 2, 3), (False, True)):
            name = join("pairwise_distance", p, keepdim, NAMES[dtype])
            draw = Draw(name)
            area.case(name, "pairwise_distance", lambda a, b: F.pairwise_distance(a, b, p, keepdim=keepdim),
                      [draw.normal(3, 4, dtype=dtype), draw.normal(3, 4, dtype=dtype)], {"p": p, "keepdim": keepdim})
    area.case("cosine_similarity.zero", "cosine_similarity", lambda a, b: F.cosine_similarity(a, b),
              [torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0, 4.0], [2.0, 4.0]])], {"dim": 1}, grad=False)
    for p, dtype in itertools.product((0, 1, 2, 3, 0.5, inf), WIDE):
        for a, b in (((3, 4), (5, 4)), ((2, 3, 4), (2, 2, 4)), ((2, 1, 3, 2), (3, 2, 2)), ((0, 4), (2, 4))):
            name = join("cdist", p, shape_name(a, b), NAMES[dtype])
            draw = Draw(name)
            area.case(name, "cdist", lambda a, b: torch.cdist(a, b, p), [draw.normal(*a, dtype=dtype), draw.normal(*b, dtype=dtype)],
                      {"p": p if math.isfinite(p) else str(p)}, grad=p != 0 and 0 not in a)
    for dtype in WIDE:
        name = join("cdist.many", NAMES[dtype])
        draw = Draw(name)
        area.case(name, "cdist", lambda a, b: torch.cdist(a, b), [draw.normal(30, 3, dtype=dtype), draw.normal(2, 3, dtype=dtype)], {"p": 2},
                  tolerance=4)  # by products: |a|^2 + |b|^2 - 2 a b loses digits
    same = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    area.case("cdist.equal rows", "cdist", lambda a, b: torch.cdist(a, b), [same, same.clone()], {"p": 2})


def make_compositions():
    area = Area()
    make_windows(area)
    make_places(area)
    make_order(area)
    make_distances(area)
    return area


# ---- losses ----------------------------------------------------------------------------------------------------------


def make_losses():
    area = Area()
    pairs = {
        "mse_loss": (F.mse_loss, {}), "l1_loss": (F.l1_loss, {}),
        "huber_loss": (lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.7), {"delta": 0.7}),
        "smooth_l1_loss": (lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.6), {"beta": 0.6}),
        "kl_div": (lambda x, t, reduction: F.kl_div(x, t, reduction=reduction), {}),
        "kl_div.log": (lambda x, t, reduction: F.kl_div(x, t, reduction=reduction, log_target=True), {"log_target": True}),
        "bce_with_logits": (lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t, reduction=reduction), {}),
        "bce_loss": (lambda x, t, reduction: F.binary_cross_entropy(x, t, reduction=reduction), {}),
    }
    for (name, (run, more)), reduction, dtype in itertools.product(pairs.items(), ("mean", "sum", "none"), FLOATS):
        case = join(name, reduction, NAMES[dtype])
        draw = Draw(case)
        x, t = draw.normal(3, 4, dtype=dtype), draw.normal(3, 4, dtype=dtype)
        if name in ("kl_div", "bce_with_logits", "bce_loss"):
            t = draw.uniform(3, 4, dtype=dtype, low=0.1)
        if name == "bce_loss":
            x = draw.uniform(3, 4, dtype=dtype, low=0.05, high=0.95)
        area.case(case, name.split(".")[0], lambda x, t: run(x, t, reduction=reduction), [x, t],
                  {"reduction": reduction} | more)
    area.case("kl_div.zero", "kl_div", lambda x: F.kl_div(x, torch.tensor([0.0, 0.5, 0.5], dtype=x.dtype), reduction="sum"),
              [torch.tensor([-1.0, -2.0, -0.3])], {"reduction": "sum", "target": [0.0, 0.5, 0.5]})
    area.case("bce_with_logits.extreme", "bce_with_logits",
              lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
              [torch.tensor([100.0, -100.0, 1e4, -1e4, 0.0]), torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5])], {"reduction": "none"})
    for dtype in WIDE:
        name = join("bce_with_logits.weights", NAMES[dtype])
        draw = Draw(name)
        # PyTorch gives the weights no gradient.
        run = lambda x, t, w, p: F.binary_cross_entropy_with_logits(x, t, weight=w.detach(), pos_weight=p.detach())
        area.case(name, "bce_with_logits", run, [draw.normal(3, 4, dtype=dtype), draw.uniform(3, 4, dtype=dtype),
                                                 draw.uniform(3, 1, dtype=dtype), draw.uniform(4, dtype=dtype, high=3)],
                  {"reduction": "mean", "weights": True})
    targets = {"rows": torch.tensor([1, 4, 0, 2]), "images": torch.tensor([[[0, 2], [1, 4], [3, 3]], [[4, 1], [0, 0], [2, 3]]]),
               "one": torch.tensor(3)}
    shapes = {"rows": (4, 5), "images": (2, 5, 3, 2), "one": (5,)}
    for (tag, target), reduction, weighted, dtype in itertools.product(targets.items(), ("mean", "sum", "none"), (False, True),
                                                                       FLOATS):
        for smoothing in (0.0, 0.2):
            name = join("cross_entropy", tag, reduction, "weighted" if weighted else "plain", smoothing, NAMES[dtype])
            draw = Draw(name)
            ignore = -100 if tag == "one" else 4
            inputs = [draw.normal(*shapes[tag], dtype=dtype, scale=2), target]
            inputs += [draw.uniform(5, dtype=dtype, low=0.3, high=2)] if weighted else []
            area.case(name, "cross_entropy",
                      lambda x, t, w=None: F.cross_entropy(x, t, w if w is None else w.detach(), ignore_index=ignore, reduction=reduction,
                                                           label_smoothing=smoothing), inputs,
                      {"reduction": reduction, "ignore_index": ignore, "label_smoothing": smoothing})
        name = join("nll_loss", tag, reduction, "weighted" if weighted else "plain", NAMES[dtype])
        draw = Draw(name)
        ignore = -100 if tag == "one" else 4
        inputs = [draw.normal(*shapes[tag], dtype=dtype), target]
        inputs += [draw.uniform(5, dtype=dtype, low=0.3, high=2)] if weighted else []
        area.case(name, "nll_loss", lambda x, t, w=None: F.nll_loss(x, t, w if w is None else w.detach(), ignore_index=ignore, reduction=reduction), inputs,
                  {"reduction": reduction, "ignore_index": ignore})
    for reduction, shape, smoothing in itertools.product(("mean", "none"), ((3, 4), (2, 4, 3), (4,)), (0.0, 0.1)):
        name = join("cross_entropy.probabilities", reduction, shape_name(shape), smoothing)
        draw = Draw(name)
        p = draw.uniform(*shape, low=0.1)
        area.case(name, "cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction=reduction, label_smoothing=smoothing),
                  [draw.normal(*shape), p / p.sum(0 if len(shape) == 1 else 1, keepdim=True)],
                  {"reduction": reduction, "ignore_index": -100, "label_smoothing": smoothing})
    return area


# ---- further layers --------------------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """A recurrent layer that gives its outputs alone."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def turned(x, first, base, neighbours, scaling=None):
    """Rotary position embedding, by complex numbers; `scaling` as Llama 3.1's."""
    steps, half = x.shape[-2], x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=f64) / half)
    if scaling:
        for i, rate in enumerate(rates.tolist()):
            length = 2 * math.pi / rate
            if length > scaling["original"] / scaling["low"]:
                rates[i] = rate / scaling["factor"]
            elif length >= scaling["original"] / scaling["high"]:
                smooth = (scaling["original"] / length - scaling["low"]) / (scaling["high"] - scaling["low"])
                rates[i] = (1 - smooth) * rate / scaling["factor"] + smooth * rate
    angles = torch.arange(first, first + steps, dtype=f64)[:, None] * rates
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    y = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.stack([y.real, y.imag], -1).flatten(-2) if neighbours else torch.cat([y.real, y.imag], -1)


SCALING = {"factor": 8.0, "low": 1.0, "high": 4.0, "original": 16.0}
LLAMA = {"vocab": 20, "width": 16, "hidden": 24, "layers": 2, "heads": 4, "shared": 2, "eps": 1e-5, "base": 500.0}


class SwiGlu(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.shared, self.base = c["heads"], c["shared"], c["base"]
        d = c["width"] // c["heads"]
        for name, rows in (("q_proj", c["width"]), ("k_proj", c["shared"] * d), ("v_proj", c["shared"] * d)):
            setattr(self, name, nn.Linear(c["width"], rows, bias=False))
        self.o_proj = nn.Linear(c["width"], c["width"], bias=False)

    def forward(self, x):
        split = lambda y, heads: y.unflatten(-1, (heads, -1)).transpose(1, 2)
        turn = lambda y: turned(y, 0, self.base, False, SCALING)
        share = lambda y: y.repeat_interleave(self.heads // self.shared, 1)
        q, k = turn(split(self.q_proj(x), self.heads)), share(turn(split(self.k_proj(x), self.shared)))
        y = F.scaled_dot_product_attention(q, k, share(split(self.v_proj(x), self.shared)), is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(c), SwiGlu(c["width"], c["hidden"])
        self.input_layernorm = nn.RMSNorm(c["width"], c["eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["width"], c["eps"])

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """With the names, and the numbers, of LlamaForCausalLM in `transformers`."""

    def __init__(self, c):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab"], c["width"])
        self.model.layers = nn.ModuleList(LlamaBlock(c) for _ in range(c["layers"]))
        self.model.norm = nn.RMSNorm(c["width"], c["eps"])
        self.lm_head = nn.Linear(c["width"], c["vocab"], bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def make_networks():
    area = Area()
    torch.manual_seed(7)
    for (shape, groups, affine), dtype in itertools.product((((2, 6, 3, 2), 3, True), ((3, 8), 2, True), ((2, 4, 5), 4, False)), FLOATS):
        name = join("group_norm", shape_name(shape), groups, NAMES[dtype])
        draw = Draw(name)
        inputs = [draw.normal(*shape, dtype=dtype, scale=2)]
        inputs += [draw.uniform(shape[1], dtype=dtype, low=0.5, high=1.5), draw.normal(shape[1], dtype=dtype)] if affine else []
        area.case(name, "group_norm", lambda x, w=None, b=None: F.group_norm(x, groups, w, b), inputs, {"groups": groups})
    for (kernel, stride, padding), dtype in itertools.product(((2, 2, 0), (3, 2, 1), (2, 1, 0), (3, 3, 1)), FLOATS):
        tag, args = join(kernel, stride, padding, NAMES[dtype]), {"kernel": kernel, "stride": stride, "padding": padding}
        for op, run in {"max_pool2d": F.max_pool2d, "avg_pool2d": F.avg_pool2d}.items():
            name = join(op, tag)
            area.case(name, op, lambda x: run(x, kernel, stride, padding), [Draw(name).normal(2, 3, 7, 6, dtype=dtype)], args)
    area.case("max_pool2d.ties", "max_pool2d", lambda x: F.max_pool2d(x, 2), [torch.zeros(1, 1, 4, 4)],
              {"kernel": 2, "stride": 2, "padding": 0})
    for size, dtype in itertools.product(((1, 1), (3, 2), (5, 4), (7, 9)), FLOATS):
        name = join("adaptive_avg_pool2d", shape_name(size), NAMES[dtype])
        area.case(name, "adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, size), [Draw(name).normal(2, 3, 7, 5, dtype=dtype)],
                  {"size": list(size)})
        name = join("adaptive_max_pool2d", shape_name(size), NAMES[dtype])
        area.case(name, "adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, size), [Draw(name).normal(2, 3, 7, 5, dtype=dtype)],
                  {"size": list(size)})
    area.case("adaptive_max_pool2d.ties", "adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (2, 3)),
              [torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(7).view(1, 1, 4, 7)], {"size": [2, 3]})
    for (weight, stride, padding, dilation, groups), dtype in itertools.product(
            (((4, 4, 3, 2), (2, 1), (1, 0), (1, 1), 1), ((4, 4, 2, 3), (1, 1), (0, 2), (1, 1), 1), ((6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2),
             ((4, 4, 3, 3), (1, 1), (2, 2), (2, 2), 1), ((4, 1, 2, 2), (2, 2), (0, 0), (1, 3), 4)), (f32, f64, bf16)):
        name = join("conv2d", shape_name(weight, stride, padding, dilation), groups, NAMES[dtype])
        draw = Draw(name)
        area.case(name, "conv2d_options", lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups),
                  [draw.normal(2, 4, 7, 8, dtype=dtype), draw.normal(*weight, dtype=dtype), draw.normal(weight[0], dtype=dtype)],
                  {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})
    for (weight, stride, padding, dilation, groups), dtype in itertools.product(
            (((5, 4, 3), 1, 0, 1, 1), ((4, 2, 3), 2, 1, 1, 2), ((3, 4, 2), 1, 2, 3, 1)), (f32, f64, bf16)):
        name = join("conv1d", shape_name(weight), stride, padding, dilation, groups, NAMES[dtype])
        draw = Draw(name)
        area.case(name, "conv1d", lambda x, w, b: F.conv1d(x, w, b, stride, padding, dilation, groups),
                  [draw.normal(2, 4, 9, dtype=dtype), draw.normal(*weight, dtype=dtype), draw.normal(weight[0], dtype=dtype)],
                  {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})
    for (mask, heads, causal), dtype in itertools.product(
            (("bool", 2, False), ("added", 2, False), ("row", 2, False), ("bool", 1, False), (None, 1, False), (None, 2, True), ("bool", 2, True)),
            FLOATS):
        name = join("attention", mask, heads, "causal" if causal else "full", NAMES[dtype])
        draw = Draw(name)
        q, k, v = draw.normal(2, 4, 3, 6, dtype=dtype), draw.normal(2, heads, 5, 6, dtype=dtype), draw.normal(2, heads, 5, 6, dtype=dtype)
        seen = draw.bits(3, 5)
        seen[:, 0] = True  # PyTorch's softmax of a row that sees nothing depends on its version
        inputs = [q, k, v] + {"bool": [seen], "row": [seen[:1].expand(2, 1, 1, 5).clone()], "added": [draw.normal(4, 3, 5, dtype=dtype)], None: []}[mask]

        def run(q, k, v, m=None):
            past = torch.ones(3, 5, dtype=boolean).tril(2)
            if causal:
                m = past if m is None else m & past
            k, v = k.repeat_interleave(4 // heads, 1), v.repeat_interleave(4 // heads, 1)
            return F.scaled_dot_product_attention(q, k, v, m)

        area.case(name, "attention", run, inputs, {"causal": causal}, tolerance=None if dtype in WIDE else 2)
    for (first, base, neighbours), dtype in itertools.product(((0, 10000.0, False), (7, 500.0, True), (100, 10000.0, False)), FLOATS):
        name = join("rotary", first, "neighbours" if neighbours else "halves", NAMES[dtype])
        area.case(name, "rotary", lambda x: turned(x.double(), first, base, neighbours), [Draw(name).normal(2, 3, 4, 6, dtype=dtype)],
                  {"first": first, "base": base, "neighbours": neighbours})
    for dtype in FLOATS:
        name = join("rotary.scaled", NAMES[dtype])
        area.case(name, "rotary", lambda x: turned(x.double(), 3, 500.0, False, SCALING), [Draw(name).normal(2, 4, 10, dtype=dtype)],
                  {"first": 3, "base": 500.0, "neighbours": False, "scaling": SCALING})
    for kind, layers, dtype in itertools.product((nn.RNN, nn.LSTM, nn.GRU), (1, 2), WIDE):
        name = join(kind.__name__, "bidirectional", layers, NAMES[dtype])
        options = {"in": 3, "hidden": 4, "layers": layers, "batch_first": layers == 2, "bidirectional": True}
        module_case(area, name, f"nn.{kind.__name__}", options,
                    Outputs(kind(3, 4, layers, batch_first=layers == 2, bidirectional=True, dtype=dtype)), Draw(name).normal(5, 2, 3, dtype=dtype))
    for dtype in WIDE:
        name = join("SwiGlu", NAMES[dtype])
        module_case(area, name, "SwiGlu", {"width": 6, "hidden": 10}, SwiGlu(6, 10).to(dtype), Draw(name).normal(2, 3, 6, dtype=dtype))
        name = join("Llama", NAMES[dtype])
        module_case(area, name, "Llama", LLAMA | {"scaling": SCALING}, shake(Llama(LLAMA).to(dtype)),
                    (Draw(name).normal(2, 11).abs() * 1000).long() % LLAMA["vocab"])
    for kind, layers, dtype in itertools.product((nn.RNN, nn.LSTM, nn.GRU), (1, 2), WIDE):
        name = join(kind.__name__, layers, NAMES[dtype])
        module_case(area, name, f"nn.{kind.__name__}", {"in": 3, "hidden": 4, "layers": layers, "batch_first": layers == 2},
                    Outputs(kind(3, 4, layers, batch_first=layers == 2, dtype=dtype)), Draw(name).normal(5, 2, 3, dtype=dtype))
    for dtype in WIDE:
        name = join("GroupNorm", NAMES[dtype])
        module_case(area, name, "nn.GroupNorm", {"groups": 2, "channels": 6}, shake(nn.GroupNorm(2, 6, dtype=dtype)),
                    Draw(name).normal(2, 6, 3, dtype=dtype))
        name = join("Conv1d", NAMES[dtype])
        module_case(area, name, "nn.Conv1d", {"in": 4, "out": 6, "kernel": 3, "stride": 2, "padding": 1, "dilation": 2, "groups": 2},
                    nn.Conv1d(4, 6, 3, 2, 1, 2, 2, dtype=dtype), Draw(name).normal(2, 4, 9, dtype=dtype))
        name = join("Embedding.padding", NAMES[dtype])
        module_case(area, name, "nn.Embedding.padding", {"count": 5, "width": 3, "padding": 1}, nn.Embedding(5, 3, 1, dtype=dtype),
                    torch.tensor([[1, 4], [1, 0]]))
        name = join("ConvNet", NAMES[dtype])
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1),
                                nn.Flatten(), nn.Linear(4, 3), nn.LeakyReLU(0.1), nn.Sigmoid(), nn.Softmax(-1)).to(dtype)
        module_case(area, name, "ConvNet", {}, network, Draw(name).normal(2, 1, 8, 8, dtype=dtype))
    note_initialisation(area, {"nn.LSTM": (Outputs(nn.LSTM(64, 32)), {"in": 64, "hidden": 32, "layers": 1, "batch_first": False}),
                               "nn.Conv1d": (nn.Conv1d(64, 64, 5, groups=2), {"in": 64, "out": 64, "kernel": 5, "stride": 1, "padding": 0,
                                                                              "dilation": 1, "groups": 2})})
    return area


def make_images():
    """Transposed convolutions, scaled images, and windows that are not square."""
    area = Area()
    for (weight, stride, padding, more, dilation, groups), dtype in itertools.product(
            (((4, 3, 3, 2), (1, 1), (0, 0), (0, 0), (1, 1), 1), ((4, 2, 3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 2),
             ((4, 3, 2, 4), (3, 1), (0, 2), (2, 0), (1, 1), 1), ((4, 1, 2, 3), (2, 1), (1, 0), (0, 1), (1, 2), 4),
             ((4, 2, 1, 1), (2, 2), (0, 0), (0, 1), (1, 1), 1), ((4, 2, 3, 3), (2, 2), (2, 3), (1, 0), (3, 3), 2)), FLOATS):
        name = join("conv_transpose2d", shape_name(weight, stride, padding, more, dilation), groups, NAMES[dtype])
        draw = Draw(name)
        area.case(name, "conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, more, groups, dilation),
                  [draw.normal(2, 4, 5, 4, dtype=dtype), draw.normal(*weight, dtype=dtype), draw.normal(weight[1] * groups, dtype=dtype)],
                  {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups})
    for (weight, stride, padding, more, dilation, groups), dtype in itertools.product(
            (((4, 3, 3), 1, 0, 0, 1, 1), ((4, 2, 4), 2, 1, 1, 1, 2), ((4, 3, 2), 2, 2, 0, 3, 1)), FLOATS):
        name = join("conv_transpose1d", shape_name(weight), stride, padding, more, dilation, groups, NAMES[dtype])
        draw = Draw(name)
        area.case(name, "conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, None, stride, padding, more, groups, dilation),
                  [draw.normal(2, 4, 6, dtype=dtype), draw.normal(*weight, dtype=dtype)],
                  {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation, "groups": groups})
    scaled = [{"size": [10, 14]}, {"size": [3, 4]}, {"size": [8, 5]}, {"size": [1, 1]}, {"scale": [2, 3]}, {"scale": [1.7, 1.7]},
              {"scale": [0.6, 2.3]}, {"scale": [1.1, 0.3]}]
    for to, (mode, corners), dtype in itertools.product(scaled, (("nearest", None), ("bilinear", False), ("bilinear", True)), (f32, f64, bf16)):
        name = join("interpolate", *(f"{k} {v[0]} {v[1]}" for k, v in to.items()), mode, "corners" if corners else "edges", NAMES[dtype])
        area.case(name, "interpolate", lambda x: F.interpolate(x, to.get("size"), to.get("scale"), mode, corners),
                  [Draw(name).normal(1, 2, 5, 7, dtype=dtype)], to | {"mode": mode, "align_corners": bool(corners)})
    # Where i before / after in f32 is not what it is in whole numbers, and sizes that PyTorch does not compute.
    rounded = [(before, {"size": [after, 1]}) for before, after in ((2, 82), (21, 69), (39, 33), (52, 22), (56, 46))]
    for (before, to), dtype in itertools.product(rounded + [(3, {"scale": [2.2, 1.0]}), (7, {"scale": [1.1, 1.0]})], WIDE):
        area.case(join("interpolate.rounded", before, *to.values(), NAMES[dtype]), "interpolate",
                  lambda x: F.interpolate(x, to.get("size"), to.get("scale")), [torch.arange(before, dtype=dtype).view(1, 1, before, 1)],
                  to | {"mode": "nearest", "align_corners": False}, grad=False, tolerance=0)
    for (kernel, stride, padding), dtype in itertools.product((((2, 3), (2, 3), (0, 0)), ((3, 1), (1, 2), (1, 0)), ((2, 4), (3, 1), (1, 2))), FLOATS):
        args = {"kernel": kernel, "stride": stride, "padding": padding}
        for op, run in {"max_pool2d": F.max_pool2d, "avg_pool2d": F.avg_pool2d}.items():
            name = join(op, shape_name(kernel, stride, padding), NAMES[dtype])
            area.case(name, op, lambda x: run(x, kernel, stride, padding), [Draw(name).normal(2, 3, 7, 6, dtype=dtype)], args)
    for (kernel, stride, padding), dtype in itertools.product(((2, 2, 0), (3, 2, 1), (4, 1, 2)), FLOATS):
        args = {"kernel": kernel, "stride": stride, "padding": padding}
        for op, run in {"max_pool1d": F.max_pool1d, "avg_pool1d": F.avg_pool1d}.items():
            name = join(op, kernel, stride, padding, NAMES[dtype])
            area.case(name, op, lambda x: run(x, kernel, stride, padding), [Draw(name).normal(2, 3, 9, dtype=dtype)], args)
    torch.manual_seed(8)
    for dtype in WIDE:
        options = {"in": 4, "out": 6, "kernel": 3, "stride": 2, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 2}
        for kind, layer, shape in (("ConvTranspose2d", nn.ConvTranspose2d, (2, 4, 3, 5)), ("ConvTranspose1d", nn.ConvTranspose1d, (2, 4, 7))):
            name = join(kind, NAMES[dtype])
            module_case(area, name, f"nn.{kind}", options, layer(4, 6, 3, 2, 1, 1, 2, dilation=2, dtype=dtype),
                        Draw(name).normal(*shape, dtype=dtype))
        name = join("UpNet", NAMES[dtype])
        network = nn.Sequential(nn.ConvTranspose2d(2, 3, (2, 3), (2, 1), (0, 1)), nn.MaxPool2d((1, 2), (1, 1)),
                                nn.Upsample(scale_factor=(1.5, 2.0), mode="bilinear"), nn.AvgPool2d((3, 2), 2, (1, 0)),
                                nn.Upsample(size=(4, 9))).to(dtype)
        module_case(area, name, "UpNet", {}, network, Draw(name).normal(2, 2, 4, 5, dtype=dtype))
        name = join("LineNet", NAMES[dtype])
        network = nn.Sequential(nn.ConvTranspose1d(2, 3, 4, 2, bias=False), nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2)).to(dtype)
        module_case(area, name, "LineNet", {}, network, Draw(name).normal(2, 2, 8, dtype=dtype))
    options = {"in": 64, "out": 32, "kernel": 5, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 2}
    note_initialisation(area, {"nn.ConvTranspose2d": (nn.ConvTranspose2d(64, 32, 5, groups=2), options),
                               "nn.ConvTranspose1d": (nn.ConvTranspose1d(64, 32, 5, groups=2), options)})
    return area


# ---- optimizers ------------------------------------------------------------------------------------------------------

STEPS = 10
PARAM_SHAPES = [(3, 4), (5,), (), (0, 3), (2, 2), (4,)]
GROUPS = [[0, 1, 2], [3, 4, 5]]
ABSENT = {1: [0, 3, 4], 4: [9], 5: list(range(STEPS))}  # parameter: steps without a gradient


def optimizer_case(area, name, kind, make, dtype, groups, rates=None, late=None, changes=()):
    """Parameters after each of ten steps; `rates` multiplies every group's rate at that step. The second group comes
    at step `late`; `changes` lists (step, group, option, value)."""
    draw = Draw(name)
    params = [nn.Parameter(draw.normal(*shape, dtype=dtype)) for shape in PARAM_SHAPES]
    grads = [draw.normal(STEPS, *shape, dtype=dtype) for shape in PARAM_SHAPES]
    tensors = {f"in{i}": p.detach().clone() for i, p in enumerate(params)} | {f"grads{i}": g for i, g in enumerate(grads)}
    lists = [{"params": [params[i] for i in members], **options} for members, options in zip(GROUPS, groups)]
    optimizer = make(lists[:1] if late is not None else lists)
    base = [group["lr"] for group in optimizer.param_groups]
    history = [[] for _ in params]
    for step in range(STEPS):
        for group, lr in zip(optimizer.param_groups, base):
            group["lr"] = lr * (rates[step] if rates else 1.0)
        if step == late:
            optimizer.add_param_group(lists[1])
        for at, group, option, value in changes:
            if at == step:
                optimizer.param_groups[group][option] = value
        for i, (p, g) in enumerate(zip(params, grads)):
            p.grad = None if step in ABSENT.get(i, ()) else g[step].clone()
        optimizer.step()
        for i, p in enumerate(params):
            history[i].append(p.detach().clone())
    tensors |= {f"out{i}": torch.stack(after) for i, after in enumerate(history)}
    defaults = {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float, tuple)) and v is not None}
    args = {"defaults": defaults, "groups": [{"members": m, **o} for m, o in zip(GROUPS, groups)],
            "absent": {str(i): steps for i, steps in ABSENT.items()}}
    args |= {"rates": rates} if rates else {}
    args |= {"late": late} if late is not None else {}
    args |= {"changes": [{"step": s, "group": g, "option": o, "value": v} for s, g, o, v in changes]} if changes else {}
    area.note(name, kind, args, tensors)


def make_clipping(area):
    shapes = [(3, 4), (5,), (), (0, 2), (2,)]
    for (tag, scale, max_norm), dtype in itertools.product((("clipped", 1.0, 1.0), ("below", 0.01, 1.0),
                                                            ("zero", 0.0, 1.0), ("tight", 3.0, 0.25)), FLOATS):
        name = join("clip_grad_norm", tag, NAMES[dtype])
        draw = Draw(name)
        params = [nn.Parameter(torch.zeros(shape, dtype=f64)) for shape in shapes]
        grads = [draw.normal(*shape, dtype=dtype, scale=scale) for shape in shapes[:-1]]  # the last has none
        for p, g in zip(params, grads):
            p.grad = g.to(f64, copy=True)  # clipping writes
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        tensors = {f"in{i}": p.detach().to(dtype) for i, p in enumerate(params)}
        tensors |= {f"grads{i}": g for i, g in enumerate(grads)}
        tensors |= {f"clipped{i}": p.grad.to(dtype) for i, p in enumerate(params) if p.grad is not None}
        area.note(name, "clip_grad_norm_", {"max_norm": max_norm}, tensors | {"norm": norm})


def make_schedule(area):
    """The rate of nanoGPT's schedule: linear warm-up, then half a cosine down to `min_lr`."""
    for lr, min_lr, warmup, steps in ((1e-3, 1e-4, 100, 2000), (3e-4, 0.0, 0, 50), (1e-2, 1e-2, 10, 20)):
        at = torch.tensor(sorted({0, 1, warmup // 2, max(warmup - 1, 0), warmup, warmup + 1, steps // 2, steps - 1}))
        angle = lambda step: math.pi * (step - warmup) / (steps - warmup)
        rate = lambda step: (lr * (step + 1) / warmup if step < warmup
                             else min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(angle(step))))
        rates = torch.tensor([rate(step) for step in at.tolist()], dtype=f64)
        area.note(join("warmup_cosine", warmup, steps), "warmup_cosine",
                  {"lr": lr, "min_lr": min_lr, "warmup": warmup, "steps": steps}, {"in0": at, "out0": rates})


def make_optim():
    area = Area()
    two_rates = [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0}]
    for dtype in WIDE:
        tag = NAMES[dtype]
        adamw = lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.99))
        optimizer_case(area, join("adamw", tag), "AdamW", adamw, dtype, two_rates)
        optimizer_case(area, join("adamw.defaults", tag), "AdamW", torch.optim.AdamW, dtype, [{}, {}])
        rates = [min(1.0, (step + 1) / 4) for step in range(STEPS)]
        optimizer_case(area, join("adamw.rates", tag), "AdamW", adamw, dtype, two_rates, rates)
        optimizer_case(area, join("adam", tag), "Adam", torch.optim.Adam, dtype, two_rates)
        optimizer_case(area, join("sgd", tag), "SGD", lambda g: torch.optim.SGD(g, lr=0.1), dtype, [{}, {"lr": 0.02}])
        optimizer_case(area, join("sgd.momentum", tag), "SGD", lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9), dtype,
                       [{"weight_decay": 0.01}, {"lr": 0.02}])
        sgd = lambda **options: lambda groups: torch.optim.SGD(groups, lr=0.1, **options)
        optimizer_case(area, join("sgd.dampening", tag), "SGD", sgd(momentum=0.9, dampening=0.3, weight_decay=0.02), dtype,
                       [{}, {"dampening": 0.0}])
        optimizer_case(area, join("sgd.nesterov", tag), "SGD", sgd(momentum=0.9, nesterov=True, weight_decay=0.02), dtype,
                       [{}, {"nesterov": False, "momentum": 0.5}])
        optimizer_case(area, join("sgd.changes", tag), "SGD", sgd(), dtype, [{}, {"lr": 0.02}],
                       changes=[(3, 0, "momentum", 0.9), (5, 0, "nesterov", True), (7, 1, "weight_decay", 0.1),
                                (8, 0, "momentum", 0.5)])
        optimizer_case(area, join("sgd.late", tag), "SGD", sgd(momentum=0.9), dtype, [{}, {"lr": 0.02, "momentum": 0.5}], late=4)
        optimizer_case(area, join("adamw.late", tag), "AdamW", adamw, dtype, two_rates, late=4,
                       changes=[(6, 1, "weight_decay", 0.2), (6, 0, "eps", 1e-3)])
        rms = lambda **options: lambda groups: torch.optim.RMSprop(groups, **options)
        optimizer_case(area, join("rmsprop.defaults", tag), "RMSprop", rms(), dtype, [{}, {}])
        optimizer_case(area, join("rmsprop.momentum", tag), "RMSprop", rms(momentum=0.9, weight_decay=0.05), dtype,
                       [{}, {"lr": 3e-3, "alpha": 0.9}])
        optimizer_case(area, join("rmsprop.centered", tag), "RMSprop", rms(centered=True, alpha=0.95, eps=1e-4), dtype,
                       [{"weight_decay": 0.1}, {}])
        optimizer_case(area, join("rmsprop.both", tag), "RMSprop", rms(centered=True, momentum=0.8), dtype,
                       [{}, {"centered": False, "momentum": 0.0}], late=3, changes=[(5, 0, "alpha", 0.9), (6, 1, "lr", 1e-3)])
    make_clipping(area)
    make_schedule(area)
    return area


# ---- Muon ------------------------------------------------------------------------------------------------------------

def make_muon():
    """Matrices after each of five steps; `exact` cases iterate in the parameters' dtype, where PyTorch rounds to bf16."""
    import inspect
    from torch.optim import _muon
    rounding = _muon._zeropower_via_newtonschulz
    scope = dict(_muon.__dict__)
    exec(inspect.getsource(rounding).replace("torch.bfloat16", "grad.dtype"), scope)
    area = Area()
    for (tag, options), exact, dtype in itertools.product(
            (("defaults", {}), ("plain", {"nesterov": False, "weight_decay": 0.0, "momentum": 0.8}),
             ("like adamw", {"adjust_lr_fn": "match_rms_adamw", "lr": 0.02}), ("no steps", {"ns_steps": 0, "lr": 0.1})),
            (True, False), WIDE):
        name = join("muon", tag, "exact" if exact else "bf16", NAMES[dtype])
        draw = Draw(name)
        params = [nn.Parameter(draw.normal(*shape, dtype=dtype)) for shape in ((4, 6), (6, 4), (5, 5), (1, 7))]
        grads = [draw.normal(5, *p.shape, dtype=dtype) for p in params]
        tensors = {f"in{i}": p.detach().clone() for i, p in enumerate(params)} | {f"grads{i}": g for i, g in enumerate(grads)}
        optimizer = torch.optim.Muon(params, **options)
        _muon._zeropower_via_newtonschulz = scope["_zeropower_via_newtonschulz"] if exact else rounding
        history = [[] for _ in params]
        for step in range(5):
            for p, g, after in zip(params, grads, history):
                p.grad = g[step].clone()
            optimizer.step()
            for p, after in zip(params, history):
                after.append(p.detach().clone())
        _muon._zeropower_via_newtonschulz = rounding
        tensors |= {f"out{i}": torch.stack(after) for i, after in enumerate(history)}
        area.note(name, "Muon", {"options": options, "exact": exact}, tensors)
    return area


# ---- Adafactor -------------------------------------------------------------------------------------------------------

def make_adafactor():
    """Parameters after each of twenty steps, whose gradients shrink, so that steps are cut at first and not later."""
    area = Area()
    for (tag, options), dtype in itertools.product(
            (("defaults", {}), ("decay", {"weight_decay": 0.1, "lr": 0.3}), ("maximize", {"maximize": True, "d": 1.2}),
             ("own", {"eps": (1e-3, 1e-2), "beta2_decay": -0.5, "lr": 0.05})), WIDE):
        name = join("adafactor", tag, NAMES[dtype])
        draw = Draw(name)
        shapes = ((4, 6), (6, 4), (1, 7), (5,), (4, 3, 5), (4, 2, 3, 3))
        params = [nn.Parameter(draw.normal(*shape, dtype=dtype)) for shape in shapes]
        shrinking = torch.linspace(1.0, 0.05, 20, dtype=dtype)
        grads = [draw.normal(20, *p.shape, dtype=dtype) * shrinking.reshape(-1, *[1] * p.dim()) for p in params]
        tensors = {f"in{i}": p.detach().clone() for i, p in enumerate(params)} | {f"grads{i}": g for i, g in enumerate(grads)}
        optimizer = torch.optim.Adafactor(params, foreach=False, **options)
        history = [[] for _ in params]
        for step in range(20):
            for p, g in zip(params, grads):
                p.grad = g[step].clone()
            optimizer.step()
            for p, after in zip(params, history):
                after.append(p.detach().clone())
        tensors |= {f"out{i}": torch.stack(after) for i, after in enumerate(history)}
        area.note(name, "Adafactor", {"options": options}, tensors)
    return area


# ---- a small Gpt -----------------------------------------------------------------------------------------------------

GPT = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab": 32}
TRAINING = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0, "batch": 4, "steps": 20}


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.out(packed_attention(self.qkv(self.ln1(x)), self.heads, causal=True))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """The output product uses the token embedding's weight."""

    def __init__(self, layers, heads, width, context, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.ln = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.tok.weight)


def gpt_loss(model, window):
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def train_gpt(weights, windows, dtype):
    """Losses and gradient norms of the steps, and the gradients of the first one before clipping."""
    model = Gpt(**GPT).to(dtype)
    model.load_state_dict(weights)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": TRAINING["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=TRAINING["lr"], betas=(TRAINING["beta1"], TRAINING["beta2"]), eps=TRAINING["eps"])
    losses, norms, first = [], [], {}
    for window in windows:
        loss = gpt_loss(model, window)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), TRAINING["clip"]))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms), first


def gpt_weights():
    """Small random weights with biases and norms away from 0 and 1, so that every parameter matters."""
    draw = Draw("gpt weights")
    weights = {}
    for name, p in Gpt(**GPT).named_parameters():
        centre = 1.0 if "ln" in name and name.endswith("weight") else 0.0
        weights[name] = centre + draw.normal(*p.shape, scale=0.2 if p.dim() == 2 else 0.05)
    return weights


def make_gpt():
    area, weights, draw = Area(), gpt_weights(), Draw("gpt text")
    # A text with something to learn: each byte is most often a fixed function of the one before.
    text = [3]
    for surprise, byte in zip(draw.uniform(999).tolist(), draw.integers(999, high=GPT["vocab"]).tolist()):
        text.append(byte if surprise < 0.2 else (5 * text[-1] + 7) % GPT["vocab"])
    starts = draw.integers(TRAINING["steps"], TRAINING["batch"], high=len(text) - GPT["context"] - 1)
    windows = torch.tensor(text)[starts[..., None] + torch.arange(GPT["context"] + 1)]
    losses, norms, grads = train_gpt(weights, windows, f32)
    losses_f64, norms_f64, _ = train_gpt(weights, windows, f64)
    model = Gpt(**GPT)
    model.load_state_dict(weights)
    tensors = {"windows": windows, "losses": losses, "norms": norms, "losses_f64": losses_f64, "norms_f64": norms_f64,
               "logits": model(windows[0, :, :-1])}
    tensors |= {f"grad.{name}": grad for name, grad in grads.items()}
    area.note("gpt", "gpt", {"model": GPT, "training": TRAINING}, tensors)
    return area


def make_gpt_weights():
    """Exactly what `safetensors.torch.save_model` of this model holds: a state dict, no cases."""
    area = Area()
    area.tensors = gpt_weights()
    return area


# ---- masks of the Transformer ----------------------------------------------------------------------------------------

# What each of PyTorch's masks is, in every combination: none, bools that hide, added floats, bools for each head, or the
# triangle with `tgt_is_causal`.
MASKS = {"src_mask": (None, "bool"), "tgt_mask": (None, "float", "causal"), "memory_mask": (None, "heads"),
         "src_key_padding_mask": (None, "bool"), "tgt_key_padding_mask": (None, "bool"),
         "memory_key_padding_mask": (None, "float")}


def draw_masks(draw, heads, batch, src, tgt):
    sizes = {"src_mask": (src, src), "tgt_mask": (tgt, tgt), "memory_mask": (batch * heads, tgt, src),
             "src_key_padding_mask": (batch, src), "tgt_key_padding_mask": (batch, tgt), "memory_key_padding_mask": (batch, src)}
    masks = {}
    for name, shape in sizes.items():
        masks[name] = draw.normal(*shape) if "float" in MASKS[name] else draw.bits(*shape)
        if masks[name].dtype == boolean:
            masks[name][..., 0] = False  # no query is left without a key, where PyTorch has NaN
    return masks


def make_masks():
    """A Transformer of one layer each way, batch first, in f32: results and gradients of all combinations of its masks in
    one tensor each, and of each parameter's gradient the sum of its products with the parameter."""
    area = Area()
    for norm_first, activation in itertools.product((False, True), ("relu", "gelu")):
        name = join("Transformer", "norm first" if norm_first else "norm last", activation)
        torch.manual_seed(zlib.crc32(name.encode()))
        draw = Draw(name)
        model = shake(nn.Transformer(4, 2, 1, 1, 5, dropout=0.0, activation=activation, batch_first=True,
                                     norm_first=norm_first))
        params = dict(model.named_parameters())
        src, tgt, gy = draw.normal(2, 5, 4), draw.normal(2, 3, 4), draw.normal(2, 3, 4)
        masks = draw_masks(draw, 2, 2, 5, 3)
        tensors = {"src": src, "tgt": tgt, "gy": gy} | masks | {f"param{i}": p.detach().clone() for i, p in enumerate(params.values())}
        model.double()
        outs = []
        for kinds in itertools.product(*MASKS.values()):
            given = {mask: masks[mask].double() if kind == "float" else causal_mask(3) if kind == "causal" else masks[mask]
                     for mask, kind in zip(MASKS, kinds) if kind}
            leaves = [src.double().requires_grad_(), tgt.double().requires_grad_()]
            y = model(*leaves, **given, tgt_is_causal="causal" in kinds)
            grads = torch.autograd.grad(y, leaves + list(params.values()), gy.double())
            sums = torch.stack([(g * p).sum() for g, p in zip(grads[2:], params.values())])
            outs.append([y.detach(), *grads[:2], sums.detach()])
        tensors |= {key: torch.stack(parts).float() for key, parts in zip(("out", "gsrc", "gtgt", "sums"), zip(*outs))}
        options = {"width": 4, "heads": 2, "feedforward": 5, "norm_first": norm_first, "activation": activation}
        area.note(name, "nn.Transformer", {"options": options, "params": list(params), "masks": [
            dict(zip(MASKS, kinds)) for kinds in itertools.product(*MASKS.values())]}, tensors)
    return area


AREAS = {"elementwise": make_elementwise, "views": make_views, "reduce": make_reduce, "linalg": make_linalg, "nn": make_nn, "layers": make_layers_area,
         "indexing": make_indexing, "statistics": make_statistics, "losses": make_losses, "networks": make_networks,
         "images": make_images, "compositions": make_compositions, "masks": make_masks, "muon": make_muon, "adafactor": make_adafactor,
         "optim": make_optim, "gpt": make_gpt, "gpt_weights": make_gpt_weights}


def main():
    torch.set_num_threads(1)
    folder = pathlib.Path(__file__).parent
    for name in sys.argv[1:] or AREAS:
        area = AREAS[name]()
        path = folder / f"{name}.safetensors"
        save(path, area.tensors, area.metadata)
        print(f"{path.name}: {len(area.metadata) - 1} cases, {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
