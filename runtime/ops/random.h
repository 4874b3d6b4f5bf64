// Tensors of random numbers. The key is a field, so running the op again gives the same numbers.
#pragma once

#include "runtime/generator.h"
#include "runtime/op.h"

namespace sherd::ops {

/// Uniform in [low, high).
struct Uniform {
  static constexpr std::string_view name = "uniform";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  RandomKey key;
  double low = 0, high = 1;

  Specs infer(SpecSpan) const;
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
    on("low", low);
    on("high", high);
  }
  bool operator==(const Uniform&) const = default;
};

/// Normal with the given mean and standard deviation.
struct Normal {
  static constexpr std::string_view name = "normal";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  RandomKey key;
  double mean = 0, stddev = 1;

  Specs infer(SpecSpan) const;
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
    on("mean", mean);
    on("stddev", stddev);
  }
  bool operator==(const Normal&) const = default;
};

/// Integers in [low, high).
struct RandomInteger {
  static constexpr std::string_view name = "randint";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  RandomKey key;
  std::int64_t low = 0, high = 2;

  Specs infer(SpecSpan) const;
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
    on("low", low);
    on("high", high);
  }
  bool operator==(const RandomInteger&) const = default;
};

/// The numbers below the count of `spec`, which is 1-D and i64, in an order of which all are equally likely.
struct RandomOrder {
  static constexpr std::string_view name = "randperm";
  static constexpr Arity arity = 0;
  static constexpr bool differentiable = false;
  Spec spec;
  RandomKey key;

  Specs infer(SpecSpan) const { return {spec}; }
  Tensors reference(Inputs) const;  ///< made on the host, which has a kernel
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
  }
  bool operator==(const RandomOrder&) const = default;
};

/// 1 with the probability that an element is, else 0.
struct Bernoulli {
  static constexpr std::string_view name = "bernoulli";
  static constexpr Mask dense = 1;
  static constexpr bool differentiable = false;
  RandomKey key;

  Specs infer(SpecSpan in) const;
  Tensors reference(Inputs in) const;
  void fields(auto&& on) const {
    on("seed", key.seed);
    on("offset", key.offset);
  }
  bool operator==(const Bernoulli&) const = default;
};

}  // namespace sherd::ops
