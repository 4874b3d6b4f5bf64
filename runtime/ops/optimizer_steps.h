// Optimizer steps over whole lists of parameters at once: of each rule the one place where it stands. Rate
// and step counts are tensors, so a recorded step can be replayed. Safe to include in device code.
#pragma once

#include "runtime/list_rule.h"
#include "runtime/math.h"

namespace sherd::ops {

/// By what each rule multiplies gradients.
constexpr double sign_of(bool maximize) { return maximize ? -1 : 1; }

/// One step of Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019): m = beta1 m + (1 -
/// beta1) g and v = beta2 v + (1 - beta2) g^2 as published, so that a beta of 0 forgets all that was before.
/// Inputs: lr (0-d, f64), skip if the step is skippable, the factor if it is clipped, then for each parameter
/// p, g (f32 or of 16 bits), m, v, the largest v with amsgrad (Reddi, Kale and Kumar, 2018), step (0-d, f64),
/// which counts one up, and its twin if it has one. The first ones and g are not written.
struct AdamStep : ListStep<AdamStep> {
  static constexpr std::string_view name = "adam_step_";
  static constexpr std::string_view states[] = {"first moment", "second moment", "largest second moment"};
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< AdamW: decay shrinks the parameter instead of adding to the gradient
  bool amsgrad = false, maximize = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;
  Twins twins = Twins::no;

