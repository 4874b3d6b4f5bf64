#include "runtime/cpu/attention.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "runtime/context.h"
#include "runtime/random.h"
#include "tests/catch.h"

using namespace sherd;

namespace {

constexpr int batch = 2, heads = 3;

std::vector<float> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<float> v(count);
  cpu::fill_normal({seed, 0}, 0, 1, v.data(), count);
  return v;
}

/// Queries, keys and values as slices of one (B, T, 3, H, D) projection when they are equally many, as a
/// model has them.
struct Case {
  std::int64_t queries, keys, width;
  cpu::Attention a;
  std::vector<float> q, k, v, o, go, lse, largest, gq, gk, gv;
  /// Of (batch, head, query, key) where there is a mask: whether a query sees a key, and what is added.
  std::vector<std::uint8_t> seen;
  std::vector<float> added;
  double added_shift = 0;  // which all that is added has
  std::int64_t row() const { return heads * width; }

  Case(std::int64_t tq, std::int64_t tk, std::int64_t d, bool causal, double dropout)
      : queries(tq), keys(tk), width(d) {
    q = numbers(batch * tq * row(), 1), k = numbers(batch * tk * row(), 2),
    v = numbers(batch * tk * row(), 3);
    go = numbers(batch * tq * row(), 4);
    a = {.batch = batch,
         .heads = heads,
         .queries = tq,
         .keys = tk,
         .width = d,
         .scale = 1 / std::sqrt(float(d)),
         .causal = causal,
         .dropout = dropout,
         .random = {99, 7},
         .q = view<const float>(q, tq),
         .k = view<const float>(k, tk),
         .v = view<const float>(v, tk)};
  }
  template <class T>
  cpu::Heads<T> view(T* data, std::int64_t rows) const {
    return {data, rows * row(), width, row()};
  }
  template <class T, class V>
  cpu::Heads<T> view(V& x, std::int64_t rows) const {
    return view<T>(static_cast<T*>(x.data()), rows);
  }

  void run(int threads) {
    Context::current().set_threads(threads);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    o.assign(q.size(), nan), lse.assign(batch * heads * queries, nan);
    largest.assign(lse.size(), nan);
    a.mask = {.seen = added.empty() && !seen.empty() ? seen.data() : nullptr,
              .added = added.empty() ? nullptr : added.data(),
              .batch = heads * queries * keys,
              .head = queries * keys,
              .row = keys};
    float* const top = added.empty() ? nullptr : largest.data();
    gq.assign(q.size(), nan), gk.assign(k.size(), nan), gv.assign(v.size(), nan);
    cpu::attention(a, view<float>(o, queries), {lse.data(), top});
    cpu::attention_backward(a, {.o = view<const float>(o, queries),
                                .go = view<const float>(go, queries),
                                .rows = {lse.data(), top},
                                .gq = view<float>(gq, queries),
                                .gk = view<float>(gk, keys),
                                .gv = view<float>(gv, keys)});
  }
  /// Hides with `shows(b, h, i, j)`, by bools or by -inf added to what `shift` gives.
  template <class F>
  void hide(const F& shows, bool by_adding, float shift = 0) {
    seen.clear(), added.clear();
    added_shift = shift;
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < queries; ++i)
          for (std::int64_t j = 0; j < keys; ++j) seen.push_back(shows(b, h, i, j));
    if (!by_adding) return;
    for (std::size_t i = 0; i < seen.size(); ++i)
      added.push_back(seen[i] ? shift + static_cast<float>(i % 5) / 4
                              : -std::numeric_limits<float>::infinity());
  }
  bool shown(std::size_t score) const { return seen.empty() || seen[score]; }
  std::size_t at(std::int64_t rows, int b, int h, std::int64_t i, std::int64_t d) const {
    return static_cast<std::size_t>((b * rows + i) * row() + h * width + d);
  }
  double kept(int b, int h, std::int64_t i, std::int64_t j) const {
    if (a.dropout == 0) return 1;
    const std::uint64_t counter = 7 + ((b * heads + h) * queries + i) * ((keys + 3) / 4) + j / 4;
    return philox(99, counter)[j % 4] < drop_threshold(a.dropout) ? 0 : 1 / (1 - a.dropout);
  }

  /// The largest difference from the formulas written out in double, over everything that forward and
  /// backward give.
  double error() const {
    std::vector<double> wo(q.size()), wgq(q.size()), wgk(k.size()), wgv(v.size());
    double worst = 0;
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < queries; ++i) {
          const std::int64_t seen =
              a.causal ? std::max<std::int64_t>(0, std::min(keys, i + keys - queries + 1)) : keys;
          std::vector<double> p(seen), gp(seen);
          double total = 0, delta = 0;
          const std::size_t scores = static_cast<std::size_t>(((b * heads + h) * queries + i) * keys);
          for (std::int64_t j = 0; j < seen; ++j) {
            if (!shown(scores + j)) continue;
            double s = 0;
            for (std::int64_t d = 0; d < width; ++d)
              s += double(q[at(queries, b, h, i, d)]) * k[at(keys, b, h, j, d)];
            if (!added.empty()) s += (added[scores + j] - added_shift) / a.scale;
            total += p[j] = std::exp(s * a.scale);
          }
          if (seen && added.empty() && total > 0)
            worst = std::max(worst, std::abs(std::log(total) - lse[(b * heads + h) * queries + i]));
          for (std::int64_t j = 0; j < seen; ++j) {
            if (!shown(scores + j)) continue;
            p[j] /= total;
            for (std::int64_t d = 0; d < width; ++d) {
              const double g = go[at(queries, b, h, i, d)];
              wo[at(queries, b, h, i, d)] += p[j] * kept(b, h, i, j) * v[at(keys, b, h, j, d)];
              wgv[at(keys, b, h, j, d)] += p[j] * kept(b, h, i, j) * g;
              gp[j] += g * v[at(keys, b, h, j, d)] * kept(b, h, i, j);
            }
            delta += p[j] * gp[j];
          }
          for (std::int64_t j = 0; j < seen; ++j) {
            if (!shown(scores + j)) continue;
            const double gs = p[j] * (gp[j] - delta) * a.scale;
            for (std::int64_t d = 0; d < width; ++d) {
              wgq[at(queries, b, h, i, d)] += gs * k[at(keys, b, h, j, d)];
              wgk[at(keys, b, h, j, d)] += gs * q[at(queries, b, h, i, d)];
            }
          }
        }
      }
    }
    const auto compare = [&](const std::vector<float>& got, const std::vector<double>& want) {
      for (std::size_t i = 0; i < got.size(); ++i) {
        worst =
            std::isnan(got[i]) ? 1e9 : std::max(worst, std::abs(got[i] - want[i]) / (1 + std::abs(want[i])));
      }
    };
    compare(o, wo), compare(gq, wgq), compare(gk, wgk), compare(gv, wgv);
    return worst;
  }
};

