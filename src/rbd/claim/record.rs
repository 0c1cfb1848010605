//! The claim as it stands in the image's metadata under [`KEY`]: JSON that everybody who may write to
//! the image can change, so it is checked like any input. Fields are only added; unknown ones are passed
//! over when reading, and lost with the next claim.

use serde::{Deserialize, Serialize};

use cleat_backend::claimant::{Claimant, ProcessMark};
use cleat_core::error::{Error, ErrorKind, Result};

/// The metadata key.
pub(crate) const KEY: &str = "cleat.claim";

/// Where a claim is announced: what is about to be written under [`KEY`] once the lock is ours.
pub(crate) const ANNOUNCED: &str = "cleat.claim.next";

/// Raised when a field changes its meaning.
const VERSION: u32 = 1;

/// The longest record that is read, in bytes.
const MAX_RECORD: usize = 64 << 10;

/// The longest text in it, in bytes.
const MAX_TEXT: usize = 256;

/// Clients that were cut off and are remembered, so that it can be judged when they may come back.
const MAX_CUT: usize = 16;

/// Who writes to an image, or did last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    version: u32,
    /// The image's id: clones and copies inherit metadata, but no claim.
    image: String,
    #[serde(flatten)]
    pub(crate) client: Client,
    /// It has let go in order: nothing of it can be under way.
    #[serde(default)]
    pub(crate) released: bool,
    /// Who was cut off before, oldest first.
    #[serde(default)]
    pub(crate) cut: Vec<Client>,
}

/// A client of the cluster, and for whom it wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Client {
    pub(crate) node: String,
    /// What the node's name stands for, where that is known: see `sys::machine`.
    pub(crate) machine: String,
    pub(crate) boot_id: String,
    pub(crate) mapping_id: String,
    pub(crate) process: Option<ProcessMark>,
    /// Raised by one with every claim of the image; 0: it made none.
    pub(crate) generation: u64,
    /// As the cluster knows it: what a blocklist takes.
    pub(crate) address: String,
    /// Seconds since the epoch.
    pub(crate) since: u64,
}

impl Claim {
    /// What the metadata say of the image `id`, for errors called `name`. A claim of another image, of
    /// which this one is a copy, is none.
    pub(crate) fn read(text: Option<&str>, id: &str, name: &str) -> Result<Option<Self>> {
        let Some(text) = text else { return Ok(None) };
        let wrong = |kind, why: &str| {
            let message = format!("the claim of {name} (image metadata {KEY}) {why}");
            Error::new(kind, message).with_repair(format!(
                "find out who uses the image (rbd status {name}); when nobody does: rbd image-meta \
                 remove {name} {KEY}"
            ))
        };
        let garbage = |why: &str| wrong(ErrorKind::Internal, why);
        if text.len() > MAX_RECORD {
            return Err(garbage("is too long"));
        }
        let mut claim: Self = serde_json::from_str(text)
            .map_err(|error| garbage("cannot be understood").with_source(error))?;
        if claim.version > VERSION {
            return Err(wrong(ErrorKind::Unsupported, "was made by a newer version of cleat"));
        }
        claim.cut.drain(..claim.cut.len().saturating_sub(MAX_CUT));
        let clients = || std::iter::once(&claim.client).chain(&claim.cut);
        if claim.client.generation == u64::MAX || !clients().all(Client::is_plausible) {
            return Err(garbage("has values in it that no claim can have"));
        }
        Ok((claim.image == id).then_some(claim))
    }

    /// The claim that follows `last`, whose clients in `cut` were cut off.
    pub(crate) fn after(
        last: Option<&Self>,
        image: String,
        claimant: &Claimant,
        address: String,
        since: u64,
        cut: &[String],
    ) -> Self {
        let mut known = last.map_or_else(Vec::new, |last| last.cut.clone());
        for address in cut {
            let named = last.map(|last| &last.client).filter(|client| client.address == *address);
            let unnamed = || Client { address: address.clone(), since, ..Client::default() };
            known.retain(|client| client.address != *address);
            known.push(named.cloned().unwrap_or_else(unnamed));
        }
        known.drain(..known.len().saturating_sub(MAX_CUT));
        let client = Client {
            node: claimant.node.clone(),
            machine: claimant.machine.clone(),
            boot_id: claimant.boot_id.clone(),
            mapping_id: claimant.mapping_id.clone(),
            process: claimant.process,
            // The bound was checked when it was read.
            generation: last.map_or(0, |last| last.client.generation) + 1,
            address,
            since,
        };
        Self { version: VERSION, image, client, released: false, cut: known }
    }