  static constexpr int forms = 2, plain = 0, keeps_largest = 1;
  constexpr int form() const { return amsgrad ? keeps_largest : plain; }
  static constexpr Mask keeps(int form) { return form == plain ? 0b11 : 0b111; }
  static constexpr bool counts(int) { return true; }
  template <class T>
  struct Factors {
    T keep, sign, decay, beta1, share1, beta2, share2, root2, eps, rate;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D step, const Rounded& rounded) const {
    using math::pow;
    using math::sqrt;
    return Factors<decltype(rounded(lr))>{
        .keep = rounded(decoupled ? D(1.0) - lr * D(weight_decay) : D(1.0)),
        .sign = rounded(D(sign_of(maximize))),
        .decay = rounded(D(decoupled ? 0.0 : weight_decay)),
        .beta1 = rounded(D(beta1)),
        .share1 = rounded(D(1 - beta1)),
        .beta2 = rounded(D(beta2)),
        .share2 = rounded(D(1 - beta2)),
        .root2 = rounded(sqrt(D(1.0) - pow(D(beta2), step))),
        .eps = rounded(D(eps)),
        .rate = rounded(-(lr / (D(1.0) - pow(D(beta1), step)))),
    };
  }
  template <int form, class T>
  constexpr Stepped<T, 3> operator()(const Factors<T>& f, T p, T g, T m, T v, T largest) const {
    using math::fma;
    using math::sqrt;
    using math::where;
    const T kept = p * f.keep;
    const T grad = fma(kept, f.decay, g * f.sign);
    const T mean = fma(f.share1, grad, m * f.beta1);
    const T square = fma(f.share2 * grad, grad, v * f.beta2);
    T scale = square;
    if constexpr (form == keeps_largest)  // NaN stays, in either
      scale = largest = where(largest != largest, largest, where(square <= largest, largest, square));
    return {kept + f.rate * mean / (sqrt(scale) / f.root2 + f.eps), {mean, square, largest}};
  }
  void fields(auto&& on) const {
    on("beta1", beta1);
    on("beta2", beta2);
    on("eps", eps);
    on("weight_decay", weight_decay);
    on("decoupled", decoupled);
    on("amsgrad", amsgrad);
    on("maximize", maximize);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
    on("twins", twins == Twins::yes);
  }
  bool operator==(const AdamStep&) const = default;
};

/// One step of SGD. Inputs: lr (0-d, f64), skip if the step is skippable, the factor if it is clipped,
/// then for each parameter p and g (f32 or of 16 bits), and with momentum also the buffer and a 0-d f64 count
/// of steps taken (0: the buffer starts as the gradient). The first ones and g are not written. Without
/// momentum dampening and nesterov say nothing.
struct SgdStep : ListStep<SgdStep> {
  static constexpr std::string_view name = "sgd_step_";
  static constexpr std::string_view states[] = {"momentum buffer"};
  double momentum = 0, weight_decay = 0, dampening = 0;
  bool nesterov = false, maximize = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  static constexpr int forms = 3, plain = 0, carries = 1, looks_ahead = 2;
  constexpr int form() const { return momentum == 0 ? plain : nesterov ? looks_ahead : carries; }
  static constexpr Mask keeps(int form) { return form != plain; }
  static constexpr bool counts(int form) { return form != plain; }
  template <class T, class Truth>
  struct Factors {
    T rate, sign, momentum, decay, share;
    Truth first;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D step, const Rounded& rounded) const {
    return Factors<decltype(rounded(lr)), decltype(step == step)>{
        .rate = rounded(-lr),
        .sign = rounded(D(sign_of(maximize))),
        .momentum = rounded(D(momentum)),
        .decay = rounded(D(weight_decay)),
        .share = rounded(D(1 - dampening)),
        .first = step == D(1.0),
    };
  }
  template <int form, class T, class Truth>
  constexpr Stepped<T, 1> operator()(const Factors<T, Truth>& f, T p, T g, T m) const {
    using math::fma;
    using math::where;
    const T step = fma(p, f.decay, g * f.sign);
    if constexpr (form == plain) {
      return {fma(f.rate, step, p), {m}};
    } else {
      const T carried = where(f.first, step, fma(m, f.momentum, f.share * step));
      T move = carried;
      if constexpr (form == looks_ahead) move = fma(carried, f.momentum, step);
      return {fma(f.rate, move, p), {carried}};
    }
  }
  void fields(auto&& on) const {
    on("momentum", momentum);
    on("weight_decay", weight_decay);
    on("dampening", dampening);
    on("nesterov", nesterov);
    on("maximize", maximize);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const SgdStep&) const = default;
};

/// One step of RMSprop. Inputs: lr (0-d, f64), skip if the step is skippable, the factor if it is
/// clipped, then for each parameter p, g (f32 or of 16 bits), the average of squares, that of gradients if it
/// is centred, and the buffer with momentum. The first ones and g are not written.
struct RmspropStep : ListStep<RmspropStep> {
  static constexpr std::string_view name = "rmsprop_step_";
  static constexpr std::string_view states[] = {"average of squares", "average of gradients",
                                                "momentum buffer"};
  double alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  static constexpr int forms = 4, centers = 1, carries = 2;  // the last two are bits
  constexpr int form() const { return (centered ? centers : 0) | (momentum != 0 ? carries : 0); }
  static constexpr Mask keeps(int form) { return Mask{1} | static_cast<Mask>(form) << 1; }
  template <class T>
  struct Factors {
    T rate, sign, alpha, share, eps, decay, momentum;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D, const Rounded& rounded) const {
    return Factors<decltype(rounded(lr))>{
        .rate = rounded(-lr),
        .sign = rounded(D(sign_of(maximize))),
        .alpha = rounded(D(alpha)),
        .share = rounded(D(1 - alpha)),
        .eps = rounded(D(eps)),
        .decay = rounded(D(weight_decay)),
        .momentum = rounded(D(momentum)),
    };
  }
  template <int form, class T>
  constexpr Stepped<T, 3> operator()(const Factors<T>& f, T p, T g, T squares, T average, T carried) const {
    using math::fma;
    using math::sqrt;
    using math::where;
    const T grad = fma(p, f.decay, g * f.sign);
    squares = fma(f.share * grad, grad, squares * f.alpha);
    T variance = squares;
    if constexpr ((form & centers) != 0) {
      average = fma(f.share, grad, average * f.alpha);
      variance = fma(-average, average, variance);
      variance = where(variance < T(0), T(0), variance);  // by rounding; NaN stays
    }
    T move = grad / (sqrt(variance) + f.eps);
    if constexpr ((form & carries) != 0) move = carried = fma(carried, f.momentum, move);
    return {fma(f.rate, move, p), {squares, average, carried}};
  }
  void fields(auto&& on) const {
    on("alpha", alpha);
    on("eps", eps);
    on("weight_decay", weight_decay);
    on("momentum", momentum);
    on("centered", centered);
    on("maximize", maximize);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const RmspropStep&) const = default;
};

/// One step of Lion (Chen et al., 2023). Inputs: lr (0-d, f64), skip if the step is skippable, the factor if
/// it is clipped, then for each parameter p, g (f32 or of 16 bits) and m. The first ones and g are not
/// written.
struct LionStep : ListStep<LionStep> {
  static constexpr std::string_view name = "lion_step_";
  static constexpr std::string_view states[] = {"average of gradients"};
  double beta1 = 0.9, beta2 = 0.99, weight_decay = 0;
  bool maximize = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  template <class T>
  struct Factors {
    T keep, rate, sign, beta1, share1, beta2, share2;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D, const Rounded& rounded) const {
    return Factors<decltype(rounded(lr))>{
        .keep = rounded(D(1.0) - lr * D(weight_decay)),
        .rate = rounded(-lr),
        .sign = rounded(D(sign_of(maximize))),
        .beta1 = rounded(D(beta1)),
        .share1 = rounded(D(1 - beta1)),
        .beta2 = rounded(D(beta2)),
        .share2 = rounded(D(1 - beta2)),
    };
  }
  template <class T>
  constexpr Stepped<T, 1> operator()(const Factors<T>& f, T p, T g, T m) const {
    using math::fma;
    using math::where;
    const T grad = g * f.sign;
    const T mixed = fma(f.share1, grad, m * f.beta1);
    const T way = where(mixed > T(0), T(1), where(mixed < T(0), T(-1), mixed));  // 0 and NaN stay
    return {fma(f.rate, way, p * f.keep), {fma(f.share2, grad, m * f.beta2)}};
  }
  void fields(auto&& on) const {
    on("beta1", beta1);
    on("beta2", beta2);
    on("weight_decay", weight_decay);
    on("maximize", maximize);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const LionStep&) const = default;
};

/// One step of Adagrad (Duchi, Hazan and Singer, 2011). Inputs: lr (0-d, f64), skip if the step is skippable,
/// the factor if it is clipped, then for each parameter p, g (f32 or of 16 bits), the sum of squares and step
/// (0-d, f64), which counts one up. The first ones and g are not written.
struct AdagradStep : ListStep<AdagradStep> {
  static constexpr std::string_view name = "adagrad_step_";
  static constexpr std::string_view states[] = {"sum of squares"};
  double lr_decay = 0, eps = 1e-10, weight_decay = 0;
  bool maximize = false;
  Skippable skippable = Skippable::no;
  Clipped clipped = Clipped::no;

