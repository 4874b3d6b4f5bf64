#include "tests/nn/tokenizer_goldens.h"

#include <algorithm>

#include "runtime/error.h"

namespace sherd::test {

namespace {
const FileSystem::Path tokenizers = FileSystem::Path(source_root) / "tests/golden/tokenizers";
}  // namespace

FileSystem::Path tokenizer_file(std::string_view name) { return tokenizers / name; }

std::string text_of_file(const FileSystem::Path& file) { return posix_file_system().read(file); }

std::vector<std::string> tokenizer_names() {
  std::vector<std::string> names;
  for (const auto& [name, answers] : golden_answers().items())
    if (name != "texts") names.push_back(name);
  return names;
}

bool is_supported(std::string_view name) {
  const bool splits = name.ends_with(".json") && name.find("llama2") == std::string_view::npos &&
                      name.find("gemma") == std::string_view::npos &&
                      name.find("metaspace") == std::string_view::npos;
  return (has_pcre2 || !splits) && (has_utf8proc || name != "qwen2.json");
}

nn::Tokenizer golden_tokenizer(std::string_view name) { return nn::Tokenizer::read(tokenizer_file(name)); }

const nlohmann::json& golden_answers() {
  static const nlohmann::json answers = nlohmann::json::parse(text_of_file(tokenizer_file("expected.json")));
  return answers;
}

nn::Tokenizer tokenizer_of(std::string_view content, std::string_view name) {
  const TempDirectory folder;
  posix_file_system().create(folder / name)->write(content);
  return nn::Tokenizer::read(folder / name);
}

std::string refusal(std::string_view content, std::string_view name) {
  try {
    tokenizer_of(content, name);
  } catch (const ValueError& error) {
    return error.what();
  } catch (const NotImplementedError& error) {
    return error.what();
  }
  return "(it was read)";
}

nlohmann::json golden_json(std::string_view name) {
  return nlohmann::json::parse(text_of_file(tokenizer_file(name)));
}

std::string utf8_of(char32_t code) {
  std::string text;
  const auto add = [&](char32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6);
    add(0x80 | (code & 63));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 63));
    add(0x80 | (code & 63));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 63));
    add(0x80 | (code >> 6 & 63));
    add(0x80 | (code & 63));
  }
  return text;
}

std::string random_text(std::mt19937_64& draw, int characters) {
  std::string text;
  for (int i = 0; i < characters; ++i) {
    char32_t code = 0;
    switch (draw() % 8) {
      case 0:
        code = draw() % 0x300;
        break;
      case 1:
        code = draw() % 0xD800;
        break;
      case 2:
        code = 0xE000 + draw() % (0x110000 - 0xE000);
        break;
      case 3:
        code = U" \n\t\u00a0\u3000\u2028"[draw() % 6];
        break;
      default:
        code = draw() % 0x80;
    }
    text += utf8_of(code);
  }
  return text;
}

}  // namespace sherd::test
