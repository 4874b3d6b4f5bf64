#!/usr/bin/env bash
# Installs the library and builds examples/embed against it from outside, as its users would:
#   run.sh SOURCE BUILD WORK LIBRARIES     LIBRARIES: what the build made: shared, static or both
# Each way to build is one test; all run, and the counts come last.
set -u
source=$1 build=$2 work=$3 libraries=$4
passed=0 failed=0 skipped=0

# The outer build's settings must not reach the builds in here.
unset CFLAGS CXXFLAGS LDFLAGS DESTDIR MAKEFLAGS
rm -rf "$work"
mkdir -p "$work"

try() {  # name command...
  local name=$1 start=$SECONDS log="$work/$1.log"
  shift
  # Not inside the `if`: there `set -e` would be ignored.
  (set -e; "$@") >"$log" 2>&1
  if (($? == 0)); then
    echo "passed: $name ($((SECONDS - start)) s)"
    ((passed += 1))
  else
    echo "failed: $name"
    tail -n 40 "$log"
    ((failed += 1))
  fi
}
skip() {
  echo "skipped: package $1: $2"
  ((skipped += 1))
}

# One prefix has both libraries, so a second one without the shared library shows that the static one suffices.
DESTDIR=$work/stage meson install -C "$build" --no-rebuild --quiet >"$work/install.log" 2>&1 || {
  cat "$work/install.log"
  echo "sherd-tests: 0 passed, 1 failed, 0 skipped"
  exit 1
}
config=$(find "$work/stage" -name sherd.pc)
libdir=$(dirname "$(dirname "$config")")
inside=${libdir#"$work/stage"}
include=$(dirname "$(find "$work/stage" -name sherd.h)")
cp -r "$work/stage" "$work/stage-static"
rm -f "$work/stage-static$inside"/libsherd.so*

prefix_of() { [[ $1 == static ]] && echo "$work/stage-static$inside" || echo "$work/stage$inside"; }
built() { [[ $libraries == both || $libraries == "$1" ]]; }

run_embed() {  # library program
  [[ $1 == shared || -z $(ldd "$2" | grep libsherd) ]]
  LD_LIBRARY_PATH=$(prefix_of "$1") "$2"
}

# With flags of its own, of which Eigen's layouts depend on one.
with_pkg_config() {  # library
  local dir=$work/pkg-config-$1 flags
  local -x PKG_CONFIG_PATH=$(prefix_of "$1")/pkgconfig
  mkdir "$dir"
  flags=$(pkg-config $([[ $1 == static ]] && echo --static) --cflags --libs sherd eigen3)
  "${CXX:-c++}" -std=c++20 -O1 -DEIGEN_MAX_ALIGN_BYTES=16 "$source/examples/embed/main.cpp" -o "$dir/embed" $flags
  run_embed "$1" "$dir/embed"
}

with_cmake() {  # library
  local dir=$work/cmake-$1
  cmake -G Ninja -S "$source/examples/embed" -B "$dir" -DCMAKE_BUILD_TYPE=Release \
    -Dsherd_DIR="$(prefix_of "$1")/cmake/sherd" -Dsherd_USE_STATIC_LIBS="$([[ $1 == static ]] && echo ON || echo OFF)"
  cmake --build "$dir"
  run_embed "$1" "$dir/embed"
}

# As a dependency that Meson finds installed: one build of the library serves.
with_meson() {  # library
  local dir=$work/meson-$1
  local -x PKG_CONFIG_PATH=$(prefix_of "$1")/pkgconfig
  cp -r "$source/examples/embed" "$dir"
  meson setup "$dir/build" "$dir" -Dbuildtype=plain -Doptimization=1 -Dprefer_static="$([[ $1 == static ]] && echo true || echo false)"
  ninja -C "$dir/build"
  run_embed "$1" "$dir/build/embed"
}

# As a subproject: configured, and its plan read. What it would compile is what the build above compiled.
as_subproject() {
  local dir=$work/subproject targets
  cp -r "$source/examples/embed" "$dir"
  mkdir "$dir/subprojects"
  ln -s "$source" "$dir/subprojects/sherd"
  meson setup "$dir/build" "$dir" --force-fallback-for=sherd -Dbuildtype=plain -Dsherd:cpu_arch= -Dsherd:cuda=disabled
  targets=$(meson introspect --targets "$dir/build" | tr ',' '\n' | sed -n 's/.*"name": "\([^"]*\)".*/\1/p')
  grep -qx sherd <<<"$targets"
  grep -qx embed <<<"$targets"
  # Tests and tools stay at home in a subproject.
  ! grep -E '_test$' <<<"$targets"
  [[ $(grep -cx sherd <<<"$targets") == 1 ]]
  ninja -C "$dir/build" -n >/dev/null
}

headers_alone() {
  cd "$include"
  find . -name '*.h' -printf '%P\n' | xargs -P "$(nproc)" -I{} sh -c \
    'echo "#include \"{}\"" | ${CXX:-c++} -std=c++20 -Wall -Wextra -Werror -I. -fsyntax-only -x c++ -'
}

# Not one symbol of a back end may meet an application's own copy.
symbols_stay_inside() {
  local library symbols
  for library in "$work/stage$inside"/libsherd.{so,a}; do
    [[ -e $library ]] || continue
    symbols=$(nm -C --defined-only $([[ $library == *.so ]] && echo -D) "$library" 2>/dev/null)
    ! grep -E '(^|[^_[:alnum:]])Eigen::' <<<"$symbols"
    [[ $library == *.a ]] || ! grep -E 'sherd_eigen|nlohmann' <<<"$symbols"
  done
}

# The plan of a package with a library for each level of processors; to build it would be to build the library again.
levels_planned() {
  local dir=$work/levels files
  meson setup "$dir" "$source" -Dcpu_arch=x86-64-v2 -Dhwcaps=x86-64-v3,x86-64-v4 -Dcuda=disabled -Dtests=disabled \
    -Dtools=disabled -Dexamples=disabled
  files=$(meson introspect --installed "$dir")
  grep -q 'glibc-hwcaps/x86-64-v3/libsherd.so' <<<"$files"
  grep -q 'glibc-hwcaps/x86-64-v4/libsherd.so' <<<"$files"
  grep -q -e '-march=x86-64-v4.*runtime/cpu/softmax.cpp' "$dir/compile_commands.json"
  ninja -C "$dir" -n >/dev/null
}

# By a program that knows nothing of it, as plugins are loaded: it may ask for none of the memory of threads that the
# system sets aside at the start, of which there is little.
loaded_later() {
  local dir=$work/loaded-later
  mkdir "$dir"
  cat >"$dir/main.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** words) {
  if (count == 2 && dlopen(words[1], RTLD_NOW | RTLD_LOCAL)) return 0;
  puts(dlerror());
  return 1;
}
END
  "${CC:-cc}" "$dir/main.c" -o "$dir/main" -ldl
  "$dir/main" "$(prefix_of shared)/libsherd.so"
  ! readelf -dW "$(prefix_of shared)/libsherd.so" | grep STATIC_TLS
}

for library in shared static; do
  if built $library; then
    try "pkg-config-$library" with_pkg_config $library
    try "meson-$library" with_meson $library
    if command -v cmake >/dev/null; then
      try "cmake-$library" with_cmake $library
    else
      skip "cmake-$library" "cmake is not installed"
    fi
  else
    skip "pkg-config-$library" "this build has no $library library (-Ddefault_library=both has)"
    skip "cmake-$library" "this build has no $library library (-Ddefault_library=both has)"
    skip "meson-$library" "this build has no $library library (-Ddefault_library=both has)"
  fi
done
try subproject as_subproject
try headers headers_alone
try symbols symbols_stay_inside
if [[ $(uname -m) == x86_64 ]]; then
  try levels levels_planned
else
  skip levels "glibc-hwcaps has such levels on x86-64 alone"
fi
if built shared; then
  try loaded-later loaded_later
else
  skip loaded-later "this build has no shared library (-Ddefault_library=both has)"
fi

echo "sherd-tests: $passed passed, $failed failed, $skipped skipped"
((failed == 0))
