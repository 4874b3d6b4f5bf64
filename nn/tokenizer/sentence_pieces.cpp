#include "nn/tokenizer/sentence_pieces.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/tokenizer/bytes.h"
#include "nn/tokenizer/wire.h"
#include "runtime/error.h"
#include "runtime/shown.h"

namespace sherd::nn::tokens {
namespace {

constexpr std::string_view space_symbol = "\xE2\x96\x81";  // U+2581
constexpr std::size_t longest_piece = 512, most_cuts = std::size_t{1} << 22,
                      most_defined_bytes = std::size_t{1} << 20;

enum class PieceType : std::uint8_t { normal = 1, unknown, control, user_defined, unused, byte };

struct Piece {
  float score = 0;
  PieceType type = PieceType::normal;
};

/// What a model says beside its pieces, as far as it bears on a result.
struct Specs {
  std::uint64_t model_type = 1;  // Unigram
  bool byte_fallback = false, space_behind = false;
  bool dummy_prefix = true, remove_extra = true, escape = true;
  std::string bos = "<s>", eos = "</s>", unknown_text = " \xE2\x81\x87 ";
};

class ModelReader {
 public:
  explicit ModelReader(const std::string& where) : where_(where) {}

  std::unique_ptr<Pipeline> run(std::string_view file) {
    for (Wire model(file, where_); model.next();) {
      if (model.field() == 1) read_piece(model.bytes());
      if (model.field() == 2) read_trainer(model.bytes());
      if (model.field() == 3) read_normalizer(model.bytes());
      if (model.field() == 5) read_denormalizer(model.bytes());
    }
    check_specs();
    make_normalizer();
    make_encoding();
    make_decoding();
    return std::move(parts_);
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const { fail<ValueError>("{}: {}", where_, what); }

  void read_piece(std::string_view message) {
    std::string_view text;
    Piece piece;
    std::uint64_t type = 1;
    for (Wire wire(message, where_); wire.next();) {
      if (wire.field() == 1) text = wire.bytes();
      if (wire.field() == 2) piece.score = wire.real();
      if (wire.field() == 3) type = wire.number();
    }
    const auto id = static_cast<Id>(pieces_.size());
    check<ValueError>(id < most_tokens, "{}: has more than {} pieces, the limit", where_, most_tokens);
    const std::string name = fmt::format("piece {}, '{}'", id, shown(text));
    check<ValueError>(!text.empty() && text.size() <= longest_piece,
                      "{}: {}: has {} bytes; a piece has 1 to {}", where_, name, text.size(), longest_piece);
    check<ValueError>(sound_prefix(text) == text.size(), "{}: {}: is no sound UTF-8", where_, name);
    check<ValueError>(!std::isnan(piece.score), "{}: {}: its score is not a number", where_, name);
    check<ValueError>(
        type >= 1 && type <= 6 && type != 5,
        "{}: {}: is of type {}; supported: 1 (normal), 2 (unknown), 3 (control), 4 (user-defined), 6 (byte)",
        where_, name, type);
    check<ValueError>(parts_->vocabulary.add(text, id), "{}: {}: is there twice", where_, name);
    piece.type = static_cast<PieceType>(type);
    pieces_.push_back(piece);
  }

  void read_trainer(std::string_view message) {
    for (Wire wire(message, where_); wire.next();) switch (wire.field()) {
        case 3:
          specs_.model_type = wire.number();
          break;
        case 24:
          specs_.space_behind = wire.number() != 0;
          break;
        case 35:
          specs_.byte_fallback = wire.number() != 0;
          break;
        case 44:
          specs_.unknown_text = wire.bytes();
          break;
        case 46:
          specs_.bos = wire.bytes();
          break;
        case 47:
          specs_.eos = wire.bytes();
          break;
        default:
          break;
      }
  }

  void read_normalizer(std::string_view message) {
    std::string_view map, name;
    for (Wire wire(message, where_); wire.next();) switch (wire.field()) {
        case 1:
          name = wire.bytes();
          break;
        case 2:
          map = wire.bytes();
          break;
        case 3:
          specs_.dummy_prefix = wire.number() != 0;
          break;
        case 4:
          specs_.remove_extra = wire.number() != 0;
          break;
        case 5:
          specs_.escape = wire.number() != 0;
          break;
        default:
          break;
      }
    check<ValueError>(map.empty(), "{}: the normalizer '{}' maps characters; supported: identity", where_,
                      shown(name));
  }

  void read_denormalizer(std::string_view message) {
    for (Wire wire(message, where_); wire.next();)
      check<ValueError>(wire.field() != 2 || wire.bytes().empty(),
                        "{}: a denormalizer that maps characters is not supported", where_);
  }

  void check_specs() const {
    check<ValueError>(!pieces_.empty(), "{}: has no pieces", where_);
    static constexpr std::array<std::string_view, 5> types = {"", "unigram", "bpe", "word", "char"};
    check<ValueError>(specs_.model_type == 2, "{}: its model is of the type {}; supported: bpe", where_,
                      specs_.model_type >= 1 && specs_.model_type < types.size()
                          ? types[specs_.model_type]
                          : std::to_string(specs_.model_type));
    check<ValueError>(specs_.unknown_text.size() <= longest_piece,
                      "{}: the text of the piece of the type unknown has more than {} bytes, the limit",
                      where_, longest_piece);
  }

  Id only_unknown() const {
    std::optional<Id> found;
    for (Id id = 0; id < pieces_.size(); ++id) {
      if (pieces_[id].type != PieceType::unknown) continue;
      check<ValueError>(!found, "{}: pieces {} and {} are both of the type unknown", where_, *found, id);
      found = id;
    }
    check<ValueError>(found.has_value(), "{}: no piece is of the type unknown", where_);
    return *found;
  }

  void make_normalizer() {
    parts_->malformed = Malformed::bytes;
    const std::string symbol(specs_.escape ? space_symbol : " ");
    parts_->normalizer.add(Spaces{specs_.remove_extra, specs_.dummy_prefix, specs_.space_behind, symbol});
  }

  void make_encoding() {
    BpeOptions options{.unknown = only_unknown(), .fuse_unknown = true};
    if (specs_.byte_fallback) {
      options.byte_fallback.emplace();
      for (int byte = 0; byte < 256; ++byte) {
        const std::string token = byte_token(static_cast<unsigned char>(byte));
        const std::optional<Id> id = parts_->vocabulary.find(token);
        check<ValueError>(id && pieces_[*id].type == PieceType::byte,
                          "{}: the piece {} of byte_fallback is missing", where_, token);
        (*options.byte_fallback)[static_cast<std::size_t>(byte)] = *id;
      }
    }
    std::vector<AddedToken> defined;
    std::size_t bytes = 0;
    for (Id id = 0; id < pieces_.size(); ++id) {
      if (pieces_[id].type != PieceType::user_defined) continue;
      defined.push_back({.content = std::string(parts_->vocabulary.text(id)), .id = id});
      bytes += defined.back().content.size();
      check<ValueError>(bytes <= most_defined_bytes,
                        "{}: its user-defined pieces have more than {} bytes, the limit", where_,
                        most_defined_bytes);
    }
    parts_->normalized = AddedTokens(std::move(defined));
    parts_->bpe.emplace(parts_->vocabulary, merges(), options);
  }

  bool is_normal(Id id) const { return pieces_[id].type == PieceType::normal; }

  /// A part of a piece as a symbol: a piece, or a character that is none.
  std::optional<Symbol> symbol_of(std::string_view part) const {
    const std::optional<Id> id = parts_->vocabulary.find(part);
    if (id && is_normal(*id)) return *id;
    const Character c = first_character(part);
    if (c.bytes != part.size()) return {};
    return id ? *id : bare_character(c.code);
  }

  /// Any two parts of a piece merge to it; the piece of the highest score goes first.
  Merges merges() const {
    std::vector<float> scores;
    for (Id id = 0; id < pieces_.size(); ++id)
      if (is_normal(id)) scores.push_back(pieces_[id].score);
    std::ranges::sort(scores, std::greater<>());
    scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
    Merges merges;
    std::size_t cuts = 0;
    for (Id id = 0; id < pieces_.size(); ++id) {
      if (!is_normal(id)) continue;
      const auto place = std::ranges::lower_bound(scores, pieces_[id].score, std::greater<>());
      const Merge merge{static_cast<std::uint32_t>(place - scores.begin()), id};
      const std::string_view text = parts_->vocabulary.text(id);
      for (std::size_t at = first_character(text).bytes; at < text.size();
           at += first_character(text.substr(at)).bytes) {
        check<ValueError>(++cuts <= most_cuts, "{}: its pieces have more than {} characters, the limit",
                          where_, most_cuts);
        const std::optional<Symbol> left = symbol_of(text.substr(0, at)), right = symbol_of(text.substr(at));
        if (!left || !right) continue;
        merges.set(*left, *right, merge);
        check<ValueError>(merges.size() <= most_merges,
                          "{}: its pieces merge in more than {} ways, the limit", where_, most_merges);
      }
    }
    return merges;
  }

  void make_decoding() {
    DecoderRules rules{.byte_tokens = UnsoundRun::characters, .leading_symbol = std::string(space_symbol)};
    rules.all_leading = specs_.remove_extra;
    rules.leading_is_taken = specs_.dummy_prefix || specs_.remove_extra;
    parts_->decoder = Decoder(std::move(rules));
    parts_->make_texts();
    for (Id id = 0; id < pieces_.size(); ++id) {
      TokenText& text = parts_->texts[id];
      switch (pieces_[id].type) {
        case PieceType::control:
          text = {.text = "", .in_front = false};
          parts_->special[id] = true;
          break;
        case PieceType::unknown:
          text = {.text = specs_.unknown_text, .in_front = false};
          break;
        case PieceType::byte:
          if (!text.byte)
            fail<ValueError>("{}: piece {}, '{}': is of the type byte, and named as none", where_, id,
                             shown(parts_->vocabulary.text(id)));
          break;
        case PieceType::normal:
        case PieceType::user_defined:
        case PieceType::unused:
          text.byte.reset();
          break;
      }
    }
    const auto control = [&](const std::string& name) {
      const std::optional<Id> id = parts_->vocabulary.find(name);
      return id && pieces_[*id].type == PieceType::control ? id : std::nullopt;
    };
    parts_->bos = control(specs_.bos);
    parts_->eos = control(specs_.eos);
  }

  const std::string& where_;
  Specs specs_;
  std::vector<Piece> pieces_;
  std::unique_ptr<Pipeline> parts_ = std::make_unique<Pipeline>();
};

}  // namespace

std::unique_ptr<Pipeline> read_sentence_pieces(std::string_view file, const std::string& where) {
  return ModelReader(where).run(file);
}

}  // namespace sherd::nn::tokens
