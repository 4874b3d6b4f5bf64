// The inside of a captured program: its ops on handles that each replay puts storages behind.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autograd/capture/capture.h"
#include "autograd/capture/order.h"
#include "autograd/capture/packing.h"
#include "autograd/capture/recorded.h"
#include "runtime/device_recording.h"
#include "runtime/float32_precision.h"
#include "runtime/lent_call.h"
#include "runtime/recorded_calls.h"
#include "runtime/replay.h"

namespace sherd {

struct Program::Impl {
  static constexpr std::uint32_t none = TracedTensor::none;
  /// Where the memory of a storage of the trace comes from during a replay.
  enum class Home { outside, input, workspace, output, kept };
  struct Place {
    Home home = Home::workspace;
    std::uint32_t index = none;          // of the input, of the workspace buffer, or of what is kept
    std::vector<std::uint32_t> tensors;  // values that lie in it
  };
  /// A tensor of the trace. Its handle is made once; each replay puts a storage behind it (`bind`).
  struct Value {
    std::uint32_t storage;
    std::int64_t offset;
    std::string name;
    Tensor tensor;
  };
  struct Step {
    Ref<const AnyOp> op;
    Float32MatmulPrecision precision{};   // that it was captured with
    bool recorded = false;                // with gradients recorded, which owners ask
    std::uint64_t place = 0;              // in the order of recording, when it was traced
    std::vector<std::uint32_t> in, out;   // values; none for an input that was not given
    std::vector<std::uint32_t> takes{};   // buffers that it is the first to use for a storage
    std::vector<std::uint32_t> lends{};   // buffers that peers may read after it
    bool lends_given = false;             // or an input or a tensor from outside that no later step writes
    std::vector<std::uint32_t> makes{};   // storages that get memory of their own before it, in a half
    std::vector<std::uint32_t> frees{};   // kept storages that no later step uses
    std::vector<std::uint32_t> brings{};  // of a half: storages of owners that it uses
    std::vector<Effect> effects{};        // that come before it
    Tensors bound_in, bound_out;          // the same as handles
  };
  /// What a storage of the trace has of the workspace.
  struct Buffer {
    std::uint32_t storage;
    Lifetime life;
    Ref<Storage> memory{};
    std::vector<std::shared_ptr<LentCall>> lent{};  // of steps that lent it, of earlier replays too
    std::vector<std::uint32_t> turns{};  // those that are ever lent and lie in the same bytes, itself too
  };
  /// The memory of a device in which buffers take turns.
  struct Workspace {
    Device device;
    std::vector<std::uint32_t> buffers;
    Packing packing;
    std::uint64_t within = 0;  // of a half: the id of the rank's storage in which its buffers are
  };
  /// The ops as recordings of a device (device_graph.cpp): one where there are no calls among ranks, or where
  /// the devices of all ranks make them; else several, between which the host makes them. It has its own
  /// memory for inputs, outputs and what is brought, because a recording keeps to its addresses. It keeps too
  /// to what the rank that recorded it has for its kernels (workspaces, reports of bad values), so no other
  /// rank runs it.
  struct DeviceGraph {
    struct Part {
      std::uint32_t first, end;                      // steps
      std::unique_ptr<DeviceRecording> recording{};  // null for one call
    };
    Device device;
    std::uint64_t rank;                    // its Context's id
    std::vector<std::uint32_t> bringing;   // steps that bring values from the host, before the recording runs
    std::vector<Ref<Storage>> memory{};    // by storage of the trace
    std::vector<std::size_t> alignment{};  // by input: of its first byte, which kernels may follow
    std::vector<std::int64_t> shift{};     // by input: of its elements there, against the captured offset
    std::shared_ptr<RecordedCalls> calls{};  // that are in the one recording; null where the host makes them
    std::vector<Part> parts{};
    std::vector<std::shared_ptr<LentCall>> lent{};  // its own memory
  };

  /// Memory that a run is handed for what is kept.
  struct Handed {
    Ref<Storage> memory;
    std::int64_t shift = 0;  // of its elements, against the trace
  };

