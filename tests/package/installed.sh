#!/usr/bin/env bash
# Tests the packages where they are installed, as tools/package --test has them in a root of their own:
#   installed.sh SOURCE WORK
# As root, since what only programs with the static library need is installed after the others were built.
set -u
source=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
. "$source/tests/package/ways.sh"

libdir_of() { pkg-config --variable=libdir sherd; }
loader=/lib64/ld-linux-x86-64.so.2
level_library() { [[ $1 == x86-64-v2 ]] && echo libsherd.so.0 || echo "glibc-hwcaps/$1/libsherd.so.0"; }
levels_here() { "$loader" --help | sed -n 's/^ *\(x86-64-v[234]\) (supported, searched)$/\1/p'; }  # the best first
library_at() {  # level: what the loader takes where that is the only level
  "$loader" --glibc-hwcaps-mask "$1" --list "$work/pkg-config-shared/embed" | sed -n 's/.*libsherd[^ ]* => \(.*\) (.*/\1/p'
}

# Each level that this processor has finds its own library and gives the same answers to a training.
levels_found() {
  local level found=0
  for level in $(levels_here); do
    echo "$level: $(library_at "$level")"
    [[ $(library_at "$level") == */x86_64-linux-gnu/$(level_library "$level") ]]
    "$loader" --glibc-hwcaps-mask "$level" "$work/pkg-config-shared/embed"
    found=$((found + 1))
  done
  ((found > 0))
}

# A program that is started as everyone does loads that of the best.
best_loaded() {
  local loaded
  loaded=$(LD_DEBUG=libs sherd --version 2>&1 | sed -n 's/.*calling init: \(.*libsherd.*\)/\1/p')
  echo "loaded: $loaded"
  [[ $loaded -ef $(libdir_of)/$(level_library "$(levels_here | head -n 1)") ]]
}

# On the text that came with it.
program_trains() {
  cd "$work"
  sherd --version
  sherd train --ranks 2 --steps 4 --layers 1 --width 16 --context 16 --out run
  sherd sample --checkpoint run --prompt sherd --tokens 8
}

static_needs() {
  local needs
  needs=$(dpkg-query -W -f '${Recommends}' libsherd-dev | tr -d ,)
  [[ -n $needs ]]
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $needs
}

three_ways shared
try levels levels_found
try best-level best_loaded
try program program_trains
try static-needs static_needs
three_ways static
finish
