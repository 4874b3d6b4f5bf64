# What the tests of an installed sherd share: counting, and examples/embed built in the three ways. Who sources this
# sets `source` and `work`, and has a function `libdir_of LIBRARY`, shared or static, that prints the folder with it.
passed=0 failed=0 skipped=0

# Settings for another build must not reach the builds in here, nor may the loader be told where to look.
unset CFLAGS CXXFLAGS LDFLAGS DESTDIR MAKEFLAGS LD_LIBRARY_PATH

# A compiler that has seen the same text before need not look again.
read -ra cxx <<<"${CXX:-c++}"  # "ccache g++" is one too
compile=("${cxx[@]}" -std=c++20)
[[ ${cxx[0]} == *ccache ]] || ! command -v ccache >/dev/null || compile=(ccache "${compile[@]}")

# What pkg-config says, into an array: it quotes paths as a shell does.
flags_into() {  # array argument...
  eval "$1=($(pkg-config "${@:2}"))"
}

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
# Of a pipeline behind `!`, set -e would not hear.
none_of() {  # pattern; lines to read
  ! grep -E -- "$1"
}

finish() {
  echo "sherd-tests: $passed passed, $failed failed, $skipped skipped"
  ((failed == 0))
  exit
}

# The program finds the shared library by itself, and the one meant, or needs none.
run_linked() {  # library program
  local loaded
  loaded=$(ldd "$2" | sed -n 's/.*libsherd[^ ]* => \(.*\) (.*/\1/p')
  echo "$2 loads ${loaded:-no libsherd.so}"
  if [[ $1 == static ]]; then
    [[ -z $loaded ]]
  else
    [[ $(readlink -e "$loaded") == "$(readlink -e "$(libdir_of shared)")"/* ]]
  fi
  "$2"
}

# With flags of its own, of which Eigen's layouts depend on one.
with_pkg_config() {  # library
  local dir=$work/pkg-config-$1 package=sherd rpath flags libs
  local -x PKG_CONFIG_PATH=$(libdir_of "$1")/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  mkdir "$dir"
  [[ $1 == shared ]] || package=sherd-static
  flags_into rpath --variable=libdir sherd
  rpath=-Wl,-rpath,$rpath
  flags_into flags --cflags $package eigen3
  flags_into libs --libs $package eigen3
  "${compile[@]}" -O1 -DEIGEN_MAX_ALIGN_BYTES=16 -c "$source/examples/embed/main.cpp" -o "$dir/main.o" "${flags[@]}"
  "${cxx[@]}" "$dir/main.o" -o "$dir/embed" "${libs[@]}" "$rpath"
  run_linked "$1" "$dir/embed"
}

with_cmake() {  # library
  local dir=$work/cmake-$1 libdir launcher=
  [[ ${compile[0]} != ccache ]] || launcher=-DCMAKE_CXX_COMPILER_LAUNCHER=ccache
  libdir=$(libdir_of "$1")
  cmake -G Ninja -S "$source/examples/embed" -B "$dir" -DCMAKE_BUILD_TYPE=Release $launcher \
    -DCMAKE_PREFIX_PATH="${libdir%/lib*}" -Dsherd_USE_STATIC_LIBS="$([[ $1 == static ]] && echo ON || echo OFF)"
  cmake --build "$dir"
  run_linked "$1" "$dir/embed"
  cmake --install "$dir" --prefix "$dir/installed"
  run_linked "$1" "$dir/installed/bin/embed"
}

# As a dependency that Meson finds installed: one build of the library serves.
with_meson() {  # library
  local dir=$work/meson-$1
  local -x PKG_CONFIG_PATH=$(libdir_of "$1")/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  cp -r "$source/examples/embed" "$dir"
  meson setup "$dir/build" "$dir" -Dbuildtype=plain -Doptimization=1 -Dprefix="$dir/installed" \
    -Dprefer_static="$([[ $1 == static ]] && echo true || echo false)"
  ninja -C "$dir/build"
  run_linked "$1" "$dir/build/embed"
  meson install -C "$dir/build" --no-rebuild
  run_linked "$1" "$dir/installed/bin/embed"
}

three_ways() {  # library
  try "pkg-config-$1" with_pkg_config "$1"
  try "meson-$1" with_meson "$1"
  if command -v cmake >/dev/null; then
    try "cmake-$1" with_cmake "$1"
  else
    skip "cmake-$1" "cmake is not installed"
  fi
}
