//! The record: what is read and written, its versions, and its limits.

use cleat_grants::record::Target;
use proptest::prelude::*;

use super::*;

fn claimant() -> Claimant {
    Claimant {
        node: "n1".into(),
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
        (good.replace("\"version\":1", "\"version\":3"), ErrorKind::Unsupported),
        (good.replace("\"cut\":[", &format!("\"cut\":[{many}")), ErrorKind::Internal),
    ] {
        let error = read(&text).expect_err(&text);
        assert_eq!(error.kind(), kind, "{text}");
        assert!(error.repair().unwrap().contains("image-meta remove p/i"), "{error:?}");
    }
}

/// Returns a claim with a grant and a seal.
fn granted() -> Claim {
    let (node, client) = ("n2".to_owned(), Some("10.0.0.2:0/8".to_owned()));
    let seal = Seal { generation: Generation(2), node, client };
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
