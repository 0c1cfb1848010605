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
# What `make demo` builds: what the demonstration needs, in a third of the time of a release.
DEMO = $(TARGET)/demo/cleat

# Every test is built once, with one set of features: a test binary that is built by itself would
# have cargo compile its dependencies again.
CARGO_TEST = $(CARGO) test --locked --workspace --features cleat/fault

# What `make test` runs in parallel, the longest first. Each is a make target of its own.
SUITES = system conformance kube crates ffi export
# How many of them run at a time. Most tests wait more than they compute.
JOBS ?= 3
# The suites `system`, `kube`, `export`, `device` and `fail-over` run one test with `make system TEST=NAME`.
TEST ?=
EXACT = $(if $(TEST),--exact $(TEST))
# ENFORCE=1 lets a suite that exceeds its budget in tests/budgets.toml fail the run.
ENFORCE ?=
# The commit that `make quick` compares with; by default, the last one that the upstream branch has, too.
BASE ?=
# With exec, make sends SIGTERM to run-suites and not to a shell.
RUN_SUITES = exec env CLEAT_DEPS_INSTALLED=1 scripts/run-suites --name $@ $(if $(ENFORCE),--enforce) --jobs $(JOBS)
SHELL_SCRIPTS = .ci/run scripts/install-deps.sh scripts/cargo-deps.sh scripts/demo.sh \
	scripts/build-with-progress scripts/go-tool.sh \
	scripts/control-plane.sh scripts/deploy-tools.sh tests/nodes/guest/start tests/nodes/guest/service \
	tests/nodes/guest/shutdown tests/nodes/import-images

