#include "tests/docs/ops_page.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/backend.h"
#include "runtime/op.h"
#include "runtime/ops/elementwise_list.h"
#include "runtime/ops/list.h"
#include "tests/docs/header.h"

namespace sherd::test {

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

/// What is known of an op of the lists.
struct Op {
  std::string type, name, kind, gradient;
  bool own_kernels;  ///< entered one by one; kernels of elementwise ops come from the functor
  bool everywhere;   ///< runs without a kernel: a view, a `run` of its own
  bool reference;
};

template <class O>
std::string type_of() {
  const std::string text = __PRETTY_FUNCTION__, before = "O = sherd::ops::";
  const std::size_t begin = text.find(before) + before.size();
  static const std::regex space("sherd::ops::");  // of a template's arguments
  return std::regex_replace(text.substr(begin, text.find_first_of(";]", begin) - begin), space, "");
}

template <class O>
std::string gradient_of() {
  if constexpr (NotDifferentiable<O>)
    return "no";
  else if constexpr (HasReference<O> && !HasGrad<O>)
    return "of the reference";
  else
    return "yes";
}

std::vector<Op> all_ops() {
  std::vector<Op> ops;
  const auto elementwise = [&]<class O>() {
    ops.push_back({type_of<O>(), std::string(O::name), "elementwise", gradient_of<O>(), false, false, false});
  };
  ops::UnaryOps::for_each(elementwise);
  ops::ArithmeticOps::for_each(elementwise);
  ops::ComparisonOps::for_each(elementwise);
  elementwise.operator()<ops::Where>();
  ops::for_each_structural([&]<class O>() {
    ops.push_back({type_of<O>(), std::string(O::name),
                   ViewOp<O>         ? "structural, a view"
                   : HasReference<O> ? "fused"
                                     : "structural",
                   gradient_of<O>(), true, ViewOp<O> || RunsItself<O>, HasReference<O>});
  });
  return ops;
}

/// A function of a public header, with its overloads.
struct Function {
  std::string name;
  std::vector<std::string> declarations;
  std::string meaning;
};
struct Section {
  std::string title;
  std::vector<Function> functions;
};

/// The functions that a header declares, under its lines `// ---- title`.
std::vector<Section> sections_of(const fs::path& header, const std::string& title) {
  std::vector<Section> sections{{title, {}}};
  for (const Declaration& d : declarations_of(header)) {
    if (d.kind == Declaration::Kind::section) sections.push_back({d.name, {}});
    if (d.kind != Declaration::Kind::function || !d.text.starts_with("SHERD_API ")) continue;
    const std::string text = d.text.substr(std::string("SHERD_API ").size());
    if (text.starts_with("Tensor operator")) continue;  // the page has the functions that they call
    std::vector<Function>& functions = sections.back().functions;
    const auto same = std::ranges::find(functions, d.name, &Function::name);
    Function& function = same != functions.end() ? *same : functions.emplace_back(Function{d.name, {}, {}});
    function.declarations.push_back(text + ";");
    if (!d.comment.empty()) function.meaning += (function.meaning.empty() ? "" : " ") + d.comment;
  }
  std::erase_if(sections, [](const Section& s) { return s.functions.empty(); });
  return sections;
}

/// What the files of ops say of each type: the comment before it, or at the head of a file with one op.
std::map<std::string, std::string> meanings(const fs::path& root) {
  std::map<std::string, std::string> found;
  static const std::regex opens(R"(^struct (?:SHERD_API )?(\w+)(?: : .*)? \{)");
  for (const fs::path& file : files_in(root / "runtime/ops")) {
    if (file.extension() != ".h") continue;
    std::string head, comment;
    bool in_head = true;
    for (const std::string& line : lines_of(file)) {
      std::smatch match;
      if (in_head && line.starts_with("// "))
        head += (head.empty() ? "" : " ") + line.substr(3);
      else
        in_head = false;
      if (line.starts_with("/// ")) {
        comment += (comment.empty() ? "" : " ") + line.substr(4);
        continue;
      }
      if (std::regex_search(line, match, opens)) {
        found[match[1]] = comment.empty() ? head : comment;
        head.clear();  // of the file's first op
      }
      if (!line.starts_with("template <")) comment.clear();
    }
  }
  return found;
}

const std::string& comment_of(const std::map<std::string, std::string>& meaning, const std::string& type) {
  const auto found = meaning.find(type.substr(0, type.find('<')));
  if (found == meaning.end())
    throw std::runtime_error("no header in runtime/ops opens `struct " + type + " {`");
  return found->second;
}

/// Headers with public functions, in the order of the page; those of ops.h have titles of their own.
constexpr std::pair<const char*, const char*> headers[] = {
    {"runtime/ops.h", ""},        {"runtime/indexing.h", "indexing"},   {"runtime/images.h", "images"},
    {"runtime/order.h", "order"}, {"runtime/distances.h", "distances"}, {"runtime/losses.h", "losses"}};

std::vector<Section> public_functions(const fs::path& root) {
  std::vector<Section> all;
  for (const auto& [header, title] : headers)
    std::ranges::move(sections_of(root / header, title), std::back_inserter(all));
  return all;
}

/// What these headers' functions take and give: structs and words.
std::string options(const fs::path& root) {
  std::string out;
  for (const auto& [header, title] : headers)
    for (const Declaration& d : declarations_of(root / header))
      if (d.kind == Declaration::Kind::type || d.kind == Declaration::Kind::enumeration)
        out += entry(d, "###");
  return out;
}

std::string dtypes() {
  std::string out;
  for (int i = 0; i < dtype_count; ++i) {
    const auto& table = sherd::detail::dtype_table;
    out += "| " + code(table.all[i] == DType::boolean ? "boolean" : std::string(table.names[i])) + " | " +
           code(std::string(table.names[i])) + " | " + std::string(table.long_names[i]) + " | " +
           std::to_string(table.sizes[i]) + " |\n";
  }
  return out;
}

}  // namespace

