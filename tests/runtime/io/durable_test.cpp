#include "runtime/io/durable.h"

#include <sys/stat.h>

#include <functional>

#include "runtime/error.h"
#include "runtime/io/safetensors.h"
#include "tests/catch.h"
#include "tests/counting_file_system.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Path = FileSystem::Path;

namespace {

/// Version `v` of a file: tensors whose every element says v.
void save_file(const Path& path, int v, FileSystem& files) {
  const std::vector<std::int32_t> a(5, v), b(300, v);
  const TensorRecord records[] = {{"a", DType::i32, {5}, std::as_bytes(std::span(a))},
                                  {"b", DType::i32, {3, 100}, std::as_bytes(std::span(b))}};
  save_safetensors(path, records, {{"version", std::to_string(v)}}, files);
}

std::vector<std::byte> bytes_of(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry& entry = *file.find(name);
  std::vector<std::byte> bytes(entry.bytes);
  file.read(entry, bytes);
  return bytes;
}

/// The version that the file holds; -1 for no file. Everything else (a mixture, half a file) fails or throws.
int load_file(const Path& path) {
  if (!std::filesystem::exists(path)) return -1;
  const SafetensorsFile file(path);
  const int version = std::stoi(file.metadata().at("version"));
  for (const TensorEntry& entry : file.entries())
    for (const std::byte byte : bytes_of(file, entry.name))
      REQUIRE((byte == std::byte{0} || byte == std::byte(version)));
  REQUIRE(file.entries().size() == 2);
  return version;
}

void save_folder(const Path& path, int v, FileSystem& files) {
  write_directory_durably(
      path,
      [&](DirectoryWriter& folder) {
        folder.add("config.json", [&](OutputFile& file) { file.write(std::to_string(v)); });
        const std::vector<std::int32_t> weights(7, v);
        const TensorRecord record{"weights", DType::i32, {7}, std::as_bytes(std::span(weights))};
        folder.add("model.safetensors",
                   [&](OutputFile& file) { write_safetensors(file, std::span(&record, 1)); });
      },
      files);
}

int load_folder(const Path& given) {
  const Path path = committed_directory(given);
  if (!std::filesystem::exists(path)) return -1;
  const int version = std::stoi(posix_file_system().read(path / "config.json"));
  const SafetensorsFile file(path / "model.safetensors");
  REQUIRE(std::to_integer<int>(bytes_of(file, "weights")[0]) == version);
  REQUIRE(posix_file_system().list(path).size() == 2);
  return version;
}

/// Whether the folder has version 2 already.
bool save_is_new(const Path& path) {
  return std::filesystem::is_directory(path) && posix_file_system().read(path / "config.json") == "2";
}

void remove_folder(const Path& path, int, FileSystem& files) { remove_durably(path, files); }
void recover_parent(const Path& path, int, FileSystem& files) {
  recover_directory(path.parent_path(), files);
}

using Change = std::function<void(const Path&, int version, FileSystem&)>;
using Load = std::function<int(const Path&)>;

/// Without real syncs, which would take most of the time of these tests.
void save_quickly(const Change& save, const Path& path, int v) {
  CountingFileSystem files;
  save(path, v, files);
}

/// Runs `change` to version 2 with the fault at its n-th step; returns whether that step was reached. If not,
/// a fault that ends all comes after it.
bool change_broken(const Change& change, const Path& path, int n, Fault fault, bool& threw) {
  CountingFileSystem files(n, fault);
  threw = false;
  try {
    change(path, 2, files);
  } catch (const FileError& error) {
    threw = true;
    CHECK_THAT(error.what(), Catch::Matchers::ContainsSubstring("on purpose"));
  }
  if (!files.broke() && fault >= Fault::killed) files.crash();
  return files.broke();
}

/// Breaks `change` at each of its steps in every way, from a state that `prepare` makes and that holds
/// version `before`
/// (-1: none): it must leave `before` or `after`, and `after` when it returns.
void break_everywhere(const std::function<void(const Path&)>& prepare, const Change& change,
                      const Change& save, const Load& load, int before, int after) {
  for (const Fault fault : all_faults) {
    for (int n = 0;; ++n) {
      INFO("fault '" << name_of(fault) << "' at change " << n);
      const TempDirectory directory;
      const Path path = directory / "it";
      prepare(path);
      bool threw = false;
      const bool broke = change_broken(change, path, n, fault, threw);
      const int loaded = load(path);
      CHECK((loaded == after || (threw && loaded == before)));

      // Whatever was left behind, the next save and a recovery work, and leave nothing but the new version.
      save_quickly(save, path, 3);
      CHECK(load(path) == 3);
      CountingFileSystem recovering;
      recover_directory(directory.path(), recovering);
      CHECK(load(path) == 3);
      CHECK(posix_file_system().list(directory.path()) == std::vector<std::string>{"it"});
      if (!broke) {
        CHECK(n > 0);
        break;
      }
    }
  }
}

/// Ends a replacing save of a folder at its n-th change, so that a recovery has something to do.
std::function<void(const Path&)> folder_killed_at(int n) {
  return [n](const Path& path) {
    save_quickly(save_folder, path, 1);
    bool threw = false;
    change_broken(save_folder, path, n, Fault::killed, threw);
  };
}

}  // namespace

