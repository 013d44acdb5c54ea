# make help lists what there is. Everything goes through cargo; nothing is installed by `make demo`.

SHELL := /bin/sh
.DEFAULT_GOAL := help
CARGO ?= cargo

# Build outputs stay outside the clone, so that several clones share them, where HOME can be written;
# else in ./target. An environment's or command line's own CARGO_TARGET_DIR comes first.
ifeq ($(strip $(CARGO_TARGET_DIR)),)
CARGO_TARGET_DIR := $(shell d="$$HOME/.cache/birkhoff/target"; \
    if [ -n "$$HOME" ] && mkdir -p "$$d" 2>/dev/null && [ -w "$$d" ]; then echo "$$d"; \
    else echo "$(CURDIR)/target"; fi)
endif
export CARGO_TARGET_DIR
BIN := $(CARGO_TARGET_DIR)/release/birkhoff

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  build outputs: $(CARGO_TARGET_DIR)   (CARGO_TARGET_DIR=... for another place)"

.PHONY: toolchain
toolchain:
	@sh tools/setup.sh toolchain

.PHONY: setup
setup: ## What the tests need: checks cargo and cc, installs Python packages, a software Vulkan driver, a virtual screen, Open MPI and NCCL (Debian, Ubuntu)
	@sh tools/setup.sh all

.PHONY: build
build: toolchain ## The program, optimised
	$(CARGO) build --release --locked

.PHONY: demo
demo: build ## Train a small DHEN with mHC residuals on synthetic clicks; about ten minutes with the build
	@BIRKHOFF="$(BIN)" sh examples/demo.sh $(ARGS)

# A folder of runs, or one run. What is not there yet appears when a run begins.
RUN ?= runs

.PHONY: dashboard
dashboard: toolchain ## Build with the dashboard and open it on runs/ (RUN=... for another)
	$(CARGO) build --release --locked --features dashboard
	@"$(BIN)" dashboard $(RUN) $(ARGS)

.PHONY: test
test: setup ## All tests
	@sh tools/setup.sh browser
	@CARGO="$(CARGO)" sh tools/test-web.sh
	RUST_BACKTRACE=1 $(CARGO) test --release --locked -p birkhoff -p birkhoff-web --features $$(sh tools/setup.sh features)

.PHONY: web
web: toolchain ## The page: the static folder web/dist, for any file host
	@CARGO="$(CARGO)" sh tools/web.sh

.PHONY: web-serve
web-serve: ## Serve web/dist on http://localhost:8080 (PORT=... for another port)
	@sh tools/web.sh serve $(or $(PORT),8080)

.PHONY: test-web
test-web: ## The page in a headless Chromium; skipped with a line where browser, node or wasm compiler are missing
	@sh tools/setup.sh browser
	@CARGO="$(CARGO)" sh tools/test-web.sh

.PHONY: lint
lint: toolchain ## Formatting, and clippy without a warning
	$(CARGO) fmt --all --check
	rustfmt --edition 2024 --check tools/netns_delay.rs
	$(CARGO) clippy --release --locked -p birkhoff -p birkhoff-web --features $$(sh tools/setup.sh features) --all-targets -- -D warnings
	$(CARGO) check --release --locked

.PHONY: bench
bench: toolchain ## Kernels and products, measured on this machine
	$(CARGO) bench --locked

.PHONY: clean
clean: ## Remove the build outputs
	$(CARGO) clean
