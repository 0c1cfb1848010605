//! Fuzz targets: one function for each parser of bytes that cleat did not write itself.
//!
//! - Input: arbitrary bytes.
//! - Output: nothing, or a panic that names the violated property.
//!
//! A target checks more than the absence of panics: the split of a byte stream does not matter, a parsed value
//! is printed and parsed again to the same value, and accepted values are inside their bounds. [`run`] also
//! checks, for every target, that the input bounds the allocated memory.
//!
//! The same functions run under libFuzzer (`fuzz_targets/`, nightly) and in `tests/fuzz.rs`
//! (stable). `cleat_fuzz` is for tests only; nothing depends on it.

mod claim_record;
mod handshake;
mod journal_record;
mod kernel_files;
mod object_headers;
mod pieces;
mod structured_replies;
mod transmission;
mod volume_uri;
mod worker_messages;

use peak_alloc::PeakAlloc;

/// Counts the heap of the process, so that [`run`] can compare it with the length of the input.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The heap that a target may allocate for any input, in bytes: fixed buffers of parsers and of the target
/// itself.
const HEAP_FIXED: usize = 256 << 10;

/// The heap that a target may allocate for each byte of its input, in bytes.
const HEAP_PER_BYTE: usize = 256;

/// A target's name, and the function that checks one input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target. The name is that of the binary, of the corpus directory and of the smoke test.
pub const TARGETS: &[Target] = &[
    ("handshake", handshake::check),
    ("transmission", transmission::check),
    ("structured_replies", structured_replies::check),
    ("kernel_files", kernel_files::check),
    ("volume_uri", volume_uri::check),
    ("journal_record", journal_record::check),
    ("worker_messages", worker_messages::check),
    ("claim_record", claim_record::check),
    ("object_headers", object_headers::check),
];

/// Runs the target `name` on `data`, and checks the memory that it allocates. Other threads must not allocate
/// at the same time.
///
/// # Panics
/// Panics if a property is violated, or if no target has that name.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, check) = target.unwrap_or_else(|| panic!("there is no fuzz target {name}"));
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    check(data);
    let taken = HEAP.peak_usage().saturating_sub(before);
    let allowed = HEAP_FIXED + HEAP_PER_BYTE * data.len();
    assert!(taken <= allowed, "{taken} bytes of memory for {} bytes of input", data.len());
}