TEST_CASE("a save of a file that breaks anywhere leaves the old file or the new one", "[one thread]") {
  break_everywhere([](const Path& path) { save_quickly(save_file, path, 1); }, save_file, save_file,
                   load_file, 1, 2);
}

TEST_CASE("a first save of a file that breaks anywhere leaves none or all of it", "[one thread]") {
  break_everywhere([](const Path&) {}, save_file, save_file, load_file, -1, 2);
}

TEST_CASE("a save of a folder that breaks anywhere leaves the old folder or the new one", "[one thread]") {
  break_everywhere([](const Path& path) { save_quickly(save_folder, path, 1); }, save_folder, save_folder,
                   load_folder, 1, 2);
}

TEST_CASE("a first save of a folder that breaks anywhere leaves none or all of it", "[one thread]") {
  break_everywhere([](const Path&) {}, save_folder, save_folder, load_folder, -1, 2);
}

TEST_CASE("a removal that breaks anywhere leaves the folder whole or gone") {
  break_everywhere([](const Path& path) { save_quickly(save_folder, path, 1); }, remove_folder, save_folder,
                   load_folder, 1, -1);
}

TEST_CASE("after a killed save, a save, a removal or a recovery that breaks anywhere loses nothing",
          "[one thread]") {
  CountingFileSystem counting;
  {
    const TempDirectory directory;
    save_quickly(save_folder, directory / "it", 1);
    save_folder(directory / "it", 2, counting);
  }
  for (int n = 0; n < static_cast<int>(counting.log().size()); ++n) {
    INFO("killed at change " << n << ", " << counting.log()[static_cast<std::size_t>(n)]);
    int left = 0;
    {
      const TempDirectory directory;
      folder_killed_at(n)(directory / "it");
      left = load_folder(directory / "it");
    }
    break_everywhere(folder_killed_at(n), save_folder, save_folder, load_folder, left, 2);
    break_everywhere(folder_killed_at(n), remove_folder, save_folder, load_folder, left, -1);
    break_everywhere(
        folder_killed_at(n),
        [](const Path& path, int v, FileSystem& files) {
          recover_parent(path, v, files);
          files.sync_directory(
              path.parent_path());  // so that there is a step to break where nothing needs recovery
        },
        save_folder, load_folder, left, left);
  }
}

TEST_CASE("a save that fails but lives on clears what it wrote") {
  for (const Change& save : {Change(save_file), Change(save_folder)}) {
    for (int n = 0;; ++n) {
      const TempDirectory directory;
      save_quickly(save, directory / "it", 1);
      bool threw = false;
      const bool broke = change_broken(save, directory / "it", n, Fault::no_space, threw);
      INFO("change " << n);
      // Only once the new folder has its name may the old one be left: its removal, or the sync before, was
      // what failed.
      auto names = posix_file_system().list(directory.path());
      if (broke && save_is_new(directory / "it")) std::erase(names, "it.sherd-replaced");
      CHECK(names == std::vector<std::string>{"it"});
      if (!broke) break;
    }
  }
}

