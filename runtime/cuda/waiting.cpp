#include "runtime/cuda/waiting.h"

#include "runtime/cuda/check.h"
#include "runtime/waiting.h"

namespace sherd::cuda {
namespace {

template <class Query>
void wait_until(const Query& query, std::string_view what) {
  wait_for_device([&] { return is_done(query(), what); });
}

}  // namespace

void wait_for(cudaStream_t stream, std::string_view what) {
  if (!works_while_waiting()) return check_cuda(cudaStreamSynchronize(stream), what);
  wait_until([&] { return cudaStreamQuery(stream); }, what);
}

void wait_for(cudaEvent_t event, std::string_view what) {
  if (!works_while_waiting()) return check_cuda(cudaEventSynchronize(event), what);
  wait_until([&] { return cudaEventQuery(event); }, what);
}

}  // namespace sherd::cuda
