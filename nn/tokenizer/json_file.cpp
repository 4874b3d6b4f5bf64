#include "nn/tokenizer/json_file.h"

#include <array>
#include <optional>
#include <set>
#include <vector>

#include "nn/tokenizer/json_shape.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::tokens {
namespace {

using Json = nlohmann::json;

// Of what is kept as JSON: some 16384 added tokens, the rest is small.
constexpr std::size_t most_values = std::size_t{1} << 17;

/// Puts a JSON value together as its parts come.
class Tree {
 public:
  bool open() const { return !open_.empty(); }
  void begin(Json value) {
    Json& placed = place(std::move(value));
    open_.push_back(&placed);
  }
  void key(std::string name) { key_ = std::move(name); }
  /// True where the whole is complete.
  bool end() {
    open_.pop_back();
    return open_.empty();
  }
  void add(Json value) { place(std::move(value)); }
  Json take() { return std::move(root_); }

 private:
  Json& place(Json value) {
    if (open_.empty()) return root_ = std::move(value);
    Json& in = *open_.back();
    if (in.is_object()) return in[key_] = std::move(value);
    in.push_back(std::move(value));
    return in.back();
  }
  Json root_;
  std::vector<Json*> open_;
  std::string key_;
};

/// What the parser calls. Of `second` passes only merges are read, for a file that has them before the
/// tokens.
class Reader final : public nlohmann::json_sax<Json> {
 public:
  Reader(JsonFile& file, const std::string& where, bool second)
      : file_(file), where_(where), second_(second) {}

  bool merges_wait() const { return merges_wait_; }

