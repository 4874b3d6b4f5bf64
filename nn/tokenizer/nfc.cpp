#include "nn/tokenizer/normalizer.h"
#include "nn/tokenizer/utf8.h"
#include "runtime/error.h"

#ifdef SHERD_UTF8PROC
#include <utf8proc.h>

#include <cstdlib>
#include <memory>
#endif

namespace sherd::nn::tokens {

#ifdef SHERD_UTF8PROC
namespace {

/// Characters that are composed, and compose with none in front of them: text may be cut there. There are
/// more.
bool stands_alone(char32_t code) {
  return code < 0x300 || (code >= 0x410 && code < 0x483) || (code >= 0x2010 && code < 0x2071) ||
         (code >= 0x3041 && code < 0x3099) || (code >= 0x30A0 && code < 0x3100) ||
         (code >= 0x4E00 && code < 0xA000) || (code >= 0xAC00 && code < 0xD7A4) ||
         (code >= 0x1F300 && code < 0x1FB00);
}

void append_composed(std::string& out, std::string_view text) {
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t bytes = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
      &composed, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> memory(composed, &std::free);
  if (bytes == UTF8PROC_ERROR_NOMEM)
    fail<OutOfMemoryError>("tokenizer: no memory to compose {} bytes", text.size());
  check<InternalError>(bytes >= 0, "tokenizer: composing characters: {}", utf8proc_errmsg(bytes));
  out.append(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(bytes));
}

}  // namespace

void append_nfc(std::string& out, std::string_view text) {
  std::size_t begin = 0,
              last_alone = 0;  // where what is yet to be appended begins, and the last place to cut at
  bool composing = false;
  for (std::size_t at = 0; at < text.size();) {
    const Character c = first_character(text.substr(at));
    if (!stands_alone(c.code)) {
      if (!composing) {
        out.append(text.substr(begin, last_alone - begin));
        begin = last_alone;
        composing = true;
      }
    } else {
      if (composing) {
        append_composed(out, text.substr(begin, at - begin));
        begin = at;
        composing = false;
      }
      last_alone = at;
    }
    at += c.bytes;
  }
  if (composing)
    append_composed(out, text.substr(begin));
  else
    out.append(text.substr(begin));
}
#else
void append_nfc(std::string&, std::string_view) {
  fail<NotImplementedError>(
      "tokenizer: the normalizer NFC needs libutf8proc, which this build was made without; install "
      "libutf8proc-dev "
      "and build again");
}
#endif

}  // namespace sherd::nn::tokens
