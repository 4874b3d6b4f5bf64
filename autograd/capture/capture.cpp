#include "autograd/capture/capture.h"

#include "autograd/capture/drawing.h"
#include "autograd/capture/passes/additions.h"
#include "autograd/capture/passes/epilogues.h"
#include "autograd/capture/passes/fuse.h"
#include "autograd/capture/passes/pass.h"
#include "autograd/capture/program.h"
#include "autograd/capture/tracer.h"

namespace sherd {

Program::Program(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Program::Program(Program&&) noexcept = default;
Program& Program::operator=(Program&&) noexcept = default;
Program::~Program() = default;

Program::Impl& Program::impl() const {
  check<StateError>(impl_ != nullptr, "Program: it was moved from");
  return *impl_;
}

std::vector<Tensor> Program::replay(const std::vector<Tensor>& inputs) { return impl().replay(inputs); }
const std::vector<Tensor>& Program::outputs() const { return impl().first; }
bool Program::is_device_graph() const { return impl().graph.has_value(); }
std::size_t Program::size() const { return impl().steps.size(); }
std::size_t Program::workspace_bytes() const {
  std::size_t bytes = 0;
  for (const Impl::Workspace& workspace : impl().workspaces) bytes += workspace.packing.bytes;
  return bytes;
}

Recorded record(const Step& step, const std::vector<Tensor>& inputs, std::vector<Tensor>& outputs) {
  CaptureTracer tracer("capture", inputs);
  const Listening listening(tracer);
  for (const Tensor& t : step(inputs)) {
    check<ValueError>(t.defined(), "capture: output {} of the step is an empty handle", outputs.size());
    outputs.push_back(t.detach());
  }
  tracer.wait_for_peers();
  tracer.check_alive(outputs);
  tracer.check_held(outputs);
  tracer.check_untouched(inputs, outputs);
  tracer.check_drawn();
  return tracer.take(inputs, outputs);
}

Program capture(const Step& step, const std::vector<Tensor>& inputs, Executor executor) {
  static constexpr Pass passes[] = {{"additions", additions}, {"fuse", fuse}, {"epilogues", epilogues}};
  check<ValueError>(step != nullptr, "capture: an empty function");
  std::vector<Tensor> outputs;
  Recorded recorded = record(step, inputs, outputs);
  recorded = run_passes(std::move(recorded), std::span(passes).first(executor == Executor::fused ? 3 : 1));
  return Program(std::make_unique<Program::Impl>(std::move(recorded), std::move(outputs)));
}

std::string to_string(const Program& program) { return program.impl().text(); }
std::string to_svg(const Program& program) { return drawing(program.impl()); }

}  // namespace sherd
