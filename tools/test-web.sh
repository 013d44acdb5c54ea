#!/bin/sh
# The browser tests: builds the page, the native program and the list of kernels, then web/tests in a headless
# Chromium. What is missing is said on one line that begins with SKIP, and is no failure.
set -eu
cd "$(dirname "$0")/.."

have() { command -v "$1" >/dev/null 2>&1; }
skip() { echo "SKIP: browser tests: $*"; exit 0; }

cargo=${CARGO:-cargo}
: "${CARGO_TARGET_DIR:=$PWD/target}"
export CARGO_TARGET_DIR

have node && have npm || skip "node and npm are missing (make setup installs them on Debian)"
node -e 'process.exit(process.versions.node.split(".")[0] >= 20 ? 0 : 1)' || skip "node 20 or newer is needed"
[ -n "${CHROMIUM:-}" ] || have chromium || have chromium-browser || have google-chrome || skip "no chromium"

sh tools/web.sh && code=0 || code=$?
[ "$code" != 3 ] || skip "no compiler for wasm32-unknown-unknown"
[ "$code" = 0 ] || exit "$code"

# The packages and features of `make test`, so that nothing is compiled twice; the tests' build has the program too.
all="--release --locked -p birkhoff -p birkhoff-web --features birkhoff/dashboard"
$cargo test $all --no-run
BIRKHOFF=$CARGO_TARGET_DIR/release/birkhoff
BIRKHOFF_KERNELS=$CARGO_TARGET_DIR/kernels.json
export BIRKHOFF BIRKHOFF_KERNELS
$cargo test $all -q --test training every_kernel_is_portable

cd web/tests
# Only the driver of the browser: no browser is downloaded.
npm ci --no-audit --no-fund --silent || skip "npm cannot fetch playwright-core"
node --test --test-concurrency=1 --test-reporter=spec page.test.mjs
