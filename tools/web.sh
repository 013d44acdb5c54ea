#!/bin/sh
# The page: `sh tools/web.sh` builds the static folder web/dist, `sh tools/web.sh serve [PORT]` serves it.
#
# The compiler is the first of: RUSTC_WASM (a rustc that has wasm32-unknown-unknown), rustup's own target
# (installed if it can be), and what ../shared/tools/setup-wasm.sh makes. Exit code 3: there is none of these.
set -eu
cd "$(dirname "$0")/.."

say() { echo "web: $*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

target=wasm32-unknown-unknown
cargo=${CARGO:-cargo}
base=${CARGO_TARGET_DIR:-target}
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/birkhoff
dist=web/dist

serve() {
    port=${1:-8080}
    [ -f $dist/index.html ] || { say "there is no $dist yet; run make web first"; exit 1; }
    say "http://localhost:$port/ (ctrl-C ends it)"
    if have python3; then
        # Python before 3.11 does not know the type of .wasm everywhere.
        exec python3 -c '
import http.server, sys
h = http.server.SimpleHTTPRequestHandler
h.extensions_map = {**h.extensions_map, ".wasm": "application/wasm", ".js": "text/javascript"}
h.log_message = lambda *a: None
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), lambda *a: h(*a, directory=sys.argv[2])).serve_forever()
' "$port" "$dist"
    fi
    have node || { say "needs python3 or node to serve; any file server will do for $dist"; exit 1; }
    exec node web/tests/serve.mjs "$dist" "$port"
}

find_rustc() {
    if [ -n "${RUSTC_WASM:-}" ]; then
        rustc=$RUSTC_WASM
        return
    fi
    sysroot=$(rustc --print sysroot)
    if [ -d "$sysroot/lib/rustlib/$target" ]; then
        rustc=rustc
        return
    fi
    if have rustup && rustup target add $target >/dev/null 2>&1; then
        rustc=rustc
        return
    fi
    rustc=$cache/wasm/rustc-wasm
    [ -x "$rustc" ] && "$rustc" --print target-libdir --target $target >/dev/null 2>&1 && return
    for setup in ../shared/tools/setup-wasm.sh ../../shared/tools/setup-wasm.sh; do
        if [ -f "$setup" ]; then
            say "making a compiler for $target (once, some minutes): $setup"
            bash "$setup" "$cache/wasm" >&2
            return
        fi
    done
    say "no compiler for $target: rustup target add $target, or RUSTC_WASM=/path/to/rustc"
    exit 3
}

# The system's, unless it is old: 108 (Debian 12) mixes up the two tables of a module with externref. Else the one
# that web/tests/package-lock.json pins.
find_opt() {
    opt=
    version=$(wasm-opt --version 2>/dev/null | sed 's/[^0-9]*\([0-9]*\).*/\1/')
    if [ "${version:-0}" -ge 116 ]; then
        opt=wasm-opt
    elif have node && have npm && (cd web/tests && npm ci --no-audit --no-fund --silent) >&2; then
        opt=web/tests/node_modules/.bin/wasm-opt
    fi
}

build() {
    find_rustc
    # Another compiler must not mix its outputs with the native one's.
    work=$base/web
    say "compiling (rustc: $rustc)"
    RUSTC=$rustc CARGO_TARGET_DIR=$work RUSTFLAGS="${RUSTFLAGS:-} -Ctarget-feature=+simd128" \
        $cargo build --locked -p birkhoff-web --profile wasm --target $target
    say "wasm-bindgen"
    (cd tools/wasm-bindgen && CARGO_TARGET_DIR=$work $cargo build -q --locked --release)
    rm -rf $dist
    mkdir -p $dist
    "$work/release/bind" "$work/$target/wasm/birkhoff_web.wasm" $dist birkhoff_web
    wasm=$dist/birkhoff_web_bg.wasm
    find_opt
    if [ -n "$opt" ]; then
        say "wasm-opt (some minutes)"
        $opt -Oz --enable-simd --enable-bulk-memory --enable-sign-ext --enable-mutable-globals \
            --enable-nontrapping-float-to-int --enable-reference-types --enable-multivalue \
            "$wasm" -o "$wasm.opt"
        mv "$wasm.opt" "$wasm"
    else
        say "no wasm-opt (binaryen 116 or newer, or npm to get it): the module is a tenth larger than it could be"
    fi
    cp web/page.js $dist/
    size=$(wc -c <"$wasm")
    # for the progress bar: a host that compresses the module does not say how long it is
    sed "s/<html lang=\"en\">/<html lang=\"en\" data-size=\"$((size))\">/" web/index.html >$dist/index.html
    # many hosts know nothing better
    gzipped=$(gzip -9 -c "$wasm" | wc -c)
    # what browsers get from most hosts
    packed=$(brotli "$wasm")
    sizes="$(mb "$size") MB, $(mb "$gzipped") MB with gzip, $(mb "$packed") MB with brotli"
    echo "web/dist: the module has $sizes; at most 6 MB, 2.2 MB with brotli"
    if [ -n "$opt" ] && { [ "$size" -gt 6000000 ] || [ "$packed" -gt 2200000 ]; }; then
        say "the module is too large"
        exit 1
    fi
}

# Without node it is not known, and counts as 0.
brotli() {
    have node || { echo 0; return; }
    node -e '
const { brotliCompressSync, constants: c } = require("zlib");
const bytes = require("fs").readFileSync(process.argv[1]);
const params = { [c.BROTLI_PARAM_QUALITY]: 11, [c.BROTLI_PARAM_LGWIN]: 24 };
console.log(brotliCompressSync(bytes, { params }).length);' "$1"
}

mb() { awk -v n="$1" 'BEGIN { printf "%.2f", n / 1e6 }'; }

case ${1:-build} in
build) build ;;
serve) shift; serve "$@" ;;
*) say "usage: sh tools/web.sh [build | serve [PORT]]"; exit 2 ;;
esac
