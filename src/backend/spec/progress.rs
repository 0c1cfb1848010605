//! The progress of long operations.

use std::ops::ControlFlow;

/// Receives the progress of an operation several times a second: the amount that is done and the total,
/// in units of the operation, both zero until they are known. The operation stops if it returns `Break`.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;
