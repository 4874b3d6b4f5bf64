// Encodes the records of a file with a tokenizer, for tests/golden/compare_tokenizers.py:
//   tokenize_file encode TOKENIZER RECORDS OUT     # records in, tokens out
//   tokenize_file decode TOKENIZER RECORDS OUT     # tokens in, texts out
// A record is its length in 32 bits and so many bytes; tokens are 32 bits each. Prints the processor seconds
// that the calls take.
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "nn/tokenizer.h"

namespace {

std::string read(const char* path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string_view> records(std::string_view all) {
  std::vector<std::string_view> found;
  while (all.size() >= 4) {
    std::uint32_t bytes = 0;
    std::memcpy(&bytes, all.data(), 4);
    found.push_back(all.substr(4, bytes));
    all.remove_prefix(4 + found.back().size());
  }
  return found;
}

void append(std::string& out, std::string_view bytes) {
  const auto size = static_cast<std::uint32_t>(bytes.size());
  out.append(reinterpret_cast<const char*>(&size), 4).append(bytes);
}

}  // namespace

int main(int count, char** arguments) try {
  if (count != 5) return std::cerr << "usage: tokenize_file encode|decode TOKENIZER RECORDS OUT\n", 2;
  const bool encodes = std::string_view(arguments[1]) == "encode";
  const auto tokenizer = sherd::nn::Tokenizer::read(arguments[2]);
  const std::string in = read(arguments[3]);
  const auto all = records(in);
  std::vector<std::vector<std::int64_t>> ids(all.size());
  std::vector<std::string> texts(all.size());
  if (!encodes)
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t at = 0; at < all[i].size(); at += 4) {
        std::uint32_t id = 0;
        std::memcpy(&id, all[i].data() + at, 4);
        ids[i].push_back(id);
      }
  const std::clock_t start = std::clock();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (encodes)
      ids[i] = tokenizer.encode(all[i], {.add_special_tokens = false});
    else
      texts[i] = tokenizer.decode(ids[i], {.skip_special_tokens = false});
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  std::string out;
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::string bytes = texts[i];
    if (encodes)
      for (const std::int64_t id : ids[i]) {
        const auto narrow = static_cast<std::uint32_t>(id);
        bytes.append(reinterpret_cast<const char*>(&narrow), 4);
      }
    append(out, bytes);
  }
  std::ofstream(arguments[4], std::ios::binary) << out;
  std::cout << seconds << "\n";
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
