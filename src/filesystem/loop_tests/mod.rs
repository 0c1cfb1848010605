//! Tests on loop devices of this machine. They need root.

mod contents;
mod disk;
mod hanging;
mod lifecycle;
mod mounts;
mod signatures;
