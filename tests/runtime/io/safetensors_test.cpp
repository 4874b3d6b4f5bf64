#include "runtime/io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/memory_file.h"
#include "tests/temp_directory.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

Bytes written(std::span<const TensorRecord> records, const TensorMetadata& metadata = {}) {
  MemoryOutput output;
  write_safetensors(output, records, metadata);
  return output.bytes;
}

/// A file of that header and `data` zero bytes, right or wrong.
Bytes raw_file(std::string_view header, std::size_t data) {
  const std::uint64_t length = header.size();
  Bytes bytes(sizeof(length) + header.size() + data);
  std::memcpy(bytes.data(), &length, sizeof(length));
  std::memcpy(bytes.data() + sizeof(length), header.data(), header.size());
  return bytes;
}

SafetensorsFile opened(std::span<const std::byte> bytes) {
  return {std::make_unique<MemoryInput>(bytes), "some.safetensors"};
}

/// Owns what the records point to: elements that are a pattern, 0 and 1 for bool.
struct Contents {
  std::deque<Bytes> storage;
  std::vector<TensorRecord> records;

  void add(std::string name, DType dtype, std::vector<std::int64_t> shape) {
    std::int64_t bytes = size_of(dtype);
    for (const std::int64_t dim : shape) bytes *= dim;
    Bytes data(static_cast<std::size_t>(bytes));
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<std::byte>(dtype == DType::boolean ? i % 3 == 0 : i * 37 + storage.size());
    }
    storage.push_back(std::move(data));
    records.push_back({std::move(name), dtype, std::move(shape), storage.back()});
  }
};

/// All that a file holds.
Contents read_all(const SafetensorsFile& file) {
  Contents tensors;
  for (const TensorEntry& entry : file.entries()) {
    Bytes& bytes = tensors.storage.emplace_back(entry.bytes);
    file.read(entry, bytes);
    tensors.records.push_back({entry.name, file.dtype_of(entry), entry.shape, bytes});
  }
  return tensors;
}

std::string refusal(std::span<const std::byte> bytes) {
  return message_of<ValueError>([&] { read_all(opened(bytes)); });
}

/// Every dtype in every shape, under names that are hard to quote.
Contents many_tensors() {
  const std::vector<std::int64_t> shapes[] = {{},     {0},       {1},       {3},
                                              {7, 1}, {2, 3, 5}, {4, 0, 3}, {1, 1, 1, 1, 1}};
  const char* names[] = {"plain", "a.b.0.weight", "größe", "重み", "🏺", "\"quoted\\\"", "line\nbreak", ""};
  Contents tensors;
  int count = 0;
  for (const DType dtype : all_dtypes) {
    for (const auto& shape : shapes) {
      const int n = count++;
      tensors.add(names[n % 8] + (n < 8 ? "" : std::to_string(n)), dtype, shape);
    }
  }
  return tensors;
}

void check_equal(std::span<const TensorRecord> got, std::span<const TensorRecord> expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO(expected[i].name);
    CHECK(got[i].name == expected[i].name);
    CHECK(got[i].dtype == expected[i].dtype);
    CHECK(got[i].shape == expected[i].shape);
    CHECK(std::ranges::equal(got[i].bytes, expected[i].bytes));
  }
}

constexpr std::string_view good_header =
    R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
    R"("b":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]}})";

}  // namespace

TEST_CASE("every dtype, shape and name comes back, in the order given") {
  const Contents tensors = many_tensors();
  const TensorMetadata metadata = {{"format", "pt"}, {"naïve", "a\"b\\c\n"}, {"", ""}};
  const Bytes bytes = written(tensors.records, metadata);
  const SafetensorsFile file = opened(bytes);
  check_equal(read_all(file).records, tensors.records);
  CHECK(file.metadata() == metadata);
}

TEST_CASE("no tensors make a file too") {
  const Bytes bytes = written({});
  CHECK(opened(bytes).entries().empty());
}

