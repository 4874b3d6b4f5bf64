#include "runtime/cuda/kernel_cache.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <system_error>
#include <vector>

#include "runtime/io/checksum.h"
#include "runtime/io/durable.h"

namespace sherd::cuda {
namespace {

constexpr std::string_view magic = "sherd kernel 1\n";
constexpr std::uint64_t largest_file = std::uint64_t{64} << 20;

std::string checksum(std::string_view text) { return checksum_of(std::as_bytes(std::span(text))); }

/// Magic, the length of the identity, that, the code, and a checksum of it all.
std::string file_of(const std::string& identity, const std::string& code) {
  std::string text = fmt::format("{}{}\n{}{}", magic, identity.size(), identity, code);
  return text + checksum(text);
}

std::optional<std::string> code_in(std::string_view file, const std::string& identity) {
  const std::string before = fmt::format("{}{}\n{}", magic, identity.size(), identity);
  if (file.size() < before.size() + checksum_digits || !file.starts_with(before)) return {};
  const std::string_view text = file.substr(0, file.size() - checksum_digits);
  if (checksum(text) != file.substr(text.size())) return {};
  return std::string(text.substr(before.size()));
}

constexpr std::string_view suffix = ".kernel";
bool is_name(std::string_view name) {
  return name.size() == checksum_digits + suffix.size() && name.ends_with(suffix) &&
         name.find_first_not_of("0123456789abcdef") == checksum_digits;
}

}  // namespace

/// Without a slash at its end, behind which its parent would be itself.
KernelCache::KernelCache(const std::filesystem::path& folder, FileSystem& files)
    : folder_(folder.has_filename() ? folder : folder.parent_path()), files_(files) {}

std::filesystem::path KernelCache::usual_folder() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (const std::string named = variable("SHERD_KERNEL_CACHE"); !named.empty())
    return named == "off" ? std::filesystem::path() : std::filesystem::path(named);
  if (const std::string cache = variable("XDG_CACHE_HOME"); cache.starts_with('/'))
    return std::filesystem::path(cache) / "sherd" / "kernels";
  const std::string home = variable("HOME");
  return home.starts_with('/') ? std::filesystem::path(home) / ".cache" / "sherd" / "kernels"
                               : std::filesystem::path();
}

std::filesystem::path KernelCache::path_of(const std::string& identity) const {
  return folder_ / (checksum(identity) + std::string(suffix));
}

/// A folder that others may write holds code of theirs.
bool KernelCache::is_ours() const {
  struct stat found{};
  return !folder_.empty() && ::lstat(folder_.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
         found.st_uid == ::geteuid() && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::optional<std::string> KernelCache::load(const std::string& identity) const try {
  if (!is_ours()) return {};
  const std::filesystem::path path = path_of(identity);
  if (files_.type(path) != std::filesystem::file_type::regular) return {};
  std::optional<std::string> code = code_in(files_.read(path, largest_file), identity);
  std::error_code ignored;  // a cache that is only read has no newer ones
  if (code) std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now(), ignored);
  return code;
} catch (const std::exception&) {
  return {};
}

void KernelCache::keep(const std::string& identity, const std::string& code) const try {
  if (folder_.empty()) return;
  std::error_code failed;
  std::filesystem::create_directories(folder_.parent_path(), failed);
  if (::mkdir(folder_.c_str(), S_IRWXU) != 0 && errno != EEXIST) return;
  if (!is_ours()) return;
  write_durably(path_of(identity), [&](OutputFile& file) { file.write(file_of(identity, code)); }, files_);
  sweep();
} catch (const std::exception&) {  // the kernel runs all the same
}

/// What else lies in the folder is not ours to remove.
void KernelCache::sweep() const {
  struct Kept {
    std::filesystem::file_time_type used;
    std::filesystem::path path;
    bool operator<(const Kept& other) const { return used < other.used; }
  };
  std::vector<Kept> all;
  for (const std::string& name : files_.list(folder_)) {
    if (!is_name(name)) continue;
    std::error_code gone;  // another process sweeps too
    const auto used = std::filesystem::last_write_time(folder_ / name, gone);
    if (!gone) all.push_back({used, folder_ / name});
  }
  if (all.size() <= most_files) return;
  const auto first_to_stay = all.end() - most_files / 2;
  std::ranges::nth_element(all, first_to_stay, std::less<>{});
  for (auto its = all.begin(); its != first_to_stay; ++its) {
    std::error_code gone;
    std::filesystem::remove(its->path, gone);
  }
}

}  // namespace sherd::cuda
