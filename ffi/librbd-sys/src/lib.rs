//! Raw declarations of the functions of librados and librbd that cleat uses. They are loaded at run time.
//!
//! Building needs nothing of Ceph, and a binary that never opens an RBD image never loads the libraries.
//! [`api`] loads them once and returns the [`Api`]: tables of function pointers, in which functions of
//! newer versions are an `Option`. The error for a missing library or function names the package or the
//! version that has it.
//!
//! Output: types, constants and pointers as in the headers of Ceph (`rados/librados.h`, `rbd/librbd.h`;
//! `tests/headers.rs` compares them). This crate calls none of the functions and makes no decision.
#![allow(unsafe_code, reason = "the declarations of a C library")]

mod load;
mod table;
mod types;

pub use load::{Api, LoadError, api, load};
pub use table::{Librados, Librbd, Symbol};
pub use types::*;