  bool null() override { return value(Json()); }
  bool boolean(bool v) override { return value(Json(v)); }
  bool number_integer(number_integer_t v) override { return value(Json(v)); }
  bool number_unsigned(number_unsigned_t v) override {
    if (in_ == In::vocabulary) {
      token(v);
      return true;
    }
    return value(Json(v));
  }
  bool number_float(number_float_t v, const string_t&) override { return value(Json(v)); }
  bool string(string_t& v) override {
    if (in_ == In::merges || in_ == In::merge) {
      merge_part(v);
      return true;
    }
    return value(Json(v));
  }
  bool binary(binary_t&) override { return value(Json()); }
  bool start_object(std::size_t) override { return start(Json::object()); }
  bool start_array(std::size_t) override { return start(Json::array()); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(string_t& name) override {
    if (in_ == In::vocabulary) {
      token_ = name;
    } else if (tree_.open()) {
      tree_.key(name);
    } else {
      const std::string path = level_ == 1 ? name : "model." + name;
      if (!second_)
        check<ValueError>(seen_.insert(path).second, "{}: {} is there twice", where_, shown(path));
      key_ = name;
      if (level_ == 1) section_ = name;
    }
    return true;
  }

  bool parse_error(std::size_t at, const std::string&, const nlohmann::detail::exception& error) override {
    fail<ValueError>("{}: is not valid JSON at byte {}: {}", where_, at, shown(error.what(), 200));
  }

 private:
  enum class In { nothing, vocabulary, merges, merge };

  [[noreturn]] void refuse(std::string_view what) const { fail<ValueError>("{}: {}", where_, what); }

  bool in_model() const { return level_ == 2 && section_ == "model"; }

  void count() {
    check<ValueError>(++values_ <= most_values,
                      "{}: has more than {} values beside vocab and merges, the limit", where_, most_values);
  }

  bool value(Json v) {
    if (in_ == In::vocabulary)
      refuse("model.vocab: the number of '" + shown(token_) + "' is " + shown(v.dump(-1, ' ', true)) +
             ", not an integer from 0");
    if (in_ != In::nothing)
      refuse("model.merges: holds " + shown(v.dump(-1, ' ', true)) + ", not two tokens");
    if (level_ == 0) refuse("holds " + std::string(v.type_name()) + ", not an object");
    count();
    if (second_) return true;
    if (tree_.open())
      tree_.add(std::move(v));
    else
      keep(std::move(v));
    return true;
  }

  bool start(Json empty) {
    if (in_ == In::vocabulary)
      refuse("model.vocab: the number of '" + shown(token_) + "' is " + empty.type_name());
    if (in_ == In::merges) {
      if (!empty.is_array()) refuse("model.merges: holds an object, not two tokens");
      in_ = In::merge;
      parts_ = 0;
      return true;
    }
    if (in_ == In::merge)
      refuse("model.merges: a merge holds " + std::string(empty.type_name()) + ", not two tokens");
    if (level_ == 0 && !empty.is_object())
      refuse("holds " + std::string(empty.type_name()) + ", not an object");
    if (tree_.open() || (level_ > 0 && !opens_model(empty))) {
      if (!tree_.open() && in_model() && (key_ == "vocab" || key_ == "merges")) {
        open_table(empty);
        return true;
      }
      count();
      tree_.begin(std::move(empty));
      return true;
    }
    ++level_;
    return true;
  }
  bool opens_model(const Json& empty) const {
    return level_ == 1 && section_ == "model" && empty.is_object();
  }

  void open_table(const Json& empty) {
    if (key_ == "vocab") {
      if (!empty.is_object())
        refuse("model.vocab is no object of tokens and their numbers; the model BPE has one");
      in_ = In::vocabulary;
      file_.has_vocabulary = true;
    } else {
      if (!empty.is_array()) refuse("model.merges is no array");
      in_ = In::merges;
      merges_wait_ = !file_.has_vocabulary;
      file_.has_merges = true;
    }
  }

  bool end() {
    if (in_ == In::merge) {
      if (parts_ != 2) refuse("model.merges: a merge of " + std::to_string(parts_) + " tokens, not two");
      merge(pair_[0], pair_[1]);
      in_ = In::merges;
    } else if (in_ != In::nothing) {
      in_ = In::nothing;
    } else if (tree_.open()) {
      if (tree_.end()) keep(tree_.take());
    } else {
      --level_;
    }
    return true;
  }

  void keep(Json v) {
    if (second_) return;
    if (in_model())
      file_.model[key_] = std::move(v);
    else
      file_.sections[section_] = std::move(v);
  }

  void token(std::uint64_t id) {
    if (second_) return;
    Vocabulary& v = file_.vocabulary;
    check<ValueError>(v.size() < most_tokens, "{}: model.vocab has more than {} tokens, the limit", where_,
                      most_tokens);
    check<ValueError>(v.bytes() + token_.size() <= most_token_bytes,
                      "{}: the tokens of model.vocab have more than {} bytes, the limit", where_,
                      most_token_bytes);
    check<ValueError>(id < most_id, "{}: model.vocab: the number of '{}' is {}; the limit is {}", where_,
                      shown(token_), id, most_id - 1);
    if (token_.empty()) refuse("model.vocab: a token without text");
    if (!v.add(token_, static_cast<Id>(id)))
      fail<ValueError>("{}: model.vocab: '{}' or its number {} is there twice", where_, shown(token_), id);
  }

  void merge_part(const std::string& text) {
    if (in_ == In::merge) {
      if (parts_ < 2) pair_[parts_] = text;
      ++parts_;
      return;
    }
    if (text.starts_with("#version")) return;
    const std::size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
      refuse("model.merges: '" + shown(text) + "' is not two tokens with a space between them");
    merge(text.substr(0, space), text.substr(space + 1));
  }

  void merge(const std::string& left, const std::string& right) {
    check<ValueError>(merges_ < most_merges, "{}: model.merges has more than {} merges, the limit", where_,
                      most_merges);
    const std::uint32_t rank = merges_++;
    if (merges_wait_) return;
    const auto id_of = [&](const std::string& text) {
      const std::optional<Id> id = file_.vocabulary.find(text);
      check<ValueError>(id.has_value(),
                        "{}: model.merges: the token '{}' of '{}' and '{}' is not in model.vocab", where_,
                        shown(text), shown(left), shown(right));
      return *id;
    };
    const Id first = id_of(left), second = id_of(right);
    file_.merges.set(first, second, {rank, id_of(left + right)});
  }

  JsonFile& file_;
  const std::string& where_;
  bool second_;
  In in_ = In::nothing;
  int level_ = 0;  // 1: among sections; 2: in the model
  std::string section_, key_, token_;
  std::set<std::string> seen_;
  std::array<std::string, 2> pair_;
  std::size_t parts_ = 0, values_ = 0;
  std::uint32_t merges_ = 0;
  bool merges_wait_ = false;
  Tree tree_;
};

}  // namespace

JsonFile parse_json_file(std::string_view text, const std::string& where) {
  check_json_shape(text, where);
  JsonFile file;
  Reader first(file, where, false);
  Json::sax_parse(text, &first);
  if (first.merges_wait() && file.has_vocabulary) {
    Reader second(file, where, true);
    Json::sax_parse(text, &second);
  }
  return file;
}

}  // namespace sherd::nn::tokens