PYTHON_SCRIPTS = $(wildcard scripts/suites/*.py) scripts/build-image scripts/host-speed scripts/quick scripts/run-suites \
	scripts/test-run-suites tests/kit/runner tests/nodes/image tests/nodes/guest/shell tests/vm/run

.DEFAULT_GOAL := build
.PHONY: help build release demo test test-long quick unit tests vm-image comparison comparison-fail-over soak \
	soak-device soak-simulation soak-models soak-fights soak-controller soak-nodes soak-fuzz bench bench-device install \
	uninstall clean control-plane nodes fail-over demo-cluster image deps-build deps-test device device-short device-long simulation lint lint-release $(SUITES)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: release ## Build the release binary (target/release/cleat)

release: deps-build
	CARGO='$(CARGO)' scripts/build-with-progress --release --locked

# Not built anew: root, who installs, mostly has no cargo.
$(RELEASE):
	$(MAKE) release

demo: deps-build ## Map a volume, put a file system and files on it, check them; in a VM where needed
	CARGO='$(CARGO)' scripts/build-with-progress --profile demo --locked --no-default-features --features object,rbd
	scripts/demo.sh $(DEMO)

test: deps-test ## Every kind of test, in about 20 minutes: lint, tests, a virtual machine
	@$(RUN_SUITES) --again system,kube,export,device-short --background lint,simulation \
		vm-image tests control-plane / $(SUITES) simulation / device-short lint

test-long: deps-test ## The long tests, which .ci/run runs after `make test`
	@$(RUN_SUITES) --again fail-over,device-long --background lint-release \
		vm-image tests control-plane / fail-over lint-release / device-long

unit: deps-test ## What needs no virtual machine
	@$(RUN_SUITES) --again system,kube,export \
		tests control-plane / $(SUITES) simulation lint

quick: deps-test ## What tests a change in a minute and a half; BASE=REV: the change since REV
	@exec scripts/quick $(BASE)

lint: deps-test ## Formatting, clippy of everything that the tests have, scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets --features cleat/fault -- -D warnings
	shellcheck $(SHELL_SCRIPTS)
	python3 -c 'import ast, sys; [ast.parse(open(name).read(), name) for name in sys.argv[1:]]' $(PYTHON_SCRIPTS)
	-scripts/cargo-deps.sh save debug

lint-release: deps-test ## Clippy of the release, and of a build without features
	$(CARGO) clippy --locked --bins -- -D warnings
	$(CARGO) clippy --locked --bins --no-default-features -- -D warnings
	-scripts/cargo-deps.sh save debug

tests: deps-test ## Build all tests
	scripts/cargo-deps.sh restore debug
	$(CARGO_TEST) --no-run
	-scripts/cargo-deps.sh save debug

vm-image: deps-test ## Build the image of the virtual machines
	tests/vm/build-image.sh

control-plane: deps-test ## Build Kubernetes, the sidecars of CSI, helm and MinIO for the tests
	scripts/control-plane.sh
	scripts/control-plane.sh node
	scripts/control-plane.sh containerd
	scripts/deploy-tools.sh
	scripts/go-tool.sh tests/kube/promql
	scripts/go-tool.sh tests/kit/minio github.com/minio/minio

crates: deps-test ## Unit tests of the crates, rules of the code, fuzz targets on their corpora, CSI's messages, scripts
	$(CARGO_TEST) --lib --bins --test tidy --test compatibility --test fuzz --test csi-wire
	scripts/test-run-suites

export: deps-test ## The data path, and other people's NBD clients
	$(CARGO_TEST) --test export $(if $(TEST),-- $(EXACT))

conformance: deps-test ## Every backend keeps the same contract
	$(CARGO_TEST) --test conformance

# Its tests wait for clusters, timeouts and processes, so three at a time do not need three processors.
system: deps-test ## Command line, workers, supervisor on a simulated kernel, a Ceph cluster
	$(CARGO_TEST) --test system -- --test-threads 4 $(EXACT)

simulation: deps-test ## The supervisor with everything else simulated
	$(CARGO_TEST) --test simulation

kube: deps-test ## The controller on a real control plane, with the sidecars of CSI
	$(CARGO_TEST) --test kube $(if $(TEST),-- $(EXACT))

ffi: deps-test ## The crates around Ceph's libraries, on a cluster, also under valgrind
	$(CARGO_TEST) $(patsubst %.rs,--test %,$(notdir $(wildcard ffi/*/tests/*.rs)))

device: deps-test ## /dev/nbdX in three virtual machines at a time, which use all processors
	$(CARGO_TEST) --test device $(if $(TEST),-- $(EXACT))

device-short: deps-test ## Some tests of `device`, in one virtual machine
	CLEAT_TEST_PART=short $(MAKE) device

device-long: deps-test ## The other tests of `device`
	CLEAT_TEST_PART=long $(MAKE) device

# The tests take turns, because they share a node.
nodes: deps-test ## Pods with volumes on nodes with kubelet and containerd, in virtual machines that fail
	$(CARGO_TEST) --test nodes -- --test-threads 1

# Two tests of `nodes`, on one cluster. How long their parts take is in the output.
fail-over: deps-test ## A node with a volume is frozen or loses its network, and the volume moves: two rounds each
	$(CARGO_TEST) --test nodes -- --test-threads 1 --nocapture \
		$(or $(EXACT),fail_over::a_frozen_node fail_over::a_node_without_network)

demo-cluster: deps-test ## A cluster of two nodes with a Ceph cluster: a node fails, and its volume moves
	CLEAT_TEST_SHOW=1 CLEAT_TEST_FAIL_OVERS=1 $(CARGO_TEST) --test nodes -- --test-threads 1 --nocapture \
		fail_over::a_frozen_node

comparison: deps-test ## nbd-client with nbdkit in the same situations, in a virtual machine
	$(CARGO_TEST) --test device -- --ignored peers_

comparison-fail-over: deps-test ## A frozen node without remediation, with csi-attacher and a taint by hand
	$(CARGO_TEST) --test nodes -- --test-threads 1 --nocapture comparison::

# What `make soak` does with the tests of `make test`: how many seeds of the simulation, fights for a
# volume, fights of two nodes while controllers are killed, repetitions of each situation in virtual
# machines, seconds of fio's verification there, and seconds of fuzzing.
SOAK_SEEDS ?= 200000
SOAK_FIGHTS ?= 300
# The workers of volumes of objects that are killed with writes in flight.
SOAK_KILLS ?= 100
SOAK_GRANT_FIGHTS ?= 100
SOAK_REPEAT ?= 30
# The fail-overs of each kind between two nodes.
SOAK_FAIL_OVERS ?= 20
# How often the pod of the daemon is replaced under a load.
SOAK_REPLACEMENTS ?= 20
SOAK_VERIFY_S ?= 300
SOAK_FUZZ_S ?= 3600
# The numbers of volumes that the controller attaches and detaches.
SOAK_VOLUMES ?= 100,1000
# The seconds of the backoff of a detach in which the writes are counted.
SOAK_BACKOFF_S ?= 60

soak: deps-test ## The same tests with larger numbers, for a night (see CONTRIBUTING.md)
	@$(RUN_SUITES) vm-image tests / \
		soak-device soak-simulation soak-models soak-fights soak-controller soak-nodes soak-fuzz

soak-device:
	CLEAT_REPEAT=$(SOAK_REPEAT) CLEAT_VERIFY_SECONDS=$(SOAK_VERIFY_S) $(CARGO_TEST) --test device

soak-simulation:
	CLEAT_SIM_SEEDS=0..$(SOAK_SEEDS) $(CARGO_TEST) --test simulation
	CLEAT_SIM_SEEDS=0..$(SOAK_SEEDS) $(CARGO_TEST) --lib -- simulation::every_seed

soak-models:
	CLEAT_MODEL_SLOTS=3,2 $(CARGO_TEST) --lib -- no_take_over_loses_acknowledged_data

soak-fights:
	CLEAT_TEST_FIGHTS=$(SOAK_FIGHTS) $(CARGO_TEST) --test system -- no_write_of_a_fenced_worker --nocapture
	CLEAT_TEST_KILLS=$(SOAK_KILLS) $(CARGO_TEST) --test system -- acknowledged_writes_survive_the_death_of_the_worker
	CLEAT_TEST_GRANT_FIGHTS=$(SOAK_GRANT_FIGHTS) $(CARGO_TEST) --test kube -- fights:: --nocapture

soak-controller:
	CLEAT_TEST_VOLUMES=$(SOAK_VOLUMES) $(CARGO_TEST) --test kube -- scale:: --nocapture
	CLEAT_TEST_BACKOFF_S=$(SOAK_BACKOFF_S) $(CARGO_TEST) --test kube -- replay:: --nocapture

soak-nodes:
	CLEAT_TEST_FAIL_OVERS=$(SOAK_FAIL_OVERS) CLEAT_TEST_REPLACEMENTS=$(SOAK_REPLACEMENTS) \
		$(CARGO_TEST) --test nodes -- --test-threads 1 --nocapture

soak-fuzz:
	end=$$(($$(date +%s) + $(SOAK_FUZZ_S))); while [ $$(date +%s) -lt $$end ]; do \
		CLEAT_FUZZ_SEED=$$(date +%s) CLEAT_FUZZ_RUNS=1000000 $(CARGO_TEST) --test fuzz || exit 1; \
	done

image: ## Build the OCI image and its bill of materials (target/oci), without a container daemon
	scripts/install-deps.sh build vm
	scripts/build-image --output $(TARGET)/oci

bench: deps-test ## Speed of parts, beside other NBD servers and tokio-uring, and the cost of many volumes; reports below target/bench
	$(CARGO) bench --locked -p cleat-export --bench micro
	$(CARGO) bench --locked --bench peer
	$(CARGO) bench --locked --bench runtime
	$(CARGO) bench --locked --bench growth

bench-device: deps-test ## Devices beside those of other NBD servers and rbd-nbd, in a virtual machine
	$(CARGO) bench --locked --features cleat/fault --bench device

install: $(RELEASE) ## Install what was built: unit, udev rules, manual, too (DESTDIR, PREFIX)
	$(INSTALL) -D -m 0755 $(RELEASE) $(DESTDIR)$(bindir)/cleat
	ln -sf cleat $(DESTDIR)$(bindir)/kubectl-cleat
	$(INSTALL) -d $(DESTDIR)$(unitdir)
	for unit in $(notdir $(wildcard systemd/*.service)); do \
		sed 's#/usr/local/bin/#$(bindir)/#' systemd/$$unit > $(DESTDIR)$(unitdir)/$$unit || exit 1; \
		chmod 0644 $(DESTDIR)$(unitdir)/$$unit; \
	done
	$(INSTALL) -d $(DESTDIR)$(udevdir)
	$(INSTALL) -m 0644 systemd/*.rules $(DESTDIR)$(udevdir)
	$(INSTALL) -D -m 0644 systemd/cleat.toml $(DESTDIR)$(docdir)/cleat.toml
	$(INSTALL) -m 0644 systemd/optional/59-cleat-no-scan.rules $(DESTDIR)$(docdir)/
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
	rm -f $(DESTDIR)$(bindir)/cleat $(DESTDIR)$(bindir)/kubectl-cleat \
		$(addprefix $(DESTDIR)$(unitdir)/,$(notdir $(wildcard systemd/*.service))) \
		$(addprefix $(DESTDIR)$(udevdir)/,$(notdir $(wildcard systemd/*.rules))) \
		$(DESTDIR)$(docdir)/cleat.toml $(DESTDIR)$(docdir)/59-cleat-no-scan.rules \
		$(DESTDIR)$(mandir)/cleat.1 $(DESTDIR)$(mandir)/cleat-*.1 \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/cleat \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_cleat \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/cleat.fish

clean: ## Remove everything that was built in this folder (~/.cache/cleat stays)
	$(CARGO) clean

deps-build:
	@scripts/install-deps.sh build

deps-test:
	@[ -n "$$CLEAT_DEPS_INSTALLED" ] || scripts/install-deps.sh build test vm
