# cleat's frame: everything a person or a CI does with it. `make help` lists the targets.

PREFIX ?= /usr/local
DESTDIR ?=

bindir = $(PREFIX)/bin
mandir = $(PREFIX)/share/man/man1
docdir = $(PREFIX)/share/doc/cleat
unitdir = $(PREFIX)/lib/systemd/system
udevdir = $(PREFIX)/lib/udev/rules.d

CARGO ?= cargo
INSTALL ?= install
# Where cargo puts what it builds.
TARGET ?= $(or $(CARGO_TARGET_DIR),target)
RELEASE = $(TARGET)/release/cleat

# Tests that need no kernel of their own. `device` boots virtual machines and comes last.
NATIVE_TESTS = $(filter-out device,$(sort $(basename $(notdir $(wildcard tests/*.rs))) \
	$(notdir $(patsubst %/main.rs,%,$(wildcard tests/*/main.rs)))))
# The crates around Ceph's libraries, tested on a cluster that they start themselves.
FFI = librbd-sys librbd
SHELL_SCRIPTS = .ci/run scripts/install-deps.sh scripts/demo.sh

.DEFAULT_GOAL := build
.PHONY: help build release demo test lint unit device comparison bench install uninstall clean \
	deps-build deps-test

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: release ## Build the release binary (target/release/cleat)

release: deps-build
	$(CARGO) build --release --locked

# Not built anew: root, who installs, mostly has no cargo.
$(RELEASE):
	$(MAKE) release

demo: release ## Map a volume, put a file system and files on it, check them; in a VM where needed
	scripts/demo.sh $(RELEASE)

test: lint unit device ## Everything: lint, tests, virtual machines

lint: deps-test ## Formatting, clippy with and without `fault`, shell scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets --features cleat/fault -- -D warnings
	$(CARGO) clippy --locked --bins -- -D warnings
	shellcheck $(SHELL_SCRIPTS)

unit: deps-test ## Tests that need no kernel of their own
	$(CARGO) test --locked --workspace --features cleat/fault --lib --bins --test fuzz $(addprefix --test ,$(NATIVE_TESTS))
	$(CARGO) test --locked $(addprefix --package ,$(FFI))

device: deps-test ## Tests on /dev/nbdX, in virtual machines
	$(CARGO) test --release --locked --features fault --test device

comparison: deps-test ## nbd-client with nbdkit in the same troubles, in a virtual machine
	CLEAT_COMPARISON=1 $(CARGO) test --release --locked --features fault --test device -- peers_

bench: deps-test ## Benchmarks against peers
	$(CARGO) bench --locked

install: $(RELEASE) ## Install what was built: unit, udev rules, manual, too (DESTDIR, PREFIX)
	$(INSTALL) -D -m 0755 $(RELEASE) $(DESTDIR)$(bindir)/cleat
	$(INSTALL) -d $(DESTDIR)$(unitdir)
	sed 's#/usr/local/bin/#$(bindir)/#' systemd/cleat.service > $(DESTDIR)$(unitdir)/cleat.service
	chmod 0644 $(DESTDIR)$(unitdir)/cleat.service
	$(INSTALL) -d $(DESTDIR)$(udevdir)
	$(INSTALL) -m 0644 systemd/*.rules $(DESTDIR)$(udevdir)
	$(INSTALL) -D -m 0644 systemd/cleat.toml $(DESTDIR)$(docdir)/cleat.toml
	$(RELEASE) man --directory $(DESTDIR)$(mandir)
	$(INSTALL) -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(RELEASE) completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/cleat
	$(RELEASE) completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_cleat
	$(RELEASE) completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/cleat.fish
	@echo "installed; now: udevadm control --reload; systemctl daemon-reload;" \
		"systemctl enable --now cleat"

uninstall: ## Remove what `install` put there (DESTDIR, PREFIX)
	rm -f $(DESTDIR)$(bindir)/cleat $(DESTDIR)$(unitdir)/cleat.service \
		$(addprefix $(DESTDIR)$(udevdir)/,$(notdir $(wildcard systemd/*.rules))) \
		$(DESTDIR)$(docdir)/cleat.toml \
		$(DESTDIR)$(mandir)/cleat.1 $(DESTDIR)$(mandir)/cleat-*.1 \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/cleat \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_cleat \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/cleat.fish

clean: ## Remove everything that was built, virtual machines included
	$(CARGO) clean

deps-build:
	@scripts/install-deps.sh build

deps-test:
	@scripts/install-deps.sh build test vm
