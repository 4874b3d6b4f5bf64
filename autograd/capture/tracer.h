// What `capture` hears while the step runs, and what it refuses.
#pragma once

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "autograd/capture/recorded.h"

namespace sherd {

/// Whether inputs may share memory.
enum class Sharing { refused, allowed };

class CaptureTracer : public Tracer {
 public:
  /// `call`, the user's, opens the messages. ValueError for an empty handle, StateError for inputs that share
  /// memory and may not.
  CaptureTracer(std::string call, const std::vector<Tensor>& inputs, Sharing sharing = Sharing::refused);
  ~CaptureTracer() override;

  void before_write(const AnyOp& op, Inputs in) override;
  void after(const AnyOp& op, Inputs in, Outputs out) override;
  void made(const Tensor& tensor, Content content) override {
    (content == Content::none ? blank_ : born_).insert(tensor.storage().id());
  }
  void host_read(const Tensor& tensor) override;
  void storage_gone(std::uint64_t id) noexcept override;

  /// Whether the program repeats calls among ranks.
  virtual bool keeps_calls() const { return true; }
  /// A program repeats it before the next op (`repeat_in_replays`).
  virtual void repeat(Effect effect) {
    effect.before = trace_.ops.size();
    effects_.push_back(std::move(effect));
  }
  /// `tensor` is a result that somebody has from here on: as it stands among the program's outputs.
  TracedTensor hand(const Tensor& tensor) {
    provided_.insert(tensor.storage().id());
    return {find(tensor.storage()), tensor.dtype(), tensor.layout()};
  }
  /// The step cannot be a program.
  virtual void refuse(const std::string&) {}
  /// The place in the order of recording where a frame's call began; 0 for other steps.
  virtual std::uint64_t since() const { return 0; }
  /// Peers no longer use what the step's calls took, so it is free where the step let go of it.
  void wait_for_peers();

  // ---- after the step: StateError for what a replay could not repeat ----
  /// A tensor made by the step that is still alive and not among `outputs`.
  void check_alive(const std::vector<Tensor>& outputs) const;
  /// A tensor that a replay would find as the last one left it, where the step found new values: one that the
  /// step writes and made by no op, or one that it uses and that nothing outside holds any longer.
  void check_held(const std::vector<Tensor>& outputs) const;
  /// Memory that the host wrote.
  void check_untouched(const std::vector<Tensor>& inputs, const std::vector<Tensor>& outputs) const;
  /// A tensor that the step made of the host's values and wrote.
  void check_constants() const;
  /// Whether storage `i` of the trace was made by the step and is still there, and nobody shows it.
  bool is_alive(std::uint32_t i) const {
    const std::uint64_t id = trace_.storages[i].id;
    return alive_.contains(id) && !provided_.contains(id);
  }
  bool is_of_host(const Storage& storage) const { return born_.contains(storage.id()); }
  /// Made by the step, and never written.
  bool is_blank(const Storage& storage) const { return blank_.contains(storage.id()); }
  /// Random numbers that no op drew.
  void check_drawn();

  const std::vector<std::uint32_t>& inputs() const { return inputs_; }  ///< storages
  std::uint32_t index_of(const Storage& storage) const { return find(storage); }
  const Trace& trace() const { return trace_; }
  /// Everything heard of a step that was given `given` and returned `returned`; the last thing to ask for.
  Recorded take(const std::vector<Tensor>& given, const std::vector<Tensor>& returned);

 private:
  /// What an owner provides from memory that the step made is that memory, so a replay makes it again.
  Ref<Storage> memory_of(const Tensor& tensor) override;
  bool blank(const Storage& storage) const override { return blank_.contains(storage.id()); }
  void look_at_content(const AnyOp& op, Inputs in);
  void look_at_generator();

  std::vector<std::uint32_t> inputs_;
  std::vector<Effect> effects_;
  RandomKey begin_, seen_;
  std::vector<std::shared_ptr<LentCall>> lent_;
  std::vector<RandomKey> unclaimed_;            // where draws began whose op was not heard yet
  std::unordered_set<std::uint64_t> alive_;     // ids that ops of the trace made
  std::unordered_set<std::uint64_t> born_;      // ids that no op made, but the step did, of the host's values
  std::unordered_set<std::uint64_t> blank_;     // ids that the step made and nobody has written yet
  std::unordered_set<std::uint64_t> provided_;  // ids of memory that owners showed, and may keep showing
};

}  // namespace sherd
