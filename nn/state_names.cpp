#include "nn/state_names.h"

#include <array>
#include <cstring>

#include "nn/on_meta.h"
#include "runtime/context.h"
#include "runtime/ops.h"
#include "runtime/shown.h"

namespace sherd::nn {
namespace {

/// What wrappers put into the names of PyTorch's states: torch.compile, DistributedDataParallel, FSDP and
/// activation checkpointing.
constexpr std::array<std::string_view, 4> wrappers = {"_orig_mod.", "module.", "_fsdp_wrapped_module.",
                                                      "_checkpoint_wrapped_module."};

/// A name without those at the beginning of its parts.
std::string unwrapped(std::string_view name) {
  std::string bare;
  while (!name.empty()) {
    bool found = false;
    for (const std::string_view wrapper : wrappers)
      if (name.starts_with(wrapper)) {
        name.remove_prefix(wrapper.size());
        found = true;
      }
    if (found) continue;
    const std::size_t end = std::min(name.find('.'), name.size() - 1) + 1;
    bare += name.substr(0, end);
    name.remove_prefix(end);
  }
  return bare;
}

bool ends_with_name(std::string_view name, std::string_view end) {
  return name.size() > end.size() && name.ends_with(end) && name[name.size() - end.size() - 1] == '.';
}

/// The end of a message where `name` of the state is what `wanted` names; empty where it is not.
std::string said_of(std::string_view name, std::string_view wanted) {
  if (ends_with_name(name, wanted)) {
    const std::string_view prefix = name.substr(0, name.size() - wanted.size());
    return fmt::format(
        "; it has '{}': take '{}' off the front of its names, name.erase(0, {}), and load that",
        shown(name, 200), shown(prefix, 100), prefix.size());
  }
  if (name.size() > wanted.size() && unwrapped(name) == wanted)
    return fmt::format(
        "; it has '{}', as a wrapper of PyTorch names it: take the wrapper's words out of its "
        "names, or save the wrapped module's state there, and load that",
        shown(name, 200));
  if (ends_with_name(wanted, name))
    return fmt::format("; it has '{}': put '{}' in front of its names, and load that", shown(name, 200),
                       shown(wanted.substr(0, wanted.size() - name.size()), 100));
  return {};
}

}  // namespace

bool same_values(const Tensor& a, const Tensor& b) {
  const NoGrad guard;
  if (a.shape() != b.shape() || on_meta(a) != on_meta(b)) return false;
  if (on_meta(a) || a.numel() == 0) return true;
  const DType dtype = a.dtype() == b.dtype() ? a.dtype() : DType::f64;
  const auto plain = [&](const Tensor& t) { return contiguous(to(to(t.detach(), Device::cpu()), dtype)); };
  const Tensor x = plain(a), y = plain(b);
  return std::memcmp(x.raw(), y.raw(), static_cast<std::size_t>(x.spec().bytes())) == 0;
}

void check_tied(std::string_view call, const NamedValues& first, const NamedValues& second) {
  check<ValueError>(same_values(first.second, second.second),
                    "{}: '{}' and '{}' are one parameter in the module, and the state has other values under "
                    "each; make the module without the tie, or take one of them out of the state",
                    call, shown(first.first, 200), shown(second.first, 200));
}

std::string names_beside(std::span<const std::string> names, std::string_view wanted) {
  // The longest of those that fit: a short one, as "weight", fits many.
  std::string best;
  std::size_t length = 0;
  for (const std::string& name : names) {
    if (name.size() <= length) continue;
    if (std::string said = said_of(name, wanted); !said.empty()) {
      best = std::move(said);
      length = name.size();
    }
  }
  return best;
}

std::string names_beside(const StateDict& state, std::string_view wanted) {
  if (const auto why = state.unread.find(wanted); why != state.unread.end())
    return fmt::format("; its file has it, and it was not read: {}", why->second);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  return names_beside(names, wanted);
}

}  // namespace sherd::nn