TEST_CASE("equal input gives equal bytes, and every tensor is aligned to its element") {
  const Contents tensors = many_tensors();
  const Bytes bytes = written(tensors.records);
  CHECK((bytes == written(tensors.records)));
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  CHECK(header % 8 == 0);
  const SafetensorsFile file = opened(bytes);
  for (const TensorEntry& entry : file.entries())
    CHECK(entry.begin % static_cast<std::uint64_t>(size_of(file.dtype_of(entry))) == 0);
}

TEST_CASE("the header's order and the data's order are free of each other") {
  Bytes bytes = raw_file(R"({"late":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
                         R"("empty":{"dtype":"F64","shape":[0],"data_offsets":[1,1]},)"
                         R"("early":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}}   )",
                         3);
  bytes[bytes.size() - 3] = std::byte{7};
  const SafetensorsFile file = opened(bytes);
  REQUIRE(file.entries().size() == 3);
  CHECK(file.entries()[0].name == "late");
  CHECK(read_all(file).storage[2][0] == std::byte{7});
}

TEST_CASE("a saved file opens, finds by name, and stays valid when moved or replaced on disk") {
  const TempDirectory directory;
  const Contents tensors = many_tensors();
  save_safetensors(directory / "x.safetensors", tensors.records, {{"k", "v"}});
  SafetensorsFile before(directory / "x.safetensors");
  const SafetensorsFile file = std::move(before);
  save_safetensors(directory / "x.safetensors", {});
  check_equal(read_all(file).records, tensors.records);
  CHECK(file.metadata().at("k") == "v");
  REQUIRE(file.find("größe") != nullptr);
  CHECK(file.find("größe")->shape == std::vector<std::int64_t>{1});
  CHECK(file.find("nobody") == nullptr);
  CHECK(SafetensorsFile(directory / "x.safetensors").entries().empty());
}

