// Sums of products by an equation, made of products of matrices.
#include <algorithm>
#include <cctype>
#include <string>

#include "runtime/given.h"
#include "runtime/ops.h"

namespace sherd {
namespace {

/// The letters of an operand's axes, or of the result's. Axes that `...` stands for get the letters '0', '1',
/// ... from the last one on.
struct Term {
  std::string axes;
  bool rest = false;       // has "..."
  std::size_t before = 0;  // letters before it
};

Term parse_term(std::string_view equation, std::string_view text) {
  Term term;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ' ') continue;
    if (text.substr(i).starts_with("...") && !term.rest) {
      term.rest = true;
      term.before = term.axes.size();
      i += 2;
      continue;
    }
    check<ValueError>(std::isalpha(static_cast<unsigned char>(text[i])) != 0,
                      "einsum: '{}' in \"{}\" names no axis; axes are letters, or ... for all others",
                      text[i], equation);
    term.axes += text[i];
  }
  return term;
}

/// A tensor whose axes have names, each once.
struct Named {
  Tensor x;
  std::string axes;

  std::int64_t size(char axis) const {
    const std::size_t at = axes.find(axis);
    return at == std::string::npos ? 1 : x.shape()[static_cast<int>(at)];
  }
  bool has(char axis) const { return axes.find(axis) != std::string::npos; }
};

void spell_out(std::string_view equation, Term& term, int count) {
  if (!term.rest) return;
  std::string rest;
  for (int i = count; i > 0; --i) rest += static_cast<char>('0' + i - 1);
  check<ShapeError>(count >= 0 && count <= max_rank, "einsum: \"{}\" has more axes than an operand",
                    equation);
  term.axes.insert(term.before, rest);
}

/// Diagonals where a letter stands twice.
Named with_single_axes(std::string_view equation, Tensor x, std::string axes) {
  for (std::size_t i = 0; i < axes.size();) {
    const std::size_t twin = axes.find(axes[i], i + 1);
    if (twin == std::string::npos) {
      ++i;
      continue;
    }
    const auto a = static_cast<std::int64_t>(i), b = static_cast<std::int64_t>(twin);
    check<ShapeError>(x.size(a) == x.size(b), "einsum: axis {} in \"{}\" has {} and {} elements", axes[i],
                      equation, x.size(a), x.size(b));
    x = diagonal(x, 0, a, b);
    axes += axes[i];  // where `diagonal` puts it
    axes.erase(twin, 1);
    axes.erase(i, 1);
  }
  return {x, axes};
}

/// The axes in this order; those that are missing with size 1.
Tensor in_order(const Named& t, const std::string& axes) {
  Shape order;
  std::string found;
  for (char axis : axes)
    if (t.has(axis)) {
      order.push_back(static_cast<std::int64_t>(t.axes.find(axis)));
      found += axis;
    }
  Tensor x = found == t.axes ? t.x : permute(t.x, order);
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (!t.has(axes[i])) x = unsqueeze(x, static_cast<std::int64_t>(i));
  return x;
}

Named summed_over(const Named& t, const std::string& gone) {
  Shape axes;
  std::string left;
  for (std::size_t i = 0; i < t.axes.size(); ++i)
    if (gone.find(t.axes[i]) != std::string::npos)
      axes.push_back(static_cast<std::int64_t>(i));
    else
      left += t.axes[i];
  return axes.empty() ? t : Named{sum(t.x, axes), left};
}

