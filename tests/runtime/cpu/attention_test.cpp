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
  std::vector<float> q, k, v, o, go, lse, gq, gk, gv;
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
    gq.assign(q.size(), nan), gk.assign(k.size(), nan), gv.assign(v.size(), nan);
    cpu::attention(a, view<float>(o, queries), lse.data());
    cpu::attention_backward(a, {.o = view<const float>(o, queries),
                                .go = view<const float>(go, queries),
                                .logsumexp = lse.data(),
                                .gq = view<float>(gq, queries),
                                .gk = view<float>(gk, keys),
                                .gv = view<float>(gv, keys)});
  }
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
          for (std::int64_t j = 0; j < seen; ++j) {
            double s = 0;
            for (std::int64_t d = 0; d < width; ++d)
              s += double(q[at(queries, b, h, i, d)]) * k[at(keys, b, h, j, d)];
            total += p[j] = std::exp(s * a.scale);
          }
          if (seen) worst = std::max(worst, std::abs(std::log(total) - lse[(b * heads + h) * queries + i]));
          for (std::int64_t j = 0; j < seen; ++j) {
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
