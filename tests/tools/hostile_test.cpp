// Files that are not what they should be: refused in one line, before they cost time or memory.
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "nn/state_file.h"
#include "runtime/error.h"
#include "tests/sanitizer.h"
#include "tests/tools/command.h"
#include "tests/tools/programs.h"
#include "tests/tools/small_run.h"
#include "tools/checkpoint.h"
#include "tools/forecast.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

// Under a sanitizer a multiple, for what it keeps beside; and of what takes it long a part, since cost is
// told elsewhere.
constexpr std::int64_t most_bytes = sanitized ? 600'000'000 : 100'000'000;
constexpr std::size_t header_bytes = std::size_t{1} << (sanitized ? 21 : 24);  // 2^24: the most that is read

using Path = std::filesystem::path;

const Arguments train = {"train", "--data",    "text", "--layers",  "1", "--heads", "1", "--width",
                         "8",     "--context", "8",    "--threads", "1", "--steps", "2", "--out"};

/// The most memory that the last command held, in bytes.
std::int64_t peak(const TempDirectory& folder) {
  return std::stoll(posix_file_system().read(folder / "peak"));
}

Command measured(const TempDirectory& folder, const Arguments& arguments) {
  return {folder, arguments, {}, {built::measure, "peak"}};
}

/// The command is refused by one line with `part`, and in little memory.
void refused(const TempDirectory& folder, const Arguments& arguments, const std::string& part) {
  Command run = measured(folder, arguments);
  CHECK(run.wait() == 1);
  const std::string err = run.err();
  INFO(err);
  CHECK(std::ranges::count(err, '\n') == 1);
  CHECK_THAT(err, ContainsSubstring(part));
  CHECK(peak(folder) < most_bytes);
}

void write_header(const Path& path, const std::string& header, std::uint64_t length) {
  std::string content(8, '\0');
  std::memcpy(content.data(), &length, 8);
  write_file(path, content + header);
}

/// A header of `size` bytes with as many of `item(i)` as fit, in the object that `prefix` opens.
std::string full_header(std::size_t size, const std::string& prefix,
                        const std::function<std::string(int)>& item, const std::string& suffix) {
  std::string header = prefix;
  for (int i = 0; header.size() + 300 < size; ++i) header += (i == 0 ? "" : ",") + item(i);
  header += suffix;
  header.resize(size, ' ');
  return header;
}

/// Something that is not a file of a run, put where one should be.
struct Hostile {
  std::string name;
  std::function<void(const Path&)> make;
};

const Hostile anywhere[] = {
    {"a FIFO", [](const Path& path) { REQUIRE(::mkfifo(path.c_str(), 0600) == 0); }},
    {"a link to a device that never ends",
     [](const Path& path) { std::filesystem::create_symlink("/dev/zero", path); }},
    {"2 GB of nothing",
     [](const Path& path) {
       write_file(path, "");
       std::filesystem::resize_file(path, std::uintmax_t{1} << 31);
     }},
    {"a folder", [](const Path& path) { std::filesystem::create_directory(path); }},
};

