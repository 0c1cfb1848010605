//! The record: what is read and written, its versions, and its limits.

use cleat_grants::record::Target;
use proptest::prelude::*;

use super::*;

fn claimant() -> Claimant {
    Claimant {
        node: "n1".into(),
        machine: "machine".into(),
        boot_id: "b1".into(),
        mapping_id: "m1".into(),
        process: ProcessMark::own(),
        ..Claimant::default()
    }
}

fn claim() -> Claim {
    Claim::after(None, "id".into(), &claimant(), "10.0.0.1:0/7".into(), 1_700_000_000, &[])
}

fn read(text: &str) -> Result<Option<Claim>> {
    Claim::read(Some(text), "id", "p/i")
}

#[test]
fn a_claim_survives_a_round_trip_and_unknown_fields_are_ignored() {
    let mut claim = claim();
    claim.cut.push(Client { address: "1.2.3.4:0/5".into(), ..Client::default() });
    let text = claim.text().unwrap();
    assert_eq!(read(&text).unwrap(), Some(claim.clone()));
    assert_eq!(Claim::read(Some(&text), "another", "p/i").unwrap(), None);
    assert_eq!(Claim::read(None, "id", "p/i").unwrap(), None);
    let newer = text.replacen('{', r#"{"colour":["blue"],"#, 1);
    assert_eq!(read(&newer).unwrap(), Some(claim));
}

#[test]
fn an_invalid_claim_is_an_error_with_a_repair() {
    let good = claim().text().unwrap();
    let many = r#"{"address":"1.2.3.4:0/5"},"#.repeat(10_000);
    for (text, kind) in [
        (String::new(), ErrorKind::Internal),
        ("null".into(), ErrorKind::Internal),
        ("[]".into(), ErrorKind::Internal),
        (good[..good.len() - 1].into(), ErrorKind::Internal),
        (good.replace("\"n1\"", "7"), ErrorKind::Internal),
        (good.replace("n1", &"n".repeat(300)), ErrorKind::Internal),
        (good.replace("n1", "n\\u001b[2J"), ErrorKind::Internal),
        (good.replace("10.0.0.1:0/7", "10.0.0.1\\\" x/"), ErrorKind::Internal),
        (good.replace("10.0.0.1:0/7", ""), ErrorKind::Internal),
        (good.replace("\"generation\":1", "\"generation\":-1"), ErrorKind::Internal),
        (
            good.replace("\"generation\":1", "\"generation\":18446744073709551615"),
            ErrorKind::Internal,
        ),
        (good.replace("\"version\":1", "\"version\":4"), ErrorKind::Unsupported),
        (good.replace("\"cut\":[", &format!("\"cut\":[{many}")), ErrorKind::Internal),
    ] {
        let error = read(&text).expect_err(&text);
        assert_eq!(error.kind(), kind, "{text}");
        assert!(error.repair().unwrap().contains("image-meta remove p/i"), "{error:?}");
    }
}

/// The texts are those of the builds that introduced the versions.
#[test]
fn records_of_earlier_versions_are_read_and_followed() {
    let client = r#""node":"n1","machine":"","boot_id":"b1","mapping_id":"m1","process":null,"generation":7,
        "address":"10.0.0.1:0/7","since":1700000000"#;
    let cut = r#""cut":[{"node":"n2","machine":"","boot_id":"b2","mapping_id":"m2","process":null,"generation":6,
        "address":"10.0.0.2:0/8","since":1600000000}]"#;
    let grants = r#""grants":{"generation":3,"lowest":3,"seals":[{"generation":2,"node":"n2","client":"10.0.0.2:0/8"}]}"#;
    for released in [true, false] {
        let first =
            read(&format!(r#"{{"version":1,"image":"id",{client},"released":{released},{cut}}}"#));
        let second = read(&format!(
            r#"{{"version":2,"image":"id",{client},"grant":3,"released":{released},{cut},{grants}}}"#
        ));
        for (claim, grant) in [(first, 0), (second, 3)] {
            let claim = claim.unwrap().unwrap();
            assert_eq!((claim.released, claim.shared.len(), claim.cut.len()), (released, 0, 1));
            assert_eq!((&*claim.client.node, claim.client.generation), ("n1", 7));
            let record = claim.record_as_written();
            assert_eq!((record.lowest.0, record.claims.len()), (grant, usize::from(!released)));
            assert!(record.claims.iter().all(|known| known.mode == Mode::ReadWrite));
            let is_sealed = record.seal_of(Generation(2)).is_some();
            assert_eq!(is_sealed, grant > 0);
            // The build that has written it reads what follows.
            let next =
                Claim::after(Some(&claim), "id".into(), &claimant(), "10.0.0.1:0/9".into(), 0, &[]);
            let text = next.text().unwrap();
            assert!(text.contains(&format!(r#""version":{}"#, 1 + u32::from(grant > 0))), "{text}");
            assert!(!text.contains("shared"), "{text}");
        }
    }
}

/// Returns a claim with a grant and a seal.
fn granted() -> Claim {
    let (node, client) = ("n2".to_owned(), Some("10.0.0.2:0/8".to_owned()));
    let seal = Seal { generation: Generation(2), node, client, machine: None };
    let (generation, lowest) = (Generation(3), Generation(3));
    let record = Record { generation, lowest, seals: vec![seal], ..Record::default() };
    claim().sealed(&record)
}

/// A build that does not know grants must not claim such an image.
#[test]
fn only_a_claim_with_grants_has_the_newer_version() {
    let text = claim().text().unwrap();
    assert!(text.contains(r#""version":1"#) && !text.contains("grant"), "{text}");
    let granted = granted();
    let text = granted.text().unwrap();
    assert!(text.contains(r#""version":2"#), "{text}");
    assert_eq!(read(&text).unwrap(), Some(granted.clone()));
    let claimant = Claimant { grant: Some(3), ..claimant() };
    for last in [None, Some(&granted)] {
        let next = Claim::after(last, "id".into(), &claimant, "10.0.0.1:0/8".into(), 0, &[]);
        let text = next.text().unwrap();
        assert!(text.contains(r#""version":2"#) && text.contains(r#""grant":3"#), "{text}");
        assert_eq!(read(&text).unwrap(), Some(next));
    }
}

#[test]
fn invalid_grants_are_an_error() {
    let good = granted();
    let mut cases = vec![good.clone(); 6];
    cases[0].grants.generation = Generation(u64::MAX);
    cases[1].grants.lowest = Generation(u64::MAX);
    cases[2].grants.seals[0].node = "n\n".to_owned();
    cases[3].grants.seals[0].client = Some("10.0.0.2:0/0".to_owned());
    cases[4].grants.seals = vec![good.grants.seals[0].clone(); MAX_SEALS + 1];
    cases[5].cut.push(Client { address: "10.0.0.0/8".into(), ..Client::default() });
    for case in cases {
        let error = read(&case.text().unwrap()).expect_err("read");
        assert!(error.message().contains("invalid values"), "{error:?}");
    }
    let mut largest = good;
    largest.grants.generation = Generation(u64::MAX - 1);
    largest.grants.lowest = Generation(u64::MAX - 1);
    largest.grants.seals = vec![largest.grants.seals[0].clone(); MAX_SEALS];
    largest.grants.seals[0].client = None;
    assert_eq!(read(&largest.text().unwrap()).unwrap(), Some(largest));
}

fn of_node(node: &str, grant: u64) -> Claimant {
    Claimant { node: node.into(), mapping_id: node.into(), grant: Some(grant), ..claimant() }
}

fn beside(last: Option<&Claim>, node: &str, grant: u64) -> Claim {
    by_node(last, node, grant).beside(Mode::ReadOnly).unwrap()
}

fn by_node(last: Option<&Claim>, node: &str, grant: u64) -> Claim {
    let address = format!("10.0.0.1:0/{grant}");
    Claim::next(last, "id".into(), &of_node(node, grant), address, 0, &[])
}

/// A build that does not know them must not claim the image. It may when all of them are released.
#[test]
fn only_a_record_with_shared_claims_has_the_newest_version() {
    let first = beside(None, "a", 1);
    let both = beside(Some(&first), "b", 2);
    let text = both.text().unwrap();
    assert!(text.contains(r#""version":3"#) && text.contains(r#""released":true"#), "{text}");
    assert_eq!(read(&text).unwrap(), Some(both.clone()));
    let record = both.record_as_written();
    let claims: Vec<_> = record.claims.iter().map(|c| (&*c.node, c.generation.0, c.mode)).collect();
    assert_eq!(claims, [("a", 1, Mode::ReadOnly), ("b", 2, Mode::ReadOnly)]);
    assert_eq!((record.generation, record.lowest), (Generation(2), Generation(0)));
    assert!(both.is_shared() && both.is_same(&first) && both.is_same(&both));

    let one = both.without(&first.client).unwrap();
    assert!(one.text().unwrap().contains(r#""version":3"#) && !one.is_same(&first));
    assert_eq!((one.without(&first.client), one.record_as_written().claims.len()), (None, 1));
    let none = one.without(&both.client).unwrap();
    let text = none.text().unwrap();
    assert!(text.contains(r#""version":2"#), "{text}");
    assert_eq!(read(&text).unwrap(), Some(none.clone()));
    // The next claim of a node replaces its last one, and a single writer replaces all of them.
    let again = beside(Some(&none), "a", 3);
    assert_eq!((again.shared.len(), again.active_shared().count()), (2, 1));
    let writer = by_node(Some(&none), "c", 4).beside(Mode::SharedReadWrite);
    assert_eq!(writer.unwrap().shared.len(), 1, "readers do not resume after a writer");
    let alone =
        Claim::after(Some(&none), "id".into(), &of_node("c", 4), "10.0.0.1:0/9".into(), 0, &[]);
    let known = alone.record_as_written();
    assert_eq!((alone.shared.len(), known.claims.len(), known.lowest), (0, 1, Generation(4)));
}

#[test]
fn a_fenced_client_with_a_shared_claim_is_recorded_with_its_details() {
    let both = beside(Some(&beside(None, "a", 1)), "b", 2);
    let target = Target { node: "a".into(), generation: Generation(1), mode: Mode::ReadOnly };
    let cut = ["10.0.0.1:0/1".to_owned()];
    let record = both.record_as_written().seal(&target, Some(cut[0].clone()));
    let next = Claim::next(Some(&both), "id".into(), &claimant(), "10.0.0.3:0/1".into(), 0, &cut);
    let sealed = next.sealed(&record);
    assert_eq!(sealed.cut.iter().map(|client| &*client.node).collect::<Vec<_>>(), ["a"]);
    let known = sealed.record_as_written();
    assert_eq!(known.seals[0].machine.as_deref(), Some("machine"));
    assert_eq!(
        known,
        Record { claims: known.claims.clone(), seals: known.seals.clone(), ..record }
    );
    assert_eq!(known.claims.iter().map(|claim| &*claim.node).collect::<Vec<_>>(), ["b"]);
    assert_eq!(read(&sealed.text().unwrap()).unwrap(), Some(sealed));
}

#[test]
fn the_number_of_shared_claims_is_bounded() {
    let mut last = beside(None, "node-1", 1);
    for grant in 2..=MAX_SHARED as u64 {
        last = beside(Some(&last), &format!("node-{grant}"), grant);
    }
    assert_eq!(read(&last.text().unwrap()).unwrap(), Some(last.clone()));
    assert_eq!(by_node(Some(&last), "more", 90).beside(Mode::ReadOnly), None);
    assert_eq!(beside(Some(&last), "node-7", 91).shared.len(), MAX_SHARED);
    // A claim that is released gives its place away.
    let client = last.shared[3].client.clone();
    let left = last.without(&client).unwrap();
    let next = beside(Some(&left), "more", 90);
    assert!(next.shared.len() == MAX_SHARED && !next.shared.iter().any(|s| s.client == client));
    let mut surplus = next.clone();
    surplus.shared.push(next.shared[0].clone());
    assert!(read(&surplus.text().unwrap()).is_err());
}

#[test]
fn invalid_shared_claims_are_an_error() {
    let good = beside(None, "a", 1);
    let mut cases = vec![good.clone(); 4];
    cases[0].released = false;
    cases[1].shared[0].mode = Mode::ReadWrite;
    cases[2].shared[0].client.node = "a\n".to_owned();
    cases[3].shared[0].client.address = "10.0.0.0/8".to_owned();
    for case in cases {
        let error = read(&case.text().unwrap()).expect_err("read");
        assert!(error.message().contains("invalid values"), "{error:?}");
    }
}

/// Nodes that never return leave clients on the blocklist.
#[test]
fn a_volume_whose_nodes_are_lost_again_and_again_keeps_a_readable_claim() {
    let mut claim = claim();
    for generation in 1..1000 {
        let (node, generation) = (format!("node-{generation}"), Generation(generation));
        let target = Target { node, generation, mode: Mode::ReadWrite };
        let client = Some(format!("[fd00:1234:5678:9abc:def0:1234:5678:9abc]:0/{generation}"));
        let sealed = claim.record_as_written().seal(&target, client);
        claim = claim.sealed(&sealed);
    }
    let text = claim.text().unwrap();
    assert_eq!(read(&text).unwrap(), Some(claim));
}

#[test]
fn texts_are_read_up_to_their_limits() {
    let padded = |length: usize| {
        let text = claim().text().unwrap();
        format!("{text}{}", " ".repeat(length - text.len()))
    };
    assert!(read(&padded(MAX_RECORD)).is_ok());
    let error = read(&padded(MAX_RECORD + 1)).unwrap_err();
    assert!(error.message().contains("too long"), "{error:?}");
    let named = |length| {
        let mut claim = claim();
        claim.client.node = "n".repeat(length);
        read(&claim.text().unwrap())
    };
    assert!(named(MAX_TEXT).is_ok());
    assert!(named(MAX_TEXT + 1).is_err());
    let address = |length: usize| format!("{}:0/7", "1".repeat(length - 4));
    assert!(is_address(&address(MAX_TEXT)));
    assert!(!is_address(&address(MAX_TEXT + 1)));
}

/// A client that had announced a claim and not written it.
#[test]
fn a_fenced_client_without_a_claim_is_described_by_its_announcement() {
    let cut = ["10.0.0.8:0/1".to_owned(), "10.0.0.9:0/1".to_owned()];
    let after = |last: Option<&Claim>, address: &str, cut: &[String]| {
        Claim::after(last, "id".into(), &claimant(), address.into(), 0, cut)
    };
    // The announcement of the first one, which was about to fence the second one.
    let earlier = after(None, &cut[1], &[]);
    let announced = after(Some(&earlier), &cut[0], &cut[1..]);
    let next = after(None, "10.0.0.1:0/7", &cut).with_details(Some(&announced));
    assert_eq!(next.cut, [announced.client.clone(), earlier.client.clone()]);
    // What the client has written itself is not replaced.
    let mut other = announced.clone();
    other.cut[0].node = "another".to_owned();
    let known = after(Some(&earlier), "10.0.0.1:0/7", &cut[1..]).with_details(Some(&other));
    assert_eq!(known.cut, [earlier.client]);
}

#[test]
fn a_claim_stays_the_same_when_it_is_released() {
    let (first, of_first) = (claim(), claim().released());
    let next = Claim::after(Some(&first), "id".into(), &claimant(), "10.0.0.1:0/7".into(), 0, &[]);
    assert!(of_first.released && first.is_same(&of_first) && !first.is_same(&next));
}

#[test]
fn an_address_stands_for_one_client() {
    for address in ["10.0.0.1:0/7", "[fd00::1]:6800/4294967295"] {
        assert!(is_address(address), "{address}");
    }
    for other in [
        "10.0.0.1:0/0",
        "10.0.0.1:0/00",
        "10.0.0.1:6800/0",
        "10.0.0.1:0/",
        "10.0.0.1:0",
        "10.0.0.0/8",
        "10.0.0.1/7",
        "10.0.0.1: 0/7",
        "10.0.0.1:0/7/0",
        "10.0.0.1:0/+7",
        "10.0.0.1:0/-1",
        ":/0",
        "",
    ] {
        assert!(!is_address(other), "{other}");
    }
}

#[test]
fn fenced_clients_are_recorded_with_the_details_of_their_claims() {
    let first = claim();
    let cut = ["10.0.0.1:0/7".to_owned(), "10.0.0.9:0/1".to_owned()];
    let address = "10.0.0.2:0/8".to_owned();
    let mut next = Claim::after(Some(&first), "id".into(), &claimant(), address.clone(), 1, &cut);
    assert_eq!(next.client.generation, 2);
    assert_eq!(next.cut[0], first.client);
    assert_eq!((next.cut[1].generation, next.cut[1].node.as_str()), (0, ""));
    for nonce in 0..40 {
        let cut = [format!("10.0.0.3:0/{nonce}"), cut[0].clone()];
        next = Claim::after(Some(&next), "id".into(), &claimant(), address.clone(), 1, &cut);
    }
    assert_eq!(next.cut.len(), MAX_CUT);
    let again = next.cut.iter().filter(|client| client.address == cut[0]).count();
    assert_eq!((again, next.cut.last().unwrap().address.as_str()), (1, cut[0].as_str()));
    assert!(next.text().unwrap().len() < MAX_RECORD);
}

#[test]
fn a_client_is_described_even_if_its_time_is_invalid() {
    let description = claim().client.describe();
    for part in ["node n1", "mapping m1", "10.0.0.1:0/7", "2023-11-14T22:13:20Z"] {
        assert!(description.contains(part), "{description}");
    }
    let odd = Client { since: u64::MAX, ..Client::default() };
    for part in ["an unnamed node", "an unnamed mapping", "since an unknown time"] {
        assert!(odd.describe().contains(part), "{}", odd.describe());
    }
    let last = Client { since: LAST_SECOND, ..Client::default() };
    assert!(last.describe().contains("since 9999-12-31T23:59:59Z"), "{}", last.describe());
}

proptest! {
    #[test]
    fn reading_and_describing_never_panics(text in ".{0,200}", since: u64) {
        let _ = read(&text);
        let mut odd = claim();
        odd.client.since = since;
        odd.client.node = text;
        if let Ok(Some(read)) = read(&odd.text().unwrap()) {
            read.client.describe();
        }
    }
}
