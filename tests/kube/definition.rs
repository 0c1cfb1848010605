//! The custom resource definition on a real API server. The control plane has installed it.

use kube::api::PostParams;
use serde_json::{Value, json};
use tonic::codegen::http::Request;
use tonic::codegen::http::header::ACCEPT;

use cleat_grants::object::Generation;
use cleat_kube::grant::VolumeGrant;

use crate::fixture::{HANDLE, World, run};

const PATH: &str = "/apis/cleat.csi.storage/v1alpha1/volumegrants";

#[test]
fn kubectl_get_shows_the_holder_since_when_and_what_to_do() {
    run(async |world: World| {
        let controller = world.controller();
        let (node, _, name, _) = world.in_use().await;
        world.detach(&name).await;
        crate::fixture::eventually("the grant says what it waits for", async || {
            (!world.grant(HANDLE).await?.status.waiting.is_empty()).then_some(())
        })
        .await;
        // As kubectl asks.
        let grant = world.grant(HANDLE).await.unwrap();
        let path = format!("{PATH}/{}", grant.metadata.name.unwrap());
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
        let request = Request::get(path).header(ACCEPT, table).body(Vec::new()).unwrap();
        let table: Value = world.client.request(request).await.unwrap();
        let columns = table["columnDefinitions"].as_array().unwrap();
        let cell = |name: &str| {
            let number = columns.iter().position(|column| column["name"] == name).unwrap();
            table["rows"][0]["cells"][number].clone()
        };
        assert_eq!(cell("Holder"), json!(node));
        assert_eq!(cell("Revoked"), json!(true));
        assert!(cell("Since").as_str().unwrap().ends_with('s'), "{}", cell("Since"));
        assert!(cell("Waits for").as_str().unwrap().contains("must release"), "{table}");
        assert!(cell("To do").as_str().unwrap().contains("kubectl taint node"), "{table}");
        assert_eq!(cell("Volume"), json!(HANDLE));
        controller.stop().await;
    });
}

#[test]
fn the_api_server_refuses_a_grant_that_is_not_one() {
    run(async |world: World| {
        let api = world.all::<VolumeGrant>();
        let valid = VolumeGrant::new(&world.driver, "shared/v", Default::default());
        let stored = api.create(&PostParams::default(), &valid).await.unwrap();
        assert_eq!(stored.spec.generation, Generation(0));
        let holder = json!({
            "node": "a", "mode": "ReadWrite", "generation": 1, "since": "2030-01-01T00:00:00Z",
        });
        let post = async |holders: Value, name: &str| {
            let object = json!({
                "apiVersion": "cleat.csi.storage/v1alpha1", "kind": "VolumeGrant",
                "metadata": { "name": format!("{name}.{}", world.driver) },
                "spec": { "holders": holders, "generation": 1 },
            });
            let body = serde_json::to_vec(&object).unwrap();
            let request = Request::post(PATH).header("content-type", "application/json");
            world.client.request::<Value>(request.body(body).unwrap()).await
        };
        post(json!([holder]), "valid").await.unwrap();
        let refused = |result: kube::Result<Value>, cause: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(cause), "{error}");
        };
        refused(post(json!([holder, holder]), "twice").await, "Duplicate value");
        let mut other = holder.clone();
        other["mode"] = json!("Exclusive");
        refused(post(json!([other]), "mode").await, "Unsupported value");
        let mut other = holder.clone();
        other["since"] = json!("yesterday");
        refused(post(json!([other]), "since").await, "date-time");
    });
}

#[test]
fn a_status_does_not_change_the_spec_and_the_other_way_round() {
    run(async |world: World| {
        let api = world.all::<VolumeGrant>();
        let grant = VolumeGrant::new(&world.driver, "shared/v", Default::default());
        let mut grant = api.create(&PostParams::default(), &grant).await.unwrap();
        let name = grant.metadata.name.clone().unwrap();
        let stale = grant.clone();
        grant.spec.generation = Generation(7);
        grant.status.grant.nodes.push(cleat_grants::object::NodeEntry::default());
        let written = api.replace_status(&name, &PostParams::default(), &grant).await.unwrap();
        assert_eq!((written.spec.generation, written.status.grant.nodes.len()), (Generation(0), 1));
        // A write that was decided from an older version is refused.
        let refused = api.replace(&name, &PostParams::default(), &stale).await.unwrap_err();
        assert!(matches!(&refused, kube::Error::Api(status) if status.code == 409), "{refused}");
    });
}
