//! Raw declarations of what cleat uses of librados and librbd, looked up at run time.
//!
//! Nothing of Ceph is needed to build, and a binary that never opens an RBD image never touches the
//! libraries. [`api`] loads them once and gives the [`Api`]: a table of function pointers, the
//! required ones as such, the newer ones as `Option`. What is missing is told with the package or
//! the version that has it.
//!
//! Comes in: nothing. Goes out: types, constants and pointers as the headers of Ceph have them
//! (`rados/librados.h`, `rbd/librbd.h`; `tests/headers.rs` compares them). What may never happen
//! here: a call, or a decision.
#![allow(unsafe_code, reason = "the declarations of a C library")]

mod load;
mod table;
mod types;

pub use load::{Api, LoadError, api, load};
pub use table::{Librados, Librbd, Symbol};
pub use types::*;
