//! Reads the records of the journal.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use super::{Journal, MAX_RECORD, REMOVAL_MARK, file, is_mapping_id};
use crate::planner::Record;
use cleat_core::error::{Error, Result};

/// The content of the journal, as [`Journal::load`] returns it.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The valid records, sorted by name.
    pub records: Vec<Record>,
    /// The ids of records that have a copy, which is newer than the one in the state directory or could not be
    /// removed.
    pub copied: BTreeSet<String>,
    /// The ids of records that are marked as removed and cannot be removed yet.
    pub marked: BTreeSet<String>,
    /// The files that contain no valid record.
    pub rejected: Vec<RejectedRecord>,
}

/// A file of the journal that contains no valid record.
#[derive(Debug)]
pub struct RejectedRecord {
    /// The current path of the file.
    pub path: PathBuf,
    /// The id of the mapping, by the name of the file.
    pub mapping_id: String,
    /// Why this build cannot use the record.
    pub reason: Rejection,
}

/// Why a record was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// A newer build wrote the record; the file was left in place.
    NewerVersion {
        /// The version of the record.
        version: u32,
        /// The name of the mapping, if the record has one.
        name: Option<String>,
    },
    /// The file cannot be read now, for example because of an I/O error or because memory or descriptors are
    /// exhausted; it was left in place. Contains the cause.
    Unreadable(String),
    /// The record is damaged; the file was moved to the quarantine directory. Contains the cause.
    Invalid(String),
}

impl Rejection {
    /// Returns whether the file stays in place, because nothing is wrong with it as far as this build knows.
    fn is_left_in_place(&self) -> bool {
        matches!(self, Self::NewerVersion { .. } | Self::Unreadable(_))
    }
}

impl RejectedRecord {
    /// Returns whether another attempt to read the record may succeed.
    pub fn is_unreadable(&self) -> bool {
        matches!(self.reason, Rejection::Unreadable(_))
    }
}

impl std::fmt::Display for RejectedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path.display();
        match &self.reason {
            Rejection::NewerVersion { version, .. } => write!(
                f,
                "the journal record {path} was left in place and its mapping is not managed: it has \
                 version {version}, and this build reads version {} at most; install the newer build \
                 again",
                Record::VERSION
            ),
            Rejection::Unreadable(cause) => write!(
                f,
                "the journal record {path} was left in place and its mapping is not managed until it can be \
                 read: {cause}"
            ),
            Rejection::Invalid(cause) => {
                write!(f, "a damaged journal record was moved to {path}: {cause}")
            }
        }
    }
}

/// A file of the journal, and the record in it.
struct Found {
    path: PathBuf,
    mapping_id: String,
    record: Result<Record, Rejection>,
}

/// The files of a directory of the journal.
#[derive(Default)]
struct Directory {
    files: Vec<Found>,
    /// The ids of the removal marks.
    marks: BTreeSet<String>,
}

impl Journal {
    /// Reads every record. Removes temporary files of interrupted writes and records that are marked as
    /// removed, and moves damaged records to the quarantine directory. Blocks.
    ///
    /// # Errors
    /// Returns an error if a directory cannot be read.
    pub fn load(&self) -> Result<Loaded> {
        let Directory { files, marks } = self.list(&self.copies)?;
        let mut copies: BTreeMap<String, Found> =
            files.into_iter().map(|found| (found.mapping_id.clone(), found)).collect();
        let mut loaded = Loaded::default();
        for mapping_id in marks {
            copies.remove(&mapping_id);
            let removed = self.remove(&mapping_id).and_then(|()| self.remove_traces(&mapping_id));
            if removed.is_err() {
                loaded.marked.insert(mapping_id);
            }
        }
        for found in self.list(&self.records)?.files {
            if !loaded.marked.contains(&found.mapping_id) {
                let copy = copies.remove(&found.mapping_id);
                self.select(found, copy, &mut loaded);
            }
        }
        for copy in copies.into_values() {
            self.select_copy(copy, &mut loaded);
        }
        loaded.records.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(loaded)
    }

    /// Reads the record of one mapping, as [`Journal::load`] does. Blocks.
    ///
    /// # Errors
    /// Returns an error if `mapping_id` is not the id of a mapping.
    pub fn load_one(&self, mapping_id: &str) -> Result<Loaded> {
        let mut loaded = Loaded::default();
        let stored = self.find(file(&self.records, mapping_id, "json")?);
        let copy = self.find(file(&self.copies, mapping_id, "json")?);
        match (stored, copy) {
            (Some(found), copy) => self.select(found, copy, &mut loaded),
            (None, Some(copy)) => self.select_copy(copy, &mut loaded),
            (None, None) => {}
        }
        Ok(loaded)
    }