/// The product, summed over the axes that are not in `kept`.
Named multiplied(std::string_view equation, Named a, Named b, const std::string& kept) {
  std::string batch, rows, columns, inner, only_a, only_b;
  for (char axis : a.axes) {
    const std::int64_t n = a.size(axis), m = b.size(axis);
    check<ShapeError>(!b.has(axis) || n == m || n == 1 || m == 1,
                      "einsum: axis {} in \"{}\" has {} and {} elements", axis, equation, n, m);
    const bool stays = kept.find(axis) != std::string::npos;
    // An axis of size 1 on one side is summed, or repeated, on the other side alone.
    if (!b.has(axis))
      (stays ? rows : only_a) += axis;
    else if (stays)
      batch += axis;
    else if (n == m)
      inner += axis;
    else
      (n == 1 ? only_b : only_a) += axis;
  }
  for (char axis : b.axes)
    if (!a.has(axis)) (kept.find(axis) != std::string::npos ? columns : only_b) += axis;
  const auto drop_ones = [](Named& t, const std::string& axes) {
    for (char axis : axes)
      if (t.has(axis) && t.size(axis) == 1) {
        const std::size_t at = t.axes.find(axis);
        t = {squeeze(t.x, static_cast<std::int64_t>(at)), std::string(t.axes).erase(at, 1)};
      }
  };
  drop_ones(a, only_b);
  drop_ones(b, only_a);
  a = summed_over(a, only_a);
  b = summed_over(b, only_b);
  if (a.x.dtype() != b.x.dtype()) {  // a sum of integers is i64, as was one before
    a.x = to(a.x, DType::i64);
    b.x = to(b.x, DType::i64);
  }
  const auto count = [](const Named& t, const std::string& axes) {
    std::int64_t n = 1;
    for (char axis : axes) n *= t.size(axis);
    return n;
  };
  const auto shape_of = [](const Named& t, const std::string& axes, std::int64_t x, std::int64_t y) {
    Shape shape;
    for (char axis : axes) shape.push_back(t.size(axis));
    shape.push_back(x);
    shape.push_back(y);
    return shape;
  };
  if (inner.empty() && (rows.empty() || columns.empty() || !batch.empty())) {
    const std::string all = batch + rows + columns;
    return {mul(in_order(a, all), in_order(b, all)), all};
  }
  // One product of matrices for each element of the batch.
  const std::int64_t m = count(a, rows), k = count(a, inner), n = count(b, columns);
  const Tensor left = reshape(in_order(a, batch + rows + inner), shape_of(a, batch, m, k));
  const Tensor right = reshape(in_order(b, batch + inner + columns), shape_of(b, batch, k, n));
  const Tensor y = matmul(left, right);
  Shape shape;
  for (std::size_t i = 0; i < batch.size(); ++i) shape.push_back(y.shape()[static_cast<int>(i)]);
  for (char axis : rows) shape.push_back(a.size(axis));
  for (char axis : columns) shape.push_back(b.size(axis));
  return {reshape(y, shape), batch + rows + columns};
}

}  // namespace

Tensor einsum(std::string_view equation, std::span<const Tensor> operands) {
  detail::check_given("einsum", operands);
  const std::size_t arrow = equation.find("->");
  std::string_view left = equation.substr(0, arrow);
  std::vector<Term> terms;
  for (std::size_t from = 0; from <= left.size();) {
    const std::size_t comma = std::min(left.find(',', from), left.size());
    terms.push_back(parse_term(equation, left.substr(from, comma - from)));
    from = comma + 1;
  }
  check<ValueError>(terms.size() == operands.size(), "einsum: \"{}\" names {} operands, got {}", equation,
                    terms.size(), operands.size());
  int most_rest = 0;
  std::vector<Named> factors;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const Tensor& x = operands[i];
    const int rest = x.rank() - static_cast<int>(terms[i].axes.size());
    check<ShapeError>(terms[i].rest ? rest >= 0 : rest == 0,
                      "einsum: term {} of \"{}\" has {} axes, but shape {} has {}", i, equation,
                      terms[i].axes.size(), x.shape(), x.rank());
    spell_out(equation, terms[i], rest);
    if (terms[i].rest) most_rest = std::max(most_rest, rest);
    factors.push_back(with_single_axes(equation, x, terms[i].axes));
  }
  Term out;
  if (arrow != std::string_view::npos) {
    out = parse_term(equation, equation.substr(arrow + 2));
    spell_out(equation, out, most_rest);
  } else {
    std::string letters;
    for (const Term& term : terms) letters += term.axes;
    std::ranges::sort(letters);
    for (char axis : letters)
      if (std::isdigit(static_cast<unsigned char>(axis)) == 0 && std::ranges::count(letters, axis) == 1)
        out.axes += axis;
    out.rest = true;
    spell_out(equation, out, most_rest);
  }
  for (std::size_t i = 0; i < out.axes.size(); ++i) {
    const char axis = out.axes[i];
    check<ValueError>(out.axes.find(axis, i + 1) == std::string::npos,
                      "einsum: the result of \"{}\" names axis {} twice", equation, axis);
    check<ValueError>(std::ranges::any_of(factors, [&](const Named& t) { return t.has(axis); }),
                      "einsum: the result of \"{}\" names axis {}, which no operand has", equation, axis);
  }
  for (const Tensor& x : operands)
    check<DTypeError>(x.dtype() == operands[0].dtype(), "einsum: operands of {} and {}; cast one of them",
                      name_of(operands[0].dtype()), name_of(x.dtype()));
  Named total = factors[0];
  for (std::size_t i = 1; i < factors.size(); ++i) {
    std::string kept = out.axes;
    for (std::size_t j = i + 1; j < factors.size(); ++j) kept += factors[j].axes;
    total = multiplied(equation, total, factors[i], kept);
  }
  std::string gone;
  for (char axis : total.axes)
    if (out.axes.find(axis) == std::string::npos) gone += axis;
  total = summed_over(total, gone);
  return in_order(total, out.axes);
}

}  // namespace sherd
