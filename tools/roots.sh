# What the tools share that build in a root of another release, made with mmdebstrap. Who sources this stands in the clone, and has set
# `mirror` (a URL, or empty for the archives that this machine's apt knows).
stop() {
  echo "tools/$(basename "$0"): $1" >&2
  exit 1
}

# Before anything else is done; `work` is a folder for the roots, gone at the end.
prepare_roots() {  # release...
  local release
  for release in "$@"; do sources_of "$release" >/dev/null; done
  [[ $(id -u) == 0 ]] || stop "it changes into other roots, for which it has to be root; run it with sudo"
  [[ $(dpkg --print-architecture) == amd64 ]] || stop "the roots are for amd64, got $(dpkg --print-architecture)"
  git rev-parse --git-dir >/dev/null 2>&1 || stop "it builds what is committed, and this is no clone"
  command -v mmdebstrap >/dev/null || {
    echo "Installing mmdebstrap"
    apt-get -q install -y --no-install-recommends mmdebstrap >/dev/null ||
      stop "mmdebstrap cannot be installed; run 'apt-get update' first"
  }
  [[ -z $(git status --porcelain --untracked-files=no) ]] || echo "What is not committed is left out."
  work=$(mktemp -d "${TMPDIR:-/var/tmp}/sherd-roots.XXXXXX")
  trap 'rm -rf --one-file-system "$work"' EXIT
  chmod 755 "$work"
  for release in "$@"; do reach "$release"; done
}

# The lines of apt's sources for a release: from the mirror given, from where this machine gets its own, or from where
# all get Ubuntu's.
sources_of() {  # release
  local release=$1 distribution=Debian components=main suite found
  case $release in
    bookworm | trixie) ;;
    noble) distribution=Ubuntu components='main universe' ;;
    *) stop "the releases are bookworm, trixie and noble, got '$release'" ;;
  esac
  if [[ -n $mirror ]]; then
    echo "deb $mirror $release $components"
    return
  fi
  found=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(LABEL)' 'Created-By: Packages' |
    awk -v distribution=$distribution -v release="$release" -v components="$components" '
      index($3, distribution) == 1 && $2 ~ /^[a-z]+(-updates|-security)?$/ {
        sub(/^[a-z]+/, release, $2)
        print "deb", $1, $2, components
      }' | sort -u)
  if [[ -n $found ]]; then
    echo "$found"
  elif [[ $distribution == Ubuntu ]]; then
    for suite in $release $release-updates $release-security; do
      echo "deb http://archive.ubuntu.com/ubuntu $suite $components"
    done
  else
    stop "$release: apt knows no archive of $distribution here; run 'apt-get update' on a machine that has one, or give --mirror URL"
  fi
}

# One line now instead of apt's many, later.
reach() {  # release
  local kind archive suite rest
  while read -r kind archive suite rest; do
    /usr/lib/apt/apt-helper -o Acquire::Retries=2 -o Acquire::http::Timeout=20 download-file "${archive%/}/dists/$suite/InRelease" \
      "$work/InRelease" >/dev/null 2>&1 || stop "$1: the archive $archive cannot be reached; give another with --mirror URL"
  done < <(sources_of "$1")
}

# The keys of Ubuntu's archive, which Debian's packages have since trixie; this machine trusts Debian's.
ubuntu_keys() {
  local keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg
  if [[ ! -e $keys ]]; then
    local root=$work/ubuntu-keys mirror=
    [[ -e $root$keys ]] || make_root trixie "$root" "$work/ubuntu-keys.log" --variant=extract --include=ubuntu-archive-keyring
    keys=$root$keys
  fi
  echo "$keys"
}

make_root() {  # release folder log option...
  local release=$1 root=$2 log=$3 sources line keys=
  shift 3
  sources=$(sources_of "$release")
  mapfile -t line <<<"$sources"
  [[ $release != noble ]] || keys=$(ubuntu_keys)
  mmdebstrap --variant=apt --dpkgopt=force-unsafe-io ${keys:+"--keyring=$keys"} "$@" "$release" "$root" "${line[@]}" >"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    stop "$release: no root could be made; $log says more"
  }
}

# In namespaces of its own, so that nothing stays mounted or running.
inside() {  # root unshare's-options command...
  local root=$1 options=$2
  shift 2
  unshare --mount --pid --fork --kill-child $options sh -c '
    mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm" && exec chroot "$0" "$@"' "$root" \
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 ${http_proxy:+"http_proxy=$http_proxy"} "$@"
}
