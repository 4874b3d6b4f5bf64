// Capturing a step: its ops are recorded while it runs once, and replayed without the code that applied them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/tensor.h"

namespace sherd {

/// A function to capture: tensors in, tensors out.
using Step = std::function<std::vector<Tensor>(std::span<const Tensor>)>;

/// How programs run, all with the bits of eager calls. `replay`: op by op, as they were recorded, with what
/// an eager call keeps for its backward. `partition`: what is cheaper to make again than to keep (elementwise
/// ops, casts, sums of rows) a backward makes again, of inputs and parameters too: where one of these is
/// written in between that is a StateError, also where eager code would have read the result alone; a result
/// that it does not keep may be written; a captured step, which has its backward in it, keeps what it keeps.
/// `fused`: the same, with such ops over one space of rows and columns as one, whose values between stay in
/// the nearest caches, or in registers of a GPU. There NVRTC compiles kernels for them beside the program,
/// which runs op by op until they are there; where it is not installed `fused` is `partition`.
enum class Executor : std::uint8_t { replay, partition, fused };

/// The ops of a captured step, in order. Tensors that the step used but neither got as inputs nor made
/// (parameters, optimizer state, constants) are held, and read and written in place. One thread uses it at a
/// time, and hands it to another one after `synchronize`, like a tensor.
class SHERD_API Program {
 public:
  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;
  ~Program();

  /// Runs the ops on new inputs, with results equal to the bit to calling the step, and returns fresh outputs
  /// without history. Random numbers are those that the step would draw now: the rank's generator moves on.
  /// Inputs must have the captured number (ValueError), shapes and strides (ShapeError), dtypes (DTypeError)
  /// and devices (DeviceError). The tape records nothing; so with grad mode on, a program that writes a
  /// tensor which was computed with gradients recorded is refused (StateError). StateError also inside
  /// `recompute` or `capture`, which could not record the ops. It knows the tensors that the step used and no
  /// others: a `.grad` that was left behind since the capture is neither added nor cleared. What peers read
  /// of tensors from outside they have read when it returns.
  std::vector<Tensor> replay(const std::vector<Tensor>& inputs);
  /// What the captured run itself returned, without history.
  const std::vector<Tensor>& outputs() const;
  /// Whether replays run as one recording of the device (a CUDA graph), which has the step's calls among
  /// ranks in it where all are small and each rank is a thread with a device of its own, or as several
  /// between which the host makes them: from the first replay on, where all of the step is on one GPU, but
  /// for values that it brings there from outside (rates, a batch), in memory that nobody releases, and waits
  /// for nothing. Results are the same to the bit. A recording is one thread's: the first replay on another
  /// one makes it anew, so give threads that take turns a program each.
  bool is_device_graph() const;
  /// Number of ops, views among them.
  std::size_t size() const;
  /// Bytes of the buffers in which values between the ops take turns; kept from replay to replay.
  std::size_t workspace_bytes() const;
  struct Impl;

 private:
  friend SHERD_API Program capture(const Step& step, const std::vector<Tensor>& inputs, Executor executor);
  friend SHERD_API std::string to_string(const Program& program);
  friend SHERD_API std::string to_svg(const Program& program);
  explicit Program(std::unique_ptr<Impl> impl);
  /// StateError once it was moved from.
  Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

/// Runs `step(inputs)` once, which has its usual effects, and keeps its ops. Host values (a loop count, a
/// rate as a number) become part of the program; what must change from step to step belongs in tensors. The
/// message names what is refused: random numbers that the host draws, or seeding (StateError); reads on the
/// host such as `item`, `to_vector`, `data` and printing, since a replay could not react to the value; writes
/// through host pointers to memory that ops of the step used before (others it cannot see); inputs that share
/// memory; a tensor made inside, other than an output, that is still alive afterwards, such as new optimizer
/// state or a
/// `.grad` left behind; a tensor from before the step that it reads and lets go of, such as a `.grad` that it
/// adds to and clears; writes into a tensor that the step made of numbers (`Tensor::scalar`,
/// `Tensor::from`), which a replay would not make again, and reads of one made with `empty` that no op wrote
/// (StateError). An input is an input wherever the step uses its memory. What other threads do during the
/// step is not seen: a tensor that one made is a constant to the program. ValueError for an empty handle as
/// input or output. What replaces a parameter's memory later (`set_data`, `Module::to`) replaces it for the
/// step, not for the program: capture again.
SHERD_API Program capture(const Step& step, const std::vector<Tensor>& inputs,
                          Executor executor = Executor::replay);

/// Whether this rank is capturing a step: for code that keeps something from step to step, which a program
/// must not find.
SHERD_API bool capturing();

/// One line for each input (%x) and tensor from outside (%p), then one for each op: `%7 =
/// matmul[transpose_b=true](%x0, %p2) : f32 (4, 16)`.
SHERD_API std::string to_string(const Program& program);
/// The same as a drawing, an SVG document that needs nothing else: a box for each op, in order, and an edge
/// for each value from where it comes from to where it is read, with its name and spec as title. Ops that
/// write are red, calls among ranks blue, views dashed.
SHERD_API std::string to_svg(const Program& program);

}  // namespace sherd
