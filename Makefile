# Everything a contributor runs. See docs/development.md.
# Needs: Rust, Go, a C and a C++ compiler; root and /dev/fuse for what mounts. Nothing is skipped quietly.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

KILLS ?= 1000
TIMES ?= 20
FILES ?= 20000
TIME ?= 60s
OBJECTS ?= 1000000
SCOPES ?= 10000
VOLUMES ?= 10,100,1000
OPEN ?= 100000
OPERATIONS ?= 200000
PUBLISHES ?= 200
BURST ?= 1h
SOAK ?= 4h
HISTORIES ?= 100000
FUZZ_SECONDS ?= 3600
COUNT ?= 50
DURATION ?= 60s
WRITING ?= 4m
SEED ?=
ROUNDS ?=
RELEASE := target/release
# The programs that the demo starts, and itself.
DEMO := node-agent fuse-worker hdfs-helper csi-plugin s3-server oracle demo
CRATES := cache cgroups cli csi-plugin e2e failpoint fuse-abi fuse-worker hdfs hdfs-helper hostile inflight journal link lockdown mounts node-agent proto sim startup store testkit version volume

.PHONY: help build release check test e2e demo lint model coverage proto sim advisories bench kernels kills torture writers cycles faults handovers memory listing mutants renewals frozen away noisy scopes fuzz fuzz-smoke scale burst open-files soak stores posix $(CRATES:%=test-%)

help: ## Show this list.
	@grep -hE '^[a-zA-Z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

check: ## The quick verdict, without root: format, clippy, unit and model tests.
	scripts/check

test-CRATE: ## Every test of one crate: make test-cache, test-node-agent, test-e2e. Those that mount need root.

$(CRATES:%=test-%): test-%:
	scripts/test $*

build: ## Build every program for tests (dev profile, dependencies optimised).
	scripts/build --bins

release: ## Build every program as it is shipped.
	cargo build --locked --release --workspace --bins

test: ## Every test: unit, model, real FUSE, real processes, csi-sanity. Ends with "N passed, N failed".
	scripts/test

e2e: ## Millpond in a real Kubernetes, built and started here (the first time 15 minutes more); KUBECONFIG: in yours.
	scripts/e2e

stores: ## The stores' contract against servers that others wrote: moto, Azurite, fake-gcs-server, versitygw, MinIO, Ceph RGW, nginx, Apache, OSS's client, Hadoop; installed here.
	scripts/long-run stores scripts/stores moto azurite fake-gcs-server versitygw minio ceph-rgw nginx nginx-json apache apache-dav oss-sdk hdfs

posix: ## Test suites that others wrote, in volumes that can be written to, on MinIO, too: OPERATIONS=200000 of fsx each, SEED=, also under deaths; fio; pjdfstest; Jupyter.
	MILLPOND_FSX_OPERATIONS=$(OPERATIONS) MILLPOND_TEST_LIMIT=3600 $(if $(SEED),MILLPOND_SEED=$(SEED)) scripts/long-run posix scripts/posix --minio

demo: ## Real files from a real S3 server into twenty pods, workers killed meanwhile, every byte compared, a table.
	cargo build --locked --release --workspace $(DEMO:%=--bin %)
	$(RELEASE)/demo

lint: ## Format, clippy with -D warnings, licences and sources of dependencies.
	scripts/lint

coverage: ## Which lines the tests of make check reach: target/coverage/index.html.
	scripts/long-run coverage scripts/coverage

proto: ## Write the code of the gRPC interfaces from proto/*.proto.
	cargo run --locked -p millpond-proto-generate

advisories: ## Known vulnerabilities of dependencies. Apart from lint: it fetches a database from the network.
	scripts/cargo-deny check advisories

mutants: ## COUNT=50 wrong decisions, drawn by SEED=: which of them do the tests of make check miss? Half an hour.
	scripts/long-run mutants scripts/mutants $(COUNT) $(or $(SEED),1)

model: ## The shared memory under a model checker: each model with its executions, and the bugs put in on purpose that it finds.
	scripts/model

fuzz: ## Each fuzz target for an hour, two at a time (FUZZ_SECONDS=3600): no crash, no hang, no memory above its bound.
	scripts/long-run fuzz scripts/fuzz $(FUZZ_SECONDS)

fuzz-smoke: ## The same for five seconds each.
	scripts/fuzz 5

