// Fills with random numbers. Element i uses word i % 4 of the Philox counter `offset + i / 4`, whatever the
// split of work.
#pragma once

#include <cstdint>

#include "runtime/generator.h"
#include "runtime/random.h"

namespace sherd::cpu {

/// The words of `counters` counters in order, four for each.
void philox_words(RandomKey at, std::int64_t counters, std::uint32_t* out);

/// Uniform over a range; 24 random bits.
void fill_uniform(RandomKey at, UniformRange range, float* out, std::int64_t n);
/// The same with 53 bits: the further ones are of the same place in `stream_of_more`.
void fill_uniform(RandomKey at, UniformRangeOf<double> range, double* out, std::int64_t n);
/// Normal; elements come in pairs (words 0 and 1, words 2 and 3).
void fill_normal(RandomKey at, double mean, double deviation, float* out, std::int64_t n);
/// Integers in [low, high); the interval holds 1 to 2^32 of them.
void fill_integers(RandomKey at, std::int64_t low, std::int64_t high, std::int64_t* out, std::int64_t n);
/// out = keep ? x / (1 - p) : 0. The gradient is the same call on the gradient of the output.
/// T is double, float, Half or BFloat16.
template <class T>
void dropout(RandomKey at, double p, const T* x, T* out, std::int64_t n);

}  // namespace sherd::cpu