TEST_CASE("every file is synced before it gets its name, and the name before the save returns") {
  const TempDirectory directory;
  CountingFileSystem files;
  write_durably(directory / "it", [](OutputFile& file) { file.write("new"); }, files);
  std::vector<std::string> calls;
  for (const std::string& line : files.log()) calls.push_back(line.substr(0, line.find(' ')));
  CHECK(calls == std::vector<std::string>{"create", "write", "sync", "close", "rename", "sync_directory"});
}

TEST_CASE("what the writer throws comes out, and the old file stays") {
  const TempDirectory directory;
  write_durably(directory / "it", [](OutputFile& file) { file.write("old"); });
  const auto save = [&] {
    write_durably(directory / "it", [](OutputFile& file) {
      file.write("half");
      fail<StateError>("no more");
    });
  };
  CHECK(message_of<StateError>(save) == "no more");
  CHECK(posix_file_system().read(directory / "it") == "old");
  CHECK(posix_file_system().list(directory.path()).size() == 1);
}

TEST_CASE("a folder's path may end in a slash or be relative") {
  const TempDirectory directory;
  save_folder(directory.path().string() + "/it/", 4, posix_file_system());
  CHECK(load_folder(directory / "it") == 4);
  CHECK(load_folder(directory.path().string() + "/it/") == 4);
  remove_durably(directory.path().string() + "/it/");
  CHECK(posix_file_system().list(directory.path()).empty());
  CHECK(committed_directory("it") == Path("it"));
}

TEST_CASE("a save into a folder that is not there says which, and makes nothing") {
  const TempDirectory temp;
  const std::string text = test::message_of<FileError>(
      [&] { write_directory_durably(temp / "none" / "step", [](DirectoryWriter&) {}); });
  INFO(text);
  CHECK(text.find((temp / "none").string() + "'") != std::string::npos);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(std::filesystem::is_empty(temp.path()));
}

TEST_CASE("a recovery leaves everything else alone") {
  const TempDirectory directory;
  posix_file_system().create(directory / "notes.old")->write("mine");
  posix_file_system().create(directory / "data.partial")->write("mine");
  posix_file_system().create_directory(directory / "step.sherd-partial");
  recover_directory(directory.path());
  CHECK(posix_file_system().list(directory.path()) == std::vector<std::string>{"data.partial", "notes.old"});
}

TEST_CASE("only its like or nothing is replaced, and the refusal is one line and changes nothing") {
  const TempDirectory directory;
  const auto names = [&] { return posix_file_system().list(directory.path()); };
  posix_file_system().create(directory / "file")->write("mine");
  posix_file_system().create_directory(directory / "folder");
  REQUIRE(::mkfifo((directory / "fifo").c_str(), 0600) == 0);
  std::filesystem::create_symlink(directory / "file", directory / "link");
  std::filesystem::create_symlink(directory / "nowhere", directory / "dangling");
  std::filesystem::create_directory_symlink(directory / "folder", directory / "folder-link");
  const auto before = names();
  const auto refused = [&](const Path& path, const Change& change) {
    const auto type = posix_file_system().type(path);
    const std::string message = message_of<FileError>([&] { change(path, 1, posix_file_system()); });
    INFO(message);
    CHECK_THAT(message, Catch::Matchers::ContainsSubstring("'" + path.string() + "'") &&
                            Catch::Matchers::ContainsSubstring(std::string(name_of(type))));
    CHECK(message.find('\n') == std::string::npos);
    CHECK(posix_file_system().type(path) == type);
    CHECK(names() == before);
  };
  const Change rename = [&](const Path& path, int, FileSystem& files) {
    files.rename(directory / "file", path);
  };
  for (const char* name : {"folder", "fifo", "link", "dangling", "folder-link"})
    refused(directory / name, save_file);
  for (const char* name : {"file", "fifo", "link", "dangling", "folder-link"}) {
    refused(directory / name, save_folder);
    refused(directory / name, remove_folder);
  }
  for (const char* name : {"fifo", "link", "dangling", "folder-link"}) refused(directory / name, rename);
  for (const char* device : {"/dev/full", "/dev/null"}) {
    if (skip_if(!posix_file_system().exists(device), "this system lacks a device")) continue;
    for (const Change& change : {Change(save_file), Change(save_folder), Change(remove_folder), rename})
      refused(device, change);
  }
  CHECK(posix_file_system().read(directory / "file") == "mine");
}
