#!/bin/sh
# Tokengrove with its own Python, in one file. What follows the last line of this script is a gzipped tar archive.
# The first start unpacks it into the user's cache; every start replaces this shell by the unpacked program, so the
# server is the process that was started: its id, its signals and its exit code.
set -eu
name=program-@HASH@

run() {
    program=$1/$name/tokengrove
    shift
    if [ -x "$program" ]; then exec "$program" "$@"; fi
}

# Programs cannot be run from a folder that is mounted noexec.
runs_programs() {
    printf '#!/bin/sh\n' > "$1/probe.$$" && chmod +x "$1/probe.$$" && "$1/probe.$$"
    probed=$?
    rm -f "$1/probe.$$"
    return $probed
} 2> /dev/null

# The folder appears under its name when it is whole: starts at the same time, or one that is killed, do no harm.
unpack() {
    find "$1" -maxdepth 1 -name 'program-*.part.*' -mmin +60 -exec rm -rf {} + 2> /dev/null || :
    part=$(mktemp -d "$1/$name.part.XXXXXX") || return 1
    trap 'rm -rf "$part"' EXIT
    trap 'exit 143' HUP INT TERM
    echo "unpacking the program into $1/$name, once" >&2
    tail -n +@LINE@ "$0" | gzip -dc | tar -x -o -f - -C "$part" || return 1
    chmod 755 "$part"
    if [ ! -x "$1/$name/tokengrove" ]; then rm -rf "${1:?}/$name"; fi  # somebody has removed a part of it
    mv -T "$part" "$1/$name" 2> /dev/null || rm -rf "$part"
    trap - EXIT HUP INT TERM
}

home=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
if [ -n "$home" ]; then run "$home/tokengrove" "$@"; fi
# Without a home, a folder of this user's own: others could put programs into one that they made.
common=${TMPDIR:-/tmp}/tokengrove-$(id -u)
if [ -O "$common" ] && [ ! -L "$common" ]; then run "$common" "$@"; fi

if [ ! -e @LOADER@ ]; then
    echo "tokengrove: this file is for @MACHINE@ with the GNU C library (@LOADER@), which this system lacks" >&2
    exit 1
fi
library=$(getconf GNU_LIBC_VERSION 2> /dev/null || :)
if [ "${library##*.}" -lt @MINOR@ ] 2> /dev/null; then
    echo "tokengrove: this file needs the GNU C library 2.@MINOR@ or later; this system has $library" >&2
    exit 1
fi
if [ -n "$home" ] && mkdir -p "$home/tokengrove" 2> /dev/null && runs_programs "$home/tokengrove"; then
    cache=$home/tokengrove
elif { mkdir -m 700 "$common" 2> /dev/null || { [ -O "$common" ] && [ ! -L "$common" ]; }; } && runs_programs "$common"; then
    cache=$common
else
    echo "tokengrove: cannot unpack the program in ${home:+$home/tokengrove or }$common: a folder is needed that is" \
        "writable and not mounted noexec, at the first start only; name one in XDG_CACHE_HOME" >&2
    exit 1
fi
if unpack "$cache"; then run "$cache" "$@"; fi
echo "tokengrove: the program could not be unpacked in $cache; it needs @MEGABYTES@ MB, and the commands tail, gzip and tar" >&2
exit 1