TEST_CASE(
    "each kind of broken header is refused in one line that names the file, the tensor and both values") {
  struct Case {
    std::string_view header;
    std::size_t data;
    std::vector<std::string> says;
  };
  const auto tensor = [](std::string_view fields) { return R"({"w":{)" + std::string(fields) + "}}"; };
  const std::string missing_dtype = tensor(R"("shape":[2],"data_offsets":[0,8])");
  const std::string missing_shape = tensor(R"("dtype":"F32","data_offsets":[0,8])");
  const std::string missing_offsets = tensor(R"("dtype":"F32","shape":[2])");
  const std::string twice_dtype = tensor(R"("dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8])");
  const std::string twice_shape = tensor(R"("dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8])");
  const std::string extra = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"stride":[1])");
  const std::string unknown = tensor(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])");
  const std::string many_numbers =
      tensor(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])");
  const std::string dtype_number = tensor(R"("dtype":3,"shape":[8],"data_offsets":[0,8])");
  const std::string dtype_array = tensor(R"("dtype":["F32"],"shape":[8],"data_offsets":[0,8])");
  const std::string shape_number = tensor(R"("dtype":"F32","shape":2,"data_offsets":[0,8])");
  const std::string shape_string = tensor(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])");
  const std::string shape_nested = tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])");
  const std::string shape_null = tensor(R"("dtype":"F32","shape":[null],"data_offsets":[0,8])");
  const std::string negative = tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])");
  const std::string fraction = tensor(R"("dtype":"F32","shape":[2.5],"data_offsets":[0,8])");
  const std::string above_i64 = tensor(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])");
  const std::string above_u64 =
      tensor(R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8])");
  const std::string overflow =
      tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8])");
  const std::string hidden =
      tensor(R"("dtype":"F32","shape":[4611686018427387904,0,4],"data_offsets":[0,0])");
  const std::string one_offset = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0])");
  const std::string three_offsets = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])");
  const std::string offsets_object = tensor(R"("dtype":"F32","shape":[2],"data_offsets":{"begin":0})");
  const std::string backwards = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])");
  const std::string size = tensor(R"("dtype":"F32","shape":[2,3],"data_offsets":[0,8])");
  const std::string hole_first = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])");
  const std::string outside = tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])");
  constexpr std::string_view twice =
      R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  constexpr std::string_view overlap =
      R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})";
  constexpr std::string_view hole =
      R"({"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})";

  const Case cases[] = {
      {"", 0, {"must start with '{'", "nothing"}},
      {"[]", 0, {"must start with '{'", "'['"}},
      {R"( {})", 0, {"must start with '{'"}},
      {R"({"w":)", 0, {"not valid JSON", "byte 6"}},
      {R"({} {})", 0, {"not valid JSON"}},
      {"{\"w\xff\":1}", 0, {"not valid JSON", "UTF-8"}},
      {R"({"w":1})", 0, {"'w'", "must be an object", "a number"}},
      {R"({"w":null})", 0, {"'w'", "must be an object", "null"}},
      {R"({"w":true})", 0, {"'w'", "must be an object", "a boolean"}},
      {R"({"w":[[[[1]]]]})", 0, {"'w'", "must be an object", "an array"}},
      {R"({"line\nbreak":1})", 0, {"'line?break'"}},
      {R"({"__metadata__":"pt"})", 0, {"__metadata__", "object of strings", "a string"}},
      {R"({"__metadata__":{"k":1}})", 0, {"__metadata__", "'k' must be a string", "a number"}},
      {R"({"__metadata__":{"k":{}}})", 0, {"__metadata__", "'k' must be a string", "an object"}},
      {R"({"__metadata__":{"k":"","k":""}})", 0, {"__metadata__", "'k' is taken twice"}},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, {"'__metadata__' is taken twice"}},
      {missing_dtype, 8, {"'w'", "dtype is missing"}},
      {missing_shape, 8, {"'w'", "shape is missing"}},
      {missing_offsets, 8, {"'w'", "data_offsets is missing"}},
      {twice_dtype, 8, {"'w'", "dtype is given twice"}},
      {twice_shape, 8, {"'w'", "shape is given twice"}},
      {extra, 8, {"'w'", "'stride'"}},
      {many_numbers, 1, {"'w'", "more than 16 numbers"}},
      {unknown, 8, {"'w'", "'F8_E4M3' is unknown", "BF16"}},
      {dtype_number, 8, {"'w'", "dtype must be a string", "a number"}},
      {dtype_array, 8, {"'w'", "dtype must be a string", "an array"}},
      {shape_number, 8, {"'w'", "shape must be an array", "a number"}},
      {shape_string, 8, {"'w'", "integers only", "a string"}},
      {shape_nested, 8, {"'w'", "integers only", "an array"}},
      {shape_null, 8, {"'w'", "integers only", "null"}},
      {negative, 8, {"'w'", "integers from 0", "-2"}},
      {fraction, 8, {"'w'", "integers from 0", "2.5"}},
      {above_i64, 8, {"'w'", "9223372036854775808", "2^63 - 1"}},
      {above_u64, 8, {"'w'", "18446744073709551616", "2^63"}},
      {overflow, 8, {"'w'", "[4611686018427387904, 4]", "F32", "2^63 - 1"}},
      {hidden, 0, {"'w'", "[4611686018427387904, 0, 4]", "2^63 - 1"}},
      {one_offset, 8, {"'w'", "[begin, end]", "1 numbers"}},
      {three_offsets, 8, {"'w'", "[begin, end]", "3 numbers"}},
      {offsets_object, 8, {"'w'", "data_offsets must be an array", "an object"}},
      {backwards, 8, {"'w'", "[8, 0]", "end before they begin"}},
      {size, 8, {"'w'", "[2, 3]", "takes 24 bytes", "give 8"}},
      {hole_first, 12, {"'w'", "starts at byte 4", "ends at 0", "a hole"}},
      {outside, 7, {"cut short", "take 8 bytes", "7 are there"}},
      {outside, 9, {"take 8 bytes", "9 are there", "belongs to none"}},
      {twice, 2, {"'w' is taken twice"}},
      {overlap, 7, {"'w'", "starts at byte 3", "ends at 4", "overlap"}},
      {hole, 9, {"'w'", "starts at byte 5", "ends at 4", "a hole"}},
  };
  for (const Case& c : cases) {
    INFO(c.header);
    const std::string message = refusal(raw_file(c.header, c.data));
    CHECK_THAT(message, ContainsSubstring("safetensors: 'some.safetensors': "));
    CHECK(message.find('\n') == std::string::npos);
    for (const std::string& text : c.says) CHECK_THAT(message, ContainsSubstring(text));
  }
}