std::set<std::string> kernels_in_sources(const fs::path& root, const std::string& backend) {
  std::set<std::string> types;
  static const std::regex row(R"((?:kernel_row<ops::(?=\w+>\(\)\.set\()|add_list_step<ops::)(\w+)>\()"),
      add(R"(add_kernel<(\w+)>\()");
  for (const fs::path& file : files_in(root / "runtime" / backend)) {
    if (file.extension() != ".cpp" && file.extension() != ".cu") continue;
    const std::string text = text_of(file);
    for (std::sregex_iterator at(text.begin(), text.end(), row), end; at != end; ++at) types.insert((*at)[1]);
    if (text.find("ops::SummedLosses::for_each(") != std::string::npos)
      ops::SummedLosses::for_each([&]<class Loss>() {
        for (const char* op : {"LossTotal<", "LossTotalGrad<"}) types.insert(op + type_of<Loss>() + ">");
      });
    for (std::sregex_iterator at(text.begin(), text.end(), add), end; at != end; ++at) {
      const std::regex kernel("void " + (*at)[1].str() + R"(\(const ops::(\w+)&)");
      std::smatch match;
      if (!std::regex_search(text, match, kernel))
        throw std::runtime_error(file.string() + ": no kernel " + (*at)[1].str());
      types.insert(match[1]);
    }
  }
  types.erase("Where");                                                        // elementwise
  for (const char* made : {"FusedRegion", "FusedProduct"}) types.erase(made);  // in no list: passes make them
  return types;
}

std::set<std::string> kernels_in_table() {
  sherd::backend(DeviceType::cpu);  // fills its part of the table
  std::set<std::string> types;
  ops::for_each_structural([&]<class O>() {
    if (kernel_row<O>().on(DeviceType::cpu) != nullptr) types.insert(type_of<O>());
  });
  return types;
}

