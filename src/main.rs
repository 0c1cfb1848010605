//! The `cleat` binary.

fn main() {}
