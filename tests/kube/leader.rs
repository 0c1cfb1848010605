//! `cleat controller` as a process: leader election, endpoints, the end, and errors of the start.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cleat_kube::Config;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, Patch, PatchParams};
use nix::sys::signal::Signal;
use serde_json::json;
use test_kit::memory::own_kib;

use crate::control_plane::{ControlPlane, NAMESPACE};
use crate::fixture::{HANDLE, World, eventually, get, run, sum};

/// A controller process, which is killed at the end.
pub(crate) struct Process {
    child: Child,
    port: u16,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(driver: &str) -> Self {
        Self::start_with(driver, &[])
    }

    /// Starts it with these arguments, too.
    pub(crate) fn start_with(driver: &str, arguments: &[String]) -> Self {
        let port = crate::control_plane::free_ports::<1>()[0];
        let child = command(driver)
            .arg(format!("--listen=127.0.0.1:{port}"))
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, port }
    }

    fn get(&self, path: &str) -> String {
        get(self.port, path)
    }

    /// Returns the memory that it uses for itself, in KiB.
    pub(crate) fn own_kib(&self) -> u64 {
        own_kib(self.child.id())
    }

    /// Returns the sum of its metrics that begin with `metric`.
    pub(crate) fn sum(&self, metric: &str) -> u64 {
        sum(&self.get("/metrics"), metric)
    }

    /// Returns whether it has this role.
    pub(crate) fn is(&self, role: &str) -> bool {
        let answer = self.get("/readyz");
        answer.starts_with("HTTP/1.1 200") && answer.ends_with(&format!("{role}\n"))
    }
}

fn command(driver: &str) -> Command {
    let mut command = Command::new(test_kit::binary::cleat());
    let kubeconfig =
        format!("--kubeconfig={}", ControlPlane::get().controller_kubeconfig().display());
    let driver = format!("--driver={driver}");
    command.args(["controller", &kubeconfig, &driver, "--log-format=human"]);
    command
}

#[test]
fn row_33_a_killed_leader_is_replaced_within_15_s() {
    run(async |world: World| {
        let mut first = Process::start(&world.driver);
        eventually("the first one leads", async || first.is("leader").then_some(())).await;
        let second = Process::start(&world.driver);
        eventually("the second one waits", async || second.is("standby").then_some(())).await;
        let metrics = first.get("/metrics");
        assert!(metrics.contains("\ncleat_controller_leader 1\n"), "{metrics}");
        assert!(first.get("/healthz").ends_with("ok\n"));
        let killed = Instant::now();
        first.child.kill().unwrap();
        first.child.wait().unwrap();
        eventually("the second one leads", async || second.is("leader").then_some(())).await;
        let took = killed.elapsed();
        println!("figures: a killed leader is replaced in {:.1} s", took.as_secs_f64());
        assert!(took <= Duration::from_secs(15), "{took:?}");
        // It does the work: a file exists on one node only, and needs no grant.
        let node = world.node("a").await;
        let volume = world.volume("v", &format!("file/{node}/default/v")).await;
        let name = world.attach(&volume, &node).await;
        eventually("it is attached", async || {
            world.attachment(&name).await?.status.filter(|status| status.attached)
        })
        .await;
    });
}

#[test]
fn row_33_a_leader_that_ends_passes_the_lease_on_at_once() {
    run(async |world: World| {
        let mut first = Process::start(&world.driver);
        eventually("the first one leads", async || first.is("leader").then_some(())).await;
        let second = Process::start(&world.driver);
        eventually("the second one waits", async || second.is("standby").then_some(())).await;
        let ended = Instant::now();
        test_kit::process::kill(first.child.id(), Signal::SIGTERM);
        assert!(first.child.wait().unwrap().success());
        assert!(ended.elapsed() < Duration::from_secs(5), "{:?}", ended.elapsed());
        eventually("the second one leads", async || second.is("leader").then_some(())).await;
        let took = ended.elapsed();
        println!("figures: a leader that ends is replaced in {:.1} s", took.as_secs_f64());
        assert!(took < Duration::from_secs(8), "{took:?}");
    });
}

#[test]
fn a_leader_one_of_whose_tasks_panics_ends_and_passes_the_lease_on() {
    run(async |world: World| {
        let config =
            Config { after_step: |_| panic!("the test wants a panic"), ..world.config(NAMESPACE) };
        let broken = world.controller_of(config);
        let node = world.node("a").await;
        let volume = world.volume("v", HANDLE).await;
        let name = world.attach(&volume, &node).await;
        let error = broken.ended().await.unwrap_err();
        assert!(error.message().contains("the test wants a panic"), "{error}");
        let next = world.controller();
        world.attached(&name).await;
        next.stop().await;
    });
}

#[test]
fn a_leader_that_has_lost_the_lease_has_no_gauges_of_before() {
    run(async |world: World| {
        let controller = world.controller();
        world.in_use().await;
        let gauge = |name: &str| sum(&controller.metrics(), &format!("cleat_controller_{name} "));
        eventually("the gauges count the volume", async || {
            (["leader", "grants", "attachments"].map(gauge) == [1, 1, 1]).then_some(())
        })
        .await;
        let leases: Api<Lease> = Api::namespaced(world.client.clone(), NAMESPACE);
        let taken = json!({ "holderIdentity": "another one", "leaseDurationSeconds": 3600 });
        let taken = Patch::Merge(json!({ "spec": taken }));
        let name = format!("controller-{}", world.driver);
        leases.patch(&name, &PatchParams::default(), &taken).await.unwrap();
        eventually("nothing is counted", async || {
            (["leader", "grants", "attachments", "queue"].map(gauge) == [0; 4]).then_some(())
        })
        .await;
        controller.stop().await;
    });
}

#[test]
fn a_volume_that_cannot_be_fenced_is_refused_by_name() {
    run(async |world: World| {
        let _controller = Process::start(&world.driver);
        let (node, handle) = (world.node("a").await, "rbd/ceph/volumes//pvc-1");
        let volume = world.volume("v", handle).await;
        let name = world.attach(&volume, &node).await;
        let (message, _) = world.attach_error(&name, "cannot fence").await;
        assert!(message.contains(handle), "{message}");
        assert!(world.grant(handle).await.is_none());
    });
}

#[test]
fn the_start_fails_by_name() {
    let failed = |arguments: &[&str]| {
        let mut command = Command::new(test_kit::binary::cleat());
        let output = command.arg("controller").args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = failed(&["--kubeconfig=/missing"]);
    assert!(error.contains("cannot read the kubeconfig /missing"), "{error}");
    let error = failed(&["--remediation-limit=3"]);
    assert!(error.contains("--remediate"), "{error}");
}
