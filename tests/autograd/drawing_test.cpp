// Programs as drawings.
#include <regex>

#include "autograd/autograd.h"
#include "autograd/compile.h"
#include "runtime/apply.h"
#include "runtime/ops.h"
#include "tests/autograd/random_step.h"
#include "tests/catch.h"

using namespace sherd;
using namespace sherd::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Whether every tag is closed in its order, and text has no bare < > & or ".
bool well_formed(const std::string& svg) {
  static const std::regex attributes(R"re(( [a-zA-Z]+="[^"<>&]*")*)re"), entity("&(amp|lt|gt|quot);");
  std::vector<std::string> open;
  for (std::size_t at = 0; at < svg.size();) {
    if (svg[at] != '<') {
      const std::size_t end = std::min(svg.find('<', at), svg.size());
      const std::string text = std::regex_replace(svg.substr(at, end - at), entity, "");
      if (text.find_first_of("<>&\"") != std::string::npos) return false;
      at = end;
      continue;
    }
    const std::size_t end = svg.find('>', at);
    if (end == std::string::npos) return false;
    std::string tag = svg.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag.starts_with("/")) {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
      continue;
    }
    const bool closed = tag.ends_with("/");
    if (closed) tag.pop_back();
    const std::string name = tag.substr(0, tag.find(' '));
    if (!std::regex_match(tag.substr(name.size()), attributes)) return false;
    if (!closed) open.push_back(name);
  }
  return open.empty() && svg.starts_with("<svg ");
}

std::size_t count(const std::string& text, const std::string& what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

struct Odd {
  static constexpr std::string_view name = "a<b>&\"c\"";
  static constexpr bool differentiable = false;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const { copy_(out[0], in[0]); }
  bool operator==(const Odd&) const = default;
};
struct AmongRanks {
  static constexpr std::string_view name = "among_ranks";
  static constexpr bool differentiable = false, among_ranks = true;
  Specs infer(SpecSpan in) const { return {in[0]}; }
  void run(Inputs in, Outputs out) const { copy_(out[0], in[0]); }
  bool operator==(const AmongRanks&) const = default;
};

}  // namespace

TEST_CASE("drawing: each op stands once, in order, marked by what it does") {
  const Tensor found = zeros({2, 3});
  const Program program = capture(
      [&](std::span<const Tensor> in) {
        const Tensor y = exp(transpose(in[0], 0, 1));
        add_(found, 1);
        return std::vector<Tensor>{apply(AmongRanks{}, tanh(y)), add(found, in[0])};
      },
      {ones({2, 3})});
  const std::string svg = to_svg(program);
  INFO(svg);
  CHECK(well_formed(svg));
  std::size_t at = 0;
  for (const char* op : {">input %x0 : f32 (2, 3)<", ">outside %p0 : f32 (2, 3)<", "= permute[", "= exp(",
                         "= add_[", "= tanh(", "= among_ranks(", "= add(", ">return %"}) {
    CHECK(count(svg, op) == 1);
    const std::size_t next = svg.find(op);
    CHECK(next > at);
    at = next;
  }
  CHECK(count(svg, "<g class=\"op") == program.size());
  CHECK(count(svg, "<g class=\"op write\">") == 1);
  CHECK(count(svg, "<g class=\"op call\">") == 1);
  CHECK(count(svg, "<g class=\"op view\">") == 1);
  // An edge for each value that is read: by six ops, one of which reads two, and by the caller two.
  CHECK(count(svg, "<path ") == 9);
  CHECK(count(svg, "<title>%x0 : f32 (2, 3)</title>") == 2);
  CHECK(svg.find("http") == svg.find("http://www.w3.org/2000/svg"));
  CHECK(count(svg, "http") == 1);
}

TEST_CASE("drawing: what an op is called is no markup") {
  const Program program = capture(
      [](std::span<const Tensor> in) { return std::vector<Tensor>{apply(Odd{}, in[0])}; }, {ones({2})});
  const std::string svg = to_svg(program);
  CHECK(well_formed(svg));
  CHECK_THAT(svg, ContainsSubstring("= a&lt;b&gt;&amp;&quot;c&quot;(%x0)"));
}

TEST_CASE("drawing: random programs, compiled ones with their halves") {
  for (unsigned seed = 0; seed < 40; ++seed) {
    INFO("program " << seed);
    const RandomStep step(seed, Writes::never);
    const Program program = capture(step, {ones({4, 6}), ones({4, 6})});
    CHECK(well_formed(to_svg(program)));
    CHECK(count(to_svg(program), "<g class=\"op") == program.size());
    const Compiled compiled = compile(step);
    std::vector<Tensor> in{ones({4, 6}), ones({4, 6})};
    for (Tensor& x : in) x.requires_grad_();
    Tensor total = sum(in[0]);
    for (const Tensor& y : compiled(in)) total = add(total, sum(y));
    total.backward();
    const std::vector<std::string> drawings = compiled.drawings();
    const std::vector<std::size_t> ops = compiled.stats().ops;
    REQUIRE(drawings.size() == ops.size());
    for (std::size_t i = 0; i < ops.size(); ++i) {
      CHECK(well_formed(drawings[i]));
      CHECK(count(drawings[i], "<g class=\"op") == ops[i]);
    }
  }
}
