#!/bin/bash
# Public headers beside `using namespace std`, with every warning an error, for the build's compiler and the newest clang
# that is here; and which public functions of the headers of ops share a name with the library's std.
# And that the library exports what public classes declare: a program that links it shared calls all of that.
#   run.sh SOURCE_ROOT WORK_FOLDER LIBRARY COMPILER...
set -u
export LC_ALL=C  # messages are read
source=$1 work=$2 library=$3
shift 3
mkdir -p "$work"
passed=0 failed=0 skipped=0
pass() { echo "passed: $1"; passed=$((passed + 1)); }
miss() { echo "FAILED: $1: $2"; failed=$((failed + 1)); }
skip() { echo "skipped: $1: $2"; skipped=$((skipped + 1)); }

warnings=(-std=c++20 -Wall -Wextra -Wno-missing-field-initializers -Werror -pedantic -I"$source" -fsyntax-only)
typical() {  # name, compiler...
  local name=$1 said
  shift
  if said=$("$@" "${warnings[@]}" "$source/tests/names/typical.cpp" 2>&1); then pass "$name"; else miss "$name" "$said"; fi
}

typical "typical use" "$@"

clang=
for version in $(seq 30 -1 15) ''; do
  clang=$(command -v "clang++${version:+-$version}") && break
done
if [[ -z $clang ]]; then
  skip "typical use, clang" "clang is not installed"
elif ! printf '#include <source_location>\nauto here = std::source_location::current();\n' |
  "$clang" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
  skip "typical use, clang" "$clang cannot compile this standard library's <source_location>"
else
  typical "typical use, $clang" "$clang"
fi

# Names that mean a class of std too, so that with both namespaces open a program has to say which. The list is in
# docs/from_pytorch.md; whoever adds a function meets it here.
page=$source/docs/from_pytorch.md
known=$(sed -n 's/^Names that `std` has too: //p' "$page" | grep -o '`[a-z_]*`' | tr -d '`' | sort)
functions=$(sed -nE 's/^(SHERD_API|inline) [A-Za-z_:<>]+ ([a-z_0-9]+)\(.*/\2/p' "$source"/runtime/{ops,indexing,images,order,distances,losses}.h | sort -u)
{
  grep '^#include' "$source/tests/names/typical.cpp"
  echo 'using namespace std; using namespace sherd;'
  for name in $functions; do echo "template <class T> void use_$name(const T& x) { $name(x); }"; done
} >"$work/names.cpp"
said=$("$@" -std=c++20 -I"$source" -fsyntax-only -fmax-errors=0 "$work/names.cpp" 2>&1)
shared=$(sed -nE "s/.*error: reference to .([a-z_0-9]+). is ambiguous.*/\1/p" <<<"$said" | sort -u)
if (($(wc -w <<<"$functions") < 150)); then
  miss "names of std" "only $(wc -w <<<"$functions") functions were found in the headers"
elif grep 'error:' <<<"$said" | grep -qv 'is ambiguous'; then
  miss "names of std" "$(grep 'error:' <<<"$said" | grep -v 'is ambiguous' | head -3)"
elif [[ $shared != "$known" ]]; then
  miss "names of std" "std has $(echo $shared), and docs/from_pytorch.md lists $(echo $known)"
else
  pass "names of std"
fi

# CLASS::MEMBER of functions that the headers declare without a body, and of those that the library keeps (t) or exports (T);
# of overloads those with a body in the header are kept.
declared() {
  (cd "$source" && sed -n 's/^#include "\(.*\)"/\1/p' sherd.h | xargs awk '
    /^(struct|class) .*\{$/ { name = $0; sub(/ (final )?(: .*)?\{$/, "", name); n = split(name, words, " "); inside = words[n]; next }
    /^};/ { inside = "" }
    inside != "" && /^  [^ \/].*\(.*;$/ && !/= (default|delete|0);$/ && !/[{}]/ && !/~/ {
      sub(/\(.*/, ""); n = split($0, words, /[ *&]/); print inside "::" words[n]
    }')
}
members() { sed -nE '/\)( const)?::/d; s/^[0-9a-f]+ '"$1"' sherd::(nn::|shard::)?([A-Z][A-Za-z]*::[a-z_0-9]+)\(.*\)( const)?$/\2/p' "$work/symbols" | sort -u; }
[[ $library == none ]] || nm -C --defined-only "$library" >"$work/symbols"
if [[ $library == none ]]; then
  skip "exports" "the library is built static alone, and exports all"
elif (($(declared | wc -l) < 300)); then
  miss "exports" "only $(declared | wc -l) functions were found in the headers"
elif hidden=$(comm -12 <(declared | sort -u) <(comm -23 <(members t) <(members T))) && [[ $hidden ]]; then
  miss "exports" "public headers declare $(echo $hidden), and the library hides them; SHERD_API on the class or the function"
else
  pass "exports"
fi

echo "sherd-tests: $passed passed, $failed failed, $skipped skipped"
((failed == 0))
