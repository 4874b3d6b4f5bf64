#include "runtime/io/foreign.h"

#include <array>
#include <utility>

namespace sherd {

// None begins as a safetensors file may, with the length of a header as 8 bytes.
std::string_view foreign_file(std::string_view beginning) {
  using namespace std::string_view_literals;
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kinds = {{
      {"version https://git-lfs"sv,
       "this is a Git LFS pointer in the file's place; fetch the file with `git lfs pull`"sv},
      {"PK\x03\x04"sv,
       "this is a zip archive, as torch.save writes; load it in PyTorch and save it as a safetensors file there"sv},
      {"\x80\x02\x8a\x0a"sv,
       "this is a pickle, as older versions of torch.save write; load it in PyTorch and save it as a "
       "safetensors file there"sv},
      {"GGUF"sv, "this is a GGUF file; take the model's safetensors files"sv},
      {"\x89HDF"sv, "this is an HDF5 file; save it as a safetensors file where it was made"sv},
      {"<!DOCTYPE"sv, "this is a web page in the file's place; fetch the file itself"sv},
      {"<!doctype"sv, "this is a web page in the file's place; fetch the file itself"sv},
      {"<html"sv, "this is a web page in the file's place; fetch the file itself"sv},
  }};
  for (const auto& [begin, kind] : kinds)
    if (beginning.starts_with(begin)) return kind;
  return {};
}

}  // namespace sherd