TEST_CASE("a file cut short at any byte is refused in one line") {
  const Bytes whole = raw_file(good_header, 11);
  REQUIRE(opened(whole).entries().size() == 2);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string message = refusal(std::span(whole).first(size));
    INFO(size << ": " << message);
    CHECK_THAT(message, ContainsSubstring("cut short"));
    CHECK(message.find('\n') == std::string::npos);
  }
}

TEST_CASE("any one wrong byte in length or header is refused in one line or still makes a valid file",
          "[one thread]") {
  const Bytes whole = raw_file(good_header, 11);
  int refused = 0;
  for (std::size_t at = 0; at < whole.size() - 11; ++at) {
    for (int value = 0; value < 256; ++value) {
      Bytes broken = whole;
      broken[at] = static_cast<std::byte>(value);
      try {
        read_all(opened(broken));
      } catch (const ValueError& error) {
        ++refused;
        if (std::string_view(error.what()).find('\n') != std::string_view::npos) FAIL(error.what());
      }
    }
  }
  CHECK(refused > 0);
}

TEST_CASE("an absurd header length is refused before anything is read") {
  Bytes bytes = raw_file(good_header, 11);
  for (const std::uint64_t length :
       {std::uint64_t{(1 << 24) + 1}, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    std::memcpy(bytes.data(), &length, sizeof(length));
    const std::string message = refusal(bytes);
    CHECK_THAT(message, ContainsSubstring(std::to_string(length)) && ContainsSubstring("16777216"));
  }
}

TEST_CASE("a header nested deeply or with a very long name is refused in one short line") {
  const std::string deep = R"({"w":)" + std::string(200'000, '[');
  CHECK_THAT(refusal(raw_file(deep, 0)), ContainsSubstring("'w'") && ContainsSubstring("an array"));
  std::string name;
  for (int i = 0; i < 1000; ++i) name += "é";
  const std::string message = refusal(raw_file(R"({"x)" + name + R"(":1})", 0));
  CHECK(message.size() < 300);
  CHECK_THAT(message, ContainsSubstring("é...'"));
}

TEST_CASE("a bool other than 0 and 1 is refused") {
  Bytes bytes = raw_file(good_header, 11);
  bytes[bytes.size() - 2] = std::byte{2};
  CHECK_THAT(refusal(bytes), ContainsSubstring("'b'") && ContainsSubstring("element 1 is 2"));
}

TEST_CASE("the writer refuses what the reader would") {
  const std::int32_t numbers[] = {1, 2, 3};
  const auto bytes = std::as_bytes(std::span(numbers));
  const auto refused = [](std::vector<TensorRecord> records, const TensorMetadata& metadata = {}) {
    return message_of<ValueError>([&] { written(records, metadata); });
  };
  CHECK_THAT(refused({{"w", DType::i32, {2}, bytes}}),
             ContainsSubstring("'w'") && ContainsSubstring("takes 8 bytes, got 12"));
  CHECK_THAT(refused({{"w", DType::i32, {-3}, bytes}}), ContainsSubstring("[-3]"));
  CHECK_THAT(refused({{"w", DType::i32, {1LL << 62, 4}, {}}}), ContainsSubstring("more than 2^63 - 1"));
  CHECK_THAT(refused({{"w", DType::i32, {3}, bytes}, {"w", DType::i32, {3}, bytes}}),
             ContainsSubstring("'w' is taken twice"));
  CHECK_THAT(refused({{"__metadata__", DType::i32, {3}, bytes}}), ContainsSubstring("reserved"));
  CHECK_THAT(refused({{"w\xff", DType::i32, {3}, bytes}}), ContainsSubstring("UTF-8"));
  CHECK_THAT(refused({}, {{"k", "\xc3"}}), ContainsSubstring("UTF-8"));
  CHECK_THAT(refused({}, {{"sherd.xxh3", "0"}}), ContainsSubstring("reserved"));
  CHECK_THAT(refused({{"w", DType::i32, std::vector<std::int64_t>(17, 1), bytes.first(4)}}),
             ContainsSubstring("'w'") && ContainsSubstring("17 dimensions"));
  CHECK_THAT(refused(std::vector<TensorRecord>((1 << 17) + 1, {"w", DType::u8, {0}, {}})),
             ContainsSubstring("131073 tensors") && ContainsSubstring("131072"));
}

TEST_CASE("a refused save leaves no file") {
  const TempDirectory directory;
  const TensorRecord wrong{"w", DType::i32, {2}, {}};
  CHECK_THROWS_AS(save_safetensors(directory / "x", std::span(&wrong, 1)), ValueError);
  CHECK(posix_file_system().list(directory.path()).empty());
}

TEST_CASE("a broken file on disk is named by its path") {
  const TempDirectory directory;
  posix_file_system().create(directory / "cut.safetensors")->write("12345");
  const auto open = [&] { SafetensorsFile file(directory / "cut.safetensors"); };
  CHECK_THAT(message_of<ValueError>(open), ContainsSubstring((directory / "cut.safetensors").string()));
}

TEST_CASE("whatever byte of a file changes, it is refused by its name or still holds the same tensors",
          "[one thread]") {
  const Contents tensors = many_tensors();
  const TensorMetadata metadata = {{"a", "\"sherd.xxh3\":\"0123456789abcdef0123456789abcdef\""}};
  const Bytes whole = written(tensors.records, metadata);
  const std::string_view text(reinterpret_cast<const char*>(whole.data()), whole.size());
  const std::size_t key = text.find(R"("sherd.xxh3":)");
  int unnoticed = 0;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const int flip : {0x01, 0x20, 0x80, 0xff}) {
      Bytes broken = whole;
      broken[at] ^= static_cast<std::byte>(flip);
      INFO("byte " << at << " ^ " << flip);
      try {
        check_equal(read_all(opened(broken)).records, tensors.records);
        // Without its key the checksum is foreign metadata: the file is one without checksums.
        CHECK((at > key && at < key + 11));
        ++unnoticed;
      } catch (const ValueError& error) {
        const std::string message = error.what();
        CHECK_THAT(message, ContainsSubstring("'some.safetensors'"));
        CHECK(message.find('\n') == std::string::npos);
      }
    }
  }
  CHECK(unnoticed <= 10 * 4);
}

TEST_CASE("a file without checksums loads, and one that kept those of another does not") {
  const Bytes plain = raw_file(good_header, 11);
  CHECK(read_all(opened(plain)).records.size() == 2);
  const std::int32_t one[] = {1}, two[] = {2};
  const TensorRecord a{"w", DType::i32, {1}, std::as_bytes(std::span(one))},
      b{"w", DType::i32, {1}, std::as_bytes(std::span(two))};
  Bytes kept = written(std::span(&a, 1));
  const Bytes other = written(std::span(&b, 1));
  REQUIRE(kept.size() == other.size());
  std::copy(other.end() - 4, other.end(), kept.end() - 4);
  CHECK_THAT(refusal(kept), ContainsSubstring("tensor 'w' is damaged"));
}

TEST_CASE("a tensor of a foreign dtype is refused when it is asked for, and hinders no other") {
  const Bytes bytes = raw_file(R"({"a":{"dtype":"I16","shape":[2],"data_offsets":[0,4]},)"
                               R"("b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
                               R"("c":{"dtype":"F8_E5M2","shape":[1,1],"data_offsets":[7,8]}})",
                               8);
  const SafetensorsFile file = opened(bytes);
  REQUIRE(file.entries().size() == 3);
  CHECK(file.dtype_of(*file.find("b")) == DType::u8);
  Bytes b(3, std::byte{1});
  file.read(*file.find("b"), b);
  CHECK(b == Bytes(3));
  for (const char* name : {"a", "c"}) {
    const std::string message = message_of<ValueError>([&] { file.dtype_of(*file.find(name)); });
    CHECK_THAT(message, ContainsSubstring("'" + std::string(name) + "'") &&
                            ContainsSubstring(file.find(name)->dtype) && ContainsSubstring("BF16"));
  }
}

TEST_CASE("a file that is cut short while it is open is an error of the read") {
  const TempDirectory directory;
  const auto path = directory / "x.safetensors";
  const Bytes zeros(std::size_t{1} << 20);
  const TensorRecord record{"w", DType::u8, {1 << 20}, zeros};
  save_safetensors(path, std::span(&record, 1));
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 5000);
  Bytes into(zeros.size());
  CHECK_THAT(message_of<FileError>([&] { file.read(file.entries()[0], into); }),
             ContainsSubstring(path.string()) && ContainsSubstring("ends at byte 5000"));
}

