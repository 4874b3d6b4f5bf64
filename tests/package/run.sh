#!/usr/bin/env bash
# Installs the library and builds examples/embed against it from outside, as its users would:
#   run.sh SOURCE BUILD WORK LIBRARIES     LIBRARIES: what the build made: shared, static or both
# Each way to build is one test; all run, and the counts come last.
set -u
source=$1 build=$2 work=$3 libraries=$4
rm -rf "$work"
mkdir -p "$work"
. "$source/tests/package/ways.sh"

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

libdir_of() { [[ $1 == static ]] && echo "$work/stage-static$inside" || echo "$work/stage$inside"; }
built() { [[ $libraries == both || $libraries == "$1" ]]; }

# An application is told to compile with what the headers need, and no more; and none of what stays inside has to be there.
flags_are_few() {  # library
  local dir=$work/flags-$1 package=sherd flags
  [[ $1 == shared ]] || package=sherd-static
  mkdir "$dir"
  cp "$(pkg-config --variable=pcfiledir fmt)/fmt.pc" "$dir"
  local -x PKG_CONFIG_LIBDIR=$(libdir_of "$1")/pkgconfig:$dir
  flags_into flags --cflags $package
  echo "${flags[@]}"
  for flag in "${flags[@]}"; do
    [[ " $(pkg-config --cflags fmt) " == *" $flag "* || $(readlink -e "${flag#-I}") == "$(readlink -e "$(libdir_of "$1")/../../include/sherd")" ]]
  done
}

# With a spdlog of its own, of headers alone, which is another than the library's.
with_spdlog() {  # library
  local dir=$work/spdlog-$1 static= flags libs
  local -x PKG_CONFIG_PATH=$(libdir_of "$1")/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  mkdir "$dir"
  cat >"$dir/main.cpp" <<'END'
#include <sherd.h>
#include <spdlog/spdlog.h>
#ifdef SPDLOG_COMPILED_LIB
#error "this is the spdlog that sherd links"
#endif
int main() {
  const double sum = sherd::sum(sherd::ones({3})).item();
  spdlog::info("sum {}", sum);
  return sum == 3 ? 0 : 1;
}
END
  # Beside no shared library the static one is linked for -lsherd.
  [[ $1 == shared ]] || static=--static
  flags_into flags $static --cflags sherd
  flags_into libs $static --libs sherd
  "${compile[@]}" -c "$dir/main.cpp" -o "$dir/main.o" "${flags[@]}"
  "${cxx[@]}" "$dir/main.o" -o "$dir/main" "${libs[@]}" "-Wl,-rpath,$(libdir_of "$1")"
  run_linked "$1" "$dir/main"
}

# As a subproject, of one kind: configured, and its plan read. What it would compile is what the build above compiled.
as_subproject() {
  local dir=$work/subproject plan targets
  cp -r "$source/examples/embed" "$dir"
  mkdir "$dir/subprojects"
  ln -s "$source" "$dir/subprojects/sherd"
  meson setup "$dir/build" "$dir" --force-fallback-for=sherd -Dbuildtype=plain -Dsherd:cpu_arch= -Dsherd:cuda=disabled \
    -Dsherd:default_library=static
  plan=$(meson introspect --targets "$dir/build" | tr ',' '\n')
  targets=$(sed -n 's/.*"name": "\([^"]*\)".*/\1/p' <<<"$plan")
  grep -qx embed <<<"$targets"
  # Tests and tools stay at home in a subproject.
  none_of '_test$' <<<"$targets"
  [[ $(grep -cx sherd <<<"$targets") == 1 ]]
  grep -q 'libsherd\.a"' <<<"$plan"
  none_of 'libsherd\.so' <<<"$plan"
  ninja -C "$dir/build" -n >/dev/null
}

headers_alone() {
  local dir=$work/headers
  mkdir "$dir"
  cd "$include"
  # Those of runtime/cuda include the CUDA toolkit's, which need not be here.
  find . -name '*.h' -not -path '*/runtime/cuda/*' -printf '%P\n' | while read -r header; do
    echo "#include \"$header\"" >"$dir/${header//\//-}.cpp"
  done
  find "$dir" -name '*.cpp' -print0 |
    xargs -0 -P "$(nproc)" -I{} "${compile[@]}" -Wall -Wextra -Werror -I. -c {} -o {}.o
}

# Not one symbol of a back end may meet an application's own copy.
symbols_stay_inside() {
  local library symbols
  for library in "$work/stage$inside"/libsherd.{so,a}; do
    [[ -e $library ]] || continue
    symbols=$(nm -C --defined-only $([[ $library == *.so ]] && echo -D) "$library" 2>/dev/null)
    none_of '(^|[^_[:alnum:]])Eigen::' <<<"$symbols"
    [[ $library == *.a ]] || none_of 'sherd_eigen|nlohmann' <<<"$symbols"
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
  grep -q -e '-march=x86-64-v4.*sherd_kernels_x86-64-v4' "$dir/compile_commands.json"
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
  "$dir/main" "$(libdir_of shared)/libsherd.so"
  ! readelf -dW "$(libdir_of shared)/libsherd.so" | grep STATIC_TLS
}

for library in shared static; do
  if built $library; then
    three_ways $library
    try "flags-$library" flags_are_few $library
    try "spdlog-$library" with_spdlog $library
  else
    for name in pkg-config meson cmake flags spdlog; do
      skip "$name-$library" "this build has no $library library (-Ddefault_library=both has)"
    done
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

finish