    /// As it is written.
    pub(crate) fn text(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| {
            Error::new(ErrorKind::Internal, "a claim cannot be written as JSON").with_source(error)
        })
    }

    /// The same, given up.
    pub(crate) fn released(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// Whether it is the same claim, released or not.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.client == other.client
    }
}

impl Client {
    fn is_plausible(&self) -> bool {
        let plain = |text: &str| text.len() <= MAX_TEXT && !text.chars().any(char::is_control);
        let texts = [&self.node, &self.machine, &self.boot_id, &self.mapping_id];
        texts.into_iter().all(|text| plain(text)) && is_address(&self.address)
    }

    /// For people: who it is, where, and since when.
    pub(crate) fn describe(&self) -> String {
        let named = |what: &str, name: &str| match name {
            "" => format!("an unnamed {what}"),
            name => format!("the {what} {name}"),
        };
        let (node, mapping) = (named("node", &self.node), named("mapping", &self.mapping_id));
        let since = std::time::UNIX_EPOCH.checked_add(std::time::Duration::from_secs(self.since));
        let since = since.filter(|_| self.since <= LAST_SECOND);
        let since = since.map_or_else(
            || "an unknown time".to_owned(),
            |since| humantime::format_rfc3339_seconds(since).to_string(),
        );
        format!("{node} ({mapping}, client {}, since {since})", self.address)
    }
}

/// The end of the year 9999, beyond which times cannot be written.
const LAST_SECOND: u64 = 253_402_300_799;

/// Whether the monitors can be asked about `text` as a client's address: IP:PORT/NONCE.
pub(crate) fn is_address(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"[]:./".contains(&byte);
    text.len() <= MAX_TEXT && text.contains('/') && text.bytes().all(plain)
}

#[cfg(test)]
mod tests {
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
    fn a_claim_is_read_as_it_was_written_whatever_was_added_to_it() {
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
    fn what_is_no_claim_is_an_error_with_a_repair() {
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
            (good.replace("\"version\":1", "\"version\":2"), ErrorKind::Unsupported),
            (good.replace("\"cut\":[", &format!("\"cut\":[{many}")), ErrorKind::Internal),
        ] {
            let error = read(&text).expect_err(&text);
            assert_eq!(error.kind(), kind, "{text}");
            assert!(error.repair().unwrap().contains("image-meta remove p/i"), "{error:?}");
        }
    }

    #[test]
    fn who_was_cut_off_is_remembered_with_what_is_known_of_it() {
        let first = claim();
        let cut = ["10.0.0.1:0/7".to_owned(), "10.0.0.9:0/1".to_owned()];
        let address = "10.0.0.2:0/8".to_owned();
        let mut next =
            Claim::after(Some(&first), "id".into(), &claimant(), address.clone(), 1, &cut);
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
    fn a_client_is_described_for_people_whatever_its_clock_said() {
        let told = claim().client.describe();
        for part in ["node n1", "mapping m1", "10.0.0.1:0/7", "2023-11-14T22:13:20Z"] {
            assert!(told.contains(part), "{told}");
        }
        let odd = Client { since: u64::MAX, ..Client::default() };
        assert!(odd.describe().contains("unnamed node"), "{}", odd.describe());
    }

    proptest! {
        #[test]
        fn nothing_that_is_read_panics(text in ".{0,200}", since: u64) {
            let _ = read(&text);
            let mut odd = claim();
            odd.client.since = since;
            odd.client.node = text;
            if let Ok(Some(read)) = read(&odd.text().unwrap()) {
                read.client.describe();
            }
        }
    }
}
