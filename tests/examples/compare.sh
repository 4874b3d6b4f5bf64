#!/bin/sh
# Runs an example and holds the lines that it prints against those of a golden (README.md has the format):
#   compare.sh GOLDEN PROGRAM [ARGS...]
golden=$1
shift
printed=$("$@") || {
  echo "$1 ended with status $?"
  exit 1
}
echo "$printed" | awk -v golden="$golden" '
  function complain(text) { print text; failed = 1 }
  {
    if ((getline expected < golden) <= 0) { complain("printed, but not in " golden ": " $0); next }
    n = split(expected, want, " ")
    if ($1 != want[1]) complain("printed " $1 ", expected " want[1])
    else if (want[n] !~ /^[0-9.]+(e-?[0-9]+)?$/) { if ($0 != expected) complain("printed " $0 ", expected " expected) }
    else if (NF != 2 || $2 !~ /^-?[0-9]/) complain($1 " is no number: " $0)
    else {
      off = $2 - want[2]; size = want[2] < 0 ? -want[2] : want[2]
      if (off < 0) off = -off
      if (off > want[3] * size) complain($1 " is " $2 ", expected " want[2] " within " want[3] " of it")
    }
  }
  END {
    while ((getline expected < golden) > 0) complain("not printed: " expected)
    exit failed
  }'
