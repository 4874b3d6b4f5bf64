#!/bin/sh
# A feature that is off: a counted skip (77 to Meson) that says why.
echo "skipped: $1: $2"
exit 77