TEST_CASE("where damage refuses a tensor alone, a file cut short anywhere gives all tensors before the cut") {
  Contents tensors;
  tensors.add("a", DType::f32, {2, 3});
  tensors.add("none", DType::f32, {0, 3});
  tensors.add("b", DType::boolean, {5});
  tensors.add("c", DType::bf16, {3});
  const Bytes whole = written(tensors.records);
  const SafetensorsFile complete = opened(whole);
  std::size_t data = 0;
  for (const TensorEntry& entry : complete.entries()) data += entry.bytes;
  for (std::size_t left = whole.size() - data; left <= whole.size(); ++left) {
    INFO(left);
    const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(left));
    const SafetensorsFile file(std::make_unique<MemoryInput>(cut), "some.safetensors",
                               Damage::refuses_tensor);
    for (const TensorRecord& record : tensors.records) {
      const TensorEntry& entry = *file.find(record.name);
      Bytes into(entry.bytes);
      if (whole.size() - data + entry.begin + entry.bytes <= left) {
        CHECK(file.dtype_of(entry) == record.dtype);
        file.read(entry, into);
        CHECK(std::ranges::equal(into, record.bytes));
        continue;
      }
      for (const auto& message : {message_of<ValueError>([&] { file.read(entry, into); }),
                                  message_of<ValueError>([&] { file.dtype_of(entry); })}) {
        CHECK_THAT(message, ContainsSubstring("'some.safetensors': tensor '" + record.name + "'") &&
                                ContainsSubstring("cut short") && !ContainsSubstring("\n"));
      }
    }
  }
}