  static constexpr bool counts(int) { return true; }
  template <class T>
  struct Factors {
    T rate, sign, eps, decay;
  };
  template <class D, class Rounded>
  constexpr auto factors(D lr, D step, const Rounded& rounded) const {
    return Factors<decltype(rounded(lr))>{
        .rate = rounded(-(lr / (D(1.0) + (step - D(1.0)) * D(lr_decay)))),
        .sign = rounded(D(sign_of(maximize))),
        .eps = rounded(D(eps)),
        .decay = rounded(D(weight_decay)),
    };
  }
  template <class T>
  constexpr Stepped<T, 1> operator()(const Factors<T>& f, T p, T g, T squares) const {
    using math::fma;
    using math::sqrt;
    const T grad = fma(p, f.decay, g * f.sign);
    squares = fma(grad, grad, squares);
    return {fma(f.rate, grad / (sqrt(squares) + f.eps), p), {squares}};
  }
  void fields(auto&& on) const {
    on("lr_decay", lr_decay);
    on("eps", eps);
    on("weight_decay", weight_decay);
    on("maximize", maximize);
    on("skippable", skippable == Skippable::yes);
    on("clipped", clipped == Clipped::yes);
  }
  bool operator==(const AdagradStep&) const = default;
};

}  // namespace sherd::ops
