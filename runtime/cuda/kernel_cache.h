// Machine code of kernels in a folder, so that the next process need not compile them.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "runtime/io/file_system.h"

namespace sherd::cuda {

/// A folder of this user's. Whatever is wrong with it or a file in it, there is no code then, or it is not
/// kept: nothing throws.
class KernelCache {
 public:
  static constexpr std::size_t most_files = 4096;
  /// An empty path: nothing is kept.
  explicit KernelCache(const std::filesystem::path& folder, FileSystem& files = posix_file_system());
  /// SHERD_KERNEL_CACHE names the folder, or is `off`; else `sherd/kernels` in XDG_CACHE_HOME or ~/.cache.
  static std::filesystem::path usual_folder();

  /// The code that was kept under exactly this identity, undamaged.
  std::optional<std::string> load(const std::string& identity) const;
  /// Written beside and renamed. Above `most_files` the half that is oldest goes.
  void keep(const std::string& identity, const std::string& code) const;

 private:
  std::filesystem::path path_of(const std::string& identity) const;
  bool is_ours() const;
  void sweep() const;

  std::filesystem::path folder_;
  FileSystem& files_;
};

}  // namespace sherd::cuda
