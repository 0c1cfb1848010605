//! The failure of Kubernetes' attach/detach controller that kept a pod in ContainerCreating, step by step: a detach fails,
//! and the pod is created anew on its node before the detach is repeated. The controller had removed the volume from
//! `volumesAttached` before the detach, did not add it again during the backoff, and took the volume for attached. One
//! remedy (kubernetes #72914) added it again with every pass of the loop: more than ten writes a second.
//!
//! The same steps run against kube-controller-manager and against the loop of cleat. The API server counts the writes.

use std::collections::BTreeMap;
use std::time::Duration;

use cleat_grants::object::{Reason, Signal, Truth};
use cleat_kube::grant::grant_name;
use serde_json::{Value, json};

use super::objects::{ATTACHMENT, Objects, POD, apply, text};
use super::pods::{HANDLE, Kubelet, claim, run};
use crate::attach_detach;
use crate::control_plane::{LOOP, MANAGER, NAMESPACE, controller_user};
use crate::fixture::World;

/// How long the backoff is watched, in seconds. `CLEAT_TEST_BACKOFF_S` changes it, for figures.
const BACKOFF_S: u64 = 5;

/// The highest number of writes of one volume in the first minute of a backoff, with the loop of Kubernetes. The page of the
/// controller states both.
const OF_KUBERNETES: usize = 10;

/// The same with the loop of cleat.
const OF_CLEAT: usize = 1;

/// The scene: a pod with a volume on a node.
struct Replay<'a> {
    world: &'a World,
    objects: &'a Objects,
    a: Kubelet<'a>,
    volume: String,
    /// The users whose writes are counted.
    users: [String; 2],
    /// The names of the objects whose writes are counted.
    names: Vec<String>,
    /// The writes that were counted already.
    counted: usize,
}

impl<'a> Replay<'a> {
    /// Prepares the node and the claim. `user` is the one of the controller of cleat.
    async fn new(world: &'a World, objects: &'a Objects, user: String) -> Self {
        let a = Kubelet::start(world, objects, "a").await;
        let volume = claim(world, objects, "v", HANDLE).await;
        let grant = grant_name(&world.driver, HANDLE);
        let names = vec![a.node.clone(), volume.clone(), grant];
        let users = [MANAGER.to_owned(), user];
        Self { world, objects, a, volume, users, names, counted: 0 }
    }

    /// Returns how often each kind of write was made since the last call, and prints it.
    fn writes(&mut self, step: &str) -> usize {
        let name = |request: &Value, field: &str| {
            request["objectRef"][field].as_str().unwrap_or_default().to_owned()
        };
        let requests = self.users.iter().flat_map(|user| self.world.plane.audited(user));
        let mut all: Vec<(String, String)> = requests
            .filter(|request| self.names.contains(&name(request, "name")))
            .map(|request| {
                let (resource, part) = (name(&request, "resource"), name(&request, "subresource"));
                let verb = request["verb"].as_str().unwrap();
                let user = request["user"]["username"].as_str().unwrap();
                let time = request["requestReceivedTimestamp"].to_string();
                (time, format!("{verb} {resource}/{part} by {user}"))
            })
            .collect();
        all.sort();
        let new: Vec<_> = all.into_iter().skip(self.counted).map(|(_, what)| what).collect();
        self.counted += new.len();
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        new.iter().for_each(|what| *kinds.entry(what).or_default() += 1);
        println!("figures: {step}: {} writes: {kinds:?}", new.len());
        new.len()
    }

    /// Returns whether kubelet or the agent of cleat may mount the volume.
    async fn is_mountable(&self) -> bool {
        let grant = self.world.grant(HANDLE).await.unwrap().stored().grant;
        !grant.holder(&self.a.node).unwrap().revoked || self.a.is_reported(HANDLE).await
    }

    /// Plays everything. `is_reported` is whether kube-controller-manager reports the volume as attached. Returns the
    /// number of writes during the backoff.
    async fn play(&mut self, is_reported: bool) -> usize {
        let (world, objects, node) = (self.world, self.objects, self.a.node.clone());
        let pod = self.a.pod("pod", &self.volume).await;
        let attachment = self.a.attachment().await;
        self.names.push(attachment.clone());
        let generation = world.attached(&attachment).await;
        world.mount(HANDLE, &node, generation).await;
        self.a.reported(HANDLE, is_reported).await;
        self.a.uses(&[HANDLE]).await;
        self.writes("attach");

        // 1. The pod is deleted and the node releases the volume. The detach fails.
        let image = world.storage.image(HANDLE);
        image.set_down(true);
        objects.delete(POD, &pod).await;
        self.a.uses(&[]).await;
        world.release(HANDLE, &node, generation).await;
        objects
            .until(ATTACHMENT, &attachment, "has failed", |known| {
                let error = text(known, "/status/detachError/message")?;
                error.contains("does not answer").then_some(())
            })
            .await;
        assert!(!self.is_mountable().await, "it is not safe to mount since before the detach");
        self.writes("detach");

        // 2. The detach is repeated with a backoff.
        let backoff_s = std::env::var("CLEAT_TEST_BACKOFF_S").map(|text| text.parse().unwrap());
        tokio::time::sleep(Duration::from_secs(backoff_s.unwrap_or(BACKOFF_S))).await;
        let in_backoff = self.writes("backoff");

        // 3. The pod is created anew. The attachment ends, so nothing may be mounted yet.
        let again = self.a.pod("again", &self.volume).await;
        if is_reported {
            self.a.waits_for_detach(&again).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let known = objects.get(ATTACHMENT, &attachment).await.unwrap();
        assert!(known["metadata"]["deletionTimestamp"].is_string(), "{known:#}");
        assert!(!self.is_mountable().await, "its detach has not ended");
        self.writes("pod again");

        // 4. The storage answers. The detach ends, and the new pod gets the volume: it is attached, and says so. A change
        // of the grant has it looked at before the end of the backoff.
        image.set_down(false);
        let lost = (Signal::SafeToMount, Truth::False, Reason::Lost, generation);
        world.report(HANDLE, &node, &[lost]).await;
        let again = self.a.attachment().await;
        assert_eq!(again, attachment, "the name follows from volume and node");
        assert_eq!(world.attached(&again).await, generation.next());
        self.a.reported(HANDLE, is_reported).await;
        world.mount(HANDLE, &node, generation.next()).await;
        assert!(self.is_mountable().await);
        self.writes("attach again");
        in_backoff
    }
}

#[test]
fn row_17_to_20_a_failed_detach_and_a_new_pod_with_the_loop_of_kubernetes() {
    run(async |world: World, objects: Objects| {
        let controller = world.controller();
        let mut replay = Replay::new(&world, &objects, controller_user(NAMESPACE)).await;
        let in_backoff = replay.play(true).await;
        assert!(in_backoff <= OF_KUBERNETES, "{in_backoff} writes");
        controller.stop().await;
    });
}

#[test]
fn row_17_to_20_a_failed_detach_and_a_new_pod_with_the_loop_of_cleat() {
    run(async |world: World, objects: Objects| {
        let driver = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
            "metadata": { "name": world.driver }, "spec": { "attachRequired": false },
        });
        apply(&world.client, &driver).await.unwrap();
        let controller = world.controller_of(attach_detach::config(&world).await);
        let mut replay = Replay::new(&world, &objects, controller_user(LOOP)).await;
        let in_backoff = replay.play(false).await;
        assert!(in_backoff <= OF_CLEAT, "{in_backoff} writes");
        controller.stop().await;
    });
}