    /// Selects the newer one of a record and its copy.
    fn select(&self, stored: Found, copy: Option<Found>, loaded: &mut Loaded) {
        let Found { path, mapping_id, record } = stored;
        match (record, copy) {
            (Ok(record), Some(copy))
                if copy.record.as_ref().is_ok_and(|newest| newest.revision > record.revision) =>
            {
                self.select_copy(copy, loaded);
            }
            // Such a copy may be newer. Both files stay in place.
            (Ok(_), Some(copy)) if copy.record.as_ref().is_err_and(Rejection::is_left_in_place) => {
                self.select_copy(copy, loaded);
            }
            (Ok(record), copy) => {
                // An older copy would have an effect again after the removal of the record.
                if copy.is_some() && self.remove_copy(&mapping_id).is_err() {
                    loaded.copied.insert(mapping_id);
                }
                loaded.records.push(record);
            }
            (Err(reason), copy) => {
                let stays = reason.is_left_in_place();
                self.reject(path, mapping_id, reason, loaded);
                // A record that is left in place may be newer than its copy.
                if let Some(copy) = copy.filter(|_| !stays) {
                    self.select_copy(copy, loaded);
                }
            }
        }
    }

    fn select_copy(&self, copy: Found, loaded: &mut Loaded) {
        let Found { path, mapping_id, record } = copy;
        match record {
            Ok(record) => {
                loaded.copied.insert(mapping_id);
                loaded.records.push(record);
            }
            Err(reason) => self.reject(path, mapping_id, reason, loaded),
        }
    }

    fn reject(&self, path: PathBuf, mapping_id: String, reason: Rejection, loaded: &mut Loaded) {
        let path = if reason.is_left_in_place() { path } else { self.quarantine(&path) };
        loaded.rejected.push(RejectedRecord { path, mapping_id, reason });
    }

    /// Reads all files of a directory.
    fn list(&self, directory: &Path) -> Result<Directory> {
        let paths = self.disk.list(directory).map_err(|error| {
            Error::from_io(format!("cannot read the journal {}", directory.display()), error)
                .with_repair(format!("check the disk of {}: see dmesg", directory.display()))
        })?;
        let mut found = Directory::default();
        for path in paths {
            match path.extension().and_then(|extension| extension.to_str()) {
                // A crash interrupted this write: the record that it was to replace is still valid.
                Some("tmp") => {
                    let _ = self.disk.remove(&path);
                }
                Some(REMOVAL_MARK) => {
                    found.marks.insert(stem(&path).to_owned());
                }
                _ => found.files.extend(self.find(path)),
            }
        }
        Ok(found)
    }

    /// Reads the file at `path`; returns `None` if there is none.
    fn find(&self, path: PathBuf) -> Option<Found> {
        let mapping_id = stem(&path).to_owned();
        let record = match self.disk.read(&path, MAX_RECORD + 1) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            // Nothing is known about the content.
            Err(error) => Err(Rejection::Unreadable(error.to_string())),
            Ok(text) => check_record(text, &mapping_id),
        };
        Some(Found { path, mapping_id, record })
    }

    /// Moves a file to the quarantine directory and returns its path, which is the old one if the file
    /// system refuses the move.
    fn quarantine(&self, path: &Path) -> PathBuf {
        let name = path.file_name().unwrap_or_default();
        let quarantined = self.quarantine.join(name);
        match self.disk.rename(path, &quarantined) {
            Ok(()) => quarantined,
            Err(_) => path.to_owned(),
        }
    }
}

fn stem(path: &Path) -> &str {
    path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
}

fn check_record(text: Vec<u8>, mapping_id: &str) -> Result<Record, Rejection> {
    if text.len() as u64 > MAX_RECORD {
        return Err(Rejection::Invalid(format!("it is longer than {MAX_RECORD} bytes")));
    }
    let text = String::from_utf8(text).map_err(|error| Rejection::Invalid(error.to_string()))?;
    parse_record(&text, mapping_id)
}

/// Parses and checks the record of the mapping `mapping_id`.
fn parse_record(text: &str, mapping_id: &str) -> Result<Record, Rejection> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        version: u64,
        /// Any value: only the version says what the other fields of a newer record mean.
        #[serde(default)]
        name: serde_json::Value,
    }
    let malformed = |error: serde_json::Error| Rejection::Invalid(error.to_string());
    let invalid = |cause: &str| Err(Rejection::Invalid(cause.to_owned()));
    // The version comes first: the record of another version may have other fields.
    let Versioned { version, name } = serde_json::from_str(text).map_err(malformed)?;
    if version > u64::from(Record::VERSION) {
        let version = u32::try_from(version).unwrap_or(u32::MAX);
        return Err(Rejection::NewerVersion { version, name: name.as_str().map(str::to_owned) });
    }
    if version != u64::from(Record::VERSION) {
        return invalid(&format!("version {version} does not exist"));
    }
    let record: Record = serde_json::from_str(text).map_err(malformed)?;
    if mapping_id != record.mapping_id || !is_mapping_id(mapping_id) {
        return invalid("it contains the id of another mapping");
    }
    if !crate::api::validate::is_name(&record.name) || record.options.connections == 0 {
        return invalid("its name or its number of connections is invalid");
    }
    Ok(record)
}

/// Parses the record of the mapping `mapping_id` and returns it as the journal writes it. For the fuzz
/// target.
///
/// # Errors
/// Returns the reason if `text` is not a valid record.
#[cfg(feature = "fuzz")]
pub fn reprint_record(text: &str, mapping_id: &str) -> Result<Vec<u8>, String> {
    let record = parse_record(text, mapping_id).map_err(|rejection| format!("{rejection:?}"))?;
    serde_json::to_vec_pretty(&record).map_err(|error| error.to_string())
}
