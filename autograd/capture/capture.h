// A step as a program: run once while listening, then replay without the code that made it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/tensor.h"

namespace sherd {

/// A function to capture: tensors in, tensors out.
using Step = std::function<std::vector<Tensor>(std::span<const Tensor>)>;

/// The ops of a captured step, in order. Tensors that the step met but neither got as inputs nor made
/// (parameters, optimizer state, constants) are held, read and written in place. Belongs to one thread at a
/// time.
class SHERD_API Program {
 public:
  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;
  ~Program();

  /// Runs the ops on new inputs, equal to the bit to calling the step, and returns fresh outputs without
  /// history. Inputs must have the captured ones' shapes, strides, dtypes and devices (ShapeError,
  /// DTypeError, DeviceError). Nothing is recorded: with grad mode on, a program that writes a tensor which
  /// was computed with gradients recorded is refused (StateError).
  std::vector<Tensor> replay(const std::vector<Tensor>& inputs);
  /// What the captured run itself returned, without history.
  const std::vector<Tensor>& outputs() const;
  /// Number of ops, views among them.
  std::size_t size() const;
  /// Memory that all values between the ops share, in bytes; kept from replay to replay.
  std::size_t workspace_bytes() const;

 private:
  friend SHERD_API Program capture(const Step& step, const std::vector<Tensor>& inputs);
  friend SHERD_API std::string to_string(const Program& program);
  struct Impl;
  explicit Program(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Runs `step(inputs)` once, which has its usual effects, and keeps its ops. Host values (a loop count, a
/// rate as a number) become part of the program; what must change from step to step belongs in tensors.
/// Refused by name: random numbers (NotImplementedError); host reads such as `item`, `to_vector`, `data` and
/// printing (their value could not change); writes through host
/// pointers; a tensor made inside, other than an output, that is still alive afterwards, such as new
/// optimizer state or a `.grad` left behind (StateError).
SHERD_API Program capture(const Step& step, const std::vector<Tensor>& inputs);

/// One line an op, `%7 = matmul[transpose_b=true](%x0, %p2) : f32 (4, 16)`, after the inputs (%x) and the
/// tensors from outside (%p).
SHERD_API std::string to_string(const Program& program);

}  // namespace sherd