std::string ops_page(const fs::path& root) {
  const std::vector<Op> ops = all_ops();
  const std::map<std::string, std::string> meaning = meanings(root);
  const std::set<std::string> cpu = kernels_in_sources(root, "cpu"), cuda = kernels_in_sources(root, "cuda");
  std::ostringstream out;
  out << R"(# Ops

Made of the lists of ops (`runtime/ops/list.h`, `runtime/ops/elementwise_list.h`) and of the comments in the headers by `tests/docs/print_ops`; a test compares. Do not edit it.

## Functions

What a program calls. Operators (`+`, `==`, `+=`, ...) call the functions of their meaning, `x[...]` is `index` and `index_put_`. The kinds are those of `design.md`; a *composed* function is one of other ops,
and has their gradients on their devices. Functions with a gradient have a second one too, where nothing else is said. A name that ends in `_` writes its first argument.
Comparisons with NaN are false, but `not_equal`; what gives integers (`floor`, `ceil`, `round`, `trunc`, `sign`) has gradients of 0.
)";
  for (const Section& section : public_functions(root)) {
    out << "\n### " << section.title << "\n\n| function | kind | gradient | |\n|---|---|---|---|\n";
    for (const Function& f : section.functions) {
      const auto named = [&](const std::string& name) { return std::ranges::find(ops, name, &Op::name); };
      auto op = named(f.name);
      if (op == ops.end() && f.name.ends_with("_")) op = named(f.name.substr(0, f.name.size() - 1));
      const bool known = op != ops.end();
      std::string declarations;
      for (const std::string& d : f.declarations)
        declarations += (declarations.empty() ? "" : "<br>") + code(d);
      std::string what = f.meaning;
      if (what.empty() && known) what = comment_of(meaning, op->type);
      const bool takes_tensors = declarations.find("(const Tensor") != std::string::npos ||
                                 declarations.find("span<const Tensor>") != std::string::npos;
      const bool none = what.find("no gradient") != std::string::npos;
      out << "| " << declarations << " | " << (known ? op->kind : "composed") << " | "
          << (none || !takes_tensors ? "no"
              : known                ? op->gradient
                                     : "of its ops")
          << " | " << cell(what) << " |\n";
    }
  }
  out << R"(
## Dtypes

`DType::f32`, or `f32` for short. Integers have no other sizes, and there are no complex numbers; 8-bit floats are inside
`linear_fp8` and in files of models alone.

| constant | in texts | PyTorch's messages | bytes |
|---|---|---|---|
)" << dtypes()
      << R"(
## Options

What functions take beside tensors and numbers. A struct is shown as one writes it, with its members in the order that
C++ wants and with their defaults; leave out what shall keep them.
)" << options(root)
      << R"(
## Ops

What `apply` runs: each has one type in `sherd::ops`, under which an application may enter kernels of its own. Where a device has no kernel of an op its reference runs, which is made of other ops; `-` is an op that needs neither: a view, or one that runs itself by other ops.
Elementwise ops are one functor for all devices. Ops in **bold** are the primitives, to which all others come down beside the elementwise ones.

| op | kind | gradient | CPU | CUDA | |
|---|---|---|---|---|---|
)";
  std::set<std::string> primitives;
  ops::Primitives::for_each([&]<class O>() { primitives.insert(type_of<O>()); });
  for (const Op& op : ops) {
    const auto on = [&](const std::set<std::string>& kernels) {
      return !op.own_kernels || kernels.contains(op.type) ? "kernel"
             : op.everywhere                              ? "-"
             : op.reference                               ? "reference"
                                                          : "no";
    };
    const std::string mark = primitives.contains(op.type) ? "**" : "";
    out << "| " << mark << code(op.type) << mark << " | " << op.kind << " | " << op.gradient << " | "
        << on(cpu) << " | " << on(cuda) << " | " << cell(comment_of(meaning, op.type)) << " |\n";
  }
  return std::move(out).str();
}

}  // namespace sherd::test
