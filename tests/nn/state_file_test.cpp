#include "nn/state_file.h"

#include <cstring>

#include "runtime/ops.h"
#include "tests/catch.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A file as another program writes it: no checksums, and dtypes of its own.
void write_foreign(const FileSystem::Path& path) {
  const std::string header = R"({"short":{"dtype":"I16","shape":[2],"data_offsets":[0,4]},)"
                             R"("w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},)"
                             R"("deep":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[12,13]}})";
  const std::uint64_t length = header.size();
  const float numbers[] = {1.5F, -2};
  const auto file = posix_file_system().create(path);
  file->write(std::as_bytes(std::span(&length, 1)));
  file->write(header);
  file->write("abcd");
  file->write(std::as_bytes(std::span(numbers)));
  file->write("x");
  file->close();
}

}  // namespace

TEST_CASE("state files: a tensor that cannot be held is refused by its name, when it is asked for") {
  const TempDirectory folder;
  write_foreign(folder / "x");
  const SafetensorsFile file(folder / "x");
  CHECK(nn::load_tensor(file, *file.find("w")).to_vector<float>() == std::vector<float>{1.5F, -2});
  const auto load = [&](const char* name) {
    return message_of<Error>([&] { nn::load_tensor(file, *file.find(name)); });
  };
  CHECK_THAT(load("short"), ContainsSubstring("'short'") && ContainsSubstring("I16"));
  CHECK_THAT(load("deep"), ContainsSubstring("'deep'") && ContainsSubstring("9 dimensions"));
  const nn::StateDict state = nn::load_state(folder / "x");
  CHECK(state.at("w").to_vector<float>() == std::vector<float>{1.5F, -2});
  for (const char* name : {"short", "deep"})
    CHECK_THAT(message_of<ValueError>([&] { state.at(name); }), ContainsSubstring(name));
}

TEST_CASE("state files: what torch.save wrote is told from a damaged file") {
  const TempDirectory folder;
  posix_file_system().create(folder / "model.pt")->write("PK\x03\x04 and what else a zip archive has");
  CHECK_THAT(message_of<ValueError>([&] { nn::load_state(folder / "model.pt"); }),
             ContainsSubstring("model.pt") && ContainsSubstring("torch.save"));
}

TEST_CASE("state files: a byte that changed is noticed, and the file and tensor are named") {
  const TempDirectory folder;
  const auto path = folder / "x";
  nn::save_state(path, {{"a", ones({3})}, {"b", ones({2, 3})}});
  std::string content = posix_file_system().read(path);
  content[content.size() - 1] ^= 1;
  posix_file_system().remove(path);
  posix_file_system().create(path)->write(content);
  CHECK_THAT(message_of<ValueError>([&] { nn::load_state(path); }),
             ContainsSubstring(path.string()) && ContainsSubstring("'b' is damaged"));
  const SafetensorsFile file(path);
  CHECK(nn::load_tensor(file, *file.find("a")).to_vector<float>() == std::vector<float>{1, 1, 1});
}

TEST_CASE("state files: entries may be copied, and are of one file") {
  const TempDirectory folder;
  nn::save_state(folder / "x", {{"a", ones({3})}, {"b", zeros({2})}});
  nn::save_state(folder / "y", {{"c", ones({3})}});
  const SafetensorsFile file(folder / "x"), other(folder / "y");
  for (const TensorEntry& entry : file.entries())
    CHECK(nn::load_tensor(file, entry).numel() == (entry.name == "a" ? 3 : 2));
  CHECK_THAT(message_of<ValueError>([&] { nn::load_tensor(file, other.entries()[0]); }),
             ContainsSubstring("another file"));
  CHECK_THAT(message_of<FileError>([&] { nn::save_state(folder / "none" / "x", {{"a", ones({3})}}); }),
             ContainsSubstring("none/x': its folder is not there"));
}
