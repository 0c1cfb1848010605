//! What this binary is: version, build and features.

/// The output of `--version`, after the name.
pub(super) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("CLEAT_COMMIT"),
    ", ",
    env!("CLEAT_PROFILE"),
    ", ",
    env!("CLEAT_TARGET"),
    ")",
    "\nbuilt with ",
    env!("CLEAT_RUSTC"),
    "\nfeatures: ",
    env!("CLEAT_FEATURES"),
);
