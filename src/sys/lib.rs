//! The only crate, besides those in `ffi/`, where `unsafe` is allowed: the ring, its buffers, shared memory,
//! and the ioctls and prctls that no crate wraps.
//!
//! The interface takes and returns safe Rust values that own their resources. The crate makes no policy
//! decisions, and it is independent of NBD, volumes and backends.
#![allow(unsafe_code)]

pub mod block;
pub mod buffer;
pub mod descriptor;
#[cfg(any(test, feature = "escape-attempts"))]
pub mod escape_attempts;
pub mod file_window;
pub mod host;
pub mod memory_limit;
pub mod memory_lock;
pub mod page_cache;
pub mod page_pipe;
pub mod process;
pub mod ring;
pub mod send_list;
pub mod seqpacket;
pub mod shared;
pub mod swap;
pub mod volume_id;
pub mod words;

/// Has the processor load what is at an address into its cache. Nothing happens if nothing is there.
fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is a hint, which is valid for all addresses.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