bool same(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("attention and its gradients equal the formulas, for any lengths, widths, masks and dropout",
          "[one thread]") {
  for (bool causal : {false, true}) {
    for (double dropout : {0.0, 0.3}) {
      for (auto [tq, tk, d] : {std::array{1, 1, 1},
                               {5, 5, 16},
                               {64, 64, 32},
                               {33, 33, 20},
                               {70, 70, 64},
                               {1, 37, 32},
                               {17, 50, 128},
                               {50, 17, 8},
                               {100, 100, 40}}) {
        Case c(tq, tk, d, causal, dropout);
        c.run(2);
        INFO("queries " << tq << " keys " << tk << " width " << d << " causal " << causal << " dropout "
                        << dropout);
        CHECK(c.error() < 3e-5);
      }
    }
  }
}

namespace {

/// Masks by name: whether query i of a head sees key j.
struct Shows {
  const char* name;
  bool (*key)(int b, int h, std::int64_t i, std::int64_t j);
};
constexpr Shows kinds[] = {
    {"padding", [](int b, int, std::int64_t, std::int64_t j) { return j < 20 + 30 * b; }},
    {"padding in front", [](int b, int, std::int64_t, std::int64_t j) { return j >= 5 + 40 * b; }},
    {"band", [](int, int, std::int64_t i, std::int64_t j) { return std::abs(i - j) < 7; }},
    {"documents", [](int, int, std::int64_t i, std::int64_t j) { return i / 30 == j / 30; }},
    {"first and last",
     [](int, int h, std::int64_t i, std::int64_t j) { return j < 2 || j > 90 + h || j == i; }},
    {"scattered",
     [](int b, int h, std::int64_t i, std::int64_t j) { return (i * 7 + j * 5 + b + h) % 3 == 0; }},
    {"rows without keys", [](int, int, std::int64_t i, std::int64_t j) { return i % 5 != 2 && j % 2 == 0; }},
    {"nothing", [](int, int, std::int64_t, std::int64_t) { return false; }},
};

}  // namespace

TEST_CASE("attention with masks and its gradients equal the formulas, whichever runs of keys are left",
          "[one thread]") {
  for (const Shows& kind : kinds)
    for (bool by_adding : {false, true})
      for (bool causal : {false, true})
        for (double dropout : {0.0, 0.3})
          for (auto [tq, tk, d] :
               {std::array{1, 1, 1}, {9, 33, 16}, {40, 130, 20}, {130, 130, 32}, {70, 40, 8}}) {
            Case c(tq, tk, d, causal, dropout);
            c.hide(kind.key, by_adding, tq == 9 ? -100.f : 0.f);
            c.run(2);
            INFO(kind.name << (by_adding ? " added" : "") << ", queries " << tq << " keys " << tk << " width "
                           << d << " causal " << causal << " dropout " << dropout);
            CHECK(c.error() < 3e-5);
          }
}

TEST_CASE("attention does not read blocks of keys that a mask hides from neighbouring queries") {
  for (bool by_adding : {false, true}) {
    Case c(16, 200, 16, false, 0.2);
    // Keys 64 to 159 are nobody's.
    c.hide([](int, int, std::int64_t, std::int64_t j) { return j < 60 || j >= 160; }, by_adding);
    c.run(1);
    const Case before = c;
    for (int b = 0; b < batch; ++b)
      for (std::int64_t j = 64; j < 160; ++j)
        for (std::int64_t i = 0; i < c.row(); ++i)
          c.k[(b * c.keys + j) * c.row() + i] = c.v[(b * c.keys + j) * c.row() + i] =
              std::numeric_limits<float>::quiet_NaN();
    c.run(2);
    CHECK((same(before.o, c.o) && same(before.lse, c.lse) && same(before.gq, c.gq) && same(before.gk, c.gk) &&
           same(before.gv, c.gv)));
  }
}

TEST_CASE("attention: weights of scores to which huge numbers are added sum to one, forward and backward") {
  for (const float shift : {-1e9f, -3e38f, 1e9f}) {
    Case c(20, 50, 16, false, 0);
    c.hide([](int, int, std::int64_t, std::int64_t) { return true; }, true, shift);
    c.v.assign(c.v.size(), 1);
    c.run(1);
    for (float x : c.o) CHECK(std::abs(x - 1) < 1e-5);
    // The gradients of all values together are those of the results.
    for (int b = 0; b < batch; ++b)
      for (std::int64_t d = 0; d < c.row(); ++d) {
        double sum = 0;
        for (std::int64_t j = 0; j < c.keys; ++j) sum += c.gv[(b * c.keys + j) * c.row() + d];
        for (std::int64_t i = 0; i < c.queries; ++i) sum -= c.go[(b * c.queries + i) * c.row() + d];
        CHECK(std::abs(sum) < 1e-4);
      }
  }
}

TEST_CASE("attention has the same bits for any number of threads") {
  Case c(130, 130, 32, true, 0.1);
  c.run(1);
  const Case one = c;
  c.run(2);
  CHECK((same(one.o, c.o) && same(one.lse, c.lse) && same(one.gq, c.gq) && same(one.gk, c.gk) &&
         same(one.gv, c.gv)));
}

TEST_CASE("attention reads slices of one projection in place") {
  const std::int64_t t = 20, d = 16;
  Case plain(t, t, d, true, 0);
  std::vector<float> qkv(batch * t * 3 * heads * d);
  for (std::int64_t r = 0; r < batch * t; ++r) {
    const std::vector<float>* parts[] = {&plain.q, &plain.k, &plain.v};
    for (int part = 0; part < 3; ++part) {
      std::copy_n(parts[part]->data() + r * heads * d, heads * d, qkv.data() + (r * 3 + part) * heads * d);
    }
  }
  Case sliced = plain;
  const auto slice = [&](int part) {
    return cpu::Heads<const float>{qkv.data() + part * heads * d, t * 3 * heads * d, d, 3 * heads * d};
  };
  plain.a.q = plain.view<const float>(plain.q, t), plain.a.k = plain.view<const float>(plain.k, t);
  plain.a.v = plain.view<const float>(plain.v, t);
  sliced.a.q = slice(0), sliced.a.k = slice(1), sliced.a.v = slice(2);
  plain.run(2), sliced.run(2);
  CHECK((same(plain.o, sliced.o) && same(plain.gq, sliced.gq) && same(plain.gk, sliced.gk) &&
         same(plain.gv, sliced.gv)));
}

TEST_CASE("large scores do not overflow, and NaN stays visible") {
  Case c(8, 8, 16, false, 0);
  for (float& x : c.q) x *= 1e4f;
  c.run(1);
  for (float x : c.o) REQUIRE(std::isfinite(x));
  c.q[0] = std::numeric_limits<float>::quiet_NaN();
  c.run(1);
  CHECK(std::isnan(c.o[0]));
}
