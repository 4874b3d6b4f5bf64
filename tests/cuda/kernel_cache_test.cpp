// The folder of compiled kernels: what comes out of it is what was kept under just that name, or nothing.
#include "runtime/cuda/kernel_cache.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <sstream>

#include "tests/catch.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using cuda::KernelCache;

namespace {

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
void put(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}
std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> all;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) all.push_back(entry.path());
  return all;
}

}  // namespace

TEST_CASE("kernel cache: what is damaged, cut, longer or another kernel's is none") {
  const TempDirectory here;
  const KernelCache cache(here.path() / "sherd" / "kernels");
  const std::string code("code\0of a kernel, some hundred bytes of it\n", 43),
      other = "another kernel's code";
  CHECK(!cache.load("a"));
  cache.keep("a", code);
  CHECK(cache.load("a") == code);
  CHECK(!cache.load("b"));
  const auto path = files_in(here.path() / "sherd" / "kernels").at(0);
  const std::string whole = text_of(path);
  cache.keep("b", other);
  std::string others;
  for (const auto& its : files_in(path.parent_path()))
    if (its != path) others = text_of(its);
  std::mt19937 random(1);
  for (int i = 0; i < 10000; ++i) {
    std::string text = whole;
    const std::size_t at = random() % text.size();
    switch (i % 5) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        text.resize(at);
        break;
      case 2:
        text.insert(at, 1, 'x');
        break;
      case 3:
        text = others;
        break;
      default:
        text.erase(at, 1 + random() % 5);
    }
    put(path, text);
    INFO("damage " << i << " at " << at);
    REQUIRE(!cache.load("a"));
  }
  cache.keep("a", code);
  CHECK(cache.load("a") == code);
}

TEST_CASE("kernel cache: a folder that others may write, is none or cannot be written is left alone") {
  const TempDirectory here;
  const auto folder = here.path() / "kernels";
  KernelCache({}).keep("a", "code");
  CHECK(!KernelCache({}).load("a"));
  const KernelCache cache(folder);
  cache.keep("a", "code");
  ::chmod(folder.c_str(), 0777);
  CHECK(!cache.load("a"));
  ::chmod(folder.c_str(), 0700);
  CHECK(cache.load("a") == "code");
  // A link in the file's place, and a file or a link in the folder's.
  const auto path = files_in(folder).at(0);
  std::filesystem::rename(path, here.path() / "elsewhere");
  std::filesystem::create_symlink(here.path() / "elsewhere", path);
  CHECK(!cache.load("a"));
  put(here.path() / "file", "");
  KernelCache(here.path() / "file").keep("a", "code");
  CHECK(!KernelCache(here.path() / "file").load("a"));
  std::filesystem::create_directory_symlink(folder, here.path() / "link");
  KernelCache(here.path() / "link").keep("b", "code");
  CHECK(!KernelCache(here.path() / "link").load("b"));
}

TEST_CASE("kernel cache: the oldest go where there are too many") {
  const TempDirectory here;
  const KernelCache cache(here.path() / "kernels");
  cache.keep("first", "code");
  const auto first = files_in(here.path() / "kernels").at(0);
  for (std::size_t i = 0; i < KernelCache::most_files; ++i) {
    put(here.path() / "kernels" / fmt::format("{:016x}.kernel", i), "");
    if (i % 100 == 0) put(here.path() / "kernels" / fmt::format("letter-{}", i), "");  // the user's
  }
  std::filesystem::last_write_time(first,
                                   std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  cache.keep("last", "code");
  const std::size_t letters = (KernelCache::most_files + 99) / 100;
  CHECK(files_in(here.path() / "kernels").size() == KernelCache::most_files / 2 + letters);
  CHECK(!cache.load("first"));
  CHECK(cache.load("last") == "code");
  const KernelCache with_slash(here.path() / "others" / "");
  with_slash.keep("a", "code");
  CHECK(KernelCache(here.path() / "others").load("a") == "code");
}

TEST_CASE("kernel cache: processes that keep, damage and read at a time find what they kept, or nothing") {
  const TempDirectory here;
  const std::filesystem::path folder = here.path() / "kernels";
  constexpr int kernels = 5, processes = 5, rounds = 2000;
  const auto code_of = [](int i) {
    return std::string(2000 + 700 * static_cast<std::size_t>(i), static_cast<char>('a' + i));
  };
  const auto damage = [&](std::mt19937& random) {
    const auto all = files_in(folder);
    if (all.empty()) return;
    std::fstream file(all[random() % all.size()], std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(random() % 2000));
    file.put(static_cast<char>(random()));
  };
  std::vector<pid_t> children;
  for (int c = 0; c < processes; ++c) {
    const pid_t child = ::fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    const KernelCache cache(folder);
    std::mt19937 random(static_cast<unsigned>(c));
    bool right = true;
    for (int i = 0; i < rounds; ++i) {
      const int k = static_cast<int>(random() % kernels);
      if (random() % 3 == 0) cache.keep(std::to_string(k), code_of(k));
      if (c == 0 && i > 0) damage(random);
      const auto found = cache.load(std::to_string(k));
      right = right && (!found || *found == code_of(k));
    }
    ::_exit(right ? 0 : 1);
  }
  for (const pid_t child : children) {
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  const KernelCache cache(folder);
  for (int k = 0; k < kernels; ++k) {
    const auto found = cache.load(std::to_string(k));
    CHECK((!found || *found == code_of(k)));
    cache.keep(std::to_string(k), code_of(k));
    CHECK(cache.load(std::to_string(k)) == code_of(k));
  }
}