const Hostile states[] = {
    {"a header of 40 MB",
     [](const Path& path) {
       write_header(path,
                    full_header(
                        40'000'000, "{",
                        [](int i) {
                          return fmt::format(R"("{}":{{"dtype":"U8","shape":[],"data_offsets":[{},{}]}})", i,
                                             i, i + 1);
                        },
                        "}"),
                    40'000'000);
     }},
    {"as many tensors as a header takes",
     [](const Path& path) {
       write_header(path,
                    full_header(
                        header_bytes, "{",
                        [](int i) {
                          return fmt::format(R"("{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", i);
                        },
                        "}"),
                    header_bytes);
     }},
    {"tensors of many dimensions",
     [](const Path& path) {
       write_header(
           path,
           full_header(
               header_bytes, "{",
               [](int i) {
                 return fmt::format(
                     R"("{:x}":{{"dtype":"U8","shape":[0,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,0]}})",
                     i);
               },
               "}"),
           header_bytes);
     }},
    {"tensors with long names",
     [](const Path& path) {
       write_header(path,
                    full_header(
                        header_bytes, "{",
                        [](int i) {
                          return fmt::format(R"("{:0200}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                                             i);
                        },
                        "}"),
                    header_bytes);
     }},
    {"metadata without end",
     [](const Path& path) {
       write_header(path,
                    full_header(
                        header_bytes, R"({"__metadata__":{)",
                        [](int i) { return fmt::format(R"("{}":"")", i); }, "}}"),
                    header_bytes);
     }},
    {"a tensor of 2 GB",
     [](const Path& path) {
       const std::string header =
           R"({"tok.weight":{"dtype":"U8","shape":[2147483648],"data_offsets":[0,2147483648]}})";
       write_header(path, header, header.size());
       std::filesystem::resize_file(path, 8 + header.size() + (std::uintmax_t{1} << 31));
     }},
};

const Hostile configs[] = {
    {"arrays in arrays", [](const Path& path) { write_file(path, std::string(2'000'000, '[')); }},
    {"an array without end",
     [](const Path& path) {
       std::string text = "[0";
       while (text.size() < 2'000'000) text += ",[]";
       write_file(path, text);
     }},
};

/// A run to spoil.
struct Run : TempDirectory {
  Path checkpoint = *this / "run/step-2";
  Run() {
    write_file(*this / "text", small_text());
    REQUIRE(Command(*this, with(train, {"run"})).wait() == 0);
  }
  void spoil(const std::string& name, const Hostile& hostile) const {
    INFO(hostile.name << " as " << name);
    const Path path = checkpoint / name, aside = *this / "aside";
    std::filesystem::rename(path, aside);
    hostile.make(path);
    refused(*this, {"train", "--resume", "--out", "run"}, "run/step-2/" + name);
    if (name != "optimizer.safetensors")
      refused(*this, {"sample", "--checkpoint", "run/step-2"}, "run/step-2/" + name);
    std::filesystem::remove(path);
    std::filesystem::rename(aside, path);
  }
};

}  // namespace

TEST_CASE("what is no file of a checkpoint is refused by its name, at little cost") {
  const Run run;
  for (const std::string name : {"model.safetensors", "optimizer.safetensors", "config.json"}) {
    for (const Hostile& hostile : anywhere) run.spoil(name, hostile);
  }
  for (const Hostile& hostile : states) {
    const Path made = run / "made";
    hostile.make(made);
    const Hostile same = {hostile.name,
                          [&](const Path& path) { std::filesystem::create_hard_link(made, path); }};
    for (const std::string name : {"model.safetensors", "optimizer.safetensors"}) run.spoil(name, same);
    std::filesystem::remove(made);
  }
  for (const Hostile& hostile : configs) run.spoil("config.json", hostile);
  CHECK(Command(run, {"train", "--resume", "--out", "run"}).wait() == 0);
}

TEST_CASE("metrics and text that are no such files are refused by their names, at little cost") {
  const Run run;
  for (const Hostile& hostile : anywhere) {
    INFO(hostile.name);
    const Path metrics = run / "run/metrics.jsonl", text = run / "hostile";
    std::filesystem::remove(metrics);
    hostile.make(metrics);
    refused(run, {"train", "--resume", "--out", "run"}, "run/metrics.jsonl");
    std::filesystem::remove(metrics);
    hostile.make(text);
    refused(run, {"train", "--data", "hostile"}, "hostile");
    std::filesystem::remove(text);
  }
}

TEST_CASE("no command writes over what is no regular file, what it reads, or a file of a run") {
  const Run run;
  write_file(run / "old.json", "{\"settings\":{},\"figures\":{}}");
  write_file(run / "linked", "mine");
  std::filesystem::create_symlink("linked", run / "link");
  std::filesystem::create_directory(run / "empty");
  REQUIRE(::mkfifo((run / "fifo").c_str(), 0600) == 0);
  auto before = contents(run.path());
  before.erase("err");
  const Arguments traced = {"train", "--data", "text", "--steps", "1", "--out", "new", "--trace"};
  const std::vector<Arguments> commands = {traced,
                                           {"bench", "--steps", "1", "--against", "old.json", "--trace"},
                                           {"bench", "--steps", "1", "--against", "old.json", "--out"},
                                           {"inspect", "--ranks", "2", "--svg"},
                                           {"report", "run", "--out"},
                                           {"train", "--resume", "--out", "run", "--trace"}};
  std::vector<std::string> never = {"link",           "empty", "fifo", "/dev/full", "run/metrics.jsonl",
                                    "run/speed.jsonl"};
  for (const std::string name : {"model.safetensors", "optimizer.safetensors", "config.json"})
    never.push_back("run/step-2/" + name);
  const auto check = [&](const Arguments& command, const std::string& name) {
    INFO(command[0] << " " << command.back() << " " << name);
    refused(run, with(command, {name}), name);
    auto after = contents(run.path());
    for (const char* own : {"err", "peak"}) after.erase(own);
    CHECK(after == before);
    CHECK_FALSE(std::filesystem::exists(run / "new"));
    CHECK(std::filesystem::is_symlink(run / "link"));
    CHECK(std::filesystem::is_fifo(run / "fifo"));
    CHECK(std::filesystem::is_directory(run / "empty"));
  };
  for (const Arguments& command : commands)
    for (const std::string& name : never) check(command, name);
  for (const std::string name : {"text", "./run/../text"}) check(traced, name);
  check(commands[1], "old.json");
  check(commands[2], "old.json");
}

TEST_CASE("what is no report is refused before anything is benched, at little cost") {
  const TempDirectory folder;
  const Path report = folder / "report.json";
  const auto refused_as = [&](const std::string& part) {
    refused(folder,
            {"bench", "--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--against",
             "report.json"},
            part);
  };
  write_file(report, "");
  std::filesystem::resize_file(report, 100'000'000);
  refused_as("1048576");
  std::string full = "[0";
  while (full.size() < 1'000'000) full += ",[]";
  write_file(report, full + "]");
  refused_as("--against");
  write_file(report, std::string(400'000, '[') + std::string(400'000, ']'));
  refused_as("nested deeper than 8 levels");
}

TEST_CASE("a configuration of another size than the weights is refused before a model is made") {
  const Run run;
  const Path path = run.checkpoint / "config.json";
  unseal_all(run.checkpoint);  // changed on purpose
  const std::string whole = posix_file_system().read(path);
  for (const auto& [from, to] :
       {std::pair("\"width\": 8", "\"width\": 20000"), std::pair("\"width\": 8", "\"width\": 600"),
        std::pair("\"layers\": 1", "\"layers\": 3000"),
        std::pair("\"context\": 8", "\"context\": 20000000")}) {
    INFO(to);
    std::string edited = whole;
    REQUIRE(edited.find(from) != std::string::npos);
    edited.replace(edited.find(from), std::strlen(from), to);
    write_file(path, edited);
    refused(run, {"train", "--resume", "--out", "run"}, "");
    refused(run, {"sample", "--checkpoint", "run/step-2"}, "");
  }
}

TEST_CASE("what cannot fit is forecast, and the forecast is never more than a run takes") {
  const TempDirectory folder;
  write_file(folder / "text", small_text(8000));
  for (const Arguments& sizes : {Arguments{"--layers", "100000000"}, Arguments{"--width", "1000000"},
                                 Arguments{"--batch", "100000000"}, Arguments{"--context", "100000000"},
                                 Arguments{"--layers", "3000", "--width", "100000"}})
    refused(folder, with({"train", "--data", "text"}, sizes), sizes[0] + " " + sizes[1]);
  for (const Arguments& sizes : {Arguments{"--layers", "1000000000"}, Arguments{"--ranks", "1000000000"}})
    refused(folder, with({"inspect"}, sizes), sizes[0] + " " + sizes[1]);

  struct Size {
    std::int64_t layers, width, context, batch, ranks;
    std::string strategy;
  };
  for (const Size& size : {Size{2, 256, 8, 1, 1, "full_shard"}, Size{1, 16, 256, 256, 1, "full_shard"},
                           Size{2, 128, 8, 2, 2, "no_shard"}, Size{30, 8, 8, 2, 2, "zero1"}}) {
    tools::TrainOptions options;
    options.layers = size.layers;
    options.width = size.width;
    options.heads = 1;
    options.context = size.context;
    options.batch = size.batch;
    options.ranks = size.ranks;
    options.strategy = size.strategy;
    const double needs = tools::training_needs(options).total();
    INFO("layers " << size.layers << ", width " << size.width << ", needs " << needs);
    Command run =
        measured(folder, {"train", "--data", "text", "--steps", "1", "--layers", std::to_string(size.layers),
                          "--width", std::to_string(size.width), "--heads", "1", "--context",
                          std::to_string(size.context), "--batch", std::to_string(size.batch), "--ranks",
                          std::to_string(size.ranks), "--strategy", size.strategy});
    CHECK(run.wait() == 0);
    CHECK(needs <= static_cast<double>(peak(folder)));
    CHECK_NOTHROW(tools::check_fits(tools::training_needs(options), options, needs));
    CHECK_THAT(message_of<ValueError>(
                   [&] { tools::check_fits(tools::training_needs(options), options, needs * 0.99); }),
               ContainsSubstring("--width " + std::to_string(size.width)));
  }
}

TEST_CASE("a model of many blocks on many ranks is inspected at little cost") {
  const TempDirectory folder;
  for (const Arguments& sizes : {Arguments{"--layers", "1000", "--ranks", "512"},
                                 Arguments{"--layers", "3000", "--ranks", "4096", "--layout", "flat"},
                                 Arguments{"--layers", "3000", "--width", "4194304", "--svg", "x.svg"}}) {
    Command run = measured(folder, with({"inspect"}, sizes));
    CHECK(run.wait() == 0);
    CHECK(peak(folder) < most_bytes);
    CHECK_THAT(run.out(), ContainsSubstring("blocks.{0.."));
  }
}