sim: ## HISTORIES=100000 of a simulated node, SEED=: deaths, hangs, outages, late messages, under virtual time.
	MILLPOND_HISTORIES=$(HISTORIES) $(if $(SEED),MILLPOND_SEED=$(SEED)) scripts/long-run sim \
		cargo test --locked --release -p millpond-sim --test histories -- --nocapture

kills: release ## KILLS=1000 deaths of workers under the oracle, 20 volumes.
	scripts/long-run kills $(RELEASE)/node-suite kills --kills $(KILLS)

torture: release ## DURATION=60s (or 2h) of deaths of every part, SEED=; make torture TORTURE="--hang-limit 4s" for more.
	scripts/versions --release
	scripts/long-run torture $(RELEASE)/node-suite torture --duration $(DURATION) $(if $(SEED),--seed $(SEED)) --json target/torture.json $(TORTURE)

writers: release ## WRITING=4m (or 1h) of the same under programs that write, SEED=; make writers WRITERS="--hang-limit 4s" for more.
	scripts/versions --release
	scripts/long-run writers $(RELEASE)/node-suite writers --duration $(WRITING) $(if $(SEED),--seed $(SEED)) $(WRITERS)

soak: release ## SOAK=4h of the same faults, one each ten seconds, while pods come and go: growth of each process an hour.
	scripts/versions --release
	scripts/long-run soak $(RELEASE)/node-suite soak --time $(SOAK) $(if $(SEED),--seed $(SEED)) --json target/soak.json

cycles: release ## ROUNDS=1000 of publish, use, hurt, unpublish: nothing is left, nothing grows.
	scripts/long-run cycles $(RELEASE)/node-suite cycles $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED))

faults: release ## FILES=20000 files through a store with 1 % each of 503, reset, truncation and stall.
	scripts/long-run faults $(RELEASE)/node-suite faults --files $(FILES)

handovers: release ## ROUNDS=50 hand-overs between agents of two versions under the oracle.
	scripts/versions --release
	scripts/long-run handovers $(RELEASE)/node-suite handovers --pause-p99 200ms $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED))

memory: release ## TIMES=20 workers that take more memory than they may.
	scripts/long-run memory $(RELEASE)/node-suite memory --times $(TIMES)

frozen: release ## TIME=60s in which the store does not answer: no process is taken for hung.
	scripts/long-run frozen $(RELEASE)/node-suite frozen --time $(TIME)

away: release ## The store is away for TIME=60s, twice, under warm epochs: no call fails, it is reported once.
	scripts/long-run away $(RELEASE)/node-suite away --time $(TIME)

noisy: release ## Fifteen volumes beside five that mean harm (ROUNDS=5 SEED=): throughput, failed calls, memory.
	scripts/long-run noisy $(RELEASE)/node-suite noisy $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SEED),--seed $(SEED))

scopes: release ## SCOPES=10000 sources used once and left: disk, descriptors and memory stay as they were.
	scripts/long-run scopes $(RELEASE)/node-suite scopes --scopes $(SCOPES)

scale: release ## VOLUMES=10,100,1000 published at once, read, handed over, unpublished: times, memory, descriptors.
	scripts/long-run scale $(RELEASE)/node-suite scale --volumes $(VOLUMES) --json target/scale.json

burst: release ## PUBLISHES=200 a minute for BURST=1h: times, and what the node has more at the end.
	scripts/long-run burst $(RELEASE)/node-suite burst --per-minute $(PUBLISHES) --time $(BURST)

open-files: release ## OPEN=100000 files open at once, over four volumes.
	scripts/long-run open-files $(RELEASE)/node-suite open-files --files $(OPEN)

listing: release ## One directory of OBJECTS=1000000 objects, through a mount: times and memory.
	scripts/long-run listing $(RELEASE)/node-suite listing --objects $(OBJECTS)

renewals: release ## ROUNDS=100 deaths of agent and broker at once: paths work again in every pod, mounts are counted.
	scripts/long-run renewals $(RELEASE)/node-suite renewals $(if $(ROUNDS),--rounds $(ROUNDS))

kernels: release ## The node on Debian's 5.10, 6.1 and 6.12 kernels, in QEMU.
	scripts/long-run kernels scripts/kernels

bench: release ## Benchmarks: a record, target/bench.json; then target/release/bench compare A B. Never passes or fails.
	scripts/long-run bench $(RELEASE)/bench run --json target/bench.json --markdown target/bench.md