TEST_CASE("where damage refuses a tensor alone, so do bytes that are another's and sizes that do not fit") {
  const Bytes bytes =
      raw_file(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
               R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]},)"
               R"("c":{"dtype":"U8","shape":[2],"data_offsets":[8,10]},)"
               R"("d":{"dtype":"F32","shape":[2],"data_offsets":[10,14]},)"
               R"("e":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[14,18]},)"
               R"("f":{"dtype":"U8","shape":[9],"data_offsets":[9223372036854775798,9223372036854775807]},)"
               R"("g":{"dtype":"U8","shape":[1],"data_offsets":[18,19]}})",
               20);
  const SafetensorsFile file(std::make_unique<MemoryInput>(bytes), "some.safetensors",
                             Damage::refuses_tensor);
  const std::map<std::string, std::string> damaged = {{"a", "those of 'b' too"},
                                                      {"b", "those of 'a' too"},
                                                      {"d", "takes 8 bytes"},
                                                      {"e", "above 2^63 - 1"},
                                                      {"f", "cut short"}};
  for (const TensorEntry& entry : file.entries()) {
    if (const auto found = damaged.find(entry.name); found != damaged.end()) {
      CHECK_THAT(message_of<ValueError>([&] { file.dtype_of(entry); }), ContainsSubstring(found->second));
      continue;
    }
    Bytes into(entry.bytes, std::byte{1});
    file.read(entry, into);  // a hole before it, or behind it, spoils nothing
    CHECK(into == Bytes(entry.bytes));
  }
}
