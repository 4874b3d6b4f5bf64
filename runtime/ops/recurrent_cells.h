// What one step of a recurrent layer is for one feature, and its gradient: the kernels' arithmetic with
// numbers, the reference's with `Expr`. Safe to include in device code.
#pragma once

#include <cstdint>

#include "runtime/math.h"

namespace sherd::ops {

/// h' is the state before, x what the input gives, m = W h' + b; sigmoid is s.
enum class RecurrentCell {
  tanh,  ///< h = tanh(x + m)
  lstm,  ///< c = s(f) c' + s(i) tanh(g), h = s(o) tanh(c), of i, f, g, o = x + m
  gru    ///< h = n + s(x_z + m_z) (h' - n), n = tanh(x_n + s(x_r + m_r) m_n), in the order r, z, n
};

/// What a layer carries from step to step; `cell` is an LSTM's alone.
template <class T>
struct CellState {
  T hidden, cell;
};

/// A step's new state, and what its gradient reads of it.
template <class T>
struct CellStep {
  CellState<T> state;
  T kept[4];
};

/// What a step gives back: to each gate of x and of m (`m` only where they differ), and to the state before
/// beside what m gives it.
template <class T>
struct CellGrad {
  T x[4], m[4];
  CellState<T> state;
};

/// A cell says how many `gates` and `kept` numbers a feature has, whether it `has_cell`, whether the
/// gradients of x and m are `apart`, and whether `passes_hidden`: h' counts beside its product. `step(x, m,
/// before)` and `grad(gy, after, before, kept)`, gy being the gradient of the state after.
struct TanhCell {
  static constexpr int gates = 1, kept = 0;
  static constexpr bool has_cell = false, apart = false, passes_hidden = false;

  template <class T>
  static constexpr CellStep<T> step(const T* x, const T* m, const CellState<T>&) {
    using math::tanh;
    return {.state = {tanh(x[0] + m[0]), T(0)}, .kept = {}};
  }
  template <class T>
  static constexpr CellGrad<T> grad(const CellState<T>& gy, const CellState<T>& after, const CellState<T>&,
                                    const T*) {
    return {.x = {gy.hidden * (T(1) - after.hidden * after.hidden)}, .m = {}, .state = {T(0), T(0)}};
  }
};

struct LstmCell {
  static constexpr int gates = 4, kept = 4;
  static constexpr bool has_cell = true, apart = false, passes_hidden = false;

  template <class T>
  static constexpr CellStep<T> step(const T* x, const T* m, const CellState<T>& before) {
    using math::sigmoid, math::tanh;
    const T i = sigmoid(x[0] + m[0]), f = sigmoid(x[1] + m[1]), g = tanh(x[2] + m[2]),
            o = sigmoid(x[3] + m[3]);
    const T c = f * before.cell + i * g;
    return {.state = {o * tanh(c), c}, .kept = {i, f, g, o}};
  }
  template <class T>
  static constexpr CellGrad<T> grad(const CellState<T>& gy, const CellState<T>& after,
                                    const CellState<T>& before, const T* kept) {
    using math::tanh;
    const T i = kept[0], f = kept[1], g = kept[2], o = kept[3], t = tanh(after.cell), one = T(1);
    const T gc = gy.cell + gy.hidden * o * (one - t * t);
    return {.x = {gc * g * (i * (one - i)), gc * before.cell * (f * (one - f)), gc * i * (one - g * g),
                  gy.hidden * t * (o * (one - o))},
            .m = {},
            .state = {T(0), gc * f}};
  }
};

struct GruCell {
  static constexpr int gates = 3, kept = 4;
  static constexpr bool has_cell = false, apart = true, passes_hidden = true;

  template <class T>
  static constexpr CellStep<T> step(const T* x, const T* m, const CellState<T>& before) {
    using math::sigmoid, math::tanh;
    const T r = sigmoid(x[0] + m[0]), z = sigmoid(x[1] + m[1]), n = tanh(x[2] + r * m[2]);
    return {.state = {n + z * (before.hidden - n), T(0)}, .kept = {r, z, n, m[2]}};
  }
  template <class T>
  static constexpr CellGrad<T> grad(const CellState<T>& gy, const CellState<T>&, const CellState<T>& before,
                                    const T* kept) {
    const T r = kept[0], z = kept[1], n = kept[2], m = kept[3], one = T(1);
    const T gz = gy.hidden * (before.hidden - n) * (z * (one - z)),
            gn = gy.hidden * (one - z) * (one - n * n), gr = gn * m * (r * (one - r));
    return {.x = {gr, gz, gn}, .m = {gr, gz, gn * r}, .state = {gy.hidden * z, T(0)}};
  }
};

/// Calls `body` with the functor of `cell`.
template <class F>
decltype(auto) visit_cell(RecurrentCell cell, const F& body) {
  switch (cell) {
    case RecurrentCell::tanh:
      return body(TanhCell{});
    case RecurrentCell::lstm:
      return body(LstmCell{});
    default:
      return body(GruCell{});
  }
}

}  // namespace sherd::ops