  Impl(Recorded recorded, std::vector<Tensor> returned);
  /// Runs a half. `given` is as it was traced. `kept`, by number, gets what this half makes for the other, or
  /// has what it is handed, which goes after its last use. Random numbers are drawn from `start`.
  std::vector<Tensor> run_half(const std::vector<Tensor>& given, std::vector<Handed>& kept, RandomKey start);
  /// Result `r` of the run of a half that is under way, which no longer has it: called by an effect.
  Tensor take_result(std::uint32_t r);
  /// Bytes of values between its ops, packed, of all devices.
  std::int64_t workspace_bytes() const;
  /// What its caller makes of a result: bytes of a rounded one that takes its place, while both are there.
  struct Rounding {
    std::int64_t wide, rounded;
  };
  /// Of a half: bytes of what it has made for others, and of what it is handed and not done with, `but` these
  /// numbers, at most; `roundings` come behind its end.
  std::int64_t held_bytes(std::span<const std::uint32_t> but = {},
                          std::span<const Rounding> roundings = {}) const;
  /// Of a half: numbers of what it makes for the other and was given.
  std::vector<std::uint32_t> kept_inputs() const;
  /// A half is under way: in a hook it cannot run once more.
  bool running() const { return running_; }
  /// Whether writes to inputs and to what it found do what the step's ops would.
  bool can_write(const std::vector<Tensor>& given) const;
  std::vector<Tensor> replay(const std::vector<Tensor>& given);
  std::string text() const;
  // ---- parts of the text ----
  std::string declared(std::uint32_t value) const;  ///< `%0 : f32 (2)`
  std::string line_of(const Step& step) const;
  std::string returned() const;

  Trace trace;
  std::vector<Place> places;  // by storage of the trace
  std::vector<Value> values;
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  std::vector<Workspace> workspaces;
  std::vector<std::uint32_t> inputs, results;  // values
  std::vector<Tensor> first;                   // outputs of the captured run
  std::vector<Effect> last_effects;            // after all steps
  RandomReplay random;                         // what the captured run drew
  std::optional<DeviceGraph> graph;
  std::optional<Cut> cut;  // of a half
  /// Of a forward: where in the order of recording its call has what its trace had at a place.
  std::function<std::uint64_t(std::uint64_t)> place_now{};

 private:
  std::uint32_t value_of(const TracedTensor& t);
  std::string spec_at(std::uint32_t value) const;
  std::string name_at(std::uint32_t value) const;
  void name_values();
  void plan();
  void place_buffers();
  void allocate_buffers();
  void plan_half();
  void share_workspace();
  void check_inside(std::size_t i) const;
  void check_input(std::size_t i, const Tensor& given) const;
  void check_memory(const std::vector<Tensor>& given) const;
  void check_histories(const std::vector<Tensor>& given) const;
  void bind(std::uint32_t storage, const Ref<Storage>& memory, std::int64_t shift = 0);
  void bind_input(std::size_t i, const Tensor& given);
  void bind_all(const std::vector<Tensor>& given);
  void unbind() noexcept;
  static void announce_write(Storage& storage);
  static void announce_writes(const Step& step);
  bool ready_to_run() const;
  bool free_soon(const DeviceGraph::Part& part) const;
  void take_buffers(const Step& step);
  void replace(std::uint32_t buffer);
  void lend(const Step& step);
  void wait_for_peers();
  void run_op(Step& step);
  void begin_step(const Step& step);  ///< its effects, and memory for what it makes
  void run_step(Step& step);
  void run_steps();

  std::optional<DeviceGraph> plan_graph() const;
  bool brings(const Step& step, Device device) const;
  bool graph_takes(const std::vector<Tensor>& given);
  void make_graph_with_calls(const std::vector<Tensor>& given);
  void make_graph(DeviceGraph made, const std::vector<Tensor>& given);
  void bind_memory(const DeviceGraph& of);
  std::shared_ptr<RecordedCalls> recorded_calls() const;
  bool recorded(std::uint32_t step, const DeviceGraph& made) const;
  static std::vector<Use> uses_of(const Step& step);
  bool record(DeviceGraph::Part& part, const DeviceGraph& made);
  void run_graph(const std::vector<Tensor>& given);

  struct Bound;
  // The first may meet work that is done once, such as a search for the best kernel.
  static constexpr int attempts = 2;
  int graph_attempts_ = attempts, attempts_with_calls_ = attempts;
  Float32MatmulPrecision* precision_ = nullptr;  // the rank's, during a replay
  std::vector<std::shared_ptr<LentCall>> lent_;  // what the program does not own
  std::vector<std::uint32_t> replaced_;          // buffers whose values have other memory in this replay
  std::vector<std::uint32_t> last_use_;          // of a half: by storage, the step
  std::vector<bool> taken_;                      // results, in the run under way
  std::vector<std::uint32_t> untaken_;           // the others, by storage
  bool running_ = false;                         // of a half
  std::uint32_t at_ = 0;                         // the step that it is at
};

/// Gives back the memory that halves on this rank share.
void free_halves_workspace();

}  // namespace sherd
